"""The head of an embedding in which batches are to agree: a decoder that is told the batch.

Shapes: B cells, D dimensions, V vocabulary, E batches, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from scforge.errors import ModelFileError, listing

__all__ = ["IntegrationHead", "Unchanged"]

_NOTHING = -30.0
"""Logit of a token that no cell has: its share is nothing in 32 bits."""


class Unchanged(nn.Module):
    """Passes embeddings on."""

    def forward(self, embeddings: torch.Tensor, batch: Mapping[str, Any] | None = None) -> torch.Tensor:
        """Return the embeddings, shape (B, D)."""
        return embeddings


class IntegrationHead(nn.Module):
    """A decoder of expression that is told the batch of a cell, so that the embedding need not tell it.

    The share of gene g in the counts of a cell of batch e is ``softmax(W GELU(LayerNorm(A z + b_e)))_g``, and its
    counts are negative binomial around share times library size, with one dispersion a gene (as in scVI, Lopez et al.
    2018, Nature Methods 15, 1053).

    Parameters
    ----------
    n_latent, n_tokens
        Dimensions D and size V of the vocabulary.
    n_batches
        Number of batches E.
    n_reference
        Train nothing but the vectors of the batches behind so many first ones, which with the rest of the decoder stay
        as they are; None trains all.
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
        """Start at the shares of the genes in all counts, shape (V - n_special,), whatever the embedding."""
        shares = (counts + 0.1) / (counts + 0.1).sum()
        self.out.bias.copy_(torch.from_numpy(np.concatenate([np.full(n_special, _NOTHING), np.log(shares)])))
        self.out.weight.mul_(0.1)

    @torch.no_grad()
    def take_over(self, reference: IntegrationHead, names: Sequence[str]) -> None:
        """Take the decoder of a reference; new batches start at the mean of its batches `names`."""
        vectors = reference.batch_vectors()
        if len(vectors) != len(names) or len(self.fixed_batches) != len(names):
            raise ModelFileError(f"the decoder of the reference model does not have the batches {listing(names)}.")
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
        """Return the logit of the share of each token, shape (B, V).

        Parameters
        ----------
        embeddings
            Shape (B, D).
        codes
            Batch of each cell, int64, shape (B,); -1 for one that is not known, which takes the mean of all batches.
        """
        vectors = self.batch_vectors()
        # The code -1 finds the mean at the end.
        vectors = torch.cat([vectors, vectors.mean(dim=0, keepdim=True)])
        return self.out(F.gelu(self.norm(self.inner(embeddings) + vectors[codes])))

    def forward(self, embeddings: torch.Tensor, batch: Mapping[str, Any] | None = None) -> torch.Tensor:
        """Return the expression of each cell as the mean batch would show it, log1p CP10K, shape (B, V)."""
        codes = torch.full((len(embeddings),), -1, dtype=torch.int64, device=embeddings.device)
        return (1e4 * self.decode(embeddings, codes).float().softmax(dim=-1)).log1p()
