"""Whether the embedding that an objective trains keeps cells apart, or has collapsed.

Shapes: B cells, D dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from scforge.errors import warn

__all__ = ["CollapseWatch", "geometry", "geometry_moments", "warn_of_collapse"]

_COVARIANCE, _DIRECTION, _CELLS = "geometry_covariance", "geometry_direction", "geometry_cells"

_FEWEST_CELLS = 8
"""Cells of a step, in the mean, under which they span too little for a covariance."""

_FEWEST_DIMS = 3
"""Dimensions of the smallest embedding whose effective rank tells something: of two, one may be all that is needed."""

_LINE = 1.01
"""Effective rank under which cells lie on a line: other directions have less than a thousandth of the variance."""

_NARROW, _THIN = 0.99, 1.5
"""Mean cosine above which, and effective rank under which, cells lie on a line far from the origin."""

_POINT = 0.9999
"""Mean cosine above which cells lie in a point: what tells them apart is less than 1% of their length."""


def geometry_moments(z_bd: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return figures of embeddings whose means over the cells of an epoch :func:`geometry` takes.

    The covariance is that within the step: the embedding as a whole moves while it is trained, which over an epoch
    would look like a direction in which cells differ.

    Parameters
    ----------
    z_bd
        Embeddings, shape (B, D).

    Returns
    -------
    The covariance of the cells, shape (D, D), their mean direction, shape (D,), and the number of the cells of the
    step, scalar; all float32 and detached.
    """
    with torch.autocast(z_bd.device.type, enabled=False):
        z_bd = z_bd.detach().float()
        centred_bd = z_bd - z_bd.mean(dim=0)
        covariance = centred_bd.T @ centred_bd / len(z_bd)
        direction = torch.nn.functional.normalize(z_bd, dim=1).mean(dim=0)
        return {_COVARIANCE: covariance, _DIRECTION: direction, _CELLS: z_bd.new_tensor(float(len(z_bd)))}


def geometry(means: dict[str, np.ndarray]) -> dict[str, float]:
    """Take the figures of :func:`geometry_moments` out of the means of an epoch, and return what they say.

    Returns
    -------
    ``effective_rank``
        exp of the entropy of the eigenvalues of the covariance, divided by their sum (Roy and Vetterli 2007): 1 if
        cells lie on a line, D if they differ alike in all directions, 0 if they do not differ.
    ``mean_cosine``
        Mean cosine of two cells drawn at random, the squared length of the mean direction: 1 if all point the same way.

    Neither where steps have fewer than 8 cells in the mean, e.g. in validation by few cells, as these look collapsed
    whatever the embedding is; nor if it is not finite.
    """
    covariance, direction, cells = (means.pop(name) for name in (_COVARIANCE, _DIRECTION, _CELLS))
    if cells < _FEWEST_CELLS or not (np.isfinite(covariance).all() and np.isfinite(direction).all()):
        return {}
    return {"effective_rank": _effective_rank(covariance), "mean_cosine": float(np.sum(direction**2))}


def _effective_rank(covariance: np.ndarray) -> float:
    eigenvalues = np.linalg.eigvalsh(covariance.astype(np.float64))
    positive = eigenvalues[eigenvalues > 0]
    if not len(positive):
        return 0.0
    shares = positive / positive.sum()
    return float(np.exp(-np.sum(shares * np.log(shares))))


def warn_of_collapse(figures: Mapping[str, float], n_dims: int) -> bool:
    """Warn if the figures of :func:`geometry` are those of an embedding that has collapsed.

    So it is if one of these holds:

    - Cells lie on a line: the effective rank is below 1.01 of at least 3 dimensions. A little above it need be no
      collapse: cells of two kinds that lie far apart reach 1.05.
    - Cells lie on a line far from the origin: the mean cosine is above 0.99 and the effective rank below 1.5, of at
      least 3 dimensions. A mean cosine above 0.99 alone is no collapse: an embedding that nothing centres may stand
      anywhere, and keep cells apart in many dimensions there.
    - Cells lie in a point: the mean cosine is above 0.9999 in at least 2 dimensions, so that what tells cells apart is
      less than 1% of their length.

    Parameters
    ----------
    figures
        With ``effective_rank`` and ``mean_cosine``; without them nothing has collapsed.
    n_dims
        Number of dimensions D.

    Returns
    -------
    Whether it has collapsed. Of several processes, which all know the same figures, the first one warns. An objective
    remembers the answer, so as to ask no more in the same training.
    """
    if "effective_rank" not in figures or "mean_cosine" not in figures:
        return False
    rank, cosine = figures["effective_rank"], figures["mean_cosine"]
    on_a_line = n_dims >= _FEWEST_DIMS and (rank < _LINE or (rank < _THIN and cosine > _NARROW))
    in_a_point = n_dims > 1 and cosine > _POINT
    if not (on_a_line or in_a_point):
        return False
    if _is_first_process():
        warn(
            f"the embedding has collapsed: its effective rank is {rank:.2f} of {n_dims} dimensions and the mean cosine "
            f"of two cells is {cosine:.4f}; train with a larger weight of "
            "'joint_embedding', a smaller agreement of 'neighbor_denoising', or a smaller lr."
        )
    return True


class CollapseWatch:
    """The geometry of an embedding epoch by epoch, with one warning if it collapses."""

    def __init__(self) -> None:
        self._collapsed = False

    def figures(self, means: dict[str, np.ndarray]) -> dict[str, float]:
        """Take the moments out of the means of an epoch; return what :func:`geometry` says of them."""
        n_dims = len(means[_DIRECTION])
        found = geometry(means)
        self._collapsed = self._collapsed or warn_of_collapse(found, n_dims)
        return found


def _is_first_process() -> bool:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not there or torch.distributed.get_rank() == 0
