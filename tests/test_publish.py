"""Publishing to a Hub on loopback: what goes up, what stays, what is said when it fails, and that it loads back."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from tests.hub_server import PART, Hub, hub, validation
from tests.models import WORDS, bert_folder, encoded, tiny_model
from training_recipes import publish as publishing
from training_recipes import train

ROOT = Path(__file__).parents[1]
# The client waits between its retries, half a minute in all; here it need not.
QUICK = "import runpy, sys, time; time.sleep = lambda _: None; sys.argv = sys.argv[1:]; "
RUN = QUICK + "runpy.run_module('training_recipes.' + sys.argv[0], run_name='__main__')"
QUERIES, DOCUMENTS = ["what sings", "two cat eats"], ["bird sings. eats", "three dog"]


@pytest.fixture
def server() -> Iterator[Hub]:
    with hub() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a training leaves behind, with weights of more than one part and everything that shall stay at home."""
    folder = tmp_path / "model"
    (folder / "1_Dense").mkdir(parents=True)
    (folder / "checkpoint-2").mkdir()
    code = 'models.ColBERT(\n    model_name_or_path="a/b",\n)\n<img src="assets/page.png">'
    (folder / "README.md").write_text(f"---\nlicense: mit\n---\n\n{code}\n")
    for name in ("modules.json", "1_Dense/config.json", "checkpoint-2/config.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * (3 * PART // 256))
    for name in ("_st_colbert_losses.pt", "_st_colbert_losses_one_rank0.pt", "optimizer.pt", "trainer_state.json"):
        (folder / name).write_bytes(b"state")
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*") if file.is_file()}


def run(server: Hub, home: Path, *argv: str, token: str | None = "hf_writes") -> subprocess.CompletedProcess[str]:
    """Run a command of the recipes against the server."""
    return subprocess.run(
        [sys.executable, "-c", RUN, *argv],
        cwd=ROOT,
        env={**os.environ, **server.environment(home, token), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def publish(
    server: Hub, folder: Path, *argv: str, token: str | None = "hf_writes"
) -> subprocess.CompletedProcess[str]:
    """Publish a folder; whatever comes of it, the folder is as it was."""
    before = contents(folder)
    done = run(server, folder.parent / "home", "publish", str(folder), *argv, token=token)
    assert contents(folder) == before
    return done


def complaint(done: subprocess.CompletedProcess[str], command: str = "publish") -> str:
    """The one line of a command that failed, among progress bars."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith(f"{command}: ")]
    return line


def test_publishes_the_model_and_nothing_else(server: Hub, folder: Path):
    done = publish(server, folder, "user/birds")
    assert done.returncode == 0, done.stderr
    assert f"{server.url}/user/birds/commit/" in done.stdout
    assert server.paths("user/birds") == [
        ".gitattributes",
        "1_Dense/config.json",
        "README.md",
        "model.safetensors",
        "modules.json",
    ]
    assert server.repositories["user/birds"].private is False
    assert server.content("user/birds", "model.safetensors") == (folder / "model.safetensors").read_bytes()
    assert sum("PUT /lfs" in request for request in server.requests) == 3  # in parts
    card = server.content("user/birds", "README.md").decode()
    assert 'model_name_or_path="user/birds"' in card
    assert f'"{server.url}/user/birds/resolve/main/assets/page.png"' in card


def test_private_and_without_a_user(server: Hub, folder: Path):
    assert publish(server, folder, "birds", "--private").returncode == 0
    assert server.repositories["user/birds"].private is True


def test_a_repository_with_files_needs_consent(server: Hub, folder: Path):
    assert publish(server, folder, "user/birds").returncode == 0
    (folder / "modules.json").write_text("[]")
    assert "has files already" in complaint(publish(server, folder, "user/birds"))
    assert "public" in complaint(publish(server, folder, "user/birds", "--exist_ok", "--private"))
    assert server.content("user/birds", "modules.json") == b"{}"
    assert publish(server, folder, "user/birds", "--exist_ok").returncode == 0
    assert server.content("user/birds", "modules.json") == b"[]"
    assert len(server.repositories["user/birds"].commits) == 3


@pytest.mark.parametrize(
    ("token", "name", "expected"),
    [
        (None, "user/birds", "no token found"),
        ("hf_wrong", "user/birds", "does not know the token"),
        ("hf_reads", "user/birds", "may only read"),
        ("hf_writes", "stranger/birds", "may not write to stranger/birds"),
        ("hf_writes", "user/bir ds", "no name for a repository"),
    ],
)
def test_who_may_not_publish(token: str | None, name: str, expected: str, server: Hub, folder: Path):
    assert expected in complaint(publish(server, folder, name, token=token))
    assert not server.repositories


@pytest.mark.parametrize("where", ["upload", "commit"])
def test_a_connection_that_breaks_half_way(where: str, server: Hub, folder: Path):
    """The same command completes it, and sends no large file a second time."""
    server.breaks_at = where
    line = complaint(publish(server, folder, "user/birds"))
    assert "failed" in line
    assert f"The model is whole in {folder}" in line
    assert server.paths("user/birds") == [".gitattributes"]
    sent = len(server.requests)
    server.breaks_at = ""
    assert publish(server, folder, "user/birds").returncode == 0
    assert server.content("user/birds", "model.safetensors") == (folder / "model.safetensors").read_bytes()
    again = sum("PUT /lfs" in request for request in server.requests[sent:])
    assert again == (3 if where == "upload" else 0)


def test_nobody_answers(folder: Path):
    with hub() as server:
        pass
    assert "failed" in complaint(publish(server, folder, "user/birds"))


def test_a_card_that_the_hub_refuses(server: Hub, folder: Path):
    (folder / "README.md").write_text("---\nbase_model: /home/me/model\n---\n")
    line = complaint(publish(server, folder, "user/birds"))
    assert "refuses the card" in line
    assert '"base_model" with value "/home/me/model" is not valid' in line


def test_a_folder_without_a_model(server: Hub, tmp_path: Path):
    assert "no modules.json" in complaint(publish(server, tmp_path / "nothing", "user/birds"))
    assert not server.requests


LOAD = """
import sys, torch
from tests.models import PYLATE, encoded
if PYLATE:
    from pylate.models import ColBERT as Model
else:
    from sentence_transformers import MultiVectorEncoder as Model
name, queries, documents, file = sys.argv[1], sys.argv[2:4], sys.argv[4:6], sys.argv[6]
model = Model(name, device="cpu")
torch.save([*encoded(model, queries, is_query=True), *encoded(model, documents, is_query=False)], file)
"""


def test_loads_back_by_name_with_the_same_embeddings(server: Hub, tmp_path: Path):
    """In this world's library, from a private repository, with nothing of the model left here."""
    model = tiny_model()
    model.save_pretrained(str(tmp_path / "saved"))
    expected = [*encoded(model, QUERIES, is_query=True), *encoded(model, DOCUMENTS, is_query=False)]
    done = publish(server, tmp_path / "saved", "user/birds", "--private")
    assert done.returncode == 0, done.stderr
    (tmp_path / "saved").rename(tmp_path / "gone")

    file = tmp_path / "embeddings.pt"
    environment = {**os.environ, **server.environment(tmp_path / "other-home", "hf_reads"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOAD, "user/birds", *QUERIES, *DOCUMENTS, str(file)]
    loaded = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    assert any("GET /user/birds/resolve" in request for request in server.requests)
    for one, other in zip(torch.load(file), expected, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


# From a training


def training(tmp_path: Path, *argv: str) -> list[str]:
    """A command line of two steps, from a tiny encoder, on rows that it can tell apart."""
    pairs = zip(WORDS, WORDS[7:], strict=False)
    rows = [{"query": f"what {word}", "positive": f"{word} {other}"} for word, other in pairs]
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    base, data, folder = bert_folder(tmp_path / "bert"), tmp_path / "rows.jsonl", tmp_path / "birds"
    command = f"train --model {base} --dataset {data} --output_dir {folder} --max_steps 2 --push_to_hub true"
    return [*command.split(), *"--per_device_train_batch_size 4 --query_length 8 --document_length 16".split(), *argv]


def test_a_training_that_may_not_publish_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def refuse(name: str, **options: object) -> str:
        asked.append((name, options))
        raise publishing.CannotPublish("the token may only read")

    monkeypatch.setattr(train, "reserve", refuse)
    for argv in ["", "--hub_model_id user/birds --hub_private_repo true --hub_exist_ok true --hub_token hf_reads"]:
        with pytest.raises(SystemExit, match="train: cannot --push_to_hub: the token may only read"):
            train.main(training(tmp_path, *argv.split())[1:])
    assert asked == [
        ("birds", {"private": False, "exist_ok": False, "token": None}),
        ("user/birds", {"private": True, "exist_ok": True, "token": "hf_reads"}),
    ]
    assert [file.name for file in (tmp_path / "birds").iterdir()] == []


def test_a_training_publishes_the_momentum_encoder(server: Hub, tmp_path: Path):
    """The connection breaks after the training: the model is whole, and the command that is named completes it."""
    server.breaks_at = "upload"
    folder, loss = tmp_path / "birds", "--loss MoCoColbertLoss --learning_rate 0.01 --publish_momentum true"
    loss += ' --loss_arguments {"momentum":0.5} --save_steps 1 --save_total_limit 2'
    name = "--hub_model_id user/birds --hub_private_repo true"
    line = complaint(run(server, tmp_path / "home", *training(tmp_path, *loss.split(), *name.split())), "train")
    remedy = f"python -m training_recipes.publish {folder} user/birds --exist_ok"
    assert f"The model is whole in {folder}; with {remedy}" in line
    assert server.paths("user/birds") == [".gitattributes"]

    server.breaks_at = ""
    assert run(server, tmp_path / "home", *remedy.replace("training_recipes.", "").split()[2:]).returncode == 0
    assert server.repositories["user/birds"].private
    assert {"README.md", "matches.png", "training_curve.png", "modules.json"} <= set(server.paths("user/birds"))
    assert not [path for path in server.paths("user/birds") if "checkpoint" in path or "_st_colbert" in path]
    card = server.content("user/birds", "README.md").decode()
    assert {"form:queue", "loss:MoCoColbertLoss"} <= set(re.findall(r"^- (\S+)$", card, re.MULTILINE))
    assert "those of the momentum encoder" in card
    assert '("user/birds")' in card
    assert validation(card) == (200, {"warnings": [], "errors": []})

    # Two steps of key = 0.5 * key + 0.5 * live, from the encoder that it all began with.
    start, first, last, published = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "bert", folder / "checkpoint-1", folder / "checkpoint-2", folder)
    )
    # PyLate adds words, and transformers may save layer norms under their old names.
    alike = [name for name in start if name in last and start[name].shape == last[name].shape]
    assert len(alike) > 25
    for name in alike:
        expected = (start[name].double() + first[name].double()) / 4 + last[name].double() / 2
        assert torch.allclose(published[name].double(), expected, atol=1e-6)  # one rounding a step
    assert any(not torch.equal(published[name], last[name]) for name in alike)
    assert server.content("user/birds", "model.safetensors") == (folder / "model.safetensors").read_bytes()
