"""Folders of earlier formats were made by the scforge that wrote them, see ``tests/fixtures/make_folders.py``."""

import functools
import inspect
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from scforge._io import parse_json
from scforge.errors import ModelFileError, OptionError
from scforge.estimators import Encoder
from scforge.estimators.folder_formats import _DEFAULTS, ADAPTER, MODEL, read_description, sealed
from scforge.estimators.spec import _TAKEN, default_options
from scforge.models import list_models
from scforge.models.gene_pooling import GenePoolingModel
from scforge.models.registry import MODELS
from scforge.models.transformer_encoder import TransformerEncoder

FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDERS = sorted(FIXTURES.glob("format_*"))


def expected_of(folder: Path) -> tuple[dict, ad.AnnData]:
    expected = json.loads((folder / "expected.json").read_text())
    adata = ad.AnnData(np.array(expected["counts"], dtype=np.float32))
    adata.var_names = expected["genes"]
    return expected, adata


def adapted(folder: Path) -> Encoder:
    return Encoder.load_adapter(Encoder.load(folder / "base"), folder / "adapter")


def loaded(folder: Path, name: str) -> Encoder:
    return adapted(folder) if name == "adapter" else Encoder.load(folder / name)


def test_there_is_a_folder_of_each_earlier_format() -> None:
    assert [folder.name for folder in FOLDERS] == [f"format_{version}" for version in range(1, MODEL.format)]
    assert sorted(MODEL.upgrades) == sorted(ADAPTER.upgrades) == list(range(1, MODEL.format))
    size = sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file())
    assert size < 60_000 * len(FOLDERS)


