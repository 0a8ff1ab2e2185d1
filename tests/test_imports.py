"""Importing is cheap, and every public name is there."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

import scforge

HEAVY = {"anndata", "jax", "lightning", "matplotlib", "numba", "numpy", "pandas", "pydantic", "scanpy", "scvi", "torch"}
ROOMS = [name for name in scforge.__all__ if isinstance(getattr(scforge, name), types.ModuleType)]
LAZY = [
    f"scforge.{name}"
    for name in ["", *ROOMS, "training.objectives"]
    if (package := Path(scforge.__file__).parent.joinpath(*name.split("."), "__init__.py")).is_file()
    and "lazy_names" in package.read_text()
]
LAZY = [name.rstrip(".") for name in LAZY]


def imported(*lines: str) -> set[str]:
    """Return the top-level packages that a new process imports."""
    command = [sys.executable, "-X", "importtime", "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = [line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {name.split(".")[0] for name in names}


def test_import_is_cheap():
    loaded = imported("import scforge")
    assert "scforge" in loaded
    assert not loaded & HEAVY


def test_importing_all_rooms_is_cheap():
    rooms = [name for name in LAZY if name != "scforge"]
    assert not imported(*[f"import {name}" for name in rooms]) & HEAVY


@pytest.mark.slow
def test_models_run_on_a_bare_torch_machine():
    loaded = imported(
        "from scforge.models import TransformerEncoder, GenePoolingModel, get_model, list_models, components",
        "[get_model.__globals__['MODELS'].get(name) for name in list_models()]",
    )
    assert "torch" in loaded
    assert not loaded & {"anndata", "lightning", "numba", "pandas", "scanpy", "scvi"}


def test_data_needs_no_torch():
    names = ["GeneVocab", "open_cells", "read_h5ad", "map_genes", "select_genes"]
    assert not imported(f"from scforge.data import {', '.join(names)}") & {"torch", "lightning", "scanpy", "scvi"}


@pytest.mark.parametrize("room", LAZY)
def test_public_names(room):
    package = importlib.import_module(room)
    assert len(set(package.__all__)) == len(package.__all__)
    assert set(package._NAMES) == set(package.__all__) - {"__version__"}
    for name in package.__all__:
        value = getattr(package, name)
        assert value is getattr(package, name)
        assert name in dir(package)
        if isinstance(value, type | types.FunctionType):
            assert value.__name__ == name
    with pytest.raises(AttributeError, match=f"module '{room}' has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize("room", LAZY)
def test_star_import(room):
    names: dict[str, object] = {}
    exec(f"from {room} import *", names)
    assert set(importlib.import_module(room).__all__) <= set(names)


def test_modules_name_what_they_define():
    root = Path(scforge.__file__).parent
    for room in ("data", "tokenizers", "models", "training"):
        for path in sorted((root / room).rglob("[!_]*.py")):
            module = importlib.import_module(".".join(("scforge", *path.relative_to(root).with_suffix("").parts)))
            for name in getattr(module, "__all__", []):
                assert hasattr(module, name), f"{path}: {name}"
