"""The one registry: built-in, decorated and plugged-in entries."""

from __future__ import annotations

import functools
import sys
import types
from importlib.metadata import EntryPoint

import pytest

from scforge import _registry
from scforge._registry import Registry
from scforge.errors import OptionError, ScforgeError


@pytest.fixture
def registry() -> Registry:
    return Registry("thing", group="scforge.test_things")


@pytest.fixture
def plugin(monkeypatch):
    """Return a function that offers an object as an installed package would, and says how often it was imported."""
    module = types.ModuleType("a_plugin")
    monkeypatch.setitem(sys.modules, "a_plugin", module)

    def offer(name, value, *, attribute="entry", group="scforge.test_things"):
        if value is not None:
            setattr(module, attribute, value)
        point = EntryPoint(name, f"a_plugin:{attribute}", group)
        monkeypatch.setattr(_registry, "entry_points", lambda group: [point] if group == point.group else [])

    return offer


def test_register_and_get(registry):
    @registry.register("b")
    class B:
        pass

    @registry.register("a")
    def a():
        pass

    assert registry.get("b") is B
    assert registry.get("a") is a
    assert registry.names() == list(registry) == ["a", "b"]
    assert "a" in registry
    assert "c" not in registry
    assert registry.name_of(B) == "b"
    assert registry.name_of(registry) is None


def test_unknown_name_suggests_and_lists(registry):
    registry.register("transformer")(object())
    with pytest.raises(
        OptionError, match="thing='transfomer' is not known; did you mean 'transformer'. .known: 'trans"
    ):
        registry.get("transfomer")
    with pytest.raises(OptionError, match="'zzz' is not known .known: 'transformer'"):
        registry.get("zzz")
    with pytest.raises(OptionError, match="known: nothing"):
        Registry("thing", group="x").get("a")


def test_a_name_belongs_to_one_object(registry):
    class A:
        pass

    class B:
        pass

    registry.register("a")(A)
    with pytest.raises(ValueError, match="thing 'a' is already registered; choose another name"):
        registry.register("a")(B)
    assert registry.get("a") is A


def test_a_notebook_cell_can_be_run_again(registry):
    def cell():
        @registry.register("mine")
        class Mine:
            pass

        return Mine

    first, second = cell(), cell()
    assert first is not second
    assert registry.get("mine") is second


def test_built_in_entries_are_imported_when_asked_for(monkeypatch):
    registry = Registry("thing", group="scforge.test_things", builtin={"late": "late_module"})
    assert registry.names() == ["late"]
    assert "late" in registry
    assert "late_module" not in sys.modules

    def load(name):
        Late.__module__ = name
        registry.register("late")(Late)

    class Late:
        pass

    monkeypatch.setattr(_registry.importlib, "import_module", load)
    assert registry.get("late") is Late


def test_a_built_in_name_cannot_be_taken_before_it_is_imported():
    registry = Registry("thing", group="scforge.test_things", builtin={"late": "late_module"})
    with pytest.raises(OptionError, match="already registered"):
        registry.register("late")(object())


def test_plugin(registry, plugin):
    plugin("theirs", value := object())
    assert registry.names() == ["theirs"]
    assert registry.get("theirs") is value
    plugin("other", object(), group="another.group")
    assert registry.names() == ["theirs"], "what was loaded stays"


def test_plugin_that_registers_itself(registry, plugin):
    class Theirs:
        pass

    plugin("theirs", Theirs)
    registry.register("theirs")(Theirs)
    assert registry.get("theirs") is Theirs


class Part:
    """What parts of the registry below derive from."""

    def run(self):
        """Do it."""


Part.__module__ = "package.parts"


@pytest.fixture
def strict() -> Registry:
    return Registry("part", group="scforge.test_parts", base="package.Part", methods=("run", "make"))


def test_a_class_of_another_family_is_told(strict):
    for number, entry in enumerate((type("Part", (), {}), object(), "text")):
        strict.register(f"other{number}")(entry)
        with pytest.raises(OptionError, match=f"part='other{number}' is .*, which is no subclass of package.Part; der"):
            strict.get(f"other{number}")


def test_a_method_that_is_missing_is_told(strict):
    strict.register("bare")(type("Bare", (Part,), {}))
    with pytest.raises(OptionError, match="part='bare' is Bare, which does not define 'make'; add it."):
        strict.get("bare")
    # Nothing is known of what another callable makes.
    partial = strict.register("partial")(functools.partial(Part))
    assert strict.get("partial") is partial
    whole = strict.register("whole")(type("Whole", (Part,), {"make": lambda self: None}))
    assert strict.get("whole") is whole


def test_broken_plugin(registry, plugin):
    plugin("broken", None, attribute="missing")
    with pytest.raises(ScforgeError, match="thing 'broken' comes from 'a_plugin:missing' of the package 'a_plugin'"):
        registry.get("broken")
    assert registry.names() == ["broken"]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("scforge.models.registry.MODELS", ["gene_pooling", "transformer_encoder"]),
        ("scforge.tokenizers.registry.TOKENIZERS", ["continuous_projection", "rank_value"]),
        ("scforge.training.objectives.registry.OBJECTIVES", ["joint_embedding", "masked_gene_prediction"]),
    ],
)
def test_what_ships(path, names):
    module, attribute = path.rsplit(".", 1)
    registry = getattr(__import__(module, fromlist=[attribute]), attribute)
    assert set(names) <= set(registry.names())
    for name in registry.names():
        assert registry.name_of(registry.get(name)) == name
