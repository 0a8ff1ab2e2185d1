"""Whether weights fit a description, found out before any memory is taken for them; and if not, what differs."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from scforge.data.vocab import GeneVocab
from scforge.errors import ModelFileError, first_line, listing
from scforge.estimators.defaults import recipe_for
from scforge.estimators.spec import ModelSpec, default_options
from scforge.estimators.tuning import Tuning
from scforge.finetuning.adapters import is_adapter
from scforge.finetuning.base import TASKS
from scforge.models.registry import MODELS
from scforge.tokenizers.base import TOKENIZERS
from scforge.training.objectives.base import OBJECTIVES

Shapes = Mapping[str, tuple[int, ...]]

UNUSABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What constructors raise for options that cannot be."""
_MOST_TRIES = 40
_MOST_ITEMS = 2**20


class TooManyError(Exception):
    """A module has far more parts than there are weights."""


def check_fit(config: Mapping[str, Any], vocab: GeneVocab, found: Shapes, *, source: str) -> None:
    """Raise unless weights of these shapes are those of the model that a description is of.

    Parameters
    ----------
    config
        The description; its parts ``architecture``, ``tokenizer``, ``objective`` and ``tuning`` are read.
    vocab
        The genes.
    found
        Shape of each tensor in the file.
    source
        The folder, for the message.

    Raises
    ------
    ModelFileError
        If the description cannot be one; else saying which weights differ, and which option does if one alone explains
        it.
    OptionError
        If the description names a part that is not registered.
    """
    parts = {part: dict(config[part]) for part in ("architecture", "tokenizer", "objective")}
    names = {part: parts[part].pop("name") for part in parts}
    for part, registry in {"architecture": MODELS, "tokenizer": TOKENIZERS, "objective": OBJECTIVES}.items():
        registry.get(names[part])
    # What the constructor takes anyway is no claim of this folder.
    usual = default_options(names["architecture"])
    claimed = {n: value for n, value in parts["architecture"].items() if n not in usual or value != usual[n]}
    for part, options in (parts | {"architecture": claimed}).items():
        _refuse_files(part, options)
    tuning = _tuning_of(config.get("tuning"), source)
    refuse_counts({**claimed, "n_latent": tuning and tuning.n_latent}, found)
    with _said(source, len(found)):
        spec, _ = ModelSpec.resolve(
            recipe_for(names["architecture"], parts["architecture"]),
            vocab,
            tokenizer=(names["tokenizer"], parts["tokenizer"]),
            objective=(names["objective"], parts["objective"]),
            options=parts["architecture"],
        )
        spec = replace(spec, tuning=tuning)
        spec.build_objective()
        expected = described_shapes(spec, len(found))
    if expected is not None and (problem := misfit(expected, found)):
        hint = _differing_option(spec, expected, found)
        raise ModelFileError(f"the weights in {source!r} do not fit the architecture in its config: {problem}{hint}.")


def check_adapter(base: ModelSpec, content: Any, found: Shapes, *, n_base: int, source: str) -> Tuning:
    """Return the fine-tuning that an adapter is of, or raise unless its weights fit on a base model.

    Parameters
    ----------
    base
        The base model.
    content
        What the description says of the fine-tuning.
    found
        Shape of each tensor in the file.
    n_base
        Number of tensors of the base model.
    source
        The folder, for the message.

    Raises
    ------
    ModelFileError
        Saying what does not fit.
    OptionError
        If the task is not registered.
    """
    tuning = _tuning_of(content, source)
    if tuning is None or tuning.lora is None:
        raise ModelFileError(f"the description in {source!r} is of no adapters; copy the folder again.")
    refuse_counts({"n_latent": tuning.n_latent, **tuning.lora}, found)
    with _said(source, len(found) + n_base):
        spec = replace(base, tuning=tuning)
        spec.build_objective()
        expected = described_shapes(spec, len(found) + n_base)
    if expected is not None:
        expected = {n: shape for n, shape in expected.items() if n.startswith("head.") or is_adapter(n)}
        if problem := misfit(expected, found):
            raise ModelFileError(f"the weights in {source!r} do not fit their description: {problem}.")
    return tuning


def refuse_counts(options: Mapping[str, Any], found: Shapes) -> None:
    """Raise if a number is beyond all that weights could be of: constructors make lists of so many items."""
    most = max(_MOST_ITEMS, sum(math.prod(shape) for shape in found.values()))
    for name, value in options.items():
        if isinstance(value, Mapping):
            refuse_counts(value, found)
        elif isinstance(value, int) and value > most:
            raise ModelFileError(
                f"the config claims {name}={value}, and the weights hold fewer numbers; do not trust this folder."
            )


def _tuning_of(content: Any, source: str) -> Tuning | None:
    tuning = Tuning.from_json(content, source=source)
    if tuning is not None:
        kinds = {"task": str, "lora": dict | None, "split": dict, "base": dict}
        if not all(isinstance(getattr(tuning, name), kind) for name, kind in kinds.items()):
            raise ModelFileError(f"the description of the fine-tuning in {source!r} is not whole; copy it again.")
        TASKS.get(tuning.task)
    return tuning


