"""Gradient caching: a column is encoded in mini-batches that keep their embeddings only, and again in backward.

Each mini-batch is one ``torch.utils.checkpoint`` around the encoder. The first pass stores inputs, embeddings and the
state of the random generators; backward runs the mini-batch again, under the same random state and autocast, and goes
through it. What results is one graph with one ``backward()``, so that loss scaling, accumulation, several forwards
before a backward and wrappers need no code here. (``torch.autograd.grad`` would pass the mini-batches by, and is
refused.) The last mini-batch keeps its activations, as its turn in backward comes first: those of one mini-batch are
in memory at a time all the same.

References:
    Gao et al. (2021), Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup,
    https://arxiv.org/abs/2101.06983; Chen et al. (2016), https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm

from st_colbert_losses.encoding import embed, needed_positions
from st_colbert_losses.features import count_rows, row_bounds, select_rows
from st_colbert_losses.tokens import Tokens


def embed_in_mini_batches(
    model: nn.Module,
    columns: Sequence[Mapping[str, Any]],
    first: int = 0,
    *,
    mini_batch_size: int | None,
    mini_batch_num_tokens: int | None,
    show_progress_bar: bool = False,
) -> list[Tokens]:
    """Embed columns as :func:`~st_colbert_losses.encoding.embed` does, in the memory of a mini-batch.

    Rows are sorted by length, and each mini-batch is cut where none of its rows is attended or scored any more. A
    column that fits one mini-batch is left as it is.

    Args:
        model: The model.
        columns: The queries and the document columns, or some of them.
        first: The place of the first of them in the batch; place 0 holds the queries.
        mini_batch_size: Rows of a mini-batch.
        mini_batch_num_tokens: Tokens of a mini-batch instead, rows times the longest row; a longer row goes alone.
        show_progress_bar: Show one over the mini-batches.

    Returns:
        The tokens of each column in the order of its rows; shorter mini-batches padded behind.

    Raises:
        ValueError: If the features cannot be cut by rows.
    """
    plans = []
    for i, features in enumerate(columns, start=first):
        rows = count_rows(features)
        lengths = _lengths(needed_positions(model, features, i == 0), features, rows)
        plan = _plan(lengths, mini_batch_size, mini_batch_num_tokens)
        bounds = row_bounds(features, rows) if len(plan) > 1 else {}
        plans.append((plan, bounds, lengths))
    replay = Replay(model, mini_batches=sum(len(plan) for plan, *_ in plans))
    tokens = []
    with tqdm(total=replay.left, leave=False, disable=not show_progress_bar) as bar:
        for i, (features, (plan, bounds, lengths)) in enumerate(zip(columns, plans, strict=True), start=first):
            parts = []
            for chosen in plan:
                part = features
                if len(plan) > 1:
                    part = select_rows(features, bounds, chosen, max(lengths[row] for row in chosen))
                parts.append(replay.embed(part, is_query=i == 0))
                bar.update()
            tokens.append(_join(parts, plan) if len(plan) > 1 else parts[0])
    return tokens


def _lengths(needed: Tensor | None, features: Mapping[str, Any], rows: int) -> list[int]:
    """One more than the last needed position of each row, at least 1."""
    if needed is None:
        texts = [features[key] for key in ("attention_mask", "input_ids") if isinstance(features.get(key), Tensor)]
        return [texts[0].shape[1] if texts and texts[0].ndim > 1 else 1] * rows
    last = (needed * torch.arange(1, needed.shape[1] + 1, device=needed.device)).amax(1)
    return [max(1, length) for length in last.tolist()]


def _plan(lengths: Sequence[int], size: int | None, num_tokens: int | None) -> list[list[int]]:
    """The rows of each mini-batch, the longest last: that one is kept and not replayed."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    plan: list[list[int]] = []
    while order:
        n = max(1, num_tokens // lengths[order[0]]) if num_tokens is not None else size or len(order)
        plan.append(order[:n])
        order = order[n:]
    return plan[::-1]


class Replay:
    """Embeds the mini-batches of one step, keeping nothing but the results, and again in backward.

    Under DistributedDataParallel the gradients are to be reduced once, when all mini-batches have been through
    backward. So the first mini-batch is replayed last, as the others hang on it in the graph, and it alone
    synchronises. (The last, which is not replayed, comes before: autograd takes what was made last first.)

    Args:
        model: The model.
        mini_batches: How many there are.
    """

    def __init__(self, model: nn.Module, mini_batches: int) -> None:
        self.model = model
        self.left = mini_batches
        self.ddp = _find_ddp(model)
        self.synchronises = self.ddp is not None and self.ddp.require_backward_grad_sync
        self.first: Tensor | None = None

    def embed(self, features: Mapping[str, Any], is_query: bool) -> Tokens:
        """Embed the next mini-batch; without gradients there is nothing to replay."""
        self.left -= 1
        if not torch.is_grad_enabled():
            return embed(self.model, features, is_query)
        if not self.left:
            with nullcontext() if self.ddp is None or self.first is None else self.ddp.no_sync():
                tokens = embed(self.model, features, is_query)
            if self.first is not None and tokens.vectors.requires_grad:
                tokens.vectors.register_hook(_check_backward)  # type: ignore[no-untyped-call] # torch does not type it
            return tokens
        names = [key for key, value in features.items() if isinstance(value, Tensor)]
        synchronises = self.synchronises and self.first is None

        def run(zero: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            with nullcontext() if self.ddp is None or synchronises else self.ddp.no_sync():
                tokens = embed(self.model, {**features, **dict(zip(names, tensors, strict=True))}, is_query)
            vectors = tokens.vectors
            if torch.is_grad_enabled():
                if not vectors.requires_grad:  # a frozen column
                    vectors = vectors + zero
                if synchronises and self.ddp is not None and not self.ddp.find_unused_parameters:
                    # Every parameter must report, though this mini-batch may not use it: no image, no vision tower.
                    vectors = vectors + sum(
                        p.flatten()[:1].sum() * 0 for p in self.ddp.parameters() if p.requires_grad
                    )
            return vectors, tokens.mask

        # Checkpoint wants an input that needs a gradient, and remembers the random generators of its inputs' devices:
        # the model's among them, as DDP moves what still lies elsewhere. The reentrant kind: the other fails where
        # torch.compile serves the replay with another graph.
        zero = self.first
        if zero is None:
            zero = torch.zeros((), device=next((p.device for p in self.model.parameters()), None), requires_grad=True)
        vectors, mask = checkpoint(run, zero, *(features[name] for name in names), use_reentrant=True)
        if self.first is None:
            self.first = vectors.flatten()[:1].sum() * 0
        return Tokens(vectors, mask)


def _check_backward(gradient: Tensor) -> None:
    """Refuse a backward that would pass the replayed mini-batches by, or not be differentiable through them.

    Raises:
        RuntimeError: Saying who, got, expected and the remedy.
    """
    got = None
    if torch.is_grad_enabled():
        got = "create_graph=True, for gradients of gradients"
    elif not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call] # torch does not type it
        got = "torch.autograd.grad or backward(inputs=...), which would leave out all mini-batches but one"
    if got is not None:
        raise RuntimeError(
            f"Gradient caching: got {got}, expected loss.backward(). Call that and read p.grad, or use the loss "
            "without mini-batches."
        )


def _find_ddp(model: Any) -> DistributedDataParallel | None:
    while not isinstance(model, DistributedDataParallel):
        if not hasattr(model, "_orig_mod"):
            return None
        model = model._orig_mod
    return model


def _join(parts: Sequence[Tokens], plan: Sequence[Sequence[int]]) -> Tokens:
    """Put the mini-batches' rows back in order, padded to the widest."""
    width = max(part.vectors.shape[1] for part in parts)
    vectors = torch.cat([F.pad(part.vectors, (0, 0, 0, width - part.vectors.shape[1])) for part in parts])
    mask = torch.cat([F.pad(part.mask, (0, width - part.mask.shape[1])) for part in parts])
    place = torch.empty(len(mask), dtype=torch.long)
    place[torch.tensor([i for chosen in plan for i in chosen])] = torch.arange(len(mask))
    place = place.to(mask.device)
    return Tokens(vectors[place], mask[place])
