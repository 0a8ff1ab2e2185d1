"""The reference of errors and warnings: what each class means, and every message that the code has of it."""

from __future__ import annotations

from functools import cache
from itertools import groupby

from scforge import errors
from scforge_docs.docstrings import code, inline, section, summary
from scforge_docs.messages import Message, collect, relatives

__all__ = ["PARTS", "family", "listed", "missing", "render"]

PARTS = ("Cause", "Fix", "Examples")
"""What the docstring of each class has to have."""


def family() -> list[type]:
    """Return the public classes of errors, then those of warnings, bases first."""
    classes = [thing for name in errors.__all__ if isinstance(thing := getattr(errors, name), type)]
    return sorted(classes, key=lambda cls: (issubclass(cls, Warning), len(cls.__mro__), cls.__name__))


def missing() -> list[str]:
    """Return what the docstrings lack, as ``DataError: Fix``."""
    lacking = [f"{cls.__name__}: summary" for cls in family() if not summary(cls.__dict__.get("__doc__"))]
    for cls in family():
        lacking += [f"{cls.__name__}: {part}" for part in PARTS if not section(cls.__dict__.get("__doc__"), part)]
    return lacking


@cache
def listed() -> list[Message]:
    """Return all messages, by class, part of the package and module."""
    families = relatives({cls.__name__: cls.__name__ for cls in family()})
    return sorted(collect(families), key=lambda message: (message.error, message.room, message.module))


def _bases(cls: type) -> str:
    bases = [base for base in cls.__bases__ if base.__module__ == "scforge.errors"]
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    builtins = [base for base in cls.__bases__ if base.__module__ == "builtins"] or [builtin]
    ours = "".join(f"a {code(base.__name__)} and " for base in bases)
    theirs = " and ".join(f"the builtin {code(base.__name__)}" for base in builtins)
    caught = (
        ""
        if issubclass(cls, Warning) or builtin is Exception
        else f", so `except {builtins[0].__name__}` also catches it"
    )
    return f"It is {ours}{theirs}{caught}."


def _of_class(cls: type, messages: list[Message]) -> list[str]:
    doc = cls.__doc__
    parts = [f"## `{cls.__name__}`", inline(summary(doc)), _bases(cls)]
    for part in ("Cause", "Fix"):
        parts.append(f"**{part}.** {inline(' '.join(section(doc, part).split()))}")
    parts.append(f"```pycon\n{section(doc, 'Examples')}\n```")
    if messages:
        parts.append(f"### Messages of `{cls.__name__}`")
    for room, of_room in groupby(messages, key=lambda message: message.room):
        lines = sorted({f"- {code(message.text)}" for message in of_room})
        title = "All subpackages" if room == "all rooms" else f"`scforge.{room}`"
        parts.append(f"{title}:\n\n" + "\n".join(lines))
    return parts


def render() -> str:
    """Return the page.

    Raises
    ------
    ValueError
        If a class lacks a part of its docstring.
    """
    if lacking := missing():
        raise ValueError(f"the docstrings of errors lack: {'; '.join(lacking)}.")
    messages = listed()
    parts = []
    for cls in family():
        parts += _of_class(cls, [message for message in messages if message.error == cls.__name__])
    return "\n\n".join(parts) + "\n"
