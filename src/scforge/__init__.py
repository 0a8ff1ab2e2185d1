"""scforge: train, fine-tune and evaluate single-cell foundation models on AnnData.

>>> import scforge
>>> adata = scforge.datasets.pbmc3k()
>>> adata.shape[0]
2700
"""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    name: f"scforge.{name}"
    for name in (
        "config",
        "data",
        "datasets",
        "errors",
        "estimators",
        "eval",
        "finetuning",
        "foreign",
        "hub",
        "insilico",
        "models",
        "perturbation",
        "pl",
        "soma",
        "testing",
        "tokenizers",
        "training",
        "workflows",
    )
}
_NAMES["annotate"] = "scforge.estimators.annotation"

__all__ = [
    "__version__",
    "annotate",
    "config",
    "data",
    "datasets",
    "errors",
    "estimators",
    "eval",
    "finetuning",
    "foreign",
    "hub",
    "insilico",
    "models",
    "perturbation",
    "pl",
    "soma",
    "testing",
    "tokenizers",
    "training",
    "workflows",
]

__getattr__, __dir__ = lazy_names(__name__, {**_NAMES, "__version__": "scforge._version"})
