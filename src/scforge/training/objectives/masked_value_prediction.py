"""Masked value prediction: mask the expression of genes and predict it.

Shapes: B cells, S tokens, G genes of the vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numba
import numpy as np
import torch
from torch import nn

from scforge._checks import check_positive
from scforge._constants import IGNORE_LABEL
from scforge.data.cells import CellBlock, CellSource
from scforge.data.sampling import cell_keys, uniform
from scforge.errors import OptionError, TrainingError
from scforge.models.components.heads import COUNT_LOSSES, check_count_targets
from scforge.tokenizers.base import TokenBatch, Tokenizer
from scforge.tokenizers.masking import Masking
from scforge.training.objectives.base import Objective, TrainingDefaults, mismatch, output_of, register_objective

_TARGETS = {"value_labels", "bin_labels", "masked_positions"}
_STREAM = 0x7A65726F  # "zero": separate random numbers from those of masks
_SAMPLED_CELLS = 1024


@register_objective("masked_value_prediction")
class MaskedValuePrediction(Objective):
    """Predict the value (or bin) of genes with masked expression; the gene names remain visible.

    Requires an architecture that predicts a value per token: ``masked_autoencoder``, or ``transformer_encoder`` with
    ``expression_head="value"`` or ``"bin"``. The ``forward`` of other architectures must have an argument
    ``value_labels``, ``bin_labels`` or ``masked_positions``. Masked genes follow the other genes in random order, so
    their rank does not reveal their value.

    Parameters
    ----------
    mask_ratio
        Fraction of the genes in a cell to mask; see :class:`scforge.tokenizers.Masking`.
    zero_targets
        Number of genes without counts to add per masked gene, as masked tokens with the value 0. They are sampled from
        the measured genes of the vocabulary. Without these genes, the model never receives an unexpressed gene. Not
        compatible with truncated losses.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
    >>> scforge.models.Encoder.setup_anndata(adata)
    >>> objective = {"name": "masked_value_prediction", "mask_ratio": 0.5}
    >>> sizes = dict(hidden_dim=8, num_layers=1, num_heads=2)
    >>> model = scforge.models.Encoder(adata, "masked_autoencoder", objective=objective, **sizes)
    >>> model.train(max_epochs=1, progress_bar=False)
    >>> "validation_loss" in model.history
    True
    """

    predicts_values = True
    defaults = TrainingDefaults(batch_size=64, lr=1e-3, weight_decay=0.01, schedule="cosine_warmup", max_epochs=20)

    def __init__(
        self, *, mask_ratio: float | Sequence[float] | Mapping[str, Any] = 0.75, zero_targets: float = 0.0
    ) -> None:
        # Created here, so a bad value raises an error before training starts.
        Masking(1, mask_ratio=mask_ratio, mask_token_prob=0.0, random_token_prob=0.0)
        self.mask_ratio = mask_ratio
        self.zero_targets = check_positive("zero_targets", zero_targets, or_zero=True)

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise an error if genes without counts would be added, but are already tokens."""
        if self.zero_targets and tokenizer.lists_all_genes:
            raise OptionError(
                "adds genes without counts, but include_zero_genes=True already includes all of them; set "
                "zero_targets=0, or include_zero_genes=False.",
                zero_targets=self.zero_targets,
            )

    def check_architecture(self, architecture: type[nn.Module] | nn.Module) -> None:
        """Raise an error if the architecture predicts the next token, or does not use masked values."""
        if getattr(architecture, "predicts_next", False):
            why = "predicts the next token rather than masked values"
        elif not _TARGETS & set(inspect.signature(architecture.forward).parameters):
            why = "does not predict token values"
        else:
            return
        raise mismatch("masked_value_prediction", architecture, why, "the architecture 'masked_autoencoder'")

    def max_tokens(self, tokenizer: Tokenizer) -> int:
        """Return the maximum number of tokens per cell, including genes without counts."""
        most = tokenizer.max_tokens()
        around = most - min(tokenizer.most_genes, tokenizer.vocab.n_genes)
        ratio = self.mask_ratio
        largest = max(ratio["start"], ratio["end"]) if isinstance(ratio, Mapping) else float(np.max(ratio))
        hidden = max(1, math.ceil((most - around) * largest))
        added = int(_n_zeros(self.zero_targets, np.array(hidden)))
        return min(most + added, max(most, around + tokenizer.vocab.n_genes))

    def initialize(self, module: nn.Module, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Initialize the head at the mean of its targets; check that they are counts if the loss needs counts.

        On a GPU, the loss does not check the targets itself, because this would require a synchronization.
        """
        block = cells.block(np.arange(min(len(cells), _SAMPLED_CELLS)))
        batch = self.prepare(block, tokenizer, epoch=0, seed=0)
        targets = batch["value_labels"][batch["masked_positions"]]
        name = getattr(module, "value_loss", None)
        if name in COUNT_LOSSES:
            check_count_targets(name, targets)
        if hasattr(module, "init_value_prior") and len(targets):
            module.init_value_prior(float(targets.mean()))

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> dict[str, torch.Tensor]:
        """Tokenize, mask values, and add genes without counts."""
        masking = Masking(
            tokenizer.vocab, mask_ratio=self.mask_ratio, mask_token_prob=0.0, random_token_prob=0.0, seed=seed
        )
        batch = masking(tokenizer(block), block.rows, epoch=epoch, hidden_last=True)
        # The ids are in `input_ids`; labels would request a prediction of visible genes.
        del batch["labels"]
        if self.zero_targets:
            keys = cell_keys(block.rows, seed=seed, epoch=epoch, stream=_STREAM)
            batch = _add_zeros(batch, block, tokenizer, self.zero_targets, keys)
        return dict(cast(dict[str, torch.Tensor], batch))

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the module's own loss at masked values."""
        output = output_of(module, batch)
        if output.loss is None:
            bins = "'bin'" if "bin_labels" in batch else "'value'"
            raise TrainingError(
                f"{type(module).__name__} returned no loss for masked values; choose the architecture "
                f"'masked_autoencoder', or 'transformer_encoder' with expression_head={bins}."
            )
        return output.loss, {}


def _n_zeros(per_hidden: float, n_hidden: np.ndarray) -> np.ndarray:
    """Return the number of genes without counts to add for each number of masked tokens, int64."""
    return np.floor(per_hidden * n_hidden + 0.5).astype(np.int64)


def _add_zeros(
    batch: TokenBatch, block: CellBlock, tokenizer: Tokenizer, per_hidden: float, keys: np.ndarray
) -> TokenBatch:
    """Add genes without counts to the masked tokens of each cell, and shuffle all masked tokens."""
    n_genes, n_special = tokenizer.vocab.n_genes, tokenizer.vocab.n_special
    measured = np.arange(n_genes, dtype=np.int32)
    if block.measured is not None:
        measured = np.flatnonzero(block.measured).astype(np.int32)
    hidden = batch["masked_positions"].numpy()
    lengths = batch["attention_mask"].numpy().sum(axis=1)
    wanted = _n_zeros(per_hidden, hidden.sum(axis=1))
    # Genes with counts, including truncated ones, are not zero, and all of them were measured.
    n_added = np.minimum(wanted, len(measured) - np.diff(block.indptr))
    width = max(hidden.shape[1], int((lengths + n_added).max(initial=0)))
    order = np.full((len(hidden), width), -1, dtype=np.int64)
    zeros = np.zeros((len(hidden), width), dtype=np.int64)
    _place(block.indptr, block.genes, measured, hidden, lengths, n_added, keys, n_special, n_genes, order, zeros)
    places, added = torch.from_numpy(order), torch.from_numpy(zeros)
    new = added > 0
    widened = {
        name: torch.where(places >= 0, tensor.gather(1, places.clamp(min=0)), torch.zeros((), dtype=tensor.dtype))
        for name, tensor in cast(dict[str, torch.Tensor], batch).items()
    }
    widened["input_ids"] = torch.where(new, added, widened["input_ids"])
    widened["attention_mask"] = widened["attention_mask"] | new
    widened["masked_positions"] = widened["masked_positions"] | new
    if "bin_labels" in widened:
        blank = (places < 0) & ~new
        widened["bin_labels"] = widened["bin_labels"].masked_fill(blank, IGNORE_LABEL)
    return cast(TokenBatch, widened)


@numba.njit(cache=True, nogil=True)
def _place(indptr, genes, measured, hidden, lengths, n_added, keys, n_special, n_genes, order, zeros):
    """Return the old position for each new position (-1 if none), or the id of an added gene without counts."""
    counted = np.zeros(n_genes, dtype=np.bool_)
    free = np.empty(len(measured), dtype=np.int32)
    for cell in range(len(hidden)):
        for entry in range(indptr[cell], indptr[cell + 1]):
            counted[genes[entry]] = True
        n_free = 0
        for gene in measured:
            if not counted[gene]:
                free[n_free] = gene
                n_free += 1
        for entry in range(indptr[cell], indptr[cell + 1]):
            counted[genes[entry]] = False
        key, length, n_new = keys[cell], lengths[cell], n_added[cell]
        # Slots of masked tokens: their old positions, and new ones after the last token.
        slots = np.empty(hidden.shape[1] + n_new, dtype=np.int64)
        n_slots = 0
        for position in range(length):
            order[cell, position] = position
            if hidden[cell, position]:
                slots[n_slots] = position
                n_slots += 1
        for step in range(n_new):
            # The first steps of a Fisher-Yates shuffle: each set of genes is equally likely.
            other = step + int(uniform(key, np.uint64(step)) * (n_free - step))
            free[step], free[other] = free[other], free[step]
            slots[n_slots] = length + step
            zeros[cell, length + step] = n_special + free[step]
            n_slots += 1
        # The position of a masked token must not reveal whether it was added.
        for step in range(n_slots - 1, 0, -1):
            other = int(uniform(key, np.uint64(n_new + step)) * (step + 1))
            here, there = slots[step], slots[other]
            order[cell, here], order[cell, there] = order[cell, there], order[cell, here]
            zeros[cell, here], zeros[cell, there] = zeros[cell, there], zeros[cell, here]