@pytest.mark.parametrize("name", ["plain", "tuned", "base", "adapter"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_earlier_folder(folder: Path, name: str, tmp_path: Path) -> None:
    """It computes what it did; saved again it is of the present format, and still does."""
    model, (expected, cells) = loaded(folder, name), expected_of(folder)
    embedding = model.get_latent_representation(cells, key_added=None)
    np.testing.assert_allclose(embedding, expected["embeddings"][name], atol=1e-5)
    assert model.n_epochs_ == expected["n_epochs"][name]
    assert model.history_["train_loss"]["train_loss"].tolist() == expected["train_loss"][name]
    if name in expected["labels"]:
        found = model.predict(cells.copy())
        assert found["label"].tolist() == expected["labels"][name]
        np.testing.assert_allclose(found["confidence"], expected["confidence"][name], atol=1e-5)
    model.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["format"] == MODEL.format
    again = Encoder.load(tmp_path / "again").get_latent_representation(cells, key_added=None)
    np.testing.assert_array_equal(again, embedding)


def test_figures_that_are_no_numbers(tmp_path: Path) -> None:
    """Format 1 wrote them as Python does; now they are standard JSON. Keys that are numbers become text, as before."""
    path = tmp_path / "config.json"
    odd = {"history": {"loss": [1.5, math.nan, math.inf, -math.inf]}, "of": {10: "a", 9: ("b",)}}
    path.write_text(sealed(MODEL, odd))
    parse_json(path.read_bytes())
    found = read_description(MODEL, path)
    assert found["of"] == {"10": "a", "9": ["b"]}
    path.write_text(json.dumps({"format": 1, "scforge_version": "0.1", "history": odd["history"]}))
    for description in (found, read_description(MODEL, path)):
        np.testing.assert_array_equal(description["history"]["loss"], odd["history"]["loss"])


def say(path: Path, part: str, **changes: object) -> None:
    content = json.loads(path.read_text())
    content[part] |= changes
    kept = {key: value for key, value in content.items() if key not in ("format", "scforge_version", "checksum")}
    path.write_text(sealed(MODEL, kept) if "checksum" in content else json.dumps(content))


@pytest.mark.parametrize("architecture", list_models())
def test_every_option_is_spelled_out(architecture: str, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    Encoder.setup_anndata(tiny_adata)
    model = Encoder(tiny_adata, architecture, n_top_genes=20, hidden_dim=8, num_layers=1)
    model.save(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["architecture"]
    constructor = inspect.signature(MODELS.get(architecture)).parameters
    assert sorted(said) == sorted(["name", *(name for name in constructor if name != "vocab_size")])
    again = Encoder.load(tmp_path)
    assert again.spec == model.spec
    assert list(again.spec.model_options) == list(model.spec.model_options)
    # What does not fit the weights is told before it takes memory.
    width = next(name for name in ("encoder_dim", "hidden_dim") if name in said)
    say(tmp_path / "config.json", "architecture", **{width: 2**20})
    with pytest.raises(ModelFileError, match="do not fit the architecture in its config"):
        Encoder.load(tmp_path)


@pytest.mark.parametrize("architecture", list_models())
def test_the_defaults_of_the_first_folders(architecture: str) -> None:
    """They are the present ones, without options that came later; their defaults change nothing."""
    later = {
        "autoregressive_transformer": {"causal_encode": True, "shift_labels": True},
        "transformer_encoder": {"normalize_embedding": False},
    }
    assert _DEFAULTS[architecture] | later.get(architecture, {}) == default_options(architecture)


@pytest.mark.parametrize("name", ["plain", "base", "adapter"])
@pytest.mark.parametrize("version", [*range(1, MODEL.format), "present"])
def test_a_default_that_changes(version: int | str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = FIXTURES / f"format_{1 if version == 'present' else version}"
    expected, cells = expected_of(folder)
    if version == "present":
        for part in ("plain", "base"):
            Encoder.load(folder / part).save(tmp_path / part)
        adapted(folder).save_adapter(tmp_path / "adapter")
        folder = tmp_path
    for cls, changes in {TransformerEncoder: {"norm_first": False}, GenePoolingModel: {"layer_norm_eps": 0.5}}.items():
        for option, value in changes.items():
            monkeypatch.setitem(cls.__init__.__kwdefaults__, option, value)
            assert inspect.signature(cls).parameters[option].default == value
    embedding = loaded(folder, name).get_latent_representation(cells, key_added=None)
    np.testing.assert_allclose(embedding, expected["embeddings"][name], atol=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    def folder(name: str) -> Path:
        return Path(shutil.copytree(FOLDERS[0] / name, tmp_path / name))

    return folder


def test_the_options_of_other_architectures(custom_architecture: str, tiny_adata, tmp_path: Path, monkeypatch) -> None:
    """What JSON or ModelConfig may change is left out; a default that looks like a path or a claim is none."""
    cls = MODELS.get(custom_architecture)
    more = {"seed": 3, "sizes": (1, 2), "kind": float, "bound": math.inf, "table": "a/b.csv", "n": 10**9}
    extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=value) for n, value in more.items()]
    extra.append(inspect.Parameter("rest", inspect.Parameter.VAR_KEYWORD))
    signature = inspect.Signature([*inspect.signature(cls).parameters.values(), *extra])
    monkeypatch.setattr(cls, "__signature__", signature, raising=False)
    assert default_options(custom_architecture) == {"hidden_dim": 512, "dropout": 0.1, "table": "a/b.csv", "n": 10**9}
    Encoder.setup_anndata(tiny_adata)
    model = Encoder(tiny_adata, custom_architecture, hidden_dim=8)
    model.save(tmp_path)
    assert Encoder.load(tmp_path).spec == model.spec
    assert set(inspect.signature(Encoder).parameters) - {"options"} <= _TAKEN


@pytest.mark.parametrize(
    ("name", "change", "differs"),
    [
        ("plain", {"num_layers": 3}, r"num_layers=3, and the weights are of num_layers=\d"),
        ("base", {"num_layers": 2, "ffn_dim": 16}, None),
    ],
)
def test_the_option_that_differs(folder: Callable[[str], Path], name: str, change: dict, differs: str | None) -> None:
    path = folder(name)
    say(path / "config.json", "architecture", **change)
    with pytest.raises(ModelFileError, match="do not fit the architecture in its config: ") as caught:
        Encoder.load(path)
    if differs is None:  # several do
        assert re.search(r"missing '.*; '.*' is \(8, 8\) instead of \(16, 8\)", str(caught.value))
        assert "the config says" not in str(caught.value)
    else:
        assert re.search(f"; the config says {differs}", str(caught.value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora": {"r": 3}}, r"do not fit their description: '.*lora_A.* is \(2, 8\) instead of \(3, 8\)"),
        ({"lora": {"r": 10**9}}, "the config claims r=1000000000"),
        ({"lora": None}, "is of no adapters"),
        ({"task": {"name": "annotation", "classes": 3}}, "describes no model that can be made"),
        ({"task": {"name": "somebodys_task"}}, "task='somebodys_task' is not known"),
    ],
)
def test_an_adapter_that_does_not_fit(folder: Callable[[str], Path], change: dict, message: str) -> None:
    path = folder("adapter")
    if isinstance(change.get("lora"), dict):
        change = {"lora": json.loads((path / "adapter.json").read_text())["tuning"]["lora"] | change["lora"]}
    say(path / "adapter.json", "tuning", **change)
    with pytest.raises(OptionError if "somebodys" in message else ModelFileError, match=message):
        Encoder.load_adapter(Encoder.load(FOLDERS[0] / "base"), path)


def test_an_architecture_that_computes_with_its_weights(
    custom_architecture: str, tiny_adata: ad.AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be made without memory; its weights are compared once it is made."""
    cls = MODELS.get(custom_architecture)
    plain = cls.__init__

    @functools.wraps(plain)
    def init(self, *args, **options) -> None:
        plain(self, *args, **options)
        self.total = float(self.head.decoder.weight.detach().sum())

    monkeypatch.setattr(cls, "__init__", init)
    Encoder.setup_anndata(tiny_adata)
    Encoder(tiny_adata, custom_architecture, hidden_dim=8).save(tmp_path)
    Encoder.load(tmp_path)
    say(tmp_path / "config.json", "architecture", hidden_dim=16)
    with pytest.raises(ModelFileError, match=r"do not fit the architecture in its config: .* instead of"):
        Encoder.load(tmp_path)
