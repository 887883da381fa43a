"""What a loss refuses: missing columns, rows that do not fit, other labels, models that cannot be replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from st_colbert_losses.tokens import Tokens


def check_model(owner: str, model: nn.Module) -> None:
    """Refuse wrappers that split a batch behind the loss's back.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    if any(isinstance(wrapper, nn.DataParallel) for wrapper in _wrappers(model)):
        raise ValueError(
            f"{owner}: got a model in DataParallel, expected DistributedDataParallel or none: one process with many "
            "GPUs. Start one process per GPU with 'accelerate launch' or 'torchrun', or show it one GPU with "
            "CUDA_VISIBLE_DEVICES=0."
        )
    if any(_is_a("FullyShardedDataParallel", wrapper) for wrapper in _wrappers(model)):
        raise ValueError(
            f"{owner}: got a model in FullyShardedDataParallel, the first FSDP, expected the second or DDP: it hides "
            "what the model is. Use torch.distributed.fsdp.fully_shard, 'fsdp_version: 2' in accelerate's config."
        )


def check_features(owner: str, sentence_features: object) -> list[dict[str, Any]]:
    """Read the columns once, each into a dict of its own.

    Raises:
        ValueError: If they are no iterable of feature dicts.
    """
    got = type(sentence_features).__name__
    if isinstance(sentence_features, Iterable) and not isinstance(sentence_features, (Mapping, Tensor, str)):
        columns = list(sentence_features)
        if all(isinstance(column, Mapping) for column in columns):
            return [dict(column) for column in columns]
        got += " of " + ", ".join(sorted({type(column).__name__ for column in columns}))
    raise ValueError(
        f"{owner}: got {got}, expected one feature dict per column, as a trainer's collator makes them: "
        "[query, positive, ...]. Embeddings go into from_tokens."
    )


def check_tokens(owner: str, queries: object, documents: object) -> list[Tokens]:
    """Refuse what are no token embeddings, or of other dimensions than each other.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    listed = documents if isinstance(documents, (list, tuple)) else None
    tokens = [t for t in (queries, *(listed or ())) if isinstance(t, Tokens)]
    if listed is None or len(tokens) < 1 + len(listed):
        of = type(documents).__name__ if listed is None else [type(t).__name__ for t in listed]
        raise ValueError(
            f"{owner}: got queries of type {type(queries).__name__} and documents {of}, expected Tokens and a list of "
            "Tokens, one per document column. Write from_tokens(Tokens(queries), [Tokens(positives)])."
        )
    dimensions = [t.vectors.shape[-1] for t in tokens]
    if len(set(dimensions)) > 1:
        raise ValueError(
            f"{owner}: got embeddings of {dimensions} dimensions, expected the same for queries and all documents. "
            "Encode them with one model."
        )
    return tokens


def check_row_losses(owner: str, losses: object, rows: int) -> Tensor:
    """Refuse an objective's result that is not one loss per query.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    if not isinstance(losses, Tensor) or losses.shape != (rows,):
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"{owner}: got {got} from the objective, expected a tensor of {rows} losses, one per query. Leave the "
            "mean to the loss."
        )
    return losses


def check_columns(owner: str, columns: int, explicit_negatives: bool) -> None:
    """Refuse a batch without positives, or without the explicit negatives that the loss is about.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    names = ["a query", "a positive", "at least one negative"][: 3 if explicit_negatives else 2]
    if columns >= len(names):
        return
    remedy = "Add the missing column to the dataset"
    if columns == 2:
        remedy += ", or use a loss without explicit negatives: ColbertLoss or ColbertPairwiseCELoss"
    raise ValueError(f"{owner}: got {columns} column(s), expected {' + '.join(names)}. {remedy}.")


def check_rows(owner: str, rows: Sequence[int]) -> None:
    """Refuse columns whose numbers of rows do not fit: B queries, B positives, n * B negatives per column.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    b, *documents = rows
    if b == 0:
        raise ValueError(f"{owner}: got 0 queries, expected at least 1. Leave empty batches out.")
    for i, found in enumerate(documents, start=1):
        if found == b or (i > 1 and found and found % b == 0):
            continue
        expected = f"{b}, one positive per query" if i == 1 else f"{b}, or n * {b} for n negatives per row"
        remedy = (
            "Put one positive in column 1 and negatives in further columns"
            if i == 1
            else "Give every row the same number of negatives, row by row"
        )
        raise ValueError(f"{owner}: got {found} rows in column {i} for {b} queries, expected {expected}. {remedy}.")


def check_processes(owner: str, rows: Sequence[Sequence[int]]) -> list[int]:
    """Refuse processes whose batches have other columns; all of them do, so that none waits for the others.

    Args:
        owner: The name of the loss.
        rows: The rows of each column, of each process.

    Returns:
        The queries of each process.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    per_row = [tuple(n // b for n in documents) for b, *documents in rows]
    if len(set(per_row)) > 1:
        raise ValueError(
            f"{owner}: got processes with {per_row} documents per row and column, expected the same for all. Give "
            "every process the same dataset, or set gather_across_devices=False."
        )
    return [b for b, *_ in rows]


def check_labels(owner: str, labels: Tensor | None, rows: int) -> None:
    """Refuse labels that are not one integer per row.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    if labels is None:
        return
    if isinstance(labels, Tensor):
        integer = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
        if integer and labels.shape == (rows,):
            return
        got = f"{str(labels.dtype).removeprefix('torch.')} labels of shape {tuple(labels.shape)}"
    else:
        got = f"labels of type {type(labels).__name__}"
    raise ValueError(
        f"{owner}: got {got}, expected a tensor of {rows} integers, one per row. Labels mark rows that are no "
        "negatives of each other; a teacher's scores of each row's documents are for ColbertDistillationLoss; remove "
        "a 'label' or 'score' column that means anything else."
    )


