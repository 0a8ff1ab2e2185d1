"""What only people know of a model, for its card: licence, data, figures, citation; and where it is to be had."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scforge.errors import ModelFileError, OptionError

if TYPE_CHECKING:
    import pandas as pd

    from scforge.estimators.base import CellModel
    from scforge.eval.report import Report

__all__ = ["CardFacts", "Origin", "Score", "base_of", "facts_of", "scores_of"]

_MODEL = "scforge"
_TITLE = re.compile(r"^(#+) ", re.MULTILINE)


@dataclass(frozen=True)
class Origin:
    """Where the weights of a model can be had again.

    Attributes
    ----------
    name, revision
        Name that others can use, a repository of the hub or a name of the registry, and the commit; None if there is
        none.
    folder
        Folder on this machine.
    n_epochs
        Epochs that the model had been trained for: with more of them its weights are others.
    """

    name: str | None = None
    revision: str | None = None
    folder: Path | None = None
    n_epochs: int = 0

    @classmethod
    def of(cls, model: CellModel | None) -> Origin | None:
        """Return where a model can be had, None if it was trained since, or is nowhere."""
        origin = None if model is None else model._origin
        return origin if origin is not None and origin.n_epochs == model.n_epochs_ else None  # type: ignore[union-attr]

    @classmethod
    def at(cls, model: CellModel, folder: str | os.PathLike[str]) -> Origin:
        """Return that the model is in a folder, besides where it is already."""
        return replace(cls.of(model) or cls(), folder=Path(folder).resolve(), n_epochs=model.n_epochs_)

    def to_json(self) -> dict[str, Any]:
        """Return name and revision."""
        return {"name": self.name, "revision": self.revision}

    @classmethod
    def from_json(cls, content: Any, *, source: str) -> Origin | None:
        """Read what :meth:`to_json` wrote; None for None."""
        if content is None:
            return None
        if not isinstance(content, Mapping) or not _is_text(content.get("name")):
            raise ModelFileError(f"the description in {source!r} names its base model oddly; copy it again.")
        revision = content.get("revision")
        return cls(content["name"], revision if _is_text(revision) else None)


@dataclass(frozen=True)
class Score:
    """A figure of the model, and those of what stands in the same table.

    Attributes
    ----------
    benchmark, metric
        What was measured.
    value
        The figure of the model.
    beside
        Name of a baseline to its figure.
    """

    benchmark: str
    metric: str
    value: float
    beside: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CardFacts:
    """What a card says and a model cannot know by itself.

    Attributes
    ----------
    licence
        Identifier, e.g. ``"apache-2.0"``, or name of the licence.
    data
        What the model was trained on.
    citation
        How to cite it.
    table
        Figures beside baselines, as Markdown.
    scores
        The same for machines.
    base
        The model before fine-tuning.
    """

    licence: str | None = None
    data: tuple[str, ...] = ()
    citation: str | None = None
    table: str = ""
    scores: tuple[Score, ...] = ()
    base: Origin | None = None

    def with_given(
        self,
        *,
        licence: str | None = None,
        data: str | Sequence[str] | None = None,
        citation: str | None = None,
        metrics: Report | pd.DataFrame | None = None,
    ) -> CardFacts:
        """Return the same, with what was given in the place of what was known.

        Raises
        ------
        OptionError
            If something is no text, or `metrics` has no baselines.
        """
        changes: dict[str, Any] = {}
        for name, value in (("licence", licence), ("citation", citation)):
            if value is not None:
                if not _is_text(value):
                    raise OptionError(f"{name}={value!r} is no text; give some, or leave it out.")
                changes[name] = value.strip()
        if data is not None:
            named = (data,) if isinstance(data, str) else tuple(data)
            if not named or not all(_is_text(one) for one in named):
                raise OptionError(f"data={data!r} names no data; give text, or a list of it.")
            changes["data"] = named
        if metrics is not None:
            changes["table"], changes["scores"] = scores_of(metrics)
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return all of it, JSON-safe; without what is not known."""
        content = {
            "licence": self.licence,
            "data": list(self.data),
            "citation": self.citation,
            "table": self.table,
            "scores": [vars(score) for score in self.scores],
            "base": None if self.base is None else self.base.to_json(),
        }
        return {name: value for name, value in content.items() if value}

    @classmethod
    def from_json(cls, content: Any, *, source: str) -> CardFacts:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        ModelFileError
            If it is something else.
        """
        if content is None:
            return cls()
        try:
            scores = tuple(Score(**score) for score in content.get("scores", ()))
            facts = cls(
                licence=content.get("licence"),
                data=tuple(content.get("data", ())),
                citation=content.get("citation"),
                table=content.get("table", ""),
                scores=scores,
                base=Origin.from_json(content.get("base"), source=source),
            )
        except (AttributeError, TypeError) as error:
            raise ModelFileError(f"the card in the description of {source!r} cannot be read; copy it again.") from error
        texts = (facts.licence or "", facts.citation or "", facts.table, *facts.data)
        figures = [figure for score in scores for figure in (score.value, *score.beside.values())]
        if not all(isinstance(one, str) for one in texts) or not all(isinstance(one, int | float) for one in figures):
            raise ModelFileError(f"the card in the description of {source!r} cannot be read; copy it again.")
        return facts


def facts_of(model: CellModel) -> CardFacts:
    """Return what is known of a model, with the name of the model that it was fine-tuned from."""
    base = Origin.of(getattr(model, "_base", None))
    if model._facts.base is not None or base is None or base.name is None:
        return model._facts
    return replace(model._facts, base=Origin(base.name, base.revision))


def base_of(model: CellModel, folder: Path) -> dict[str, Any] | None:
    """Return where the model before fine-tuning is to be had, for adapters in `folder`; None if it is nowhere.

    A folder is named by the way there, so that both can be moved together.
    """
    named, base = facts_of(model).base, Origin.of(getattr(model, "_base", None))
    if named is not None:
        return named.to_json()
    if base is None or base.folder is None:
        return None
    way = os.path.relpath(base.folder, folder.resolve())
    return Origin(f"./{Path(way).as_posix()}").to_json()


def scores_of(metrics: Report | pd.DataFrame) -> tuple[str, tuple[Score, ...]]:
    """Return figures as Markdown, and those of the model with those beside them.

    Parameters
    ----------
    metrics
        A report, or a table as :meth:`Encoder.evaluate` returns it: one row a method, the model's first.

    Raises
    ------
    OptionError
        If there are no baselines beside the model, or it is not clear which row is of the model.
    """
    import pandas as pd

    from scforge.eval.report import Report

    if isinstance(metrics, Report):
        return _of_report(metrics)
    if not isinstance(metrics, pd.DataFrame) or {"method", "metric", "value"} <= set(metrics.columns):
        what = type(metrics).__name__
        raise OptionError(f"metrics is a {what} that is no table of evaluate(); give what evaluate() returned.")
    if len(metrics) < 2:
        raise OptionError(
            "metrics has no baselines beside the model, and figures of a model alone say little; give what "
            "evaluate(baselines=True) returned."
        )
    names = [str(name) for name in metrics.index]
    numeric = metrics.select_dtypes("floating")  # whole numbers count cells
    lines = [f"| method | {' | '.join(map(str, metrics.columns))} |", f"|{'---|' * (metrics.shape[1] + 1)}"]
    rows = zip(names, metrics.itertuples(index=False), strict=True)
    lines += [f"| {name} | {' | '.join(map(_shown, row))} |" for name, row in rows]
    scores = [
        Score("", str(metric), values[0], _finite(dict(zip(names[1:], values[1:], strict=True))))
        for metric in numeric
        if math.isfinite((values := [float(value) for value in numeric[metric]])[0])
    ]
    return "\n".join(lines), tuple(scores)


def _of_report(report: Report) -> tuple[str, tuple[Score, ...]]:
    report.check()
    scores: list[Score] = []
    for benchmark in report.benchmarks:
        rows = report.of(benchmark)
        models = [row for row in rows if row.kind in ("model", "supervised")]
        mine = [row for row in models if row.name == _MODEL] or models
        if len(mine) != 1:
            raise OptionError(
                f"metrics has {len(mine)} models in {benchmark or report.title!r}; give the report of this model alone."
            )
        main = report.about(benchmark).main
        value = mine[0].scores.get(main, math.nan)
        beside = {row.name: row.scores.get(main, math.nan) for row in rows if row is not mine[0]}
        if math.isfinite(value):
            scores.append(Score(benchmark, main, float(value), _finite(beside)))
    return _TITLE.sub(r"##\1 ", report.to_markdown()).strip(), tuple(scores)


def _finite(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
