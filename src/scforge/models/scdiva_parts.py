"""Parts of ScDiVa: the embedding of genes, the variational layer, the heads, the losses.

Shapes: B cells, S tokens, G genes, H hidden, L latent, T cell types, M tokens with a target.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_count, check_positive
from scforge._constants import IGNORE_LABEL
from scforge.errors import OptionError
from scforge.models._utils import check_choice
from scforge.models.components.transformer import NORMS, Dropout

_STD = 0.02
LOG_VARIANCES = (-15.0, 15.0)


class GeneEmbedding(nn.Module):
    """The projection ``LayerNorm(x W + b)`` of an expression profile, whose rows of W are also the genes one by one.

    The matrix is kept gene by gene, (G, H): it is the transpose of the weight of a linear layer from G to H.

    Parameters
    ----------
    num_genes, hidden_dim
        G and H.
    dropout
        Dropout after the norm.
    layer_norm_eps, norm
        Epsilon and kind of the norm, see :class:`scforge.models.components.TransformerBlock`.

    Examples
    --------
    >>> embedding = GeneEmbedding(num_genes=6, hidden_dim=4, dropout=0.0)
    >>> x = torch.tensor([[0.0, 2.0, 0.0, 1.0, 0.0, 0.0]])
    >>> genes, values = torch.tensor([[3, 1]]), torch.tensor([[1.0, 2.0]])
    >>> bool(torch.allclose(embedding(x), embedding.norm(embedding.bag(genes, values)), atol=1e-6))
    True
    """

    def __init__(
        self,
        num_genes: int,
        hidden_dim: int,
        dropout: float = 0.1,
        layer_norm_eps: float = 1e-12,
        norm: str = "layer",
    ) -> None:
        super().__init__()
        check_count("num_genes", num_genes, "genes")
        check_count("hidden_dim", hidden_dim, "dimensions")
        check_positive("layer_norm_eps", layer_norm_eps)
        check_choice("norm", norm, sorted(NORMS))
        self.weight = nn.Parameter(torch.empty(num_genes, hidden_dim))
        self.bias = nn.Parameter(torch.empty(hidden_dim))
        self.norm = NORMS[norm](hidden_dim, eps=layer_norm_eps)
        self.dropout = Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start from N(0, 0.02), and a bias of zero."""
        nn.init.normal_(self.weight, std=_STD)
        nn.init.zeros_(self.bias)

    def project(self, x_bg: torch.Tensor) -> torch.Tensor:
        """Return ``x W + b`` of profiles (B, G), shape (B, H)."""
        return F.linear(x_bg.to(self.weight.dtype), self.weight.t(), self.bias)

    def bag(self, genes_bs: torch.Tensor, values_bs: torch.Tensor) -> torch.Tensor:
        """Return the same of genes and their values, shape (B, H), without a profile over all genes.

        Parameters
        ----------
        genes_bs
            Index of each gene, int64, shape (B, S).
        values_bs
            Its value, 0 where it does not count, shape (B, S).
        """
        values_bs = values_bs.to(self.weight.dtype)
        return F.embedding_bag(genes_bs, self.weight, mode="sum", per_sample_weights=values_bs) + self.bias

    def forward(self, x_bg: torch.Tensor) -> torch.Tensor:
        """Embed profiles of shape (B, G), shape (B, H)."""
        return self.dropout(self.norm(self.project(x_bg)))


class ValueEncoder(nn.Module):
    """From the value of a token to a vector: Linear, GELU, Linear, the last of which starts at zero.

    Parameters
    ----------
    hidden_dim
        Width H.
    """

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.linear_in = nn.Linear(1, hidden_dim)
        self.linear_out = nn.Linear(hidden_dim, hidden_dim, bias=False)

    def forward(self, values_bs: torch.Tensor) -> torch.Tensor:
        """Return vectors of shape (B, S, H) for values of shape (B, S)."""
        return self.linear_out(F.gelu(self.linear_in(values_bs.unsqueeze(-1).to(self.linear_in.weight.dtype))))


