"""The model card: what the library writes for a trained model, and what only the training run knows.

A card is the last thing that is made. Whatever fails here costs one line of warning, never the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCard

import st_colbert_losses
from st_colbert_losses.encoding import unwrap, world_of
from training_recipes.matches import draw_matches, draw_page_matches, find_matches
from training_recipes.publish import with_model_name
from training_recipes.report import CURVE, draw_curve

TEMPLATES = Path(__file__).parents[1] / "model_cards"
MATCHES = "matches.png"
SHORT_QUERY, SHORT_DOCUMENT = 10, 25  # words of an example
PART = re.compile(r"^%% (.+)\n", re.MULTILINE)  # a line of a template that says where in the card a part goes


def leave_card(
    folder: Path,
    model: Any,
    loss: Any,
    *,
    held_out: Any,
    corpus: dict[str, Any],
    history: list[dict[str, Any]],
    **facts: Any,
) -> bool:
    """Write the card of a saved model, with its pictures; say in one line each what could not be done.

    Args:
        folder: Where the model was saved.
        model: The model.
        loss: What trained it.
        held_out: Queries and what is relevant to each (`retrieval_task.HeldOut`), for an example.
        corpus: Texts or page images by id.
        history: What the trainer logged.
        **facts: What else `write_card` takes.

    Returns:
        Whether there is a card.
    """
    try:
        query, documents = example(held_out, corpus)
        draw_curve(history, folder, f"{type(loss).__name__} on {facts['data']}")
        try:
            picture = draw(model, query, documents[0], folder / MATCHES)
        except Exception as error:  # a tokenizer or processor like no other
            warn(f"no picture of its matches: {error}")
            picture = None
        write_card(folder, model, loss, query=query, documents=documents, matches_file=picture, **facts)
    except Exception as error:  # a card is made of everything that a run touched
        warn(f"the model is saved in {folder}, but not its card: {type(error).__name__}: {error}")
        return False
    return True


def draw(model: Any, query: str, document: Any, file: Path) -> str:
    """Draw which tokens or patches of a document the tokens of a query match, and return the picture's name."""
    matches = find_matches(model, query, document)
    if isinstance(document, str):
        draw_matches(matches, file)
    else:
        from sentence_transformers.multi_vector_encoder.interpretability import get_n_patches

        draw_page_matches(matches, document, get_n_patches(unwrap(model), document.size), file)
    return file.name


def write_card(
    folder: Path,
    model: Any,
    loss: Any,
    *,
    model_name: str,
    query: str,
    documents: Sequence[Any],
    matches_file: str | None,
    **facts: Any,
) -> None:
    """Write `README.md`: the library's card with the parts of our template in it.

    Args:
        folder: Where the model was saved.
        model: The model.
        loss: What trained it.
        model_name: What the card's code loads: a folder, or `user/name`.
        query: An example.
        documents: Texts or page images, the one that answers the query first.
        matches_file: The picture of the matches, in the folder.
        **facts: What the template names and this module does not know.
    """
    model = unwrap(model)
    data = model.model_card_data
    data.model = model  # a momentum encoder shares the data of the model that it was copied from
    if hasattr(data, "save_dir"):
        data.save_dir = str(folder)  # where sentence-transformers puts the images of its examples
    data.add_tags(["st_colbert_losses", *(f"form:{form}" for form in forms(loss))])
    card = ModelCard.from_template(card_data=data, template_path=data.template_path, hf_emoji="🤗").content

    ours = our_parts(
        model,
        loss,
        model_name=model_name,
        query=query,
        documents=documents,
        matches_file=matches_file,
        **facts,
    )
    _, *parts = PART.split(ours)
    for headings, text in zip(parts[::2], parts[1::2], strict=True):
        card = insert(card, headings.split(" | "), text)
    card = card.replace(
        "### Framework Versions\n", f"### Framework Versions\n- st_colbert_losses: {st_colbert_losses.__version__}\n"
    )
    card = with_model_name(card, model_name)
    ModelCard(card)  # raises where the Hub could not read it
    (folder / "README.md").write_text(card, encoding="utf-8")


