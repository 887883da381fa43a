"""What a recipe trains and is measured on: training rows, two sets of queries with judgements, one corpus for all.

Documents are texts or page images, whatever the dataset holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Image, get_dataset_config_names, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from training_recipes.columns import is_image, with_our_columns
from training_recipes.stdlib_docstrings import load_pairs

EMBEDDED = {
    "stdlib": "Python standard library docstrings",
    "stdlib-pages": "Python standard library docstrings as page images, queried as in training",
}
DEV_SPLITS = ("dev", "validation", "eval")
HELD_OUT_SHARE, HELD_OUT_QUERIES = 0.1, 500  # per held-out split, where a dataset brings none: a tenth, at most 500


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
        train: Columns `query`, `positive` and, where the data has them, `negative...`, `scores` and `label`, in this
            order.
        dev: Queries for tuning and for the training curve.
        test: Queries for the closing comparison; nothing is chosen by them.
        corpus: Texts or images by document id; texts shortest first, so that neighbours need little padding.
        pages: Whether documents are page images.
    """

    name: str
    train: Dataset
    dev: HeldOut
    test: HeldOut
    corpus: dict[str, Any]
    pages: bool


def load_task(
    name: str | None,
    *,
    seed: int,
    max_train_pairs: int | None = None,
    max_queries: int | None = None,
    max_documents: int | None = None,
    num_negatives: int | None = None,
) -> RetrievalTask:
    """Load an embedded task, or any dataset of pairs or triplets.

    Args:
        name: `stdlib` or None, `stdlib-pages`; else a Hub id (`user/name` or `user/name:config`), a folder, or a csv,
            json, jsonl or parquet file. Rows need a column named query, anchor or question and one named positive,
            document, image or answer; columns whose names start with negative are kept, lists in them spread, and
            `scores` and `label`.
        seed: Decides which queries are held out where the dataset has no test or dev split.
        max_train_pairs: Train on the first so many rows.
        max_queries: Evaluate the first so many queries of each held-out split.
        max_documents: Retrieve from so many documents; those relevant to a held-out query are always among them.
        num_negatives: Keep the first so many negatives of each row.

    Raises:
        ValueError: A column is missing or cannot be used, or a split is empty.
    """
    name = name or "stdlib"
    splits = embedded_splits(name) if name in EMBEDDED else named_splits(name, seed, num_negatives)
    for part, rows in splits.items():
        if not len(rows):
            raise ValueError(f"the {part} split of {name!r} is empty; every split needs rows")
    train = splits["train"].take(min(max_train_pairs or len(splits["train"]), len(splits["train"])))
    dev, test = (first_queries(splits[part], max_queries) for part in ("dev", "test"))

    documents = dict(documents_of(test, "positive")) | dict(documents_of(dev, "positive"))
    for key, document in (
        pair
        for rows in splits.values()
        for column in rows.column_names
        if column.startswith(("positive", "negative"))
        for pair in documents_of(rows, column)
    ):
        if max_documents is not None and len(documents) >= max_documents:
            break
        documents.setdefault(key, document)
    pages = is_image(train, "positive")
    keys = list(documents) if pages else sorted(documents, key=lambda text: (len(text), text))
    ids = {key: f"d{number}" for number, key in enumerate(keys)}
    corpus = {ids[key]: documents[key] for key in keys}
    return RetrievalTask(EMBEDDED.get(name, name), train, held_out(dev, ids), held_out(test, ids), corpus, pages)


def embedded_splits(name: str) -> dict[str, Dataset]:
    """Return one of the tasks that need no download, one dataset per split."""
    if name == "stdlib-pages":  # too few to learn to read from: what is asked is whether they are learnt by heart
        from training_recipes.stdlib_pages import load_pages

        return dict.fromkeys(("train", "dev", "test"), load_pages())
    return {
        part: Dataset.from_list(
            [{"query": pair.query, "positive": pair.document} for pair in load_pairs() if pair.split == part]
        )
        for part in ("train", "dev", "test")
    }


