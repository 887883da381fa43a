"""The columns of a dataset of pairs: found under the names in use, checked, renamed, and in the losses' order."""

from __future__ import annotations

import re
from typing import Any

from datasets import Dataset, Image, Value

QUERY_COLUMNS = ("query", "anchor", "question")
POSITIVE_COLUMNS = ("positive", "document", "image", "answer")


def with_our_columns(rows: Dataset, name: str, num_negatives: int | None) -> Dataset:
    """Select, check and rename the columns: PyLate goes by names, the losses by order.

    Args:
        rows: A split of a dataset.
        name: What the dataset is called in errors.
        num_negatives: Keep the first so many negatives of each row.

    Returns:
        The columns `query`, `positive` and, where there are such, `negative...`, `scores` and `label`; rows without a
        query or a text are left out.

    Raises:
        ValueError: A column is missing, or does not hold what it must.
    """
    query = next((column for column in QUERY_COLUMNS if column in rows.column_names), None)
    positive = next((column for column in POSITIVE_COLUMNS if column in rows.column_names), None)
    if query is None or positive is None:
        raise ValueError(
            f"dataset {name!r} has the columns {', '.join(rows.column_names) or 'none'}; expected one of "
            f"{'/'.join(QUERY_COLUMNS)}, one of {'/'.join(POSITIVE_COLUMNS)} and optionally negative..."
        )
    negatives = [column for column in rows.column_names if column.startswith("negative")]
    others = [column for column in ("scores", "label") if column in rows.column_names]
    rows = rows.select_columns([query, positive, *negatives, *others])
    check_kinds(rows, name, query, positive)
    rows = rows.rename_columns({query: "query", positive: "positive"} | {column: column for column in negatives})
    texts = ["query"] if is_image(rows, "positive") else ["query", "positive"]
    rows = rows.filter(lambda *values: all(values), input_columns=texts)

    check_complete(rows, name, ["positive", *negatives, *others])
    lists = [column for column in negatives if is_list(rows.features[column])]
    if "scores" in others:
        check_scores(rows, name, lists, len(negatives) - len(lists))
    for column in lists:
        if len(rows):
            rows = spread(rows, column, name, num_negatives)
    kept = [column for column in rows.column_names if column.startswith("negative")][:num_negatives]
    check_complete(rows, name, kept)
    if "scores" in others:  # of the documents that stay
        rows = rows.map(lambda given: {"scores": given[: 1 + len(kept)]}, input_columns="scores")
    return rows.select_columns(["query", "positive", *kept, *others])


def spread(rows: Dataset, column: str, name: str, count: int | None) -> Dataset:
    """Turn a column of lists into numbered columns: sentence-transformers 6 takes one document per column."""
    shortest = min(map(len, rows[column]))
    if shortest < (count or 1):
        raise ValueError(
            f"column {column!r} of dataset {name!r} has rows with {shortest} negatives; lower --num_negatives or drop "
            "those rows"
        )
    names = [f"negative_{number}" for number in range(1, (count or shortest) + 1)]
    return rows.map(
        lambda values: dict(zip(names, values, strict=False)), input_columns=[column], remove_columns=[column]
    )


def check_kinds(rows: Dataset, name: str, query: str, positive: str) -> None:
    """Refuse columns of a wrong kind; one without any value is of none."""
    for column, feature in rows.features.items():
        kind, inner = kind_of(feature), kind_of(element(feature))
        if column == query:
            fits, expected = kind == "string", "texts"
        elif column == positive:
            fits, expected = kind in ("string", "image"), "texts or images, one a row"
        elif column == "scores":
            fits, expected = is_list(feature) and inner in ("int", "float"), "a list of numbers a row"
        elif column == "label":
            fits, expected = kind == "int", "integers (rows with the same one are no negatives of each other)"
        else:
            fits, expected = inner in ("string", "image"), "texts or images, or lists of them"
        if not fits and inner != "null":
            found = feature.dtype if isinstance(feature, Value) else feature
            raise ValueError(f"column {column!r} of dataset {name!r} holds {found}; expected {expected}; convert it")


def check_complete(rows: Dataset, name: str, columns: list[str]) -> None:
    """Refuse columns in which some rows have no value."""
    for column in columns:
        batches = rows.select_columns([column]).with_format("arrow").iter(1000)
        if missing := sum(batch[column].null_count for batch in batches):
            raise ValueError(
                f"column {column!r} of dataset {name!r} has no value in {missing} of {len(rows)} rows; drop those rows"
            )


def check_scores(rows: Dataset, name: str, lists: list[str], others: int) -> None:
    """Refuse scores that are not one for each document of a row: its positive and its negatives."""
    for number, (scores, *negatives) in enumerate(zip(*(rows[column] for column in ["scores", *lists]), strict=True)):
        documents = 1 + others + sum(map(len, negatives))
        if len(scores) != documents or None in scores:
            raise ValueError(
                f"row {number} of dataset {name!r} has {len(scores)} scores for {documents} documents; expected a "
                "number for each, the positive's first"
            )


def is_image(rows: Dataset, column: str) -> bool:
    """Tell whether a column holds images."""
    return isinstance(rows.features[column], Image)


def is_list(feature: Any) -> bool:
    """Tell whether a column holds lists."""
    return element(feature) is not feature


def element(feature: Any) -> Any:
    """Return of what the lists of a column are, or the feature itself if it holds none."""
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)


def kind_of(feature: Any) -> str:
    """Return image, string, int, float, null, or the name of another type."""
    if isinstance(feature, Image):
        return "image"
    return re.sub(r"^large_|^u(?=int)|\d+$", "", str(getattr(feature, "dtype", type(feature).__name__)))
