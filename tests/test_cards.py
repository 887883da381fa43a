"""Model cards: what they say of a training, that their code runs, that the Hub takes them, that none costs a model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, metadata_load
from PIL import Image

import st_colbert_losses
from tests.hub_server import hub, validation
from tests.models import PYLATE, encoded, tiny_model
from training_recipes import card as cards
from training_recipes.matches import draw_matches, draw_page_matches, find_matches
from training_recipes.retrieval_task import HeldOut

ROOT = Path(__file__).parents[1]
QUERY = "what sings two"
DOCUMENTS = ["bird sings. eats", "three dog", 'fish "red" \\ one']
TEXTS = {
    "held_out": HeldOut({"q0": QUERY, "q1": "two cat", "q2": "dog"}, {"q0": {"d0"}, "q1": {"d1"}, "q2": {"d2"}}),
    "corpus": {f"d{number}": document for number, document in enumerate(DOCUMENTS)},
}
FACTS = {
    "history": [{"loss": 2.0, "step": 1}, {"eval_dev_ndcg@10": 0.5, "step": 2}],
    "momentum_published": False,
    "world": "a library",
    "base": "a base",
    "data": "some data",
    "train_rows": 12,
    "test_queries": 6,
    "corpus_size": 24,
    "command": "python -m training_recipes.train",
    "seed": 42,
    "steps": 2,
    "batch_size": 4,
    "minutes": "0.1",
    "comparison": "| system | nDCG@10 |\n|---|---:|\n| BM25 | 0.4 |",
}
LOSSES = [name for name in st_colbert_losses.__all__ if re.fullmatch(r"(Cached|MoCo)?Colbert.*Loss", name)]


def card_of(folder: Path, loss_name: str = "ColbertLoss", **arguments) -> str:
    """Save a tiny model with a card, and return the card."""
    model = tiny_model()
    loss = getattr(st_colbert_losses, loss_name)(model, **arguments)
    model.save_pretrained(str(folder), create_model_card=False)
    assert cards.leave_card(folder, model, loss, model_name=str(folder), **TEXTS, **FACTS)
    return (folder / "README.md").read_text(encoding="utf-8")


def width_of(picture: Path) -> int:
    with Image.open(picture) as image:
        return image.size[0]


@pytest.mark.parametrize("name", LOSSES)
def test_a_card_rebuilds_its_loss(name: str, tmp_path: Path):
    """The code of the card makes a loss with the same hyperparameters, all of them."""
    loss = getattr(st_colbert_losses, name)(torch.nn.Identity(), temperature=0.125)
    facts = {**FACTS, "model_name": "m", "query": QUERY, "documents": DOCUMENTS, "matches_file": None}
    facts.pop("history")
    text = cards.our_parts(torch.nn.Identity(), loss, **facts)
    code = re.findall(r"```python\n(from st_colbert_losses.*?)```", text, re.DOTALL)
    scope = {"model": torch.nn.Identity(), "torch": torch}
    exec(code[0], scope)
    assert type(scope["loss"]) is type(loss)
    assert scope["loss"].get_config_dict() == loss.get_config_dict()
    assert ("softplus" in text) is ("CE" in name or "Sigmoid" in name)


def test_tags_tell_the_form(tmp_path: Path):
    model = torch.nn.Identity()
    assert cards.forms(st_colbert_losses.ColbertLoss(model)) == ["direct"]
    assert cards.forms(st_colbert_losses.CachedColbertLoss(model)) == ["cached"]
    assert cards.forms(st_colbert_losses.MoCoColbertLoss(model)) == ["queue"]
    assert cards.forms(st_colbert_losses.MoCoColbertLoss(model, mini_batch_num_tokens=9)) == ["cached", "queue"]
    text = card_of(tmp_path, "CachedColbertSigmoidLoss")
    assert {"st_colbert_losses", "form:cached"} <= set(metadata_load(tmp_path / "README.md")["tags"])
    assert f"- st_colbert_losses: {st_colbert_losses.__version__}\n" in text.partition("### Framework Versions")[2]


def test_parts_stand_where_they_belong(tmp_path: Path):
    text = card_of(tmp_path)
    order = ["## What it looks at", "## Model Details", "## Usage", "PyLate", "## How this model was trained"]
    order += ["## Training Details", "## Citation"]
    places = [
        text.index(f"\n{part}") if part.startswith("#") else text.index(part, text.index("## Usage")) for part in order
    ]
    assert places == sorted(places)
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert width_of(tmp_path / picture) > 300
    assert len(re.findall(r"!\[", text)) == 2
    assert str(ROOT) not in text


# huggingface_hub 1.33 validates at the Hub's own address, whatever HF_ENDPOINT says.
VALIDATE = """
import sys
from types import SimpleNamespace
from huggingface_hub import ModelCard, repocard
session = repocard.get_session()
def post(url, **options):
    return session.post(sys.argv[2] + url[url.index("/api/"):], **options)
