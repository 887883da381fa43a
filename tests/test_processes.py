"""Two processes on this machine: each rank's gradients, averaged by one all-reduce, and a loss's own collectives."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from st_colbert_losses import CachedColbertLoss, ColbertLoss, MoCoColbertLoss
from tests.encoder import Encoder, batch
from tests.models import PYLATE
from tests.ranks import recorded_collectives, run_ranks


class TwoTowers(Encoder):
    """Columns with a picture pass a layer that the queries never touch."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(6, 6)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, features):
        output = super().forward(features)
        if "picture" in features:
            shift = self.tower(self.embedding(features["input_ids"]))[..., :4]
            output["token_embeddings"] = nn.functional.normalize(output["token_embeddings"] + shift, dim=-1)
        return output


def rank_batch(rank: int, text_last: bool = True) -> list[dict]:
    torch.manual_seed(rank)
    features = batch(rows=(5, 3)[rank % 10], columns=3)
    for column in features[1:-1] if text_last else features[1:]:
        column["picture"] = torch.ones(len(column["input_ids"]), 1)
    return features


def check_rank(rank: int) -> None:
    """Ranks with 5 and 3 rows encode 9 and 6 mini-batches and reduce once; the gradient is the mean of the ranks'."""
    for accumulate in (False, True):
        for cached, find_unused in ((True, False), (True, True), (False, True)):
            torch.manual_seed(7)
            # Where text comes last, torch takes the other tower to be unused in the direct form.
            check(TwoTowers().double(), rank_batch(rank, text_last=cached), cached, find_unused, accumulate)


def check(
    encoder: nn.Module,
    features: list[dict],
    cached: bool,
    find_unused: bool,
    accumulate: bool = False,
    tolerance: float = 1e-10,
) -> None:
    alone = copy.deepcopy(encoder)
    ddp = nn.parallel.DistributedDataParallel(encoder, broadcast_buffers=False, find_unused_parameters=find_unused)
    reduced = []

    def count(state, bucket):
        reduced.append(bucket.index())
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, count)
    loss = CachedColbertLoss(ddp, mini_batch_size=2, temperature=0.2) if cached else ColbertLoss(ddp, temperature=0.2)
    direct = ColbertLoss(alone, temperature=0.2)
    for _ in range(3):
        if accumulate:
            with ddp.no_sync():
                loss(features).backward()
            direct(features).backward()
        before = len(reduced)
        loss(features).backward()
        direct(features).backward()
        assert len(reduced) - before == len({*reduced})  # each bucket once
    assert len(reduced) == 3 * len({*reduced})  # none on a micro-step
    largest = max(float(p.grad.abs().max()) for p in alone.parameters() if p.grad is not None)
    for (name, mine), own in zip(encoder.named_parameters(), alone.parameters(), strict=True):
        if own.grad is None:
            assert mine.grad is None or not mine.grad.any()
            continue
        # Steps accumulate here: a reduced gradient is the same on both ranks and stays itself in the next mean.
        expected = own.grad.clone()
        torch.distributed.all_reduce(expected)
        torch.testing.assert_close(mine.grad, expected / 2, rtol=0, atol=tolerance * largest, msg=name)
    assert largest > 1e-3


def check_idle(rank: int) -> None:
    """Rank 1 has no token that is scored, or no row with a negative; it makes no gradient, and nobody waits for it."""
    for idle in ("masked", "one label"):
        for find_unused in (False, True):
            for form in (ColbertLoss, CachedColbertLoss, MoCoColbertLoss):
                torch.manual_seed(7)
                encoder = Encoder().double()
                alone = copy.deepcopy(encoder)
                ddp = nn.parallel.DistributedDataParallel(
                    encoder, broadcast_buffers=False, find_unused_parameters=find_unused
                )
                features, labels = rank_batch(rank)[:2], None
                if rank == 1 and idle == "masked":
                    for column in features:
                        column["attention_mask"][:] = 0
                elif rank == 1:
                    labels = torch.full((3,), 4)
                form(ddp, temperature=0.2)(features, labels).backward()
                ColbertLoss(alone, temperature=0.2)(features, labels).backward()
                for mine, own in zip(encoder.parameters(), alone.parameters(), strict=True):
                    assert rank == 0 or not own.grad.any()
                    expected = own.grad.clone()
                    torch.distributed.all_reduce(expected)
                    assert expected.any()
                    torch.testing.assert_close(mine.grad, expected / 2, rtol=0, atol=1e-10)


