"""Integration of batches: a batch-conditioned decoder and SIGReg within batches remove batch effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from anndata import AnnData
from scipy import sparse
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_count, check_positive, check_share
from scforge._columns import codes_among, texts_of
from scforge.data.cells import CellBlock, Cells, CellSource
from scforge.errors import DataError, OptionError, warn
from scforge.eval.baselines import embedding_baselines
from scforge.eval.scib import integration_scores
from scforge.finetuning.base import (
    FROZEN,
    Batch,
    Column,
    Evaluated,
    EvaluationContext,
    Loss,
    Predictor,
    Task,
    register_task,
    warn_of_missing_base,
)
from scforge.finetuning.labels import check_names
from scforge.models.components.sigreg import SIGReg
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives._alignment import N_SLICES, align
from scforge.training.objectives._neighbors import NeighborPool, check_temperature
from scforge.training.objectives._views import tokenized_views
from scforge.training.objectives.base import TrainingDefaults

_NOTHING = -30.0
"""Logit of a token that occurs in no cell: its fraction is 0 in float32."""

_LOG_DISPERSIONS = (-7.0, 9.0)

KEY = "X_scforge_integrated"

_KEEP, _GENE_DROPOUT = (0.3, 1.0), (0.0, 0.4)

_OWN = ("counts", "batch", "has_neighbor")


class IntegrationHead(nn.Module):
    """An expression decoder conditioned on the batch of a cell, so that the embedding need not encode the batch.

    The fraction of gene g in the counts of a cell from batch e is ``softmax(W GELU(LayerNorm(A z + b_e)))_g``. The
    counts follow a negative binomial distribution whose mean is the fraction times the library size, with one
    dispersion per gene (as in scVI, Lopez et al. 2018, Nature Methods 15, 1053).

    Parameters
    ----------
    n_latent, n_tokens
        Number of dimensions D, and size V of the vocabulary.
    n_batches
        Number of batches E.
    n_reference
        Number of reference batches. Only the vectors of later batches are trained, and the rest of the decoder is
        frozen. If None, trains all parameters.
    hidden_dim
        Width H of the decoder.
    """

    def __init__(
        self,
        n_latent: int,
        n_tokens: int,
        n_batches: int,
        *,
        n_reference: int | None = None,
        hidden_dim: int = 128,
    ) -> None:
        super().__init__()
        n_fixed = 0 if n_reference is None else n_reference
        self.inner = nn.Linear(n_latent, hidden_dim)
        self.norm = nn.LayerNorm(hidden_dim)
        self.out = nn.Linear(hidden_dim, n_tokens)
        self.log_dispersion = nn.Parameter(torch.zeros(n_tokens))
        self.fixed_batches = nn.Parameter(0.1 * torch.randn(n_fixed, hidden_dim))
        self.batches = nn.Parameter(0.1 * torch.randn(n_batches - n_fixed, hidden_dim))
        if n_reference is not None:
            self.requires_grad_(False)
            self.batches.requires_grad_(True)

    @torch.no_grad()
    def start_at(self, counts: np.ndarray, n_special: int) -> None:
        """Initialize the output at the gene fractions in all counts, shape (V - n_special,), for any embedding."""
        shares = (counts + 0.1) / (counts + 0.1).sum()
        self.out.bias.copy_(torch.from_numpy(np.concatenate([np.full(n_special, _NOTHING), np.log(shares)])))
        self.out.weight.mul_(0.1)

    @torch.no_grad()
    def take_over(self, reference: IntegrationHead) -> None:
        """Copy the decoder of a reference; new batches start at the mean of the reference batches."""
        vectors = reference.batch_vectors()
        state = {
            name: value
            for name, value in reference.state_dict().items()
            if not name.startswith(("batches", "fixed_batches"))
        }
        own = {name: value for name, value in self.state_dict().items() if name not in state}
        self.load_state_dict({**own, **state})
        self.fixed_batches.copy_(vectors)
        self.batches.copy_(vectors.mean(dim=0).expand_as(self.batches))

    def batch_vectors(self) -> torch.Tensor:
        """Return the vector of each batch, shape (E, H)."""
        return torch.cat([self.fixed_batches, self.batches])

    def decode(self, embeddings: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Return the logit of the fraction of each token, shape (B, V).

        Parameters
        ----------
        embeddings
            Cell embeddings, shape (B, D).
        codes
            Batch of each cell, int64, shape (B,). -1 denotes an unknown batch, for which the mean of all batches is
            used.
        """
        vectors = self.batch_vectors()
        # The code -1 finds the mean at the end.
        vectors = torch.cat([vectors, vectors.mean(dim=0, keepdim=True)])
        return self.out(F.gelu(self.norm(self.inner(embeddings) + vectors[codes])))

    def forward(self, embeddings: torch.Tensor, batch: Mapping[str, Any] | None = None) -> torch.Tensor:
        """Return the expression of each cell decoded for the mean batch, log1p CP10K, shape (B, V)."""
        codes = torch.full((len(embeddings),), -1, dtype=torch.int64, device=embeddings.device)
        return (1e4 * self.decode(embeddings, codes).float().softmax(dim=-1)).log1p()


