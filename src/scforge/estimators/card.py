"""The model card: facts that only people know, scores of benchmarks, and the text of README.md."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scforge._version import __version__
from scforge.errors import ModelFileError, OptionError, listing
from scforge.estimators.spec import ModelSpec
from scforge.models._utils import count_parameters

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from scforge.eval.report import Report
    from scforge.foreign.base import Foreign


_MODEL = "scforge"
_TITLE = re.compile(r"^(#+) ", re.MULTILINE)
_LONG = frozenset({"benchmark", "method", "kind", "metric", "value", "lower_is_better"})
"""Columns of :meth:`Report.to_frame` that a table of one line a figure cannot do without."""
_OF_DATA = "data"


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
    data
        What it was measured on; None if the table does not say it.
    """

    benchmark: str
    metric: str
    value: float
    beside: dict[str, float] = field(default_factory=dict)
    data: str | None = None


def is_long(table: pd.DataFrame) -> bool:
    """Return whether a table has one line a figure, as ``scforge evaluate -o out.csv`` writes it for embeddings."""
    return {"method", "metric", "value"} <= set(table.columns)


def scores_of(metrics: Report | pd.DataFrame, *, said: str = "metrics") -> tuple[str, tuple[Score, ...]]:
    """Return figures as Markdown, and those of the model with those beside them.

    Parameters
    ----------
    metrics
        A report, its :meth:`Report.to_frame`, or a table as :meth:`Encoder.evaluate` returns it: one row a method, of
        which ``"scforge"`` is the model.
    said
        How the user named it, the beginning of a message.

    Raises
    ------
    OptionError
        If there are no baselines beside the model, or it is not clear which row is of the model.
    """
    import pandas as pd

    from scforge.eval.report import Report

    if isinstance(metrics, Report):
        return _of_report(metrics, said)
    if not isinstance(metrics, pd.DataFrame):
        what = type(metrics).__name__
        raise OptionError(f"{said} is a {what} that is no table of evaluate(); give what evaluate() returned.")
    if is_long(metrics):
        return _of_report(_report(metrics, said), said)
    names = [str(name) for name in metrics.index]
    if names.count(_MODEL) != 1:
        raise OptionError(
            f"{said} has {names.count(_MODEL)} rows called {_MODEL!r}, which is how evaluate() calls the model "
            f"(rows: {listing(names)}); name that of the model so."
        )
    if len(metrics) < 2:
        raise OptionError(
            f"{said} has no baselines beside the model, and figures of a model alone say little; give what "
            "evaluate(baselines=True) returned."
        )
    numeric = metrics.select_dtypes("floating")  # whole numbers count cells
    lines = [f"| method | {' | '.join(map(str, metrics.columns))} |", f"|{'---|' * (metrics.shape[1] + 1)}"]
    rows = zip(names, metrics.itertuples(index=False), strict=True)
    lines += [f"| {name} | {' | '.join(map(_score_shown, row))} |" for name, row in rows]
    scores = []
    for metric in numeric:
        figures = dict(zip(names, map(float, numeric[metric]), strict=True))
        value = figures.pop(_MODEL)
        if math.isfinite(value):
            scores.append(Score("", str(metric), value, _finite(figures)))
    return "\n".join(lines), tuple(scores)


