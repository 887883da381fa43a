"""What a dense encoder can teach: negatives that are hard, found by `mine_hard_negatives` of sentence-transformers."""

from __future__ import annotations

from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives

MARGIN = 0.05  # a document that scores above 95 % of the positive may well be an answer too


def mine_negatives(train: Dataset, teacher: SentenceTransformer, count: int) -> Dataset:
    """Add to every row the documents that the teacher ranks highest below its positive, as `negative_1` and so on.

    Candidates are the positives of the training rows. Rows for which fewer than `count` are found are left out.
    """
    mined = mine_hard_negatives(
        train,
        teacher,
        anchor_column_name="query",
        positive_column_name="positive",
        relative_margin=MARGIN,
        num_negatives=count,
        sampling_strategy="top",
        output_format="n-tuple",
        verbose=False,
    )
    if not len(mined):
        raise ValueError(
            f"no row has {count} documents that the teacher ranks below its positive; lower --num_negatives"
        )
    return mined
