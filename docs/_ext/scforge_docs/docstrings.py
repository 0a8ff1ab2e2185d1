"""What stands in NumPy docstrings, as MyST markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence

__all__ = ["cell", "code", "inline", "parameters", "parameters_of", "section", "summary", "table"]

_RULE = re.compile(r"^-{3,}$")
_ROLE = re.compile(r":(?:py:)?(class|func|meth|mod|attr|data|exc|ref|doc):`([^`]+)`")
_FOOTNOTE = re.compile(r" ?\[\d+\]_")
_MATH = re.compile(r":math:`([^`]+)`")
_CODE = re.compile(r"(``[^`]+``|\{[a-z]+\}`[^`]+`|\$[^$]+\$|`[^`]+`)")
_FLAG = re.compile(r"(?<![\w`-])(--[a-z][\w-]*)")


def _sections(doc: str | None) -> dict[str, list[str]]:
    """Split a docstring at its underlined titles; what stands before the first has no title."""
    lines = inspect.cleandoc(doc or "").splitlines()
    found: dict[str, list[str]] = {"": []}
    title = ""
    for number, line in enumerate(lines):
        follows = lines[number + 1] if number + 1 < len(lines) else ""
        if line and not line.startswith(" ") and _RULE.match(follows.strip()):
            title = line.strip()
            found[title] = []
        elif not _RULE.match(line.strip()):
            found[title].append(line)
    return found


def section(doc: str | None, title: str) -> str:
    """Return the text of a section as it is written, or an empty string."""
    return "\n".join(_sections(doc).get(title, [])).strip()


def summary(doc: str | None) -> str:
    """Return what stands before the first section, each paragraph on a line of its own."""
    return "\n\n".join(" ".join(part.split()) for part in "\n".join(_sections(doc)[""]).strip().split("\n\n"))


def parameters(doc: str | None, titles: Sequence[str] = ("Parameters", "Other Parameters", "Attributes")) -> dict:
    """Return name to description, for every name of the sections of parameters."""
    found: dict[str, str] = {}
    sections = _sections(doc)
    for title in titles:
        names: list[str] = []
        words: dict[str, list[str]] = {}
        for line in sections.get(title, []):
            if line and not line.startswith(" "):
                names = [name.strip().lstrip("*") for name in line.partition(" :")[0].split(",")]
            elif line.strip():
                for name in names:
                    words.setdefault(name, []).append(line.strip())
        for name, lines in words.items():
            found.setdefault(name, " ".join(lines))
    return found


def parameters_of(cls: type) -> dict[str, str]:
    """Return the described parameters of a class, those of its bases behind its own."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        for doc in (base.__dict__.get("__doc__"), getattr(base.__dict__.get("__init__"), "__doc__", None)):
            for name, text in parameters(doc).items():
                found.setdefault(name, text)
    return found


def inline(text: str) -> str:
    """Turn the inline markup of reStructuredText into that of MyST."""
    text = _FOOTNOTE.sub("", text)
    text = _ROLE.sub(lambda match: f"{{{match[1]}}}`{match[2]}`", text)
    text = _MATH.sub(lambda match: f"${match[1]}$", text)
    parts = _CODE.split(text)
    for number, part in enumerate(parts):
        if part.startswith("``"):
            parts[number] = code(part[2:-2])
        elif number % 2 == 0:
            # A flag stays as it is typed: outside of code two dashes would become one long dash.
            parts[number] = _FLAG.sub(r"`\1`", re.sub(r"([*_<\[\]])", r"\\\1", part))
    return "".join(parts)


def code(text: str) -> str:
    """Return text as inline code, whatever ticks it has."""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def cell(markdown: str) -> str:
    """Return markdown that may stand in a cell of a table."""
    return " ".join(markdown.split()).replace("|", "\\|")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; every cell must have text.

    Raises
    ------
    ValueError
        If a cell is empty.
    """
    lines = [header, ["---"] * len(header), *rows]
    for row in lines:
        if not all(text.strip() for text in row):
            raise ValueError(f"a cell is empty in the row {list(row)!r} of the table {list(header)!r}.")
    return "\n".join("| " + " | ".join(cell(text) for text in row) + " |" for row in lines)
