import re
from functools import cache

import pytest

pytest.importorskip("sphinx", reason="the documentation is built by the group docs")
from scforge_docs import cli, config, docstrings, errors, options


@cache
def page(module):
    return module.render()


@pytest.mark.parametrize("module", [cli, config], ids=["cli", "config"])
def test_every_cell_has_text(module):
    rows = [line for line in page(module).splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    assert len(rows) > 100
    assert "%(default)s" not in page(module)
    assert all(cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)[1:-1])
    with pytest.raises(ValueError, match="a cell is empty"):
        docstrings.table(("option", "says"), [("a", "")])


def test_every_command_and_option_occurs():
    parsers = list(cli.commands())
    names = {parser.prog for parser, _ in parsers}
    assert {"scforge", "scforge train", "scforge config check", "scforge soma embed"} <= names
    text = page(cli)
    for parser, _ in parsers:
        start = text.index(f"# `{parser.prog}`\n")
        after = text.find("\n## ", start + 1), text.find("\n### ", start + 1), text.find("\n#### ", start + 1)
        chapter = text[start : min(place for place in (*after, len(text)) if place > 0)]
        for action in parser._actions:
            for name in action.option_strings:
                assert re.search(rf"`{re.escape(name)}[ `]", chapter), f"{parser.prog} {name}"


def test_everything_in_a_file_occurs():
    text = page(config)
    for dotted in config.keys():  # noqa: SIM118 - a function of the generator
        path, _, key = dotted.rpartition(".")
        chapter = text[text.index(f"\n### `{path}`\n") if path else 0 :]
        assert f"| `{key}` |" in chapter[: chapter.index("\n### ", 1)], dotted
    assert all(f"| `{alias}` | `{name}` |" in text for alias, name in config.ALIASES.items())
    assert "| `seed` | whole number ≥ 0, < 2^32 |" in text
    assert not re.findall(r"\| (?:As for|See) \{class\}", text), "a reference stops at a reference"
    for part in options.PARTS:
        for name, cls in options.registered(part.registry):
            assert f"### `{name}` ({part.kind})\n" in text
            assert all(all(row) for row in options.option_rows(cls, part)), name


@pytest.mark.slow
@pytest.mark.parametrize("cls", errors.family(), ids=lambda cls: cls.__name__)
def test_each_error_has_its_parts(cls):
    for part in errors.PARTS:
        assert docstrings.section(cls.__dict__["__doc__"], part), f"{cls.__name__} lacks {part}"
    chapter = page(errors).split(f"## `{cls.__name__}`\n")[1].split("\n## ")[0]
    assert "**Cause.** " in chapter
    assert "**Fix.** " in chapter
    builtin = next(base.__name__ for base in cls.__mro__ if base.__module__ == "builtins")
    assert f"the builtin `{builtin}`" in chapter


def test_messages_are_those_of_the_code():
    listed = errors.listed()
    assert len(listed) > 900
    known = {(message.error, message.module, message.text) for message in listed}
    told = "{kind} {name} is already registered; choose another name."
    assert ("OptionError", "_registry", told) in known
    assert any(text.startswith("{option}={value} has no effect without") for _, _, text in known)
    family = {cls.__name__: cls.__name__ for cls in errors.family()}
    assert set(family) == {message.error for message in listed}, "an error is raised nowhere"