def _report(table: pd.DataFrame, said: str) -> Report:
    """Return the report whose lines a table has, as far as they say it."""
    from scforge.eval.base import BENCHMARKS
    from scforge.eval.report import KINDS, Comparison, Measured, Report, Row

    if missing := sorted(_LONG - set(table.columns)):
        raise OptionError(
            f"{said} lacks the column {missing[0]!r}; give the table that scforge evaluate -o out.csv wrote."
        )
    texts = ["benchmark", "method", "kind", "metric"]
    table = table.assign(**{name: table[name].fillna("").astype(str) for name in texts})
    if wrong := sorted(set(table["kind"]) - set(KINDS)):
        raise OptionError(f"{said} has a row of the kind {wrong[0]!r}, which is none of {listing(KINDS)}.")
    report = Report("Figures")
    less: dict[str, set[str]] = {}
    for line in table.to_dict("records"):
        name, benchmark, metric = line["method"], line["benchmark"], line["metric"]
        row = next((row for row in report.of(benchmark) if row.name == name), None)
        if row is None:
            row = Row(name, line["kind"], {}, benchmark=benchmark)
            report.add(row)
        try:
            row.scores[metric] = float(line["value"])
            row.intervals[metric] = (float(line.get("low", math.nan)), float(line.get("high", math.nan)))
            row.spreads[metric] = float(line.get("sd_seeds", math.nan))
            compared = ("difference", "difference_low", "difference_high", "p_value")
            gain, low, high, p_value = (float(line.get(column, math.nan)) for column in compared)
            if isinstance(beside := line.get("best_baseline"), str) and beside:
                row.comparisons[metric] = Comparison(beside, gain, low, high, p_value)
        except (TypeError, ValueError) as error:
            raise OptionError(f"{said} has a figure of {name!r} in {metric!r} that is no number; mend it.") from error
        if str(line["lower_is_better"]) == "True":
            less.setdefault(benchmark, set()).add(metric)
    for benchmark in report.benchmarks:
        about, lower = report.about(benchmark), frozenset(less.get(benchmark, ()))
        known = BENCHMARKS.get(benchmark) if benchmark in BENCHMARKS.names() else None
        main = known.main if known is not None and known.main in about.metrics else about.main
        ranks = True if known is None else known.ranks
        report.measured[benchmark] = Measured(about.metrics, main, lower, ranks)
    return report


def _of_report(report: Report, said: str) -> tuple[str, tuple[Score, ...]]:
    try:
        report.check()
    except OptionError as error:
        raise OptionError(f"{said}: {error}") from error
    scores: list[Score] = []
    for benchmark in report.benchmarks:
        rows = report.of(benchmark)
        models = [row for row in rows if row.kind in ("model", "supervised")]
        mine = [row for row in models if row.name == _MODEL] or models
        if len(mine) != 1:
            raise OptionError(
                f"{said} has {len(mine)} models in {benchmark or report.title!r}; give the report of this model alone."
            )
        main = report.about(benchmark).main
        value = mine[0].scores.get(main, math.nan)
        beside = {row.name: row.scores.get(main, math.nan) for row in rows if row is not mine[0]}
        data = report.facts.get(_OF_DATA, report.facts.get(f"{benchmark}: {_OF_DATA}"))
        if math.isfinite(value):
            scores.append(Score(benchmark, main, float(value), _finite(beside), None if data is None else str(data)))
    if not scores:
        raise OptionError(f"{said} has no figure of the model; give what evaluate() returned.")
    return _TITLE.sub(r"##\1 ", report.to_markdown()).strip(), tuple(scores)


def _finite(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}


