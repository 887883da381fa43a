"""The hyperparameters that every loss takes: their names, types and valid values."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, get_args, get_type_hints

import torch
from torch import nn
from typing_extensions import TypedDict, is_typeddict


class CommonOptions(TypedDict, total=False):
    """Keyword arguments of all losses besides the temperature; :class:`LateInteractionLoss` explains each."""

    use_smooth_max: bool
    tau: float
    pos_aware_negative_filtering: bool
    filter_threshold: float
    filter_factor: float
    filter_mode: str
    filter_margin: float | None
    filter_explicit: bool
    filter_warmup_steps: int
    norm_tol: float
    mask_duplicate_documents: bool
    negatives_per_step: int | None
    learn_temperature: bool
    matryoshka_dims: Sequence[int] | None
    matryoshka_weights: Sequence[float] | None
    gather_across_devices: bool


class Options(CommonOptions, total=False):
    """Those, and whether scores are means: the losses differ in its default."""

    normalize_scores: bool


class MemoryOptions(TypedDict, total=False):
    """Keyword arguments that the MoCo forms add.

    Args:
        queue_size: Documents that the queue holds, from 1.
        momentum: Share of the momentum encoder that stays after an optimizer step, in [0, 1): half of it is renewed
            every ``log(0.5) / log(momentum)`` steps, 69 at 0.99. ``None``: no second encoder, the queue takes the
            embeddings of the model itself.
        momentum_model: The momentum encoder, where the model cannot be copied, or another loss's to share.
        queue_dtype: What documents are stored in; ``None`` as they are embedded.
        enqueue_negatives: Put explicit negatives into the queue too.
        enqueue_batches: ``False`` leaves the queue to ``loss.queue.enqueue``.
        warmup_steps: Optimizer steps before the queue is scored; it fills meanwhile.
        live_documents: ``False`` is MoCo to the letter: the batch's documents too come from the momentum encoder.
        mini_batch_size: As in the cached forms; ``None`` for no gradient caching.
        mini_batch_num_tokens: Likewise.
        show_progress_bar: Likewise.
    """

    queue_size: int
    momentum: float | None
    momentum_model: nn.Module | None
    queue_dtype: torch.dtype | None
    enqueue_negatives: bool
    enqueue_batches: bool
    warmup_steps: int
    live_documents: bool
    mini_batch_size: int | None
    mini_batch_num_tokens: int | None
    show_progress_bar: bool


class MoCoOptions(MemoryOptions, Options, total=False):
    """Keyword arguments of the MoCo forms."""


class MoCoCommonOptions(MemoryOptions, CommonOptions, total=False):
    """Keyword arguments of a MoCo form that has its own default for ``normalize_scores``."""


MEMORY_DEFAULTS: dict[str, Any] = {
    "queue_size": 1024,
    "momentum": 0.99,
    "momentum_model": None,
    "queue_dtype": None,
    "enqueue_negatives": False,
    "enqueue_batches": True,
    "warmup_steps": 0,
    "live_documents": True,
    "mini_batch_size": None,
    "mini_batch_num_tokens": None,
    "show_progress_bar": False,
}


def whole_signature(loss: type[nn.Module]) -> inspect.Signature:
    """The signature of a loss with the options that its ``**options`` stand for, as ``help`` is to show it.

    Where they are typed, ``**options: Unpack[Options]``, those of the type. Otherwise the keyword arguments of the
    loss that is extended, and ``**options`` still, as the constructor may take arguments of its own out of them.
    """
    _, *parameters = inspect.signature(loss.__init__).parameters.values()
    if not parameters or parameters[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return inspect.Signature(parameters)
    *named, options = parameters
    extended = next(base for base in loss.__mro__[1:] if "__signature__" in vars(base))
    known = {p.name: p for p in inspect.signature(extended).parameters.values() if p.kind is p.KEYWORD_ONLY}
    types = _types_of(loss.__init__, options.name)
    if types is not None:
        known = {name: known.get(name) or _keyword(name, annotation) for name, annotation in types.items()}
    taken = {p.name for p in named}
    more = [p for p in known.values() if p.name not in taken]
    return inspect.Signature([*named, *more, *([options] if types is None else [])])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    """One of the MoCo forms, or of a user's own type, which does not tell the default."""
    default = MEMORY_DEFAULTS.get(name, ...)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _types_of(init: Callable[..., None], options: str) -> dict[str, Any] | None:
    """The types of a constructor's ``**options``; ``None`` where it does not tell."""
    try:
        unpacked = get_args(get_type_hints(init).get(options))
        return get_type_hints(unpacked[0]) if unpacked and is_typeddict(unpacked[0]) else None
    except Exception:  # a user's annotation may name what only type checkers import
        return None


