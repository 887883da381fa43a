"""The recipe trains in the world that is installed, and says at once what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict, enable_progress_bars, load_from_disk
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertModel, BertTokenizerFast
from transformers import logging as transformers_logging

import st_colbert_losses
from tests.models import PYLATE
from training_recipes import (
    card,
    command_line,
    evaluate,
    offline,
    retrieval_task,
    teacher,
    train,
)

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "training_recipes").glob("*.yaml"))
PUBLISHED = sorted((ROOT / "training_recipes" / "published").glob("*.yaml"))
HERE = "pylate" if PYLATE else "st"
SHORT = "--max_train_pairs 12 --per_device_train_batch_size 4 --max_steps 2 --eval_steps 2 --save_steps 2".split()
SHORT += "--max_queries 6 --max_documents 24".split()


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a two-layer BERT of random weights, and a tokenizer that spells."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,:;()[]'`-_"]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _quiet_settings_end_with_the_test():
    verbosity = transformers_logging.get_verbosity()
    yield
    transformers_logging.set_verbosity(verbosity)
    transformers_logging.enable_progress_bar()
    enable_progress_bars()


def world_of(recipe: Path) -> str | None:
    return yaml.safe_load(recipe.read_text(encoding="utf-8")).get("world")


def refusal(*argv: str) -> str:
    """Run the script, which must stop before it trains, and return its one line."""
    with pytest.raises(SystemExit) as stopped:
        train.main([*argv])
    assert isinstance(stopped.value.code, str)
    assert "\n" not in stopped.value.code
    return stopped.value.code


# The script


@pytest.mark.parametrize("loss", command_line.LOSSES)
def test_every_loss_trains(loss: str, tiny_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    taught = ["--teacher", tiny_bert] if "Distillation" in loss else []
    train.main(["--loss", loss, "--model", tiny_bert, *taught, "--output_dir", str(tmp_path), *SHORT])
    told = capsys.readouterr().out
    for system in ("BM25", "dense start", "ColBERT, untrained", "ColBERT, trained"):
        assert told.count(system) == 2  # when measured, and in the closing table
    assert (tmp_path / "training_curve.png").stat().st_size > 1000
    assert list(tmp_path.glob("**/*.safetensors"))
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"loss:{loss}" in card
    assert f"`st_colbert_losses` {st_colbert_losses.__version__}" in card
    assert "![" in card.partition("## How this model was trained")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    "recipe", [path for path in RECIPES if not path.stem.startswith("pages")], ids=lambda p: p.stem
)
def test_every_recipe_runs(recipe: Path, tiny_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    if world_of(recipe) not in (None, HERE):
        return  # it is run in the other world
    negatives = ["--num_negatives", "3"] if "num_negatives" in yaml.safe_load(recipe.read_text("utf-8")) else []
    given = [str(recipe), "--model", tiny_bert, *negatives, "--output_dir", str(tmp_path)]
    train.main([*given, *SHORT, "--max_train_pairs", "24"])
    assert "ColBERT, trained" in capsys.readouterr().out
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"loss:{yaml.safe_load(recipe.read_text(encoding='utf-8'))['loss']}" in card


@pytest.mark.parametrize("negatives", ["bm25", "mined"])
@pytest.mark.parametrize("loss", ["ColbertLoss", "ColbertNegativeCELoss"])
def test_negatives_that_are_asked_for(negatives: str, loss: str, tiny_bert: str, tmp_path: Path):
    """Whatever the loss: `ColbertLoss` takes them as further candidates."""
    given = ["--loss", loss, "--model", tiny_bert, "--output_dir", str(tmp_path), *SHORT, "--max_train_pairs", "24"]
    train.main([*given, "--negatives", negatives, "--num_negatives", "2"])
    rows = load_from_disk(tmp_path / "_train_rows")
    assert rows.column_names == ["query", "positive", "negative_1", "negative_2"]
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "negative_2" in card  # what the trainer was given


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--num_negatives 3", "--negatives bm25 or mined"),
        ("--teacher minilm", "--negatives mined"),
        ("--teacher minilm --negatives bm25", "--negatives mined"),
        ("--dataset {triplets} --teacher minilm --negatives mined", "has no negatives"),
    ],
)
def test_flags_about_negatives_that_can_do_nothing(flags: str, complaint: str, tmp_path: Path):
    rows = [{"query": f"query {n}", "positive": f"document {n}", "negative": f"wrong {n}"} for n in range(9)]
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    message = refusal(*flags.format(triplets=tmp_path / "rows.jsonl").split(), "--output_dir", str(tmp_path / "out"))
    assert complaint in message


def test_resumes_where_it_stopped(tiny_bert: str, tmp_path: Path):
    """Stopped after two steps of four and taken up again, the run ends with the same weights as one that never was."""
    given = ["--loss", "MoCoColbertLoss", "--model", tiny_bert, *SHORT, "--max_steps", "4", "--save_total_limit", "2"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train.main([*given, "--output_dir", str(whole)])
    shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
    train.main([*given, "--output_dir", str(resumed), "--resume_from_checkpoint", "true"])
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)


if not PYLATE:

    def test_adapters_go_back_with_the_projection(tiny_bert: str, tmp_path: Path):
        """A checkpoint with adapters gives back all that was trained: when resumed from, and as the best one."""
        rows = [{"query": f"query {n}", "positive": f"document {n}"} for n in range(12)]
        parts = {"train": rows, "dev": rows[:1], "test": rows[:1]}
        DatasetDict({part: Dataset.from_list(held) for part, held in parts.items()}).save_to_disk(tmp_path / "rows")
        given = ["--model", tiny_bert, "--dataset", str(tmp_path / "rows"), *SHORT, "--max_documents", "1"]
        given += ["--lora", '{"r": 4, "target_modules": "all-linear"}', "--max_steps", "4", "--save_total_limit", "2"]
        given += ["--learning_rate", "1e-2", "--lr_scheduler_type", "constant", "--warmup_steps", "0"]
        whole, resumed, best = tmp_path / "whole", tmp_path / "resumed", tmp_path / "best"
        train.main([*given, "--output_dir", str(whole)])
        shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
        train.main([*given, "--output_dir", str(resumed), "--resume_from_checkpoint", "true"])
        # A corpus of one document: every evaluation is perfect, so the first checkpoint stays the best.
        chosen = ["--load_best_model_at_end", "true", "--metric_for_best_model", "eval_dev_maxsim_ndcg@10"]
        train.main([*given, "--output_dir", str(best), *chosen])

        at_2, at_4 = (load_file(whole / part / "1_Dense" / "model.safetensors") for part in ("checkpoint-2", ""))
        assert not any(torch.equal(at_2[name], at_4[name]) for name in at_4)
        for file in ("model.safetensors", "1_Dense/model.safetensors"):
            first, second = (load_file(folder / file) for folder in (whole, resumed))
            assert all(torch.equal(first[name], second[name]) for name in first), file
        assert torch.equal(load_file(best / "1_Dense" / "model.safetensors")["linear.weight"], at_2["linear.weight"])


def test_the_best_checkpoint_is_that_of_dev_ndcg(tiny_bert: str, tmp_path: Path):
    given = ["--model", tiny_bert, "--output_dir", str(tmp_path), *SHORT, "--learning_rate", "1e-2"]
    train.main([*given, "--max_steps", "4", "--save_total_limit", "3", "--load_best_model_at_end", "true"])
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8"))
    seen = {entry["step"]: value for entry in state["log_history"] for key, value in entry.items() if "ndcg@10" in key}
    assert state["best_metric"] == max(seen[2], seen[4])
    best = load_file(tmp_path / f"checkpoint-{2 if seen[2] >= seen[4] else 4}" / "model.safetensors")
    assert all(torch.equal(value, best[name]) for name, value in load_file(tmp_path / "model.safetensors").items())


@pytest.mark.parametrize(
    ("flags", "metric", "greater"),
    [
        ("", None, None),
        ("--load_best_model_at_end true", "ndcg@10", True),
        ("--save_strategy best --metric_for_best_model {metric}mrr@10", "mrr@10", True),
        ("--load_best_model_at_end true --greater_is_better false", "ndcg@10", False),
    ],
)
def test_what_is_best_is_said_or_dev_ndcg(flags: str, metric: str | None, greater: bool | None, tmp_path: Path):
    prefix = f"eval_dev_{'MaxSim' if PYLATE else 'maxsim'}_"
    given = [*flags.format(metric=prefix).split(), "--output_dir", str(tmp_path)]
    _, args, _ = command_line.read_command_line(given)
    assert args.metric_for_best_model == (metric and prefix + metric)
    assert args.greater_is_better is greater


def test_a_metric_that_no_evaluation_has(tmp_path: Path):
    given = ["--output_dir", str(tmp_path), "--save_strategy", "best"]
    assert "ndcg@10" in refusal(*given, "--metric_for_best_model", "eval_loss")
    assert "nothing to choose by" in refusal(*given, "--eval_strategy", "no")


def test_nothing_to_resume_from(tmp_path: Path):
    assert "no checkpoint in" in refusal("--output_dir", str(tmp_path), "--resume_from_checkpoint", "true")
    assert "no folder of a trainer" in refusal("--output_dir", str(tmp_path), "--resume_from_checkpoint", "/nowhere")


def test_flags_override_a_file(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("learning_rate: 3e-4\nloss_arguments: {normalize_scores: false}\ntemperature: 1.0\nbf16: true\n")
    recipe, args, _ = command_line.read_command_line([str(file), "--temperature", "2", "--output_dir", str(tmp_path)])
    assert (args.learning_rate, args.bf16, recipe.temperature) == (3e-4, True, 2.0)
    assert json.loads(recipe.loss_arguments) == {"normalize_scores": False}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("learning_rat: 1", "did you mean learning_rate"),
        ("learning_rate: fast", "learning_rate"),
        ("loss: ColbertLos", "ColbertSigmoidLoss"),
        ("- a\n- list", "flag: value"),
        ("a: [", "no YAML"),
        ("loss_arguments: [1]", "JSON"),
        ("negatives: guessed", "bm25 or mined"),
        ("num_negatives: 0", "at least 1"),
        ("loss: ColbertLoss\nloss_arguments: {heat: 1}", "cannot make ColbertLoss"),
    ],
)
def test_files_that_cannot_be_used(text: str, complaint: str, tiny_bert: str, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(text)
    assert complaint in refusal(
        str(tmp_path / "mine.yaml"), "--model", tiny_bert, "--output_dir", str(tmp_path / "out"), *SHORT[:2]
    )


def test_a_file_that_is_not_there():
    assert "cannot read" in refusal("nowhere.yaml")


def test_an_empty_dataset(tmp_path: Path):
    (tmp_path / "rows.csv").write_text("query,positive\n")
    assert "is empty" in refusal("--dataset", str(tmp_path / "rows.csv"), "--output_dir", str(tmp_path / "out"))
    Dataset.from_dict({"query": [], "positive": []}).save_to_disk(tmp_path / "rows")
    assert "is empty" in refusal("--dataset", str(tmp_path / "rows"), "--output_dir", str(tmp_path / "out"))


def test_lists_of_negatives_and_scores(tmp_path: Path):
    rows = [
        {"query": f"query {n}", "positive": f"document {n}", "negatives": [f"{n} a", f"{n} b"], "scores": [3.0, 2, 1]}
        for n in range(9)
    ]
    Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    task = retrieval_task.load_task(str(tmp_path / "rows"), seed=0, num_negatives=1)
    assert task.train.column_names == ["query", "positive", "negative_1", "scores"]
    assert set(task.train["negative_1"]) < {f"{n} a" for n in range(9)}
    assert task.train["scores"][0] == [3.0, 2.0]
    with pytest.raises(ValueError, match="lower --num_negatives"):
        retrieval_task.load_task(str(tmp_path / "rows"), seed=0, num_negatives=3)


def test_ids_of_a_distillation_set_become_texts(tiny_bert: str, tmp_path: Path):
    texts = {kind: [{f"{kind}_id": n, "text": f"{kind} {n}"} for n in range(9)] for kind in ("query", "document")}
    rows = [{"query_id": n, "document_ids": [0, n, 8], "scores": [0.1, 0.9, 0.2]} for n in range(1, 8)]
    for part, content in (("train", rows), ("queries", texts["query"]), ("documents", texts["document"])):
        Dataset.from_list(content).save_to_disk(tmp_path / "set" / part)
    task = retrieval_task.load_task(str(tmp_path / "set"), seed=0)
    assert task.train.column_names == ["query", "positive", "negative_1", "negative_2", "scores"]
    for row in task.train:
        assert row["positive"] == row["query"].replace("query", "document")  # what the teacher likes best
        assert (row["negative_1"], row["negative_2"], row["scores"]) == ("document 8", "document 0", [0.9, 0.2, 0.1])
    given = ["--loss", "ColbertDistillationLoss", "--dataset", str(tmp_path / "set"), "--model", tiny_bert]
    train.main([*given, "--output_dir", str(tmp_path / "out"), *SHORT])


def test_a_teacher_ranks_the_documents_of_a_row():
    rows = Dataset.from_dict(
        {"query": ["red apple", "blue sky"], "positive": ["a red apple", "the blue sky"], "negative": ["iron", "wood"]}
    )
    scores = teacher.add_scores(rows, SentenceTransformer(train.PACKAGED, device="cpu"))["scores"]
    assert scores == [[1.0, 0.0], [1.0, 0.0]]


def test_labels_reach_the_loss(tiny_bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [{"query": f"query {n}", "positive": f"document {n}", "label": 7 + n % 2} for n in range(20)]
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    seen, make_loss = [], train.make_loss

    def watched(*given):
        loss = make_loss(*given)
        loss.register_forward_pre_hook(lambda _, columns: seen.extend(columns[1].tolist()))
        return loss

    monkeypatch.setattr(train, "make_loss", watched)
    given = ["--dataset", str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "out")]
    train.main([*given, "--model", tiny_bert, *SHORT])
    assert set(seen) == {7, 8}
    assert "column 'label'; drop it" in refusal(*given, "--loss", "ColbertDistillationLoss")
    assert "column 'label'; drop it" in refusal(*given, "--negatives", "mined")


# Published recipes


@pytest.mark.parametrize("recipe", PUBLISHED, ids=lambda path: path.stem)
def test_published_hyperparameters_make_a_loss(recipe: Path, tmp_path: Path):
    given = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    assert "https://" in recipe.read_text(encoding="utf-8").partition("\nworld:")[0]  # where the numbers are from
    if given["world"] != HERE:
        return  # its trainer is the other world's
    recipe, args, _ = command_line.read_command_line([str(recipe), "--output_dir", str(tmp_path)])
    for key in given.keys() & {"learning_rate", "per_device_train_batch_size", "warmup_steps", "max_grad_norm"}:
        assert getattr(args, key) == float(given[key])
    loss = train.make_loss(recipe, torch.nn.Identity())
    assert type(loss).__name__ == given["loss"]
    for name, value in given.get("loss_arguments", {}).items():
        assert getattr(loss, name) == value
    assert loss.temperature == pytest.approx(given["temperature"])
    if recipe.lora:
        peft.LoraConfig(**json.loads(recipe.lora))


# Evaluation


def test_evaluates_a_folder_with_judgements(tiny_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "qrels").mkdir()
    documents = [{"_id": f"d{n}", "title": "about", "text": f"document {n}"} for n in range(12)]
    Dataset.from_list(documents).to_json(tmp_path / "corpus.jsonl")
    Dataset.from_list([{"_id": n, "text": f"document {n}"} for n in range(3)]).to_json(tmp_path / "queries.jsonl")
    judged = "".join(f"{n}\td{n}\t{int(n < 2)}\n" for n in range(3))
    (tmp_path / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    task = retrieval_task.load_judged(str(tmp_path), max_documents=6)
    assert task.test.relevant == {"0": {"d0"}, "1": {"d1"}}
    assert len(task.corpus) == 6
    evaluate.main(["--model", tiny_bert, "--datasets", str(tmp_path), "--output", str(tmp_path / "numbers.json")])
    [numbers] = json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8")).values()
    assert numbers.keys() == set(evaluate.METRICS)
    assert f"{numbers['mrr@10']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ("--model minilm --datasets NanoBEIR/nq", "'NanoBEIR/nq'"),
        ("--model minilm --datasets ViDoRe/docvqa", "needs a network"),
        ("--model minilm --datasets NanoBEIR/nonsense", "touche2020"),
        ("--model minilm", "--datasets"),
        ("--model no/such-model --datasets stdlib", "no/such-model"),
        ("--model minilm --datasets stdlib --world jax", "pylate or st"),
        ("--model minilm --datasets stdlib --output /no/where.json", "no such folder"),
        ("--model minilm --datasets stdlib --colour red", "--colour"),
    ],
)
def test_evaluations_that_cannot_be(argv: str, complaint: str):
    with pytest.raises(SystemExit) as stopped:
        evaluate.main(argv.split())
    assert complaint in stopped.value.code
    assert "\n" not in stopped.value.code


def test_the_usage_that_is_printed_runs(tiny_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train.main(["--model", tiny_bert, "--output_dir", str(tmp_path), *SHORT])
    usage = capsys.readouterr().out.partition("To use the model:\n")[2]
    exec(usage, {})
    assert capsys.readouterr().out.strip()


def test_evaluates_as_often_as_asked(tiny_bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = []
    monkeypatch.setattr(card, "draw_curve", lambda history, *_: drawn.extend(history))
    train.main(["--model", tiny_bert, "--output_dir", str(tmp_path), *SHORT, "--max_steps", "3"])
    assert [entry["step"] for entry in drawn if any(key.endswith("ndcg@10") for key in entry)] == [0, 2, 3]


def test_trains_on_from_a_model_that_it_made(tiny_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    train.main(["--model", tiny_bert, "--output_dir", first, "--query_expansion", "true", *SHORT])
    capsys.readouterr()
    train.main(["--model", first, "--output_dir", second, *SHORT])
    assert "dense start" not in capsys.readouterr().out  # a ColBERT is no dense encoder
    if not PYLATE:  # where an expansion has a length of its own
        given = ["--model", first, "--output_dir", second, "--query_length", "16"]
        assert "add --query_expansion true or false" in refusal(*given)


def test_runs_from_the_command_line(tiny_bert: str, tmp_path: Path):
    command = [sys.executable, "-m", "training_recipes.train", "--model", tiny_bert, "--output_dir", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *SHORT], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ColBERT, trained" in done.stdout
    assert "Warning" not in done.stderr


def test_trains_on_a_file_of_triplets(tiny_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"anchor": f"query {n}", "positive": f"document {n}", "negative": f"wrong {n}"} for n in range(20)]
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    out = str(tmp_path / "out")
    argv = ["--loss", "ColbertNegativeCELoss", "--dataset", str(tmp_path / "rows.jsonl"), "--output_dir", out]
    train.main([*argv, "--model", tiny_bert, *SHORT])
    assert "2 test queries over 40 documents" not in capsys.readouterr().out  # cut by --max_documents
    assert "negative" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_unknown_loss_lists_the_choices():
    message = refusal("--loss", "ColbertLos")
    assert "'ColbertLos'" in message
    assert "ColbertSigmoidLoss" in message


def test_unknown_flag():
    assert "--los_s" in refusal("--los_s", "1")


def test_a_reporter_that_is_not_there(tmp_path: Path):
    assert "--report_to" in refusal("--report_to", "wandb", "--output_dir", str(tmp_path))
    assert "--report_to" in refusal("--report_to", "crystal_ball", "--output_dir", str(tmp_path))


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], set()),
        (["--model", "a/b", "--bf16", "true", "--dataset=c"], {"a/b", "c"}),
        (["--datasets", "stdlib", "a/b", "--world", "st"], {"stdlib", "a/b"}),
        (["--push_to_hub"], {"push_to_hub"}),
        ([str(ROOT / "training_recipes" / "pages_colpali.yaml")], {"tiny-colpali", "stdlib-pages"}),
    ],
)
def test_what_a_command_line_names(argv: list[str], names: set[str]):
    assert offline.named(argv) == names


def test_unknown_world():
    assert "pylate or st" in refusal("--world", "jax")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--per_device_train_batch_size", "0"),
        ("--num_train_epochs", "0"),
        ("--max_train_pairs", "0"),
        ("--max_queries", "0"),
        ("--learning_rate", "nan"),
    ],
)
def test_impossible_numbers(flag: str, value: str):
    assert flag in refusal(flag, value)


def test_output_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    assert "cannot write" in refusal("--output_dir", str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{"text": "a", "label": "b"}] * 5, "text, label"),
        ([{"query": "a", "label": "b"}] * 5, "query, label"),
        ([{"query": "", "positive": ""}] * 5, "too few"),
        ([{"query": "a", "positive": "b"}], "too few"),
    ],
)
def test_datasets_that_cannot_be_used(rows: list[dict], complaint: str, tmp_path: Path):
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    message = refusal("--dataset", str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "out"))
    assert complaint in message


def test_a_dataset_that_is_not_there(tmp_path: Path):
    assert "cannot use the dataset" in refusal("--dataset", "no/such-data", "--output_dir", str(tmp_path))


def test_a_model_that_is_not_there(tmp_path: Path):
    assert "no/such-model" in refusal("--model", "no/such-model", "--output_dir", str(tmp_path))


def test_loss_arguments_that_do_not_fit(tiny_bert: str, tmp_path: Path):
    argv = ["--model", tiny_bert, "--output_dir", str(tmp_path)]
    assert "cannot make ColbertLoss" in refusal(*argv, "--loss_arguments", '{"heat": 3}')
    assert "JSON" in refusal(*argv, "--loss_arguments", "{heat}")
    assert "temperature" in refusal(*argv, "--temperature", "-1")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_queue_dtype_by_its_name(dtype: str, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(f"loss: MoCoColbertLoss\nloss_arguments: {{queue_dtype: {dtype}}}\n")
    recipe, _, _ = command_line.read_command_line([str(tmp_path / "mine.yaml"), "--output_dir", str(tmp_path)])
    assert train.make_loss(recipe, torch.nn.Identity()).queue_dtype is getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ['"int8"', '"half a byte"', "16"])
def test_a_queue_dtype_that_is_none(dtype: str, tiny_bert: str, tmp_path: Path):
    given = ["--model", tiny_bert, "--output_dir", str(tmp_path), "--loss", "MoCoColbertLoss"]
    assert "choose bfloat16, float16" in refusal(*given, "--loss_arguments", f'{{"queue_dtype": {dtype}}}')


def test_widths_that_the_model_does_not_have(tiny_bert: str, tmp_path: Path):
    given = ["--model", tiny_bert, "--output_dir", str(tmp_path), "--loss_arguments", '{"matryoshka_dims": [768, 64]}']
    assert "the model's embeddings have 128" in refusal(*given)


def test_an_empty_file_of_flags(tmp_path: Path):
    (tmp_path / "mine.yaml").touch()
    assert offline.named([str(tmp_path / "mine.yaml")]) == set()
    assert "flag: value" in refusal(str(tmp_path / "mine.yaml"))


def test_a_file_of_flags_comes_first():
    assert "unknown arguments mine.yaml (a file of flags comes first)" in refusal("--world", HERE, "mine.yaml")


@pytest.mark.parametrize("flag", ["--query_length", "--document_length"])
def test_texts_longer_than_the_model_has_positions(flag: str, tiny_bert: str, tmp_path: Path):
    message = refusal("--model", tiny_bert, "--output_dir", str(tmp_path), flag, "600")
    assert f"{flag} is 600, and the model has 512 positions" in message
