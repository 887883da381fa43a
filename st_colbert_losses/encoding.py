"""From features to token embeddings: the only module that knows the model worlds.

PyLate's ``ColBERT`` and sentence-transformers' ``MultiVectorEncoder`` are told apart by the names of their classes, so
neither library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from st_colbert_losses.features import VALUES, own_features
from st_colbert_losses.tokens import Tokens


def embed(model: nn.Module, features: Mapping[str, Any], is_query: bool) -> Tokens:
    """Token embeddings of one column and the mask of the tokens that are scored.

    - PyLate ``ColBERT``: L2-normalised here. Queries score every position with ``do_query_expansion``, else the
      attended ones; documents score the attended positions whose id is not in ``skiplist``.
    - ``MultiVectorEncoder``: as returned, called with ``task="query"`` or ``"document"``.
    - any other module: as returned in ``token_embeddings`` and ``attention_mask``.

    The features are never changed.
    """
    # A dict of its own, and ids and masks of its own: modules write into both.
    features = {
        key: value.clone() if isinstance(value, Tensor) and not _is_large(key, value) else value
        for key, value in own_features(features).items()
    }
    bare = unwrap(model)
    world = world_of(bare)
    if world == "multi_vector_encoder":
        output = model(features, task="query" if is_query else "document")
        return _tokens(bare, output)
    if world == "plain":
        return _tokens(bare, model(features))
    ids, attended = features["input_ids"].clone(), features["attention_mask"].bool()
    vectors = F.normalize(model(features)["token_embeddings"], p=2, dim=-1)
    if not is_query:
        mask = attended & ~torch.isin(ids, torch.tensor(bare.skiplist, dtype=ids.dtype, device=ids.device))
    elif bare.do_query_expansion:
        mask = torch.ones_like(attended)
    else:
        mask = attended
    return Tokens(vectors, mask)


def _is_large(key: str, value: Tensor) -> bool:
    """Whether it is pixels, sound or vectors, which are not worth a copy as no module writes into them."""
    return key in VALUES or (value.is_floating_point() and value.ndim > 2)


def needed_positions(model: nn.Module, features: Mapping[str, Any], is_query: bool) -> Tensor | None:
    """Which positions of a column are attended or scored, so that the others may be cut off.

    Returns:
        (B, T) bool, or ``None`` where it is not known before the model has run.
    """
    bare, attended = unwrap(model), features.get("attention_mask")
    world = world_of(bare)
    if world == "plain" or not isinstance(attended, Tensor) or attended.ndim != 2:
        return None
    needed = attended.bool()
    if is_query and world == "pylate" and bare.do_query_expansion:
        return torch.ones_like(needed)
    expansion = features.get("query_expansion_positions")
    return needed | expansion.bool() if isinstance(expansion, Tensor) else needed


def _tokens(bare: nn.Module, output: Any) -> Tokens:
    try:
        vectors, mask = output["token_embeddings"], output["attention_mask"]
    except (KeyError, TypeError, IndexError):
        got = f"a dict with {sorted(output)}" if isinstance(output, Mapping) else type(output).__name__
        raise ValueError(
            f"{type(bare).__name__}: got {got} from its forward, expected a dict with 'token_embeddings' (B, T, D) "
            "and 'attention_mask' (B, T). Pass a PyLate ColBERT, a MultiVectorEncoder, or a module that returns both."
        ) from None
    return Tokens(vectors, mask)


def world_of(bare: nn.Module) -> Literal["pylate", "multi_vector_encoder", "plain"]:
    """Which library an unwrapped model comes from."""
    for cls in type(bare).__mro__:
        if cls.__name__ == "ColBERT" and cls.__module__.startswith("pylate."):
            return "pylate"
        if cls.__name__ == "MultiVectorEncoder" and cls.__module__.startswith("sentence_transformers."):
            return "multi_vector_encoder"
    return "plain"


def unwrap(model: nn.Module) -> Any:
    """The model inside wrappers of DDP, DeepSpeed and torch.compile, in any nesting; read attributes there."""
    bare: Any = model
    while True:
        if isinstance(bare, nn.parallel.DistributedDataParallel) or type(bare).__name__ == "DeepSpeedEngine":
            bare = bare.module
        elif hasattr(bare, "_orig_mod"):
            bare = bare._orig_mod
        else:
            return bare


def role_of(model: nn.Module, features: Mapping[str, Any]) -> Literal["query", "document"] | None:
    """As what PyLate's collator tokenised a column, for it goes by the column's name and not its place.

    Returns:
        ``None`` where it cannot be told.
    """
    bare = unwrap(model)
    if world_of(bare) != "pylate":
        return None
    ids: Tensor = features["input_ids"]
    document, query = bare.document_prefix_id, bare.query_prefix_id
    if document is None or query is None or document == query or ids.shape[1] < 2 or not len(ids):
        return None
    if bool((ids[:, 1] == document).all()):
        return "document"
    return "query" if bool((ids[:, 1] == query).all()) else None
