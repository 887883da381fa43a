"""Time and memory of MaxSim, forward and backward, against its peers.

    make bench-maxsim            # about half an hour; writes docs/benchmarks.md and docs/images/maxsim.png

The peers meet in one environment: sentence-transformers >= 6.2, matplotlib, late-interaction-kernels, and
``pip install --no-deps pylate colpali-engine`` with what they import. A peer that is not installed is left out.

Times: each call of a peer is followed at once by one of ours, and the ratio of the two is taken; printed are the
median ratio and its quartiles, of CPU time for one thread. For two threads wall time counts, whose medians tell of
whatever else the machine does, so the ratio of the quickest runs stands before them. Memory: the peak of resident
memory above its level before the step, each in a fresh process that has warmed up on a small batch. The floor is the
one forward product of matrices at the rate of ``torch.mm`` of 2048 x 2048, measured in the same run.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from st_colbert_losses.maxsim import PackedTokens, maxsim, maxsim_own
from st_colbert_losses.tokens import Tokens

D = 128
SHAPES = ["16,32,180", "32,32,180", "64,32,180", "128,32,180", "128,32,300", "32,32,1030", "64,32,768"]
VARIED = ["16,32,20..180", "64,32,20..180", "128,32,20..180"]
SECONDS = {1: 3.0, 2: 8.0}  # by threads, for the pairs of one peer at one shape
CLOCKS = {
    1: "One thread, its CPU time: medians, in brackets the quartiles of the ratios.",
    2: "Two threads, wall time: the quickest run of each, in brackets the median of the ratios. On busy cores "
    "threads wait for one that was put aside, and times are many times as long: run it on an idle machine.",
}
MARKS = ["<!-- maxsim: written by benchmarks/maxsim.py -->", "<!-- end of maxsim -->"]
DOCS = Path(__file__).parents[1] / "docs"
PACKAGES = ["torch", "pylate", "sentence-transformers", "colpali-engine", "late-interaction-kernels"]

Step = Callable[[Tokens, Tokens], Tensor]


def ours(queries: Tokens, documents: Tokens) -> Tensor:
    return maxsim(queries, documents)


def pylate() -> Step:
    from pylate.scores import colbert_scores

    return lambda q, d: colbert_scores(q.vectors, d.vectors, q.mask, d.mask)


def sentence_transformers() -> Step:
    from sentence_transformers.multi_vector_encoder.scoring.colbert import colbert_scores

    return lambda q, d: colbert_scores(q.vectors, d.vectors[:, None], q.mask, d.mask[:, None])


def colpali_engine() -> Step:
    from colpali_engine.utils.maxsim import maxsim_inbatch

    return lambda q, d: maxsim_inbatch(q.vectors, d.vectors)  # takes no masks: padding must be zero


def late_interaction_kernels() -> Step:
    from late_interaction_kernels import MaxSimScorer

    scorer = MaxSimScorer(normalize=False)
    return lambda q, d: scorer(q.vectors, d.vectors, q.mask, d.mask)


PEERS = {
    "PyLate": pylate,
    "sentence-transformers": sentence_transformers,
    "colpali-engine": colpali_engine,
    "late-interaction-kernels": late_interaction_kernels,
}


def dense_smooth(q: Tokens, d: Tokens) -> Tensor:
    return (0.1 * torch.logsumexp(torch.einsum("bqd,ctd->bcqt", q.vectors, d.vectors) / 0.1, -1)).sum(-1)


def dense_own(q: Tokens, d: Tokens) -> Tensor:
    return torch.einsum("bqd,bntd->bnqt", q.vectors, d.vectors.unflatten(0, (len(q), -1))).amax(-1).sum(-1)


def dense(q: Tokens, d: Tokens) -> Tensor:
    return torch.einsum("bqd,ctd->bcqt", q.vectors, d.vectors).amax(-1).sum(-1)


def tokens(rows: int, length: str, grad: bool = True) -> Tokens:
    """Unit-length random tokens; ``"20..180"`` draws each row's length."""
    low, _, high = length.rpartition("..")
    mask = torch.arange(int(high)) < torch.randint(int(low or high), int(high) + 1, (rows, 1))
    vectors = F.normalize(torch.randn(rows, int(high), D), dim=-1) * mask[..., None]
    return Tokens(vectors.requires_grad_(grad), mask)


def batch(shape: str, grad: bool = True) -> tuple[Tokens, Tokens]:
    torch.manual_seed(0)
    b, q, t = shape.split(",")
    return tokens(int(b), q, grad), tokens(int(b), t, grad)


def queue(dtype: torch.dtype = torch.float32) -> PackedTokens:
    torch.manual_seed(1)
    lengths = torch.randint(20, 181, (4096,))
    return PackedTokens(F.normalize(torch.randn(int(lengths.sum()), D), dim=-1).to(dtype), lengths)


