"""Measure a late-interaction retriever: nDCG@10, recall@10 and MRR@10, by the world's own evaluators.

    python -m training_recipes.evaluate --model trained_models/ColbertLoss-pylate --datasets stdlib
    python -m training_recipes.evaluate --model lightonai/GTE-ModernColBERT-v1 --datasets NanoBEIR/msmarco NanoBEIR/nq
    python -m training_recipes.evaluate --world st --model vidore/colpali-v1.3-hf --datasets ViDoRe/docvqa

A set is one of

- `stdlib` and `stdlib-pages`, which need no Hub;
- a file, folder or Hub id of pairs, as the training takes it: its test split, over all its documents;
- a folder or Hub id with `corpus`, `queries` and `qrels`, the layout of BEIR and of most benchmarks;
- by name, from the Hub: `NanoBEIR` or one of its parts as in `NanoBEIR/msmarco`, `ViDoRe` or as in `ViDoRe/docvqa`.
"""

from __future__ import annotations

from training_recipes import offline  # noqa: F401, before the libraries that read what it sets

# isort: split

import importlib
import importlib.util
import json
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import datasets
import transformers
from transformers import HfArgumentParser

from training_recipes.command_line import WORLDS
from training_recipes.retrieval_task import RetrievalTask, has_judgements, load_judged, load_task
from training_recipes.train import PACKAGED, evaluator

VIDORE = {  # the first edition, https://huggingface.co/collections/vidore/vidore-benchmark-667173f98e70a1c0fa4db00d
    "arxivqa": "vidore/arxivqa_test_subsampled_beir",
    "docvqa": "vidore/docvqa_test_subsampled_beir",
    "infovqa": "vidore/infovqa_test_subsampled_beir",
    "tabfquad": "vidore/tabfquad_test_subsampled_beir",
    "tatdqa": "vidore/tatdqa_test_beir",
    "shiftproject": "vidore/shiftproject_test_beir",
    "ai": "vidore/syntheticDocQA_artificial_intelligence_test_beir",
    "energy": "vidore/syntheticDocQA_energy_test_beir",
    "government": "vidore/syntheticDocQA_government_reports_test_beir",
    "healthcare": "vidore/syntheticDocQA_healthcare_industry_test_beir",
}
NANO_BEIR = (
    *("climatefever", "dbpedia", "fever", "fiqa2018", "hotpotqa", "msmarco", "nfcorpus"),
    *("nq", "quoraretrieval", "scidocs", "arguana", "scifact", "touche2020"),
)
METRICS = ("ndcg@10", "recall@10", "mrr@10")


@dataclass
class Evaluation:
    """What is measured on what."""

    model: str = field(metadata={"help": "Hub id or folder; minilm for an untrained ColBERT"})
    datasets: list[str] = field(metadata={"help": "one or more sets, see the top of this file"})
    world: str | None = field(default=None, metadata={"help": "pylate or st; default: pylate where it is installed"})
    model_arguments: str = field(
        default="{}",
        metadata={"help": "further arguments of ColBERT(...) or MultiVectorEncoder(...), as a JSON object"},
    )
    query_length: int | None = field(default=None, metadata={"help": "tokens of a query; default: the model's"})
    document_length: int | None = field(default=None, metadata={"help": "tokens of a text; default: the model's"})
    max_queries: int | None = field(default=None, metadata={"help": "the first so many queries of each set"})
    max_documents: int | None = field(default=None, metadata={"help": "so many documents, all relevant ones included"})
    seed: int = field(default=42, metadata={"help": "decides what is held out where a set has one split only"})
    output: str | None = field(default=None, metadata={"help": "a JSON file for the numbers"})


def main(argv: list[str]) -> None:
    """Load, measure each set, print a table."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    parser = HfArgumentParser(
        Evaluation, prog="evaluate", usage="python -m training_recipes.evaluate --model M --datasets D ..."
    )
    parser.error = fail
    wanted, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        fail(f"unknown arguments {shlex.join(unknown)} (--help lists the flags)")
    name = wanted.world or ("pylate" if importlib.util.find_spec("pylate") else "st")
    if name not in WORLDS:
        fail(f"unknown --world {name!r}; choose {' or '.join(WORLDS)}")
    if wanted.output and not Path(wanted.output).parent.is_dir():
        fail(f"cannot write {wanted.output}: there is no such folder")
    try:
        world = importlib.import_module(f"training_recipes.world_{name}")
    except ImportError as error:
        fail(f"--world {name} is not installed here: {error}")
    base = PACKAGED if wanted.model == "minilm" else wanted.model
    try:
        lengths = (wanted.query_length, wanted.document_length)
        model = world.load_model(base, *lengths, None, **json.loads(wanted.model_arguments))
    except Exception as error:
        fail(f"cannot load the model {wanted.model}: {error}")

    found = {}
    for title in by_name(wanted.datasets):
        try:
            if title.startswith("NanoBEIR/"):
                metrics = world.NanoBEIREvaluator([title.partition("/")[2]], show_progress_bar=True)(model)
            else:
                task = load_set(wanted, VIDORE.get(title.removeprefix("ViDoRe/"), title))
                metrics = evaluator(world.Evaluator, task.test, task.corpus, "", show_progress_bar=True)(model)
        except Exception as error:  # the Hub and the file readers raise of many kinds
            hint = "" if Path(title).exists() else "; from the Hub it needs a network, a folder does not"
            fail(f"cannot measure on {title!r}: {type(error).__name__}: {error}{hint}")
        found[title] = {metric: float(metrics[key]) for metric in METRICS for key in metrics if key.endswith(metric)}

    width = max(map(len, [*found, "mean of all"]))
    print(f"\n| {'':<{width}} | nDCG@10 | recall@10 | MRR@10 |\n|{'-' * (width + 2)}|--------:|----------:|-------:|")
    rows = list(found.items())
    if len(rows) > 1:
        rows.append(("mean of all", {m: sum(row[m] for row in found.values()) / len(found) for m in METRICS}))
    for title, row in rows:
        print(f"| {title:<{width}} | {row['ndcg@10']:>7.4f} | {row['recall@10']:>9.4f} | {row['mrr@10']:>6.4f} |")
    if wanted.output:
        Path(wanted.output).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def by_name(titles: list[str]) -> list[str]:
    """Replace the names of collections by those of their parts."""
    parts = {"NanoBEIR": NANO_BEIR, "ViDoRe": tuple(VIDORE)}
    every = []
    for title in titles:
        collection, _, part = title.partition("/")
        if collection in parts and part and part not in parts[collection]:
            fail(f"{collection} has no part {part!r}; choose among {', '.join(parts[collection])}")
        chosen = parts.get(title, ())
        every += [f"{title}/{part}" for part in chosen] or [title]
    return every


def load_set(wanted: Evaluation, name: str) -> RetrievalTask:
    """Load a set of pairs, or of queries, documents and judgements."""
    limits = {"max_queries": wanted.max_queries, "max_documents": wanted.max_documents}
    return load_judged(name, **limits) if has_judgements(name) else load_task(name, seed=wanted.seed, **limits)


def fail(message: object) -> NoReturn:
    """Say in one line what is wrong, and stop."""
    sys.exit(f"evaluate: {' '.join(str(message).split())}")


if __name__ == "__main__":
    main(sys.argv[1:])
