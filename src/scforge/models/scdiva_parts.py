"""Parts of ScDiVa: the gene and value embeddings, the variational layer, and the cell type head.

Shapes: B cells, S tokens, G genes, H hidden, L latent, T cell types, M tokens with a target.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_count
from scforge.models.components.config import NORMS, TransformerConfig
from scforge.models.components.latent import LOG_VARIANCES, BatchIntegrationHead, draw_latent
from scforge.models.components.transformer import Dropout

_STD = 0.02


class GeneEmbedding(nn.Module):
    """The projection ``LayerNorm(x W + b)`` of an expression profile; the rows of W also embed single genes.

    W has shape (G, H), the transpose of the weight of a linear layer from G to H.

    Examples
    --------
    >>> embedding = GeneEmbedding(6, TransformerConfig(hidden_dim=4, num_layers=1, num_heads=1, dropout=0.0))
    >>> x = torch.tensor([[0.0, 2.0, 0.0, 1.0, 0.0, 0.0]])
    >>> genes, values = torch.tensor([[3, 1]]), torch.tensor([[1.0, 2.0]])
    >>> bool(torch.allclose(embedding(x), embedding.norm(embedding.bag(genes, values)), atol=1e-6))
    True
    """

    def __init__(self, num_genes: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_genes, config.hidden_dim))
        self.bias = nn.Parameter(torch.empty(config.hidden_dim))
        self.norm = NORMS[config.norm](config.hidden_dim, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize weights from N(0, 0.02) and the bias with zeros."""
        nn.init.normal_(self.weight, std=_STD)
        nn.init.zeros_(self.bias)

    def project(self, x_bg: torch.Tensor) -> torch.Tensor:
        """Return ``x W + b`` for profiles (B, G), shape (B, H)."""
        return F.linear(x_bg.to(self.weight.dtype), self.weight.t(), self.bias)

    def bag(self, genes_bs: torch.Tensor, values_bs: torch.Tensor) -> torch.Tensor:
        """Return the same projection from genes and their values, shape (B, H), without a profile over all genes.

        Parameters
        ----------
        genes_bs
            Index of each gene, int64, shape (B, S).
        values_bs
            Value of each gene, 0 for genes to ignore, shape (B, S).
        """
        values_bs = values_bs.to(self.weight.dtype)
        return F.embedding_bag(genes_bs, self.weight, mode="sum", per_sample_weights=values_bs) + self.bias

    def forward(self, x_bg: torch.Tensor) -> torch.Tensor:
        """Embed profiles of shape (B, G) as vectors of shape (B, H)."""
        return self.dropout(self.norm(self.project(x_bg)))


class ValueEncoder(nn.Module):
    """Embed the value of a token: Linear, GELU, Linear, with the last layer initialized at zero.

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
        """Embed values of shape (B, S) as vectors of shape (B, S, H)."""
        return self.linear_out(F.gelu(self.linear_in(values_bs.unsqueeze(-1).to(self.linear_in.weight.dtype))))


class VariationalLayer(nn.Module):
    """Compute the latent mean and variance, and sample the latent variable in training (Kingma and Welling 2013).

    Parameters
    ----------
    hidden_dim, latent_dim
        Input width H and latent width L.
    variational
        If false, there is no variance, and the latent variable is the mean.

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
        """Return the latent variable, mean and log-variance, each (B, L); in evaluation, the first two are equal.

        Without a variance, the log-variance is at its lower bound, -15.
        """
        mu_bl = _wide(self.mu_projection(hidden_bh))
        if self.logvar_projection is None:
            return mu_bl, mu_bl, torch.full_like(mu_bl, LOG_VARIANCES[0])
        logvar_bl = _wide(self.logvar_projection(hidden_bh)).clamp(*LOG_VARIANCES)
        if not self.training:
            return mu_bl, mu_bl, logvar_bl
        return draw_latent(mu_bl, logvar_bl), mu_bl, logvar_bl


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class AnnotationHead(nn.Module):
    """Predict cell types from latent variables: Linear to H, GELU, Linear to T.

    Parameters
    ----------
    latent_dim, hidden_dim, num_cell_types
        Latent width L, hidden width H and number of cell types T.
    """

    def __init__(self, latent_dim: int, hidden_dim: int, num_cell_types: int) -> None:
        super().__init__()
        self.dense = nn.Linear(latent_dim, hidden_dim)
        self.classifier = nn.Linear(hidden_dim, num_cell_types)

    def forward(self, latent_bl: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (B, T)."""
        return self.classifier(F.gelu(self.dense(latent_bl)))


def mean_over_cells(losses_m: torch.Tensor, cells_m: torch.Tensor, weights_b: torch.Tensor | None) -> torch.Tensor:
    """Return the mean token loss of each cell times the weight of the cell, averaged over cells, a scalar.

    A cell without tokens contributes 0. Without weights, the result is the mean over all tokens, or 0 if there are no
    tokens.

    Parameters
    ----------
    losses_m
        Loss of each token, shape (M,).
    cells_m
        Index of the cell of each token, int64, shape (M,).
    weights_b
        Weight of each cell, shape (B,), or None.
    """
    if weights_b is None:
        return losses_m.sum() / max(1, len(losses_m))
    n_tokens_b = torch.zeros_like(weights_b, dtype=losses_m.dtype).index_add(0, cells_m, torch.ones_like(losses_m))
    share_b = weights_b.to(losses_m.dtype) / (n_tokens_b.clamp(min=1) * max(1, len(weights_b)))
    return (losses_m * share_b[cells_m]).sum()


def init_scdiva(module: nn.Module) -> None:
    """Initialize one module, for ``model.apply``: weights from N(0, 0.02), zero biases, norms with ones and zeros."""
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
