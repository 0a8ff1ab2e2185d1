"""What scforge opens: no pickle, no URL that opens more than it names, regular files, and sizes that fit."""

import inspect
import json
import os
import pickle
import re
import resource
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import anndata as ad
import fsspec.core
import h5py
import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scvi.model.base import BaseModelClass

import scforge
from scforge._io import read_json, sha256_of, sha256_of_json
from scforge.cli import main
from scforge.config import Config, load_config
from scforge.config.load import parse_toml, parse_yaml
from scforge.data import GeneVocab, convert, open_cells, read_h5ad
from scforge.data.paths import PROTOCOLS, check_url
from scforge.data.remote import remote_file_system
from scforge.data.store import inspect_store
from scforge.errors import (
    ConfigError,
    DataError,
    MissingFileError,
    ModelFileError,
    OptionError,
    ScforgeError,
    TrainingError,
)
from scforge.estimators.serialize import sealed
from scforge.estimators.spec import ModelSpec, defaults_for
from scforge.hub import resolve, upload
from scforge.hub.finding import copy_model, origin_of
from scforge.models import Encoder, ScDiVa, get_model, list_models
from scforge.models._utils import bounded, without_weights
from scforge.models.registry import MODELS
from scforge.testing import raises
from scforge.tokenizers.base import TOKENIZERS, get_tokenizer
from scforge.training.objectives.base import OBJECTIVES, get_objective
from scforge.workflows.models import push_folder


@pytest.fixture(scope="module")
def adata() -> ad.AnnData:
    return scforge.datasets.pbmc3k()[:60, :200].copy()


