"""Variational: reconstruct expression from a latent distribution, and classify cells, as in ScDiVa.

Shapes: B cells, S tokens, G genes of the vocabulary, L latent dimensions, T classes, E expressed genes of a cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from scforge._checks import check_count, check_positive
from scforge.data.cells import CellBlock, Cells, CellSource
from scforge.errors import DataError, OptionError, listing, warn
from scforge.models.components.latent import classification_loss, kl_divergence, reconstruction_loss
from scforge.tokenizers._expression import log1p_cp10k
from scforge.tokenizers.base import RaggedTokens, Tokenizer, pad
from scforge.training.objectives._conditioning import TellsLabels, numbers_of_cells, of_block
from scforge.training.objectives._views import downsampled
from scforge.training.objectives.base import TrainingDefaults, mismatch, register_objective

_ACTIVE = 0.01
"""Minimum variance over cells of the mean of an active latent dimension (Burda et al. 2016)."""

_OF_THE_OBJECTIVE = {"profile_genes", "profile_values", "kl_share", "cell_type", "batch"}
"""Keys of a batch that are not arguments of `infer`."""


@register_objective("variational")
class Variational(TellsLabels):
    """Mean squared error of all genes, cross entropy of the class, and KL divergence of the latent distribution.

    Requires an architecture with a latent distribution, such as ``scdiva``. Let x be the log1p CP10K values of all
    genes in the vocabulary. Let mu and v be the mean and variance of the latent distribution with L dimensions, and z a
    sample from it::

        reconstruction = mean over cells and genes of (decode(z) - x)^2
        classification = mean over cells with a class of the cross entropy of classify(z)
        kl = mean over cells of -1/2 sum over dimensions of (1 + log v - mu^2 - v)
        loss = reconstruction_weight * reconstruction + classification_weight * classification + beta * kl

    The reconstruction is a mean over genes and the KL divergence a sum over dimensions, so `beta` is small. For G genes
    with a residual variance of s^2, the evidence lower bound has ``beta = 2 s^2 / G``, which is 2e-4 for 2,000 genes of
    PBMC 3k. On these data, the default of 1e-4 keeps 32 of 32 dimensions, and 1e-2 keeps 21. A larger `beta` makes
    latent dimensions collapse, so that they carry no information about the cell. ``active_units`` in the history counts
    the dimensions that have not collapsed (the variance of mu over cells is above 0.01).

    Parameters
    ----------
    beta
        Weight of the KL divergence.
    free_bits
        KL divergence in nats per dimension that is not penalized, to prevent a collapse.
    kl_warmup
        Number of epochs over which `beta` increases to its value; 0 for no warm-up. Validation always uses the full
        value.
    reconstruction_weight, classification_weight
        Weights of the two tasks.
    labels_key
        Column of ``obs`` with the class of each cell, e.g. its type. If None, cells are not classified. Cells without a
        class are used only for the reconstruction.
    labels
        Names of the classes, in the order of their codes. If None, uses the classes of the cells that the model is
        created with. Cells of other classes are treated as cells without a class.
    batch_key
        Column of ``obs`` with the batch of each cell, on which the decoder is conditioned.
    batches
        Names of the batches, in the order of their codes. If None, uses the batches of the cells that the model is
        created with.
    thinning
        Range of the fraction of counts that the model receives for each cell, sampled log-uniformly in each epoch. The
        model still has to predict the whole cell. If None, keeps all counts.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
    >>> scforge.models.Encoder.setup_anndata(adata)
    >>> objective = {"name": "variational", "beta": 1e-3}
    >>> sizes = dict(hidden_dim=8, num_layers=1, num_heads=2, latent_dim=4)
    >>> model = scforge.models.Encoder(adata, "scdiva", objective=objective, **sizes)
    >>> model.train(max_epochs=1, progress_bar=False)
    >>> "validation_loss" in model.history
    True
    """

    defaults = TrainingDefaults(batch_size=64, lr=1e-3, weight_decay=0.01, schedule="cosine_warmup", max_epochs=30)

    def __init__(
        self,
        *,
        beta: float = 1e-4,
        free_bits: float = 0.0,
        kl_warmup: int = 5,
        reconstruction_weight: float = 1.0,
        classification_weight: float = 1.0,
        labels_key: str | None = None,
        labels: Sequence[str] | None = None,
        batch_key: str | None = None,
        batches: Sequence[str] | None = None,
        thinning: Sequence[float] | None = None,
    ) -> None:
        self.beta = check_positive("beta", beta, or_zero=True)
        self.free_bits = check_positive("free_bits", free_bits, or_zero=True)
        self.kl_warmup = check_count("kl_warmup", kl_warmup, "epochs", least=0)
        self.reconstruction_weight = check_positive("reconstruction_weight", reconstruction_weight, or_zero=True)
        self.classification_weight = check_positive("classification_weight", classification_weight, or_zero=True)
        self._set_labels(labels_key, labels)
        self._set_batches(batch_key, batches)
        self.thinning = check_thinning(thinning)
        if not self.reconstruction_weight and (self.labels_key is None or not self.classification_weight):
            raise OptionError(
                "without labels leaves no loss to train on; pass labels_key and a "
                "classification_weight, or a positive reconstruction_weight.",
                reconstruction_weight=0,
            )
        self._labels: np.ndarray | None = None

    def check_architecture(self, architecture: type[nn.Module] | nn.Module) -> None:
        """Raise an error if the architecture does not have a latent distribution and the required heads."""
        check_latent("variational", architecture, ("infer", "decode", "classify"), "the architecture 'scdiva'")

    def initialize(self, module: nn.Module, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Initialize the decoder at the mean expression of each gene."""
        start_at_means(module, cells)

    def model_options(self) -> dict[str, Any]:
        """Return the numbers of classes and batches, as options of the architecture."""
        classes = {} if self.labels is None else {"num_cell_types": len(self.labels)}
        return {**classes, **super().model_options()}

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the class and the batch of each cell.

        Raises
        ------
        DataError
            If a column is missing, no training cell has a known class, or a batch is unknown.
        """
        super().bind(cells, train_rows)
        if problem := self._no_class(cells, train_rows, needed=True):
            raise DataError(f"{problem}; rename the classes in the data.")

    def bind_query(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the class and the batch of each query cell, which may be new to the model.

        Raises
        ------
        DataError
            If no cell has a known class and there is no other loss.
        """
        super().bind_query(cells, train_rows)
        problem = self._no_class(cells, train_rows, needed=False)
        if problem and not self.reconstruction_weight:
            raise DataError(f"{problem}, and reconstruction_weight=0 leaves no other loss; label some of the cells.")
        if problem:
            warn(f"{problem}; the cells are used only for the reconstruction.")

    def _no_class(self, cells: Cells, train_rows: np.ndarray, *, needed: bool) -> str:
        """Look up the class of each cell; return a message if no training cell has a known class, otherwise ""."""
        self._labels = numbers_of_cells("labels_key", self.labels_key, "labels", self.labels, cells, needed=needed)
        if self._labels is None or (self._labels[train_rows] >= 0).any():
            return ""
        return (
            f"labels_key={self.labels_key!r}: no training cell has a class that is known to the model (known: "
            f"{listing(self.labels or [])})"
        )

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> dict[str, torch.Tensor]:
        """Tokenize the visible part of each cell, and add the whole profile."""
        seen = downsampled(block, self.thinning, epoch=epoch, seed=seed)
        batch = {**cast(dict[str, torch.Tensor], tokenizer(seen)), **whole_profiles(block)}
        warmed_up = min(1.0, (epoch + 1) / self.kl_warmup) if self.kl_warmup else 1.0
        batch["kl_share"] = torch.full((len(block),), warmed_up)
        codes = {"cell_type": of_block(self.labels_key, self._labels, block), "batch": self.batches_of(block)}
        batch |= {name: tensor for name, tensor in codes.items() if tensor is not None}
        return batch

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss; log its parts, and the moments for counting active units."""
        of_cells: Any = module
        tokens = {name: tensor for name, tensor in batch.items() if name not in _OF_THE_OBJECTIVE}
        inferred = of_cells.infer(**tokens)
        latent, mu = inferred["latent"], inferred["mu"]
        total = latent.new_zeros(())
        figures: dict[str, torch.Tensor] = {}
        if self.reconstruction_weight:
            predicted = of_cells.decode(latent, batch.get("batch"))
            figures["reconstruction"] = reconstruction_loss(predicted, dense_profiles(batch, predicted.shape[1]))
            total = total + self.reconstruction_weight * figures["reconstruction"]
        if "cell_type" in batch:
            labels = batch["cell_type"]
            logits = of_cells.classify(latent)
            figures["classification"] = classification_loss(logits, torch.where(labels < 0, -100, labels))
            total = total + self.classification_weight * figures["classification"]
            figures["labeled"] = (labels >= 0).float().mean()
            figures["accuracy"] = (logits.argmax(dim=1) == labels).float().mean()
        if getattr(module, "variational", True):
            beta = self.beta * batch["kl_share"].mean() if module.training else self.beta
            figures["kl"] = kl_divergence(mu, inferred["logvar"])
            free = kl_divergence(mu, inferred["logvar"], self.free_bits) if self.free_bits else figures["kl"]
            total = total + beta * free
        figures = {name: figure.detach() for name, figure in figures.items()}
        return total, figures | mean_moments(mu)

    def summarize(self, means: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the means, the accuracy over cells with a class, and the number of active units."""
        means = dict(means)
        units = active_units(means)
        if "accuracy" in means:
            labeled, right = means.pop("labeled"), means.pop("accuracy")
            if labeled > 0:
                means["accuracy"] = right / labeled
        return {**super().summarize(means), **units}


