"""The reference of the command line, from the parsers themselves."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterator

from scforge import cli
from scforge_docs.docstrings import code, inline, table

__all__ = ["commands", "missing", "render"]

_DEFAULT = re.compile(r"\s*\((default: )?([^()]+)\)$")
_OWN_DEFAULT = "(%(default)s)"
# "(of COLUMN)" says more of an option; "(0.1)" is a default that stands in Python.
_NO_DEFAULT = ("of ", "the ", "a ")
_EXIT_CODES = {
    0: "done",
    2: "an error that the user can fix, reported in one line on stderr "
    "([list](troubleshooting.md#all-errors-and-warnings))",
    130: "interrupted by Ctrl-C",
}
"""What each exit code means; the build fails if the command line returns another."""


def commands(parser: argparse.ArgumentParser | None = None, words: str = "") -> Iterator[tuple]:
    """Yield every command as its parser and the words that say what it does; that of the program comes first."""
    parser = cli._parser() if parser is None else parser
    yield parser, words or parser.description or ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                yield from commands(child, child.description or said.get(name, ""))


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return [action for action in parser._actions if not isinstance(action, hidden)]


def _spelled(action: argparse.Action) -> str:
    """Return how an option is written, e.g. ``-o FILE``, ``--output FILE``."""
    metavar = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if action.choices is not None and not action.metavar:
        metavar = "{" + ",".join(map(str, action.choices)) + "}"
    value = {"?": f"[{metavar}]", "*": f"[{metavar} ...]", "+": f"{metavar} [...]", 0: ""}.get(action.nargs, metavar)
    if not action.option_strings:
        return code(value)
    return ", ".join(code(f"{name} {value}".strip()) for name in action.option_strings)


def _words(action: argparse.Action) -> tuple[str, str]:
    """Return the help of an option without its default, and the default."""
    text = action.help or ""
    if action.dest == "overrides" and text.startswith("e.g."):
        text = f"options of the YAML file that take the place of those in it, {text}"
    if text.endswith(_OWN_DEFAULT):
        return text.removesuffix(_OWN_DEFAULT).strip(), code(str(action.default))
    if (match := _DEFAULT.search(text)) and (match[1] or not match[2].startswith(_NO_DEFAULT)):
        told = match[2]
        return text[: match.start()], told if match[1] or " " in told else code(told)
    if action.required and action.nargs not in ("?", "*"):
        return text, "required"
    if isinstance(action.default, bool) or action.nargs == 0:
        return text, "on" if action.default is True else "off"
    return text, "none" if action.default in (None, argparse.SUPPRESS, (), []) else code(str(action.default))


def missing() -> list[str]:
    """Return what has no help: commands, and options as ``scforge train --config``."""
    bare = [f"the command {parser.prog!r}" for parser, words in commands() if not words.strip()]
    options = [
        f"{parser.prog} {'/'.join(action.option_strings) or action.dest}"
        for parser, _ in commands()
        for action in _shown(parser)
        if not (action.help or "").strip()
    ]
    return bare + options


def exit_codes() -> set[int]:
    """Return the exit codes that the source of the command line names."""
    tree = ast.parse(inspect.getsource(cli))
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    returned = [node.value for node in ast.walk(main) if isinstance(node, ast.Return)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    returned += [call.args[0] for call in calls if call.func.attr == "exit" and call.args]
    parts = [part for value in returned if value is not None for part in ast.walk(value)]
    found = [part.value for part in parts if isinstance(part, ast.Constant)]
    found += [getattr(cli, part.id, None) for part in parts if isinstance(part, ast.Name)]
    return {value for value in found if isinstance(value, int)}


def render() -> str:
    """Return the page.

    Raises
    ------
    ValueError
        If a command or an option has no help, or an exit code no meaning.
    """
    if bare := missing():
        raise ValueError(f"the command line has no help for: {'; '.join(bare)}.")
    if exit_codes() != set(_EXIT_CODES):
        raise ValueError(f"the exit codes are {sorted(exit_codes())}, and {sorted(_EXIT_CODES)} are described.")
    parts = []
    for parser, words in commands():
        depth = parser.prog.count(" ") + 2
        formatter = argparse.HelpFormatter(parser.prog, width=100)
        formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
        usage = re.sub(r"\x1b\[[0-9;]*m", "", formatter.format_help()).strip()
        sentence = words[0].upper() + words[1:].rstrip(".") + "."
        parts.append(f"{'#' * depth} `{parser.prog}`\n\n{inline(sentence)}\n\n```text\n{usage}\n```")
        rows = []
        for action in _shown(parser):
            said, default = _words(action)
            if action.choices is not None:
                said += " (" + ", ".join(map(str, action.choices)) + ")"
            rows.append((_spelled(action), default, inline(said)))
        rows.append(("`-h`, `--help`", "off", "show this help and leave"))
        parts.append(table(("argument", "default", "what it says"), rows))
    rows = [(code(str(number)), words) for number, words in sorted(_EXIT_CODES.items())]
    parts.append("## Exit codes\n\n" + table(("code", "means"), rows))
    return "\n\n".join(parts) + "\n"
