import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import scforge
from scforge._registry import Registry

API = "".join((Path(__file__).parents[1] / "docs" / f"{name}.md").read_text() for name in ("api", "api_developers"))
ROOMS = [name for name in scforge.__all__ if inspect.ismodule(getattr(scforge, name))]
NAMES = [info.name for info in pkgutil.walk_packages(scforge.__path__, "scforge.")]
MODULES = sorted(name for name in NAMES if "__main__" not in name)
LISTED = re.findall(r"^   ([a-z]\w*\.[\w.]+)$", API, flags=re.MULTILINE)
# An example would only repeat the line above it.
WITHOUT_EXAMPLE = {"foreign.AsIs"}
PUBLIC = [(room, name) for room in ROOMS for name in importlib.import_module(f"scforge.{room}").__all__]


REGISTRIES = [
    ("scforge.eval.base", "BENCHMARKS"),
    ("scforge.finetuning.base", "TASKS"),
    ("scforge.foreign.base", "FAMILIES"),
    ("scforge.models.registry", "MODELS"),
    ("scforge.tokenizers.base", "TOKENIZERS"),
    ("scforge.training.objectives.base", "OBJECTIVES"),
]


@pytest.fixture
def registries():
    """Take what examples register out again; built-in entries stay, since their modules register themselves once."""
    found = [getattr(importlib.import_module(module), name) for module, name in REGISTRIES]
    before = [set(registry._entries) for registry in found]
    yield found
    for registry, names in zip(found, before, strict=True):
        for name in set(registry._entries) - names - set(registry._builtin):
            del registry._entries[name]


def listed(path):
    """Return what the API pages list as `path`, e.g. "models.Encoder"; modules on the way are imported."""
    value = scforge
    for i, part in enumerate(path.split("."), start=1):
        name = ".".join(["scforge", *path.split(".")[:i]])
        value = importlib.import_module(name) if name in NAMES and not hasattr(value, part) else getattr(value, part)
    return value


def test_every_registry_is_restored(registries):
    found = {
        id(value)
        for name in MODULES
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, Registry)
    }
    assert found == {id(registry) for registry in registries}


# One module in ten is a sample for quick runs.
@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if i % 10 else []) for i, name in enumerate(["scforge", *MODULES])],
)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")  # drawings of examples; many open ones are a warning
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples in {name} failed"


FRONT_CLASSES = [scforge.models.Encoder, scforge.models.ScDiVa]
METHODS = {
    f"{owner.__name__}.{name}": getattr(owner, name)
    for cls in FRONT_CLASSES
    for owner in cls.__mro__
    if owner.__module__.startswith("scforge.")
    for name, value in vars(owner).items()
    if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, classmethod | staticmethod))
}
"""Public methods of the model classes, those that scvi-tools brings left out."""


@pytest.mark.parametrize("path", [*LISTED, *METHODS])
def test_examples_parameters_and_returns_are_documented(path):
    value = METHODS.get(path) or listed(path)
    documented = inspect.getdoc(value) or ""
    if path not in WITHOUT_EXAMPLE and (inspect.isclass(value) or inspect.isroutine(value)):
        assert ">>>" in documented, f"the docstring of {path} has no example"
    if not inspect.isroutine(value):
        return
    signature = inspect.signature(value)
    # Several stand in one line: "lr, weight_decay"; those of ** with the stars.
    parameters = [name for name in signature.parameters if name != "self"]
    missing = [p for p in parameters if not re.search(rf"^(\**\w+, )*\**{p}(, |$)", documented, re.MULTILINE)]
    assert not missing, f"the docstring of {path} does not say what {missing} are"
    assert not parameters or "Parameters\n----------\n" in documented, f"the docstring of {path} lacks Parameters"
    if signature.return_annotation not in (None, "None"):
        found = re.search(r"^(Returns|Yields)\n-+$", documented, flags=re.MULTILINE)
        assert found, f"the docstring of {path} has no section Returns"


@pytest.mark.parametrize(("room", "name"), PUBLIC)
def test_public_names_stand_in_the_api_page(room, name):
    value = getattr(importlib.import_module(f"scforge.{room}"), name)
    parts = [path.split(".") for path in LISTED]
    if inspect.ismodule(value):
        assert any(path[:2] == [room, name] for path in parts), f"the API pages list nothing of {room}.{name}"
    else:
        found = any(functools.reduce(getattr, path, scforge) is value for path in parts if path[-1] == name)
        assert found, f"the API pages lack {room}.{name}"
        assert value.__doc__, f"scforge.{room}.{name} has no docstring"
