"""The reference of configuration files: the sections of the schema, and the options of all that they may name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from scforge.config import Config
from scforge.config.aliases import ALIASES, section_of
from scforge.config.editing import config_schema
from scforge.config.schema import TASK_ALIASES
from scforge.finetuning.adapters import lora_options
from scforge.finetuning.base import TASKS
from scforge.training.objectives.base import OBJECTIVES
from scforge.training.optimizers import SCHEDULES, make_schedule
from scforge_docs.docstrings import code, inline, parameters, parameters_of, summary, table
from scforge_docs.options import PARTS, default_words, describe, option_rows, registered

__all__ = ["aliases_of", "keys", "render", "sections"]

_PLAIN = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "mapping",
}
_SPOKEN = {
    "data.filters": "mapping, or text",
    "data.memory": "text, or whole number of bytes",
    "tokenizer.masking.mask_ratio": "number; list of numbers; or mapping",
}
"""Types of options whose check is a function, which has no JSON schema."""
_SCHEDULES = {
    "constant": "the learning rate all along, without a warm-up unless `warmup_steps` asks for one",
    "cosine": "half a cosine down to 0, without a warm-up unless `warmup_steps` asks for one",
    "cosine_warmup": "a linear warm-up, then half a cosine down to 0",
    "linear": "a straight line down to 0, without a warm-up unless `warmup_steps` asks for one",
    "linear_warmup": "a linear warm-up, then a straight line down to 0",
    "one_cycle": "one cycle (`torch.optim.lr_scheduler.OneCycleLR`): up to the peak and down along cosines",
}
_OPTIMIZERS = {
    "adam": "Adam, whose weight decay is a penalty in the loss",
    "adamw": "AdamW; norms, embeddings and biases do not decay",
    "muon": "Muon for the matrices inside the layers, AdamW for embeddings, heads and the rest",
    "sgd": "stochastic gradient descent with a momentum of 0.9",
}
"""What schedules and optimizers are; the build fails if there is one without words."""


def sections(owner: type[BaseModel] = Config, path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the dotted name and the class of every section, outer ones first."""
    for name, field in owner.model_fields.items():
        if (inner := section_of(field)) is not None:
            yield f"{path}{name}", inner
            yield from sections(inner, f"{path}{name}.")


def keys() -> list[str]:
    """Return the dotted names of all options of the schema."""
    top = [name for name, field in Config.model_fields.items() if section_of(field) is None]
    return top + [
        f"{path}.{name}"
        for path, owner in sections()
        for name, field in owner.model_fields.items()
        if section_of(field) is None
    ]


def aliases_of(dotted: str) -> list[str]:
    """Return the other names under which an option is accepted."""
    return [alias for alias, canonical in ALIASES.items() if canonical == dotted]


def _type(schema: dict[str, Any], limits: str = "") -> str:
    """Say in words what a JSON schema accepts; None, the lack of a value, is left out."""
    if "enum" in schema:
        return ", ".join(code(str(value)) for value in schema["enum"])
    if "const" in schema:
        return code(str(schema["const"]))
    if "anyOf" in schema:
        choices = [one for one in schema["anyOf"] if one.get("type") != "null"]
        single = [_type(one, limits) for one in choices if one.get("type") != "array"]
        lists = [_type(one["items"]) for one in choices if one.get("type") == "array"]
        if lists and single:
            return f"{', or '.join(single)}; or a list of these"
        return ", or ".join(dict.fromkeys(single or [f"list of: {one}" for one in lists]))
    if schema.get("type") == "array":
        return f"list of: {_type(schema.get('items', {}))}"
    words = _PLAIN.get(schema.get("type", ""), "any value")
    return f"{words} {limits}".strip() if "number" in words else words


def _limits(field: FieldInfo) -> str:
    """Return the limits of a number, e.g. ``"≥ 0, < 1"``; pydantic leaves some out of its JSON schema."""
    marks = list(field.metadata)
    for one in (field.annotation, *get_args(field.annotation)):
        for mark in getattr(one, "__metadata__", ()):
            marks += getattr(mark, "metadata", [mark])
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    found = [f"{sign} {_number(getattr(mark, name))}" for mark in marks for name, sign in signs if hasattr(mark, name)]
    return ", ".join(dict.fromkeys(found))


def _number(value: float) -> str:
    """Return a limit as one writes it: ``"0.5"``, ``"2^32"``."""
    exponent = int(value).bit_length() - 1
    return f"2^{exponent}" if exponent >= 16 and value == 2**exponent else f"{value:g}"


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else default_words(field.get_default(call_default_factory=True))


