"""The head that predicts effects of perturbations, and the linear model that it starts from.

Shapes: B cells, V tokens, D dimensions of an embedding, H width of gene embeddings, F features of a gene, T targets of
a perturbation, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from scforge._constants import PAD_ID
from scforge.errors import OptionError
from scforge.finetuning.heads import Standardise
from scforge.models.components.gene_vectors import GeneVectorEmbedding

__all__ = ["MOST_FEATURES", "PerturbationHead", "gene_features", "gene_table", "table_shape"]

MOST_FEATURES = 64


class PerturbationHead(nn.Module):
    """Effect of a perturbation on a cell, a sum over what is perturbed, of low rank.

    With z the standardised embedding of a control cell, e_g the features of a perturbed gene and v_g a vector of its
    own, which only targets of the training have::

        c = sum over perturbed g of (b + W e_g + v_g),    delta = (c + C z + mlp(z, c)) U

    so that a combination starts as the sum of its parts, and an unseen gene is what its features tell. The last layer
    of the perceptron starts at zero.

    Parameters
    ----------
    n_latent
        Width D of the embeddings.
    n_tokens
        Tokens V; effects are over all of them, those that are no gene stay 0.
    n_features
        Features F of a gene.
    n_targets
        Targets of the training.
    rank
        Rank R of the effects.
    hidden_dim
        Width of the perceptron; 0 for none.
    dropout
        Dropout in it.
    """

    features: torch.Tensor

    def __init__(
        self,
        n_latent: int,
        n_tokens: int,
        n_features: int,
        n_targets: int,
        rank: int,
        *,
        hidden_dim: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.standardise = Standardise(n_latent)
        self.register_buffer("features", torch.zeros(n_tokens, n_features))
        self.base = nn.Parameter(torch.zeros(rank))
        self.of_features = nn.Linear(n_features, rank, bias=False)
        # The first row is for targets without a vector of their own.
        self.own = nn.Embedding(n_targets + 1, rank, padding_idx=0)
        self.of_cell = nn.Linear(n_latent, rank, bias=False)
        self.basis = nn.Parameter(torch.zeros(rank, n_tokens))
        for part in (self.of_features, self.own, self.of_cell):
            nn.init.zeros_(part.weight)
        self.mlp: nn.Sequential | None = None
        if hidden_dim:
            last = nn.Linear(hidden_dim, rank)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            self.mlp = nn.Sequential(nn.Linear(n_latent + rank, hidden_dim), nn.GELU(), nn.Dropout(dropout), last)

    def forward(self, embeddings: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return effects, shape (B, V).

        Parameters
        ----------
        embeddings
            Of control cells, shape (B, D).
        batch
            ``perturbed_tokens`` and ``perturbed_targets``, int64, shape (B, T): token of each target (PAD for none),
            and its number among those of the training, from 1 (0 for none).
        """
        return self.coefficients(embeddings, batch["perturbed_tokens"], batch["perturbed_targets"]) @ self.basis

    def coefficients(self, embeddings: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the coordinates of effects in the basis, shape (B, R)."""
        z_bd = self.standardise(embeddings)
        n_targets = ((tokens != PAD_ID) | (targets != 0)).sum(dim=1, keepdim=True).to(z_bd.dtype)
        features_bf = self.features[tokens].sum(dim=1).to(z_bd.dtype)
        c_br = n_targets * self.base + self.of_features(features_bf) + self.own(targets).sum(dim=1)
        found = c_br + self.of_cell(z_bd)
        return found if self.mlp is None else found + self.mlp(torch.cat([z_bd, c_br], dim=1))


def gene_table(module: nn.Module) -> nn.Module:
    """Return the embedding of genes of an architecture; the architecture itself where it has a ``token_table``.

    Raises
    ------
    OptionError
        If it has none.
    """
    if callable(getattr(module, "token_table", None)):
        return module
    parts = list(module.modules())
    # A GeneVectorEmbedding has a plain one inside, for tokens without a vector.
    for part in parts:
        if isinstance(part, GeneVectorEmbedding):
            return part
    for part in parts:
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.padding_idx == PAD_ID:
            return part
    raise OptionError(
        f"{type(module).__name__} has no embedding of genes with padding_idx={PAD_ID}, by which the task "
        "'perturbation' knows what is perturbed; choose another architecture."
    )


def table_shape(table: nn.Module) -> tuple[int, int]:
    """Return the number of tokens V and the width H of an embedding of genes."""
    if callable(made := getattr(table, "token_table", None)):
        n_tokens, width = made().shape
        return n_tokens, width
    if isinstance(table, GeneVectorEmbedding):
        return table.vocab_size, table.learned.embedding_dim
    return table.num_embeddings, table.embedding_dim


@torch.no_grad()
def gene_features(table: nn.Module, n_special: int, n_features: int) -> torch.Tensor:
    """Return principal components of gene embeddings with a mean square length of 1, zeros for special tokens.

    Returns
    -------
    Float32, shape (V, F); zero columns where there are fewer components.
    """
    n_tokens, _ = table_shape(table)
    weight = next(table.parameters())
    if isinstance(table, GeneVectorEmbedding):
        # (A bag of one token is the embedding of that token.)
        vectors = GeneVectorEmbedding.forward(table, torch.arange(n_tokens, device=weight.device))
    elif callable(made := getattr(table, "token_table", None)):
        vectors = made()
    else:
        vectors = weight
    genes = vectors[n_special:].float()
    genes = genes - genes.mean(dim=0)
    _, axes = torch.linalg.eigh(genes.T @ genes)
    scores = genes @ axes.flip(1)[:, :n_features]
    length = scores.square().sum(dim=1).mean().sqrt()
    features = torch.zeros(n_tokens, n_features, device=weight.device)
    if length > 0:
        features[n_special:, : scores.shape[1]] = scores / length
    return features