def check_latent(
    objective: str, architecture: type[nn.Module] | nn.Module, methods: Sequence[str], choice: str
) -> None:
    """Raise :class:`~scforge.errors.OptionError` if an architecture lacks one of these latent-variable methods."""
    if not all(hasattr(architecture, name) for name in methods):
        why = f"has no latent distribution with the methods {listing(methods)}"
        raise mismatch(objective, architecture, why, choice)


def check_thinning(thinning: Sequence[float] | None) -> list[float] | None:
    """Return the range of the fraction of counts to keep as a list, or None.

    Raises
    ------
    OptionError
        If the value is not a valid range.
    """
    if thinning is None:
        return None
    shares = list(thinning) if isinstance(thinning, Sequence) else []
    if len(shares) != 2 or not 0 < shares[0] <= shares[1] <= 1:
        raise OptionError(
            "is not a valid range; pass two fractions (low, high) with 0 < low <= high <= 1, e.g. (0.1, 1).",
            thinning=thinning,
        )
    return [float(share) for share in shares]


def whole_profiles(block: CellBlock) -> dict[str, torch.Tensor]:
    """Return the log1p CP10K values and the indices of all expressed genes of each cell.

    ``profile_genes`` (int64, shape (B, E)) contains the vocabulary gene index plus 1, padded with 0. ``profile_values``
    (float32, shape (B, E)) contains the values. These arrays are much smaller than dense profiles.
    """
    padded = pad(RaggedTokens(block.indptr, block.genes + 1, log1p_cp10k(block)))
    return {"profile_genes": padded["input_ids"], "profile_values": padded["values"]}


