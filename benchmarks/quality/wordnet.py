"""The second task: from an example sentence of WordNet to the gloss of the sense that it shows.

    sudo apt install wordnet-base   # or name a folder with WordNet 3.0's data.noun, data.verb ... in WNSEARCHDIR

Query: the first example of a synset. Document: its words and its gloss. One pair a synset, 8,000 synsets drawn by a
hash of their identity, so that every run has the same: 1,524 train (as many as the docstring task), 500 are asked on
dev and 1,000 on test, always over all 8,000 documents.
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

from datasets import Dataset

from training_recipes.retrieval_task import HeldOut, RetrievalTask

INSTALLED = "/usr/share/wordnet"
DOCUMENTS, TRAIN, DEV, TEST = 8000, 1524, 500, 1000
MIN_WORDS = 4  # of an example


def read_pairs() -> list[tuple[str, str]]:
    """Return (example, words and gloss) of every synset that has an example, in an order that looks random."""
    folder = Path(os.environ.get("WNSEARCHDIR", INSTALLED))
    if not (folder / "data.noun").is_file():
        raise FileNotFoundError(
            f"{folder} has no data.noun; expected WordNet 3.0: install Debian's package wordnet-base, or name its "
            "folder in WNSEARCHDIR"
        )
    found = []
    for part in ("noun", "verb", "adj", "adv"):
        for line in Path(folder, f"data.{part}").read_text(encoding="utf-8").splitlines():
            if line.startswith(" "):  # the licence
                continue
            fields, _, gloss = line.partition(" | ")
            offset, _, _, count, *rest = fields.split()
            words = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in rest[: 2 * int(count, 16) : 2]]
            definition, *examples = re.split(r';?\s*"', gloss.strip())
            example = next((text for text in examples if len(text.split()) >= MIN_WORDS), None)
            if example and definition.strip():
                document = f"{', '.join(words)}: {definition.strip(' ;')}"
                found.append((zlib.crc32(f"{part} {offset}".encode()), example, document))
    return [(example, document) for _, example, document in sorted(found)]


def load_wordnet() -> RetrievalTask:
    """Return the task in the form that recipes and benchmarks take."""
    pairs = read_pairs()[:DOCUMENTS]
    texts = sorted({document for _, document in pairs}, key=lambda text: (len(text), text))
    ids = {text: f"d{number}" for number, text in enumerate(texts)}

    def held_out(rows: list[tuple[str, str]]) -> HeldOut:
        relevant: dict[str, set[str]] = {}
        for query, document in rows:
            relevant.setdefault(query, set()).add(ids[document])
        names = {query: f"q{number}" for number, query in enumerate(relevant)}
        return HeldOut(
            {name: query for query, name in names.items()}, {name: relevant[query] for query, name in names.items()}
        )

    train, dev, test = pairs[:TRAIN], pairs[TRAIN : TRAIN + DEV], pairs[TRAIN + DEV : TRAIN + DEV + TEST]
    rows = Dataset.from_list([{"query": query, "positive": document} for query, document in train])
    corpus = {ids[text]: text for text in texts}
    return RetrievalTask("WordNet examples and glosses", rows, held_out(dev), held_out(test), corpus, False)