def _score_shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
    is_given
        Whether somebody gave the name for one push; it counts there, and is not kept.
    """

    name: str | None = None
    revision: str | None = None
    folder: Path | None = None
    n_epochs: int = 0
    is_given: bool = False

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
class CardFacts:
    """What a card says and a model cannot know by itself.

    Attributes
    ----------
    license
        Identifier, e.g. ``"apache-2.0"``, or name of the license.
    data
        What the model was trained on.
    citation
        How to cite it.
    table
        Figures beside baselines, as Markdown.
    scores
        The same for machines.
    n_epochs
        Epochs that the model had been trained for when the figures were given: with more of them they are not its own.
    base
        The model before fine-tuning.
    checkpoint
        The published checkpoint that the first weights are from.
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
        """Return what is known of a published checkpoint: its family, and how its file or folder is called."""
        family = " ".join(part for part in (found.family, found.version) if part)
        return cls(checkpoint=f"{family}, `{Path(found.source).resolve().name}`")

    def with_given(
        self,
        *,
        license: str | None = None,
        data: str | Sequence[str] | None = None,
        citation: str | None = None,
        metrics: Report | pd.DataFrame | None = None,
        n_epochs: int = 0,
    ) -> CardFacts:
        """Return the same, with what was given in the place of what was known.

        `n_epochs` is how long the model that `metrics` are of has been trained.

        Raises
        ------
        OptionError
            If something is no text, or `metrics` has no baselines.
        """
        changes: dict[str, Any] = {}
        for name, value in (("license", license), ("citation", citation)):
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
            changes["n_epochs"] = n_epochs
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return all of it, JSON-safe; without what is not known."""
        content = {
            "license": self.license,
            "data": list(self.data),
            "citation": self.citation,
            "table": self.table,
            "scores": [vars(score) for score in self.scores],
            "n_epochs": self.n_epochs if self.table else None,
            "base": None if self.base is None else self.base.to_json(),
            "checkpoint": self.checkpoint,
        }
        return {name: value for name, value in content.items() if value not in (None, "", [])}

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
                license=content.get("license"),
                data=tuple(content.get("data", ())),
                citation=content.get("citation"),
                table=content.get("table", ""),
                scores=scores,
                n_epochs=content.get("n_epochs"),
                base=Origin.from_json(content.get("base"), source=source),
                checkpoint=content.get("checkpoint"),
            )
        except (AttributeError, TypeError) as error:
            raise ModelFileError(f"the card in the description of {source!r} cannot be read; copy it again.") from error
        told = (facts.license, facts.citation, facts.checkpoint, *(score.data for score in scores))
        texts = (facts.table, *facts.data, *(one for one in told if one is not None))
        figures = [figure for score in scores for figure in (score.value, *score.beside.values())]
        fits = all(isinstance(one, str) for one in texts) and all(isinstance(one, int | float) for one in figures)
        if not fits or not isinstance(facts.n_epochs, int | None):
            raise ModelFileError(f"the card in the description of {source!r} cannot be read; copy it again.")
        return facts


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


_SHOWN = 8
_MARK = "<!-- Written by scforge ({}). -->\n"
"""Last line of a card, with a checksum of all above it: a card that somebody has edited is not replaced."""
_UNKNOWN = "not stated"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_LICENSES = re.compile(
    "afl-3.0|agpl-3.0|apache-2.0|artistic-2.0|bigscience-openrail-m|bsd|bsd-2-clause|bsd-3-clause|bsd-3-clause-clear|"
    "bsl-1.0|c-uda|cc|cc-by-(nc-)?(2.0|2.5|3.0|4.0)|cc-by-(nc-)?(nd|sa)-[34].0|cc0-1.0|ecl-2.0|epl-[12].0|eupl-1.1|gfdl|"
    "gpl|gpl-[23].0|isc|lgpl|lgpl-2.1|lgpl-3.0|lppl-1.3c|mit|mpl-2.0|ms-pl|ncsa|odbl|odc-by|ofl-1.1|openrail|osl-3.0|"
    "pddl|postgresql|unlicense|wtfpl|zlib".replace(".", r"\.")
)
"""Identifiers that the hub knows; another license is called ``other`` there, and named beside."""

_PIPELINES = {
    None: "feature-extraction",
    "integration": "feature-extraction",
    "annotation": "tabular-classification",
    "multi_label": "tabular-classification",
    "regression": "tabular-regression",
}
"""Task to what the hub calls such models; for other tasks it has no word."""

_NO_LICENSE = "None is stated, so nobody but the authors may use it freely."

_CARD = """---
{front}---

# {title}

{summary}

## Use

```python
import scforge

model = scforge.models.Encoder.load({place}){here}
model.get_latent_representation(adata)  # writes adata.obsm["X_scforge"]{predict}
```
{needs_base}
## Data

{data}

## Preprocessing

`adata` needs raw counts; nothing else is to be done before. Genes are matched by name with the {n_genes:,} {kind} in
`vocab.json` (release: {release}), in any order; others are left out, and too few of them are an error. Then the
tokenizer `{tokenizer}` makes tokens of each cell.

- Its options: {tokenizer_options}

## Training

{trained}.

- Objective: {objective_options}
- Architecture: {model_options}
- Last epoch: {figures}

## Figures

{figures_table}

## Limits

