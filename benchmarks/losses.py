"""The step of each loss on given embeddings, ours and the peers' nearest: from embeddings to their gradients.

    make bench-losses

One thread, its CPU time, pairs in turn; the ratio is the peer's time over ours, median and range. The peers need the
environment of the other benchmarks. Queries of 32 tokens, documents of 180, unit length, 128 dimensions, float32; with
several negatives per row for the losses that take them apart.
"""

from __future__ import annotations

import platform
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import Tensor, nn

import st_colbert_losses
from benchmarks.cached import write_section
from st_colbert_losses import Tokens

HEADING = "## Losses"
ROUNDS, ROWS = 9, (16, 64)
EXPLICIT = ("ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss")
NAMES = ("ColbertLoss", "ColbertPairwiseCELoss", "ColbertSigmoidLoss", *EXPLICIT)


class Given(nn.Module):
    """A model whose features are its embeddings, with what PyLate's loss reads of one."""

    skiplist: tuple[int, ...] = ()
    do_query_expansion = True

    def forward(self, features: dict[str, Tensor], task: str = "") -> dict[str, Tensor]:
        return {"token_embeddings": features["vectors"], "attention_mask": features["attention_mask"]}


def embeddings(*shape: int) -> Tensor:
    return nn.functional.normalize(torch.randn(*shape, 128), dim=-1).requires_grad_()


def features(vectors: Tensor) -> dict[str, Tensor]:
    mask = torch.ones(vectors.shape[:2], dtype=torch.long)
    return {"vectors": vectors, "attention_mask": mask, "input_ids": mask + 5}


def contenders(name: str, rows: int) -> tuple[dict[str, Callable[[], Tensor]], list[Tensor]]:
    """Ours and the peers' nearest loss, each from the same embeddings."""
    from colpali_engine.loss import late_interaction_losses
    from pylate.losses import Contrastive
    from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss

    queries, positives = embeddings(rows, 32), embeddings(rows, 180)
    negatives = embeddings(rows, 2, 180) if name in EXPLICIT else None
    leaves = [queries, positives] + ([] if negatives is None else [negatives])
    ours, theirs = getattr(st_colbert_losses, name)(Given()), getattr(late_interaction_losses, name)()

    def from_tokens() -> Tensor:
        documents = [Tokens(positives, torch.ones(rows, 180))]
        if negatives is not None:
            documents.append(Tokens(negatives.flatten(0, 1), torch.ones(2 * rows, 180)))
        return ours.from_tokens(Tokens(queries, torch.ones(rows, 32)), documents)

    steps: dict[str, Callable[[], Tensor]] = {
        "ours": from_tokens,
        "colpali-engine": lambda: theirs(*leaves),
    }
    if name == "ColbertLoss":
        pylate = Contrastive(Given(), temperature=0.64)
        native = MultiVectorMultipleNegativesRankingLoss(Given(), scale=1 / 0.64)
        steps["PyLate"] = lambda: pylate([features(queries), features(positives)])
        steps["sentence-transformers"] = lambda: native([features(queries), features(positives)])
    return steps, leaves


def measure(steps: dict[str, Callable[[], Tensor]], leaves: list[Tensor]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {who: [] for who in steps}
    for round_ in range(ROUNDS + 1):
        for who, step in steps.items():
            for leaf in leaves:
                leaf.grad = None
            start = time.thread_time()
            step().backward()
            if round_:  # the first is a warm-up
                times[who].append(time.thread_time() - start)
    return times


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = ["| loss | batch | ours, ms | peer | peer / ours |", "|---|---:|---:|---|---:|"]
    for name in NAMES:
        for rows in ROWS:
            times = measure(*contenders(name, rows))
            ours = times.pop("ours")
            for who, theirs in times.items():
                ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
                row = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                table.append(f"| `{name}` | {rows} | {1000 * statistics.median(ours):.1f} | {who} | {row} |")
                print(table[-1], flush=True)
    peers = ("torch", "pylate", "sentence-transformers", "colpali-engine")
    versions = ", ".join(f"{name} {version(name)}" for name in peers)
    intro = (
        f"`make bench-losses`, {time.strftime('%Y-%m-%d')}, {platform.machine()}, Python {platform.python_version()}, "
        f"{versions}. From embeddings to their gradients, one thread, CPU time."
    )
    write_section(HEADING, "\n".join([HEADING, "", intro, "", *table]) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