class VariationalLayer(nn.Module):
    """Mean and variance of the latent, and a draw from it in training (Kingma and Welling 2013).

    Parameters
    ----------
    hidden_dim, latent_dim
        H and L.
    variational
        False leaves the variance out: the latent is the mean.

    Examples
    --------
    >>> latent, mu, logvar = VariationalLayer(hidden_dim=8, latent_dim=3).eval()(torch.randn(2, 8))
    >>> bool((latent == mu).all()), logvar.shape
    (True, torch.Size([2, 3]))
    """

    def __init__(self, hidden_dim: int, latent_dim: int, *, variational: bool = True) -> None:
        super().__init__()
        check_count("latent_dim", latent_dim, "dimensions")
        self.mu_projection = nn.Linear(hidden_dim, latent_dim)
        self.logvar_projection = nn.Linear(hidden_dim, latent_dim) if variational else None

    def forward(self, hidden_bh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return latent, mean and log-variance, each (B, L); in evaluation the latent is the mean.

        Without a variance the log-variance is its lower bound, -15.
        """
        mu_bl = _wide(self.mu_projection(hidden_bh))
        if self.logvar_projection is None:
            return mu_bl, mu_bl, torch.full_like(mu_bl, LOG_VARIANCES[0])
        logvar_bl = _wide(self.logvar_projection(hidden_bh)).clamp(*LOG_VARIANCES)
        if not self.training:
            return mu_bl, mu_bl, logvar_bl
        return mu_bl + torch.randn_like(mu_bl) * (0.5 * logvar_bl).exp(), mu_bl, logvar_bl


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class AnnotationHead(nn.Module):
    """Cell types of latents: Linear to H, GELU, Linear to T.

    Parameters
    ----------
    latent_dim, hidden_dim, num_cell_types
        L, H and T.
    """

    def __init__(self, latent_dim: int, hidden_dim: int, num_cell_types: int) -> None:
        super().__init__()
        self.dense = nn.Linear(latent_dim, hidden_dim)
        self.classifier = nn.Linear(hidden_dim, num_cell_types)

    def forward(self, latent_bl: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (B, T)."""
        return self.classifier(F.gelu(self.dense(latent_bl)))


class BatchIntegrationHead(nn.Module):
    """Expression of latents: Linear to H, GELU, Linear to G; with batches, a vector of the batch before the GELU.

    Parameters
    ----------
    latent_dim, hidden_dim, num_genes
        L, H and G.
    n_batches
        Number of batches; their vectors start at zero.
    """

    def __init__(self, latent_dim: int, hidden_dim: int, num_genes: int, n_batches: int = 0) -> None:
        super().__init__()
        self.dense = nn.Linear(latent_dim, hidden_dim)
        self.batch_embedding = nn.Embedding(n_batches, hidden_dim) if n_batches else None
        self.decoder = nn.Linear(hidden_dim, num_genes)

    def forward(self, latent_bl: torch.Tensor, batch: torch.Tensor | int | None = None) -> torch.Tensor:
        """Return expression, shape (B, G).

        Parameters
        ----------
        latent_bl
            Latents, shape (B, L).
        batch
            Batch of each cell, int64, shape (B,), or one for all; -1, or None for all, for the mean of all batches.

        Raises
        ------
        OptionError
            If a batch is given to a head without, or is none of its.
        """
        dense_bh = self.dense(latent_bl)
        if self.batch_embedding is None:
            if batch is not None:
                raise OptionError("batch is given but the model has n_batches=0; leave it out, or train with batches.")
        else:
            mean_h = self.batch_embedding.weight.mean(dim=0)
            if batch is None:
                return self.decoder(F.gelu(dense_bh + mean_h))
            batch_b = self._checked(batch, latent_bl)
            of_batch_bh = self.batch_embedding(batch_b.clamp(min=0))
            dense_bh = dense_bh + torch.where((batch_b < 0).unsqueeze(1), mean_h, of_batch_bh)
        return self.decoder(F.gelu(dense_bh))

    def _checked(self, batch: torch.Tensor | int, latent_bl: torch.Tensor) -> torch.Tensor:
        assert self.batch_embedding is not None
        n_batches = self.batch_embedding.num_embeddings
        batch = torch.as_tensor(batch, device=latent_bl.device)
        if batch.is_floating_point() or batch.dtype == torch.bool or batch.ndim > 1:
            raise OptionError(f"batch is of {batch.dtype} and shape {tuple(batch.shape)}; give whole numbers (B,).")
        if batch.ndim == 1 and len(batch) != len(latent_bl):
            raise OptionError(f"batch has {len(batch)} numbers for {len(latent_bl)} cells; give one for each.")
        if batch.device.type == "cpu" and bool(((batch < -1) | (batch >= n_batches)).any()):
            raise OptionError(
                f"batch has a number that is not between 0 and {n_batches - 1}; give one of its batches, or -1 for the "
                "mean of all."
            )
        return batch.long().expand(len(latent_bl))


def batch_vectors(module: nn.Module) -> nn.Parameter | None:
    """Return the vectors of the batches that the decoder of an architecture is told, (E, H); None for none."""
    heads = [part for part in module.modules() if isinstance(part, BatchIntegrationHead)]
    return heads[0].batch_embedding.weight if heads and heads[0].batch_embedding is not None else None


def reconstruction_loss(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of expression, over cells and genes, a scalar."""
    return F.mse_loss(predicted.float(), target.float())


def classification_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of cell types; cells with the label -100 do not count, and 0 if none does.

    Parameters
    ----------
    logits
        Shape (B, T).
    labels
        int64, shape (B,).
    """
    total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_LABEL, reduction="sum")
    return total / (labels != IGNORE_LABEL).sum().clamp(min=1)


def kl_divergence(mu: torch.Tensor, logvar: torch.Tensor, free_bits: float = 0.0) -> torch.Tensor:
    r"""Return the divergence of latents from N(0, 1), summed over the latent, mean over cells, in nats.

    ``-1/2 sum_l (1 + logvar - mu^2 - exp(logvar))`` (Kingma and Welling 2013). With `free_bits` the mean over cells of
    each dimension counts as at least that many nats, so that none has to collapse (Kingma et al. 2016).

    Parameters
    ----------
    mu, logvar
        Shape (B, L).
    free_bits
        Nats a dimension.

    Examples
    --------
    >>> kl_divergence(torch.ones(2, 3), torch.zeros(2, 3))
    tensor(1.5000)
    """
    mu, logvar = mu.float(), logvar.float()
    of_dimension = -0.5 * (1.0 + logvar - mu.square() - logvar.exp()).mean(dim=0)
    return (of_dimension.clamp(min=free_bits) if free_bits > 0 else of_dimension).sum()


def total_loss(task: torch.Tensor, kl: torch.Tensor, beta: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Return ``task + beta * kl``."""
    return task + beta * kl


def mean_over_cells(losses_m: torch.Tensor, cells_m: torch.Tensor, weights_b: torch.Tensor | None) -> torch.Tensor:
    """Return the mean over cells of their weight times the mean of their tokens, 0 for a cell without; a scalar.

    Without weights it is the mean over all tokens, 0 if there is none.

    Parameters
    ----------
    losses_m
        Loss of each token, shape (M,).
    cells_m
        Number of its cell, int64, shape (M,).
    weights_b
        Weight of each cell, shape (B,), or None.
    """
    if weights_b is None:
        return losses_m.sum() / max(1, len(losses_m))
    n_tokens_b = torch.zeros_like(weights_b, dtype=losses_m.dtype).index_add(0, cells_m, torch.ones_like(losses_m))
    share_b = weights_b.to(losses_m.dtype) / (n_tokens_b.clamp(min=1) * max(1, len(weights_b)))
    return (losses_m * share_b[cells_m]).sum()


def init_scdiva(module: nn.Module) -> None:
    """Initialize one module: weights from N(0, 0.02), biases zero, norms one and zero; for ``model.apply``."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_STD)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        nn.init.ones_(module.weight)
    if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
        nn.init.zeros_(module.bias)
    elif isinstance(module, GeneEmbedding):
        module.reset_parameters()
    # Children come first, so these have the last word.
    elif isinstance(module, ValueEncoder):
        nn.init.zeros_(module.linear_out.weight)
    elif isinstance(module, BatchIntegrationHead) and module.batch_embedding is not None:
        nn.init.zeros_(module.batch_embedding.weight)
