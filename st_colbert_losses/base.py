"""The pipeline that all losses share: encode, score, leave out what is no negative, apply the objective, average."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

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
)
from st_colbert_losses.columns import Batch, Queued
from st_colbert_losses.content import content_keys
from st_colbert_losses.distributed import gather_columns, gather_sizes, rank, world_size
from st_colbert_losses.encoding import embed, is_document_column, unwrap
from st_colbert_losses.features import count_rows
from st_colbert_losses.memory import MEMORY_ATTRIBUTES, Memory
from st_colbert_losses.mini_batches import embed_in_mini_batches
from st_colbert_losses.momentum import hear_of_steps
from st_colbert_losses.notices import Notices
from st_colbert_losses.options import MEMORY_DEFAULTS, Options, check_names, check_option, whole_signature
from st_colbert_losses.queue import DocumentQueue
from st_colbert_losses.resume import attach
from st_colbert_losses.scores import lower_likely_positives, score
from st_colbert_losses.tokens import Tokens

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

    The five named losses are this class with an objective and its defaults; use it directly to try another one.

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
        pos_aware_negative_filtering: Lower pool negatives that score nearly as high as the positive.
        filter_threshold: Share of the positive's score above which a negative is lowered, in (0, 1].
        filter_factor: What a lowered negative's score is multiplied by, in [0, 1].
        norm_tol: How far a normalised score may exceed 1 before a warning says that tokens are not unit length.
        mask_duplicate_documents: Leave out candidates whose content is that of the row's positive, or of the positive
            of a row with the same query.
        gather_across_devices: Share the documents of all processes as negatives.

    Inputs:
        ``loss(sentence_features, labels=None)``: column 0 the query, column 1 the positive, all further columns
        negatives, with B rows each or n * B (n documents per row, row by row). ``labels``, (B,) integers: documents of
        other rows with a row's label are no negatives of it.

    Raises:
        ValueError: For an invalid hyperparameter, a missing column, a mismatch of rows, or labels that are not one
            integer per row.

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
        norm_tol: float = 1e-3,
        mask_duplicate_documents: bool = True,
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
        self.temperature = temperature
        self.normalize_scores = normalize_scores
        self.use_smooth_max = use_smooth_max
        self.tau = tau
        self.pos_aware_negative_filtering = pos_aware_negative_filtering
        self.filter_threshold = filter_threshold
        self.filter_factor = filter_factor
        self.norm_tol = norm_tol
        self.mask_duplicate_documents = mask_duplicate_documents
        self.gather_across_devices = gather_across_devices
        # Set by the forms that cache gradients; None encodes each column at once.
        self.mini_batch_size: int | None = None
        self.mini_batch_num_tokens: int | None = None
        self.show_progress_bar = False
        # Set by the forms that remember documents.
        self.memory: Memory | None = None
        self._notices = Notices(self._name)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = whole_signature(cls.__init__, LateInteractionLoss.__init__)  # type: ignore[attr-defined]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_names(cls.__name__, kwargs, inspect.signature(cls).parameters)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        check_option(type(self).__name__, name, value)
        if (memory := self.__dict__.get("_modules", {}).get("memory")) is not None:
            memory.check_fixed(self, name, value)
        super().__setattr__(name, value)

    def get_config_dict(self) -> dict[str, Any]:
        """The hyperparameters, for the model card; JSON-safe."""
        names = ["temperature", *Options.__annotations__]
        if self._caches:
            names += ["mini_batch_size", "mini_batch_num_tokens"]
        config = {name: getattr(self, name) for name in names}
        return config if self.memory is None else {**config, **self.memory.config(self)}

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
        features = check_features(self._name, sentence_features)
        check_columns(self._name, len(features), self.explicit_negatives)
        if not self._notices.looks and is_document_column(self.model, features[0]):
            self._notices.warn(
                "role",
                "column 0 was tokenised as documents, but it holds the queries. PyLate goes by the column's name: "
                "rename it so that it contains 'query' or 'anchor'.",
            )
        memory = self.memory if torch.is_grad_enabled() and unwrap(self.model).training else None
        fresh: list[Tokens] = []  # what the queue takes: the first document columns, encoded for it
        if memory is None:
            tokens = self.embed(self.model, features)
        else:
            if not memory.attached:
                attach(self, memory)
            tokens, fresh = memory.embed(self, features)
        batch = self._batch(tokens, self._keys(features, tokens), labels)
        if memory is None:
            return self._loss(batch)
        queued = memory.queue.column() if memory.steps >= self.warmup_steps else None
        loss = self._loss(batch, queued)
        if queued is not None:
            memory.queue.lend(loss)
        enter = [replace(c, tokens=t) for c, t in zip(batch.documents[: len(fresh)], fresh, strict=True)]
        with torch.no_grad():
            for column in enter if batch.sizes is None else gather_columns(enter):
                memory.queue.append(column)
        return loss

    def from_tokens(self, queries: Tokens, documents: Sequence[Tokens], labels: Tensor | None = None) -> Tensor:
        """Compute the same loss from embeddings: for wrappers, and for models that no trainer here knows.

        Args:
            queries: B queries. Embeddings are scored as they are, so normalise them first.
            documents: One entry per document column, the positives first.
            labels: (B,) integers, or ``None``.

        Returns:
            A scalar. Embeddings do not tell which inputs are copies, so no candidate is left out for its content.
        """
        tokens = check_tokens(self._name, queries, documents)
        check_columns(self._name, len(tokens), self.explicit_negatives)
        return self._loss(self._batch(tokens, [None] * len(tokens), labels))

    def _batch(self, tokens: list[Tokens], keys: list[Tensor | None], labels: Tensor | None) -> Batch:
        check_rows(self._name, [len(t) for t in tokens])
        check_labels(self._name, labels, len(tokens[0]))
        sizes = None
        if world_size() > 1 and self.gather_across_devices:
            sizes = check_processes(self._name, gather_sizes([len(t) for t in tokens], tokens[0].mask.device))
        elif world_size() > 1:
            self._notices.info("local", f"negatives stay local: each of {world_size()} processes uses its own batch.")
        return Batch.of(tokens, keys, labels, sizes, rank())

    def _keys(self, features: list[dict[str, Any]], tokens: list[Tokens]) -> list[Tensor | None]:
        if not self.mask_duplicate_documents:
            return [None] * len(tokens)
        keys = [content_keys(column, len(t)) for column, t in zip(features, tokens, strict=True)]
        if None in keys:
            self._notices.info(
                "content",
                "a column holds neither token ids nor pixels row by row, so copies of a positive in it count as "
                "negatives.",
            )
        return keys

    @property
    def _caches(self) -> bool:
        return self.mini_batch_size is not None or self.mini_batch_num_tokens is not None

    def embed(self, model: nn.Module, columns: list[dict[str, Any]], first: int = 0) -> list[Tokens]:
        """Embed columns, of which the first is column ``first`` of the batch: column 0 holds the queries."""
        if not self._caches:
            return [embed(model, column, is_query=i == 0) for i, column in enumerate(columns, start=first)]
        check_replay(self._name, model, columns)
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

    def _loss(self, batch: Batch, queued: Queued | None = None) -> Tensor:
        self._notices.temperature(self.temperature, self.normalize_scores)
        queries, documents = batch.queries, batch.documents
        pool, hard = (documents[:1], documents[1:]) if self.explicit_negatives else (documents, [])
        if batch.sizes is not None:
            pool = gather_columns(pool)
        with torch.autocast(queries.tokens.vectors.device.type, enabled=False):
            tau = self.tau if self.use_smooth_max else None
            scores = score(queries, pool, hard, queued, tau=tau, normalize=self.normalize_scores)
            bounded = self.normalize_scores and not self.use_smooth_max
            self._notices.scores(scores, queries.tokens.vectors.dtype, self.norm_tol if bounded else None)
            if self.pos_aware_negative_filtering:
                scores = lower_likely_positives(scores, self.filter_threshold, self.filter_factor)
            _, *names = inspect.signature(self.objective).parameters
            losses = self.objective(scores, **{name: getattr(self, name) for name in names})
            loss = check_row_losses(self._name, losses, len(queries.tokens)).mean()
        # A short batch weighs less in the mean over processes that follows; the value stays that of its own rows.
        weight = batch.weight
        return loss if weight == 1 else loss.detach() + weight * (loss - loss.detach())

    def _remember(self, options: dict[str, Any]) -> None:
        """Make this a MoCo form, with a queue and a momentum encoder."""
        options = {**MEMORY_DEFAULTS, **options}
        for name in MEMORY_ATTRIBUTES:
            setattr(self, name, options[name])
        self.memory = Memory(self, options["momentum_model"])
        hear_of_steps(self)

    @property
    def queue(self) -> DocumentQueue:
        """The document queue of a MoCo form."""
        return self._needs_memory().queue

    @property
    def momentum_model(self) -> nn.Module | None:
        """The momentum encoder of a MoCo form, ``None`` with ``momentum=None``."""
        return self._needs_memory().momentum_model

    def after_step(self, moved: set[int]) -> None:
        """Called after every optimizer step of the model; the MoCo forms move their momentum encoder."""
        self._needs_memory().after_step(self, moved)

    def _needs_memory(self) -> Memory:
        if self.memory is None:
            raise ValueError(f"{self._name}: has no queue and no momentum encoder, expected a MoCo form. Use MoCo...")
        return self.memory

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.memory is not None:  # a copy hears of its own model's steps
            hear_of_steps(self)

    @property
    def _name(self) -> str:
        return type(self).__name__


LateInteractionLoss.__signature__ = whole_signature(  # type: ignore[attr-defined]
    LateInteractionLoss.__init__, LateInteractionLoss.__init__
)
