"""Whether an embedding uses its dimensions or has collapsed.

Shapes: N cells, D dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pandas as pd

from scforge.errors import DataError
from scforge.eval.base import Benchmark, register_benchmark
from scforge.eval.label_prediction import check_embedding

__all__ = ["Geometry", "is_collapsed"]

_CONSTANT = 1e-6
"""A dimension that varies by less than this share of the size of the embedding does not vary."""
_FEWEST_RANKS, _MOST_COSINE, _MOST_CONSTANT = 2.0, 0.99, 0.9


@register_benchmark("geometry")
class Geometry(Benchmark):
    """Effective rank, mean cosine and share of the first component: figures in which a collapse shows.

    They need no labels, and say nothing of what an embedding knows: noise has a higher effective rank than any
    embedding of cells. So no intervals are computed, and nothing is tested.

    ``effective_rank``
        exp of the entropy of the singular values divided by their sum [1]_, of the embedding as it is, not centred, as
        in RankMe [2]_; from 1, where all cells lie on one line through the origin, to D. 0 if all values are zero.
    ``mean_cosine``
        Mean cosine of all pairs of different cells: (S - N) / (N (N - 1)), where S is the squared length of the sum
        of the unit vectors of the cells. 1 if all point the same way. Cells at the origin are left out.
    ``top_component_share``
        Share of the variance along the first principal component; 1 if nothing varies.
    ``constant_dims``
        Share of the dimensions whose standard deviation is less than 1e-6 of the root mean square of all values.

    References
    ----------
    .. [1] Roy and Vetterli (2007), EUSIPCO, 606-610.
    .. [2] Garrido et al. (2023), ICML, arXiv:2210.02885; its epsilon is left out.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> embedding = np.random.default_rng(0).normal(size=(500, 10))
    >>> scores = Geometry().run(embedding, pd.DataFrame(index=range(500)))
    >>> round(scores["effective_rank"]), scores["constant_dims"], is_collapsed(scores)
    (10, 0.0, False)
    >>> is_collapsed(Geometry().run(embedding + 100, pd.DataFrame(index=range(500))))
    True
    """

    metrics = ("effective_rank", "mean_cosine", "top_component_share", "constant_dims")
    ranks = False
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"mean_cosine", "top_component_share", "constant_dims"})

    def check(self, obs: pd.DataFrame) -> None:
        """Raise :class:`~scforge.errors.DataError` if there are fewer than two cells."""
        if len(obs) < 2:
            raise DataError(f"geometry needs at least 2 cells, but there are {len(obs)}; score more cells.")

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return one figure for each of :attr:`metrics`.

        ``mean_cosine`` is NaN if fewer than two cells have a direction.

        Raises
        ------
        DataError
            If there are fewer than two cells, or the embedding is not finite or not one of these cells.
        """
        self.check(obs)
        cells = check_embedding(embedding, len(obs)).astype(np.float64)
        centred = cells - cells.mean(axis=0)
        deviations, size = centred.std(axis=0), np.sqrt(np.mean(cells**2))
        variances = _spectrum(centred)
        # Rounding leaves a little variance even where all rows are the same.
        varies = deviations.max() > _CONSTANT * size
        return {
            "effective_rank": _effective_rank(np.sqrt(_spectrum(cells))),
            "mean_cosine": _mean_cosine(cells),
            "top_component_share": float(variances.max() / variances.sum()) if varies else 1.0,
            "constant_dims": float(np.mean(deviations <= _CONSTANT * size)),
        }

    def resampled(self, embedding: np.ndarray, obs: pd.DataFrame, *, n: int, seed: int) -> None:
        """Return None: see the class."""


def is_collapsed(scores: Mapping[str, float]) -> bool:
    """Tell from the figures of :class:`Geometry` whether an embedding has collapsed.

    So it is where the effective rank is below 2, the mean cosine above 0.99, or more than 0.9 of the dimensions are
    constant: all cells lie at about one point, in one direction, or on one line. The limits are ours.

    Parameters
    ----------
    scores
        What :meth:`Geometry.run` returned.

    Returns
    -------
    Whether it has.

    Examples
    --------
    >>> is_collapsed({"effective_rank": 24.0, "mean_cosine": 0.1, "constant_dims": 0.0})
    False
    >>> is_collapsed({"effective_rank": 1.2, "mean_cosine": 0.999, "constant_dims": 0.0})
    True
    """
    return (
        scores["effective_rank"] < _FEWEST_RANKS
        or scores["mean_cosine"] > _MOST_COSINE
        or scores["constant_dims"] > _MOST_CONSTANT
    )


def _spectrum(cells: np.ndarray) -> np.ndarray:
    """Return the squared singular values of a matrix, float64, by the smaller of its two Gram matrices."""
    gram = cells.T @ cells if cells.shape[0] >= cells.shape[1] else cells @ cells.T
    return np.clip(np.linalg.eigvalsh(gram), 0, None)


def _effective_rank(singular: np.ndarray) -> float:
    if not singular.any():
        return 0.0
    shares = singular[singular > 0] / singular.sum()
    return float(np.exp(-np.sum(shares * np.log(shares))))


def _mean_cosine(cells: np.ndarray) -> float:
    lengths = np.linalg.norm(cells, axis=1)
    units = cells[lengths > 0] / lengths[lengths > 0, None]
    n = len(units)
    return float((np.sum(units.sum(axis=0) ** 2) - n) / (n * (n - 1))) if n > 1 else float("nan")
