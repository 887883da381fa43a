"""The command line of all recipes: flags, or a YAML file of the same names with flags after it that override it.

    python -m training_recipes.train training_recipes/large_batch.yaml --learning_rate 3e-5

Every flag of the trainer is there under its own name (`--report_to wandb`, `--bf16 true`, `--save_steps 500`,
`--resume_from_checkpoint true`, ...), beside those of a recipe.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import json
import shlex
import sys
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import get_last_checkpoint

import st_colbert_losses

WORLDS = {"pylate": "PyLate (`pylate.models.ColBERT`)", "st": "sentence-transformers (`MultiVectorEncoder`)"}
YAML = (".yaml", ".yml")
LOSSES = [name for name in st_colbert_losses.__all__ if name.endswith("Loss") and name != "LateInteractionLoss"]

# What a recipe takes for the trainer's arguments where nobody says otherwise. Numbers of steps below 1 are shares of
# all steps: three dev evaluations besides the one at the start, and a checkpoint with each, of which the last stays.
TRAINER_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-4,
    "warmup_steps": 0.1,
    "num_train_epochs": 2.0,
    "per_device_train_batch_size": 32,
    "eval_strategy": "steps",
    "eval_on_start": True,
    "eval_steps": 1 / 3,
    "save_strategy": "steps",
    "save_steps": 1 / 3,
    "save_total_limit": 1,
    "logging_steps": 1 / 24,
    "report_to": "none",
    "disable_tqdm": False,
    "use_cpu": not torch.accelerator.is_available(),  # else the trainer refuses bf16 there
    "dataloader_pin_memory": torch.accelerator.is_available(),  # else torch warns that it cannot
}
# The least that makes sense. Two tokens frame a text, one marks its kind.
LEAST = {
    **dict.fromkeys(("max_train_pairs", "max_queries", "max_documents", "num_negatives"), 1),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), 1),
    **dict.fromkeys(("query_length", "document_length"), 4),
    **{"learning_rate": 0, "warmup_steps": 0, "num_train_epochs": 0.01, "seed": 0},
}


@dataclass
class Recipe:
    """What a recipe adds to the trainer's own arguments."""

    world: str | None = field(default=None, metadata={"help": "pylate or st; default: pylate where it is installed"})
    loss: str = field(default="ColbertLoss", metadata={"help": f"one of {', '.join(LOSSES)}"})
    temperature: float | None = field(default=None, metadata={"help": "default: this recipe's, or the loss's own"})
    loss_arguments: str = field(default="{}", metadata={"help": "further arguments of the loss, as a JSON object"})
    model: str = field(
        default="minilm",
        metadata={
            "help": "Hub id, folder, or what needs no Hub: minilm, tiny-colpali, tiny-colqwen2, tiny-colmodernvbert"
        },
    )
    model_arguments: str = field(
        default="{}",
        metadata={"help": "further arguments of ColBERT(...) or MultiVectorEncoder(...), as a JSON object"},
    )
    lora: str | None = field(
        default=None, metadata={"help": "train adapters only: arguments of peft.LoraConfig, as a JSON object"}
    )
    query_length: int | None = field(default=None, metadata={"help": "tokens of a query; default: 32 for texts"})
    query_expansion: bool | None = field(
        default=None,
        metadata={"help": "pad queries with [MASK]; default: as the model does, a new one not"},
    )
    document_length: int | None = field(
        default=None, metadata={"help": "tokens of a text document, the rest is cut; default: 128"}
    )
    dataset: str = field(
        default="stdlib",
        metadata={
            "help": "Hub id (user/name or user/name:config), folder, file; without the Hub: stdlib, stdlib-pages"
        },
    )
    max_train_pairs: int | None = field(default=None, metadata={"help": "train on the first so many rows"})
    max_queries: int | None = field(default=None, metadata={"help": "evaluate so many queries per held-out split"})
    max_documents: int | None = field(default=20_000, metadata={"help": "evaluate over so many documents"})
    negatives: str | None = field(
        default=None,
        metadata={
            "help": "add negatives where the dataset has none: bm25, or mined by --teacher; "
            "default: bm25 if the loss needs some"
        },
    )
    num_negatives: int | None = field(
        default=None,
        metadata={"help": "negatives a row; default: 1 where they are made, all of a dataset's"},
    )
    teacher: str | None = field(
        default=None, metadata={"help": "dense encoder that mines negatives and scores to distil; default: minilm"}
    )
    publish_momentum: bool = field(
        default=False, metadata={"help": "save and publish a MoCo loss's momentum encoder in place of the model"}
    )
    hub_exist_ok: bool = field(
        default=False, metadata={"help": "--push_to_hub on top of a repository that has files already"}
    )