_ELSEWHERE = {
    **dict.fromkeys(MEMORY_DEFAULTS, "Use the MoCo form: MoCoColbertLoss for ColbertLoss."),
    **dict.fromkeys(
        ("mini_batch_size", "mini_batch_num_tokens", "show_progress_bar"),
        "Use the Cached form: CachedColbertLoss for ColbertLoss. With an objective of your own, set "
        "loss.mini_batch_size after it is made.",
    ),
    "scale": "It is 1 / temperature over sums: scale=20 is temperature=0.05 with normalize_scores=False.",
    "objective": "Use LateInteractionLoss.",
    "explicit_negatives": "Use ColbertNegativeCELoss, ColbertPairwiseNegativeCELoss or LateInteractionLoss.",
    "in_batch_term_weight": "Use ColbertNegativeCELoss or ColbertPairwiseNegativeCELoss.",
    "bias": "Use ColbertSigmoidLoss.",
    "learn_bias": "Use ColbertSigmoidLoss.",
    "document_to_query_weight": "Use ColbertLoss or ColbertNegativeCELoss.",
    "teacher_temperature": "Use ColbertDistillationLoss.",
    "normalize_teacher_scores": "Use ColbertDistillationLoss.",
    "contrastive_weight": "Use ColbertDistillationLoss.",
}


def check_names(loss: type[nn.Module], given: Iterable[str]) -> None:
    """Refuse keyword arguments that a loss does not have; one that takes any passes on what it does not know.

    Raises:
        TypeError: Saying who, got, expected and the nearest name, or where the argument belongs.
    """
    owner, parameters = loss.__name__, inspect.signature(loss).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in given:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            remedy = _ELSEWHERE.get(name) or (f"Did you mean {near[0]}?" if near else f"See help({owner}).")
            raise TypeError(
                f"{owner}: got an unknown argument {name!r}, expected some of {', '.join(parameters)}. {remedy}"
            )


def split_options(options: MoCoOptions | MoCoCommonOptions) -> tuple[Any, dict[str, Any]]:
    """What every loss takes (or refuses, as it does not know it), and what is the MoCo forms' own."""
    common = {name: value for name, value in options.items() if name not in MEMORY_DEFAULTS}
    return common, {name: value for name, value in options.items() if name in MEMORY_DEFAULTS}


_Rule = tuple[Callable[[Any], bool], str, str]


