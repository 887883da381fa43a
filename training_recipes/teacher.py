"""What a dense encoder can teach: negatives that are hard, and scores to distil."""

from __future__ import annotations

from collections import Counter

from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives

from training_recipes.bm25 import DEPTH, rank

MARGIN = 0.05  # a document that scores above 95 % of the positive may well be an answer too
BATCH = 64


def mine_negatives(train: Dataset, teacher: SentenceTransformer, count: int) -> Dataset:
    """Add to every row the documents that the teacher ranks highest below its positive, as `negative_1` and so on.

    Candidates are the positives of the training rows. Rows for which fewer than `count` are found are left out.
    """
    most = max(Counter(train["query"]).values())  # positives of one query
    depth = min(
        10 * count + most, len(set(train["positive"])) - most
    )  # version 5.3 fails where it looks beyond the end
    if depth < count:
        raise ValueError(f"{len(train)} rows are too few to mine {count} negatives among them; lower --num_negatives")
    mined = mine_hard_negatives(
        train,
        teacher,
        anchor_column_name="query",
        positive_column_name="positive",
        range_max=depth,
        relative_margin=MARGIN,
        num_negatives=count,
        sampling_strategy="top",
        output_format="n-tuple",
        batch_size=BATCH,
        verbose=False,
    )
    if not len(mined):
        raise ValueError(
            f"no row has {count} documents that the teacher ranks below its positive; lower --num_negatives"
        )
    return mined


def add_scores(train: Dataset, teacher: SentenceTransformer) -> Dataset:
    """Add the column `scores`: what the teacher and BM25, half each, think of a row's documents, positive first.

    Both are moved to [0, 1] within the row before they are mixed, as their scales have nothing in common. A document
    that BM25 does not rank among its best gets BM25's 0.
    """
    columns = [list(train[column]) for column in train.column_names[1:]]
    documents = list(dict.fromkeys(text for column in columns for text in column))
    place = {text: number for number, text in enumerate(documents)}
    queries = list(train["query"])
    found = rank(queries, documents, DEPTH + len(columns))
    of_queries = teacher.encode_query(queries, batch_size=BATCH, show_progress_bar=True, normalize_embeddings=True)
    of_documents = teacher.encode_document(
        documents, batch_size=BATCH, show_progress_bar=True, normalize_embeddings=True
    )
    scores = []
    for query, hits, *texts in zip(of_queries, map(dict, found), *columns, strict=True):
        places = [place[text] for text in texts]
        dense = spread_out([float(query @ of_documents[number]) for number in places])
        lexical = spread_out([hits.get(number, 0.0) for number in places])
        scores.append([(one + other) / 2 for one, other in zip(dense, lexical, strict=True)])
    return train.add_column("scores", scores)


def spread_out(scores: list[float]) -> list[float]:
    """Move scores to [0, 1], the lowest to 0 and the highest to 1."""
    low, high = min(scores), max(scores)
    return [(score - low) / (high - low) if high > low else 0.0 for score in scores]