def our_parts(
    model: Any,
    loss: Any,
    *,
    model_name: str,
    query: str,
    documents: Sequence[Any],
    matches_file: str | None,
    **facts: Any,
) -> str:
    """Fill in the template, of texts or of page images; for the arguments see `write_card`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["python"] = lambda text: json.dumps(text, ensure_ascii=False)
    arguments = {name: repr(value) for name, value in loss.get_config_dict().items()}
    if (dtype := loss.get_config_dict().get("queue_dtype")) is not None:
        arguments["queue_dtype"] = f"torch.{dtype}"
    return environment.get_template("text.md.j2" if isinstance(documents[0], str) else "page_images.md.j2").render(
        library="PyLate" if world_of(unwrap(model)) == "pylate" else "sentence-transformers",
        model_name=model_name,
        example_query=query,
        example_documents=documents,
        matches_file=matches_file,
        loss=type(loss).__name__,
        objective=objective(loss),
        form=form_in_words(loss),
        loss_arguments=arguments,
        version=st_colbert_losses.__version__,
        curve=CURVE,
        **facts,
    )


def insert(card: str, headings: Sequence[str], text: str) -> str:
    """Insert a part before the first heading that the card has, or at its end."""
    if not text.strip():
        return card
    for heading in headings:
        before, found, after = card.partition(f"\n{heading}\n")
        if found:
            return f"{before.rstrip()}\n\n{text.strip()}\n{found}{after}"
    return f"{card.rstrip()}\n\n{text.strip()}\n"


def forms(loss: Any) -> list[str]:
    """Tell in which forms a loss is: direct, or cached, queue or both."""
    config = loss.get_config_dict()
    cached = config.get("mini_batch_size") is not None or config.get("mini_batch_num_tokens") is not None
    named = [name for name, holds in (("cached", cached), ("queue", "queue_size" in config)) if holds]
    return named or ["direct"]


def form_in_words(loss: Any) -> str:
    """Say how a loss gets its negatives and its gradients."""
    config, said = loss.get_config_dict(), [f"`{type(loss).__name__}`"]
    if "queue_size" in config:
        encoder = "the model itself" if config["momentum"] is None else "a momentum encoder"
        said.append(f"a queue of {config['queue_size']} documents of earlier batches, encoded by {encoder}")
    if "cached" in forms(loss):
        rows, tokens = config["mini_batch_size"], config["mini_batch_num_tokens"]
        said.append(f"gradient caching in mini-batches of {f'{tokens} tokens' if tokens else f'{rows} rows'}")
    return ", ".join(said)


def objective(loss: Any) -> str:
    """Name the objective behind a loss in any of its forms."""
    return type(loss).__name__.removeprefix("Cached").removeprefix("MoCo")


def warn(message: str) -> None:
    """Print one line of warning."""
    print(f"train: warning: {' '.join(message.split())}")


def example(held_out: Any, corpus: dict[str, Any]) -> tuple[str, list[Any]]:
    """Choose an example by nothing but place and length: the first short query that a short document answers.

    Args:
        held_out: The queries and what is relevant to each (`retrieval_task.HeldOut`).
        corpus: Texts or page images by id.

    Returns:
        The query; the document that answers it, and those that answer up to two other queries.
    """
    answers = {number: corpus[min(relevant)] for number, relevant in held_out.relevant.items()}
    short = [
        number
        for number, answer in answers.items()
        if len(held_out.queries[number].split()) <= SHORT_QUERY
        and (not isinstance(answer, str) or len(answer.split()) <= SHORT_DOCUMENT)
    ]
    chosen = (short or list(answers))[0]
    others = [answer for number, answer in answers.items() if number in short and answer != answers[chosen]]
    return held_out.queries[chosen], [answers[chosen], *others[:2]]
