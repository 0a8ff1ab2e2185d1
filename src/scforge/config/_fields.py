"""What sections of a configuration are made of: their base class, and types with the checks of a file."""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = ["Float", "Int", "OpenSection", "Path", "Positive", "Section", "Share", "Text"]


def _no_bool(value: Any) -> Any:
    # Python counts True as 1, so ``batch_size: yes`` would train with batches of one cell.
    if isinstance(value, bool):
        raise ValueError("is not a number")
    return value


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


Int = Annotated[int, BeforeValidator(_no_bool)]
Positive = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Float = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Path = Annotated[str, BeforeValidator(_path_text), Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, and assignments are checked like a file."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, raw: Any) -> Any:
        # A section whose keys are all commented out is None in YAML.
        return {} if raw is None else raw

    def user_set(self) -> dict[str, Any]:
        """Return what the user set, nested sections as dictionaries, in the order of the schema."""
        content: dict[str, Any] = {}
        for name, value in self:
            if isinstance(value, Section):
                inner = value.user_set()
                if inner or name in self.model_fields_set:
                    content[name] = inner
            elif name in self.model_fields_set:
                content[name] = value
        return content


class OpenSection(Section):
    """A section that also holds the options of the class it names; that class's constructor checks them."""

    model_config = ConfigDict(extra="allow")
    _not_options: ClassVar[frozenset[str]] = frozenset()

    def user_options(self) -> dict[str, Any]:
        """Return the options that the user set, for the constructor of the named class."""
        return {key: value for key, value in self.user_set().items() if key not in self._not_options}