def read_command_line(argv: list[str]) -> tuple[Recipe, TrainingArguments, ModuleType]:
    """Read flags and YAML file, and stop with one line if they cannot be meant.

    Args:
        argv: Flags, after the path of a YAML file or alone.

    Returns:
        The recipe, the trainer's arguments, and the module of the world that it is for.
    """
    file = argv[0] if argv and argv[0].endswith(YAML) else None
    given = read_yaml(file) if file else {}
    flags = [text for key, value in given.items() for text in as_flag(key, value)] + argv[bool(file) :]

    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # what other flags and defaults hang on
    early.add_argument("--world", default="pylate" if importlib.util.find_spec("pylate") else "st")
    early.add_argument("--loss", default="ColbertLoss")
    early.error = fail
    wanted = early.parse_known_args(flags)[0]
    if wanted.world not in WORLDS:
        fail(f"unknown --world {wanted.world!r}; choose {' or '.join(WORLDS)}")
    if wanted.loss not in LOSSES:
        fail(f"unknown --loss {wanted.loss!r}; choose one of {', '.join(LOSSES)}")
    try:
        world = importlib.import_module(f"training_recipes.world_{wanted.world}")
    except ImportError as error:
        fail(f"--world {wanted.world} is not installed here: {error}")

    known = {entry.name for kind in (Recipe, world.TrainingArguments) for entry in fields(kind)}
    for key in given.keys() - known:
        near = difflib.get_close_matches(str(key), known, n=1)
        fail(f"{file}: unknown key {key!r}; {f'did you mean {near[0]}?' if near else '--help lists the flags'}")
    parser = HfArgumentParser(
        [Recipe, world.TrainingArguments],
        prog="train",
        usage="python -m training_recipes.train [FILE.yaml] [--flag value ...]",
        allow_abbrev=False,
    )
    parser.error = lambda message: fail(f"{message} (--help lists the flags)")
    name = Path(file).stem if file else wanted.loss
    parser.set_defaults(**TRAINER_DEFAULTS, world=wanted.world, output_dir=f"trained_models/{name}-{wanted.world}")
    parser.set_defaults(metric_for_best_model=world.DEV_NDCG)
    try:
        recipe, args, unknown = parser.parse_args_into_dataclasses(
            flags, return_remaining_strings=True, look_for_args_file=False
        )
    except (ValueError, TypeError, ImportError) as error:  # the trainer's arguments check each other
        fail(error)
    if unknown:
        hint = "a file of flags comes first" if unknown[0].endswith(YAML) else "--help lists the flags"
        fail(f"unknown arguments {shlex.join(unknown)} ({hint})")
    check(recipe, args)
    choose_best_by(args, world.DEV_NDCG)
    return recipe, args, world


def read_yaml(file: str) -> dict[str, Any]:
    """Read a YAML file of flags."""
    try:
        given = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        fail(f"cannot read {file}: {error.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        fail(f"{file} is no YAML: {error}")
    if not isinstance(given, dict):
        fail(f"{file} must hold lines of the form `flag: value`")
    return given


def as_flag(key: str, value: Any) -> list[str]:
    """Write one entry of a YAML file as it would stand on the command line, so that both are read alike."""
    if value is None:
        return []
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}", json.dumps(value) if isinstance(value, (dict, bool)) else str(value)]


def check(recipe: Recipe, args: TrainingArguments) -> None:
    """Refuse what cannot work, before anything is loaded."""
    for flag, least in LEAST.items():
        value = getattr(recipe, flag, getattr(args, flag, None))
        if value is not None and not value >= least:  # also where it is nan
            fail(f"--{flag} is {value}; it must be at least {least}")
    if recipe.lora and recipe.world != "st":
        fail("--lora needs --world st")
    if recipe.negatives not in (None, "bm25", "mined"):
        fail(f"unknown --negatives {recipe.negatives!r}; choose bm25 or mined")
    for flag in ("loss_arguments", "model_arguments", "lora"):
        text = getattr(recipe, flag)
        try:
            if text is not None and not isinstance(json.loads(text), dict):
                fail(f"--{flag} is {text}; it must be a JSON object, as in '{{\"name\": 1}}'")
        except json.JSONDecodeError as error:
            fail(f"--{flag} is {text}, which is no JSON ({error}); it must be an object, as in '{{\"name\": 1}}'")

    try:
        for callback in get_reporting_integration_callbacks(args.report_to):
            callback()
    except (RuntimeError, ValueError) as error:
        fail(f"--report_to: {error}")

    folder = Path(args.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        fail(f"cannot write to --output_dir {folder}: {error.strerror}")

    if args.resume_from_checkpoint in ("true", "True"):
        args.resume_from_checkpoint = get_last_checkpoint(str(folder))
        if args.resume_from_checkpoint is None:
            fail(f"--resume_from_checkpoint finds no checkpoint in {folder}; leave it out to begin anew")
    elif args.resume_from_checkpoint in ("false", "False"):
        args.resume_from_checkpoint = None
    elif args.resume_from_checkpoint and not Path(args.resume_from_checkpoint, "trainer_state.json").is_file():
        fail(f"--resume_from_checkpoint {args.resume_from_checkpoint} is no folder of a trainer's checkpoint")


def choose_best_by(args: TrainingArguments, dev_ndcg: str) -> None:
    """Keep the metric of the best checkpoint where there is one, and refuse one that no evaluation has."""
    prefix = dev_ndcg.removesuffix("ndcg@10")
    known = [f"{prefix}{metric}@10" for metric in ("ndcg", "mrr", "accuracy", "precision", "recall", "map")]
    if f"eval_{args.metric_for_best_model.removeprefix('eval_')}" not in known:
        fail(f"--metric_for_best_model is {args.metric_for_best_model}; choose one of {', '.join(known)}")
    wanted = args.load_best_model_at_end or args.save_strategy == "best"
    if not wanted and args.lr_scheduler_type != "reduce_lr_on_plateau":
        args.metric_for_best_model = args.greater_is_better = None  # else the best checkpoint so far is kept too
    elif args.eval_strategy == "no":
        fail(f"--eval_strategy no leaves nothing to choose by; {args.metric_for_best_model} needs steps or epoch")


def fail(message: object) -> NoReturn:
    """Say in one line what is wrong, and stop."""
    sys.exit(f"train: {' '.join(str(message).split())}")
