"""Page-image recipes: tiny retrievers learn drawn pages by heart; copies of a page are no negatives."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset, Features, Image, enable_progress_bars
from safetensors.torch import load_file
from transformers import logging as transformers_logging

import st_colbert_losses
from tests.models import PYLATE
from training_recipes import evaluate, retrieval_task, train
from training_recipes.stdlib_pages import draw_page, load_pages

RECIPES = Path(__file__).parents[1] / "training_recipes"
FAMILIES = ("colpali", "colqwen2", "colmodernvbert")
SHORT = "--max_train_pairs 6 --max_queries 4 --max_documents 8 --per_device_train_batch_size 3 --max_steps 2".split()
SHORT += "--eval_steps 2 --save_steps 2 --logging_steps 1".split()


@pytest.fixture(autouse=True)
def _quiet_settings_end_with_the_test():
    verbosity = transformers_logging.get_verbosity()
    yield
    transformers_logging.set_verbosity(verbosity)
    transformers_logging.enable_progress_bar()
    enable_progress_bars()


def pages_with_negatives() -> Dataset:
    rows = load_pages(9)
    columns = {name: list(rows[name]) for name in rows.column_names}
    columns["negative"] = [draw_page("wrong", f"page {number}") for number in range(len(rows))]
    return Dataset.from_dict(columns, features=Features({**rows.features, "negative": Image()}))


def test_pages_are_the_same_every_time():
    first, second = load_pages(3), load_pages(3)
    assert [page.tobytes() for page in first["positive"]] == [page.tobytes() for page in second["positive"]]
    assert len(set(first["query"])) == 3


def test_a_corpus_of_pages_holds_each_once(tmp_path: Path):
    page, other = draw_page("a", "text"), draw_page("b", "other")
    rows = Dataset.from_dict({"query": list("abcdef"), "image": [page, page, page, other, other, other]})
    rows.cast_column("image", Image()).save_to_disk(tmp_path / "rows")
    task = retrieval_task.load_task(str(tmp_path / "rows"), seed=0)
    assert task.pages
    assert len(task.corpus) == 2


if PYLATE:

    def test_pages_are_refused_in_pylate(tmp_path: Path):
        with pytest.raises(SystemExit, match="need --world st"):
            train.main(["--dataset", "stdlib-pages", "--output_dir", str(tmp_path)])

    def test_adapters_are_refused_in_pylate(tmp_path: Path):
        with pytest.raises(SystemExit, match="--lora needs --world st"):
            train.main(["--lora", "{}", "--output_dir", str(tmp_path)])

else:
    from sentence_transformers import MultiVectorEncoder

    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_page_recipe_runs(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        train.main([str(RECIPES / f"pages_{family}.yaml"), "--output_dir", str(tmp_path), *SHORT])
        assert "page retriever, trained" in capsys.readouterr().out
        assert "loss:CachedColbertLoss" in (tmp_path / "README.md").read_text(encoding="utf-8")
        assert not any("lora" in name for name in load_file(tmp_path / "model.safetensors"))  # merged

    def test_pages_are_learnt_by_heart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        given = [str(RECIPES / "pages_colpali.yaml"), "--output_dir", str(tmp_path), "--bf16", "false"]
        small = ["--max_train_pairs", "8", "--max_queries", "8", "--max_documents", "8"]
        train.main([*given, *small, "--per_device_train_batch_size", "8", "--max_steps", "40"])
        trained = capsys.readouterr().out.rpartition("page retriever, trained")[2]
        assert float(trained.split("|")[1]) > 0.9

    def test_a_trained_model_loads_without_peft(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        train.main([str(RECIPES / "pages_colpali.yaml"), "--output_dir", str(tmp_path), *SHORT])
        usage = capsys.readouterr().out.partition("To use the model:\n")[2]
        exec(usage, {})
        assert "tensor" in capsys.readouterr().out
        evaluate.main(["--model", str(tmp_path), "--datasets", "stdlib-pages", "--max_queries", "3"])
        assert "stdlib-pages" in capsys.readouterr().out

    def test_adapters_resume_where_they_stopped(tmp_path: Path):
        given = [str(RECIPES / "pages_colpali.yaml"), *SHORT, "--max_steps", "4", "--save_total_limit", "2"]
        whole, resumed = tmp_path / "whole", tmp_path / "resumed"
        train.main([*given, "--output_dir", str(whole)])
        shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
        train.main([*given, "--output_dir", str(resumed), "--resume_from_checkpoint", "true"])
        first, second = (load_file(folder / "model.safetensors") for folder in (whole, resumed))
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_pages_as_negatives(tmp_path: Path):
        pages_with_negatives().save_to_disk(tmp_path / "rows")
        given = ["--world", "st", "--model", "tiny-colqwen2", "--dataset", str(tmp_path / "rows")]
        train.main([*given, "--loss", "ColbertPairwiseNegativeCELoss", "--output_dir", str(tmp_path / "out"), *SHORT])
        assert "loss:ColbertPairwiseNegativeCELoss" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")

    def test_pages_without_negatives_are_refused(tmp_path: Path):
        with pytest.raises(SystemExit, match="needs image columns negative"):
            train.main(["--dataset", "stdlib-pages", "--loss", "ColbertNegativeCELoss", "--output_dir", str(tmp_path)])

    @pytest.mark.parametrize("flag", ["--document_length 64", "--query_expansion true"])
    def test_flags_for_texts_are_refused(flag: str, tmp_path: Path):
        with pytest.raises(SystemExit, match="is for texts"):
            train.main(["--dataset", "stdlib-pages", *flag.split(), "--output_dir", str(tmp_path)])

    @pytest.mark.parametrize("family", ["colpali", "colqwen2"])
    def test_copies_of_a_page_are_no_negatives(family: str, tmp_path: Path):
        """The first and the third page are drawn alike: neither is a negative for the other's query."""
        from training_recipes.tiny_models import make_tiny_model

        model = MultiVectorEncoder(make_tiny_model(f"tiny-{family}", tmp_path, 0), device="cpu")
        rows = load_pages(3)
        pages = [*rows["positive"][:2], rows["positive"][0].copy()]
        seen = {}

        def spy(scores, temperature):
            seen["left out"] = (scores.pool == -torch.inf).tolist()
            return scores.positive

        loss = st_colbert_losses.LateInteractionLoss(model, spy)
        loss([model.preprocess(list(rows["query"]), task="query"), model.preprocess(pages, task="document")])
        assert seen["left out"] == [[True, False, True], [False, True, False], [True, False, True]]
