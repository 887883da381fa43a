"""The peers' losses in the trainer of sentence-transformers, each in its library's own formulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from benchmarks.quality.cells import COLPALI, PYLATE, PYLATE_CACHED, ST, ST_CACHED

MINI_BATCH = 16


class Encoder(nn.Module):
    """A MultiVectorEncoder as PyLate's losses see a model: called with features alone, nothing on its skiplist."""

    skiplist: tuple[int, ...] = ()
    do_query_expansion = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.model(features, task=features["task"])


def pylate(model: nn.Module, temperature: float) -> nn.Module:
    from pylate.losses import Contrastive

    return Contrastive(Encoder(model), temperature=temperature)


class Uncut(str):
    """A word among the features, which PyLate's cached loss would slice into mini-batches as if it were a tensor."""

    def __getitem__(self, key: Any) -> str:
        return self


class PyLateCached(nn.Module):
    def __init__(self, model: nn.Module, temperature: float) -> None:
        from pylate.losses import CachedContrastive

        super().__init__()
        self.loss = CachedContrastive(Encoder(model), mini_batch_size=MINI_BATCH, temperature=temperature)

    def forward(self, features: list[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        words = [{key: Uncut(value) for key, value in column.items() if isinstance(value, str)} for column in features]
        return self.loss([{**column, **own} for column, own in zip(features, words, strict=True)])


def sentence_transformers(model: nn.Module, temperature: float) -> nn.Module:
    from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss

    return MultiVectorMultipleNegativesRankingLoss(model, scale=1 / temperature)


def sentence_transformers_cached(model: nn.Module, temperature: float) -> nn.Module:
    from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss

    return CachedMultiVectorMultipleNegativesRankingLoss(model, scale=1 / temperature, mini_batch_size=MINI_BATCH)


class ColPali(nn.Module):
    """colpali-engine's pairwise loss, on sums as the released ColPali; padding is zeroed, as its models do."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        from colpali_engine.loss import ColbertPairwiseCELoss

        super().__init__()
        self.model = model
        self.loss = ColbertPairwiseCELoss(temperature=temperature, normalize_scores=False)

    def forward(self, features: list[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        encoded = [self.model(dict(column), task=column["task"]) for column in features]
        return self.loss(*(e["token_embeddings"] * e["attention_mask"][..., None] for e in encoded))


PEERS: dict[str, Callable[..., nn.Module]] = {
    PYLATE: pylate,
    PYLATE_CACHED: PyLateCached,
    ST: sentence_transformers,
    ST_CACHED: sentence_transformers_cached,
    COLPALI: ColPali,
}


def make_loss(name: str, model: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    """Make one of our losses or a peer's, by its name."""
    import st_colbert_losses

    return PEERS[name](model, **arguments) if name in PEERS else getattr(st_colbert_losses, name)(model, **arguments)


def settings_of(loss: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a result records of a loss."""
    own = type(loss).__module__.startswith("st_colbert_losses")
    return loss.get_config_dict() if own else {"module": type(loss).__module__, **arguments}
