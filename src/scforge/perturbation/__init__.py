"""Effects of perturbations: reading, baselines, metrics and the fine-tuned predictor."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "PerturbationKeys": "scforge.perturbation.keys",
    "parse_perturbations": "scforge.perturbation.keys",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