def named_splits(name: str, seed: int, num_negatives: int | None) -> dict[str, Dataset]:
    """Load a dataset by name; hold out queries for dev and test where it has no such splits."""
    loaded = read_dataset(name)
    if {"query_id", "document_ids", "scores"} <= set(next(iter(loaded.values())).column_names):
        loaded = with_texts(loaded, name)
    loaded = DatasetDict({part: with_our_columns(rows, name, num_negatives) for part, rows in loaded.items()})
    train = loaded.get("train", next(iter(loaded.values())))
    dev = next((loaded[part] for part in DEV_SPLITS if part in loaded), None)
    test = loaded.get("test")
    if test is None and dev is not None:  # the only held-out split is for the comparison
        test, dev = dev, None
    parts = {"test": test, "dev": dev}
    missing = [part for part, rows in parts.items() if rows is None]
    if missing and (queries := len(set(train["query"]))) <= len(missing):
        raise ValueError(
            f"dataset {name!r} has {queries} different queries, too few to hold some out for {' and '.join(missing)}; "
            f"give it at least {len(missing) + 1}"
        )
    for part in missing:
        train, parts[part] = hold_out(train, seed)
    return {"train": train, **parts}


def hold_out(rows: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Split off a tenth of the queries, each with all its rows: a query with several positives stays on one side."""
    places: dict[str, list[int]] = {}
    for place, query in enumerate(rows["query"]):
        places.setdefault(query, []).append(place)
    count = min(HELD_OUT_QUERIES, max(1, int(len(places) * HELD_OUT_SHARE)))
    sides = Dataset.from_dict({"places": list(places.values())}).train_test_split(count, seed=seed)
    kept, held = (rows.select(list(chain.from_iterable(sides[side]["places"]))) for side in ("train", "test"))
    return kept, held


def first_queries(rows: Dataset, count: int | None) -> Dataset:
    """Keep all rows of the first so many queries."""
    kept = set(islice(dict.fromkeys(rows["query"]), count))
    return rows.select([place for place, query in enumerate(rows["query"]) if query in kept])


def read_dataset(name: str, config: str | None = None) -> DatasetDict:
    """Load all splits of a file, a folder (also one that `save_to_disk` wrote) or a Hub id."""
    path = Path(name)
    if path.is_file():
        try:
            return load_dataset({"jsonl": "json"}.get(path.suffix[1:], path.suffix[1:]), data_files=name)
        except (ValueError, StopIteration, DatasetGenerationError) as error:
            reason = str(error.__cause__ or error) or "no rows"
            raise ValueError(f"file {name!r} is empty, or not what its ending says ({reason})") from None
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        try:
            saved = load_from_disk(name)
        except IndexError:  # what `datasets` makes of a folder without rows
            raise ValueError(f"dataset {name!r} is empty; it needs at least 3 rows") from None
        return saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)
    if all((path / part).is_dir() for part in DISTILLATION_PARTS):
        return read_dataset(str(path / "train"))
    hub_id, _, named = name.partition(":")
    if not (config or named) and not path.is_dir() and {*DISTILLATION_PARTS} <= {*get_dataset_config_names(hub_id)}:
        named = "train"
    return load_dataset(hub_id, config or named or None)


DISTILLATION_PARTS = ("train", "queries", "documents")  # rows of ids, and the texts


def with_texts(loaded: DatasetDict, name: str) -> DatasetDict:
    """Put texts in place of the ids of a distillation set: the document that the teacher likes best is the positive.

    Such a set holds rows of `query_id`, `document_ids` and `scores`, and its texts in the parts `queries` and
    `documents` (`query_id` or `document_id`, `text`), as PyLate's examples use it.
    """
    texts = {}
    for part, key in (("queries", "query_id"), ("documents", "document_id")):
        rows = next(iter(read_dataset(str(Path(name, part)) if Path(name).is_dir() else name, part).values()))
        texts[part] = rows["text"], {str(number): place for place, number in enumerate(rows[key])}

    def look_up(part: str, number: Any) -> str:
        column, places = texts[part]
        return column[places[str(number)]]

    def resolve(query_id: Any, document_ids: list[Any], scores: list[float]) -> dict[str, Any]:
        ranked = sorted(zip(scores, document_ids, strict=True), key=lambda pair: -pair[0])
        documents = [look_up("documents", number) for _, number in ranked]
        best, *others = documents
        scores = [score for score, _ in ranked]
        return {"query": look_up("queries", query_id), "positive": best, "negatives": others, "scores": scores}

    return DatasetDict(
        {
            part: rows.map(
                resolve, input_columns=["query_id", "document_ids", "scores"], remove_columns=rows.column_names
            )
            for part, rows in loaded.items()
        }
    )


def documents_of(rows: Dataset, column: str) -> Iterator[tuple[str, Any]]:
    """Yield the documents of a column, each after what tells it from others: the text itself, or a file's digest."""
    if not is_image(rows, column):
        yield from ((text, text) for text in rows[column])
        return
    from PIL import Image as Picture

    for row in rows.select_columns([column]).cast_column(column, Image(decode=False)):
        data = row[column]["bytes"] or Path(row[column]["path"]).read_bytes()
        yield hashlib.sha1(data, usedforsecurity=False).hexdigest(), Picture.open(BytesIO(data))  # decoded when used


def held_out(rows: Dataset, ids: dict[str, str]) -> HeldOut:
    """Turn rows into queries and judgements; equal queries share one entry and all their positives."""
    relevant: dict[str, set[str]] = {}
    for query, (key, _) in zip(rows["query"], documents_of(rows, "positive"), strict=True):
        relevant.setdefault(query, set()).add(ids[key])
    numbered = {f"q{number}": query for number, query in enumerate(relevant)}
    return HeldOut(numbered, {number: relevant[query] for number, query in numbered.items()})


def load_judged(name: str, *, max_queries: int | None = None, max_documents: int | None = None) -> RetrievalTask:
    """Load a set of queries, documents and judgements in the layout of BEIR, as which most benchmarks are published.

    Args:
        name: A Hub id, or a folder, with the configurations (or files) `corpus`, `queries` and `qrels`; columns are
            found under the names in use, such as `_id`, `corpus-id` or `corpus_id`.
        max_queries: Keep the first so many judged queries.
        max_documents: Keep so many documents, the relevant ones first.

    Raises:
        ValueError: A part or a column is missing.
    """
    parts = {part: judged_part(name, part) for part in ("queries", "corpus", "qrels")}
    relevant: dict[str, set[str]] = {}
    ids = [column_of(parts["qrels"], name, *names) for names in (QUERY_IDS, DOCUMENT_IDS)]
    for row in parts["qrels"]:
        if row.get("score", 1) > 0:
            relevant.setdefault(str(row[ids[0]]), set()).add(str(row[ids[1]]))
    key, text = column_of(parts["queries"], name, *IDS, *QUERY_IDS), column_of(parts["queries"], name, "text", "query")
    found = ((str(row[key]), row[text]) for row in parts["queries"] if str(row[key]) in relevant)
    queries = dict(islice(found, max_queries))
    relevant = {number: relevant[number] for number in queries}

    rows = parts["corpus"]
    key, content = column_of(rows, name, *IDS, *DOCUMENT_IDS), column_of(rows, name, "text", "image")
    wanted = set().union(*relevant.values())
    others = [str(number) for number in rows[key] if str(number) not in wanted]
    kept = wanted | set(others[: max(0, max_documents - len(wanted))] if max_documents else others)
    titles = rows["title"] if "title" in rows.column_names and content == "text" else [""] * len(rows)
    documents = zip(rows[key], titles, (document for _, document in documents_of(rows, content)), strict=True)
    corpus = {
        str(number): f"{title} {document}".strip() if content == "text" else document
        for number, title, document in documents
        if str(number) in kept
    }
    if not queries or not corpus:
        raise ValueError(f"dataset {name!r} has {len(queries)} judged queries and {len(corpus)} documents; needs both")
    held = HeldOut(queries, relevant)
    return RetrievalTask(name, Dataset.from_dict({}), held, held, corpus, content == "image")


def has_judgements(name: str) -> bool:
    """Tell whether a folder or a Hub id is in the layout that `load_judged` reads."""
    if name in EMBEDDED or Path(name).is_file():
        return False
    if Path(name).is_dir():
        return any(Path(name).glob("qrels*"))
    return {"corpus", "queries"} <= set(get_dataset_config_names(name))


IDS = ("_id", "id")
QUERY_IDS, DOCUMENT_IDS = ("query-id", "query_id"), ("corpus-id", "corpus_id", "document_id", "doc_id")


def judged_part(name: str, part: str) -> Dataset:
    """Load the queries, the corpus or the judgements of a set in the layout of BEIR."""
    files = [file for pattern in (f"{part}.*", f"{part}/*") for file in sorted(Path(name).glob(pattern))]
    if files:
        kind = {"jsonl": "json", "tsv": "csv"}.get(files[0].suffix[1:], files[0].suffix[1:])
        options = {"delimiter": "\t"} if files[0].suffix == ".tsv" else {}
        return load_dataset(kind, data_files={"test": list(map(str, files))}, split="test", **options)
    if part == "qrels" and part not in get_dataset_config_names(name):
        part = "default"
    splits = read_dataset(name, part)
    return splits.get("test", next(iter(splits.values())))


def column_of(rows: Dataset, name: str, *names: str) -> str:
    """Return the first of some names that a column has."""
    for column in names:
        if column in rows.column_names:
            return column
    raise ValueError(f"dataset {name!r} has the columns {', '.join(rows.column_names)}; expected {' or '.join(names)}")
