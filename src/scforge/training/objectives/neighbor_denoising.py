"""Neighbor denoising: reconstruct the expression of a cell from subsampled counts of the cell or of a neighbor.

Shapes: N cells of a source, B cells of a batch, G genes of the vocabulary, L latent dimensions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from scforge._checks import check_choice, check_count, check_positive
from scforge.data.cells import CellBlock, Cells, CellSource
from scforge.errors import DataError, OptionError, listing, warn
from scforge.models.components.latent import kl_divergence
from scforge.models.components.sigreg import SIGReg
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives._alignment import N_SLICES, align
from scforge.training.objectives._conditioning import IN_THE_MEAN, TellsLabels, numbers_of_cells
from scforge.training.objectives._neighbors import NeighborPool, check_temperature
from scforge.training.objectives._views import CollapseWatch, SeesViews, geometry_moments
from scforge.training.objectives.base import TrainingDefaults, register_objective
from scforge.training.objectives.variational import check_latent, dense_profiles, start_at_means, whole_profiles

logger = logging.getLogger("scforge")

_MIN_ERROR = 1e-8
_FEW = 0.5
"""Fraction of cells with a neighbor in another batch below which a warning is issued, and batches are named in it."""
_MOST_NAMED, _NO_BATCH = 5, "no batch"
"""Number of batches that the warning names, and the name for cells without a batch."""
_CONTRAST = 0.1
"""Temperature of the contrastive loss."""
_OF_THE_OBJECTIVE = {"profile_genes", "profile_values", "has_neighbor", "batch", "labels"}


@register_objective("neighbor_denoising")
class NeighborDenoising(TellsLabels, SeesViews):
    """Reconstruct the expression of a cell from subsampled counts of the cell and of a mutual nearest neighbor.

    Batches are integrated by translation: the decoder reconstructs a cell from the latent variable of a neighbor in
    another batch, conditioned on the batch of the cell. The decoder therefore models batch effects, and the latent
    variable captures the shared state of both cells. Cells of a type that is missing in another batch have no mutual
    neighbors there and are not moved onto other types. Near neighbors are sampled more often than distant neighbors
    (:func:`~scforge.data.neighbors.neighbor_weights`). Let x be the log1p CP10K values of all genes of cell i in batch
    b. Let z_i be a latent sample for a view of the cell (counts thinned, genes masked), and mu its mean. Let j be one
    of its mutual neighbors (:func:`~scforge.data.neighbors.mutual_neighbors`), resampled in each epoch::

        reconstruction = 1/2 log mean (decode(z_i, b) - x)^2       over cells and genes
        translated     = 1/2 log mean (decode(z_j, b) - x)^2       over genes and cells with a neighbor
        distance       = mean (mu_i - mu_j)^2                      over dimensions and cells with a neighbor
        aligned        = SIGReg of mu within each batch, mean over batches
        loss = reconstruction + translation * translated + agreement * distance + beta * divergence / G
               + alignment * aligned

    The logarithm is the negative log-likelihood of a normal distribution with a learned variance. With ``beta=1``, the
    first and the last term therefore form the evidence lower bound (per gene) at any noise level. Batches are optional:
    without `batch_key`, neighbors are searched among all cells, which makes cell types compact. Held-out cells have no
    neighbors, so the validation loss consists of reconstruction and KL divergence.

    With `labels_key`, the objective also learns from the labels that some of the training cells have. Neighbors with
    different labels are dropped, mutual neighbors in other batches among the cells of each label are added
    (:func:`~scforge.data.neighbors.neighbors_by_label`), and ``labels_weight * contrast`` is added to the loss. The
    contrast is the supervised contrastive loss [1]_ of the means of all views in a minibatch whose cells have a label,
    with the cosine similarity and a temperature of 0.1. Labels of held-out cells and of query cells are not used.

    Parameters
    ----------
    batch_key
        Column of ``obs`` with the batch of each cell; `Encoder` uses the batch key of ``setup_anndata``.
    batches
        Names of the batches, in the order of their codes. If None, uses the batches of the cells that the model is
        created with.
    across, within
        Number of mutual neighbors of a cell in each other batch, and in the same batch; at most a tenth of a batch.
    space
        Space in which neighbors are searched: 50 principal components corrected by Harmony (``"harmony"``,
        :func:`~scforge.data.neighbors.harmony_correct`), or uncorrected (``"components"``). Without batches, the two
        are the same.
    temperature
        Neighbors of a cell are sampled with probabilities proportional to exp(cosine / temperature), with the cosine in
        `space`; smaller values favor the nearest neighbors. Where batches still differ, neighbors in other batches are
        farther away and are sampled less often, especially with ``space="components"``. If None, samples all neighbors
        uniformly.
    translation, agreement
        Weights of the terms ``translated`` and ``distance``; if both are 0, no neighbors are searched. An agreement
        above 0 pulls the latent means of neighbors together. The embedding then shrinks, so remaining batch effects
        have more weight.
    alignment
        Weight of SIGReg within batches (:class:`~scforge.models.components.SIGReg`), which pulls each batch onto the
        same Gaussian, so that batches mix better; 0 disables it. Higher weights make cell types harder to distinguish,
        especially when batches differ in their cell types. Batches with fewer than 8 cells in a step are left out. Has
        no effect without `batch_key`.
    beta
        Weight of the KL divergence of the latent distribution from N(0, I).
    keep_min, keep_max
        Range of the fraction of counts that a view keeps, sampled for each view.
    gene_dropout
        Maximum fraction of masked genes; the fraction is sampled between 0 and this value for each view.
    max_cells
        Number of training cells among which neighbors are searched, sampled once, equally from each batch. All other
        cells use the neighbors of the nearest sampled cell in their batch.
    labels_key
        Column of ``obs`` with the label of each cell, e.g. its type; missing if it is unknown. If None, labels are not
        used, even if ``setup_anndata`` has a `labels_key`.
    labels
        Names of the labels, in the order of their codes. If None, uses the labels of the cells that the model is
        created with. Cells of other labels are treated as cells without a label.
    labels_weight
        Weight of the term ``contrast``. If 0, labels only select neighbors.

    Attributes
    ----------
    shares_across
        A mapping from batch to the fraction of its cells that have a mutual neighbor in another batch, lowest first,
        in the last training run (``model.objective.shares_across``). It is not saved with the model.

    References
    ----------
    .. [1] Khosla et al. (2020), Advances in Neural Information Processing Systems 33, 18661-18673.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
    >>> scforge.models.Encoder.setup_anndata(adata)
    >>> objective = {"name": "neighbor_denoising", "across": 10}
    >>> sizes = dict(hidden_dim=8, latent_dim=4)
    >>> model = scforge.models.Encoder(adata, "gene_pooling", objective=objective, **sizes)
    >>> model.train(max_epochs=1, progress_bar=False)
    >>> "validation_loss" in model.history
    True
    """

    # Longer training also memorizes neighbors of other types: 150 epochs on sc_mixology cost 0.06 of scIB's
    # conservation of biology, and 0.01 of macro-F1. On 12,000 cells resampled from kang_ifnb, 60 epochs are worse than
    # 24 for mapped cells (macro-F1 0.67, 0.70) and as good for the cells that they were trained on.
    defaults = TrainingDefaults(
        batch_size=256, lr=2e-3, weight_decay=0.01, schedule="one_cycle", max_epochs=100, most_epochs=60
    )
    # A cell comes with a neighbor of any length.
    random_batches = True
    # An encoder trained on a query alone moves the query away from the reference. With celseq2 of sc_mixology as query,
    # 1% of the neighbors are then cells of the reference, compared with 54% before.
    maps_queries = True

    def __init__(
        self,
        *,
        batch_key: str | None = None,
        batches: Sequence[str] | None = None,
        across: int = 30,
        within: int = 5,
        space: str = "harmony",
        temperature: float | None = 0.1,
        translation: float = 1.0,
        agreement: float = 0.0,
        alignment: float = 0.0,
        beta: float = 0.3,
        keep_min: float = 0.3,
        keep_max: float = 1.0,
        gene_dropout: float = 0.4,
        max_cells: int = 20_000,
        labels_key: str | None = None,
        labels: Sequence[str] | None = None,
        labels_weight: float = 0.02,
    ) -> None:
        self._set_batches(batch_key, batches)
        self._set_labels(labels_key, labels)
        if self.labels is not None and len(self.labels) < 2:
            raise OptionError(
                f"has a single label ({self.labels[0]!r}); choose a column with at least two, or omit labels_key.",
                labels_key=labels_key,
            )
        self.labels_weight = check_positive("labels_weight", labels_weight, or_zero=True)
        self.across = check_count("across", across, "neighbors", least=0)
        self.within = check_count("within", within, "neighbors", least=0)
        self.translation = check_positive("translation", translation, or_zero=True)
        self.agreement = check_positive("agreement", agreement, or_zero=True)
        self.alignment = check_positive("alignment", alignment, or_zero=True)
        self.beta = check_positive("beta", beta, or_zero=True)
        self.space = check_choice("space", space, ["harmony", "components"])
        self.temperature = check_temperature(temperature)
        self._set_views(keep_min, keep_max, gene_dropout)
        self.max_cells = check_count("max_cells", max_cells, "cells", least=2)
        self._labels: np.ndarray | None = None
        self._pool: NeighborPool | None = None
        self.shares_across: dict[str, float] = {}
        self._sigreg = SIGReg(N_SLICES)
        self._collapse = CollapseWatch()

    def check_architecture(self, architecture: type[nn.Module] | nn.Module) -> None:
        """Raise an error if the architecture does not have a latent distribution and an expression decoder."""
        check_latent(
            "neighbor_denoising",
            architecture,
            ("infer", "decode"),
            "the architecture 'gene_pooling', 'mlp' or 'scdiva'",
        )

    def initialize(self, module: nn.Module, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Initialize the decoder at the mean expression of each gene."""
        start_at_means(module, cells)

    def model_options(self) -> dict[str, Any]:
        """Return the number of batches, or 0 for a decoder that is not conditioned on batches."""
        return {"n_batches": len(self.batches or [])}

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the batch of each cell, and labels and neighbors of the training cells.

        Cells of unknown batches are decoded with the mean of all batch vectors, and a warning is issued.

        Raises
        ------
        DataError
            If the column `labels_key` is missing, or the training cells have fewer than two labels.
        """
        self._labels = numbers_of_cells("labels_key", self.labels_key, "labels", self.labels, cells)
        if self._labels is not None:
            is_held_out = np.ones(len(cells), dtype=bool)
            is_held_out[train_rows] = False
            self._labels[is_held_out] = -1
            if len(np.unique(self._labels[self._labels >= 0])) < 2:
                raise DataError(
                    f": the training cells have fewer than two of the labels that the model knows "
                    f"({listing(self.labels or [])}); label more cells, or omit labels_key for a new model.",
                    labels_key=self.labels_key,
                )
        if problem := self._look_up(cells, train_rows):
            warn(f"{problem}; {IN_THE_MEAN}")

    def _look_up(self, cells: Cells, train_rows: np.ndarray) -> str:
        """Look up batches and neighbors; return a message about cells of unknown batches, or an empty string."""
        problem = self.look_up_batches(cells, needed=False)
        self._pool, self.shares_across = None, {}
        if (self.translation or self.agreement) and (self.across or self.within) and len(train_rows) > 2:
            batches, names = self._batches, self.batches or []
            if problem:
                try:
                    own = self.own_batches(cells)
                    batches, names = np.array(own.codes, dtype=np.int64), list(own.categories)
                except DataError:
                    batches = None
            options = {name: getattr(self, name) for name in ("across", "within", "space", "temperature", "max_cells")}
            self._pool = NeighborPool(cells, np.sort(train_rows), batches, self._labels, **options)
            if batches is not None and len(self._pool.members) > 1 and self.across:
                has = self._pool.has_across
                shares = {batch: float(has[rows].mean()) for batch, rows in self._pool.members.items()}
                named = [*names, _NO_BATCH]  # cells without a batch have the code -1
                self.shares_across = {named[batch]: shares[batch] for batch in sorted(shares, key=shares.__getitem__)}
                if has.mean() < _FEW:
                    few = [name for name, share in self.shares_across.items() if share < _FEW]
                    warn(
                        f"{1 - has.mean():.0%} of the cells have no mutual neighbor in another batch, among them most "
                        f"cells of {listing(few, most=_MOST_NAMED)}, so these batches will mix less; check that they "
                        "share cell types with the others."
                    )
        return problem

    def bind_query(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Bind query cells as in :meth:`bind`, without labels and warnings about new batches or a missing column."""
        self._labels = None
        if self._look_up(cells, train_rows):
            logger.info(
                "Cells from batches that are unknown to the model are decoded with the mean of all batch vectors."
            )

    def n_cells(self, batch: dict[str, torch.Tensor]) -> int:
        """Return the number of cells in a batch, without their neighbors."""
        return batch["profile_genes"].shape[0]

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> dict[str, torch.Tensor]:
        """Tokenize a view of each cell and a view of one of its neighbors; add labels and full profiles of the cells.

        A cell without a neighbor is assigned an arbitrary neighbor with weight 0, so that all processes compute the
        same shapes.
        """
        blocks = [block]
        extra: dict[str, torch.Tensor] = {}
        if self._pool is not None:
            neighbors, has = self._pool.neighbors(block, epoch=epoch, seed=seed)
            blocks.append(neighbors)
            extra["has_neighbor"] = torch.from_numpy(has)
        if self._labels is not None:
            labels = [self._labels[block.rows]]
            if self._pool is not None:
                labels.append(np.where(has > 0, self._labels[self._pool.rows[neighbors.rows]], -1))
            extra["labels"] = torch.from_numpy(np.concatenate(labels))
        views = self._views(blocks, tokenizer, epoch=epoch, seed=seed)
        if (batches := self.batches_of(block)) is not None:
            extra["batch"] = batches
        return {**views, **whole_profiles(block), **extra}

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss; log its parts and the geometry of the embedding."""
        of_cells: Any = module
        inferred = of_cells.infer(**{name: tensor for name, tensor in batch.items() if name not in _OF_THE_OBJECTIVE})
        n_cells, batches = self.n_cells(batch), batch.get("batch")
        latent, mu = inferred["latent"], inferred["mu"].float()
        own = mu[:n_cells]
        translates = "has_neighbor" in batch and module.training
        error_b, translated_b, n_genes = _squared_errors(of_cells, latent if translates else latent[:n_cells], batch)
        figures = {"squared_error": error_b.mean(), "kl": kl_divergence(own, inferred["logvar"][:n_cells].float())}
        total = 0.5 * error_b.mean().clamp(min=_MIN_ERROR).log() + self.beta * figures["kl"] / n_genes
        if translated_b is not None:
            has_b = batch["has_neighbor"]
            share, n_having = has_b.mean(), has_b.sum().clamp(min=1)
            distance = ((own - mu[n_cells:]).square().mean(dim=1) * has_b).sum() / n_having
            error = (translated_b * has_b).sum() / n_having
            # Without any neighbor the error is 0, and its logarithm has weight 0.
            log_error = 0.5 * error.clamp(min=_MIN_ERROR).log() * has_b.amax()
            total = total + self.agreement * distance + self.translation * log_error
            # Means over cells with a neighbor are computed from these at the end of the epoch.
            figures |= {"has_neighbor": share, "distance": distance * share, "translated_error": error * share}
        if self.alignment and batches is not None and module.training:
            figures["sigreg"] = align(self._sigreg.to(own.device), own, batches, len(self.batches or []), fresh=True)
            total = total + self.alignment * figures["sigreg"]
        if "labels" in batch and module.training and self.labels_weight:
            figures["contrast"] = contrastive_loss(mu, batch["labels"])
            total = total + self.labels_weight * figures["contrast"]
        figures = {name: figure.detach() for name, figure in figures.items()}
        return total, figures | geometry_moments(own.detach())

    def summarize(self, means: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the means, with neighbor terms averaged over the cells that have a neighbor, and the geometry.

        Warns once if the embedding has collapsed.
        """
        means = dict(means)
        geometry = self._collapse.figures(means)
        if "has_neighbor" in means:
            share = means["has_neighbor"]
            for name in ("distance", "translated_error"):
                figure = means.pop(name)
                if share > 0:
                    means[name] = figure / share
        return {**super().summarize(means), **geometry}


