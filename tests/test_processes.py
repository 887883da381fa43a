"""Two processes on this machine: each rank's cached gradients, averaged by one all-reduce."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from st_colbert_losses import CachedColbertLoss, ColbertLoss
from tests.encoder import Encoder, batch
from tests.ranks import run_ranks


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


def rank_batch(rank: int) -> list[dict]:
    torch.manual_seed(rank)
    features = batch(rows=(5, 3)[rank], columns=3)
    for column in features[1:-1]:  # the last column is text again
        column["picture"] = torch.ones(len(column["input_ids"]), 1)
    return features


def check_rank(rank: int) -> None:
    for find_unused in (False, True):
        for accumulate in (False, True):
            check(rank, find_unused, accumulate)


def check(rank: int, find_unused: bool, accumulate: bool) -> None:
    torch.manual_seed(7)
    encoder = TwoTowers().double()
    alone = copy.deepcopy(encoder)
    ddp = nn.parallel.DistributedDataParallel(encoder, broadcast_buffers=False, find_unused_parameters=find_unused)
    reduced = []

    def count(state, bucket):
        reduced.append(bucket.index())
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, count)
    features = rank_batch(rank)
    cached, direct = CachedColbertLoss(ddp, temperature=0.2, mini_batch_size=2), ColbertLoss(alone, temperature=0.2)
    for _ in range(3):
        if accumulate:
            with ddp.no_sync():
                cached(features).backward()
            direct(features).backward()
        before = len(reduced)
        cached(features).backward()
        direct(features).backward()
        assert len(reduced) - before == len({*reduced})  # each bucket once
    assert len(reduced) == 3 * len({*reduced})  # none on a micro-step
    for mine, own in zip(encoder.parameters(), alone.parameters(), strict=True):
        if own.requires_grad:
            # Steps accumulate here: a reduced gradient is the same on both ranks and stays itself in the next mean.
            expected = own.grad.clone()
            torch.distributed.all_reduce(expected)
            torch.testing.assert_close(mine.grad, expected / 2, rtol=0, atol=1e-10)
            assert mine.grad.abs().max() > 1e-4


def test_one_all_reduce_of_the_mean(tmp_path):
    """Ranks with 5 and 3 rows encode 9 and 6 mini-batches and reduce once; the gradient is the mean of the ranks'."""
    run_ranks(check_rank, 2, tmp_path)