def check_collectives(rank: int) -> None:
    """The same on every rank, in order and shape, whatever its batch holds; in backward one for each tensor."""
    for form, extra in ((ColbertLoss, {}), (CachedColbertLoss, {"mini_batch_size": 2}), (MoCoColbertLoss, {})):
        torch.manual_seed(7)
        ddp = nn.parallel.DistributedDataParallel(Encoder().double(), broadcast_buffers=False)
        loss = form(ddp, temperature=0.2, gather_across_devices=True, **extra)
        for _ in range(2):
            with recorded_collectives() as forward:
                value = loss(rank_batch(rank))
            with recorded_collectives() as backward:
                value.backward()
            # The numbers of rows; of two document columns, and the one that enters a queue: the shape, vectors, mask
            # and the rest. Numbers take two, as a rank may have more or fewer.
            gathered = 3 if form is MoCoColbertLoss else 2
            assert [c.name for c in forward] == ["all_gather"] * (2 + 5 * gathered)
            assert [c.name for c in backward] == ["all_reduce"] * 2
            everybody: list = [None, None]
            torch.distributed.all_gather_object(everybody, (forward, backward))
            assert everybody[0] == everybody[1]


def check_own_queues(rank: int) -> None:
    """DDP broadcasts the buffers of rank 0's model at every forward, and not the queue: each rank keeps its own."""
    torch.manual_seed(7)
    encoder = Encoder().double()
    encoder.register_buffer("of_rank", torch.tensor(float(rank)))
    ddp = nn.parallel.DistributedDataParallel(encoder)
    loss = MoCoColbertLoss(ddp, temperature=0.2, queue_size=20)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []
    for step in range(2):
        features = rank_batch(rank + 10 * step)
        with torch.no_grad():
            seen.append(loss.momentum_model(features[1])["token_embeddings"][features[1]["attention_mask"].bool()])
        optimizer.zero_grad()
        loss(features).backward()
        optimizer.step()
    assert encoder.of_rank == 0
    assert [name for name, _ in loss.named_buffers()] == ["model.module.of_rank"]
    torch.testing.assert_close(loss.queue.state()["vectors"], torch.cat(seen), rtol=0, atol=0)
    assert loss.queue.state()["lengths"].shape == (len(features[0]["input_ids"]) * 2,)


def check_all(rank: int) -> None:
    for part in (check_rank, check_idle, check_collectives, check_own_queues):
        part(rank)


def test_two_processes(tmp_path):
    run_ranks(check_all, 2, tmp_path)


if not PYLATE:  # page images are world M's
    FAMILIES = ("colpali", "colqwen2")

    def check_pages(rank: int, folder: str) -> None:
        from sentence_transformers import MultiVectorEncoder

        from tests.images import page

        sizes = [(60, 80), (120, 40), (50, 50)][: 3 - rank]
        columns = [
            ["rain in january", "price of tea", "fish"][: 3 - rank],
            [page(f"{rank} {i}", size) for i, size in enumerate(sizes)],
            ["wind", "it rains all day in june", "snow"][: 3 - rank],  # text: it never sees the vision tower
        ]
        ways = ((True, False), (True, True), (False, True))
        for family, (cached, find_unused) in product(FAMILIES, ways):
            retriever = MultiVectorEncoder(str(Path(folder, family)), device="cpu").double()
            features = [
                retriever.preprocess(column, task="document" if i else "query") for i, column in enumerate(columns)
            ]
            # Rotary angles are computed in float32.
            check(retriever, features if cached else features[:2], cached, find_unused, tolerance=1e-6)

    def test_page_images(tmp_path):
        """A text column, on both ranks, whose documents pass no vision tower."""
        from tests.images import page_retriever

        for family in FAMILIES:
            page_retriever(family, tmp_path / family)
        run_ranks(check_pages, 2, tmp_path, str(tmp_path))
