"""Model cards: facts given by users, benchmark scores, and the text of README.md."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from scforge._text import markdown
from scforge.errors import ModelFileError, OptionError, listing
from scforge.estimators.spec import ModelSpec

if TYPE_CHECKING:
    import pandas as pd

    from scforge.eval.report import Report
    from scforge.foreign.base import Foreign


_MODEL = "scforge"
_TITLE = re.compile(r"^(#+) ", re.MULTILINE)
TEMPLATE = Path(__file__).with_name("model_card.md")
"""Text of ``README.md`` in a model folder."""

_UNKNOWN = "not stated"

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

_PIPELINES = {
    None: "feature-extraction",
    "integration": "feature-extraction",
    "annotation": "tabular-classification",
    "multi_label": "tabular-classification",
    "regression": "tabular-regression",
}
"""A mapping from task to its name on the hub, which has no names for other tasks."""


@dataclass(frozen=True)
class Score:
    """A score of the model, with scores of the baselines.

    Attributes
    ----------
    benchmark, metric
        Names of the benchmark and the metric.
    value
        The score of the model.
    beside
        A mapping from baseline name to score.
    data
        Data set of the score; None if it is not in the table.
    """

    benchmark: str
    metric: str
    value: float
    beside: dict[str, float] = field(default_factory=dict)
    data: str | None = None


def is_long(table: pd.DataFrame) -> bool:
    """Return whether a table has one row per score, like the output of ``scforge evaluate -o`` for embeddings."""
    return {"benchmark", "method", "kind", "metric", "value"} <= set(table.columns)


def scores_of(metrics: Report | pd.DataFrame, *, prefix: str = "metrics") -> tuple[str, tuple[Score, ...]]:
    """Return a Markdown table of scores, and the scores of the model with baseline scores.

    Parameters
    ----------
    metrics
        A report, its :meth:`Report.to_frame`, or a table from :meth:`Encoder.evaluate` with one row per method, in
        which the row ``"scforge"`` is the model.
    prefix
        Prefix of error messages, which names the argument.

    Raises
    ------
    OptionError
        If the table has no baselines, or the row of the model is ambiguous.
    """
    import pandas as pd

    from scforge.eval.report import Report

    text, facts = "", {}
    if isinstance(metrics, Report):
        text, facts = _TITLE.sub(r"##\1 ", metrics.to_markdown()).strip(), metrics.facts
        metrics = metrics.to_frame()
    if not isinstance(metrics, pd.DataFrame):
        what = type(metrics).__name__
        raise OptionError(f"{prefix} is of type {what!r}; pass the table returned by evaluate().")
    tables = {"": metrics}
    if is_long(metrics):
        tables = {}
        for name, lines in metrics.assign(benchmark=metrics["benchmark"].fillna("")).groupby("benchmark", sort=False):
            table = lines.pivot_table(index="method", columns="metric", values="value", aggfunc="first", sort=False)
            models = list(lines.loc[lines["kind"].isin(["model", "supervised"]), "method"].unique())
            # A single model is the one of the card.
            tables[str(name)] = table.rename(index={models[0]: _MODEL}) if len(models) == 1 else table
    scores: list[Score] = []
    for benchmark, table in tables.items():
        names = [str(name) for name in table.index]
        if names.count(_MODEL) != 1 or len(names) < 2:
            raise OptionError(
                f"{prefix} must contain exactly one row named {_MODEL!r} for the model, and rows for baselines (rows: "
                f"{listing(names)})."
            )
        data = facts.get("data", facts.get(f"{benchmark}: data"))
        for metric, column in table.select_dtypes("floating").items():  # whole numbers count cells
            beside = dict(zip(names, map(float, column), strict=True))
            value = beside.pop(_MODEL)
            if math.isfinite(value):
                known = {name: figure for name, figure in beside.items() if math.isfinite(figure)}
                scores.append(Score(benchmark, str(metric), value, known, None if data is None else str(data)))
    return text or "\n\n".join(map(_markdown, tables.values())), tuple(scores)


def _markdown(table: pd.DataFrame) -> str:
    lines = [f"| method | {' | '.join(map(markdown, table.columns))} |", f"|{'---|' * (table.shape[1] + 1)}"]
    for name, row in zip(table.index, table.itertuples(index=False), strict=True):
        figures = (f"{value:.4g}" if isinstance(value, float) else markdown(value) for value in row)
        lines.append(f"| {markdown(name)} | {' | '.join(figures)} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Origin:
    """Locations from which the weights of a model can be loaded.

    Attributes
    ----------
    name, revision
        Repository on the hub or name in the registry, and the commit; None if unknown.
    folder
        Folder on this machine.
    n_epochs
        Number of epochs of the model at this location. After further training, the weights of the model differ.
    is_given
        Whether the name was passed for a single push and is therefore not saved.
    """

    name: str | None = None
    revision: str | None = None
    folder: Path | None = None
    n_epochs: int = 0
    is_given: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the name and revision as a dict."""
        return {"name": self.name, "revision": self.revision}

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | None) -> Origin | None:
        """Read the output of :meth:`to_json`, or return None if it is None."""
        return None if content is None else cls(content.get("name"), content.get("revision"))