- The embedding of cells of another species, tissue or technology than those of the training can mean little. Compare
  with simple baselines on your own cells: `scforge.workflows.evaluate_models(model, adata)`.
- It is made for research; no figure here says that it is fit for diagnosis or treatment.
{limits}
## License

{license}

## Citation

{citation}
"""


def model_card(
    spec: ModelSpec,
    *,
    n_epochs: int,
    parameters: int,
    is_trained: bool = True,
    last_figures: Mapping[str, float] | None = None,
    facts: CardFacts | None = None,
    name: str | None = None,
    is_adapter: bool = False,
) -> str:
    """Return the text of ``README.md`` in a model folder: front matter that hubs read, and words for people.

    Parameters
    ----------
    spec
        What the model is made of.
    n_epochs, parameters
        Epochs that it was trained for here, and number of its weights (of adapters and head where these are alone).
    is_trained
        Whether it is trained, here or elsewhere.
    last_figures
        Losses of the last epoch.
    facts
        What somebody has told of the model.
    name
        How others load it; None for the folder that the card is in.
    is_adapter
        Whether the folder has the adapters alone.
    """
    facts = CardFacts() if facts is None else facts
    tuning, base = spec.tuning, facts.base
    before = n_epochs if tuning is None else tuning.base.get("n_epochs", 0)
    trained = f"{_epochs(before)} of the objective `{spec.objective}` on the architecture `{spec.architecture}`"
    if facts.checkpoint is not None or (tuning is None and is_trained and not n_epochs):
        source = "by whom is not known" if facts.checkpoint is None else facts.checkpoint
        trained = f"Trained elsewhere ({source})" + (f", then {trained}" if before else "")
    predict = needs_base = ""
    if tuning is not None:
        lora = "" if tuning.lora is None else f", with low-rank adapters (r={tuning.lora['r']})"
        of = "" if base is None else f" (`{base.name}`" + (f" at `{base.revision}`)" if base.revision else ")")
        trained += f"{of}, then {_epochs(n_epochs)} of the task `{tuning.task}`{lora}"
        predict = "\nmodel.predict(adata)"
    if is_adapter:
        needs_base = (
            "\nThis repository has adapters and a head only. The model that they sit on is loaded with them"
            + ("" if base is None else f", from `{base.name}`")
            + "; `base=` takes another place of the same weights.\n"
        )
    what = "Adapters for a single-cell model" if is_adapter else "A single-cell model"
    losses = {key: value for key, value in (last_figures or {}).items() if "loss" in key}
    shown = _shown(losses, "{:.4g}")
    text = _CARD.format(
        front=_front_matter(spec, facts, name, is_adapter=is_adapter),
        title=spec.architecture if name is None else name.rpartition("/")[2],
        summary=f"{what} ({spec.architecture}, {parameters:,} parameters), made with scforge {__version__}.",
        place='"path/to/folder"' if name is None else f'"{name}"',
        here="  # the folder that this file is in" if name is None else "",
        predict=predict,
        needs_base=needs_base,
        data=", ".join(facts.data) if facts.data else "Nobody has stated what it was trained on.",
        n_genes=spec.vocab.n_genes,
        kind=spec.vocab.kind,
        release=spec.vocab.release,
        tokenizer=spec.tokenizer,
        tokenizer_options=_shown(spec.tokenizer_options),
        figures=shown or "not known",
        objective_options=_shown(spec.objective_options) or "no options",
        model_options=_shown(spec.model_options),
        trained=trained,
        figures_table=facts.table or "Nobody has stated any. Figures without baselines beside them would say little.",
        limits="" if is_trained else "- It is not trained: its weights are random.\n",
        license=f"{facts.license}." if facts.license else _NO_LICENSE,
        citation=facts.citation or "None is stated.",
    )
    return text + _MARK.format(_digest(text))


def is_own_card(text: str) -> bool:
    """Return whether a card is one of :func:`model_card` that nobody has edited."""
    *above, last = text.splitlines(keepends=True) or [""]
    return last == _MARK.format(_digest("".join(above)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _epochs(n_epochs: int) -> str:
    return f"{n_epochs} epoch{'' if n_epochs == 1 else 's'}"


def _front_matter(spec: ModelSpec, facts: CardFacts, name: str | None, *, is_adapter: bool) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    task = None if spec.tuning is None else spec.tuning.task
    license: dict[str, Any] = {}
    if facts.license is not None:
        known = _LICENSES.fullmatch(facts.license.lower()) is not None
        license = {"license": facts.license.lower()} if known else {"license": "other", "license_name": facts.license}
    results = [
        EvalResult(
            task_type=score.benchmark or task or "embedding",
            dataset_type=re.sub(r"[^a-z0-9/]+", "-", (score.data or _UNKNOWN).lower()).strip("-") or "data",
            dataset_name=score.data or _UNKNOWN,
            metric_type=score.metric,
            # The hub has no place for baselines; without them the figure would stand alone.
            metric_name=score.metric + (f" (beside {_shown(score.beside, '{:.3f}')})" if score.beside else ""),
            metric_value=score.value,
        )
        for score in facts.scores
    ]
    on_hub = facts.base is not None and _REPO.fullmatch(facts.base.name or "") is not None
    more: dict[str, Any] = {}
    if on_hub and facts.base is not None:
        more = {"base_model": facts.base.name, "base_model_relation": "adapter" if is_adapter else "finetune"}
    found = ModelCardData(
        library_name="scforge",
        tags=["single-cell", "biology", spec.architecture, spec.objective, *([] if task is None else [task])],
        pipeline_tag=_PIPELINES.get(task),
        datasets=[one for one in facts.data if _REPO.fullmatch(one)] or None,
        model_name=(name or spec.architecture).rpartition("/")[2] if results else None,
        eval_results=results or None,
        **license,
        **more,
    )
    return found.to_yaml() + "\n"


def provenance(spec: ModelSpec, *, n_epochs: int, is_trained: bool) -> dict[str, Any]:
    """Return what describes a model beside what it made, as scalars that h5ad can hold."""
    return {
        "scforge_version": __version__,
        "architecture": spec.architecture,
        "tokenizer": spec.tokenizer,
        "objective": spec.objective,
        **({} if spec.tuning is None else {"task": spec.tuning.task}),
        "n_epochs": n_epochs,
        "is_trained": is_trained,
        "vocab_hash": spec.vocab.hash,
    }


def described(
    name: str, spec: ModelSpec, module: nn.Module, *, n_epochs: int | None, cells: str, checkpoint: str | None = None
) -> tuple[str, dict[str, str]]:
    """Return what a model of the class `name` shows of itself: a heading, and facts by name.

    `n_epochs` is None where it is not trained. `checkpoint` is the published one that its first weights are from.
    """
    trained = "not trained" if n_epochs is None else f"trained for {_epochs(n_epochs)}"
    if checkpoint is not None:
        trained = f"weights of {checkpoint.replace('`', '')}" + (f", {trained}" if n_epochs else "")
    n_all, n_trained = count_parameters(module, trainable_only=False), count_parameters(module)
    frozen = "" if n_all == n_trained else f", {n_trained:,} of them trained"
    facts = {
        "data": f"{cells}, {spec.vocab}",
        "tokenizer": f"{spec.tokenizer} ({_shown(spec.tokenizer_options)})",
        "objective": f"{spec.objective} ({_shown(spec.objective_options)})",
        "options": _shown(spec.model_options),
    }
    if spec.tuning is not None:
        facts["task"] = f"{spec.tuning.task} ({_shown(spec.tuning.task_options)})"
        if spec.tuning.lora is not None:
            facts["lora"] = _shown(spec.tuning.lora)
    return f"{name}({spec.architecture}, {n_all:,} parameters{frozen}, {trained})", facts


def _shown(options: Mapping[str, Any], form: str = "{!r}") -> str:
    def short(value: Any) -> str:
        return f"[{len(value)} items]" if isinstance(value, list) and len(value) > _SHOWN else form.format(value)

    return ", ".join(f"{name}={short(value)}" for name, value in options.items())
