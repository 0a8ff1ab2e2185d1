"""Distances between groups of cells: predicted and measured ones of the same perturbation.

Shapes: N and M cells, D coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from scforge.errors import DataError, OptionError, listing
from scforge.eval.perturbation_cells import EffectKeys, PerturbedCells

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["distances", "energy_distance", "mean_distance"]

_BLOCK = 1 << 24
"""Distances that are held at once."""


def mean_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean Euclidean distance between all pairs of rows of two arrays, shapes (N, D) and (M, D)."""
    from scipy.spatial.distance import cdist

    rows = max(1, _BLOCK // max(len(other), 1))
    total = sum(float(cdist(one[start : start + rows], other).sum()) for start in range(0, len(one), rows))
    return total / (len(one) * len(other))


def energy_distance(
    one: np.ndarray,
    other: np.ndarray,
    *,
    within: tuple[float | None, float | None] = (None, None),
    unbiased: bool = False,
) -> float:
    """Return the energy distance between two groups of cells.

    With x, x' of the one group and y, y' of the other, ``2 E|x - y| - E|x - x'| - E|y - y'|`` with Euclidean distances,
    means over all pairs, each cell with itself among them (Szekely and Rizzo 2013; the E-distance of Peidli et al., Nat
    Methods 2024, takes squared distances). This is ``edistance`` of pertpy. It is 0 for the same cells, and positive
    for two samples of the same distribution, the more so the fewer cells there are.

    Parameters
    ----------
    one, other
        Coordinates, shapes (N, D) and (M, D).
    within
        The mean distances within each group, each cell with itself among them, where they are known.
    unbiased
        Leave the distance of each cell to itself out: 0 on average for two samples of the same distribution, however
        few cells there are, and NaN for a group of one cell.

    Returns
    -------
    The distance, in the unit of the coordinates.

    Raises
    ------
    DataError
        If a group is empty or has other coordinates than the other.

    Examples
    --------
    >>> energy_distance(np.zeros((3, 2)), np.ones((4, 2)) * [3.0, 4.0])
    10.0
    """
    one, other = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if not len(one) or not len(other) or one.shape[1:] != other.shape[1:]:
        raise DataError(
            f"the groups have the shapes {one.shape} and {other.shape}; give cells with the same coordinates."
        )
    first, second = (
        mean_distance(group, group) if known is None else known
        for group, known in zip((one, other), within, strict=True)
    )
    if unbiased:
        if min(len(one), len(other)) < 2:
            return float("nan")
        first, second = first * len(one) / (len(one) - 1), second * len(other) / (len(other) - 1)
    return 2 * mean_distance(one, other) - first - second


def distances(
    real: AnnData,
    predictions: AnnData | Mapping[str, AnnData],
    *,
    perturbation_key: str,
    control: str,
    context_key: str | None = None,
    separator: str | None = "+",
    metric: str = "edistance",
    obsm_key: str | None = None,
    layer: str | None = None,
) -> pd.DataFrame:
    """Return how far predicted cells are from the measured ones of the same perturbation, by pertpy.

    Parameters
    ----------
    real
        Measured cells, with controls.
    predictions
        Predicted cells; several by name.
    perturbation_key, control, context_key, separator
        Columns of obs, as for :func:`evaluate_perturbations`.
    metric
        Name of a distance of :class:`pertpy.tl.Distance`, e.g. ``"edistance"``, ``"mmd"`` or ``"wasserstein"``.
    obsm_key
        Coordinates in obsm, e.g. an embedding of all cells by the same model; None takes log1p CP10K over the genes
        that all have, which is slow for distances between cells.
    layer
        Key in layers with counts or log1p CP10K; None reads X.

    Returns
    -------
    One row for each method and effect: ``method``, ``perturbation``, ``context`` and ``distance``. The method
    ``"control"``, what controls are away, is the baseline: a prediction that is not nearer has learnt nothing.

    Raises
    ------
    OptionError
        If pertpy does not know the metric.
    DataError
        If coordinates are missing, or an effect is not predicted.

    Examples
    --------
    >>> import anndata
    >>> def experiment(seed, genes):
    ...     names = np.repeat(["control", *(f"gene{gene}" for gene in genes)], 30)
    ...     counts = np.random.default_rng(seed).poisson(5.0, size=(len(names), 20)).astype("float32")
    ...     for number, gene in enumerate(genes, start=1):
    ...         counts[30 * number : 30 * (number + 1), gene] *= 3
    ...     obs = pd.DataFrame({"target": names}, index=[f"{seed}-{i}" for i in range(len(names))])
    ...     return anndata.AnnData(counts, obs, pd.DataFrame(index=[f"gene{i}" for i in range(20)]))
    >>> keys = {"perturbation_key": "target", "control": "control"}
    >>> table = distances(experiment(0, [3]), experiment(1, [3]), **keys)
    >>> table.sort_values("distance")["method"].tolist()
    ['prediction', 'control']
    """
    from pertpy.tools import Distance

    try:
        away: Callable[[np.ndarray, np.ndarray], float] = Distance(cast("Any", metric), obsm_key="coordinates")
    except ValueError as error:
        raise OptionError(
            f"metric={metric!r} is no distance of pertpy; see pertpy.tl.Distance for its names."
        ) from error
    keys = EffectKeys(perturbation_key, control, context_key, separator, layer)
    named = dict(predictions) if isinstance(predictions, Mapping) else {"prediction": predictions}
    measured = PerturbedCells.read(real, keys, argument="real")
    made = {name: PerturbedCells.read(adata, keys, argument=name, made=True) for name, adata in named.items()}
    if obsm_key is None:
        genes = measured.genes
        for cells in made.values():
            genes = genes[genes.isin(cells.genes)]
        if not len(genes):
            raise DataError(
                "the predicted and the measured cells have no gene in common; use the same names in var_names."
            )
        of_real = measured.over(genes, argument="real").expression.toarray()
        of_made = {name: cells.over(genes, argument=name).expression.toarray() for name, cells in made.items()}
    else:
        of_real = _coordinates(real, obsm_key, "real")
        of_made = {name: _coordinates(adata, obsm_key, name) for name, adata in named.items()}
    rows = []
    for number, effect in enumerate(measured.effects):
        target = of_real[measured.groups == number]
        plain = of_real[measured.groups == measured.controls[number]]
        if not len(plain):
            raise DataError(
                f"real has no control cell in the context {effect.context!r}; add controls of its own there."
            )
        found = {"control": plain}
        for name, cells in made.items():
            if effect not in cells.effects:
                raise DataError(
                    f"{name} lacks {keys.name_of(effect.targets)!r} (context {effect.context!r}); predict it, "
                    "or leave it out of the measured cells."
                )
            found[name] = of_made[name][cells.groups == cells.effects.index(effect)]
        rows += [
            (name, keys.name_of(effect.targets), effect.context, float(away(group, target)))
            for name, group in found.items()
        ]
    return pd.DataFrame(rows, columns=["method", "perturbation", "context", "distance"])


def _coordinates(adata: AnnData, obsm_key: str, argument: str) -> np.ndarray:
    if obsm_key not in adata.obsm:
        raise DataError(f"obsm_key={obsm_key!r} is not in {argument}.obsm ({listing(adata.obsm)}); compute it first.")
    return np.asarray(adata.obsm[obsm_key], dtype=np.float64)
