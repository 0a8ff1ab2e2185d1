"""Every public name is documented, its example runs, and the API page lists it."""

import doctest
import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import scforge

API = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
ROOMS = [
    "config",
    "data",
    "datasets",
    "errors",
    "estimators",
    "eval",
    "foreign",
    "insilico",
    "models",
    "pl",
    "soma",
    "testing",
    "tokenizers",
    "training",
]
NAMES = [info.name for info in pkgutil.walk_packages(scforge.__path__, "scforge.")]
MODULES = sorted(name for name in NAMES if "__main__" not in name)
PUBLIC = [(room, name) for room in ROOMS for name in importlib.import_module(f"scforge.{room}").__all__]


@pytest.mark.parametrize("name", ["scforge", *MODULES])
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples in {name} failed"


@pytest.mark.parametrize(("room", "name"), PUBLIC)
def test_public_names_are_documented(room, name):
    value = getattr(importlib.import_module(f"scforge.{room}"), name)
    if inspect.ismodule(value) or not (inspect.isclass(value) or inspect.isfunction(value)):
        return
    assert value.__doc__, f"scforge.{room}.{name} has no docstring"
    if inspect.isfunction(value):
        parameters = [p for p in inspect.signature(value).parameters if p not in {"args", "kwargs"}]
        missing = [p for p in parameters if p not in value.__doc__]
        assert not missing, f"the docstring of scforge.{room}.{name} says nothing of {missing}"


@pytest.mark.parametrize(("room", "name"), PUBLIC)
def test_public_names_stand_in_the_api_page(room, name):
    value = getattr(importlib.import_module(f"scforge.{room}"), name)
    rooms = "|".join(ROOMS)
    listed = [line.split(".") for line in re.findall(rf"^   ((?:{rooms})\.[\w.]+)$", API, flags=re.MULTILINE)]
    if inspect.ismodule(value):
        assert any(parts[:-1] == [room, name] for parts in listed), f"docs/api.md lists nothing of {room}.{name}"
    else:
        found = any(functools.reduce(getattr, parts, scforge) is value for parts in listed if parts[-1] == name)
        assert found, f"docs/api.md lacks {room}.{name}"
