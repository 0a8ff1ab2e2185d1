"""Correct the finished embedding of a model for batches.

Shapes: N cells, L latent dimensions, K clusters, B batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from scforge._columns import codes_among, texts_of
from scforge.data.cells import Cells, CellSource
from scforge.data.neighbors import SHARPNESS, fit_harmony
from scforge.errors import DataError, ModelFileError, OptionError, listing, warn

N_CELLS = 20_000
"""Maximum number of training cells that a correction is fitted on."""

_POWER = 0.75
"""Power of the standard deviation of each principal component that is kept; chosen with ``benchmarks/integration.py``.

With 1 the embedding keeps its shape, with 0 all components have the same variance.
"""
_ROUNDS = 3
"""How often cells are assigned to clusters, starting from their uncorrected position."""
_AT_ONCE = 1_024
"""Cells corrected at once, to limit memory."""
_SMALLEST = 1e-4
"""Smallest standard deviation of a principal component relative to the largest."""


class LatentCorrection(nn.Module):
    """Correct embeddings for batches by a fixed formula, without training.

    The principal components of the embedding are scaled to a power of their standard deviation, so that the few
    that separate cell types do not hide the others. Then Harmony [1]_ finds clusters of cells and the shift of each
    batch in each of them. A cell moves by the mean of the shifts of its batch, weighted by how likely it belongs to
    each cluster. For the cells that it was fitted on, this is Harmony's result up to rounding of its assignments
    (less than 1% of the squared movement). Cells of other batches are scaled and do not move.

    Parameters
    ----------
    n_latent, n_clusters, n_batches
        Numbers of dimensions L, clusters K and batches B.

    References
    ----------
    .. [1] Korsunsky et al. (2019), Nature Methods 16, 1289-1296.
    """

    center: torch.Tensor
    scaling: torch.Tensor
    centroids: torch.Tensor
    shifts: torch.Tensor
    log_penalties: torch.Tensor

    def __init__(self, n_latent: int, n_clusters: int, n_batches: int) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(n_latent))
        self.register_buffer("scaling", torch.eye(n_latent))
        self.register_buffer("centroids", torch.zeros(n_clusters, n_latent))
        # The last of the batches stands for all others.
        self.register_buffer("shifts", torch.zeros(n_batches + 1, n_clusters, n_latent))
        self.register_buffer("log_penalties", torch.zeros(n_batches + 1, n_clusters))

    @classmethod
    def fit(
        cls, embeddings: np.ndarray, codes: np.ndarray, *, power: float = _POWER, seed: int = 0
    ) -> LatentCorrection | None:
        """Return the correction for cells with the batches `codes` (from 0 on), or None if there is nothing to correct.

        Parameters
        ----------
        embeddings
            Embeddings, shape (N, L).
        codes
            Batch of each cell, int64, shape (N,).
        power
            Power of the standard deviation of each principal component that is kept.
        seed
            Random seed for the clusters.
        """
        center = embeddings.mean(axis=0, dtype=np.float64)
        centered = embeddings - center
        variances, axes = np.linalg.eigh(centered.T @ centered / len(centered))
        spreads = np.sqrt(variances.clip(min=0))
        if not spreads.any():
            return None
        factors = np.maximum(spreads, _SMALLEST * spreads.max()) ** (power - 1)
        factors *= np.sqrt((spreads**2).sum() / (spreads**2 * factors**2).sum())  # the total variance stays
        scaling = (axes * factors) @ axes.T
        fitted = fit_harmony(centered @ scaling, codes, seed=seed)
        if fitted is None:
            return None
        correction = cls(len(center), len(fitted.centroids), len(fitted.shifts))
        correction.center.copy_(torch.from_numpy(center))
        correction.scaling.copy_(torch.from_numpy(scaling))
        correction.centroids.copy_(torch.from_numpy(fitted.centroids))
        correction.shifts[:-1] = torch.from_numpy(fitted.shifts)
        correction.log_penalties[:-1] = torch.from_numpy(fitted.log_penalties)
        return correction

    def forward(self, embeddings: torch.Tensor, batches: torch.Tensor) -> torch.Tensor:
        """Return the corrected embeddings, shape (N, L); a batch of -1 is one that is not known."""
        scaled = (embeddings - self.center) @ self.scaling
        corrected = scaled
        for _ in range(_ROUNDS):
            cosines = F.normalize(corrected, dim=1) @ self.centroids.T
            assigned = (SHARPNESS * cosines + self.log_penalties[batches]).softmax(dim=1)
            corrected = scaled - torch.einsum("nk,nkl->nl", assigned, self.shifts[batches])
        return corrected + self.center

    @torch.inference_mode()
    def apply_to(self, embeddings: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Return the corrected embeddings of many cells, float32, shape (N, L)."""
        parts = zip(torch.from_numpy(embeddings).split(_AT_ONCE), torch.from_numpy(codes).split(_AT_ONCE), strict=True)
        return np.concatenate([self(cells.float(), batches).numpy() for cells, batches in parts])


