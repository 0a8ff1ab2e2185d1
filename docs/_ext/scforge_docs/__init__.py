"""What the documentation takes from the code: references of the command line, of files and of errors; notebooks.

The texts are written into ``docs/generated`` when a build begins. The pages ``reference`` and ``troubleshooting``
include them.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from sphinx.util.logging import getLogger

__all__ = ["setup"]

logger = getLogger(__name__)


def write(path: Path, text: str) -> None:
    """Write a file unless it has this text, so that a build sees what has changed."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def generate(app: Any) -> None:
    """Write what the pages include."""
    from scforge_docs import cli, config, errors

    for name, module in (("cli", cli), ("config_reference", config), ("errors", errors)):
        # No suffix of a page, or Sphinx would take it for one.
        write(Path(app.srcdir) / "generated" / f"{name}.inc", module.render())


def take_notebooks(app: Any) -> None:
    """Bring the notebooks into the source folder, because Sphinx reads nothing outside it."""
    from scforge_docs.notebooks import copy_notebooks

    root = Path(app.srcdir).parent
    executed = root / "build" / "notebooks"
    filled = copy_notebooks(root / "notebooks", executed, Path(app.srcdir) / "notebooks")
    if bare := sorted({path.name for path in executed.glob("*.ipynb")} - set(filled)):
        logger.info("Shown without outputs, as their run failed or had other code: %s", ", ".join(bare))


def skip_foreign(app: Any, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leave out members that a class has from another package: torch, Lightning, scvi-tools, pydantic."""
    if skip:
        return None
    of_property = getattr(value, "fget", None) or getattr(value, "func", None)
    home = getattr(of_property or inspect.unwrap(getattr(value, "__func__", value)), "__module__", None)
    return True if isinstance(home, str) and home.split(".")[0] != "scforge" else None


def setup(app: Any) -> dict[str, Any]:
    """Add these to a build."""
    app.connect("autodoc-skip-member", skip_foreign)
    app.connect("builder-inited", take_notebooks, priority=0)
    app.connect("builder-inited", generate, priority=1)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