@pytest.fixture(scope="module")
def saved(adata: ad.AnnData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    Encoder.setup_anndata(adata)
    model = Encoder(adata, n_top_genes=None, hidden_dim=8, latent_dim=4, ffn_dim=8)
    model.train(1, progress_bar=False, accelerator="cpu", batch_size=20)
    model.save(folder, save_anndata=True)
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def reseal(folder: Path, **changes: object) -> None:
    """Change parts of a description as its author could, with checksums that fit."""
    content = json.loads((folder / "config.json").read_text())
    for name in ("format", "scforge_version", "checksum"):
        content.pop(name)
    for name, options in changes.items():
        content[name].update(options)
    content["sha256"] = {name: sha256_of(folder / name) for name in content["sha256"] if (folder / name).exists()}
    (folder / "config.json").write_text(sealed(content))


@contextmanager
def refused_or_fine() -> Iterator[None]:
    """Let nothing pass but an error of scforge in one sentence."""
    try:
        yield
    except ScforgeError as error:
        if "\n" in str(error):
            raise AssertionError(str(error)) from error


# Pickles


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


KNOWN = {
    # What scforge defines itself, or refuses by an attribute that is not there.
    "load": "overridden",
    "save": "overridden",
    "load_registry": "overridden",
    "view_setup_args": "overridden",
    "convert_legacy_save": "absent",
    "setup_annbatch": "absent",
}
PATHS = ("dir", "path", "file", "folder", "url", "prefix", "backup")


@pytest.mark.parametrize("cls", [Encoder, ScDiVa])
def test_every_inherited_method_that_takes_a_path_is_handled(cls: type) -> None:
    """If this fails after an update of scvi-tools, override the new method in CellModel, or make it absent there."""
    foreign = [base for base in cls.__mro__ if not base.__module__.startswith("scforge") and base is not object]
    assert BaseModelClass in foreign
    for base in foreign:
        for name, member in vars(base).items():
            function = getattr(member, "__func__", member)
            if name.startswith("_") or not callable(function):
                continue
            takes = [one for one in inspect.signature(function).parameters if any(part in one for part in PATHS)]
            if not takes:
                continue
            assert name in KNOWN, f"{base.__name__}.{name} takes {takes}"
            if KNOWN[name] == "absent":
                with pytest.raises(AttributeError, match=f"has no {name}; "):
                    getattr(cls, name)
            else:
                assert getattr(cls, name).__module__.startswith("scforge"), name


@pytest.mark.parametrize("name", ["model.pt", "attr.pkl", "model_params.pt"])
def test_no_method_opens_a_pickle(name: str, tmp_path: Path) -> None:
    folder, mark = tmp_path / "legacy", tmp_path / "ran"
    folder.mkdir()
    for file in (name, "model.pt"):
        with (folder / file).open("wb") as handle:
            pickle.dump(Bomb(mark), handle)
    (folder / "var_names.csv").write_text("a\n")
    torch.save({"attr_dict": Bomb(mark), "model_state_dict": {}}, folder / "model.pt")
    for method in ("load", "load_registry", "view_setup_args", "convert_legacy_save"):
        options = (tmp_path / "out",) if method == "convert_legacy_save" else ()
        with pytest.raises((ScforgeError, AttributeError)):
            getattr(Encoder, method)(folder, *options)
        assert not mark.exists(), method
    assert not (tmp_path / "out").exists()


def test_setup_arguments_are_still_shown(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Encoder.view_setup_args(saved)
    assert "Setup via Encoder.setup_anndata with arguments:\n{'batch_key': None" in capsys.readouterr().out


# URLs

HOSTILE_URLS = [
    "reference://x.zarr",
    "reference::file:///tmp/refs.json",
    "filecache::file:///tmp/x.h5ad",
    "simplecache::http://127.0.0.1:9/x.h5ad",
    "zip://a.h5ad::file:///tmp/x.zip",
    "http://127.0.0.1:9/a.h5ad::reference",
    "blockcache://x.h5ad",
    "local:///tmp/x.h5ad",
    "git://x:y@z/a.h5ad",
    "sftp://127.0.0.1/x.h5ad",
    "dask://x.h5ad",
    "REFERENCE://x.zarr",
    "LOCAL:///tmp/x.h5ad",
]


@pytest.mark.parametrize("url", HOSTILE_URLS)
def test_urls_that_open_more_than_they_name(url: str, model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells, evaluation = {"paths": [str(model / "adata.h5ad")]}, {"datasets": {"a": url}, "benchmarks": ["scib"]}
    routes = {
        "open_cells": lambda: open_cells(url),
        "convert": lambda: convert(url, "out.zarr"),
        "inspect_store": lambda: inspect_store(url),
        "data.paths": lambda: scforge.workflows.check_config(Config(data={"paths": [url]})),
        "eval.datasets": lambda: scforge.workflows.check_config(Config(data=cells, eval=evaluation)),
        "embedding": lambda: Encoder.load(model).get_latent_representation(url),
        "embed_to": lambda: scforge.workflows.embed_to(str(model), url, "out.h5ad"),
        "data sets": lambda: open_cells([str(model / "adata.h5ad"), url]),
    }
    for name, route in routes.items():
        with pytest.raises(ScforgeError, match="chains URLs with '::'|has the protocol") as caught:
            route()
        assert "\n" not in str(caught.value), name
    for command in (
        ["inspect", url],
        ["convert", url, "-o", "o.zarr"],
        ["embed", url, "-m", str(model), "-o", "o.h5ad"],
    ):
        assert main(command) == 2
    # Places that take local paths only.
    for call in (lambda: read_h5ad(url), lambda: Encoder.load(url), lambda: convert(model / "adata.h5ad", url)):
        with pytest.raises(ScforgeError):
            call()


@given(st.from_regex(r"[a-z][a-z0-9+.-]{1,8}", fullmatch=True))
def test_only_listed_protocols(scheme: str) -> None:
    if scheme in PROTOCOLS:
        assert check_url(f"{scheme}://a/b") == scheme
    else:
        with pytest.raises(OptionError, match="has the protocol"):
            check_url(f"{scheme}://a/b")


@pytest.mark.parametrize("name", ["fo", "protocol", "target_protocol", "target_options", "remote_protocol", "fs"])
def test_options_that_name_another_file_system(name: str, tmp_path: Path) -> None:
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "gen": [], "refs": {}}))
    options = {name: "reference", "simple_templates": False}
    with raises(OptionError, "storage_options"):
        remote_file_system(f"memory://{tmp_path}/refs.json", options)
    with raises(OptionError, "storage_options"):
        open_cells("memory://cells.h5ad", storage_options=options)