@dataclass(frozen=True)
class BatchCorrection:
    """A correction, and the batches of the training cells that it was fitted on.

    Attributes
    ----------
    module
        The formula.
    batches
        Names of the batches, in the order of their codes.
    """

    module: LatentCorrection
    batches: list[str]

    @classmethod
    def fit(cls, embeddings: np.ndarray, cells: CellSource, key: str, *, seed: int) -> Self | None:
        """Fit a correction of embeddings, shape (N, D), for the batches in a column of the cells.

        Returns None if there are fewer than two batches or no such column. Cells without a batch are left out.
        """
        if cells.obs is None or key not in cells.obs:
            return None
        batches = texts_of(cells.column(key), key=key, argument="batch_key")
        codes, names = np.asarray(batches.codes, dtype=np.int64), list(batches.categories)
        known = codes >= 0
        if len(names) < 2:
            return None
        module = LatentCorrection.fit(embeddings[known], codes[known], seed=seed)
        return None if module is None else cls(module, names)

    def codes(self, cells: Cells, key: str | None) -> np.ndarray:
        """Return the code of the batch of each cell, int64, shape (N,); -1 if the model does not know it.

        Raises
        ------
        OptionError
            If the cells have no such column.
        """
        try:
            texts = texts_of(cells.column(str(key)), key=str(key), argument="batch_key")
        except DataError as error:
            raise OptionError(
                f"correction requires the batch of each cell, but {error} Pass correction=0, or map cells of new "
                "batches with load_query_data."
            ) from error
        codes = codes_among(texts, self.batches)
        if unknown := sorted(set(texts.categories) - set(self.batches)):
            warn(
                f"{np.count_nonzero(codes < 0):,} cells are of batches that the model does not know "
                f"({listing(unknown)}) and are not corrected; map them with load_query_data."
            )
        return codes

    def apply(self, embeddings: np.ndarray, codes: np.ndarray, correction: float) -> np.ndarray:
        """Return embeddings moved by a fraction of the way to their corrected position, float32, shape (N, D)."""
        corrected = self.module.apply_to(embeddings, codes)
        return corrected if correction == 1 else embeddings + np.float32(correction) * (corrected - embeddings)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to save."""
        return dict(self.module.state_dict())

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor], batches: Any, *, source: str) -> Self:
        """Return a correction from its saved tensors and the names of its batches.

        Raises
        ------
        ModelFileError
            If they do not fit together.
        """
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        n_clusters, n_latent = shapes.get("centroids", (0, 0))
        is_list = isinstance(batches, list) and all(isinstance(name, str) for name in batches)
        module = LatentCorrection(n_latent, n_clusters, len(batches) if is_list else 0)
        expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        finite = all(bool(value.isfinite().all()) for value in tensors.values())
        if not is_list or shapes != expected or not finite:
            raise ModelFileError(f"{source!r} is corrupted: its correction for batches is not valid; copy it again.")
        module.load_state_dict(dict(tensors))
        return cls(module, batches)


def unknown_batches(n_cells: int) -> np.ndarray:
    """Return codes of cells that are scaled but not moved, e.g. of a query that is mapped already."""
    return np.full(n_cells, -1, dtype=np.int64)