def negative_binomial(
    logits: torch.Tensor,
    counts: torch.Tensor,
    log_dispersion: torch.Tensor,
    measured: torch.Tensor | None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mean negative log-likelihood of a count, up to a constant, as a scalar.

    If m is the fraction times the library size and r the dispersion, this is ``(y + r) log(r + m) - r log r - y log m +
    lgamma(r) - lgamma(y + r)`` (Lopez et al. 2018).

    Parameters
    ----------
    logits
        Logit of the fraction of each gene, shape (B, G).
    counts
        Counts, shape (B, G).
    log_dispersion
        Logarithm of r, shape (G,).
    measured
        Genes that were measured, bool, shape (G,); other genes have a fraction of 0 and are ignored. If None, uses all
        genes.
    weights
        Weight of each cell, shape (B,); all 1 if None.
    """
    logits = logits.float()
    if measured is not None:
        logits = logits.masked_fill(~measured, -torch.inf)
    library = counts.sum(dim=-1, keepdim=True).clamp_min(1.0)
    # The logarithm of nothing would be minus infinity times a count of 0.
    log_mean = (logits.log_softmax(dim=-1) + library.log()).clamp_min(-30.0)
    r = log_dispersion.clamp(*_LOG_DISPERSIONS).exp()
    per_count = torch.lgamma(r) - torch.lgamma(counts + r) - r * r.log()
    loss = (counts + r) * (r + log_mean.exp()).log() - counts * log_mean + per_count
    of_genes = loss if measured is None else loss * measured * (len(measured) / measured.sum().clamp_min(1))
    of_cells = of_genes.mean(dim=1)
    return of_cells.mean() if weights is None else (of_cells * weights).sum() / weights.sum().clamp_min(1)


@register_task("integration")
class Integration(Task):
    """Remove batch effects from the embedding, without labels.

    A decoder predicts the counts y of a cell of batch e from the embedding of a view of the cell (a fraction of its
    counts, some genes masked), and from the embedding of a view of a mutual nearest neighbor, mostly of another batch
    (as in :class:`~scforge.training.NeighborDenoising`)::

        loss = own + translation * translated + alignment * SIGReg within each batch
        own, translated = mean of -log NB(y_g; share_g(z, e) * library size, dispersion_g), z of the cell, its neighbor

    The embedding z need not encode variation that the batch explains, but must preserve differences between cells in a
    batch. After training, the correction for batches is fitted on the embedding, as after the training of an
    :class:`~scforge.models.Encoder`. Held-out cells have no neighbors; without this term, they select the best epoch.

    Parameters
    ----------
    batch_key
        Column of ``obs`` with the batches. Cells without a batch are not used.
    labels_key
        Column of ``obs`` with the cell types, used only by :meth:`evaluate`.
    batches
        Batches of the training cells, in the order of the decoder. If None, the batches are sorted.
    n_reference
        Number of batches of the reference model, which come first; see :meth:`scforge.models.Encoder.load_query_data`,
        which sets it.
    translation
        Weight of the reconstruction from a neighbor; 0 to search no neighbors.
    across, within, temperature, max_cells
        Numbers of mutual neighbors in each other batch and in the same batch, how they are sampled, and the number of
        cells among which they are searched; see :class:`~scforge.training.NeighborDenoising`.
    alignment
        Weight of SIGReg, which pulls each batch onto the same Gaussian; 0 disables it. A higher weight (0.02) mixes
        batches that are far apart, but makes cell types harder to distinguish, especially when batches differ in their
        cell types.
    hidden_dim
        Width of the decoder.
    """

    defaults = TrainingDefaults(batch_size=256, lr=1e-3, weight_decay=0.01, schedule="one_cycle", max_epochs=40)
    keys = ("batch_key", "labels_key")
    learns_labels = False
    # Cells of a batch are taken for a sample of it.
    random_batches = True

    def __init__(
        self,
        *,
        batch_key: str,
        labels_key: str | None = None,
        batches: Sequence[str] | None = None,
        n_reference: int | None = None,
        translation: float = 1.0,
        across: int = 30,
        within: int = 5,
        temperature: float | None = 0.1,
        max_cells: int = 20_000,
        alignment: float = 0.001,
        hidden_dim: int = 128,
    ) -> None:
        self.batch_key = batch_key
        self.labels_key = labels_key
        self.batches = check_names("batches", batches)
        self.n_reference = n_reference
        if n_reference is not None and (self.batches is None or not 0 < n_reference <= len(self.batches)):
            raise OptionError(f"must be between 1 and the number of batches={batches!r}.", n_reference=n_reference)
        self.translation = check_positive("translation", translation, or_zero=True)
        self.across = check_count("across", across, "neighbors", least=0)
        self.within = check_count("within", within, "neighbors", least=0)
        self.temperature = check_temperature(temperature)
        self.max_cells = check_count("max_cells", max_cells, "cells", least=2)
        self.alignment = check_positive("alignment", alignment, or_zero=True)
        self.hidden_dim = check_count("hidden_dim", hidden_dim, "dimensions")
        self._sigreg = SIGReg(N_SLICES)
        self._codes: np.ndarray
        self._pool: NeighborPool | None = None
        self._measured: torch.Tensor | None = None

    def usable(self, column: Column) -> np.ndarray:
        """Return which cells have a batch."""
        return np.asarray(self._batches(column).notna())

    def _batches(self, column: Column) -> pd.Categorical:
        return texts_of(column(self.batch_key), key=self.batch_key, argument="batch_key")

    def strata(self, column: Column) -> pd.Series:
        """Return the batches, so that each part of the split preserves batch proportions."""
        return pd.Series(self._batches(column))

    def options_from(self, column: Column) -> dict[str, Any]:
        """Return the batches of the training cells, unless they are already known.

        Raises
        ------
        DataError
            If there is only one batch.
        """
        if self.batches is not None:
            return {}
        batches = self._batches(column).categories
        if len(batches) < 2:
            raise DataError(
                "has only one batch among the training cells; integration needs at least two.", batch_key=self.batch_key
            )
        return {"batches": [str(name) for name in batches]}

    @property
    def known_batches(self) -> list[str]:
        """The batches, after they have been determined."""
        assert self.batches is not None
        return self.batches

    def make_head(self, n_latent: int, module: nn.Module) -> IntegrationHead:
        """Create the decoder."""
        architecture: Any = module
        n_tokens, n_batches = architecture.vocab_size, len(self.known_batches)
        return IntegrationHead(n_latent, n_tokens, n_batches, n_reference=self.n_reference, hidden_dim=self.hidden_dim)

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the batch of each cell, -1 if the decoder does not know it, and the neighbors of training cells."""
        self._codes = codes_among(self._batches(cells.column), self.known_batches)
        self._pool = None
        if self.translation and (self.across or self.within) and len(train_rows) > 2:
            self._pool = NeighborPool(
                cells,
                np.sort(train_rows),
                self._codes,
                across=self.across,
                within=self.within,
                temperature=self.temperature,
                max_cells=self.max_cells,
            )
        self._measured = None if cells.measured is None else torch.from_numpy(cells.measured)

    def initialize(self, module: nn.Module, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Initialize the decoder at the mean expression."""
        head: Any = module.head
        head.start_at(np.asarray(cells.counts.sum(axis=0), dtype=np.float64).ravel(), tokenizer.vocab.n_special)

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> Batch:
        """Tokenize a view of each cell, and of one of its neighbors, and add what the decoder predicts and receives.

        That is ``counts``, shape (B, G), ``batch``, shape (B,), and ``has_neighbor``, shape (B,). A cell without a
        neighbor has an arbitrary one, so that all processes compute the same shapes.
        """
        blocks, extra = [block], {}
        if self._pool is not None:
            neighbors, has_neighbor = self._pool.neighbors(block, epoch=epoch, seed=seed)
            blocks.append(neighbors)
            extra["has_neighbor"] = torch.from_numpy(has_neighbor)
        how = {"epoch": epoch, "seed": seed}
        tokens = tokenized_views(blocks, tokenizer, keep=_KEEP, gene_dropout=_GENE_DROPOUT, **how)
        rows = np.concatenate([part.rows for part in blocks])
        counts = np.zeros((len(block), tokenizer.vocab.n_genes), dtype=np.float32)
        counts[np.repeat(np.arange(len(block)), np.diff(block.indptr)), block.genes] = block.counts
        return {
            **self.arrange(tokens, tokenizer, rows, **how),
            "counts": torch.from_numpy(counts),
            "batch": torch.from_numpy(self._codes[block.rows]),
            **extra,
        }

    def n_cells(self, batch: Batch) -> int:
        """Return the number of cells in a batch, without their neighbors."""
        return batch["counts"].shape[0]

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """Return the loss and its parts."""
        model: Any = module
        codes, counts = batch["batch"], batch["counts"]
        tokens = {name: tensor for name, tensor in batch.items() if name not in _OWN}
        embeddings = model.encode(**tokens).float()
        own = embeddings[: len(counts)]
        measured = None if self._measured is None else self._measured.to(own.device)
        n_genes = counts.shape[1]

        def error(z_bd: torch.Tensor, weights_b: torch.Tensor | None = None) -> torch.Tensor:
            logits = model.head.decode(z_bd, codes)[:, -n_genes:]
            return negative_binomial(logits, counts, model.head.log_dispersion[-n_genes:], measured, weights_b)

        total = error(own)
        figures = {"decoder": total.detach(), "spread": own.detach().std(dim=0, correction=0).mean()}
        if module.training and "has_neighbor" in batch:
            translated = error(embeddings[len(counts) :], batch["has_neighbor"])
            total = total + self.translation * translated
            figures["translated"] = translated.detach()
        if self.alignment:
            sigreg = align(self._sigreg.to(own.device), own, codes, len(self.known_batches), fresh=module.training)
            total = total + self.alignment * sigreg
            figures["sigreg"] = sigreg.detach()
        return total, figures

    def loss_of(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Raise an error, because the loss depends on embeddings, not on the expression that the head returns."""
        raise NotImplementedError("call loss(module, batch)")

    def predict(  # type: ignore[override]
        self,
        predictor: Predictor,
        adata: AnnData | None,
        *,
        key_added: str | None = None,
        correction: float | None = None,
    ) -> np.ndarray:
        """Embed cells, correct the embedding for batches, and write it into ``obsm["X_scforge_integrated"]``.

        Parameters
        ----------
        predictor, adata
            The model applied to the cells, and the AnnData to write to, or None.
        key_added
            Key in obsm to write instead of ``"X_scforge_integrated"``.
        correction
            How strongly the embedding is corrected, from 0 (not at all) to 1; see
            :meth:`scforge.models.Encoder.get_latent_representation`. If None, it is 1, or 0 if the model has no
            correction (a query model, or training that was interrupted) or the cells have no column with batches.

        Returns
        -------
        The embedding, float32, shape (N, D).

        Raises
        ------
        OptionError
            If `correction` is above 0, but the model has no correction or the cells have no batches.
        """
        if correction is None:
            correction = float(predictor.correct is not None)
            try:
                _ = self._batches(predictor.cells.column) if correction else None
            except DataError as error:
                warn(f"The embedding is not corrected for batches: {str(error).rstrip('.')}; add the column.")
                correction = 0.0
        elif check_share("correction", correction) and predictor.correct is None:
            raise OptionError(
                ", but the model has no correction: query models and models whose training was "
                "interrupted have none; pass correction=0.",
                correction=correction,
            )
        embedding = predictor.embedding(correction=correction)
        if adata is not None:
            adata.obsm[key_added or KEY] = embedding
        return embedding

    def evaluate(self, context: EvaluationContext) -> Evaluated:
        """Score batch correction and biological conservation, with PCA, Harmony, scVI and the frozen embedding.

        The embedding is scored as :meth:`predict` returns it, and all methods are scored on the same cells. PCA,
        Harmony and scVI are fitted on the training cells and the scored cells together, which favors them. PCA and scVI
        could embed new cells, and Symphony does so for Harmony, but
        this is not done here. Without labels, biological scores are missing.

        The scores are ``bio``, ``batch``, ``total`` and their components; see
        :func:`scforge.eval.scib.integration_scores`.

        Raises
        ------
        OptionError
            If no column with cell types is specified.
        DataError
            If the scored cells come from only one batch or one cell type.

        Warns
        -----
        ScforgeWarning
            If a baseline is missing.
        """
        if self.labels_key is None:
            raise OptionError(", but scoring requires cell types; pass labels_key to finetune.", labels_key=None)
        methods = {"scforge": context.predictor.embedding(context.rows, correction=1.0)}
        if context.base is not None:
            methods[FROZEN] = context.base.embedding(context.rows)
        elif context.baselines:
            warn_of_missing_base()
        if context.baselines:
            # Fitted on the scored cells and the training cells.
            parts = [(context.cells, context.rows)]
            if context.train_cells is not None and context.train_rows is not None:
                parts.append((context.train_cells, context.train_rows))
            counts = sparse.vstack([cells.sample(len(rows), rows=rows).counts for cells, rows in parts], format="csr")
            columns = [np.asarray(self._batches(cells.column), dtype=object)[rows] for cells, rows in parts]
            batches = np.concatenate(columns)
            names = pd.RangeIndex(len(batches)).astype(str)  # scored and training cells may have the same
            adata = AnnData(counts, obs=pd.DataFrame({self.batch_key: batches}, index=names))
            baselines = ("pca", "harmony", "scvi")
            embeddings = embedding_baselines(adata, baselines, batch_key=self.batch_key, seed=context.seed)
            methods |= {name: embedding[: len(context.rows)] for name, embedding in embeddings.items()}
        keys = {"labels_key": self.labels_key, "batch_key": self.batch_key}
        obs = pd.DataFrame({key: context.cells.column(key).iloc[context.rows] for key in keys.values()})
        scores = {name: integration_scores(embedding, obs, **keys) for name, embedding in methods.items()}
        return Evaluated(pd.DataFrame.from_dict(scores, orient="index").rename_axis("method"))
