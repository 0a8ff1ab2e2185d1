"""Masked gene prediction: mask tokens in a cell and predict their genes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from scforge._checks import check_bool
from scforge.data.cells import CellBlock, CellSource
from scforge.tokenizers.base import Tokenizer
from scforge.tokenizers.masking import Masking
from scforge.training.objectives.base import (
    Objective,
    TrainingDefaults,
    loss_of,
    mismatch,
    refuse_zero_genes,
    register_objective,
)
from scforge.training.objectives.token_frequencies import token_counts


@register_objective("masked_gene_prediction")
class MaskedGenePrediction(Objective):
    """Cross entropy of the genes at masked positions.

    Parameters
    ----------
    mask_ratio, mask_token_prob, random_token_prob
        See :class:`scforge.tokenizers.Masking`.
    hide_order
        Whether to move masked tokens to the end if the order of the tokens reveals the genes. False keeps the
        positions, as in the pretraining of Geneformer. A masked gene is then located between its neighbors in the
        ranking, and genes with equal counts follow the fixed order of their medians. Much of the loss below the entropy
        of the token frequencies then reflects this order, not biology.
    token_prior
        Whether to initialize the prediction head at the token frequencies of the training cells, so that the loss
        starts near their entropy. Requires an architecture with ``init_token_prior``.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
    >>> scforge.models.Encoder.setup_anndata(adata)
    >>> objective = {"name": "masked_gene_prediction", "mask_ratio": 0.3}
    >>> sizes = dict(hidden_dim=8, num_layers=1, num_heads=2)
    >>> model = scforge.models.Encoder(adata, "transformer_encoder", objective=objective, **sizes)
    >>> model.train(max_epochs=1, progress_bar=False)
    >>> "validation_loss" in model.history
    True
    """

    defaults = TrainingDefaults(batch_size=64, lr=1e-3, weight_decay=0.01, schedule="cosine_warmup", max_epochs=10)

    def __init__(
        self,
        *,
        mask_ratio: float | Sequence[float] | Mapping[str, Any] = 0.15,
        mask_token_prob: float = 0.8,
        random_token_prob: float = 0.1,
        hide_order: bool = True,
        token_prior: bool = True,
    ) -> None:
        # Created here, so a bad value raises an error before training starts.
        Masking(1, mask_ratio=mask_ratio, mask_token_prob=mask_token_prob, random_token_prob=random_token_prob)
        self.mask_ratio = mask_ratio
        self.mask_token_prob = mask_token_prob
        self.random_token_prob = random_token_prob
        self.hide_order = check_bool("hide_order", hide_order)
        self.token_prior = check_bool("token_prior", token_prior)

    def initialize(self, module: nn.Module, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Initialize the prediction head at the token frequencies."""
        if self.token_prior and hasattr(module, "init_token_prior"):
            module.init_token_prior(torch.from_numpy(token_counts(cells, tokenizer)))

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise an error if every gene is a token, because masked genes are then simply the missing genes."""
        refuse_zero_genes("masked_gene_prediction", tokenizer)

    def check_architecture(self, architecture: type[nn.Module] | nn.Module) -> None:
        """Raise an error if the architecture uses labels as the names of masked genes rather than as targets."""
        if getattr(architecture, "labels_name_genes", False):
            why = "receives the masked genes as input and predicts only their values"
            choice = "objective='masked_value_prediction', or the architecture 'transformer_encoder'"
            raise mismatch("masked_gene_prediction", architecture, why, choice)

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> dict[str, torch.Tensor]:
        """Tokenize the cells and mask genes."""
        masking = Masking(
            tokenizer.vocab,
            mask_ratio=self.mask_ratio,
            mask_token_prob=self.mask_token_prob,
            random_token_prob=self.random_token_prob,
            seed=seed,
        )
        tokens = tokenizer(block)
        return dict(masking(tokens, block.rows, epoch=epoch, hidden_last=self.hide_order and tokenizer.ordered_by_gene))

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the module's own loss at labeled positions."""
        return loss_of(module, batch), {}
