"""What the recipe makes of a dataset: nothing held out is trained on, and what cannot be used is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from training_recipes import bm25, retrieval_task


def task_of(rows: list[dict], folder: Path, **limits) -> retrieval_task.RetrievalTask:
    """Load rows as a user's file."""
    Dataset.from_list(rows).to_json(folder / "rows.jsonl")
    return retrieval_task.load_task(str(folder / "rows.jsonl"), seed=42, **limits)


# What is held out


def test_a_query_is_on_one_side_with_all_its_positives(tmp_path: Path):
    rows = [{"query": f"q{n // 4}", "positive": f"d{n} of q{n // 4}"} for n in range(200)]
    task = task_of(rows, tmp_path, max_queries=3)
    for held in (task.dev, task.test):
        assert len(held.queries) == 3
        for number, query in held.queries.items():
            answers = {task.corpus[document] for document in held.relevant[number]}
            assert answers == {row["positive"] for row in rows if row["query"] == query}
    sides = [set(task.train["query"]), set(task.dev.queries.values()), set(task.test.queries.values())]
    assert len(set.union(*sides)) == sum(map(len, sides))
    assert len(task.train) == 200 - 5 * 4 - 4 * 4  # a tenth of 50 queries, then of 45


def test_queries_of_one_positive_are_held_out_as_rows_were(tmp_path: Path):
    """The same rows in the same order as `train_test_split` draws them."""
    rows = [{"query": f"q{n}", "positive": f"d{n}"} for n in range(60)]
    task = task_of(rows, tmp_path)
    once = Dataset.from_list(rows).train_test_split(6, seed=42)
    twice = once["train"].train_test_split(5, seed=42)
    assert list(task.test.queries.values()) == list(once["test"]["query"])
    assert list(task.dev.queries.values()) == list(twice["test"]["query"])
    assert list(task.train["query"]) == list(twice["train"]["query"])


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_queries_to_hold_some_out(count: int, tmp_path: Path):
    rows = [{"query": f"q{n % count}", "positive": f"d{n}"} for n in range(5)]
    with pytest.raises(ValueError, match=f"has {count} different queries, too few .* at least 3"):
        task_of(rows, tmp_path)


def test_three_queries_are_enough(tmp_path: Path):
    task = task_of([{"query": f"q{n}", "positive": f"d{n}"} for n in range(3)], tmp_path)
    assert [len(task.train), len(task.dev.queries), len(task.test.queries)] == [1, 1, 1]


# What cannot be used


def pairs(count: int = 9, **columns: list) -> list[dict]:
    """Rows of a query and its positive, and of further columns that are repeated."""
    given = {name: values * count for name, values in columns.items()}
    return [
        {"query": f"query {n}", "positive": f"document {n}"} | {name: values[n] for name, values in given.items()}
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"query": [7]}, "column 'query' .* int64; expected texts"),
        ({"positive": [["a", "b"]]}, "column 'positive' .* expected texts or images, one a row"),
        ({"negative": [1.5]}, "column 'negative' .* float64; expected texts or images, or lists"),
        ({"negative": ["a", None, "b"]}, "column 'negative' .* no value in 3 of 9 rows"),
        ({"negatives": [["a"], None, ["b"]]}, "column 'negatives' .* no value in 3 of 9 rows"),
        ({"negatives": [["a", "c"], [None, "d"], ["b", "e"]]}, "column 'negative_1' .* no value in 3 of 9 rows"),
        ({"negative": ["a"], "negative_2": ["b"], "scores": [[2.0, 1.0]]}, "row 0 .* 2 scores for 3 documents"),
        ({"negatives": [["a", "b"]], "scores": [[3, 2, 1], [2, 1]]}, "row 1 .* 2 scores for 3 documents"),
        ({"scores": [0.5]}, "column 'scores' .* expected a list of numbers"),
        ({"label": ["animal"]}, "column 'label' .* string; expected integers"),
        ({"label": [0.5]}, "column 'label' .* float64; expected integers"),
        ({"label": [True]}, "column 'label' .* bool; expected integers"),
        ({"label": [1, None, 2]}, "column 'label' .* no value in 3 of 9 rows"),
    ],
)
def test_columns_that_cannot_be_used(columns: dict[str, list], complaint: str, tmp_path: Path):
    with pytest.raises(ValueError, match=complaint):
        task_of(pairs(**columns), tmp_path)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "json"])
def test_a_file_with_nothing_in_it(ending: str, tmp_path: Path):
    (tmp_path / f"rows.{ending}").touch()
    with pytest.raises(ValueError, match="is empty"):
        retrieval_task.load_task(str(tmp_path / f"rows.{ending}"), seed=0)


# Labels


def test_labels_are_kept_beside_everything_else(tmp_path: Path):
    task = task_of(pairs(negative=["wrong"], scores=[[2.0, 1.0]], label=[3, 4, 5]), tmp_path)
    assert task.train.column_names == ["query", "positive", "negative", "scores", "label"]
    for row in task.train:
        assert row["label"] == 3 + int(row["query"].removeprefix("query ")) % 3


def test_labels_decide_what_is_a_negative(tmp_path: Path):
    """With one label for all rows, no document is a negative of another row's query, and BM25 finds none."""
    Dataset.from_list(pairs(label=[1])).to_json(tmp_path / "rows.jsonl")
    train = retrieval_task.load_task(str(tmp_path / "rows.jsonl"), seed=42).train
    with pytest.raises(ValueError, match="0 of 1 negatives"):
        bm25.add_negatives(train)
    labels = [n // 4 for n in range(len(train))]
    rows = bm25.add_negatives(train.remove_columns("label").add_column("label", labels))
    of = dict(zip(rows["positive"], labels, strict=True))
    assert all(of[row["negative_1"]] != row["label"] for row in rows)


# The negatives


def test_negatives_are_other_training_documents():
    splits = retrieval_task.embedded_splits("stdlib")
    rows = bm25.add_negatives(splits["train"])
    assert rows.column_names == ["query", "positive", "negative_1"]
    known = set(rows["positive"])
    for row in rows:
        assert row["negative_1"] in known
        assert bm25.overlap(row["negative_1"], row["positive"]) < bm25.SAME_DOCUMENT


def test_negatives_skip_copies_and_other_answers_to_the_query():
    rows = Dataset.from_dict(
        {
            "query": ["red apple", "red apple", "red apple pie", "blue sky"],
            "positive": ["red apple one", "a red apple two", "red apple one pie", "blue sky three"],
        }
    )
    negatives = bm25.add_negatives(rows)["negative_1"]
    assert negatives[0] not in ("red apple one", "a red apple two")
    assert negatives[1] not in ("red apple one", "a red apple two")


def test_documents_without_a_word():
    """BM25 leaves single letters and words like "the" out: nothing is better than anything else."""
    assert bm25.rank(["red apple", "a"], ["a", "b", "the c"], k=2) == [[(0, 0.0), (1, 0.0)]] * 2


def test_negatives_of_documents_all_alike_are_refused():
    rows = Dataset.from_dict({"query": ["one", "two"], "positive": ["the same text", "the same text"]})
    with pytest.raises(ValueError, match="0 of 1 negatives found"):
        bm25.add_negatives(rows)
