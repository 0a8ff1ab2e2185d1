"""What a model says of itself: its card, which lies beside the weights, and its representation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scforge._version import __version__
from scforge.estimators.spec import ModelSpec
from scforge.models._utils import count_parameters

if TYPE_CHECKING:
    from torch import nn

__all__ = ["described", "model_card", "provenance"]

_SHOWN = 8
_CARD = """---
library_name: scforge
tags: [single-cell, {architecture}]
---

# {architecture}, {parameters:,} parameters

Made with scforge {version}. Trained for {n_epochs} epochs with the objective `{objective}` on tokens of the strategy
`{tokenizer}` over {n_genes:,} genes ({kind}, {release}).{tuned}

```python
import scforge

model = scforge.models.Encoder.load("this folder")
model.get_latent_representation(adata)  # writes adata.obsm["X_scforge"]{predict}
```

`adata` needs raw counts. Its genes are matched by name with those of `vocab.json`.
"""


def model_card(spec: ModelSpec, n_epochs: int, parameters: int) -> str:
    """Return the text of ``README.md`` in a model folder."""
    tuned = predict = ""
    if spec.tuning is not None:
        how = "" if spec.tuning.lora is None else f" with low-rank adapters (r={spec.tuning.lora['r']})"
        before = spec.tuning.base.get("n_epochs", 0)
        tuned = f"\nThose epochs fine-tuned it for the task `{spec.tuning.task}`{how}, after {before} of pretraining."
        predict = "\nmodel.predict(adata)"
    return _CARD.format(
        tuned=tuned,
        predict=predict,
        architecture=spec.architecture,
        parameters=parameters,
        version=__version__,
        n_epochs=n_epochs,
        objective=spec.objective,
        tokenizer=spec.tokenizer,
        n_genes=spec.vocab.n_genes,
        kind=spec.vocab.kind,
        release=spec.vocab.release,
    )


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


def described(name: str, spec: ModelSpec, module: nn.Module, *, n_epochs: int | None, cells: str) -> str:
    """Return what a model of the class `name` shows of itself; `n_epochs` is None where it is not trained."""
    trained = "not trained" if n_epochs is None else f"trained for {n_epochs} epoch{'s' if n_epochs != 1 else ''}"
    n_all, n_trained = count_parameters(module, trainable_only=False), count_parameters(module)
    frozen = "" if n_all == n_trained else f", {n_trained:,} of them trained"
    lines = [
        f"{name}({spec.architecture}, {n_all:,} parameters{frozen}, {trained})",
        f"    data: {cells}, {spec.vocab}",
        f"    tokenizer: {spec.tokenizer} ({_shown(spec.tokenizer_options)})",
        f"    objective: {spec.objective} ({_shown(spec.objective_options)})",
        f"    options: {_shown(spec.model_options)}",
    ]
    if spec.tuning is not None:
        lines.append(f"    task: {spec.tuning.task} ({_shown(spec.tuning.task_options)})")
        if spec.tuning.lora is not None:
            lines.append(f"    lora: {_shown(spec.tuning.lora)}")
    return "\n".join(lines)


def _shown(options: dict[str, Any]) -> str:
    short = {k: f"[{len(v)} items]" if isinstance(v, list) and len(v) > _SHOWN else repr(v) for k, v in options.items()}
    return ", ".join(f"{name}={value}" for name, value in short.items())
