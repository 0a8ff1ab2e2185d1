"""A table of scores that does not print a model without its baselines."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from scforge._io import atomic_write_text
from scforge.errors import OptionError

__all__ = ["Report", "Row"]

Kind = Literal["model", "baseline", "untrained"]


@dataclass(frozen=True)
class Row:
    """The scores of one embedding.

    Attributes
    ----------
    name
        What the embedding is.
    kind
        ``"model"``, ``"baseline"`` or ``"untrained"`` (the same network with random weights).
    scores
        Metric to figure.
    n_dims
        Dimensions of the embedding.
    seconds
        Wall time of making it, where it was measured.
    """

    name: str
    kind: Kind
    scores: dict[str, float]
    n_dims: int
    seconds: float | None = None


@dataclass
class Report:
    """Rows of scores, with what a reader needs to judge them.

    Parameters
    ----------
    title
        Heading.
    facts
        Name to value: data set, folds, losses, whatever belongs to the scores.
    notes
        Sentences below the table.
    """

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Add a row."""
        self.rows.append(row)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-safe values.

        Raises
        ------
        OptionError
            If there is a model but no baseline.
        """
        kinds = {row.kind for row in self.rows}
        if "model" in kinds and "baseline" not in kinds:
            raise OptionError("the report has a model but no baseline; add one, e.g. scforge.eval.pca_embedding.")
        return {"title": self.title, "facts": self.facts, "rows": [vars(row) for row in self.rows], "notes": self.notes}

    def to_markdown(self) -> str:
        """Return the report as Markdown; the best figure of each metric is bold."""
        content = self.to_dict()
        metrics = list(dict.fromkeys(name for row in self.rows for name in row.scores))
        best = {metric: max(row.scores.get(metric, float("-inf")) for row in self.rows) for metric in metrics}
        lines = [f"# {self.title}", ""]
        lines += [f"- {name}: {value}" for name, value in content["facts"].items()]
        header = ["embedding", "kind", "dimensions", *metrics, "seconds"]
        lines += ["", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
        for row in self.rows:
            figures = [_figure(row.scores.get(metric), best[metric]) for metric in metrics]
            seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
            lines.append(f"| {' | '.join([row.name, row.kind, str(row.n_dims), *figures, seconds])} |")
        lines += ["", *self.notes]
        return "\n".join(lines).rstrip() + "\n"

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write ``report.md`` and ``report.json`` into `folder`."""
        atomic_write_text(Path(folder) / "report.json", json.dumps(self.to_dict(), indent=2) + "\n")
        atomic_write_text(Path(folder) / "report.md", self.to_markdown())


def _figure(value: float | None, best: float) -> str:
    if value is None:
        return ""
    return f"**{value:.3f}**" if value == best else f"{value:.3f}"
