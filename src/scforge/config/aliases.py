"""Option aliases, and messages that refer to lines of a configuration file."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from scforge.errors import SECRET, ConfigError, OptionError, listing, redacted

if TYPE_CHECKING:
    import yaml
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

ALIASES = {
    "data.num_workers": "data.num_threads",
    "data.obs": "data.obs_columns",
    "finetune.data": "data.paths",
    "finetune.gradual_unfreezing": "training.gradual_unfreezing",
    "finetune.layer_lr_decay": "training.layer_lr_decay",
    "finetune.output": "output.checkpoint_dir",
    "finetune.seed": "seed",
    "model.mask_ratio": "tokenizer.masking.mask_ratio",
    "model.pretraining_task": "objective.name",
    "tokenizer.gene_vocab": "data.gene_vocab",
    "tokenizer.max_genes": "data.max_genes",
    "tokenizer.max_len": "data.max_genes",
    "training.lr": "training.optimizer.lr",
    "training.max_tokens_per_batch": "data.max_tokens_per_batch",
    "training.num_gpus": "training.devices",
}
"""A mapping from accepted option aliases to names in the schema."""

_ON_GPUS = ("auto", "gpu", "cuda")

_SPELLINGS = [
    *[(alias.split("."), canonical.split(".")) for alias, canonical in ALIASES.items()],
    (["finetune", "data"], ["data"]),
    (["training", "num_gpus"], ["training", "accelerator"]),
]
"""Pairs of an alternative spelling of an option and the option."""

_REPR = reprlib.Repr(maxlevel=2, maxdict=3, maxlist=3, maxstring=60, maxother=60, maxlong=40)

_STORAGE_OPTIONS = "storage_options"

_PLAIN_KEY = re.compile(r"[\w-]+")

_WORDS = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    **dict.fromkeys(("float_parsing", "float_type"), "is not a number"),
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "is not a whole number"),
    "finite_number": "must be a finite number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "is not a list",
    "model_type": "must be a section with options",
    "string_type": "is not text; put the value in quotes",
    "too_short": "is empty",
}
"""A mapping from pydantic error types to messages without Python terms, with pydantic's limits."""

_PYTHON_WORDS = {
    **_WORDS,
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be True or False"),
    "string_type": "is not text",
}
"""The same for arguments of functions."""


class AliasError(ConfigError):
    """Options that are not allowed together, or not in their section.

    Parameters
    ----------
    message
        The message.
    *options
        Dotted names as spelled by the user.
    """

    def __init__(self, message: str, *options: str) -> None:
        super().__init__(message)
        self.options = options


