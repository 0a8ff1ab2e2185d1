"""Options of what is registered: names, types, defaults and descriptions of constructors."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scforge._registry import Registry
from scforge.config.schema import MaskingConfig, ModelConfig
from scforge.eval.base import BENCHMARKS
from scforge.finetuning.base import TASKS
from scforge.models.registry import MODELS
from scforge.tokenizers.base import TOKENIZERS
from scforge.training.objectives.base import OBJECTIVES
from scforge_docs.docstrings import code, inline, parameters_of, summary

__all__ = ["PARTS", "Part", "default_words", "describe", "option_rows", "registered"]

_ELSEWHERE = re.compile(r"^(?:As for|See) :class:`~?([\w.]+)`[.;]?\s*")
_TYPES = {
    "int": "whole number",
    "float": "number",
    "str": "text",
    "bool": "true or false",
    "Any": "any value",
    "pd.DataFrame": "DataFrame, in Python",
    "GeneTable": "table of gene vectors",
}


@dataclass(frozen=True)
class Part:
    """A registry, and where configuration files name its entries."""

    registry: Registry[Any]
    title: str
    section: str
    words: str
    hidden: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The word for one entry."""
        return self.registry.kind

    @property
    def link(self) -> str:
        """A link to its chapter."""
        return f"[{self.title}](#{self.title.lower().replace(' ', '-')})"


PARTS = (
    Part(
        TOKENIZERS,
        "Tokenizers",
        "tokenizer",
        "`tokenizer.strategy` names one of these, with the options in its table ({doc}`tokenizers`).",
        hidden=("vocab",),
    ),
    Part(
        MODELS,
        "Architectures",
        "model",
        "`model.architecture` names one of these, with the options in its table ({doc}`models`).",
        hidden=("vocab_size",),
    ),
    Part(
        OBJECTIVES,
        "Objectives",
        "objective",
        "`objective.name` names one of these, with the options in its table ({doc}`objectives`).",
    ),
    Part(
        TASKS,
        "Fine-tuning tasks",
        "finetune",
        "`finetune.task` names one of these, with the options in its table ({doc}`fine_tuning`).",
    ),
    Part(
        BENCHMARKS,
        "Benchmarks",
        "eval",
        "`eval.benchmarks` lists them, each as its name or with options: `[scib: {batch_key: donor}]` "
        "({doc}`evaluation`).",
    ),
)


def registered(registry: Registry[Any]) -> list[tuple[str, type]]:
    """Return names and classes of what ships with scforge."""
    found = [(name, registry.get(name)) for name in registry.names()]
    return [(name, cls) for name, cls in found if cls.__module__.split(".")[0] == "scforge"]


def describe(cls: type) -> str:
    """Return the first paragraph of what a class says of itself, and a link to the rest."""
    words = inline(summary(cls.__doc__).partition("\n\n")[0])
    room = ".".join(cls.__module__.split(".")[:2])
    public = cls.__name__ in getattr(importlib.import_module(room), "__all__", ())
    return f"{words} More: {{class}}`{room}.{cls.__name__}`." if public else words


def default_words(value: Any) -> str:
    """Return a default as a file would have it, in code."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, float):
        return code(f"{value:g}" if value else "0")
    if value in ({}, []):
        return "none"
    if isinstance(value, tuple | list):
        return code("[" + ", ".join(map(str, value)) + "]")
    return code(str(value)) if str(value) else "empty text"


def _type(annotation: str) -> str:
    """Say in words what an annotation accepts; None, the lack of a value, is left out."""
    words = []
    for one in re.split(r" \| (?![^\[]*\])", annotation):
        holder = one.partition("[")[0]
        if one == "None":
            continue
        if holder in ("Sequence", "list", "tuple", "Iterable"):
            words.append(f"list of: {_type(one[len(holder) + 1 : -1])}")
        elif holder in ("Mapping", "dict"):
            words.append("mapping")
        else:
            words.append(_TYPES.get(one, code(one)))
    return ", or ".join(words) or "any value"


def _owner(name: str, module: str) -> type:
    """Return the class that a docstring names, in full or as its module does."""
    package, _, last = name.rpartition(".")
    return getattr(importlib.import_module(package) if package else sys.modules[module], last)


def _described(cls: type) -> dict[str, str]:
    """Return descriptions of the parameters of a class; those that point to another class are looked up there."""
    found = parameters_of(cls)
    for name, text in found.items():
        while match := _ELSEWHERE.match(text):
            other = parameters_of(_owner(match[1], cls.__module__)).get(name)
            if other is None:
                break
            rest = text[match.end() :]
            text = f"{other} {rest[:1].upper()}{rest[1:]}".strip()
        found[name] = text
    return found


def option_rows(cls: type, part: Part) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and description of each option of a class.

    Raises
    ------
    ValueError
        If the docstring says nothing of an option.
    """
    described = _described(cls)
    renamed = {own: shared for shared, own in getattr(cls, "config_names", {}).items()}
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in part.hidden:
            continue
        if name not in described:
            raise ValueError(f"the docstring of {cls.__name__} says nothing of {name!r}.")
        words = inline(described[name])
        if parameter.kind is parameter.VAR_KEYWORD:
            yield "others", "as there", "as there", words
            continue
        if part.section == "objective" and name in MaskingConfig.model_fields:
            words += f" In a file: `tokenizer.masking.{name}`."
        elif name in renamed:
            words += f" Also accepted as {code(renamed[name])}."
        elif part.section == "tokenizer" and name == "max_len":
            words += " In a file: `data.max_genes`."
        yield code(name), _type(str(parameter.annotation)), _default(name, parameter, part), words


def _default(name: str, parameter: inspect.Parameter, part: Part) -> str:
    if parameter.default is not parameter.empty:
        return default_words(parameter.default)
    field = ModelConfig.model_fields.get(name) if part.section == "model" else None
    return "required" if field is None else default_words(field.default)
