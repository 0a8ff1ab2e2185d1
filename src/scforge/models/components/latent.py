"""The latent distribution of a cell: sampling, decoded expression, and losses.

Shapes: B cells, G genes, H hidden, L latent, T cell types.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from scforge._constants import IGNORE_LABEL
from scforge.errors import OptionError
from scforge.models._utils import number_of_each

LOG_VARIANCES = (-15.0, 15.0)


def draw_latent(mu_bl: torch.Tensor, logvar_bl: torch.Tensor) -> torch.Tensor:
    """Sample each latent variable from its normal distribution (Kingma and Welling 2013), shape (B, L)."""
    return mu_bl + torch.randn_like(mu_bl) * (0.5 * logvar_bl).exp()


class BatchIntegrationHead(nn.Module):
    """Decode latent variables to expression: Linear to H, GELU, Linear to G; batch vectors are added before GELU."""

    def __init__(self, latent_dim: int, hidden_dim: int, num_genes: int, n_batches: int = 0) -> None:
        super().__init__()
        self.dense = nn.Linear(latent_dim, hidden_dim)
        self.batch_embedding = nn.Embedding(n_batches, hidden_dim) if n_batches else None
        self.decoder = nn.Linear(hidden_dim, num_genes)

    def forward(self, latent_bl: torch.Tensor, batch: torch.Tensor | int | None = None) -> torch.Tensor:
        """Return expression, shape (B, G). For the arguments, see :meth:`hidden`."""
        return self.decoder(self.hidden(latent_bl, batch))

    def squared_errors(
        self, latent_bl: torch.Tensor, batch: torch.Tensor | int | None, target_bg: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean squared error of the expression of each cell, float32, shape (B,), without that expression.

        With weights W, bias c and hidden state h, the error is ``h' W'W h - 2 h' W'(x - c) + |x - c|^2``. The products
        W'W and W'x take the place of products and element-wise operations of size B x G.

        Parameters
        ----------
        latent_bl, batch
            See :meth:`hidden`. The number of cells may be a multiple of the number of rows of `target_bg`.
        target_bg
            Expression x, float32, shape (rows, G), repeated for all cells.
        """
        with torch.autocast(latent_bl.device.type, enabled=False):
            weight, bias = self.decoder.weight.float(), self.decoder.bias.float()
            hidden_kbh = self.hidden(latent_bl.float(), batch).unflatten(0, (-1, len(target_bg)))
            linear_bh = target_bg @ weight - bias @ weight
            constant_b = target_bg.square().sum(dim=1) - 2 * (target_bg @ bias) + bias.dot(bias)
            quadratic_kb = ((hidden_kbh @ (weight.T @ weight) - 2 * linear_bh) * hidden_kbh).sum(dim=-1)
            return (quadratic_kb + constant_b).flatten() / len(weight)

    def hidden(self, latent_bl: torch.Tensor, batch: torch.Tensor | int | None = None) -> torch.Tensor:
        """Return the hidden state, which is mapped linearly to expression, shape (B, H).

        Parameters
        ----------
        latent_bl
            Latent variables, shape (B, L).
        batch
            Batch of each cell, int64, shape (B,), or one batch for all cells. -1 denotes the mean of all batches. If
            None, uses this mean for all cells.

        Raises
        ------
        OptionError
            If a batch is passed to a head without batches, or is unknown.
        """
        dense_bh = self.dense(latent_bl)
        if self.batch_embedding is None:
            if batch is not None:
                raise OptionError(
                    "is given, but the model has n_batches=0; omit it, or train with batches.", argument="batch"
                )
        else:
            mean_h = self.batch_embedding.weight.mean(dim=0)
            if batch is None:
                return F.gelu(dense_bh + mean_h)
            batch_b = number_of_each("batch", batch, len(latent_bl), latent_bl.device)
            n_batches = self.batch_embedding.num_embeddings
            if batch_b.device.type == "cpu" and bool(((batch_b < -1) | (batch_b >= n_batches)).any()):
                raise OptionError(
                    f"contains an invalid number; pass numbers from 0 to {n_batches - 1}, or -1 for the mean of "
                    "all batches.",
                    argument="batch",
                )
            of_batch_bh = self.batch_embedding(batch_b.clamp(min=0))
            dense_bh = dense_bh + torch.where((batch_b < 0).unsqueeze(1), mean_h, of_batch_bh)
        return F.gelu(dense_bh)


def batch_vectors(module: nn.Module) -> nn.Parameter | None:
    """Return the batch vectors in the decoder of an architecture, shape (E, H), or None without batches."""
    heads = [part for part in module.modules() if isinstance(part, BatchIntegrationHead)]
    return heads[0].batch_embedding.weight if heads and heads[0].batch_embedding is not None else None


def reconstruction_loss(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of expression, over cells and genes, a scalar."""
    return F.mse_loss(predicted.float(), target.float())


def classification_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of cell types, ignoring cells with the label -100; 0 without labeled cells."""
    total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_LABEL, reduction="sum")
    return total / (labels != IGNORE_LABEL).sum().clamp(min=1)


def kl_divergence(mu: torch.Tensor, logvar: torch.Tensor, free_bits: float = 0.0) -> torch.Tensor:
    r"""Return the KL divergence from N(0, 1), summed over latent dimensions and averaged over cells, in nats.

    The divergence is ``-1/2 sum_l (1 + logvar - mu^2 - exp(logvar))`` (Kingma and Welling 2013). With `free_bits`, the
    mean over cells of each dimension is clipped from below at this number of nats, so that no dimension has to collapse
    (Kingma et al. 2016).

    Examples
    --------
    >>> kl_divergence(torch.ones(2, 3), torch.zeros(2, 3))
    tensor(1.5000)
    """
    mu, logvar = mu.float(), logvar.float()
    of_dimension = -0.5 * (1.0 + logvar - mu.square() - logvar.exp()).mean(dim=0)
    return (of_dimension.clamp(min=free_bits) if free_bits > 0 else of_dimension).sum()
