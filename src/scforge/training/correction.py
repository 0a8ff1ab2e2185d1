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
_MOST_NUMBERS = 100_000
"""Maximum number of batches times dimensions; there is a shift of each in each of up to 100 clusters (40 MB)."""
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


def _shapes(n_latent: int, n_clusters: int, n_batches: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a correction; the last of the batches stands for all others."""
    return {
        "center": (n_latent,),
        "scaling": (n_latent, n_latent),
        "centroids": (n_clusters, n_latent),
        "shifts": (n_batches + 1, n_clusters, n_latent),
        "log_penalties": (n_batches + 1, n_clusters),
    }


class LatentCorrection(nn.Module):
    """Correct embeddings for batches by a fixed formula, without training.

    The principal components of the embedding are scaled to a power of their standard deviation, so that the few
    that separate cell types do not hide the others. Then Harmony [1]_ finds clusters of cells and the shift of each
    batch in each of them. A cell moves by the mean of the shifts of its batch, weighted by how likely it belongs to
    each cluster. For the cells that it was fitted on, this is nearly Harmony's result (it differs by 0.01% to 3% of the
    squared movement). Cells of other batches are scaled and do not move.

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
        for name, shape in _shapes(n_latent, n_clusters, n_batches).items():
            self.register_buffer(name, torch.zeros(shape))

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

        Cells without a batch are left out. Returns None if there are fewer than two batches or ten cells, or more
        batches than a model can reasonably store.
        """
        batches = texts_of(cells.column(key), key=key, argument="batch_key")
        codes, names = np.asarray(batches.codes, dtype=np.int64), list(batches.categories)
        has_batch = codes >= 0
        if len(names) * embeddings.shape[1] > _MOST_NUMBERS:
            warn(
                f"batch_key={key!r} has {len(names):,} batches, too many for the correction of the embedding "
                "(get_latent_representation(correction=...)), which the model will not have."
            )
            return None
        module = LatentCorrection.fit(embeddings[has_batch], codes[has_batch], seed=seed)
        return None if module is None else cls(module, names)

    def codes(self, cells: Cells, key: str | None, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the code of the batch of each cell, int64, shape (N,); -1 if it is missing or was not in training.

        Warns of such cells among `rows` (all if None).

        Raises
        ------
        OptionError
            If the cells have no such column.
        """
        try:
            texts = texts_of(cells.column(str(key)), key=str(key), argument="batch_key")
        except DataError as error:
            raise OptionError(
                f"requires the batch of each cell, but {str(error).rstrip('.')}; add the column, pass "
                "correction=0, or map cells of new batches with load_query_data.",
                argument="correction",
            ) from error
        codes = codes_among(texts, self.batches)
        shown = slice(None) if rows is None else rows
        if n_unknown := int((codes[shown] < 0).sum()):
            unknown = [name for name in texts[shown].dropna().unique() if name not in self.batches]
            named = f" (new: {listing(sorted(unknown))})" if unknown else ""
            warn(
                f"{n_unknown:,} of {len(codes[shown]):,} cells have no batch among those of the training cells{named} "
                "and are not corrected; map cells of new batches with load_query_data."
            )
        return codes

    def apply(self, embeddings: np.ndarray, codes: np.ndarray, correction: float) -> np.ndarray:
        """Return embeddings moved by a fraction of the way to their corrected position, float32, shape (N, D)."""
        if embeddings.shape[1] != len(self.module.center):
            raise ModelFileError(
                f"the model has embeddings of {embeddings.shape[1]} dimensions, but its correction for batches has "
                f"{len(self.module.center)}; copy the model again."
            )
        corrected = self.module.apply_to(embeddings, codes)
        return corrected if correction == 1 else embeddings + np.float32(correction) * (corrected - embeddings)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to save."""
        return dict(self.module.state_dict())

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor], batches: Any, *, source: str) -> Self | None:
        """Return a correction from its saved tensors and the names of its batches; None without tensors.

        Raises
        ------
        ModelFileError
            If they do not fit together.
        """
        if not tensors:
            return None
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        size = shapes.get("centroids", ())
        n_clusters, n_latent = size if len(size) == 2 else (0, 0)
        is_list = isinstance(batches, list) and all(isinstance(name, str) for name in batches)
        n_batches = len(set(batches)) if is_list else -1
        expected = _shapes(n_latent, n_clusters, n_batches)
        is_sound = all(value.dtype == torch.float32 and value.isfinite().all() for value in tensors.values())
        if n_batches < 2 or n_batches != len(batches) or not n_clusters or shapes != expected or not is_sound:
            raise ModelFileError(f"{source!r} is corrupted: its correction for batches is not valid; copy it again.")
        module = LatentCorrection(n_latent, n_clusters, n_batches)
        module.load_state_dict(dict(tensors))
        return cls(module, batches)
