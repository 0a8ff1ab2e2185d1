"""One sentence on one line for each mistake in a configuration."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from scforge.config.synonyms import SYNONYMS
from scforge.errors import SECRET, ConfigError, listing, redacted

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    from scforge.config._places import Places

__all__ = ["config_error", "dotted_name", "known_names", "section_of", "shown", "unknown_option", "without_secrets"]

_REPR = reprlib.Repr(maxlevel=2, maxdict=3, maxlist=3, maxstring=60, maxother=60, maxlong=40)
_STORAGE_OPTIONS = "storage_options"
_PLAIN_KEY = re.compile(r"[\w-]+")

_PLAIN = {
    "bool_parsing": "is not true or false",
    "bool_type": "is not true or false",
    "finite_number": "is not a finite number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "int_from_float": "is not a whole number",
    "int_parsing": "is not an integer",
    "int_parsing_size": "is not an integer of usual size",
    "int_type": "is not an integer",
    "list_type": "is not a list",
    "model_type": "is not a section with options",
    "string_too_short": "is empty",
    "string_type": "is not text; put it in quotes",
    "too_short": "is empty",
}
_LIMITS = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}


def shown(value: object) -> str:
    """Return `value` for a message: on one line, and short however large it is."""
    return " ".join(_REPR.repr(value).split())


def config_error(error: ValidationError, schema: type[BaseModel], places: Places | None = None) -> ConfigError:
    """Return the first mistake that pydantic found in `schema` as a sentence, with the number of the others.

    Parameters
    ----------
    error
        What pydantic says.
    schema
        The sections that were checked.
    places
        Where the options stand.
    """
    details = error.errors(include_url=False)
    place = "" if places is None else places.of(details[0]["loc"])
    sentence = place + _sentence(details[0], schema)
    if len(details) == 1:
        return ConfigError(f"{sentence}.")
    others = f"{len(details) - 1} more option{'s' if len(details) > 2 else ''}"
    return ConfigError(f"{sentence} (and {others} cannot be used).")


def without_secrets(content: Any, *, options: bool = False) -> Any:
    """Return the content of a configuration without credentials: in URLs, and in text of ``storage_options``."""
    if isinstance(content, Mapping):
        return {
            name: without_secrets(value, options=options or name == _STORAGE_OPTIONS) for name, value in content.items()
        }
    if isinstance(content, list | tuple):
        return [without_secrets(value, options=options) for value in content]
    if isinstance(content, str):
        return SECRET if options and "://" not in content else redacted(content)
    return content


def dotted_name(location: Iterable[int | str]) -> str:
    """Return ``training.optimizer.lr`` or ``data.paths[0]`` for a location in a configuration."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += ("." if name else "") + (part if _PLAIN_KEY.fullmatch(part) else shown(part))
    return name


def known_names(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted names of all options of `schema`, those of its sections included."""
    names: list[str] = []
    for name, field in schema.model_fields.items():
        names.append(prefix + name)
        if (section := section_of(field)) is not None:
            names += known_names(section, f"{prefix}{name}.")
    return names


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that an option is, or may be; None for other options."""
    choices = get_args(field.annotation) or (field.annotation,)
    return next((one for one in choices if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _sentence(detail: ErrorDetails, schema: type[BaseModel]) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    name = dotted_name(detail["loc"])
    value = without_secrets(value, options="storage_option" in name)
    option = f"{name}={shown(value)}"
    if kind == "extra_forbidden":
        names = known_names(schema)
        section = name.rpartition(".")[0]
        siblings = [known.rpartition(".")[2] for known in names if known.rpartition(".")[0] == section]
        return unknown_option(name, value, schema, siblings, "a known option")
    if kind == "missing":
        if name.startswith("finetune."):
            return f"{name} is missing; name both, e.g. finetune: {{base_model: checkpoints/final, task: annotation}}"
        return f"{name} is missing; every configuration names its data, e.g. data: {{paths: [cells.h5ad]}}"
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", context["expected"])
        return f"{option} is not known{_hint(_nearest(str(value), known))} (known: {listing(known)})"
    if kind in _LIMITS:
        limit, words = _LIMITS[kind]
        return f"{option} is out of range; it {words} {context[limit]}"
    if kind == "invalid_key":
        section = dotted_name(detail["loc"][:-1]) or "a configuration"
        return f"{section} has the key {shown(value)}, which is not the name of an option"
    if kind == "value_error":
        return f"{option} {context['error']}"
    words = _PLAIN.get(kind) or "cannot be used: " + " ".join(detail["msg"].split()).rstrip(".")
    return f"{option} {words}"


def unknown_option(name: str, value: object, schema: type[BaseModel], siblings: list[str], has: str) -> str:
    """Return the sentence about an option that there is not, with the one that may be meant.

    Parameters
    ----------
    name, value
        Dotted name of the option, and its value.
    schema
        The sections that may have it.
    siblings
        Names of the options that may stand in its place.
    has
        Whose options those are.
    """
    section, _, key = name.rpartition(".")
    near = _nearest(key, siblings)
    # A name that the schema knows, as an alias, may still be none of this architecture.
    known = [option for option in known_names(schema) if option.rpartition(".")[2] == key and option != name]
    meant = SYNONYMS.get(key.lower())
    meant = None if meant == name else meant
    if meant is not None and meant.split(".")[0] == section.split(".")[0]:
        known = []
    # The same name elsewhere, what other tools call it, and only then what is spelled alike.
    suggestion = next(iter(known), None) or meant or (near and f"{section}.{near}".lstrip("."))
    listed = listing(siblings, most=8 if suggestion else 24)
    return f"{name}={shown(value)} is not {has}{_hint(suggestion)} ({section or 'a configuration'} has: {listed})"


def _nearest(word: str, known: list[str]) -> str | None:
    # "bf16" is meant as the usual "bf16-mixed", though "bf16-true" shares a larger part of its letters.
    longer = [name for name in known if word and name.startswith(word)]
    return next(iter(longer or difflib.get_close_matches(word.lower(), known, n=1)), None)


def _hint(suggestion: str | None) -> str:
    return f"; did you mean {suggestion!r}?" if suggestion else ""