@pytest.mark.parametrize(
    ("url", "option"),
    [
        ("hf://datasets/org/name/cells.h5ad", {"endpoint": "http://127.0.0.1:9"}),
        ("HF://datasets/org/name/cells.h5ad", {"endpoint": "http://127.0.0.1:9"}),
        ("hf://datasets/org/name/cells.h5ad", {"hf": {"endpoint": "http://127.0.0.1:9"}}),
        ("gs://bucket/cells.h5ad", {"endpoint_url": "http://127.0.0.1:9"}),
        ("gcs://bucket/cells.h5ad", {"gcs": {"endpoint_url": "http://127.0.0.1:9"}}),
    ],
)
def test_no_option_sends_a_token_to_another_server(url: str, option: dict, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(fsspec.core, "get_filesystem_class", None)  # nothing is opened
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"data": {"paths": [url], "storage_options": option}}))
    routes = [
        lambda: open_cells(url, storage_options=option),
        lambda: convert(url, tmp_path / "out.zarr", storage_options=option),
        lambda: scforge.workflows.check_config(load_config(recipe)),
        lambda: scforge.workflows.train_from_config(load_config(recipe)),
    ]
    for route in routes:
        with pytest.raises(OptionError, match="a server that would get your credentials") as caught:
            route()
        assert "\n" not in str(caught.value)
    assert main(["config", "check", str(recipe)]) == 2


def test_an_endpoint_of_s3_is_the_users_choice() -> None:
    assert check_url("s3://bucket/cells.h5ad", {"endpoint_url": "http://127.0.0.1:9000"}) == "s3"


def test_protocols_in_upper_case(saved: Path) -> None:
    assert check_url("HTTPS://host/cells.h5ad") == "https"
    assert len(open_cells(f"FILE://{saved / 'adata.h5ad'}")) == 60
    assert remote_file_system("MEMORY://cells.h5ad")[1] == "/cells.h5ad"


def test_what_is_listed_opens() -> None:
    group = scforge.data.remote.open_group("memory://security/a.zarr", mode="w")
    group.create_array("x", data=np.arange(3))
    assert scforge.data.remote.open_group("memory://security/a.zarr")["x"][:].tolist() == [0, 1, 2]


# Sizes


@pytest.mark.parametrize("n_layers", [100_000, 10_000_000])
def test_layers_are_counted_before_they_are_made(n_layers: int, model: Path, adata: ad.AnnData, tmp_path: Path) -> None:
    reseal(model, architecture={"num_layers": n_layers})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"data: {{paths: {model / 'adata.h5ad'}}}\nmodel: {{num_layers: {n_layers}}}\n")
    routes = {
        "load": lambda: Encoder.load(model),
        "recipe": lambda: scforge.workflows.check_config(load_config(recipe)),
        "Python": lambda: Encoder(adata, num_layers=n_layers),
        "get_model": lambda: get_model("mlp", scforge.config.ModelConfig(vocab_size=10, num_layers=n_layers)),
    }
    for name, route in routes.items():
        begun = time.perf_counter()
        with raises(ScforgeError, "num_layers"):
            route()
        assert time.perf_counter() - begun < 1, name
    assert main(["config", "check", str(recipe)]) == 2


INTEGERS = [
    (name, option)
    for name in ["autoregressive_transformer", "gene_pooling", "masked_autoencoder", "mlp", "transformer_encoder"]
    for option, parameter in inspect.signature(MODELS.get(name)).parameters.items()
    if "int" in str(parameter.annotation) and option not in ("vocab_size", "max_seq_len", "n_special", "n_batches")
]


def test_the_list_above_has_every_architecture() -> None:
    assert {name for name, _ in INTEGERS} | {"scdiva"} == {n for n in list_models() if n in MODELS._builtin}