def _rows(path: str, owner: type[BaseModel], schema: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    described = parameters_of(owner)
    for name, field in owner.model_fields.items():
        if section_of(field) is not None:
            continue
        dotted = f"{path}.{name}" if path else name
        if name not in described:
            raise ValueError(f"the docstring of {owner.__name__} says nothing of {name!r}.")
        words = inline(described[name])
        others = [alias for alias in aliases_of(dotted) if alias not in described[name]]
        if dotted == "finetune.task":
            words += f" {code_pairs(TASK_ALIASES)}."
        if others:
            words += f" Also accepted as {' and '.join(map(code, others))}."
        kind = _SPOKEN.get(dotted) or _type(schema["properties"][name], _limits(field))
        yield code(name), kind, _default(field), words


def code_pairs(names: dict[str, str]) -> str:
    """Return other names as a sentence."""
    return ", ".join(f"{code(other)} means {code(name)}" for other, name in sorted(names.items()))


def _schema_of(owner: type[BaseModel], schema: dict[str, Any]) -> dict[str, Any]:
    return schema if owner is Config else schema["$defs"][owner.__name__]


def _sections_text() -> Iterator[str]:
    schema = config_schema()
    header = ("key", "type", "default", "what it says")
    yield "## Sections\n\nBeside the sections stands one key:"
    yield table(header, _rows("", Config, schema))
    for path, owner in sections():
        yield f"### `{path}`\n\n{inline(summary(owner.__doc__))}"
        if rows := list(_rows(path, owner, _schema_of(owner, schema))):
            yield table(header, rows)
        part = next((part for part in PARTS if part.section == path), None)
        if path == "eval":
            yield f"Options of benchmarks: see {part.link}."
        elif part is not None:
            yield f"Any other key is an option of the {part.kind} that is named: see {part.link}."


def _parts_text() -> Iterator[str]:
    for part in PARTS:
        yield f"## {part.title}\n\n{part.words}"
        for name, cls in registered(part.registry):
            yield f"### `{name}` ({part.kind})\n\n{describe(cls)}"
            rows = list(option_rows(cls, part))
            yield table(("option", "type", "default", "what it says"), rows) if rows else "It has no options."


def _training_text() -> Iterator[str]:
    yield "## Optimizers and schedules"
    known = set(config_schema()["$defs"]["OptimizerConfig"]["properties"]["name"]["enum"])
    if known != set(_OPTIMIZERS) or set(SCHEDULES) != set(_SCHEDULES):
        raise ValueError("an optimizer or a schedule has no words in the reference of configuration files.")
    yield table(("`training.optimizer.name`", "is"), [(code(name), words) for name, words in _OPTIMIZERS.items()])
    yield table(("`training.scheduler.name`", "is"), [(code(name), words) for name, words in _SCHEDULES.items()])
    yield f"`training.scheduler.warmup_steps`: {inline(parameters(make_schedule.__doc__)['warmup_steps'])}"
    yield "### Defaults by objective and task\n\nWhat stands in `training` counts more than these."
    rows = []
    for kind, registry in (("objective", OBJECTIVES), ("task", TASKS)):
        for name, cls in registered(registry):
            if not hasattr(cls.defaults, "lr"):
                continue
            d = cls.defaults
            epochs = f"{d.max_epochs}" if d.most_epochs is None else f"{d.max_epochs}, at most {d.most_epochs}"
            numbers = (f"{d.batch_size}", f"{d.lr:g}", f"{d.weight_decay:g}", code(d.schedule), epochs)
            rows.append((f"{code(name)} ({kind})", *numbers))
    yield table(("what is trained", "batch size", "`lr`", "`weight_decay`", "schedule", "epochs of 2,500 cells"), rows)
    yield f"## Adapters\n\n`finetune.lora` is true, or some of: {inline(parameters(lora_options.__doc__)['lora'])}"


def _alias_text() -> str:
    rows = [(code(alias), code(canonical)) for alias, canonical in sorted(ALIASES.items())]
    return (
        "## Other names\n\nThese are accepted in addition to the canonical names. `finetune.data` may also be a "
        "section `data`, and 0 for `training.num_gpus` means `training.accelerator: cpu`. Different values under both "
        "names raise an error.\n\n" + table(("also accepted", "the same as"), rows)
    )


def render() -> str:
    """Return the page.

    Raises
    ------
    ValueError
        If an option has no description.
    """
    parts = [*_sections_text(), _alias_text(), *_parts_text(), *_training_text()]
    return "\n\n".join(parts) + "\n"
