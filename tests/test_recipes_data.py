"""What the recipe makes of a dataset: nothing held out is trained on, and what cannot be used is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from training_recipes import retrieval_task


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
