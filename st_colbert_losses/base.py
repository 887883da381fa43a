"""The pipeline that all losses share: encode, score, leave out what is no negative, apply the objective, average."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from st_colbert_losses.checks import (
    check_columns,
    check_features,
    check_labels,
    check_model,
    check_processes,
    check_replay,
    check_row_losses,
    check_rows,
    check_tokens,
    check_trainable,
)
from st_colbert_losses.columns import Batch, Column, Queued
from st_colbert_losses.content import content_keys
from st_colbert_losses.distributed import average_gradients, gather_columns, gather_sizes, rank, world_size
from st_colbert_losses.draws import draw_negatives
from st_colbert_losses.encoding import embed, role_of, unwrap
from st_colbert_losses.features import count_rows
from st_colbert_losses.filters import filter_likely_positives
from st_colbert_losses.learned import Shifts
from st_colbert_losses.matryoshka import cut, shares_of_widths
from st_colbert_losses.memory import MEMORY_ATTRIBUTES, Memory
from st_colbert_losses.mini_batches import embed_in_mini_batches
from st_colbert_losses.notices import Notices
from st_colbert_losses.options import (
    MEMORY_DEFAULTS,
    Options,
    check_fixed,
    check_names,
    check_option,
    whole_signature,
)
from st_colbert_losses.queue import DocumentQueue
from st_colbert_losses.scores import Scores, score
from st_colbert_losses.signals import Signals, measure
from st_colbert_losses.steps import hear_of_steps
from st_colbert_losses.tokens import Tokens
from st_colbert_losses.trainer import attach

COLBERT_CITATION = """
@inproceedings{khattab2020colbert,
    title = {{ColBERT}: Efficient and Effective Passage Search via Contextualized Late Interaction over {BERT}},
    author = {Khattab, Omar and Zaharia, Matei},
    booktitle = {Proceedings of the 43rd International ACM SIGIR Conference},
    year = {2020},
    url = {https://arxiv.org/abs/2004.12832},
}
"""


class LateInteractionLoss(nn.Module):
    """A loss over MaxSim scores with any objective.

    The named losses are this class with an objective and its defaults; use it directly to try another one.

    Args:
        model: A PyLate ``ColBERT``, a sentence-transformers ``MultiVectorEncoder``, or a module that maps a feature
            dict to one with ``token_embeddings`` (B, T, D) and ``attention_mask`` (B, T), scored as it is.
        objective: A function of :class:`~st_colbert_losses.scores.Scores` and, by name, of any hyperparameters of the
            loss (``temperature``), that returns one loss per query, (Q,).
        temperature: Divides score differences; finite, above 0.
        explicit_negatives: Score columns 2 and up as the row's own negatives (``Scores.hard``) and keep the pool to
            the batch's positives; ``False`` puts all documents of the batch in the pool.
        normalize_scores: Divide a query's scores by its number of scored tokens, so that they are means of cosines in
            [-1, 1]. ``False`` keeps the sums of PyLate and sentence-transformers.
        use_smooth_max: Replace the maximum over document tokens by ``tau * logsumexp(s / tau)``.
        tau: Width of the smooth maximum, in units of a cosine; finite, above 0.
        pos_aware_negative_filtering: Filter pool negatives that score nearly as high as the positive, as they may be
            unlabelled positives: above ``p - |p| * (1 - filter_threshold)``, p the positive's score.
        filter_threshold: Share of the positive's score above which a negative is filtered, in (0, 1].
        filter_factor: What a damped negative's score is multiplied by, in [0, 1].
        filter_mode: ``"damp"`` multiplies by ``filter_factor``; ``"mask"`` leaves a filtered negative out. A row that
            loses all of them counts as one without negatives.
        filter_margin: Filter above ``p - filter_margin`` instead, in units of a score, from 0.
        filter_explicit: Filter the row's own explicit negatives too, in the losses that have a term of their own.
        filter_warmup_steps: Optimizer steps before anything is filtered: a new model's scores mean little.
        norm_tol: How far a normalised score may exceed 1 before a warning says that tokens are not unit length.
        mask_duplicate_documents: Leave out candidates whose content is that of the row's positive, or of the positive
            of a row with the same query.
        negatives_per_step: Draw so many of each row's explicit negatives for a training step, and encode those alone;
            from torch's random generator, apart on each process. In evaluation all of them are used.
        learn_temperature: Train the temperature with the model: a parameter of the loss, the logarithm of T's ratio to
            ``temperature``, with T kept above 1e-4. It moves by about the learning rate a step, so start near the
            right one.
        matryoshka_dims: Widths at which token vectors are to be good: cut to each, made unit length again and scored,
            the losses averaged. The encoder runs once. ``None`` for the full width alone.
        matryoshka_weights: What each of them weighs in the average; ``None`` for all alike.
        gather_across_devices: Share the documents of all processes as negatives.

    Attributes:
        metrics: Signals of the last batch by name, detached: ``in_batch_accuracy`` (share of rows whose positive
            scores above all their negatives), ``positive_score``, ``hardest_negative_score`` and their difference
            ``margin`` (means over rows), ``masked_share`` and ``filtered_share`` of the candidates, ``temperature``,
            in the MoCo forms ``queue_fill`` (share of its capacity) and ``queue_age`` (batches since its documents
            came, on average). A Trainer's log has their means since the last log, beside the loss.

    Inputs:
        ``loss(sentence_features, labels=None)``: column 0 the query, column 1 the positive, all further columns
        negatives, with B rows each or n * B (n documents per row, row by row). ``labels``, (B,) integers: documents of
        other rows with a row's label are no negatives of it.

    Raises:
        ValueError: For an invalid hyperparameter, a missing column, a mismatch of rows, or labels that are not one
            integer per row.

    References:
        Filters: Moreira et al. (2024), NV-Retriever, https://arxiv.org/abs/2407.15831. Learned temperature: Radford et
        al. (2021), CLIP, https://arxiv.org/abs/2103.00020. Matryoshka: Kusupati et al. (2022),
        https://arxiv.org/abs/2205.13147

    Example:
        >>> import torch
        >>> from st_colbert_losses import LateInteractionLoss, Tokens
        >>> def hinge(scores, temperature):
        ...     return (scores.pool.max(1).values - scores.positive + temperature).clamp(min=0)
        >>> loss = LateInteractionLoss(torch.nn.Identity(), hinge, temperature=0.3)
        >>> queries = Tokens(torch.eye(2)[:, None])
        >>> loss.from_tokens(queries, [queries]).item()
        0.0
    """

    __signature__: ClassVar[inspect.Signature]  # what help() and inspect.signature read

    # From which temperature of mean scores on the objective hardly tells a good document from a bad one.
    flat_from: float | None = None

    # Attributes of the MoCo forms.
    queue_size: int
    queue_dtype: torch.dtype | None
    momentum: float | None
    enqueue_negatives: bool
    enqueue_batches: bool
    warmup_steps: int
    live_documents: bool

    def __init__(
        self,
        model: nn.Module,
        objective: Callable[..., Tensor],
        *,
        temperature: float = 0.02,
        explicit_negatives: bool = False,
        normalize_scores: bool = True,
        use_smooth_max: bool = False,
        tau: float = 0.1,
        pos_aware_negative_filtering: bool = False,
        filter_threshold: float = 0.95,
        filter_factor: float = 0.5,
        filter_mode: str = "damp",
        filter_margin: float | None = None,
        filter_explicit: bool = False,
        filter_warmup_steps: int = 0,
        norm_tol: float = 1e-3,
        mask_duplicate_documents: bool = True,
        negatives_per_step: int | None = None,
        learn_temperature: bool = False,
        matryoshka_dims: Sequence[int] | None = None,
        matryoshka_weights: Sequence[float] | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{self._name}: got a model of type {type(model).__name__}, expected a torch.nn.Module. Load it: "
                "pylate.models.ColBERT(name) or sentence_transformers.MultiVectorEncoder(name)."
            )
        if not callable(objective):
            raise TypeError(
                f"{self._name}: got an objective of type {type(objective).__name__}, expected a function of Scores "
                "that returns one loss per query. See st_colbert_losses.objectives."
            )
        self.model = model
        self.objective = objective
        self.explicit_negatives = explicit_negatives
        self.shifts = Shifts()  # what the trainer's optimizer trains besides the model
        self.temperature = temperature
        self._learn("temperature", learn_temperature)
        self.normalize_scores = normalize_scores
        self.use_smooth_max = use_smooth_max
        self.tau = tau
        self.pos_aware_negative_filtering = pos_aware_negative_filtering
        self.filter_threshold = filter_threshold
        self.filter_factor = filter_factor
        self.filter_mode = filter_mode
        self.filter_margin = filter_margin
        self.filter_explicit = filter_explicit
        self.filter_warmup_steps = filter_warmup_steps
        self.norm_tol = norm_tol
        self.mask_duplicate_documents = mask_duplicate_documents
        self.negatives_per_step = negatives_per_step
        self.matryoshka_dims = matryoshka_dims
        self.matryoshka_weights = matryoshka_weights
        self.gather_across_devices = gather_across_devices
        # Set by the forms that cache gradients; None encodes each column at once.
        self.mini_batch_size: int | None = None
        self.mini_batch_num_tokens: int | None = None
        self.show_progress_bar = False
        # Set by the forms that remember documents.
        self.memory: Memory | None = None
        self.steps = 0  # optimizer steps of the model
        self.signals = Signals()
        self._notices = Notices(self._name)
        shares_of_widths(self._name, matryoshka_dims, matryoshka_weights)  # refuses what does not go together
        hear_of_steps(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = whole_signature(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_names(cls, kwargs)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        value = check_option(type(self).__name__, name, value)
        if name.startswith("learn_"):
            check_fixed(type(self).__name__, name, value, getattr(self, name))
            return
        if name in ("queue", "momentum_model"):
            raise ValueError(
                f"{self._name}: got an assignment to {name}, expected it to stay: it is made once. Make a MoCo form, "
                "with momentum_model=... for an encoder of your own; loss.queue.enqueue(...) adds documents."
            )
        made = self.__dict__.get("_modules", {})
        if (memory := made.get("memory")) is not None:
            memory.check_fixed(self, name, value)
        before = made.get("model")
        if name == "model" and before is not None:
            check_model(self._name, value)
        super().__setattr__(name, value)
        if name == "model" and before is not None and unwrap(value) is not unwrap(before):
            if memory is not None:
                self.memory = Memory(self, None)
            hear_of_steps(self)
            self.forget()

    def get_config_dict(self) -> dict[str, Any]:
        """The hyperparameters, for the model card; JSON-safe."""
        names = ["temperature", *Options.__annotations__]
        if self._caches:
            names += ["mini_batch_size", "mini_batch_num_tokens"]
        config = {name: getattr(self, name) for name in names}
        return config if self.memory is None else {**config, **self.memory.config(self)}

    @property
    def temperature(self) -> float:
        """T; a learned one as it is now."""
        return self.shifts.now("temperature")

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.shifts.start("temperature", value)

    @property
    def learn_temperature(self) -> bool:
        """Whether the trainer's optimizer trains it."""
        return "temperature" in self.shifts

    @property
    def metrics(self) -> dict[str, float]:
        """Signals of the last batch by name."""
        return self.signals.read()

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.get_config_dict().items())

    @property
    def citation(self) -> str:
        """BibTeX of the papers behind the loss, for the model card."""
        return COLBERT_CITATION

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Compute the mean loss of a batch.

        Args:
            sentence_features: One feature dict per column, as the trainer's collator makes them; never changed.
            labels: (B,) integers, or ``None``.

        Returns:
            A scalar.
        """
        check_model(self._name, self.model)
        training = torch.is_grad_enabled() and unwrap(self.model).training
        features, labels = self._arrange(check_features(self._name, sentence_features), labels, training)
        check_columns(self._name, len(features), self.explicit_negatives)
        if not self._notices.looks:
            self._notices.roles([role_of(self.model, column) for column in features])
        if training:
            check_trainable(self._name, self.model, features, self.own_parameters())
            attach(self)
        memory = self.memory if training else None
        fresh: list[Tokens] = []  # what the queue takes: the first document columns, encoded for it
        if memory is None:
            tokens = self.embed(self.model, features)
        else:
            tokens, fresh = memory.embed(self, features)
        batch = self._batch(tokens, self._keys(features, tokens), labels)
        if memory is None:
            return self._loss(batch, log=training)
        queued = memory.queue.column(tokens[0].vectors.device) if self.steps >= self.warmup_steps else None
        loss = self._loss(batch, queued, log=training)
        if queued is not None:
            memory.queue.lend(loss)
        memory.take(batch, fresh)
        return loss

    def from_tokens(self, queries: Tokens, documents: Sequence[Tokens], labels: Tensor | None = None) -> Tensor:
        """Compute the same loss from embeddings: for wrappers, and for models that no trainer here knows.

        Args:
            queries: B queries. Embeddings are scored as they are, so normalise them first.
            documents: One entry per document column, the positives first.
            labels: (B,) integers, or ``None``.

        Returns:
            A scalar. Embeddings do not tell which inputs are copies, so no candidate is left out for its content; a
            queue is neither scored nor filled, and no negatives are drawn.
        """
        tokens = check_tokens(self._name, queries, documents)
        check_columns(self._name, len(tokens), self.explicit_negatives)
        return self._loss(self._batch(tokens, [None] * len(tokens), labels))

    def _arrange(
        self, features: list[dict[str, Any]], labels: Tensor | None, training: bool
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        """The columns that are encoded: in a training step, a few of the explicit negatives where that is asked."""
        if training and self.negatives_per_step is not None and len(features) > 2:
            check_rows(self._name, [count_rows(column) for column in features])
            features, _ = draw_negatives(features, self.negatives_per_step)
        return features, labels

    def _roles(self, documents: list[Column]) -> tuple[list[Column], list[Column]]:
        """The columns of the pool, the positives first, and those that are scored against their own row alone."""
        return (documents[:1], documents[1:]) if self.explicit_negatives else (documents, [])

    def _batch(self, tokens: list[Tokens], keys: list[Tensor | None], labels: Tensor | None) -> Batch:
        check_rows(self._name, [len(t) for t in tokens])
        labels, teacher = self._read_labels(labels, [len(t) for t in tokens])
        sizes = None
        if world_size() > 1 and self.gather_across_devices:
            sizes = check_processes(self._name, gather_sizes([len(t) for t in tokens], tokens[0].mask.device))
        elif world_size() > 1:
            self._notices.info("local", f"negatives stay local: each of {world_size()} processes uses its own batch.")
        return Batch.of(tokens, keys, labels, sizes, rank(), teacher)

    def _read_labels(self, labels: Tensor | None, rows: list[int]) -> tuple[Tensor | None, Tensor | None]:
        """The labels of the rows, and a teacher's scores of their documents."""
        check_labels(self._name, labels, rows[0])
        return labels, None

    def _keys(self, features: list[dict[str, Any]], tokens: list[Tokens]) -> list[Tensor | None]:
        if not self.mask_duplicate_documents:
            return [None] * len(tokens)
        keys = [content_keys(column, len(t)) for column, t in zip(features, tokens, strict=True)]
        if None in keys:
            self._notices.info(
                "content",
                "a column holds neither token ids nor pixels nor sound row by row, so copies of a positive in it "
                "count as negatives.",
            )
        return keys

    @property
    def _caches(self) -> bool:
        return self.mini_batch_size is not None or self.mini_batch_num_tokens is not None

    def embed(self, model: nn.Module, columns: list[dict[str, Any]], first: int = 0) -> list[Tokens]:
        """Embed columns, of which the first is column ``first`` of the batch: column 0 holds the queries."""
        if not self._caches:
            return [embed(model, column, is_query=i == 0) for i, column in enumerate(columns, start=first)]
        check_replay(self._name, model)
        if torch.is_grad_enabled() and self.mini_batch_num_tokens is None:
            self._notices.mini_batch(self.mini_batch_size, count_rows(columns[0]))
        return embed_in_mini_batches(
            model,
            columns,
            first,
            mini_batch_size=self.mini_batch_size,
            mini_batch_num_tokens=self.mini_batch_num_tokens,
            show_progress_bar=self.show_progress_bar,
        )

    def _loss(self, batch: Batch, queued: Queued | None = None, *, log: bool = False) -> Tensor:
        queries = batch.queries
        pool, hard = self._roles(batch.documents)
        if batch.sizes is not None:
            pool = gather_columns(pool)
        losses: list[Tensor] = []
        with torch.autocast(queries.tokens.vectors.device.type, enabled=False):
            learned = self.shifts.values_for(torch.promote_types(queries.tokens.vectors.dtype, torch.float32))
            hyperparameters = self._hyperparameters(learned)
            for width, share in shares_of_widths(self._name, self.matryoshka_dims, self.matryoshka_weights):
                scores = self._score(width, batch, pool, hard, queued if pool else None, hyperparameters)
                filtered = scores
                if self.pos_aware_negative_filtering and self.steps >= self.filter_warmup_steps:
                    filtered = filter_likely_positives(
                        scores,
                        threshold=self.filter_threshold,
                        margin=self.filter_margin,
                        factor=self.filter_factor,
                        mode=self.filter_mode,
                        explicit=self.filter_explicit,
                    )
                if not losses:
                    self._look(scores, filtered, learned, queries.tokens.vectors.dtype, log)
                row_losses = self._apply_objective(filtered, hyperparameters)
                row_losses = check_row_losses(self._name, row_losses, len(queries.tokens))
                if not losses:
                    self._notices.row_losses(row_losses)
                losses.append(share * row_losses.mean())
            loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        # A short batch weighs less in the mean over processes that follows; the value stays that of its own rows.
        weight = batch.weight
        return loss if weight == 1 else loss.detach() + weight * (loss - loss.detach())

    def _score(
        self,
        width: int | None,
        batch: Batch,
        pool: list[Column],
        hard: list[Column],
        queued: Queued | None,
        hyperparameters: dict[str, Any],
    ) -> Scores:
        """The scores of a batch, of the token vectors' first ``width`` dimensions where there is one."""
        queries, positives = batch.queries, batch.documents[0]
        if width is not None:
            queries, positives = cut(queries, width), cut(positives, width)
            pool, hard = [cut(column, width) for column in pool], [cut(column, width) for column in hard]
            queued = None if queued is None else cut(queued, width)
        scores = score(
            queries,
            pool[0] if pool else positives,
            pool,
            hard,
            queued,
            sizes=batch.sizes,
            tau=self.tau if self.use_smooth_max else None,
            normalize=self.normalize_scores,
            both_ways=hyperparameters.get("document_to_query_weight", 0.0) > 0,
        )
        return replace(scores, teacher=batch.teacher)

    def _apply_objective(self, scores: Scores, hyperparameters: dict[str, Any]) -> object:
        """One loss per query; the gradient of an objective's own parameters is the mean over processes."""
        if world_size() == 1 or not isinstance(self.objective, nn.Module):
            return self.objective(scores, **hyperparameters)
        own = {name: average_gradients(p) for name, p in self.objective.named_parameters()}
        return torch.func.functional_call(self.objective, own, (scores,), hyperparameters)

    def _hyperparameters(self, learned: dict[str, Tensor]) -> dict[str, Any]:
        """What the objective asks for by name; what this loss does not have is left to the objective's default."""
        function = self.objective.forward if isinstance(self.objective, nn.Module) else self.objective
        _, *asked = inspect.signature(function).parameters.values()
        if unknown := [p.name for p in asked if p.default is p.empty and not hasattr(self, p.name)]:
            raise ValueError(
                f"{self._name}: got an objective that asks for {unknown[0]!r}, expected hyperparameters of the loss, "
                "such as temperature. Give it a default, or bind it with functools.partial."
            )
        return {p.name: learned[p.name] if p.name in learned else getattr(self, p.name, p.default) for p in asked}

    def _look(
        self, scores: Scores, filtered: Scores, learned: dict[str, Tensor], dtype: torch.dtype, log: bool
    ) -> None:
        """Take the signals of a batch, and tell what is odd about it."""
        if "temperature" not in learned:
            self._notices.temperature(self.temperature, self.normalize_scores, self.flat_from)
        if not self.pos_aware_negative_filtering:
            self._notices.unused_filter(
                [name for name in FILTER_DEFAULTS if getattr(self, name) != FILTER_DEFAULTS[name]]
            )
        bounded = self.normalize_scores and not self.use_smooth_max
        self._notices.scores(scores, dtype, self.norm_tol if bounded else None, fills=self.memory is not None)
        others: dict[str, float | Tensor] = {name: value.detach() for name, value in learned.items()}
        if "temperature" not in learned:
            others["temperature"] = self.temperature
        if self.memory is not None:
            others["queue_fill"] = len(self.memory.queue) / self.memory.queue.capacity
            others["queue_age"] = self.memory.queue.mean_age
        self.signals.update(measure(scores, filtered), others, log=log)

    def _learn(self, name: str, wanted: bool) -> None:
        """Make a hyperparameter one that is learned, if that is wanted."""
        check_option(self._name, f"learn_{name}", wanted)
        if wanted:
            self.shifts.learn(name)

    def _remember(self, options: dict[str, Any]) -> None:
        """Make this a MoCo form, with a queue and a momentum encoder."""
        options = {**MEMORY_DEFAULTS, **options}
        for name in MEMORY_ATTRIBUTES:
            setattr(self, name, options[name])
        self.memory = Memory(self, options["momentum_model"])

    @property
    def queue(self) -> DocumentQueue:
        """The document queue of a MoCo form."""
        return self._moco_memory().queue

    @property
    def momentum_model(self) -> nn.Module | None:
        """The momentum encoder of a MoCo form, ``None`` with ``momentum=None``."""
        return self._moco_memory().momentum_model

    def after_step(self, moved: set[int]) -> None:
        """Called after every optimizer step of the model; the MoCo forms move their momentum encoder."""
        self.steps += 1
        if self.memory is not None:
            self.memory.after_step(self, moved)

    @property
    def remembers(self) -> bool:
        """Whether a checkpoint must hold more than the model for the loss to go on as it was."""
        filters_later = self.pos_aware_negative_filtering and self.filter_warmup_steps > 0
        return self.memory is not None or filters_later or any(True for _ in self.own_parameters())

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that are not the model's: what is learned, and an objective's."""
        yield from self.parameters(recurse=False)
        for name, module in self.named_children():
            if name != "model":
                yield from module.parameters()

    def own_state(self) -> dict[str, Any]:
        """The part of ``state_dict()`` that is not the model's, for a checkpoint."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith("model.")}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`own_state` returned.

        Raises:
            ValueError: If it is the state of another loss.
        """
        missing, unexpected = self.load_state_dict(state, strict=False)
        missing = [name for name in missing if not name.startswith("model.")]
        if missing or unexpected:
            raise ValueError(
                f"{self._name}: got a state without {missing} and with {unexpected}, expected that of the same loss. "
                "Make the loss as it was when the checkpoint was written, or remove its _st_colbert_losses file."
            )

    def forget(self) -> None:
        """Start again from the model as it is."""
        self.steps = 0
        self.shifts.forget()
        if self.memory is not None:
            self.memory.forget(self.model)

    def get_extra_state(self) -> dict[str, Any]:
        return {"steps": self.steps, "starts": {name: self.shifts.starts[name] for name in self.shifts}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.shifts.starts.update({name: value for name, value in state["starts"].items() if name in self.shifts})

    def _moco_memory(self) -> Memory:
        if self.memory is None:
            raise AttributeError  # __getattr__ has the words
        return self.memory

    def __getattr__(self, name: str) -> Any:
        if name in ("queue", "momentum_model"):
            raise AttributeError(
                f"{self._name}: has no {name}, expected a form with a queue and a momentum encoder, such as "
                "MoCoColbertLoss."
            )
        return super().__getattr__(name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call] # torch does not type it
        hear_of_steps(self)  # a copy hears of its own model's

    @property
    def _name(self) -> str:
        return type(self).__name__


# As __init_subclass__ does for the others.
LateInteractionLoss.__signature__ = whole_signature(LateInteractionLoss)
FILTER_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(LateInteractionLoss).parameters.items()
    if name.startswith("filter_")
}
