from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.cli import main
from scforge.estimators import Encoder

QUICK = ["--quiet", "training.accelerator=cpu", "training.batch_size=32"]


def run(line: str) -> int:
    return main(line.split())


@pytest.fixture(scope="module")
def files(many_adata: ad.AnnData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cells and a trained model; not to be changed."""
    path = tmp_path_factory.mktemp("files")
    adata = many_adata[:160].copy()
    adata.obs["perturbation"] = np.where(np.arange(160) % 2 == 0, "control", [f"gene{i % 6}" for i in range(160)])
    adata.write_h5ad(path / "cells.h5ad")
    Encoder.setup_anndata(adata)
    model = Encoder(adata, n_top_genes=60, hidden_dim=16, ffn_dim=16, latent_dim=8)
    model.train(max_epochs=1, batch_size=32, progress_bar=False, accelerator="cpu")
    model.save(path / "base")
    return path


@pytest.fixture
def folder(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("cells.h5ad", "base"):
        Path(name).symlink_to(files / name)
    return tmp_path


def test_from_a_base_model_to_labels_and_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "--base-model base --data cells.h5ad --task annotation --labels-key group --lora --max-epochs 1"
    command = ["finetune", *line.split(), "--test-size", "0.2", "--split-by", "donor", "--eval", "-o", "OUT", *QUICK]
    assert main([*command, "finetune.lora={r: 2}"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    assert "Task:        annotation, 2 classes: 'a', 'b'" in lines
    assert "Model:       OUT/final" in lines
    assert "Evaluation:  OUT/evaluation.csv" in lines
    assert Encoder.load("OUT/final").spec.tuning.lora["r"] == 2
    assert main([*command, "finetune.lora={r: 2}", "--resume", "auto"]) == 0
    capsys.readouterr()

    assert run("predict cells.h5ad -m OUT/final -o out.csv --threshold 0.9 min_share=0.5") == 0
    assert capsys.readouterr().out == "Predicted 160 cells: out.csv\n"
    assert len(pd.read_csv("out.csv")) == 160
    assert run("predict cells.h5ad -m OUT/final -o out.h5ad --quiet --majority-voting donor") == 0
    assert {"scforge_group", "scforge_confidence", "scforge_group_voted"} <= set(ad.read_h5ad("out.h5ad").obs)
    assert run("evaluate cells.h5ad -m OUT/final --no-baselines -o figures.csv") == 0
    *_, row, place = capsys.readouterr().out.splitlines()
    assert row.startswith("scforge ")
    assert place == "Written: figures.csv"
    assert list(pd.read_csv("figures.csv", index_col=0).index) == ["scforge"]


@pytest.mark.filterwarnings("ignore::scforge.errors.ScforgeWarning")
def test_the_line_of_the_proposal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "finetune --base-model base --data ./cells.h5ad --task perturbation_prediction --eval perturbbench"
    assert main([*line.split(), *QUICK, "training.max_epochs=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Model:       cells_perturbation/final" in lines
    assert run("predict cells.h5ad -m cells_perturbation/final -o effects.h5ad") == 0
    assert ad.read_h5ad("effects.h5ad").n_obs


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen = {}

    def finetune(config, **options):
        seen.update(config=config, **options)
        return SimpleNamespace(model=SimpleNamespace(fitted=SimpleNamespace(stopped=False)))

    monkeypatch.setattr("scforge.workflows.finetune.finetune_from_config", finetune)
    monkeypatch.setattr("scforge.workflows.finetune.finetuning_report", lambda *args: [])
    return seen


def test_a_file_with_flags(folder: Path, seen: dict[str, Any]) -> None:
    text = "data: {paths: [cells.h5ad]}\nfinetune: {base_model: base, task: annotation, labels_key: a, freeze: true}\n"
    Path("f.yaml").write_text(text)
    assert run("finetune --config f.yaml --labels-key group --freeze 2 --quiet --overwrite training.lr=1e-4") == 0
    section = seen["config"].finetune
    assert (section.labels_key, section.freeze, seen["config"].training.optimizer.lr) == ("group", 2, 1e-4)
    assert seen["config"].output.checkpoint_dir == "cells_annotation"
    assert (seen["progress_bar"], seen["overwrite"], seen["resume"]) == (False, True, None)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("training.batch_size=8 --freeze 2 training.lr=1e-4 --eval annotation", (2, "annotation", 8)),
        ("training.batch_size=8 --eval annotation --freeze=training.lr=1e-4", (True, "annotation", 8)),
    ],
)
def test_overrides_behind_a_flag_that_needs_no_value(
    folder: Path, seen: dict[str, Any], flags: str, expected: tuple
) -> None:
    line = "finetune --base-model base --data cells.h5ad --task annotation --labels-key group"
    assert run(f"{line} {flags}") == 0
    section, training = seen["config"].finetune, seen["config"].training
    assert (section.freeze, section.evaluate, training.batch_size) == expected
    assert training.optimizer.lr == 1e-4


def test_options_behind_a_vote(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr("scforge.workflows.predict.predict_to", lambda *args, **options: seen.update(options))
    assert run("predict cells.h5ad -m base -o out.csv --majority-voting min_share=0.5 soft=true") == 0
    assert (seen["majority_voting"], seen["min_share"], seen["soft"]) == (True, 0.5, True)


TUNE = "finetune --base-model base --data cells.h5ad --task annotation"


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (
            "finetune",
            "scforge finetune requires --base-model and --data and --task; add them, or --config FILE.",
        ),
        ("finetune --base-model base --data no.h5ad --task annotation", "--data: the file 'no.h5ad' does not exist"),
        (f"{TUNE} --base-model scforge://x", "finetune.base_model='scforge://x' (--base-model) is not in the registry"),
        (f"{TUNE} --freeze x", "--freeze: 'x' is not a number of layers; pass a number"),
        (TUNE, "the task 'annotation' requires labels_key"),
        (f"{TUNE} lr=3", "you mean 'training.optimizer.lr'?"),
        ("predict cells.h5ad -m base -o out.csv", "model='base' (--model) was not fine-tuned"),
        ("evaluate cells.h5ad -m base", "labels_key=None, but cell types are required to score embeddings"),
        (
            "evaluate cells.h5ad --data cells.h5ad -m base",
            "the cells must be given exactly once; pass either FILE or --data FILE.",
        ),
        ("evaluate cells.h5ad -m base --no-baselines --against pca", "--against selects baselines, but --no-baselines"),
    ],
)
def test_mistakes(told: Callable[..., str], line: str, part: str) -> None:
    assert part in told(*line.split())