def check_teacher_scores(owner: str, scores: object, rows: int, documents: int) -> Tensor:
    """Refuse what is no score by a teacher for each document of each row.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    if isinstance(scores, Tensor):
        if scores.shape == (rows, documents) and not scores.is_complex() and scores.dtype != torch.bool:
            # Looking at values on a GPU waits for it.
            if scores.device.type != "cpu" or bool(scores.isfinite().all()):
                return scores.detach()
            got = "scores that are not finite"
        else:
            got = f"{str(scores.dtype).removeprefix('torch.')} labels of shape {tuple(scores.shape)}"
    else:
        got = "no labels" if scores is None else f"labels of type {type(scores).__name__}"
    raise ValueError(
        f"{owner}: got {got}, expected a teacher's scores, ({rows}, {documents}): one number for each of a row's "
        f"{documents} documents, the positive's first. Put them into a column 'label' or 'scores', a list per row."
    )


def check_replay(owner: str, model: nn.Module) -> None:
    """Refuse what gradient caching cannot train: a model that is encoded twice a step, the second time in backward.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    if not torch.is_grad_enabled():
        return
    needs = "needs the gradient of every parameter whole, in one backward"
    if _is_sharded(model):
        raise ValueError(
            f"{owner}: got a model under fully_shard (FSDP2), expected DDP or one process: gradient caching {needs}. "
            "Use DDP, or the loss without caching, which works with FSDP2."
        )
    for wrapper in _wrappers(model):
        stage = getattr(wrapper, "zero_optimization_stage", None)
        if callable(stage) and stage() >= 2:
            raise ValueError(
                f"{owner}: got a DeepSpeed model with ZeRO stage {stage()}, expected stage 0 or 1: gradient caching "
                f"{needs}. Use DDP, or the loss without caching."
            )
        if isinstance(wrapper, DistributedDataParallel):
            if wrapper.static_graph:
                raise ValueError(
                    f"{owner}: got DistributedDataParallel with static_graph=True, expected False: a step encodes as "
                    "many mini-batches as its rows need. Leave static_graph out."
                )
            if wrapper.broadcast_buffers and any(True for _ in wrapper.module.buffers()):
                raise ValueError(
                    f"{owner}: got DistributedDataParallel with broadcast_buffers=True, expected False: processes "
                    "encode different numbers of mini-batches and would wait for each other. Pass "
                    "broadcast_buffers=False, as the trainers do."
                )


def check_trainable(
    owner: str, model: nn.Module, features: Sequence[Mapping[str, Any]], own: Iterable[nn.Parameter]
) -> None:
    """Refuse to train a model that is frozen, unless inputs or the loss's own parameters need a gradient.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    inputs = (value for column in features for value in column.values() if isinstance(value, Tensor))
    if any(t.requires_grad for t in chain(model.parameters(), inputs, own)):
        return
    if parameters := sum(1 for _ in model.parameters()):
        raise ValueError(
            f"{owner}: got a model none of whose {parameters} parameters needs a gradient, expected at least "
            "one. Were all frozen, or adapters loaded for inference (PEFT: is_trainable=True)? Call "
            "model.requires_grad_(True), or compute the loss under torch.no_grad()."
        )


def check_memory(owner: str, model: nn.Module, follows: bool) -> None:
    """Refuse models whose optimizer steps cannot be followed.

    Args:
        owner: The name of the loss.
        model: The model.
        follows: Whether a momentum encoder is to follow it.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    for wrapper in _wrappers(model):
        stage = getattr(wrapper, "zero_optimization_stage", None)
        if callable(stage) and stage() >= 1:
            raise ValueError(
                f"{owner}: got a DeepSpeed model with ZeRO stage {stage()}, expected no ZeRO: its optimizer steps on "
                "partitions that the momentum encoder cannot follow. Use DDP, or a loss without queue."
            )
    if follows and _is_sharded(model):
        raise ValueError(
            f"{owner}: got a model under fully_shard (FSDP2), expected whole parameters, as the momentum encoder has. "
            "Use DDP, or momentum=None."
        )


def _is_a(name: str, module: Any) -> bool:
    """By the name of a class, as to import the classes costs all who do not use them."""
    return any(cls.__name__ == name for cls in type(module).__mro__)


def _is_sharded(model: nn.Module) -> bool:
    return any(_is_a("FSDPModule", module) for module in model.modules())


def _wrappers(model: Any) -> list[Any]:
    """The model and what it wraps, from the outside in."""
    found = [model]
    while (inner := getattr(found[-1], "_orig_mod", getattr(found[-1], "module", None))) is not None:
        found.append(inner)
    return found
