import functools
import sys

import pytest

from scforge import _registry
from scforge._registry import Registry
from scforge.config import ModelConfig
from scforge.data import GeneVocab
from scforge.errors import OptionError
from scforge.eval.base import BENCHMARKS, Benchmark
from scforge.finetuning.base import TASKS, Task
from scforge.models import get_model
from scforge.testing import raises
from scforge.tokenizers import get_tokenizer
from scforge.training import Objective, get_objective
from scforge.training.objectives.base import OBJECTIVES


@pytest.fixture
def registry() -> Registry:
    return Registry("thing", group="scforge.test_things")


def test_register_and_get(registry):
    one, other = type("B", (), {}), object()
    registry.register("b")(one)
    registry.register("a")(other)
    assert registry.get("b") is one
    assert registry.get("a") is other
    assert registry.names() == list(registry) == ["a", "b"]
    assert registry.name_of(one) == "b"
    assert registry.name_of(registry) is None


def test_unknown_name_suggests_and_lists(registry):
    registry.register("transformer")(object())
    with raises(OptionError, "thing"):
        registry.get("transfomer")
    with raises(OptionError, "thing"):
        Registry("thing", group="x").get("a")


def test_a_name_belongs_to_one_object_but_a_notebook_cell_can_be_run_again(registry):
    def cell():
        return registry.register("mine")(type("Mine", (), {"__module__": "notebook"}))

    first, second = cell(), cell()
    assert first is not second
    assert registry.get("mine") is second
    with pytest.raises(ValueError, match="thing 'mine' is already registered; choose another name"):
        registry.register("mine")(type("Other", (), {}))
    assert registry.get("mine") is second


def test_built_in_entries_are_imported_when_asked_for(monkeypatch):
    registry = Registry("thing", group="scforge.test_things", builtin={"late": "late_module"})
    assert registry.names() == ["late"]
    assert "late" in registry
    assert "late_module" not in sys.modules
    with pytest.raises(OptionError, match="already registered"):
        registry.register("late")(object())
    late = type("Late", (), {"__module__": "late_module"})
    monkeypatch.setattr(_registry.importlib, "import_module", lambda name: registry.register("late")(late))
    assert registry.get("late") is late


class Part:
    def run(self):
        """Do it."""


Part.__module__ = "package.parts"


@pytest.fixture
def strict() -> Registry:
    return Registry("part", group="scforge.test_parts", base="package.Part", members=("run", "make"))


def test_a_class_of_another_family_is_told(strict):
    for number, entry in enumerate((type("Part", (), {}), object(), "text")):
        strict.register(f"other{number}")(entry)
        with pytest.raises(
            OptionError, match=f"part='other{number}' is .*, which is not a subclass of package.Part; der"
        ):
            strict.get(f"other{number}")


def test_a_method_that_is_missing_is_told(strict):
    strict.register("bare")(type("Bare", (Part,), {}))
    with pytest.raises(OptionError, match="part='bare' is Bare, which lacks 'make'; add it."):
        strict.get("bare")
    # Nothing is known of what another callable makes.
    partial = strict.register("partial")(functools.partial(Part))
    assert strict.get("partial") is partial
    whole = strict.register("whole")(type("Whole", (Part,), {"make": lambda self: None}))
    assert strict.get("whole") is whole


@pytest.mark.parametrize(
    ("registry", "base", "attribute"),
    [(OBJECTIVES, Objective, "defaults"), (TASKS, Task, "defaults"), (BENCHMARKS, Benchmark, "metrics")],
)
def test_an_attribute_that_is_missing_is_told(monkeypatch, registry, base, attribute):
    methods = {name: lambda self: None for name in base.__abstractmethods__}
    monkeypatch.setitem(registry._entries, "bare", type("Bare", (base,), methods))
    with pytest.raises(OptionError, match=f"'bare' is Bare, which lacks '{attribute}'; add it."):
        registry.get("bare")
    monkeypatch.setitem(registry._entries, "whole", type("Whole", (base,), methods | {attribute: ("one",)}))
    assert registry.get("whole").__name__ == "Whole"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: get_tokenizer("rank_value", GeneVocab.from_genes(["A"]), append_cls="false"), "append_cls"),
        (lambda: get_objective("masked_gene_prediction", token_prior="false"), "token_prior"),
        (lambda: get_model("scdiva", ModelConfig(vocab_size=9, denoising="false")), "denoising"),
    ],
)
def test_switches_given_as_text_are_refused(make, name):
    with pytest.raises(OptionError, match=f"{name}='false' must be True or False"):
        make()