def _number(valid: Callable[[float], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Real) and not isinstance(value, bool) and valid(float(value))


def _flag(remedy: str) -> _Rule:
    return (lambda value: isinstance(value, bool), "True or False", remedy)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any, valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(valid(entry) for entry in value)


def _count(remedy: str) -> _Rule:
    return (lambda value: value is None or (_is_count(value) and value >= 1), "a whole number from 1, or None", remedy)


_POSITIVE = _number(lambda value: math.isfinite(value) and value > 0)
_FINITE = _number(math.isfinite)
_SHARE = _number(lambda value: 0 <= value <= 1)

# name: (is the value valid?, what is expected, what to do)
_RULES: dict[str, _Rule] = {
    "temperature": (
        _POSITIVE,
        "a finite number above 0",
        "Scores are means of cosines in [-1, 1]: 0.02 makes a softmax over them sharp, 1.0 a hinge on them smooth. "
        "learn_temperature=True trains it.",
    ),
    "tau": (
        _POSITIVE,
        "a finite number above 0",
        "Use the default 0.1, or use_smooth_max=False for the exact maximum.",
    ),
    "norm_tol": (
        _number(lambda value: math.isfinite(value) and value >= 0),
        "a finite number from 0",
        "Use the default 1e-3.",
    ),
    "filter_threshold": (
        _number(lambda value: 0 < value <= 1),
        "a number in (0, 1]",
        "0.95 filters the negatives that score above 95 % of the positive.",
    ),
    "filter_factor": (_SHARE, "a number in [0, 1]", "0.5 halves the score of a filtered negative, 1 leaves it."),
    "filter_mode": (
        lambda value: value in ("damp", "mask"),
        "'damp' or 'mask'",
        "'damp' lowers the score of a filtered negative, 'mask' leaves it out.",
    ),
    "filter_margin": (
        lambda value: value is None or _number(lambda m: math.isfinite(m) and m >= 0)(value),
        "a finite number from 0, or None",
        "0.05 filters the negatives that score above the positive less 0.05; None goes by filter_threshold.",
    ),
    "filter_warmup_steps": (
        lambda value: _is_count(value) and value >= 0,
        "a whole number from 0",
        "0 filters from the first step.",
    ),
    "negatives_per_step": _count("It is how many of a row's explicit negatives are drawn for a step."),
    "matryoshka_dims": (
        lambda value: value is None or _is_list(value, lambda d: _is_count(d) and d >= 1),
        "a list of whole numbers from 1, or None",
        "[128, 64] trains the embeddings to be good at 128 and at 64 dimensions.",
    ),
    "matryoshka_weights": (
        lambda value: value is None or _is_list(value, _number(lambda w: math.isfinite(w) and w > 0)),
        "a list of finite numbers above 0, or None",
        "Give one per entry of matryoshka_dims.",
    ),
    "document_to_query_weight": (_SHARE, "a number in [0, 1]", "0 is InfoNCE over documents, 0.5 CLIP's both ways."),
    "teacher_temperature": (
        _POSITIVE,
        "a finite number above 0",
        "1.0 takes the teacher's scores as they are; less makes them sharper.",
    ),
    "contrastive_weight": (_SHARE, "a number in [0, 1]", "0 is distillation alone, 1 InfoNCE alone."),
    "in_batch_term_weight": (
        _SHARE,
        "a number in [0, 1]",
        "0 trains on the explicit negatives alone, 1 on the in-batch ones alone.",
    ),
    "bias": (_FINITE, "a finite number", "Give the score at which a pair is undecided; 0.0 is the default."),
    "mini_batch_size": _count("It bounds the rows that are encoded at once, and with them the memory."),
    "mini_batch_num_tokens": _count("It bounds the tokens that are encoded at once, rows times the longest row."),
    "queue_size": (
        lambda value: _is_count(value) and value >= 1,
        "a whole number from 1",
        "1024 documents are the default; a queue may be larger than the batch and should be smaller than an epoch.",
    ),
    "queue_dtype": (
        lambda value: value is None or (isinstance(value, torch.dtype) and value.is_floating_point),
        "a floating point torch.dtype, or None",
        "torch.bfloat16 halves the memory of float32.",
    ),
    "warmup_steps": (
        lambda value: _is_count(value) and value >= 0,
        "a whole number from 0",
        "0 scores the queue from the first step.",
    ),
    "momentum": (
        lambda value: value is None or _number(lambda m: 0 <= m < 1)(value),
        "a number in [0, 1), or None",
        "0.99 is the default; 1 would never move; None queues the embeddings of the model itself.",
    ),
    "enqueue_negatives": _flag("True puts explicit negatives into the queue too."),
    "enqueue_batches": _flag("False leaves the queue to loss.queue.enqueue."),
    "live_documents": _flag("False takes the batch's documents from the momentum encoder too."),
    "show_progress_bar": _flag("True shows one over the mini-batches."),
    "normalize_scores": _flag("True divides each score by the number of scored query tokens."),
    "use_smooth_max": _flag("True replaces the maximum by tau * logsumexp."),
    "pos_aware_negative_filtering": _flag("True lowers the negatives that score close to the positive."),
    "mask_duplicate_documents": _flag("False lets copies of the positive count as negatives."),
    "filter_explicit": _flag("True filters a row's own explicit negatives too."),
    "learn_temperature": _flag("True has the trainer's optimizer train it."),
    "learn_bias": _flag("True has the trainer's optimizer train it."),
    "normalize_teacher_scores": _flag("True moves each row's teacher scores to [0, 1]."),
    "gather_across_devices": _flag("True shares the documents of all processes as negatives."),
}


def check_option(owner: str, name: str, value: Any) -> Any:
    """Refuse an invalid hyperparameter; names without a rule pass.

    Returns:
        The value; numbers of other libraries as Python's own, for JSON.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    if name not in _RULES:
        return value
    valid, expected, remedy = _RULES[name]
    if not valid(value):
        raise ValueError(f"{owner}: got {name}={value!r}, expected {expected}. {remedy}")
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else _plain(value)


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Real) and not isinstance(value, int) else value


def check_fixed(owner: str, name: str, value: object, made: object) -> None:
    """Refuse to change after construction what the optimizer was made for.

    Raises:
        ValueError: Saying who, got, expected and the remedy.
    """
    if value != made:
        raise ValueError(
            f"{owner}: got {name}={value!r} after construction, expected it to stay {made!r}: parameters are made "
            "once, for an optimizer to find them. Make a new loss."
        )