repocard.get_session = lambda: SimpleNamespace(post=post)
ModelCard.load(sys.argv[1]).validate()
"""


def test_the_hub_takes_the_card(tmp_path: Path):
    """By the client's own validation, in a process that asks the server here."""
    card_of(tmp_path / "model", "MoCoColbertLoss", queue_size=8)
    with hub() as server:
        environment = {**os.environ, **server.environment(tmp_path / "home")}
        command = [sys.executable, "-W", "error", "-c", VALIDATE, str(tmp_path / "model" / "README.md"), server.url]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert server.requests == ["POST /api/validate-yaml"]


def test_code_of_the_card_runs_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """All of it that loads this model in this world; PyLate's index wants more text than a tiny model's tokens."""
    text = card_of(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    library = "pylate" if PYLATE else "sentence_transformers"
    blocks = [
        block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if f"from {library} import" in block
    ]
    blocks = [block for block in blocks if "PLAID" not in block]
    assert len(blocks) == (2 if PYLATE else 1)
    for block in blocks:
        assert str(tmp_path / "model") in block
        exec(block, {})
    assert (DOCUMENTS[0] if PYLATE else "tensor(") in capsys.readouterr().out


if not PYLATE:

    def test_sentence_transformers_reads_what_pylate_saved(tmp_path: Path):
        """The card of a PyLate model says so; PyLate's files are written by hand here, as version 1.6 writes them."""
        model = tiny_model()
        folder = tmp_path / "model"
        model.save_pretrained(str(folder))
        expected = encoded(model, DOCUMENTS, is_query=False)
        shutil.rmtree(folder / "2_MultiVectorMask")
        shutil.rmtree(folder / "3_Normalize")
        modules = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
        rows = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(rows))
        dense = json.loads((folder / "1_Dense" / "config.json").read_text())
        dense = {key: dense[key] for key in ("in_features", "out_features", "bias", "activation_function")}
        (folder / "1_Dense" / "config.json").write_text(json.dumps({**dense, "use_residual": False}))
        (folder / "config_sentence_transformers.json").write_text(
            json.dumps(
                {
                    "model_type": "ColBERT",
                    "prompts": {"query": "", "document": ""},
                    "query_prefix": "",
                    "document_prefix": "",
                    "query_length": 16,
                    "document_length": 64,
                    "attend_to_expansion_tokens": False,
                    "skiplist_words": [],
                    "do_query_expansion": False,
                }
            )
        )
        again = type(model)(str(folder), device="cpu")
        for one, other in zip(encoded(again, DOCUMENTS, is_query=False), expected, strict=True):
            assert torch.equal(one, other)

    def test_a_card_that_fails_costs_one_line_and_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
        model = tiny_model()
        model.save_pretrained(str(tmp_path), create_model_card=False)
        monkeypatch.setattr(cards, "find_matches", lambda *_: 1 / 0)
        monkeypatch.setattr(cards.ModelCard, "from_template", lambda **_: 1 / 0)
        loss = st_colbert_losses.ColbertLoss(model)
        assert not cards.leave_card(tmp_path, model, loss, model_name="m", **TEXTS, **FACTS)
        picture, card = capsys.readouterr().out.splitlines()
        assert picture.startswith("train: warning: no picture")
        assert card.startswith("train: warning: the model is saved")
        assert "division by zero" in card
        for one, other in zip(type(model)(str(tmp_path), device="cpu").parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)


# The picture


@pytest.mark.parametrize("expansion", [True, False])
def test_matches_are_those_of_the_search(expansion: bool, tmp_path: Path):
    """The best cosines of the embeddings that the library's own search gets."""
    model = tiny_model(expansion=expansion)
    matches = find_matches(model.train(), QUERY, DOCUMENTS[0])
    assert model.training
    [query], [document] = (
        encoded(model, [text], is_query=is_query) for text, is_query in [(QUERY, True), (DOCUMENTS[0], False)]
    )
    cosines = torch.as_tensor(query) @ torch.as_tensor(document).T
    assert torch.allclose(matches.cosines, cosines, atol=1e-6)  # one text or several in a batch: rounding
    assert matches.best.tolist() == [max(range(len(row)), key=row.__getitem__) for row in cosines.tolist()]
    assert len(matches.query) == len(query)
    assert len(matches.document) == len(document)
    assert {"sings", "what", "two"} <= set(matches.query)
    assert {"bird", "sings", "eats"} <= set(matches.document)
    assert matches.special.tolist() == [token in ("[CLS]", "[SEP]", "[MASK]") for token in matches.query]
    draw_matches(matches, tmp_path / "matches.png")
    assert width_of(tmp_path / "matches.png") > 300


