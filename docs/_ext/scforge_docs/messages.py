"""The messages that the code raises, collected from its source without running it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import scforge

__all__ = ["Message", "collect", "relatives", "trees"]

SOURCE = Path(scforge.__file__).parent
_TRANSPARENT = {"first_line", "len", "listing", "repr", "shown", "sorted", "str", "type", "int"}
"""Calls that are named by what they are given."""


@dataclass(frozen=True)
class Message:
    """A message as its source has it, with placeholders."""

    error: str
    module: str
    text: str

    @property
    def room(self) -> str:
        """The part of the package, e.g. ``"data"``; modules beside the parts are of the command line or of all."""
        first, _, rest = self.module.partition(".")
        return first if rest or (SOURCE / first).is_dir() else ("cli" if first.startswith("cli") else "all rooms")


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the parsed source of every module by its name within the package."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in sorted(SOURCE.rglob("*.py"))
    }


def relatives(public: dict[str, str]) -> dict[str, str]:
    """Add to the classes of `public` those of the package that derive from them, each under its public base."""
    found = dict(public)
    classes = [node for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef)]
    for _ in range(3):  # as deep as derived classes derive from each other
        for node in classes:
            known = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in found]
            if known:
                found.setdefault(node.name, found[known[0]])
    return found


def collect(families: dict[str, str]) -> list[Message]:
    """Return the messages of errors and warnings, each once.

    Parameters
    ----------
    families
        Name of a class, as the source spells it, to the name under which its messages are listed.
    """
    found: dict[Message, None] = {}
    for module, tree in trees().items():
        for nodes in _scopes(tree):
            assigned = _assigned(nodes)
            for node in nodes:
                for error, text in (*_raised(node, module, assigned), *_returned(node, module)):
                    if error in families:
                        found.setdefault(Message(families[error], module, text))
    return list(found)


def _scopes(tree: ast.Module) -> Iterator[list[ast.AST]]:
    """Yield the nodes of a module, then of each function, without those of functions inside it."""
    scopes: list[ast.AST] = [tree]
    while scopes:
        nodes, todo = [], list(ast.iter_child_nodes(scopes.pop()))
        while todo:
            node = todo.pop()
            nodes.append(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                scopes.append(node)
            else:
                todo += ast.iter_child_nodes(node)
        yield nodes


def _assigned(nodes: list[ast.AST]) -> dict[str, list[ast.expr]]:
    """Return what each name is set to within a function."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def _returned(node: ast.AST, module: str) -> Iterator[tuple[str, str]]:
    """Yield the sentences that the checks of a configuration file return to be raised."""
    if module == "config._messages" and isinstance(node, ast.Return) and isinstance(node.value, ast.JoinedStr):
        yield from (("ConfigError", text) for text in _texts(node.value, {}) if re.search(r"[a-z] [a-z]", text))


def _raised(node: ast.AST, module: str, assigned: dict[str, list[ast.expr]]) -> Iterator[tuple[str, str]]:
    if not isinstance(node, ast.Call) or not node.args:
        return
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name == "warn":
        kind = node.args[1] if len(node.args) > 1 else ast.Name("ScforgeWarning")
        name = kind.id if isinstance(kind, ast.Name) else ""
    texts = _texts(node.args[0], assigned)
    if name == "ValueError" and module.startswith("config."):
        # A check of an option; the message of the file puts the option and its value in front.
        name, texts = "ConfigError", [f"{{option}}={{value}} {text}" for text in texts]
    for text in texts:
        if re.search(r"[A-Za-z]{3}", re.sub(r"\{[^{}]*\}", "", text)):
            yield name, " ".join(text.split())


def _texts(node: ast.expr, assigned: dict[str, list[ast.expr]], depth: int = 0) -> list[str]:
    """Return the texts that an expression may be, with placeholders for what is known only later."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return _texts(node.body, assigned, depth) + _texts(node.orelse, assigned, depth)
    if isinstance(node, ast.JoinedStr):
        return ["".join(_piece(value) for value in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in _texts(node.left, assigned, depth) for right in _texts(node.right, assigned)]
    if isinstance(node, ast.Name) and node.id in assigned and depth < 3:
        return [text for value in assigned[node.id] for text in _texts(value, assigned, depth + 1)]
    return [f"{{{_label(node)}}}"]


def _piece(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    inner = value.value if isinstance(value, ast.FormattedValue) else value
    if isinstance(inner, ast.Constant):
        return str(inner.value)
    if isinstance(inner, ast.BoolOp) and isinstance(inner.op, ast.Or):
        # ``did_you_mean(...) or ";"``
        inner = inner.values[0]
    if isinstance(inner, ast.Call) and getattr(inner.func, "id", "") == "did_you_mean":
        return "; did you mean {name}?"
    return f"{{{_label(inner)}}}"


def _label(node: ast.expr) -> str:
    """Return a short name for an expression."""
    if isinstance(node, ast.Name):
        return node.id.lstrip("_")
    if isinstance(node, ast.Attribute):
        return node.attr.lstrip("_")
    if isinstance(node, ast.Subscript):
        return _label(node.value)
    if isinstance(node, ast.IfExp):
        return _label(node.body)
    if isinstance(node, ast.UnaryOp):
        return _label(node.operand)
    if isinstance(node, ast.BinOp):
        return _label(node.left)
    if isinstance(node, ast.Call):
        named = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if node.args and named in _TRANSPARENT:
            words = {"first_line": "cause", "len": f"number of {_label(node.args[0])}"}
            return words.get(named, _label(node.args[0]))
        if isinstance(node.func, ast.Attribute) and not node.args:
            return _label(node.func.value)
        return _label(node.args[0]) if node.args else named
    return "value"