@pytest.mark.parametrize(("architecture", "option"), INTEGERS)
def test_huge_options_are_refused_or_cost_nothing(architecture: str, option: str) -> None:
    vocab = GeneVocab.from_genes([f"G{number}" for number in range(50)]).with_medians(np.ones(50))
    defaults = defaults_for(architecture, {})
    parts = {"tokenizer": (defaults.tokenizer, {}), "objective": (defaults.objective, {})}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for value in (10**10, 2**40, 2**62):
        begun = time.perf_counter()
        with refused_or_fine():
            spec, _ = ModelSpec.resolve(defaults, vocab, **parts, options={option: value})
            spec.build_module()
        assert time.perf_counter() - begun < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # kB


@pytest.mark.parametrize("registry", [TOKENIZERS, OBJECTIVES])
def test_huge_options_of_tokenizers_and_objectives(registry) -> None:
    vocab = GeneVocab.from_genes([f"G{number}" for number in range(50)]).with_medians(np.ones(50))

    def make(name: str, options: dict[str, int]) -> object:
        return get_objective(name, **options) if registry is OBJECTIVES else get_tokenizer(name, vocab, **options)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in registry.names():
        for option, parameter in inspect.signature(registry.get(name)).parameters.items():
            if "int" in str(parameter.annotation):
                for value in (10**9, 2**40, 2**62):
                    begun = time.perf_counter()
                    with refused_or_fine():
                        make(name, {option: value})
                    assert time.perf_counter() - begun < 5, (name, option, value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


@pytest.mark.parametrize("value", [[], {}, ["a"], {"a": 1}, 3, True])
@pytest.mark.parametrize("part", ["architecture", "tokenizer", "objective"])
def test_text_options_that_are_no_text(part: str, value: object, model: Path) -> None:
    described = json.loads((model / "config.json").read_text())[part]
    registry = {"architecture": MODELS, "tokenizer": TOKENIZERS, "objective": OBJECTIVES}[part]
    parameters = inspect.signature(registry.get(described["name"])).parameters
    names = [name for name, parameter in parameters.items() if parameter.annotation in ("str", "str | None")]
    assert names
    for name in names:
        reseal(model, **{part: {**described, name: value}})
        with pytest.raises(ScforgeError, match=rf"{name}=.* (must be|is not) text") as caught:
            Encoder.load(model)
        assert "\n" not in str(caught.value)


def test_parts_of_any_architecture_are_counted() -> None:
    def many() -> torch.nn.Module:
        return torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(10**9))

    for on_meta in (nullcontext(), without_weights()):
        with pytest.raises(OptionError, match="has more than 20,000 parts"), on_meta, bounded():
            many()
    with pytest.raises(OptionError, match=r"needs more than the 0\.0 GB of available memory"), bounded(10**6):
        torch.nn.Linear(10**4, 10**4)
    torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(20_001))


# Documents