def test_marks_are_drawn_at_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    matches = find_matches(tiny_model(), QUERY, DOCUMENTS[0])
    frames = []
    monkeypatch.setattr("matplotlib.axes.Axes.add_patch", lambda _, frame: frames.append(frame.get_xy()))
    draw_matches(matches, tmp_path / "matches.png")
    assert frames == [(best - 0.5, row - 0.5) for row, best in enumerate(matches.best.tolist())]


if not PYLATE:

    @pytest.mark.parametrize("family", ["colpali", "colqwen2"])
    def test_patches_over_a_page(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        from sentence_transformers.multi_vector_encoder.interpretability import get_n_patches

        from tests.images import page, page_retriever

        model, image = page_retriever(family, tmp_path / "model"), page("birds sing", (90, 120))
        matches = find_matches(model, "who sings", image)
        columns, rows = get_n_patches(model, image.size)
        assert matches.patches[matches.patches >= 0].tolist() == list(range(columns * rows))
        query = model.encode_query(["who sings"], show_progress_bar=False)[0]
        document = model.encode_document([image], show_progress_bar=False)[0]
        assert torch.equal(matches.best, (query @ document.T).argmax(1))

        # The tokens of the query match the patches 1, 5, 5 best; the last is nearer still to a token that is no patch.
        cosines = torch.zeros(4, len(matches.patches))
        for row, patch in enumerate((1, 5, 5)):
            cosines[row, matches.patches == patch] = 1
        cosines[3, matches.patches == 2], cosines[3, (matches.patches == -1).nonzero()[0]] = 0.5, 1.0
        known = matches._replace(
            query=["a", "b", "c", "d"],
            cosines=cosines,
            best=cosines.argmax(1),
            special=torch.tensor([False, False, False, False]),
        )
        said = []
        monkeypatch.setattr("matplotlib.axes.Axes.set_title", lambda _, title, **__: said.append(title))
        monkeypatch.setattr("matplotlib.axes.Axes.text", lambda *args, **__: said.append(args[3]))
        frames = []
        monkeypatch.setattr("matplotlib.axes.Axes.add_patch", lambda _, frame: frames.append(frame.get_xy()))
        draw_page_matches(known, image, (columns, rows), tmp_path / "page.png")
        width, height = image.size[0] / columns, image.size[1] / rows
        assert frames == [(patch % columns * width, patch // columns * height) for patch in (1, 2, 5)]
        assert said == ["a", "d", "b c", "mean of the best cosines 1.000; 3 of 4 tokens match a patch best"]
        with pytest.raises(ValueError, match="expected"):
            draw_page_matches(known, image, (columns + 1, rows), tmp_path / "page.png")


if not PYLATE:

    def test_card_of_a_page_retriever(tmp_path: Path, capsys):
        from tests.images import page, page_retriever

        model = page_retriever("colpali", tmp_path / "base")
        folder = tmp_path / "model"
        model.save_pretrained(str(folder), create_model_card=False)
        pages = {text: page(text, (90, 120)) for text in ("birds sing", "dogs bark")}
        held_out = HeldOut({"q": "who sings"}, {"q": {"birds sing"}})
        loss = st_colbert_losses.CachedColbertLoss(model, mini_batch_size=4)
        assert cards.leave_card(folder, model, loss, held_out=held_out, corpus=pages, model_name=str(folder), **FACTS)
        assert capsys.readouterr().out == ""
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert "the patches framed" in text
        blocks = [
            block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "MultiVectorEncoder" in block
        ]
        for block in blocks:
            exec(block, {})
        assert "tensor(" in capsys.readouterr().out
        assert validation(text)[0] == 200


# The cards that are kept here


@pytest.mark.parametrize("file", sorted((ROOT / "model_cards").glob("*/README.md")), ids=lambda file: file.parent.name)
def test_committed_cards(file: Path):
    text = file.read_text(encoding="utf-8")
    assert ModelCard(text).data.library_name
    assert validation(text) == (200, {"warnings": [], "errors": []})
    assert "## How this model was trained" in text
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (file.parent / picture).is_file()


def test_templates_are_in_the_wheel():
    import tomllib

    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    inside = {str(path.relative_to(ROOT)) for path in (ROOT / "model_cards").glob("*.j2")}
    assert set(wheel["force-include"]) == inside
