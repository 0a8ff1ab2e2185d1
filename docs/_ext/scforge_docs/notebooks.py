"""Notebooks for the documentation: with the outputs of their last run, where that ran the same code."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["cleaned", "copy_notebooks", "with_outputs"]

_SHOWN = ("image/svg+xml", "image/png", "text/html", "text/markdown", "text/latex", "text/plain")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")
_TEMPORARY = re.compile(r"(?:/private)?(?:/tmp|/var/folders)/[\w./+-]*?(?:tmp\w{6,}|pytest-[\w-]+)")
_HOME = re.compile(r"(?<![\w.:/~>}-])/(?:home|root|Users)/[\w.-]+")


def _places() -> dict[str, str]:
    """Return folders of this machine, and what stands in their place; longer ones first."""
    root = Path(__file__).resolve().parents[3]
    places = {str(root): ".", sys.prefix: "python", tempfile.gettempdir(): "/tmp", str(Path.home()): "~"}
    return {place: places[place] for place in sorted(places, key=len, reverse=True) if len(place) > 1}


def cleaned(text: str) -> str:
    """Return text without folders of the machine, and without addresses in its memory.

    Raises
    ------
    ValueError
        If a folder of a machine is left.
    """
    for place, word in _places().items():
        text = re.sub(rf"(?<![\w~.]){re.escape(place)}(?![\w-])", word, text)
    text = _ADDRESS.sub("at 0x...", _TEMPORARY.sub("/tmp/folder", text))
    if left := _HOME.search(text):
        raise ValueError(f"an output holds a folder of this machine, {left[0]!r}; let the cell print its name alone.")
    return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "".join(value)


def _output(output: dict[str, Any]) -> dict[str, Any] | None:
    """Return an output as it may be published; None for noise: stderr, bars of progress, objects for a live page."""
    kind = output["output_type"]
    if kind == "stream":
        if output["name"] != "stdout":
            return None
        # A bar of progress writes over its line; its last state says nothing that the cell does not.
        lines = [line.rpartition("\r")[2] for line in cleaned(_text(output["text"])).split("\n")]
        return {"output_type": "stream", "name": "stdout", "text": "\n".join(lines)}
    data = output["data"]
    if "application/vnd.jupyter.widget-view+json" in data:
        return None
    kept = {
        mime: _text(data[mime]) if mime == "image/png" else cleaned(_text(data[mime]))
        for mime in _SHOWN
        if mime in data
    }
    found = {"output_type": kind, "data": kept, "metadata": {}}
    return found | ({"execution_count": output.get("execution_count")} if kind == "execute_result" else {})


def _code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def with_outputs(source: dict[str, Any], executed: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook with the outputs of its run, or as it is where the run had other code, or failed.

    Parameters
    ----------
    source
        The notebook, as JSON; its text counts.
    executed
        A copy that was run.

    Raises
    ------
    ValueError
        If an output names a folder of this machine.
    """
    cells, ran = _code(source), _code(executed)
    same = [_text(cell["source"]) for cell in cells] == [_text(cell["source"]) for cell in ran]
    failed = any(output["output_type"] == "error" for cell in ran for output in cell["outputs"])
    never = not any(cell.get("execution_count") for cell in ran)
    if not same or failed or never:
        return source
    filled = json.loads(json.dumps(source))
    for cell, other in zip(_code(filled), ran, strict=True):
        cell["outputs"] = [output for output in map(_output, other["outputs"]) if output is not None]
        cell["execution_count"] = other["execution_count"]
    return filled


def copy_notebooks(folder: Path, executed: Path, target: Path) -> list[str]:
    """Copy notebooks, with outputs where there are fitting ones; return the names of those that have them.

    Parameters
    ----------
    folder
        The notebooks.
    executed
        Folder with copies that were run (``make notebooks``); it may be missing.
    target
        Folder to write; what else it holds is removed.
    """
    target.mkdir(parents=True, exist_ok=True)
    notebooks = sorted(folder.glob("*.ipynb"))
    for stray in set(target.iterdir()) - {target / path.name for path in notebooks}:
        if stray.is_file():
            stray.unlink()
    filled = []
    for path in notebooks:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        run = executed / path.name
        if run.is_file():
            try:
                notebook = with_outputs(notebook, json.loads(run.read_text(encoding="utf-8")))
            except ValueError as error:
                raise ValueError(f"{path.name}: {error}") from error
        if any(cell["outputs"] for cell in _code(notebook)):
            filled.append(path.name)
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        if not (copy := target / path.name).is_file() or copy.read_text(encoding="utf-8") != text:
            copy.write_text(text, encoding="utf-8")
    return filled
