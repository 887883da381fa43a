"""Late interaction as a picture: which token of a document, or patch of a page, each token of a query matched."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Rectangle
from torch import Tensor

from st_colbert_losses.encoding import embed, unwrap, world_of

LONGEST_LABEL = 12  # letters of a token


class Matches(NamedTuple):
    """The scored tokens of a query and a document, and how they met.

    Attributes:
        query: Q tokens, as text.
        document: T tokens, as text.
        cosines: (Q, T).
        best: (Q,), for each query token the document token with the largest cosine.
        patches: (T,), for each document token its number among the page's patches, row by row, or -1 for text.
        special: (Q,), whether a query token is one of the tokenizer's own, such as [CLS] or padding.
    """

    query: list[str]
    document: list[str]
    cosines: Tensor
    best: Tensor
    patches: Tensor
    special: Tensor

    @property
    def score(self) -> float:
        """The mean of the best cosines, which is the score of `normalize_scores`."""
        return float(self.cosines.max(1).values.mean())


@torch.no_grad()
def find_matches(model: torch.nn.Module, query: str, document: Any) -> Matches:
    """Embed a query and a document, a text or a page image, as the losses do, and find each token's best match."""
    model = unwrap(model)
    training = model.training
    model.eval()
    (queries, query_ids), (documents, document_ids) = scored(model, query, True), scored(model, document, False)
    model.train(training)
    cosines = (queries @ documents.T).float().cpu()
    image_token = getattr(getattr(model, "processor", None), "image_token_id", None)
    is_patch = document_ids == (-1 if image_token is None else image_token)
    return Matches(
        as_text(model.tokenizer, query_ids),
        as_text(model.tokenizer, document_ids),
        cosines,
        cosines.argmax(1),
        torch.where(is_patch, is_patch.cumsum(0) - 1, -1),
        torch.isin(query_ids, torch.tensor(model.tokenizer.all_special_ids)),
    )


def scored(model: Any, content: Any, is_query: bool) -> tuple[Tensor, Tensor]:
    """Return the embeddings (T, D) and the ids (T,) of an input's scored tokens."""
    if world_of(model) == "pylate":
        features = model.tokenize([content], is_query=is_query, pad=is_query)
    else:
        task = "query" if is_query else "document"
        features = {**model.preprocess([content], prompt=model.prompts.get(task), task=task), "task": task}
    device = next(model.parameters()).device
    features = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in features.items()}
    ids = features["input_ids"][0].cpu()
    tokens = embed(model, features, is_query=is_query)
    mask = tokens.mask[0].bool()
    return tokens.vectors[0, mask], ids[mask.cpu()]


def as_text(tokenizer: Any, ids: Tensor) -> list[str]:
    """Return tokens as they read in a picture: byte-level tokens decoded, long ones cut."""
    texts = [tokenizer.decode([number]).strip() or "␣" for number in ids.tolist()]
    texts = [text.replace("$", r"\$") for text in texts]  # a dollar begins a formula in matplotlib
    return [text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…" for text in texts]


def draw_matches(matches: Matches, file: Path) -> None:
    """Draw a text: one row per query token, its cosine with every document token, a frame around the best."""
    rows, columns = matches.cosines.shape
    size = (max(6.0, 0.24 * columns + 2.0), max(2.5, 0.24 * rows + 1.6))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    shown = axes.imshow(matches.cosines, cmap="Blues", aspect="auto")
    for row, column in enumerate(matches.best.tolist()):
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="tab:orange", linewidth=1.8))
    axes.set_xticks(range(columns), matches.document, rotation=90, fontsize=8)
    axes.set_yticks(range(rows), matches.query, fontsize=8)
    axes.set_xlabel("document")
    axes.set_ylabel("query")
    axes.set_title(f"mean of the framed cosines {matches.score:.3f}", fontsize=9)
    figure.colorbar(shown, ax=axes, pad=0.01)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw_page_matches(matches: Matches, page: Any, grid: tuple[int, int], file: Path) -> None:
    """Draw a page: a frame around each patch that some query token matched best among the patches, and these tokens.

    Scored too, and not drawn: the tokenizer's own tokens, and the text that a model puts around a page. Above the
    picture stands how many tokens match a patch better than that text.

    Args:
        matches: Of a query and this page.
        page: The image.
        grid: Columns and rows of patches, as sentence-transformers' `get_n_patches` tells them.
        file: Where the picture goes.

    Raises:
        ValueError: The page has another number of patches than the grid.
    """
    columns, rows = grid
    patches = int(matches.patches.max()) + 1
    if patches != columns * rows:
        raise ValueError(f"draw_page_matches: got a grid of {columns} x {rows}, expected {patches} patches")
    best = matches.cosines[:, matches.patches >= 0].argmax(1).tolist()
    words: dict[int, list[str]] = {}
    for token, patch, special in zip(matches.query, best, matches.special, strict=True):
        if not special:
            words.setdefault(patch, []).append(token)
    drawn = matches.patches[matches.best][~matches.special]

    width, height = page.size
    figure, axes = plt.subplots(figsize=(7, 7 * height / width), layout="constrained")
    axes.imshow(page.convert("L"), cmap="gray", alpha=0.6)
    axes.axis("off")
    for number, (patch, tokens) in enumerate(sorted(words.items())):
        left, top = patch % columns * width / columns, patch // columns * height / rows
        colour = f"C{number % 10}"
        axes.add_patch(
            Rectangle((left, top), width / columns, height / rows, fill=False, edgecolor=colour, linewidth=2)
        )
        axes.text(
            *(left + 2, top + 2, " ".join(tokens)),
            color="white",
            fontsize=8,
            verticalalignment="top",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.5, "alpha": 0.85},
            wrap=True,
        )
    share = f"{(drawn >= 0).sum()} of {len(drawn)} tokens match a patch best"
    axes.set_title(f"mean of the best cosines {matches.score:.3f}; {share}", fontsize=9)
    figure.savefig(file, dpi=120)
    plt.close(figure)