def apply_aliases(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `raw` with canonical option names.

    Parameters
    ----------
    raw
        Content of a configuration file, before validation.

    Raises
    ------
    ConfigError
        If an alias and its canonical option have different values.
    """
    # Aliases are at most two levels deep; deeper values are shared and not changed.
    content: dict[str, Any] = {
        name: {key: dict(value) if isinstance(value, Mapping) else value for key, value in section.items()}
        if isinstance(section, Mapping)
        else section
        for name, section in raw.items()
    }
    if isinstance(section := get_option(content, "finetune.data"), Mapping):
        del content["finetune"]["data"]
        for key, value in section.items():
            _put(content, f"data.{key}", value, alias=f"finetune.data.{key}")
    for alias, canonical in ALIASES.items():
        section, key = alias.split(".")
        holder = content.get(section)
        if not isinstance(holder, dict) or key not in holder:
            continue
        value = holder.pop(key)
        if alias == "training.num_gpus":
            _use_gpus(content, value)
        else:
            _put(content, canonical, value, alias=alias)
    return content


def get_option(content: Mapping[str, Any], dotted: str) -> Any:
    """Return the value of an option, or None if it is not in `content`."""
    value: Any = content
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _put(content: dict[str, Any], dotted: str, value: Any, *, alias: str) -> None:
    *sections, key = dotted.split(".")
    holder = content
    for depth, name in enumerate(sections):
        if holder.get(name) is None:
            holder[name] = {}
        holder = holder[name]
        if not isinstance(holder, dict):
            section = ".".join(sections[: depth + 1])
            raise AliasError(f"{section} must be a section with options, but is {shown(holder)}.", section)
    if key in holder and holder[key] != value:
        raise AliasError(
            f"{alias}={shown(value)} and {dotted}={shown(holder[key])} set the same option to different values; "
            f"keep only {dotted}.",
            alias,
            dotted,
        )
    holder[key] = value


def _use_gpus(content: dict[str, Any], n_gpus: Any) -> None:
    if isinstance(n_gpus, bool) or not isinstance(n_gpus, int) or n_gpus < 0:
        message = f"training.num_gpus={shown(n_gpus)} is not a number of GPUs; pass 0 or more."
        raise AliasError(message, "training.num_gpus")
    accelerator = get_option(content, "training.accelerator")
    if n_gpus == 0:
        _put(content, "training.accelerator", "cpu", alias="training.num_gpus")
        # Otherwise num_gpus would start as many processes on the CPU.
        content["training"].setdefault("devices", 1)
        return
    if accelerator not in (None, *_ON_GPUS):
        raise AliasError(
            f"training.num_gpus={n_gpus} and training.accelerator={shown(accelerator)} contradict each other; "
            "keep one of the two.",
            "training.num_gpus",
            "training.accelerator",
        )
    content["training"]["accelerator"] = "gpu" if accelerator in (None, "auto") else accelerator
    _put(content, "training.devices", n_gpus, alias="training.num_gpus")


@dataclass(frozen=True)
class Source:
    """A configuration file or an override.

    Attributes
    ----------
    where
        Name for messages.
    root
        Content as composed by PyYAML; None if it is empty.
    keys
        Keys that lead to `root`: empty for a file, ``("training", "lr")`` for the override ``training.lr=1``.
    """

    where: str
    root: yaml.Node | None
    keys: tuple[str, ...] = ()

    def find(self, location: Sequence[int | str]) -> tuple[int, int | None]:
        """Return how many leading parts of a location exist in this source, and the line number of the last one found.

        Lines are counted from 1. The line is None if the source has no lines, e.g. an override.
        """
        depth, line = self._walk(location)
        for alias, canonical in _SPELLINGS:
            if list(location[: len(canonical)]) == canonical:
                alias_depth, alias_line = self._walk([*alias, *location[len(canonical) :]])
                if alias_depth >= len(alias) and alias_depth - len(alias) + len(canonical) > depth:
                    depth, line = alias_depth - len(alias) + len(canonical), alias_line
        return depth, None if self.keys else line

    def _walk(self, location: Sequence[int | str]) -> tuple[int, int | None]:
        if tuple(location[: len(self.keys)]) != self.keys:
            return 0, None
        depth, line, node = len(self.keys), None, self.root
        for part in location[len(self.keys) :]:
            step = _step(node, part)
            if step is None:
                break
            node, line = step
            depth += 1
        return depth, line


class Places:
    """The sources of a configuration, with increasing priority.

    Parameters
    ----------
    sources
        The file, followed by the overrides in their order; empty for a configuration created in Python.
    """

    def __init__(self, sources: Iterable[Source] = ()) -> None:
        self.sources = list(sources)

    def of(self, location: Sequence[int | str]) -> str:
        """Return the source and line of a location as the prefix of a message.

        Parameters
        ----------
        location
            Keys, starting with the outermost section. If it does not exist, uses its section instead.
        """
        best, text = -1, ""
        for source in self.sources:
            depth, line = source.find(location)
            if source.keys and depth < len(source.keys):
                continue  # about another option
            if depth >= best:
                best, text = depth, f"{source.where}: " if line is None else f"{source.where}, line {line}: "
        return text

    def __eq__(self, other: object) -> bool:
        # The places of options are ignored in comparisons.
        return isinstance(other, Places)

    __hash__ = None  # type: ignore[assignment]


def _step(node: yaml.Node | None, part: int | str) -> tuple[Any, int] | None:
    """Return the child node at a key or an index, and its line."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        # Merged keys come first, because the keys of the section itself take precedence.
        for key, value in reversed(node.value):
            if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                return value, key.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part].start_mark.line + 1
    return None


def shown(value: object) -> str:
    """Return `value` as short text on one line, for a message."""
    return " ".join(_REPR.repr(value).split())


