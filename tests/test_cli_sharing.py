import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import yaml

from scforge.cli import main
from scforge.estimators import Encoder
from scforge.workflows.evaluate import evaluate_to

# huggingface_hub sends large files with an argument that its HTTP client has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw:DeprecationWarning")

FILES = ["README.md", "config.json", "model.safetensors", "vocab.json"]


@pytest.fixture
def model(folder: Path, tiny_adata: ad.AnnData) -> Encoder:
    Encoder.setup_anndata(tiny_adata, labels_key="group")
    model = Encoder(tiny_adata, n_top_genes=40, hidden_dim=8, ffn_dim=8, latent_dim=4)
    model.train(max_epochs=1, batch_size=16, progress_bar=False, accelerator="cpu")
    model.save("base")
    return model


def test_push_pull_and_embed(hub, model: Encoder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", "base", "org/light", "--private", "--message", "first"]) == 0
    assert capsys.readouterr().out == f"{hub.url}/org/light\n"
    assert hub.repos["org/light"].private
    sent, saved = hub.files("org/light")["README.md"].decode(), Path("base/README.md").read_text()
    assert 'load("hf://org/light")' in sent
    assert "\n# light\n" in sent
    assert "this file is in" in saved
    assert main(["pull", "org/light", "-o", "pulled"]) == 0
    assert capsys.readouterr().out == "pulled\n"
    assert sorted(path.name for path in Path("pulled").iterdir()) == sorted([*FILES, "origin.json"])
    assert main(["embed", "cells.h5ad", "-m", "hf://org/light", "-o", "out.h5ad", "--quiet"]) == 0
    expected = model.get_latent_representation(key_added=None)
    np.testing.assert_allclose(ad.read_h5ad("out.h5ad").obsm["X_scforge"], expected, atol=1e-6)


def test_a_card_that_somebody_has_written_is_kept(hub, model: Encoder, told: Callable[..., str], capsys) -> None:
    text = Path("base/README.md").read_text().partition("<!-- Written by scforge")[0]
    Path("base/README.md").write_text(text)
    assert main(["push", "base", "org/light"]) == 0
    assert hub.files("org/light")["README.md"].decode() == text
    capsys.readouterr()
    message = told("push", "base", "org/light", "--license", "mit")
    assert "contains a README.md that was written or edited by hand, but license (--license) requires a gen" in message
    Path("base/README.md").unlink()  # an edited card would be kept
    model.save("base", overwrite=True)
    assert main(shlex.split("push base org/new --license mit --data 'PBMC 3k' more --citation 'Us 2026'")) == 0
    text = hub.files("org/new")["README.md"].decode()
    assert all(words in text for words in ("license: mit", "PBMC 3k, more", "Us 2026"))


def test_tables_that_evaluate_has_written(hub, model: Encoder) -> None:
    options = {"benchmarks": [{"cell_type_probe": {"n_folds": 2}}], "baselines": ["pca"], "seeds": 1}
    report = evaluate_to("base", "cells.h5ad", "long.csv", labels_key="group", untrained=False, **options)
    tuned = model.finetune("annotation", max_epochs=1, batch_size=16, progress_bar=False, accelerator="cpu")
    tuned.save("tuned", save_anndata=True)
    table = evaluate_to("tuned", "cells.h5ad", "wide.csv", trained_on="cells.h5ad", base_model="base")
    for folder, name, metric, value in (
        ("base", "long.csv", "", report.rows[0].scores[report.about(report.benchmarks[0]).main]),
        ("tuned", "wide.csv", "accuracy", table.loc["scforge", "accuracy"]),
    ):
        assert main(["push", folder, f"org/{folder}", "--metrics", name]) == 0
        text = hub.files(f"org/{folder}")["README.md"].decode()
        found = yaml.safe_load(text.split("---\n")[1])["model-index"][0]["results"]
        figures = [figure for result in found for figure in result["metrics"] if metric in figure["type"]]
        assert figures[0]["value"] == pytest.approx(value)
        assert "baselines" in figures[0]["name"]


def test_remarks_stand_beside_the_result(hub, model: Encoder, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ``DIR=$(scforge pull ...)`` has the folder alone."""
    Path("base/adata.h5ad").touch()
    Path("base/notes").mkdir()
    for card in (Path("base/README.md").read_text(), "---\ntags: [ours]\n---\n# Ours\n"):
        Path("base/README.md").write_text(card)
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        assert main(["push", "base", "org/light"]) == 0
        shown = capsys.readouterr()
        assert shown.out == f"{hub.url}/org/light\n"
        told = "These files are not part of a shared model and were not uploaded: 'adata.h5ad', 'notes', "
        told += "'reference.safetensors'."
        assert shown.err.count(told) == 1
    hub.add_file("org/light", "pytorch_model.bin", b"\x80\x04cos\nsystem\n")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert main(["pull", "org/light", "-o", "pulled"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "pulled\n"
    assert not Path("pulled/pytorch_model.bin").exists()


def test_folders_that_are_not_sent_or_replaced(hub, model: Encoder, told: Callable[..., str]) -> None:
    message = told("pull", "org/light", "-o", "base")
    assert "output='base' (--output) exists and is not empty; pass overwrite=True (--overwrite) to repl" in message
    assert not hub.requests
    model.save("checkpoints/final")
    message = told("push", "checkpoints", "org/light")
    assert "DIR='checkpoints' is the folder of a training run; did you mean 'checkpoints/final'?" in message
    Path("base/model.safetensors").write_bytes(b"\0" * 100)
    assert "'base/model.safetensors'" in told("push", "base", "org/light")
    assert not hub.repos


@pytest.mark.slow
def test_adapters_are_trained_sent_and_used_by_name(hub, model: Encoder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", "base", "org/light"]) == 0
    options = ["--task", "annotation", "--labels-key", "group", "--max-epochs", "1", "--quiet", "finetune.lora={r: 2}"]
    quick = ["training.accelerator=cpu", "training.batch_size=16"]
    assert main(["finetune", "--base-model", "hf://org/light", "--data=cells.h5ad", "-o", "OUT", *options, *quick]) == 0
    tuned = Encoder.load("OUT/final")
    tuned.save("adapter", adapter_only=True)
    assert main(["push", "adapter", "org/groups", "--base", "org/light"]) == 0
    Path("adapter/README.md").write_text("---\ntags: [ours]\n---\n# Our groups\n")
    assert main(["push", "adapter", "org/groups", "--base", "org/light"]) == 0
    assert hub.files("org/groups")["README.md"] == Path("adapter/README.md").read_bytes()
    assert main(["predict", "cells.h5ad", "-m", "hf://org/groups", "-o", "labels.csv", "--quiet"]) == 0
    found = pd.read_csv("labels.csv", index_col=0)["label"]
    expected = tuned.predict(ad.read_h5ad("cells.h5ad"))["label"].astype(str)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("push nothing org/light", "DIR='nothing' does not exist; pass the folder written by model.save"),
        ("push base org/light --base org/x", "base='org/x' (--base) has no effect if DIR='base' is a complete model"),
        (
            "push base org/light --metrics cells.csv",
            "metrics='cells.csv' (--metrics) must contain exactly one row named 'scforge'",
        ),
        ("pull org/nothing", "there is no repository 'org/nothing'"),
        (
            "embed cells.h5ad -m hf://org/nothing -o out.h5ad",
            "(--model): there is no repository",
        ),
        ("predict cells.h5ad -m nothing -o out.csv", "model='nothing' (--model) does not exist; pass the folder"),
    ],
)
def test_mistakes(hub, model: Encoder, told: Callable[..., str], line: str, message: str) -> None:
    Path("cells.csv").write_text("cell,label\na,b\n")
    assert message in told(*shlex.split(line))
    assert not hub.repos


def test_the_environment_alone_says_where_the_hub_is(hub, model: Encoder) -> None:
    """A process of its own, as somebody starts it: address, token, cache and offline mode by their usual variables."""
    main(["push", "base", "org/light"])
    environment = {**os.environ, "HF_HOME": str(Path("home").resolve()), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", "from scforge.hub import resolve; print(resolve('hf://org/light'))"]
    fetched = subprocess.check_output(command, env=environment, text=True).strip()
    assert sorted(path.name for path in Path(fetched).iterdir()) == FILES
    assert Path(fetched).is_relative_to(Path("home").resolve())
    hub.requests.clear()
    environment["HF_HUB_OFFLINE"] = "1"
    assert subprocess.check_output(command, env=environment, text=True).strip() == fetched
    assert not hub.requests
