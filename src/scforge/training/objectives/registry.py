"""The registry of objectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scforge._registry import Registry, check_options

if TYPE_CHECKING:
    from scforge.training.objectives.base import Objective

__all__ = ["OBJECTIVES", "get_objective", "list_objectives", "register_objective"]

OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective",
    group="scforge.objectives",
    builtin={
        "joint_embedding": "scforge.training.objectives.joint_embedding",
        "masked_diffusion": "scforge.training.objectives.masked_diffusion",
        "masked_gene_prediction": "scforge.training.objectives.masked_gene_prediction",
        "masked_value_prediction": "scforge.training.objectives.masked_value_prediction",
        "neighbor_denoising": "scforge.training.objectives.neighbor_denoising",
        "next_gene_prediction": "scforge.training.objectives.next_gene_prediction",
        "variational": "scforge.training.objectives.variational",
    },
    base="scforge.training.Objective",
)


def register_objective(name: str) -> Callable[[Any], Any]:
    """Register an :class:`~scforge.training.Objective` class as `name` (class decorator).

    Parameters
    ----------
    name
        Registry key, e.g. ``"my_objective"``.

    Returns
    -------
    The decorator.

    Raises
    ------
    OptionError
        If `name` belongs to another class.

    Examples
    --------
    >>> from scforge.training import MaskedGenePrediction
    >>> @register_objective("half_masked")
    ... class HalfMasked(MaskedGenePrediction):
    ...     def __init__(self, *, mask_ratio=0.5):
    ...         super().__init__(mask_ratio=mask_ratio)
    >>> get_objective("half_masked").mask_ratio
    0.5
    """
    return OBJECTIVES.register(name)


def list_objectives() -> list[str]:
    """Return the names of all objectives.

    Returns
    -------
    Names that :func:`get_objective` and ``Encoder(objective=...)`` take, sorted.

    Examples
    --------
    >>> list_objectives()  # doctest: +ELLIPSIS
    ['joint_embedding', 'masked_diffusion', ..., 'next_gene_prediction', 'variational']
    """
    return OBJECTIVES.names()


def get_objective(name: str, **options: Any) -> Objective:
    """Make the objective registered as `name`.

    Parameters
    ----------
    name
        Registry key, e.g. ``"joint_embedding"``.
    **options
        Options of its constructor.

    Returns
    -------
    The objective.

    Raises
    ------
    OptionError
        If the name, or an option, is unknown.

    Examples
    --------
    >>> get_objective("masked_gene_prediction", mask_ratio=0.3).mask_ratio
    0.3
    """
    cls = OBJECTIVES.get(name)
    check_options("objective option", name, options, cls.option_names())
    return cls(**options)