def dense_profiles(batch: dict[str, torch.Tensor], n_genes: int) -> torch.Tensor:
    """Return the profiles from :func:`whole_profiles` as a dense tensor, float32, shape (B, G)."""
    genes, values = batch["profile_genes"], batch["profile_values"]
    # Padding goes into a separate column.
    return values.new_zeros((len(genes), n_genes + 1)).scatter(1, genes, values)[:, 1:]


def start_at_means(module: nn.Module, cells: CellSource) -> None:
    """Initialize the decoder at the mean expression of each gene, if the architecture has ``init_expression_prior``."""
    if not hasattr(module, "init_expression_prior"):
        return
    cast(Any, module).init_expression_prior(torch.from_numpy(expression_sums(cells)[0] / len(cells)).float())


def expression_sums(cells: CellSource, groups: np.ndarray | None = None) -> np.ndarray:
    """Return the sum of the log1p CP10K values of each gene over each group of cells (0 to K - 1), float64 (K, G)."""
    groups = np.zeros(len(cells), dtype=np.int64) if groups is None else groups
    sums = np.zeros((groups.max() + 1, cells.counts.shape[1]))
    for start in range(0, len(cells), 4096):
        block = cells.block(np.arange(start, min(start + 4096, len(cells))))
        of_entries = np.repeat(groups[block.rows], np.diff(block.indptr)) * sums.shape[1] + block.genes
        sums += np.bincount(of_entries, weights=log1p_cp10k(block), minlength=sums.size).reshape(sums.shape)
    return sums


def mean_moments(mu: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the latent variable and its square, averaged over cells, each of shape (L,)."""
    mu = mu.detach().float()
    return {"latent_mean": mu.mean(dim=0), "latent_square": mu.square().mean(dim=0)}


def active_units(means: dict[str, np.ndarray]) -> dict[str, float]:
    """Remove the moments from :func:`mean_moments` from an epoch's means; return the number of active units."""
    mean, square = means.pop("latent_mean"), means.pop("latent_square")
    return {"active_units": float((square - mean**2 > _ACTIVE).sum())}
