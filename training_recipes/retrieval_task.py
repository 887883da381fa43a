"""What a recipe trains and is measured on: training pairs, two sets of held-out queries, one corpus for them all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset

from training_recipes.stdlib_docstrings import load_pairs

EMBEDDED = "Python standard library docstrings"
QUERY_COLUMNS = ("query", "anchor", "question")
POSITIVE_COLUMNS = ("positive", "document", "answer")
DEV_SPLITS = ("dev", "validation", "eval")
HELD_OUT_SHARE, HELD_OUT_ROWS = 0.1, 500  # per held-out split, where a dataset brings none: a tenth, at most 500


@dataclass(frozen=True)
class HeldOut:
    """Held-out queries by their id, and the ids of the documents that are relevant to each."""

    queries: dict[str, str]
    relevant: dict[str, set[str]]


@dataclass(frozen=True)
class RetrievalTask:
    """A dataset ready to train on and to retrieve from.

    Attributes:
        name: What the model card calls it.
        train: Columns `query`, `positive` and, where the data has them, `negative...`, in this order.
        dev: Queries for tuning and for the training curve.
        test: Queries for the closing comparison; nothing is chosen by them.
        corpus: Texts by document id, shortest first: neighbours are of like length, so little is padded.
    """

    name: str
    train: Dataset
    dev: HeldOut
    test: HeldOut
    corpus: dict[str, str]


def load_task(
    name: str | None,
    *,
    seed: int,
    max_train_pairs: int | None = None,
    max_queries: int | None = None,
    max_documents: int | None = None,
) -> RetrievalTask:
    """Load the embedded task, or any dataset of pairs or triplets.

    Args:
        name: `stdlib` or None for the embedded task; else a Hub id (`user/name` or `user/name:config`), a folder, or a
            csv, json, jsonl or parquet file. Rows need a column named query, anchor or question and one named
            positive, document or answer; columns whose names start with negative are kept.
        seed: Decides which rows are held out where the dataset has no test or dev split.
        max_train_pairs: Train on the first so many rows.
        max_queries: Evaluate the first so many queries of each held-out split.
        max_documents: Retrieve from so many documents; those relevant to a held-out query are always among them.

    Raises:
        ValueError: A column is missing, or a split is empty.
    """
    name = name or "stdlib"
    splits = embedded_splits() if name == "stdlib" else named_splits(name, seed)
    for part, rows in splits.items():
        if not len(rows):
            raise ValueError(f"the {part} split of {name!r} is empty; every split needs rows")
    train = splits["train"].take(min(max_train_pairs or len(splits["train"]), len(splits["train"])))
    dev, test = (rows.take(min(max_queries or len(rows), len(rows))) for rows in (splits["dev"], splits["test"]))

    relevant = list(dict.fromkeys([*test["positive"], *dev["positive"]]))
    documents = dict.fromkeys(relevant)
    for rows in splits.values():
        for column in rows.column_names[1:]:
            documents.update(dict.fromkeys(rows[column]))
    kept = list(documents)[: max(max_documents, len(relevant)) if max_documents else None]
    ids = {text: f"d{number}" for number, text in enumerate(sorted(kept, key=lambda text: (len(text), text)))}
    corpus = {number: text for text, number in ids.items()}
    return RetrievalTask(
        EMBEDDED if name == "stdlib" else name, train, held_out(dev, ids), held_out(test, ids), corpus
    )


def embedded_splits() -> dict[str, Dataset]:
    """Return the docstring pairs of `stdlib_docstrings`, one dataset per split."""
    return {
        part: Dataset.from_list(
            [{"query": pair.query, "positive": pair.document} for pair in load_pairs() if pair.split == part]
        )
        for part in ("train", "dev", "test")
    }


def named_splits(name: str, seed: int) -> dict[str, Dataset]:
    """Load a dataset by name; hold out rows for dev and test where it has no such splits."""
    path = Path(name)
    if path.is_file():
        kind = {"jsonl": "json"}.get(path.suffix[1:], path.suffix[1:])
        loaded = load_dataset(kind, data_files=name)
    else:
        hub_id, _, config = name.partition(":")
        loaded = load_dataset(hub_id, config or None)
    loaded = DatasetDict({part: with_our_columns(rows, name) for part, rows in loaded.items()})

    train = loaded.get("train", next(iter(loaded.values())))
    dev = next((loaded[part] for part in DEV_SPLITS if part in loaded), None)
    test = loaded.get("test")
    if test is None and dev is not None:  # the only held-out split is for the comparison
        test, dev = dev, None
    parts = {"test": test, "dev": dev}
    for part, rows in parts.items():
        if rows is None and len(train) > 2:
            share = train.train_test_split(min(HELD_OUT_ROWS, max(1, int(len(train) * HELD_OUT_SHARE))), seed=seed)
            train, parts[part] = share["train"], share["test"]
        elif rows is None:
            raise ValueError(f"dataset {name!r} has {len(train)} rows, too few to hold some out; give it at least 3")
    return {"train": train, **parts}


def with_our_columns(rows: Dataset, name: str) -> Dataset:
    """Select and rename the columns: PyLate goes by names, the losses by order."""
    query = next((column for column in QUERY_COLUMNS if column in rows.column_names), None)
    positive = next((column for column in POSITIVE_COLUMNS if column in rows.column_names), None)
    if query is None or positive is None:
        raise ValueError(
            f"dataset {name!r} has the columns {', '.join(rows.column_names) or 'none'}; expected one of "
            f"{'/'.join(QUERY_COLUMNS)}, one of {'/'.join(POSITIVE_COLUMNS)} and optionally negative..."
        )
    negatives = [column for column in rows.column_names if column.startswith("negative")]
    return (
        rows.select_columns([query, positive, *negatives])
        .rename_columns({query: "query", positive: "positive"} | {column: column for column in negatives})
        .filter(lambda row: bool(row["query"]) and bool(row["positive"]))
    )


def held_out(rows: Dataset, ids: dict[str, str]) -> HeldOut:
    """Turn rows into queries and judgements; equal queries share one entry and all their positives."""
    relevant: dict[str, set[str]] = {}
    for query, positive in zip(rows["query"], rows["positive"], strict=True):
        relevant.setdefault(query, set()).add(ids[positive])
    numbered = {f"q{number}": query for number, query in enumerate(relevant)}
    return HeldOut(numbered, {number: relevant[query] for number, query in numbered.items()})
