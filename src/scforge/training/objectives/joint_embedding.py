"""Joint embedding: views of a cell have similar embeddings, and SIGReg prevents a collapse.

Shapes: N cells in a source, B cells in a step, K views, D dimensions, E batches of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from scforge._checks import check_bool, check_count, check_share
from scforge.data.cells import CellBlock, Cells, choose_chunks
from scforge.data.neighbors import harmony_correct, principal_components
from scforge.errors import DataError, OptionError, warn
from scforge.models.components.sigreg import SIGReg
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives._conditioning import TellsBatches
from scforge.training.objectives._views import CollapseWatch, SeesViews, geometry_moments
from scforge.training.objectives.base import TrainingDefaults, mismatch, register_objective

_MIN_CELLS = 2
"""Minimum number of cells in a step that are needed to represent a batch."""

_SHARES = "batch_shares"
"""Key of a tensor batch that is not an argument of `encode`."""

_LARGEST_WEIGHT = 10.0
"""Maximum weight of a cell relative to the mean of its batch, so that rare cells do not dominate."""


@register_objective("joint_embedding")
class JointEmbedding(TellsBatches, SeesViews):
    """Agreement between the views of a cell, plus SIGReg over cells (after LeJEPA, arXiv:2511.08544).

    The model receives several views of each cell, with counts thinned to a random depth and some genes masked. If z is
    the embedding of a view::

        loss = (1 - weight) * mean((z - mean of the cell's views)^2) + weight * SIGReg(z)

    SIGReg is computed for each view over the cells of a step (from all processes in training), and averaged over views.
    With `per_batch`, it is computed separately for each batch (donor, protocol) and averaged, weighted by the number of
    cells. Each batch then approaches the same Gaussian, so the batches mix. If batches differ in composition, this
    moves cells of one type onto another. `clusters` corrects for this effect: cells are weighted as if each batch had
    the average cluster composition. Clusters are computed once, before training, by k-means on principal components
    corrected by Harmony. Weights cannot compensate for a cluster that is missing in a batch.

    ``effective_rank`` and ``mean_cosine`` in the history show how many dimensions the embedding uses, and whether all
    cells lie in one direction. A warning reports a collapse.

    Parameters
    ----------
    views
        Number of views per cell, at least 2.
    keep_min, keep_max
        Range of the fraction of counts that a view keeps, sampled for each view.
    gene_dropout
        Maximum fraction of masked genes; the fraction is sampled between 0 and this value for each view.
    weight
        Weight of SIGReg, in (0, 1).
    slices
        Number of random directions in SIGReg.
    per_batch
        Whether to compute SIGReg separately for each batch. Batches with fewer than 2 cells in a step are ignored. With
        several processes, each process then uses only its own cells.
    clusters
        Number of clusters whose proportions are balanced between batches, for `per_batch`, at least 2. If None, uses no
        clusters.
    max_cells
        Maximum number of training cells to cluster, sampled once, and of held-out cells to assign; other cells have
        weight 1.
    batch_key
        Column of ``obs`` with the batch of each cell, for `per_batch`. The architecture does not receive it.
    batches
        Names of the batches. If None, uses the batches of the cells that the model is created with.
    projector
        Width of an MLP projection head. Both terms then apply to its output, so the embedding need not be isotropic.
        Requires an architecture with such a head (``gene_pooling``, ``mlp``). If None, both terms apply to the
        embedding.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
    >>> scforge.models.Encoder.setup_anndata(adata)
    >>> objective = {"name": "joint_embedding", "views": 2}
    >>> sizes = dict(hidden_dim=8, latent_dim=4)
    >>> model = scforge.models.Encoder(adata, "gene_pooling", objective=objective, **sizes)
    >>> model.train(max_epochs=1, progress_bar=False)
    >>> "validation_loss" in model.history
    True
    """

    defaults = TrainingDefaults(batch_size=256, lr=2e-3, weight_decay=0.01, schedule="one_cycle", max_epochs=40)
    # SIGReg assumes that a batch is a random sample of all cells.
    random_batches = True
    # Only with `per_batch`, for which one has to ask.
    takes_batch_key = False

    def __init__(
        self,
        *,
        views: int = 4,
        keep_min: float = 0.3,
        keep_max: float = 1.0,
        gene_dropout: float = 0.4,
        weight: float = 0.05,
        slices: int = 256,
        per_batch: bool = False,
        clusters: int | None = None,
        max_cells: int = 20_000,
        batch_key: str | None = None,
        batches: Sequence[str] | None = None,
        projector: int | None = None,
    ) -> None:
        self.views = check_count("views", views, "views of a cell", least=2)
        self._set_views(keep_min, keep_max, gene_dropout)
        self.weight = check_share("weight", weight)
        if self.weight in (0, 1):
            raise OptionError("must be greater than 0 and less than 1.", weight=weight)
        self.slices = check_count("slices", slices, "directions")
        self.per_batch = check_bool("per_batch", per_batch)
        self._set_batches(batch_key, batches)
        if self.per_batch and self.batch_key is None:
            raise OptionError("requires batch_key, the column of obs with the batch of each cell.", per_batch=True)
        for name, value in {"batch_key": batch_key, "clusters": clusters}.items():
            if value is not None and not self.per_batch:
                raise OptionError(
                    f"has an effect only with per_batch=True; set it, or omit {name}.", argument=name, value=value
                )
        self.clusters = None if clusters is None else check_count("clusters", clusters, "clusters", least=2)
        self.max_cells = check_count("max_cells", max_cells, "cells", least=2)
        self.projector = None if projector is None else check_count("projector", projector, "dimensions")
        self._sigreg = SIGReg(self.slices)
        self._weights: np.ndarray | None = None
        self._collapse = CollapseWatch()

    def check_architecture(self, architecture: type[nn.Module] | nn.Module) -> None:
        """Raise :class:`~scforge.errors.OptionError` if a projector is requested but the architecture has none."""
        if self.projector is not None and not hasattr(architecture, "project"):
            why = f"has no projector for projector={self.projector}"
            raise mismatch("joint_embedding", architecture, why, "the architecture 'gene_pooling' or 'mlp'")

    def model_options(self) -> dict[str, Any]:
        """Return the projector width as an option of the architecture, which does not receive batches."""
        return {} if self.projector is None else {"projector_dim": self.projector}

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the batch and the weight of each cell."""
        super().bind(cells, train_rows)
        self._weigh(cells, train_rows, most=self.clusters)

    def bind_query(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the batches and weights of query cells, whose batches may be new to the model.

        Cells without a batch, or all cells without the column, form one batch.
        """
        if self.batch_key is not None:
            try:
                self._batches = np.array(self.own_batches(cells).codes, dtype=np.int64)
            except DataError as error:
                warn(f"batch_key={self.batch_key!r}: {str(error).rstrip('.')}; all cells are treated as one batch.")
                self._batches = np.zeros(len(cells), dtype=np.int64)
        # A query may be small.
        self._weigh(cells, train_rows, most=None if self.clusters is None else min(self.clusters, len(train_rows)))

    def _weigh(self, cells: Cells, train_rows: np.ndarray, *, most: int | None) -> None:
        """Compute at most `most` clusters, and weight cells to balance cluster proportions between batches.

        The cluster centers are computed from training cells.
        """
        self._weights = None
        if most is None or most < 2:
            return
        from sklearn.cluster import KMeans

        assert self._batches is not None
        learned = choose_chunks(len(cells), self.max_cells, cells.chunk_size, rows=np.sort(train_rows))
        if len(learned) < most:
            raise DataError(f"is more than the {len(learned)} cells to cluster; lower clusters.", clusters=most)
        others = np.setdiff1d(np.arange(len(cells), dtype=np.int64), train_rows)
        others = choose_chunks(len(cells), self.max_cells, cells.chunk_size, rows=others)
        rows = np.sort(np.concatenate([learned, others]))
        components, _, _ = principal_components(cells.sample(len(rows), rows=rows))
        components = harmony_correct(components, self._batches[rows])
        clusters = KMeans(most, n_init=4, random_state=0).fit(components[np.isin(rows, learned)]).predict(components)
        names, batches = np.unique(self._batches[rows], return_inverse=True)
        shares_ec = np.zeros((len(names), most))
        np.add.at(shares_ec, (batches, clusters), 1.0)
        shares_ec /= shares_ec.sum(axis=1, keepdims=True)
        weights = (shares_ec.mean(axis=0) / shares_ec.clip(1e-9))[batches, clusters]
        self._weights = np.ones(len(cells), dtype=np.float32)
        self._weights[rows] = np.minimum(weights, _LARGEST_WEIGHT)

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> dict[str, torch.Tensor]:
        """Tokenize all views of all cells, view after view: tensors of shape (K * B, S).

        With `per_batch`, ``batch_shares`` contains a row for each batch that is used in this step, float32, shape (E,
        B). A row contains the weights of the cells in the batch (without `clusters`, one over their number), and 0 for
        other cells.
        """
        batch: dict[str, torch.Tensor] = dict(self._views([block] * self.views, tokenizer, epoch=epoch, seed=seed))
        codes = self.batches_of(block)
        if codes is None:
            return batch
        weights = np.ones(len(block), np.float32) if self._weights is None else self._weights[block.rows]
        names, sizes = codes.unique(return_counts=True)
        counts_eb = (names[sizes >= _MIN_CELLS].unsqueeze(1) == codes) * torch.from_numpy(weights)
        return {**batch, _SHARES: counts_eb / counts_eb.sum(dim=1, keepdim=True)}

    def n_cells(self, batch: dict[str, torch.Tensor]) -> int:
        """Return the number of cells; each occurs once per view."""
        return batch["input_ids"].shape[0] // self.views

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss; log its two parts, and the spread and geometry of the embedding."""
        of_cells: Any = module
        tokens = {name: tensor for name, tensor in batch.items() if name != _SHARES}
        z = of_cells.encode(**tokens)
        z_kbd = z.float().unflatten(0, (self.views, -1))
        # Both terms apply to the output of the projector, if there is one.
        p_kbd = z_kbd if self.projector is None else of_cells.project(z).float().unflatten(0, (self.views, -1))
        agreement = (p_kbd - p_kbd.mean(dim=0)).square().mean()
        sigreg = self._statistic(p_kbd, batch.get(_SHARES), fresh=module.training)
        loss = (1 - self.weight) * agreement + self.weight * sigreg
        z_kbd = z_kbd.detach()
        spread = z_kbd.std(dim=1, correction=0).mean()
        figures = {"agreement": agreement.detach(), "sigreg": sigreg.detach(), "spread": spread}
        # Differences between the views of a cell are noise, not use of a dimension.
        return loss, figures | geometry_moments(z_kbd.mean(dim=0))

    def summarize(self, means: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the means and the geometry of the embedding; warn once if the embedding has collapsed."""
        means = dict(means)
        geometry = self._collapse.figures(means)
        return {**super().summarize(means), **geometry}

    def _statistic(self, z_kbd: torch.Tensor, shares_eb: torch.Tensor | None, *, fresh: bool) -> torch.Tensor:
        """Return SIGReg, along new directions in training and fixed directions in validation."""
        sigreg = self._sigreg.to(z_kbd.device)
        if fresh and shares_eb is None:
            return sigreg(z_kbd)
        generator = None if fresh else torch.Generator().manual_seed(0)
        device = z_kbd.device if fresh else None
        noise = torch.randn(z_kbd.shape[-1], self.slices, generator=generator, device=device).to(z_kbd.device)
        if shares_eb is None:
            return sigreg.compute(z_kbd, noise)
        cells_e = (shares_eb > 0).sum(dim=1)
        statistic_ke = sigreg.of_groups(z_kbd, noise, shares_eb)
        return ((statistic_ke * cells_e).sum(dim=1) / cells_e.sum().clamp(min=1)).mean()
