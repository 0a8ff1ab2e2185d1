"""What a model says of itself: its card, which lies beside the weights, and its representation."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scforge._version import __version__
from scforge.estimators.card_facts import CardFacts
from scforge.estimators.spec import ModelSpec
from scforge.models._utils import count_parameters

if TYPE_CHECKING:
    from torch import nn


_SHOWN = 8
_MARK = "<!-- Written by scforge ({}). -->\n"
"""Last line of a card, with a checksum of all above it: a card that somebody has edited is not replaced."""
_UNKNOWN = "not stated"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_LICENCES = re.compile(
    "afl-3.0|agpl-3.0|apache-2.0|artistic-2.0|bigscience-openrail-m|bsd|bsd-2-clause|bsd-3-clause|bsd-3-clause-clear|"
    "bsl-1.0|c-uda|cc|cc-by-(nc-)?(2.0|2.5|3.0|4.0)|cc-by-(nc-)?(nd|sa)-[34].0|cc0-1.0|ecl-2.0|epl-[12].0|eupl-1.1|gfdl|"
    "gpl|gpl-[23].0|isc|lgpl|lgpl-2.1|lgpl-3.0|lppl-1.3c|mit|mpl-2.0|ms-pl|ncsa|odbl|odc-by|ofl-1.1|openrail|osl-3.0|"
    "pddl|postgresql|unlicense|wtfpl|zlib".replace(".", r"\.")
)
"""Identifiers that the hub knows; another licence is called ``other`` there, and named beside."""

_PIPELINES = {
    None: "feature-extraction",
    "integration": "feature-extraction",
    "annotation": "tabular-classification",
    "multi_label": "tabular-classification",
    "regression": "tabular-regression",
}
"""Task to what the hub calls such models; for other tasks it has no word."""

_NO_LICENCE = "None is stated, so nobody but the authors may use it freely."

_CARD = """---
{front}---

# {title}

{summary}

## Use

```python
import scforge

model = scforge.models.Encoder.from_pretrained({place}){here}
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
  with simple baselines on your own cells: `model.evaluate(adata)`.
- It is made for research; no figure here says that it is fit for diagnosis or treatment.
{limits}
## Licence

{licence}

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
        licence=f"{facts.licence}." if facts.licence else _NO_LICENCE,
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
    licence: dict[str, Any] = {}
    if facts.licence is not None:
        known = _LICENCES.fullmatch(facts.licence.lower()) is not None
        licence = {"license": facts.licence.lower()} if known else {"license": "other", "license_name": facts.licence}
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
        **licence,
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