@contextmanager
def _said(source: str, n_tensors: int) -> Iterator[None]:
    """Say what is wrong with a description whose parts cannot be made."""
    try:
        yield
    except TooManyError:
        raise ModelFileError(
            f"the config in {source!r} describes a model of far more parts than the {n_tensors:,} tensors that are "
            "there; copy the folder again."
        ) from None
    except UNUSABLE as error:
        raise ModelFileError(
            f"the config in {source!r} describes no model that can be made: {first_line(error)}."
        ) from error


def misfit(expected: Shapes, found: Shapes) -> str:
    """Return in a few words how shapes differ from those that are expected; nothing where they are the same."""
    missing = sorted(set(expected) - set(found))
    surplus = sorted(set(found) - set(expected))
    # A module that was trained in shares had lists of one in place of numbers.
    shapes = [n for n in expected if n in found and found[n] not in (expected[n], expected[n] or (1,))]
    parts = [
        f"{what} {listing(names, most=3)}" for what, names in (("missing", missing), ("unknown", surplus)) if names
    ]
    parts += [f"{name!r} is {found[name]} instead of {expected[name]}" for name in shapes[:3]]
    return "; ".join([*parts, f"{len(shapes) - 3} more shapes"] if len(shapes) > 3 else parts)


def _refuse_files(part: str, options: Mapping[str, Any]) -> None:
    """Raise if an option is the name of a file: a model folder brings all that it needs."""
    for name, value in options.items():
        if part != "objective" and isinstance(value, str) and (re.search(r"[/\\]", value) or PurePath(value).suffix):
            raise ModelFileError(
                f"the config names a file, {part}.{name}={value[:80]!r}, which a model folder never does; do not trust "
                "this folder."
            )


def described_shapes(spec: ModelSpec, n_tensors: int) -> Shapes | None:
    """Return the shapes of the weights that a description asks for; takes no memory for them.

    None for an architecture that cannot be made without its weights, because its constructor computes with them.

    Raises
    ------
    TooManyError
        If it has far more parts than `n_tensors`; whatever the constructors raise for options that cannot be.
    """
    try:
        with torch.random.fork_rng(devices=[]), _bounded(n_tensors), torch.device("meta"):
            module = spec.build_module()
    except RuntimeError as error:
        if "meta" in str(error) and "tensor" in str(error).lower():
            return None
        raise
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


@contextmanager
def _bounded(n_tensors: int) -> Iterator[None]:
    """Stop the making of modules with far more parts than `n_tensors`, e.g. a billion layers."""
    left = Counter(parameters=8 * n_tensors + 256, modules=64 * n_tensors + 4096)

    def count(what: str) -> None:
        left[what] -= 1
        if left[what] < 0:
            raise TooManyError

    hooks = [
        register_module_parameter_registration_hook(lambda *_: count("parameters")),
        register_module_module_registration_hook(lambda *_: count("modules")),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _differing_option(spec: ModelSpec, expected: Shapes, found: Shapes) -> str:
    """Return which one option would have to differ for the weights to fit, as the end of a message."""
    n_tokens = len(spec.vocab)
    odd = [(expected[n], found[n]) for n in expected if n in found and expected[n] != found[n]]
    pairs = {(e, f) for es, fs in odd if len(es) == len(fs) for e, f in zip(es, fs, strict=True) if e != f}
    for wanted in {f for e, f in pairs if e == n_tokens}:
        swapped = {n: tuple(wanted if size == n_tokens else size for size in shape) for n, shape in expected.items()}
        if not misfit(swapped, found):
            return f"; vocab.json has {n_tokens:,} tokens, and the weights are for {wanted:,}"
    # Numbered parts: how many the description asks for, and how many there are.
    asked, there = _numbered(expected), _numbered(found)
    lengths = {(asked[prefix], there[prefix]) for prefix in asked if asked[prefix] != there[prefix]}
    pairs |= lengths
    defaults = {p.name: p.default for p in inspect.signature(MODELS.get(spec.architecture)).parameters.values()}
    tries = 0
    for option, value in (defaults | spec.model_options).items():
        if isinstance(value, bool):
            others: list[Any] = [not value]
        else:
            others = sorted({f for e, f in pairs if type(value) is int and e == value})
            if lengths and "layers" in option and type(value) is int:  # a layer may be several numbered parts
                others += [n for n in range(max(1, value - 8), value + 9) if n != value and n not in others]
        for other in others:
            tries += 1
            if tries > _MOST_TRIES:
                return ""
            changed = replace(spec, model_options=spec.model_options | {option: other})
            try:
                shapes = described_shapes(changed, len(found))
            except (TooManyError, *UNUSABLE):
                continue
            if shapes is not None and not misfit(shapes, found):
                return f"; the config says {option}={value!r}, and the weights are of {option}={other!r}"
    return ""


def _numbered(shapes: Shapes) -> Counter[str]:
    """Return the number of parts behind each prefix of names such as ``encoder.layers.3.norm.weight``."""
    places = (re.match(r"(.*?\.)(\d{1,6})\.", name) for name in shapes)
    most: Counter[str] = Counter()
    for place in places:
        if place is not None:
            most[place[1]] = max(most[place[1]], int(place[2]) + 1)
    return most


def shapes_of(module: nn.Module) -> Shapes:
    """Return the shape of each weight of a module."""
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}