ALIASES = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefghijk", "bcdefghijkl", strict=True)
)
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{','.join([f'*{before}'] * 10)}]}}\n"
    for before, name in zip("abcdefghijk", "bcdefghijkl", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALIASES, "more than 100,000 keys and values"),
        (f"data: {{paths: [x]}}\nmodel:\n  x: 1\n{ALIASES}", "more than 100,000 keys and values"),
        (MERGED, "more than 100,000 keys and values"),
        ("data: &d {paths: *d}", "a part contains itself"),
        ("&d [*d]", "a part contains itself"),
        ("data: " + "[" * 60 + "]" * 60, "nested more than 50 deep"),
        ("[" * 5000, "nested too deeply"),
        ('data: {paths: "a\\0b"}', "contains the character"),
        ('data: {paths: "a\\ud800b"}', "contains the character"),
        ('"a\\0b": 1', "contains the character"),
        ("seed: " + "9" * 6000, "is not a value of type int"),
        ("seed: " + "9" * 20, "more than 63 bits"),
        ("seed: 0x" + "f" * 100_000, "more than 63 bits"),
        ("seed: 1" + ":59" * 2000, "more than 63 bits"),
    ],
)
def test_hostile_yaml(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.perf_counter()
    with pytest.raises(ConfigError, match=message) as caught:
        parse_yaml(text, where="recipe.yaml")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    (tmp_path / "recipe.yaml").write_text(text)
    assert main(["config", "check", str(tmp_path / "recipe.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert time.perf_counter() - begun < 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = " + "[" * 5000, "nested too deeply"),
        (".".join("a" * 5000) + " = 1", "nested more than 50 deep"),
        ("seed = " + "9" * 6000, "Exceeds the limit"),
        ("seed = " + "9" * 20, "more than 63 bits"),
        ('data = {paths = "a\\u0000b"}', "contains the character"),
        ('data = {paths = "a\\ud800b"}', "not a Unicode scalar value"),
    ],
)
def test_hostile_toml(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_toml(text, where="recipe.toml")
    (tmp_path / "recipe.toml").write_text(text)
    assert main(["config", "check", str(tmp_path / "recipe.toml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(PLAIN)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_plain_content_is_read_or_refused_in_one_sentence(content: object) -> None:
    with refused_or_fine():
        parse_yaml(json.dumps(content), where="x")


@pytest.mark.parametrize("content", ["[" * 100_000, "[" * 400 + "]" * 400, "1" * 6000, '{"a":' * 300 + "1" + "}" * 300])
def test_hostile_json(content: str, model: Path) -> None:
    (model / "x.json").write_text(content)
    with pytest.raises(ModelFileError):
        read_json(model / "x.json")
    (model / "config.json").write_text(content)
    with pytest.raises(ModelFileError):
        Encoder.load(model)


# Files


def test_pipes_do_not_hang(model: Path, tmp_path: Path, adata: ad.AnnData, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    adata.write_h5ad("cells.h5ad")
    convert("cells.h5ad", "cells.zarr")
    os.mkfifo("pipe.h5ad")
    os.mkfifo("pipe.yaml")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket.h5ad")
    device = Path("/dev/zero")
    commands = [
        [*words, str(name)]
        for name in ("pipe.h5ad", "socket.h5ad", device)
        for words in (
            ["inspect"],
            ["predict", "-m", str(model), "-o", "o.csv"],
            ["embed", "-m", str(model), "-o", "o.h5ad"],
            ["convert", "-o", "o.zarr"],
        )
    ]
    with deadline(60):
        for command in [*commands, ["config", "check", "pipe.yaml"]]:
            assert main(command) == 2, command
        for read in (open_cells, read_h5ad, read_json):
            with pytest.raises((DataError, ModelFileError), match="is a pipe, a socket or a device"):
                read("pipe.h5ad")


@pytest.mark.parametrize(
    "name", ["config.json", "vocab.json", "model.safetensors", "adata.h5ad", "origin.json", "README.md"]
)
def test_pipes_in_model_folders_do_not_hang(name: str, model: Path, tmp_path: Path) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with deadline(60):
        if name in ("origin.json", "README.md"):
            Encoder.load(model)
        else:
            with pytest.raises((ModelFileError, MissingFileError, DataError)):
                Encoder.load(model)


@pytest.mark.parametrize("name", ["zarr.json", "first chunk"])
def test_pipes_in_stores_do_not_hang(name: str, adata: ad.AnnData, tmp_path: Path) -> None:
    adata.write_h5ad(tmp_path / "cells.h5ad")
    store = tmp_path / "cells.zarr"
    convert(tmp_path / "cells.h5ad", store)
    chunk = store / name if name == "zarr.json" else next(p for p in sorted(store.rglob("c/*")) if p.is_file())
    chunk.unlink()
    os.mkfifo(chunk)
    with deadline(60), pytest.raises((DataError, MissingFileError, ModelFileError)):
        inspect_store(store)
    with deadline(60), pytest.raises((DataError, MissingFileError, ModelFileError)):
        open_cells(store)


@pytest.mark.parametrize("linked", ["chunk", "folder"])
@pytest.mark.parametrize("kind", ["store", "AnnData"])
def test_links_out_of_a_zarr_folder(kind: str, linked: str, adata: ad.AnnData, tmp_path: Path) -> None:
    real, folder = tmp_path / "real.zarr", tmp_path / "cells.zarr"
    adata.write_h5ad(tmp_path / "cells.h5ad")
    if kind == "store":
        convert(tmp_path / "cells.h5ad", real)
    else:
        adata.write_zarr(real)
    folder.symlink_to(real)
    chunk = next(part for part in sorted(real.rglob("*")) if part.is_file() and re.fullmatch("[0-9.]+", part.name))
    moved = chunk if linked == "chunk" else chunk.parent
    inside, outside = real / "moved", tmp_path / "private"
    moved.rename(inside)
    moved.symlink_to(inside)
    for place in (folder, f"file://{folder}"):
        open_cells(place)
    inside.rename(outside)
    moved.unlink()
    moved.symlink_to(outside)
    for place in (folder, f"file://{folder}"):
        with pytest.raises(DataError, match="is a link out of its folder") as caught:
            open_cells(place)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="is a link out of its folder"):
        convert(folder, tmp_path / "out.zarr")


def test_a_store_in_the_cache_of_the_hub(adata: ad.AnnData, tmp_path: Path) -> None:
    """Each of its files is a link."""
    repository = tmp_path / "datasets--org--name"
    (repository / "blobs").mkdir(parents=True)
    adata.write_zarr(store := repository / "snapshots" / "0123" / "cells.zarr")
    for number, file in enumerate([part for part in store.rglob("*") if part.is_file()]):
        file.rename(blob := repository / "blobs" / str(number))
        file.symlink_to(blob)
    assert len(open_cells(store)) == len(adata)


class deadline:
    """Fail if the block takes longer, by ending the process, as a pipe that is being opened cannot be interrupted."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, os._exit, (70,))

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


SECRET = b"root:x:0:0:a secret of this machine\n" * 100


def external_storage(file: h5py.File, secret: Path) -> None:
    del file["obs/n_counts"]
    data = file.create_dataset("obs/n_counts", (60,), dtype="u1", external=[(str(secret), 0, 60)])
    data.attrs["encoding-type"], data.attrs["encoding-version"] = "array", "0.2.0"


def external_link(file: h5py.File, secret: Path) -> None:
    with h5py.File(secret.with_suffix(".h5"), "w") as other:
        other["x"] = np.arange(60.0)
        other["x"].attrs["encoding-type"], other["x"].attrs["encoding-version"] = "array", "0.2.0"
    del file["obs/n_counts"]
    file["obs/n_counts"] = h5py.ExternalLink(str(secret.with_suffix(".h5")), "/x")


def external_behind_a_link(file: h5py.File, secret: Path) -> None:
    data = file.create_dataset("uns/z", (60,), dtype="u1", external=[(str(secret), 0, 60)])
    data.attrs["encoding-type"], data.attrs["encoding-version"] = "array", "0.2.0"
    del file["obs/n_counts"]
    file["obs/n_counts"] = h5py.SoftLink("/uns/z")


def virtual(file: h5py.File, secret: Path) -> None:
    external_link(file, secret)
    del file["obs/n_counts"]
    layout = h5py.VirtualLayout(shape=(60,), dtype="f8")
    layout[:] = h5py.VirtualSource(str(secret.with_suffix(".h5")), "x", shape=(60,))
    data = file.create_virtual_dataset("obs/n_counts", layout)
    data.attrs["encoding-type"], data.attrs["encoding-version"] = "array", "0.2.0"


def marked(data: h5py.Dataset) -> None:
    data.attrs["encoding-type"], data.attrs["encoding-version"] = "array", "0.2.0"


def virtual_of_itself(file: h5py.File, secret: Path) -> None:
    external_behind_a_link(file, secret)
    del file["obs/n_counts"]
    file.move("uns/z", "hidden")
    layout = h5py.VirtualLayout(shape=(60,), dtype="u1")
    layout[:] = h5py.VirtualSource(".", "hidden", shape=(60,))
    marked(file.create_virtual_dataset("obs/n_counts", layout))


def virtual_behind_a_link(file: h5py.File, secret: Path) -> None:
    external_link(file, secret)
    file.move("obs/n_counts", "hidden")
    layout = h5py.VirtualLayout(shape=(60,), dtype="f8")
    layout[:] = h5py.VirtualSource(".", "hidden", shape=(60,))
    marked(file.create_virtual_dataset("obs/n_counts", layout))


def endless(file: h5py.File, secret: Path) -> None:
    del file["obs/n_counts"]
    layout = h5py.VirtualLayout(shape=(60,), dtype="f8")
    layout[:] = h5py.VirtualSource(".", "obs/n_counts", shape=(60,))
    marked(file.create_virtual_dataset("obs/n_counts", layout))


def soft_links(file: h5py.File, secret: Path) -> None:
    external_link(file, secret)
    del file["obs/n_counts"]
    file["deep/out"] = h5py.ExternalLink(str(secret.with_suffix(".h5")), "/")
    file["first"] = h5py.SoftLink("deep/out/x")
    file["obs/n_counts"] = h5py.SoftLink("/first")


def counts_behind_a_link(file: h5py.File, secret: Path) -> None:
    shutil.copy(file.filename, secret.with_suffix(".h5"))
    file["out"] = h5py.ExternalLink(str(secret.with_suffix(".h5")), "/")
    del file["X/data"]
    file["X/data"] = h5py.SoftLink("/out/X/data")


PLANTS = [external_storage, external_link, external_behind_a_link, virtual, virtual_of_itself, virtual_behind_a_link]
PLANTS += [endless, soft_links, counts_behind_a_link]


@pytest.mark.parametrize("plant", PLANTS)
def test_files_that_read_other_files(plant, model: Path, adata: ad.AnnData, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    cells = adata.copy()
    cells.obs["n_counts"] = 1.0
    for path in (tmp_path / "cells.h5ad", model / "adata.h5ad"):
        cells.write_h5ad(path)
        with h5py.File(path, "a") as file:
            plant(file, secret)
    reseal(model)
    reads = [
        lambda: read_h5ad(tmp_path / "cells.h5ad"),
        lambda: open_cells(tmp_path / "cells.h5ad").obs,
        lambda: convert(tmp_path / "cells.h5ad", tmp_path / "out.zarr"),
        lambda: Encoder.load(model),
        lambda: scforge.workflows.embed_to(str(model), str(tmp_path / "cells.h5ad"), str(tmp_path / "o.h5ad")),
    ]
    for read in reads:
        with pytest.raises(DataError, match="reads from other files") as caught:
            read()
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("o*"))


def test_categories_without_a_name(adata: ad.AnnData, tmp_path: Path) -> None:
    """anndata follows a reference to categories, which may lead to what no group of the file contains."""
    (tmp_path / "secret").write_bytes(bytes(range(60)))
    path, cells = tmp_path / "cells.h5ad", adata.copy()
    cells.obs = pd.DataFrame({"n_counts": np.zeros(60, np.int8)}, index=cells.obs_names)
    cells.write_h5ad(path)
    with h5py.File(path, "a") as file:
        hidden = file.create_group("uns/hidden")
        hidden.attrs["encoding-type"], hidden.attrs["encoding-version"] = "dict", "0.1.0"
        marked(file.create_dataset("uns/hidden/z", (60,), dtype="u1", external=[(str(tmp_path / "secret"), 0, 60)]))
        file["obs/n_counts"].attrs["categories"] = file["uns/hidden/z"].ref
        file["obs"].attrs["encoding-version"] = "0.1.0"
    content = bytearray(path.read_bytes())
    place = content.rindex(b"SNOD") + 6  # number of names in the new group
    content[place : place + 2] = bytes(2)
    path.write_bytes(content)
    with h5py.File(path) as file:
        assert list(file["uns/hidden"]) == []
    for read in (read_h5ad, open_cells):
        with pytest.raises(DataError, match="reads from other files"):
            read(path)


def test_harmless_links_in_a_file(adata: ad.AnnData, tmp_path: Path) -> None:
    path = tmp_path / "cells.h5ad"
    adata.write_h5ad(path)
    with h5py.File(path, "a") as file:
        file["uns/nowhere"] = h5py.SoftLink("/not/there")
        file["uns/circle"] = h5py.SoftLink("/uns/circle")
        file["uns/root"] = file["/"]
        file.move("X/data", "counts")
        file["X/data"] = h5py.SoftLink("/counts")
    assert open_cells(path).obs.shape[0] == 60
    assert convert(path, tmp_path / "out.zarr").n_cells == 60


def test_links_out_of_a_model_folder_are_not_shared(model: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "id_rsa").write_text("secret")
    (model / "README.md").unlink()
    (model / "README.md").symlink_to(tmp_path / "id_rsa")
    for call in (
        lambda: upload(model, "org/light"),
        lambda: push_folder(model, "org/light"),
        lambda: copy_model(model, tmp_path / "copy"),
    ):
        with pytest.raises(ModelFileError):
            call()
    assert not (tmp_path / "copy").exists()
    (model / "README.md").unlink()
    (model / "card.md").write_text("my card")
    (model / "README.md").symlink_to("card.md")
    assert (copy_model(model, tmp_path / "copy") / "README.md").read_text() == "my card"


def test_weights_that_vanish_while_they_are_opened(model: Path, tmp_path: Path, monkeypatch) -> None:
    """Between two looks at the file, safetensors has torch open it, which raises an error of its own."""
    read, calls = safetensors.torch.load_file, []

    def replaced(path: Path) -> dict[str, torch.Tensor]:
        calls.append(path)
        if len(calls) == 1:
            Path(shutil.copy(path, tmp_path / "new")).replace(path)
            raise RuntimeError(f"unable to open file <{path}> in read-only mode: No such file or directory (2)")
        return read(path)

    monkeypatch.setattr(safetensors.torch, "load_file", replaced)
    Encoder.load(model)
    assert len(calls) > 1
    calls.clear()
    monkeypatch.setattr(safetensors.torch, "load_file", lambda path: torch.UntypedStorage.from_file("/none", False, 1))
    with pytest.raises(ModelFileError, match="unable to open file") as caught:
        Encoder.load(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "3", '"x"', "{}", "null"])
def test_an_origin_that_is_none(content: str, model: Path) -> None:
    (model / "origin.json").write_text(content)
    assert origin_of(model) == (None, None)
    Encoder.load(model)
    assert resolve(model) == model


# Checkpoints


@pytest.fixture(scope="module")
def run(adata: ad.AnnData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    Encoder.setup_anndata(adata)
    model = Encoder(adata, n_top_genes=None, hidden_dim=8, latent_dim=4, ffn_dim=8)
    model.train(1, progress_bar=False, accelerator="cpu", batch_size=20, checkpoint_dir=folder)
    return folder


KEYS = ["callbacks", "data", "epoch", "finished", "format", "means", "optimizer", "precision", "random", "schedules"]
KEYS += ["settings", "step", "total_steps"]


@pytest.mark.parametrize("key", KEYS)
def test_resealed_states(key: str, run: Path, adata: ad.AnnData, tmp_path: Path) -> None:
    for number, value in enumerate([..., None, [], {}, "x", -1]):
        folder = Path(shutil.copytree(run, tmp_path / f"run{number}"))
        file = next(folder.glob("step=*/training/state.json"))
        content = json.loads(file.read_text())
        assert set(KEYS) <= set(content["state"])
        content["state"].pop(key)
        if value is not ...:
            content["state"][key] = value
        content["sha256"]["state"] = sha256_of_json(content["state"])
        file.write_text(json.dumps(content))
        model = Encoder(adata, n_top_genes=None, hidden_dim=8, latent_dim=4, ffn_dim=8)
        options = {"progress_bar": False, "accelerator": "cpu", "batch_size": 20, "checkpoint_dir": folder}
        with refused_or_fine():
            model.train(2, resume="auto", **options)


def test_an_unknown_format_says_so(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    file = next(folder.glob("step=*/training/state.json"))
    content = json.loads(file.read_text())
    content["state"]["format"] = 99
    content["sha256"]["state"] = sha256_of_json(content["state"])
    file.write_text(json.dumps(content))
    with pytest.raises(TrainingError, match=r"has the format 99 \(of scforge .*\), but scforge .* reads the format 1"):
        scforge.training.run_folder.read_state(file.parent.parent)