def _squared_errors(
    module: Any, latent: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Return the errors of the cells (B,), those from their neighbors if `latent` has them, and the number of genes."""
    codes = batch.get("batch")
    n_cells = len(batch["profile_genes"])
    codes = None if codes is None else codes.repeat(len(latent) // n_cells)
    if (squared_errors := getattr(module, "squared_errors", None)) is not None:
        n_genes = module.n_genes
        errors = squared_errors(latent, codes, dense_profiles(batch, n_genes))
    else:
        predicted = module.decode(latent, codes).float()
        n_genes = predicted.shape[1]
        target = dense_profiles(batch, n_genes).repeat(len(latent) // n_cells, 1)
        errors = (predicted - target).square().mean(dim=1)
    own, *others = errors.split(n_cells)
    return own, others[0] if others else None, n_genes


def contrastive_loss(mu: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the supervised contrastive loss of means (V, L) with labels (V,), negative if unknown; 0 without pairs."""
    is_labeled = labels >= 0
    others = is_labeled & ~torch.eye(len(mu), dtype=torch.bool, device=mu.device)
    same = others & is_labeled.unsqueeze(1) & (labels == labels.unsqueeze(1))
    directions = nn.functional.normalize(mu, dim=1)
    similarity = (directions @ directions.T / _CONTRAST).masked_fill(~others, torch.finfo(mu.dtype).min)
    log_share = similarity - similarity.logsumexp(dim=1, keepdim=True)
    n_same = same.sum(dim=1)
    of_cells = -log_share.masked_fill(~same, 0.0).sum(dim=1) / n_same.clamp(min=1)
    return of_cells.sum() / (n_same > 0).sum().clamp(min=1)
