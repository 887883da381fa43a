"""What sharing documents costs: the bytes that a rank sends in a step and the memory it needs, by arithmetic.

    make bench-scaling

Writes the tables of docs/scaling.md. Runs nowhere but in one process and needs no model; the tests compare the
arithmetic with the bytes of real runs of two and three processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
RANKS = (8, 64, 512)
NUMBER = 8  # bytes of an int64


@dataclass(frozen=True)
class Setup:
    """A training on ``ranks`` processes of ``rows`` queries each, all with the same widths."""

    ranks: int
    rows: int
    tokens: int
    columns: int = 1  # of documents that enter the pool, n of n documents per row
    dimensions: int = 128
    value: int = 4  # bytes of a float32

    @property
    def vectors(self) -> int:
        """Bytes of the embeddings of this rank's documents."""
        return self.columns * self.rows * self.tokens * self.dimensions * self.value

    @property
    def gathered(self) -> int:
        """Bytes that a forward gives to all_gather: embeddings, masks, four numbers per document, and sizes."""
        masks = self.columns * self.rows * self.tokens
        numbers = self.columns * self.rows * 4
        sizes = 1 + (1 + self.columns) + self.columns * (1 + 2)
        return self.vectors + masks + (numbers + sizes) * NUMBER

    @property
    def reduced(self) -> int:
        """Bytes that a backward gives to all_reduce: the gradients of everybody's documents."""
        return self.ranks * self.vectors

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step, in rings: each gathered byte once per other rank, each reduced twice."""
        return (self.ranks - 1) * (self.gathered + 2 * self.reduced // self.ranks)

    @property
    def memory(self) -> int:
        """Bytes of all documents, of their gradient, and of a copy of either while it is joined or reduced."""
        return 3 * self.ranks * self.vectors


def sent_for_gradients(ranks: int, parameters: int, value: int = 4) -> int:
    """Bytes that a rank sends while DDP averages the gradients of the model, in a ring."""
    return 2 * (ranks - 1) * parameters * value // ranks


def ranks_where_sharing_costs_more(setup: Setup, parameters: int) -> float:
    """From how many ranks on the documents are more to send than the model's gradients."""
    return sent_for_gradients(2, parameters) * 2 / (setup.gathered + 2 * setup.vectors)


MODELS = {
    "ColBERT, all 110 M parameters": (Setup(8, rows=32, tokens=180), 110_000_000),
    "ColPali, all 2.9 G parameters": (Setup(8, rows=32, tokens=1030), 2_900_000_000),
    "ColPali, LoRA of 20 M parameters": (Setup(8, rows=32, tokens=1030), 20_000_000),
}


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"


def table() -> str:
    lines = [
        "| model | ranks | documents | sent for them | memory for them | sent for gradients | more from |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (first, parameters) in MODELS.items():
        crossing = ranks_where_sharing_costs_more(first, parameters)
        for ranks in RANKS:
            setup = Setup(ranks, first.rows, first.tokens)
            cells = [
                name,
                str(ranks),
                f"{ranks * setup.rows:,}",
                size(setup.sent),
                size(setup.memory),
                size(sent_for_gradients(ranks, parameters)),
                f"{crossing:.0f} ranks",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def alternatives() -> str:
    """The same pool without sending a document: memory per rank."""
    lines = [
        "| negatives of a query | as | ColBERT, 180 tokens | ColPali, 1,030 tokens |",
        "|---:|---|---:|---:|",
    ]
    ways = {
        "gathered (3 copies)": lambda n, tokens: Setup(n // 32, 32, tokens).memory,
        "cached batch of one rank (embeddings and gradient)": lambda n, tokens: 2 * Setup(1, n, tokens).vectors,
        "queue in float32": lambda n, tokens: Setup(1, n, tokens).vectors,
        "queue in float16": lambda n, tokens: Setup(1, n, tokens, value=2).vectors,
    }
    for negatives in (ranks * 32 for ranks in RANKS):
        for name, memory in ways.items():
            lines.append(
                f"| {negatives:,} | {name} | {size(memory(negatives, 180))} | {size(memory(negatives, 1030))} |"
            )
    return "\n".join(lines)


def write_between(page: Path, name: str, text: str) -> None:
    """Put a text between a page's marks of that name."""
    begin, end = f"<!-- {name}: written by benchmarks/{name.replace('-', '_')}.py -->", f"<!-- end of {name} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{page} has no marks {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def main() -> None:
    text = f"`make bench-scaling`: arithmetic, no measurement.\n\n{table()}\n\n{alternatives()}"
    print(text)
    write_between(PAGE, "scaling", text)


if __name__ == "__main__":
    main()