@dataclass(frozen=True)
class CardFacts:
    """Facts of a model card that only a user can provide.

    Attributes
    ----------
    license
        Identifier, e.g. ``"apache-2.0"``, or name of the license.
    data
        Training data of the model.
    citation
        Citation of the model.
    table
        Scores of the model and the baselines, as Markdown.
    scores
        The same scores in machine-readable form.
    n_epochs
        Number of epochs of the model when the scores were given. After further training, the scores no longer apply.
    base
        The model before fine-tuning.
    checkpoint
        The published checkpoint from which the initial weights were loaded.
    """

    license: str | None = None
    data: tuple[str, ...] = ()
    citation: str | None = None
    table: str = ""
    scores: tuple[Score, ...] = ()
    n_epochs: int | None = None
    base: Origin | None = None
    checkpoint: str | None = None

    @classmethod
    def of_checkpoint(cls, found: Foreign) -> CardFacts:
        """Create facts from the family of a published checkpoint and the name of its file or folder."""
        family = " ".join(part for part in (found.family, found.version) if part)
        return cls(checkpoint=f"{family}, {Path(found.source).resolve().name}")

    def with_given(
        self,
        *,
        license: str | None = None,
        data: str | Sequence[str] | None = None,
        citation: str | None = None,
        metrics: Report | pd.DataFrame | None = None,
        n_epochs: int = 0,
    ) -> CardFacts:
        """Return a copy updated with the given facts.

        `n_epochs` is the number of epochs of the model whose scores are in `metrics`.
        """
        told = {"license": license, "citation": citation, "data": (data,) if isinstance(data, str) else data}
        changes: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
        changes["data"] = tuple(changes.get("data", self.data))
        if metrics is not None:
            changes["table"], changes["scores"] = scores_of(metrics)
            changes["n_epochs"] = n_epochs
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return the known facts as a JSON-safe dict."""
        content = {
            **asdict(self),
            "n_epochs": self.n_epochs if self.table else None,
            "base": None if self.base is None else self.base.to_json(),
        }
        return {name: value for name, value in content.items() if value not in (None, "", ())}

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | None, *, source: str) -> CardFacts:
        """Read the output of :meth:`to_json`."""
        if content is None:
            return cls()
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError as error:
            raise ModelFileError(f"the model card of {source!r} is invalid; copy the model again.") from error


def in_epochs(n_epochs: int) -> str:
    """Return a number of epochs as text."""
    return f"{n_epochs} epoch{'' if n_epochs == 1 else 's'}"


def card_data(spec: ModelSpec, facts: CardFacts, name: str | None, *, is_adapter: bool) -> Any:
    """Return the front matter of a model card."""
    from huggingface_hub import EvalResult, ModelCardData

    task = None if spec.tuning is None else spec.tuning.task
    more: dict[str, Any] = {}
    if facts.license is not None:
        is_identifier = re.fullmatch(r"[a-z0-9.-]+", facts.license.lower()) is not None
        more = {"license": facts.license.lower()} if is_identifier else {"license": "other"}
        more |= {} if is_identifier else {"license_name": facts.license}
    results = [
        EvalResult(
            task_type=score.benchmark or task or "embedding",
            dataset_type=re.sub(r"[^a-z0-9/]+", "-", (score.data or _UNKNOWN).lower()).strip("-") or "data",
            dataset_name=score.data or _UNKNOWN,
            metric_type=score.metric,
            # The hub has no field for baselines, so scores are not written into it without context.
            metric_name=score.metric + (f" (baselines: {shown(score.beside, '{:.3f}')})" if score.beside else ""),
            metric_value=score.value,
        )
        for score in facts.scores
    ]
    if facts.base is not None and _REPO.fullmatch(facts.base.name or ""):
        more |= {"base_model": facts.base.name, "base_model_relation": "adapter" if is_adapter else "finetune"}
    return ModelCardData(
        library_name="scforge",
        tags=["single-cell", "biology", spec.architecture, spec.objective, *([] if task is None else [task])],
        pipeline_tag=_PIPELINES.get(task),
        datasets=[one for one in facts.data if _REPO.fullmatch(one)] or None,
        model_name=(name or spec.architecture).rpartition("/")[2] if results else None,
        eval_results=results or None,
        **more,
    )


def shown(options: Mapping[str, Any], form: str = "{!r}") -> str:
    """Return options as ``name=value``, with the length of a long list instead of its values."""

    def short(value: Any) -> str:
        return f"[{len(value)} items]" if isinstance(value, list) and len(value) > 8 else form.format(value)

    return ", ".join(f"{name}={short(value)}" for name, value in options.items())
