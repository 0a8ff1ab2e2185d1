import importlib
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest

import scforge

HEAVY = {"anndata", "jax", "lightning", "matplotlib", "numba", "pandas", "pydantic", "scanpy", "scipy", "scvi", "torch"}
ROOMS = [name for name in scforge.__all__ if isinstance(getattr(scforge, name), types.ModuleType)]
LAZY = ["scforge"]
for room in [*ROOMS, "training.objectives"]:
    path = Path(scforge.__file__).parent.joinpath(*room.split("."), "__init__.py")
    if path.is_file() and "lazy_names" in path.read_text():
        LAZY.append(f"scforge.{room}")


def imported(*arguments: str) -> set[str]:
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = [line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["train", "--help"], ["evaluate", "--help"]])
def test_help_and_version_need_no_heavy_package(arguments):
    loaded = imported("-m", "scforge", *arguments)
    assert "scforge" in loaded
    assert not loaded & HEAVY


def test_the_version_is_looked_up_when_asked_for():
    assert "email" not in imported("-m", "scforge", "--help")  # the metadata of packages are mails
    assert scforge.__version__ == version("scforge")


def test_import_is_cheap():
    assert not imported("-c", "\n".join(f"import {name}" for name in LAZY)) & (HEAVY | {"numpy"})
    code = "import sys; before = set(sys.modules); import scforge; print(len(set(sys.modules) - before))"
    assert int(subprocess.check_output([sys.executable, "-c", code])) < 50


@pytest.mark.slow
def test_models_run_on_a_bare_torch_machine():
    loaded = imported(
        "-c",
        "from scforge.models import TransformerEncoder, GenePoolingModel, get_model, list_models, components\n"
        "[get_model.__globals__['MODELS'].get(name) for name in list_models()]",
    )
    assert "torch" in loaded
    assert not loaded & {"anndata", "lightning", "numba", "pandas", "scanpy", "scvi"}


def test_configurations_and_data_need_no_torch():
    names = "GeneVocab, open_cells, read_h5ad, map_genes, select_genes"
    loaded = imported("-c", f"import scforge.config.schema, scforge.config.load\nfrom scforge.data import {names}")
    assert not loaded & {"torch", "lightning", "scanpy", "scvi"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("embed nope.h5ad -m model -o out.zarr", "the file 'nope.h5ad' does not exist"),
        ("embed pbmc3k.zarr -m model -o out.csv", "(-o) must have one of the file extensions '.zarr', '.h5ad'"),
        ("train --config light.yaml", "light.yaml, line 1: the file 'nope.h5ad' does not exist"),
    ],
)
def test_a_wrong_path_is_said_before_heavy_imports(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "light.yaml").write_text("data: {paths: [nope.h5ad]}")
    code = "import sys; from scforge.cli import main; print(main(sys.argv[1:]), *{'torch', 'scvi'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"]
    assert message in done.stderr


def test_every_subpackage_is_an_attribute():
    code = "import scforge, sys; print(*[getattr(scforge, name).__name__ for name in sys.argv[1:]])"
    names = sorted(path.parent.name for path in Path(scforge.__file__).parent.glob("*/__init__.py"))
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"scforge.{name}" for name in names]


@pytest.mark.parametrize("room", LAZY)
def test_public_names(room):
    package = importlib.import_module(room)
    assert len(set(package.__all__)) == len(package.__all__)
    assert set(package._NAMES) == set(package.__all__) - {"__version__"}
    for name in package.__all__:
        value = getattr(package, name)
        assert value is getattr(package, name)
        assert name in dir(package)
    with pytest.raises(AttributeError, match=f"module '{room}' has no attribute 'nothing'"):
        _ = package.nothing
    names: dict[str, object] = {}
    exec(f"from {room} import *", names)
    assert set(package.__all__) <= set(names)
