"""What folders say of their models: every option, numbers that are none, and what does not fit."""

import functools
import inspect
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from scforge.errors import ModelFileError, OptionError
from scforge.estimators import Encoder
from scforge.estimators.serialize import MODEL, read_description, sealed
from scforge.estimators.spec import _TAKEN, default_options
from scforge.models import list_models
from scforge.models.gene_pooling import GenePoolingModel
from scforge.models.registry import MODELS
from scforge.models.transformer_encoder import TransformerEncoder


def test_figures_that_are_no_numbers(tmp_path: Path) -> None:
    """They are written as standard JSON. Keys that are numbers become text."""
    path = tmp_path / "config.json"
    part = {"name": "x"}
    odd = {"class": "Encoder", "architecture": part, "tokenizer": part, "objective": part, "setup": {}, "sha256": {}}
    odd |= {"seed": 0, "is_trained": True, "n_epochs": 4, "of": {10: "a", 9: ("b",)}}
    odd["history"] = {"loss": [1.5, math.nan, math.inf, -math.inf]}
    path.write_text(sealed(odd))
    json.loads(path.read_bytes(), parse_constant=lambda name: pytest.fail(name))
    found = read_description(MODEL, path)
    assert found["of"] == {"10": "a", "9": ["b"]}
    np.testing.assert_array_equal(found["history"]["loss"], odd["history"]["loss"])


def say(path: Path, part: str, **changes: object) -> None:
    content = json.loads(path.read_text())
    content[part] |= changes
    kept = {key: value for key, value in content.items() if key not in ("format", "scforge_version", "checksum")}
    path.write_text(sealed(kept) if "checksum" in content else json.dumps(content))


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
    with pytest.raises(ModelFileError):
        Encoder.load(tmp_path)


@pytest.mark.parametrize("name", ["plain", "base", "adapter"])
def test_a_default_that_changes(name: str, saved_models: Path, tiny_adata, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved model keeps the default of the scforge that made it."""

    def embedding() -> np.ndarray:
        if name == "adapter":
            model = Encoder.load(saved_models / "adapter", base=Encoder.load(saved_models / "base"))
        else:
            model = Encoder.load(saved_models / name)
        return model.get_latent_representation(tiny_adata, key_added=None)

    before = embedding()
    for cls, option, value in ((TransformerEncoder, "norm_first", False), (GenePoolingModel, "layer_norm_eps", 0.5)):
        monkeypatch.setitem(cls.__init__.__kwdefaults__, option, value)
        assert inspect.signature(cls).parameters[option].default == value
    np.testing.assert_array_equal(embedding(), before)


@pytest.fixture
def folder(saved_models: Path, tmp_path: Path) -> Callable[[str], Path]:
    def folder(name: str) -> Path:
        return Path(shutil.copytree(saved_models / name, tmp_path / name))

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


def test_weights_of_other_sizes(folder: Callable[[str], Path]) -> None:
    path = folder("base")
    say(path / "config.json", "architecture", num_layers=2, ffn_dim=16)
    with pytest.raises(ModelFileError):
        Encoder.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora": {"r": 3}}, r"do not match the architecture in its config: .*lora_A.*"),
        ({"task": {"name": "somebodys_task"}}, "task='somebodys_task' is not known"),
    ],
)
def test_an_adapter_that_does_not_fit(
    folder: Callable[[str], Path], saved_models: Path, change: dict, message: str
) -> None:
    path = folder("adapter")
    if "lora" in change:
        change = {"lora": json.loads((path / "adapter.json").read_text())["tuning"]["lora"] | change["lora"]}
    say(path / "adapter.json", "tuning", **change)
    with pytest.raises((ModelFileError, OptionError), match=message):
        Encoder.load(path, base=Encoder.load(saved_models / "base"))


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
    with pytest.raises(ModelFileError):
        Encoder.load(tmp_path)
