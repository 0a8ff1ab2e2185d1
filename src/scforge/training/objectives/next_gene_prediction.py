"""Next-gene prediction: predict the genes of a cell one after the other, each with its expression bin.

Shapes: B cells, S tokens, N cells in a source, V tokens in the vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numba
import numpy as np
import torch
from scipy import sparse
from torch import nn

from scforge._checks import check_bool, check_choice, check_share
from scforge._columns import texts_of
from scforge._constants import IGNORE_LABEL, TARGET_SUM
from scforge.data.cells import CellBlock, Cells, CellSource, choose_rows
from scforge.data.sampling import cell_keys, uniform
from scforge.errors import DataError, OptionError, listing
from scforge.tokenizers.base import TokenBatch, Tokenizer
from scforge.training.objectives._conditioning import check_classes, classes_found, numbers_of_cells, of_block
from scforge.training.objectives.base import (
    Objective,
    TrainingDefaults,
    loss_of,
    mismatch,
    refuse_zero_genes,
    register_objective,
)
from scforge.training.objectives.token_frequencies import token_counts

if TYPE_CHECKING:
    import pandas as pd


logger = logging.getLogger("scforge")

_STREAM = 0x6F726465  # "orde": separate random numbers from those of masks and views
_SAMPLED_CELLS = 10_000
"""Number of cells over which bins are averaged."""


@register_objective("next_gene_prediction")
class NextGenePrediction(Objective):
    """Cross entropy of each next gene of a cell, and of its bin, given the previous genes.

    Requires a causal architecture (``predicts_next``), such as ``autoregressive_transformer``. If cells end with an EOS
    token, it is predicted as well, so the model learns how many genes a cell expresses.

    Parameters
    ----------
    order
        Order of the genes. ``"rank"`` sorts from the highest to the lowest value, with ties in random order;
        ``"random"`` shuffles. Random orders are resampled in each epoch. Tokenizers that rank genes keep their ranking
        with ``"rank"``. A gene and its bin are predicted independently. Ranks are informative about values, and random
        orders are not, so use ``"rank"`` to generate cells.
    condition_key
        Column of ``obs`` with classes on which the model is conditioned, such as the cell type, so that it can generate
        cells of a class. If None, uses no classes.
    conditions
        Names of the classes, in the order of their codes. If None, uses the classes of the cells that the model is
        created with. Cells of other classes are treated as unknown.
    condition_dropout
        Fraction of cells whose class is dropped in training, so that the model also handles cells of unknown class.
    token_prior
        Whether to initialize the gene head at the token frequencies of the training cells. Requires an architecture
        with ``init_token_prior``.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
    >>> scforge.models.Encoder.setup_anndata(adata)
    >>> objective = {"name": "next_gene_prediction", "order": "rank"}
    >>> sizes = dict(hidden_dim=8, num_layers=1, num_heads=2)
    >>> model = scforge.models.Encoder(adata, "autoregressive_transformer", objective=objective, **sizes)
    >>> model.train(max_epochs=1, progress_bar=False)
    >>> "validation_loss" in model.history
    True
    """

    generates = True
    # In batches of cells of similar length each token of a long cell would weigh less, and cells would seem to end
    # early.
    random_batches = True

    defaults = TrainingDefaults(batch_size=16, lr=1e-3, weight_decay=0.01, schedule="cosine_warmup", max_epochs=10)

    def __init__(
        self,
        *,
        order: str = "rank",
        condition_key: str | None = None,
        conditions: Sequence[str] | None = None,
        condition_dropout: float = 0.1,
        token_prior: bool = True,
    ) -> None:
        self.order = check_choice("order", order, ["rank", "random"])
        self.condition_key = condition_key
        self.conditions = check_classes("conditions", conditions, "condition_key", condition_key)
        self.condition_dropout = check_share("condition_dropout", condition_dropout)
        self.token_prior = check_bool("token_prior", token_prior)
        self._codes: np.ndarray | None = None

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise an error if the tokenizer does not bin expression, or includes unexpressed genes."""
        if getattr(tokenizer, "n_bins", None) is None:
            raise OptionError(
                f"'next_gene_prediction' predicts expression bins, but {type(tokenizer).__name__} does not provide "
                "them; choose tokenizer='binned_expression'."
            )
        refuse_zero_genes("next_gene_prediction", tokenizer)

    def check_architecture(self, architecture: type[nn.Module] | nn.Module) -> None:
        """Raise an error if the architecture receives the token that it has to predict."""
        if not getattr(architecture, "predicts_next", False):
            choice = "'autoregressive_transformer'"
            raise mismatch("next_gene_prediction", architecture, "receives the token that it has to predict", choice)

    def options_from(self, column: Callable[[str], pd.Series]) -> dict[str, Any]:
        """Return the classes of the cells that the model is created with, unless classes are already set."""
        if self.condition_key is None or self.conditions is not None:
            return {}
        read = partial(texts_of, fractional=False)
        return {"conditions": classes_found("condition_key", self.condition_key, column, read=read)}

    def model_options(self) -> dict[str, Any]:
        """Return the number of classes, as an option of the architecture."""
        return {} if self.conditions is None else {"n_conditions": len(self.conditions)}

    def bind(self, cells: Cells, train_rows: np.ndarray | None = None) -> None:
        """Look up the class of each cell."""
        self._codes = numbers_of_cells("condition_key", self.condition_key, "conditions", self.conditions, cells)
        if self._codes is None:
            return
        self._codes += 1  # 0 is not a class
        if not self._codes.any():
            raise DataError(
                f": no cell has a class that is known to the model (known: "
                f"{listing(self.conditions or [])}); rename the classes in the data.",
                condition_key=self.condition_key,
            )
        if unknown := int((self._codes == 0).sum()):
            logger.info(
                "%d of %d cells have no known class in the column %r.", unknown, len(self._codes), self.condition_key
            )

    def initialize(self, module: nn.Module, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Initialize the gene head at the token frequencies, and set the bin values."""
        if self.token_prior and hasattr(module, "init_token_prior"):
            counts = token_counts(cells, tokenizer)
            if tokenizer.append_eos and tokenizer.vocab.eos_id is not None:
                counts[tokenizer.vocab.eos_id] = min(len(cells), _SAMPLED_CELLS)
            module.init_token_prior(torch.from_numpy(counts))
        if hasattr(module, "init_bin_values"):
            means = bin_means(cells, tokenizer, getattr(module, "n_bins", None))
            module.init_bin_values(torch.from_numpy(means))

    def arrange(
        self, tokens: TokenBatch, tokenizer: Tokenizer, rows: np.ndarray, *, epoch: int, seed: int
    ) -> TokenBatch:
        """Sort the genes of each cell in the order of prediction."""
        if self.order == "rank" and tokenizer.ranks:
            return tokens
        ids = tokens["input_ids"].numpy()
        places = np.empty(ids.shape, dtype=np.int64)
        keys = cell_keys(rows, seed=seed, epoch=epoch, stream=_STREAM)
        _arrange(ids, tokens["values"].numpy(), keys, tokenizer.vocab.n_special, self.order == "rank", places)
        order = torch.from_numpy(places)
        # Padding is not moved, so the mask does not change.
        arranged = {name: tensor.gather(1, order) for name, tensor in cast(dict[str, torch.Tensor], tokens).items()}
        return cast(TokenBatch, arranged)

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> dict[str, torch.Tensor]:
        """Tokenize and sort the genes, and use genes and EOS as labels; the architecture shifts the labels."""
        tokens = self.arrange(tokenizer(block), tokenizer, block.rows, epoch=epoch, seed=seed)
        ids, vocab = tokens["input_ids"], tokenizer.vocab
        predicted = ids >= vocab.n_special
        if tokenizer.append_eos and vocab.eos_id is not None:
            # A truncated cell gets no EOS label.
            whole = torch.from_numpy(np.diff(block.indptr) <= tokenizer.most_genes).unsqueeze(1)
            predicted |= (ids == vocab.eos_id) & tokens["attention_mask"] & whole
        batch: dict[str, torch.Tensor] = {**tokens, "labels": ids.masked_fill(~predicted, IGNORE_LABEL)}
        if (condition := of_block(self.condition_key, self._codes, block)) is not None:
            batch["condition"] = condition
        return batch

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the module's own loss; training drops the class of some cells."""
        if module.training and "condition" in batch and self.condition_dropout > 0:
            condition = batch["condition"]
            is_kept = torch.rand(condition.shape, device=condition.device) >= self.condition_dropout
            batch = {**batch, "condition": condition * is_kept}
        return loss_of(module, batch), {}


def bin_means(cells: CellSource, tokenizer: Tokenizer, n_bins: int | None = None) -> np.ndarray:
    """Return the mean log1p CP10K of the genes in each bin, over at most 10,000 cells, float32, shape (n_bins,).

    Bin 0 has the value 0. The value of an empty bin is interpolated between neighboring bins, or is the highest value.

    Parameters
    ----------
    cells
        The cells.
    tokenizer
        A tokenizer that bins expression.
    n_bins
        Number of bins. If None, uses the number of bins of the tokenizer.
    """
    n_bins = int(getattr(tokenizer, "n_bins", 0)) if n_bins is None else n_bins
    sums, counts = np.zeros(n_bins), np.zeros(n_bins)
    rows = choose_rows(len(cells), _SAMPLED_CELLS)
    for start in range(0, len(rows), 1024):
        block = cells.block(rows[start : start + 1024])
        tokens = tokenizer.ragged(block)
        of_cell = np.repeat(TARGET_SUM / np.maximum(block.totals, 1.0), np.diff(block.indptr))
        values = np.log1p(block.counts * of_cell)
        matrix = sparse.csr_matrix((values, block.genes, block.indptr), shape=(len(block), tokenizer.vocab.n_genes))
        cell, gene = np.repeat(np.arange(len(block)), np.diff(tokens.indptr)), tokens.ids - tokenizer.vocab.n_special
        is_gene = gene >= 0
        bins = tokens.extras["bin_ids"][is_gene]
        expression = np.asarray(matrix[cell[is_gene], gene[is_gene]]).ravel()
        sums += np.bincount(bins, weights=expression, minlength=n_bins)
        counts += np.bincount(bins, minlength=n_bins)
    counts[0], sums[0] = 1, 0
    seen = np.flatnonzero(counts)
    return np.interp(np.arange(n_bins), seen, sums[seen] / counts[seen]).astype(np.float32)


@numba.njit(cache=True, nogil=True)
def _arrange(ids, values, keys, n_special, by_value, places):
    n_tokens = ids.shape[1]
    slots = np.empty(n_tokens, dtype=np.int64)
    draws = np.empty(n_tokens, dtype=np.float64)
    for cell in range(len(ids)):
        n_genes = 0
        for position in range(n_tokens):
            places[cell, position] = position
            if ids[cell, position] >= n_special:
                slots[n_genes] = position
                draws[n_genes] = uniform(keys[cell], np.uint64(n_genes))
                n_genes += 1
        order = np.argsort(draws[:n_genes])
        if by_value:
            # A stable sort leaves equal values in the random order.
            lowered = np.empty(n_genes, dtype=np.float64)
            for i in range(n_genes):
                lowered[i] = -values[cell, slots[order[i]]]
            order = order[np.argsort(lowered, kind="mergesort")]
        for i in range(n_genes):
            places[cell, slots[i]] = slots[order[i]]
