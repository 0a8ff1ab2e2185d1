import json
import os
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from scforge.cli import main
from scforge.errors import MissingFileError, ModelFileError, OptionError
from scforge.estimators import Encoder
from scforge.hub import known_models, resolve
from scforge.hub.finding import find_registered, is_hub_name, is_registry_name
from scforge.testing import raises
from scforge.workflows.models import check_model_folder

SHIPPED = {
    "human-blood": "Light encoder with labeled reference cells of human blood, for scforge.annotate",
    "pbmc3k-light": "Light encoder trained on PBMC 3k, for tests and tutorials",
}
A, B = "a" * 40, "b" * 40


def write(path: Path, models: object) -> Path:
    path.write_text(json.dumps({"format": 1, "models": models}))
    return path


def entry(description: str = "Small", latest: str = "2", **versions: dict) -> dict:
    given = versions or {"1": {"repo_id": "org/light", "revision": A}, "2": {"repo_id": "org/light", "revision": B}}
    return {"description": description, "latest": latest, "versions": given}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = entry(latest="1", **{"1": {"folder": "models/a"}})
    path = write(tmp_path / "models.json", {"light": entry(), "here": here})
    monkeypatch.setenv("SCFORGE_MODELS", str(path))
    return path


def test_the_shipped_registry(monkeypatch: pytest.MonkeyPatch, pbmc: ad.AnnData) -> None:
    """Every name in it loads without a network, and embeds cells whose genes are symbols or ids."""
    monkeypatch.delenv("SCFORGE_MODELS", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert list(known_models()) == list(SHIPPED)
    cells = pbmc[:100].copy()
    model = Encoder.load("scforge://pbmc3k-light", cells)
    latent = model.get_latent_representation()
    assert model.is_trained_
    loaded = Encoder.load("scforge://pbmc3k-light", False)
    np.testing.assert_array_equal(loaded.get_latent_representation(cells.copy()), latent)
    ids = dict(zip(model.vocab.symbols, model.vocab.genes, strict=True))
    cells.var_names = [ids.get(name, name) for name in cells.var_names]
    np.testing.assert_allclose(model.get_latent_representation(cells), latent, atol=1e-5)
    types = cells.obs["cell_type"]
    monocytes, t_cells = (latent[types.isin(names).to_numpy()] for names in (["CD14+ Mono"], ["CD8 T"]))
    between = np.linalg.norm(monocytes.mean(axis=0) - t_cells.mean(axis=0))
    assert between > 2 * np.linalg.norm(monocytes - monocytes.mean(axis=0), axis=1).mean()


def test_adapters_name_the_shipped_model(monkeypatch: pytest.MonkeyPatch, pbmc: ad.AnnData, tmp_path: Path) -> None:
    monkeypatch.delenv("SCFORGE_MODELS", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cells = pbmc[pbmc.obs["cell_type"].isin(["B", "NK"])][:200].copy()
    Encoder.setup_anndata(cells, labels_key="cell_type")
    base = Encoder.load("scforge://pbmc3k-light", cells)
    annotator = base.finetune("annotation", cells, lora=True, max_epochs=1, progress_bar=False)
    annotator.save(tmp_path / "adapter", adapter_only=True)
    assert json.loads((tmp_path / "adapter" / "adapter.json").read_text())["base"] == {
        "name": "scforge://pbmc3k-light@1",
        "revision": None,
    }
    moved = (tmp_path / "adapter").rename(tmp_path / "moved")
    again = Encoder.load(moved, cells)
    np.testing.assert_allclose(again.get_latent_representation(), annotator.get_latent_representation(), atol=1e-6)


def test_versions(registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_models() == {"light": "Small", "here": "Small", **SHIPPED}
    assert find_registered("scforge://light", "it") == (None, "org/light", B)
    assert find_registered("scforge://light@1", "it") == (None, "org/light", A)
    with pytest.raises(MissingFileError):
        find_registered("scforge://here", "it")
    (registry.parent / "models" / "a").mkdir(parents=True)
    assert find_registered("scforge://here", "it")[0].folder == registry.parent / "models/a"
    # The first file counts.
    other = write(tmp_path / "other.json", {"light": entry("Other"), "more": entry()})
    monkeypatch.setenv("SCFORGE_MODELS", f"{other}{os.pathsep}{registry}")
    assert known_models() == {"light": "Other", "more": "Small", "here": "Small", **SHIPPED}


@pytest.mark.parametrize("scheme", ["scModelForge", "scmodelforge", "SCFORGE"])
def test_names_of_scmodelforge(scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python, YAML and the command line accept the scheme of scModelForge's configurations, in any case."""
    name = f"{scheme}://pbmc3k-light"
    folder = resolve("scforge://pbmc3k-light")
    assert (is_registry_name(name), is_hub_name(name)) == (True, False)
    assert resolve(name) == resolve(f"{name}@1") == check_model_folder(name, "finetune.base_model") == folder
    assert Encoder.load(name, False).fitted.origin.name == "scforge://pbmc3k-light@1"
    assert main(["pull", name, "-o", str(tmp_path / "here")]) == 0
    with pytest.raises(OptionError, match=rf"name='{scheme}://geneformer-v2' is not in the registry .known: "):
        resolve(f"{scheme}://geneformer-v2")


def test_load_refuses_other_names() -> None:
    with pytest.raises(OptionError, match=r"^dir_path='scforge://geneformer-v2' is not in .*from_checkpoint\(folder"):
        Encoder.load("scforge://geneformer-v2")
    with raises(MissingFileError, "dir_path"):
        Encoder.load_registry("hf://org/light")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scforge://lihgt", r"is not in the registry .known: .*; did you mean 'light'\?\.$"),
        ("scforge://geneformer-v2", r"is not in the registry .known: .*'pbmc3k-light'.*Encoder.from_checkpoint\(fold"),
        ("scforge://light@3", r"has no version '3'.*\(known: '1', '2'\)"),
    ],
)
def test_names_that_are_not_known(registry: Path, name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        find_registered(name, f"name={name!r}")


def with_entry(latest: str = "1", **version: str) -> str:
    entries = {"x": entry(latest=latest, **{"1": version or {"folder": "a"}})}
    return json.dumps({"format": 1, "models": entries})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a JSON file"),
        ('{"format": 2, "models": {}}', "is not a valid model registry .*format: Input should be 1, got 2"),
        ('{"format": 1, "models": []}', "models: Input should be a valid dictionary"),
        (with_entry(repo_id="org/x", folder="a"), "models.x.versions.1: .*needs either repo_id or folder"),
        (with_entry(repo_id="org/x", revision="abc1234"), "models.x.versions.1.revision: String should match pattern"),
    ],
)
def test_files_that_are_no_registry(registry: Path, content: str, message: str) -> None:
    registry.write_text(content)
    with pytest.raises(ModelFileError, match=message):
        known_models()
    registry.unlink()
    with pytest.raises(MissingFileError):
        known_models()


def test_load_takes_a_name_of_the_registry() -> None:
    model = Encoder.load("scforge://pbmc3k-light", False)
    assert model.module.state_dict().keys() == Encoder.load("scforge://pbmc3k-light").module.state_dict().keys()
    with pytest.raises(
        OptionError, match=r"^dir_path='scforge://geneformer-v2' is not in the registry.*from_checkpoint\(folder"
    ):
        Encoder.load("scforge://geneformer-v2")
    with raises(MissingFileError, "dir_path"):
        Encoder.load_registry("hf://org/light")
