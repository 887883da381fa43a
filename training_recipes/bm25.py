"""BM25 twice: the ranking that a trained model has to beat, and the negatives that two of the losses need."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import bm25s
from datasets import Dataset

DEPTH = 20  # candidates per query among which negatives are looked for, besides their number
SAME_DOCUMENT = 0.8  # Jaccard overlap of words from which a candidate counts as another copy of the positive


def rank(queries: list[str], documents: list[str], k: int) -> list[list[tuple[int, float]]]:
    """Return, for each query, the numbers and BM25 scores (bm25s, its defaults) of its k best documents."""
    words = bm25s.tokenize(documents, show_progress=False)
    if not words.vocab:  # no document has a word of two letters that says something
        return [[(number, 0.0) for number in range(min(k, len(documents)))] for _ in queries]
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    numbers, scores = index.retrieve(
        bm25s.tokenize(queries, show_progress=False), k=min(k, len(documents)), show_progress=False
    )
    return [list(zip(*row, strict=True)) for row in zip(numbers.tolist(), scores.tolist(), strict=True)]


def best_hits(queries: list[str], corpus: dict[str, str]) -> list[list[dict[str, Any]]]:
    """Return the ten best documents of each query in the form that the evaluators' `compute_metrics` takes."""
    ids = list(corpus)
    return [
        [{"corpus_id": ids[number], "score": score} for number, score in row]
        for row in rank(queries, list(corpus.values()), k=10)
    ]


def add_negatives(train: Dataset, count: int = 1) -> Dataset:
    """Add to every row the best BM25 documents that do not answer its query, as `negative_1` and so on.

    Candidates are the positives of the training rows themselves, nothing that is held out. Skipped are the row's own
    positive, the positives of rows with the same query or label, and copies of the positive (`SAME_DOCUMENT`).
    """
    queries, positives = list(train["query"]), list(train["positive"])
    documents = list(dict.fromkeys(positives))
    answers = [answers_by(train, column) for column in ("query", "label") if column in train.column_names]

    negatives: list[list[str]] = []
    ranking = rank(queries, documents, DEPTH + count)
    for query, positive, ranked, *right in zip(queries, positives, ranking, *answers, strict=True):
        # Where BM25 has nothing left, any other document will do.
        candidates = chain((documents[number] for number, _ in ranked), documents)
        wrong = dict.fromkeys(text for text in candidates if not any(text in known for known in right))
        found = list(islice((text for text in wrong if overlap(text, positive) < SAME_DOCUMENT), count))
        if len(found) < count:
            raise ValueError(
                f"{len(found)} of {count} negatives found for {query!r}: all other training documents are like its "
                "positive; lower --num_negatives"
            )
        negatives.append(found)
    for number, column in enumerate(zip(*negatives, strict=True), start=1):
        train = train.add_column(f"negative_{number}", list(column))
    return train


def answers_by(train: Dataset, column: str) -> list[set[str]]:
    """Return for each row the positives of all rows with the same value in a column."""
    values, found = list(train[column]), {}
    for value, positive in zip(values, train["positive"], strict=True):
        found.setdefault(value, set()).add(positive)
    return [found[value] for value in values]


def overlap(first: str, second: str) -> float:
    """Return the share of distinct words that two texts have in common (Jaccard)."""
    one, other = set(first.lower().split()), set(second.lower().split())
    return len(one & other) / max(1, len(one | other))