def run(step: Any, q: Tokens, d: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one step, with its backward pass where the tokens need a gradient."""
    q.vectors.grad = d.vectors.grad = None
    begin = clock()
    scores = step(q, d)
    if scores.requires_grad:
        scores.sum().backward()
    return clock() - begin


def pairs(step: Any, other: Callable[[], float], q: Tokens, d: Any, clock: Callable[[], float]) -> dict[str, Any]:
    """Interleaved with another timing: its ratio to ours (quartiles), and ours in milliseconds (median)."""
    run(step, q, d, clock), other()
    ratios, times, best, end = [], [], math.inf, time.perf_counter() + SECONDS[torch.get_num_threads()]
    while len(times) < 3 or (len(times) < 300 and time.perf_counter() < end):
        theirs = other()
        best = min(best, theirs)
        times.append(run(step, q, d, clock))
        ratios.append(theirs / times[-1])
    ms = 1e3 * statistics.median(times)
    return {
        "ms": ms,
        "best ms": 1e3 * min(times),
        "ratio": statistics.quantiles(ratios, n=4),
        "best": best / min(times),
    }


def measure_times(threads: int) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    square, out = torch.randn(2048, 2048), torch.empty(2048, 2048)

    def product() -> float:
        begin = clock()
        torch.mm(square, square, out=out)
        return clock() - begin

    def floor(step: Any, q: Tokens, d: Any, tokens: int) -> dict[str, Any]:
        """Of ``pairs``, with the ratio turned: ours to the floor."""
        work = int(q.mask.sum()) * tokens * D / 2048**3
        result = pairs(step, product, q, d, clock)
        result["ratio"] = [1 / (work * ratio) for ratio in reversed(result["ratio"])]
        result["best"] = 1 / (work * result["best"])
        return result

    results: dict[str, dict[str, Any]] = {}
    for shape in SHAPES + VARIED:
        q, d = batch(shape)
        results[shape] = {"floor": floor(ours, q, d, int(d.mask.sum()))}
        for name, peer in installed().items():
            results[shape][name] = pairs(ours, lambda peer=peer, q=q, d=d: run(peer, q, d, clock), q, d, clock)
    results["other"] = other = {}

    def against(name: str, step: Any, reference: Any, q: Tokens, d: Any) -> None:
        other[name] = pairs(step, lambda: run(reference, q, d, clock), q, d, clock)

    against("smooth maximum, 64,32,180", lambda q, d: maxsim(q, d, tau=0.1), dense_smooth, *batch("64,32,180"))
    for shape in ("32,32,180", "64,32,180", "32,32,1030"):
        against(f"no gradient wanted, {shape}", ours, dense, *batch(shape, grad=False))
    for n in (1, 8):
        for grad in (True, False):
            q, d = tokens(64, "32", grad), tokens(64 * n, "180", grad)
            name = f"own documents, 64 queries x {n}, 32, 180" + ("" if grad else ", no gradient wanted")
            against(name, maxsim_own, dense_own, q, d)
    q, d = batch("64,32,180")
    one = Tokens(F.normalize(d.vectors.detach() + 3 * (torch.arange(180) == 7)[:, None], dim=-1).requires_grad_())
    positive = Tokens(q.vectors.detach().abs().requires_grad_())
    against(
        "all query tokens on one document token, 64,32,180 (against ours where they spread)",
        ours,
        lambda q, _: maxsim(positive, d),
        positive,
        one,
    )
    for dtype in (torch.float32, torch.bfloat16):
        store = queue(dtype)
        q = tokens(16, "32")
        other[f"queue, 16 queries x 4096 packed, {str(dtype)[6:]} (to the floor)"] = floor(
            maxsim, q, store, len(store.vectors)
        )
    torch.backends.mkldnn.set_flags(False)
    for shape in ("64,32,180", "64,32,20..180", "32,32,1030"):
        q, d = batch(shape)
        other[f"{shape}, oneDNN turned off (to the floor)"] = floor(ours, q, d, int(d.mask.sum()))
    return results


def installed() -> dict[str, Step]:
    steps = {}
    for name, peer in PEERS.items():
        try:
            steps[name] = peer()
        except ImportError as error:
            print(f"left out {name}: {error}", file=sys.stderr)
    return steps


def peak(reset: bool = False) -> float:
    """Peak of resident memory in MiB; ``reset`` lowers it to the present level first."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure_memory(name: str, shape: str) -> float:
    """MiB that one step needs above what was there before."""
    torch.set_num_threads(1)
    step: Any = {
        "ours": ours,
        "smooth": lambda q, d: maxsim(q, d, tau=0.1),
        "dense smooth": dense_smooth,
        "queue": maxsim,
    }.get(name) or PEERS[name]()
    q, d = batch("4,32,40")
    run(step, q, d)
    q, d = batch("16,32,20" if name == "queue" else shape)
    d = queue(getattr(torch, shape)) if name == "queue" else d
    before = peak(reset=True)
    run(step, q, d)
    return peak() - before


def worker(*arguments: str) -> Any:
    """What this script prints in a fresh process."""
    print("...", *arguments, file=sys.stderr)
    command = [sys.executable, "-W", "ignore", __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def spread(result: dict[str, Any], threads: int = 1) -> str:
    low, middle, high = result["ratio"]
    return f"{middle:.2f} ({low:.2f}-{high:.2f})" if threads == 1 else f"{result['best']:.2f} ({middle:.2f})"


def report(times: dict[int, dict[str, Any]], memory: dict[str, dict[str, float]], more: dict[str, float]) -> str:
    names = [name for name in PEERS if name in times[1][SHAPES[0]]]
    parts = [
        f"`make bench-maxsim`, {date.today()}, {processor()}, Python {platform.python_version()}, "
        + ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PACKAGES)
        + f". float32, D = {D}, forward and backward. A shape is B = C, Q, T.",
        "![Time and memory against the batch size](images/maxsim.png)",
    ]
    for threads, of in times.items():
        head = ["B, Q, T", "ours, ms", "ours / floor", *(f"{name} / ours" for name in names)]
        rows = [
            [
                shape,
                f"{of[shape]['floor']['ms' if threads == 1 else 'best ms']:.1f}",
                *(spread(of[shape][name], threads) for name in ["floor", *names]),
            ]
            for shape in SHAPES + VARIED
        ]
        parts += [CLOCKS[threads], table(head, rows)]
    rows = [
        [shape, f"{of['ours']:.1f}", *(f"{of[n]:.0f} ({of[n] / of['ours']:.1f} x)" for n in names)]
        for shape, of in memory.items()
    ]
    parts += ["Memory of a step in MiB, gradients included.", table(["B, Q, T", "ours", *names], rows)]
    rows = [
        [name, f"{result['ms']:.1f}", spread(result), spread(times[2]["other"][name], 2)]
        for name, result in times[1]["other"].items()
    ]
    parts += [
        "Other forms: the ratio of the plain einsum form to ours or, where it says so, of ours to the floor.",
        table(["", "ours, ms", "one thread", "two threads"], rows),
        table(["memory of a step, MiB", ""], [[name, f"{mib:.1f}"] for name, mib in more.items()]),
    ]
    return "\n\n".join(parts)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip() + f" ({torch.backends.cpu.get_cpu_capability()})"
    return platform.processor()


def plot(times: dict[str, Any], memory: dict[str, dict[str, float]]) -> None:
    import matplotlib.pyplot as plt

    shapes = [shape for shape in SHAPES if shape.endswith(",32,180")]
    batches = [int(shape.split(",")[0]) for shape in shapes]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for name in ["ours", *(name for name in PEERS if name in times[shapes[0]])]:
        style: dict[str, Any] = {"marker": "o", "linewidth": 2.5 if name == "ours" else 1.2, "label": name}
        own = [times[shape]["floor"]["ms"] for shape in shapes]
        ratios = [1 if name == "ours" else times[shape][name]["ratio"][1] for shape in shapes]
        left.plot(batches, [ms * ratio for ms, ratio in zip(own, ratios, strict=True)], **style)
        right.plot(batches, [memory[shape][name] for shape in shapes], **style)
    for axes, title in ((left, "forward and backward, ms, one thread"), (right, "memory of the step, MiB")):
        axes.set(xscale="log", yscale="log", title=title, xlabel="queries = documents (32 and 180 tokens)")
        axes.set_xticks(batches, [str(b) for b in batches])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.tight_layout()
    (DOCS / "images").mkdir(parents=True, exist_ok=True)
    figure.savefig(DOCS / "images" / "maxsim.png", dpi=150)


def main() -> None:
    times = {threads: worker("time", str(threads)) for threads in (1, 2)}
    names = [name for name in PEERS if name in times[1][SHAPES[0]]]
    memory = {
        shape: {name: worker("memory", name, shape) for name in ["ours", *names]} for shape in [*SHAPES, VARIED[1]]
    }
    more = {
        "smooth maximum, 64,32,180": worker("memory", "smooth", "64,32,180"),
        "smooth maximum by einsum, 64,32,180": worker("memory", "dense smooth", "64,32,180"),
        "queue of 4096, float32, beyond the store": worker("memory", "queue", "float32"),
        "queue of 4096, bfloat16, beyond the store": worker("memory", "queue", "bfloat16"),
    }
    plot(times[1], memory)
    path = DOCS / "benchmarks.md"
    text = path.read_text() if path.exists() else "# Benchmarks\n\n## MaxSim\n\n" + "\n".join(MARKS) + "\n"
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    path.write_text(f"{before}{MARKS[0]}\n\n{report(times, memory, more)}\n\n{MARKS[1]}{after}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["time"]:
        print(json.dumps(measure_times(int(sys.argv[2]))))
    elif sys.argv[1:2] == ["memory"]:
        print(json.dumps(measure_memory(*sys.argv[2:])))
    else:
        main()
