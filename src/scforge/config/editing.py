"""Helpers for writing configuration files: recipes as templates, and a schema for completion in editors."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from scforge._io import atomic_write_text, check_output
from scforge.config.aliases import ALIASES, section_of
from scforge.config.recipes import recipe_path
from scforge.config.schema import Config, Section
from scforge.errors import ConfigError


def init_config(
    recipe: str = "light", output: str | os.PathLike[str] | None = None, *, overwrite: bool = False
) -> Path:
    """Copy a recipe to a file for editing.

    Parameters
    ----------
    recipe
        Name of a recipe, see :func:`scforge.config.list_recipes`.
    output
        File to write. If None, writes to a file in the working directory that is named after the recipe.
    overwrite
        Whether to replace an existing file.

    Returns
    -------
    The path of the new file.

    Raises
    ------
    ConfigError
        If the recipe does not exist.
    OptionError
        If the file exists.

    Examples
    --------
    >>> init_config("light", "my_model.yaml")
    PosixPath('my_model.yaml')
    """
    text = recipe_path(recipe).read_text(encoding="utf-8")
    path = Path(f"{recipe}.yaml" if output is None else output)
    if path.suffix == ".toml":
        raise ConfigError("must end in .yaml, because recipes are YAML files.", output=str(path))
    check_output("output", path, overwrite=overwrite)
    atomic_write_text(path, text, overwrite=overwrite, argument="output")
    return path


def config_schema(output: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> dict[str, Any]:
    """Return the JSON schema of configuration files, for editors.

    Parameters
    ----------
    output
        File to write. If None, nothing is written.
    overwrite
        Whether to replace an existing file.

    Returns
    -------
    The schema, whose ``properties`` are the sections.

    Raises
    ------
    OptionError
        If the file exists.

    Examples
    --------
    >>> config_schema()["properties"]["seed"]["type"]
    'integer'
    """
    schema = Config.model_json_schema()
    schema["title"] = "scforge configuration"
    definitions = schema["$defs"]
    _describe(Config, schema)
    for section in _sections(Config):
        _describe(section, definitions[section.__name__])
    for alias, canonical in ALIASES.items():
        holder, key = alias.split(".")
        meant = copy.deepcopy(_find(schema, canonical))
        _find(schema, holder)["properties"][key] = meant | {"description": f"The same as {canonical}."}
    for name in ("data.paths", "data.obs_columns", "output.loggers"):
        # A single item is allowed instead of a list with one item.
        choices = _find(schema, name)["anyOf"]
        choices += [choice["items"] for choice in choices if choice.get("type") == "array"]
    # A section may be empty, e.g. if all keys are commented out.
    for holder in (schema, *schema["$defs"].values()):
        for name, option in holder.get("properties", {}).items():
            if "$ref" in option:
                words = {"description": option["description"]} if "description" in option else {}
                holder["properties"][name] = words | {"anyOf": [{"$ref": option["$ref"]}, {"type": "null"}]}
    if output is not None:
        check_output("output", output, overwrite=overwrite)
        atomic_write_text(output, json.dumps(schema, indent=2) + "\n", overwrite=overwrite, argument="output")
    return schema


def _sections(schema: type[BaseModel]) -> list[type[BaseModel]]:
    sections: list[type[BaseModel]] = []
    for field in schema.model_fields.values():
        if (section := section_of(field)) is not None:
            sections += [section, *_sections(section)]
    return sections


def _describe(section: type[BaseModel], schema: dict[str, Any]) -> None:
    """Copy the descriptions of a section and its options from its docstring to the schema."""
    schema.pop("title", None)
    words: dict[str, list[str]] = {}
    for base in (base for base in reversed(section.__mro__) if issubclass(base, Section)):
        summary, _, rest = (base.__doc__ or "").partition("Parameters\n")
        schema["description"] = " ".join(summary.split())  # the own one is last
        names: list[str] = []
        for line in rest.splitlines()[1:]:
            text = line.strip()
            if text in ("Examples", "Notes"):
                break
            if line.startswith("        "):
                for name in names:
                    words.setdefault(name, []).append(text.replace("``", "").replace("`", ""))
            elif text:
                names = [name.strip() for name in text.split(",")]
    for name, option in schema["properties"].items():
        option.pop("title", None)
        if name in words:
            option["description"] = " ".join(words[name])


def _find(schema: dict[str, Any], dotted: str) -> dict[str, Any]:
    option = schema
    for key in dotted.split("."):
        option = option["properties"][key]
        reference = next((choice["$ref"] for choice in [option, *option.get("anyOf", [])] if "$ref" in choice), None)
        if reference is not None:
            option = schema["$defs"][reference.rpartition("/")[2]]
    return option