def config_error(error: ValidationError, schema: type[BaseModel], places: Places | None = None) -> ConfigError:
    """Convert pydantic's first error in `schema` to a sentence, with the number of other errors.

    Parameters
    ----------
    error
        The pydantic error.
    schema
        The sections that were checked.
    places
        Sources and lines of the options.
    """
    details = error.errors(include_url=False)
    location = "" if places is None else places.of(details[0]["loc"])
    subject, problem = _problem(details[0], schema)
    others = f"{len(details) - 1} more option{'s' if len(details) > 2 else ''}"
    end = "" if len(details) == 1 else f" (and {others} cannot be used)"
    name = dotted_name(details[0]["loc"])
    return ConfigError(f"{problem}{end}.", argument=name, subject=subject).located(location)


def option_error(error: ValidationError, schema: type[BaseModel]) -> OptionError:
    """Convert pydantic's first error in arguments to a sentence."""
    detail = error.errors(include_url=False)[0]
    problem = _problem(detail, schema, _PYTHON_WORDS)[1]
    return OptionError(f"{problem}.", argument=dotted_name(detail["loc"]), value=detail["input"])


def without_secrets(content: Any, *, options: bool = False) -> Any:
    """Return the content of a configuration, with credentials in URLs and ``storage_options`` removed."""
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
    """Return the dotted name of a location, e.g. ``training.optimizer.lr`` or ``data.paths[0]``."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += ("." if name else "") + (part if _PLAIN_KEY.fullmatch(part) else shown(part))
    return name


def known_names(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted names of all options of `schema`, including options of nested sections."""
    names: list[str] = []
    for name, field in schema.model_fields.items():
        names.append(prefix + name)
        if (section := section_of(field)) is not None:
            names += known_names(section, f"{prefix}{name}.")
    return names


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section class of an option, or None if it is not a section."""
    choices = get_args(field.annotation) or (field.annotation,)
    return next((cls for cls in choices if isinstance(cls, type) and issubclass(cls, BaseModel)), None)


def _problem(detail: ErrorDetails, schema: type[BaseModel], words: Mapping[str, str] = _WORDS) -> tuple[str, str]:
    """Return the option with its value, and what is wrong with it."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    name = dotted_name(detail["loc"])
    value = without_secrets(value, options="storage_option" in name)
    option = f"{name}={shown(value)}"
    if kind == "extra_forbidden":
        section, _, key = name.rpartition(".")
        names = [(full_name, *full_name.rpartition(".")) for full_name in known_names(schema)]
        siblings = [its_key for _, its_section, _, its_key in names if its_section == section]
        near = _nearest(key, siblings)
        # First the same name elsewhere, then similar names.
        elsewhere = [full_name for full_name, _, _, its_key in names if its_key == key and full_name != name]
        suggestion = next(iter(elsewhere), None) or (near and f"{section}.{near}".lstrip("."))
        listed = listing(siblings, most=8 if suggestion else 24)
        owner = section or ("a configuration" if "data" in schema.model_fields else schema.__name__)
        return option, f"is not a known option{_hint(suggestion)} ({owner} has: {listed})"
    if kind == "missing":
        if name.startswith("finetune."):
            example = "finetune: {base_model: checkpoints/final, task: annotation}"
            return name, f"is missing; set base_model and task, e.g. {example}"
        return name, "is missing; every configuration needs data, e.g. data: {paths: [cells.h5ad]}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        return option, f"is not known{_hint(_nearest(str(value), choices))} (known: {listing(choices)})"
    if kind == "invalid_key":
        section = dotted_name(detail["loc"][:-1]) or "a configuration"
        return section, f"has the key {shown(value)}, which is not the name of an option"
    if kind == "value_error":
        return option, str(context["error"])
    if kind in words:
        return option, words[kind].format(**context)
    return option, "cannot be used: " + " ".join(detail["msg"].split()).rstrip(".")


def _nearest(word: str, names: list[str]) -> str | None:
    # "bf16" is meant as the usual "bf16-mixed", though "bf16-true" shares a larger part of its letters.
    longer = [name for name in names if word and name.startswith(word)]
    return next(iter(longer or difflib.get_close_matches(word.lower(), names, n=1)), None)


def _hint(suggestion: str | None) -> str:
    return f"; did you mean {suggestion!r}?" if suggestion else ""
