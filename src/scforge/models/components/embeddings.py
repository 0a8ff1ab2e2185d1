"""Embeddings of genes and their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_choice, check_count
from scforge.errors import OptionError
from scforge.models.components.gene_vectors import token_embedding
from scforge.models.components.transformer import Dropout

_AMPLITUDE = 0.5

POSITION_EMBEDDINGS = ("learned", "rotary", "none")

VALUE_ENCODERS = ("linear", "mlp", "soft_bins")

EMBEDDING_NORMS = ("sum", "genes", "none")

_VALUE_SCALE = 0.02


def waves(n_rows: int, dim: int) -> torch.Tensor:
    """Return sinusoidal vectors, float32, shape (n_rows, dim); neighboring rows are similar.

    The longest wavelength is twice the length of the table, so the first and last rows are far apart; the shortest is
    four rows.

    Examples
    --------
    >>> waves(51, 8).shape
    torch.Size([51, 8])
    """
    n_waves = (dim + 1) // 2
    longest, shortest = 2.0 * n_rows, 4.0
    lengths = longest * (shortest / longest) ** torch.linspace(0.0, 1.0, n_waves)
    angles = 2.0 * torch.pi * torch.arange(n_rows).unsqueeze(1) / lengths
    return _AMPLITUDE * torch.cat([angles.sin(), angles.cos()], dim=1)[:, :dim]


def between_rows(table: nn.Embedding, values_bs: torch.Tensor) -> torch.Tensor:
    """Look up fractional row indices in an embedding table, interpolating linearly between rows, shape (B, S, H).

    Indices outside the table are clipped to the first or last row.

    Examples
    --------
    >>> table = nn.Embedding.from_pretrained(torch.tensor([[0.0], [2.0], [10.0]]))
    >>> between_rows(table, torch.tensor([[1.0, 1.25, -3.0, 7.0]])).flatten()
    tensor([ 2.,  4.,  0., 10.])
    """
    values_bs = values_bs.to(torch.float32).clamp(0, table.num_embeddings - 1)
    lower_bs = values_bs.floor()
    share_bs1 = (values_bs - lower_bs).unsqueeze(-1)
    lower_bsh = table(lower_bs.long())
    upper_bsh = table(values_bs.ceil().long())
    return torch.lerp(lower_bsh, upper_bsh, share_bs1.to(lower_bsh.dtype))


class _Biased(nn.Linear):
    """Linear layer with nonzero initial biases, as in torch; zeros would make the norm equalize all values."""

    initializes_itself = True


class ValueMLP(nn.Module):
    """Linear, ReLU, Linear and LayerNorm on values clipped at `most`, as in scGPT (Cui et al. 2024).

    Examples
    --------
    >>> ValueMLP(hidden_dim=8)(torch.rand(2, 5)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, hidden_dim: int, layer_norm_eps: float = 1e-5, most: float = 512.0) -> None:
        super().__init__()
        self.most = most
        self.linear_in = _Biased(1, hidden_dim)
        self.linear_out = nn.Linear(hidden_dim, hidden_dim)
        self.layer_norm = nn.LayerNorm(hidden_dim, eps=layer_norm_eps)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Embed values of shape (B, S) as vectors of shape (B, S, H)."""
        x = values.unsqueeze(-1).clamp(max=self.most).to(self.linear_in.weight.dtype)
        return self.layer_norm(self.linear_out(F.relu(self.linear_in(x))))


class SoftBins(nn.Module):
    """Weighted mean of the learned vectors of K bins, with weights computed from the value, as in scFoundation.

    With ``x = leaky_relu(Linear(value))``, with slope 0.1 below zero, the weights are ``softmax(alpha * x +
    Linear(x))`` (Hao et al. 2024, the embedding of expression values).

    Examples
    --------
    >>> SoftBins(hidden_dim=8, n_bins=4)(torch.rand(2, 5)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, hidden_dim: int, n_bins: int, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = alpha
        self.linear_in = nn.Linear(1, n_bins)
        self.linear_out = nn.Linear(n_bins, n_bins)
        self.bins = nn.Embedding(n_bins, hidden_dim)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Embed values of shape (B, S) as vectors of shape (B, S, H)."""
        x = F.leaky_relu(self.linear_in(values.unsqueeze(-1).to(self.linear_in.weight.dtype)), 0.1)
        return (self.alpha * x + self.linear_out(x)).softmax(dim=-1) @ self.bins.weight


class GeneExpressionEmbedding(nn.Module):
    """Sum of gene embedding, learned position embedding and encoded expression value, with layer norm and dropout.

    Parameters
    ----------
    vocab_size
        Number of tokens, including special tokens.
    hidden_dim
        Width H.
    max_seq_len
        Number of positions.
    dropout
        Dropout rate after the layer norm.
    use_expression_values
        Whether to project the scalar value of each token to H dimensions and add it.
    layer_norm_eps
        Epsilon of the layer norm.
    gene_vectors
        Options to embed genes with pretrained vectors: the arguments ``dim``, ``learned`` and ``frozen`` of
        :class:`GeneVectorEmbedding`.
    position_embedding
        ``"learned"`` adds a vector for each position; ``"rotary"`` (applied in the attention) and ``"none"`` add
        nothing.
    value_encoder
        Encoder of values: ``"linear"``, one projection; ``"mlp"``, as in scGPT (:class:`ValueMLP`); or ``"soft_bins"``,
        as in scFoundation (:class:`SoftBins`).
    n_value_bins, value_bins_alpha
        Number of bins for ``"soft_bins"``, and the weight of its first layer relative to its second layer.
    embedding_norm
        Input of the layer norm: ``"sum"`` for the sum, ``"genes"`` for only the gene embedding (as in scGPT), or
        ``"none"`` for no layer norm (as in scFoundation).

    Examples
    --------
    >>> embedding = GeneExpressionEmbedding(vocab_size=50, hidden_dim=8)
    >>> embedding(torch.randint(0, 50, (2, 5)), values=torch.rand(2, 5)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int,
        max_seq_len: int = 2048,
        dropout: float = 0.1,
        use_expression_values: bool = True,
        layer_norm_eps: float = 1e-12,
        gene_vectors: dict[str, Any] | None = None,
        *,
        position_embedding: str = "learned",
        value_encoder: str = "linear",
        n_value_bins: int | None = None,
        value_bins_alpha: float = 1.0,
        embedding_norm: str = "sum",
    ) -> None:
        super().__init__()
        check_choice("position_embedding", position_embedding, POSITION_EMBEDDINGS)
        check_choice("value_encoder", value_encoder, VALUE_ENCODERS)
        check_choice("embedding_norm", embedding_norm, EMBEDDING_NORMS)
        check_count("max_seq_len", max_seq_len, "tokens")
        if value_encoder != "linear" and not use_expression_values:
            raise OptionError(
                "requires use_expression_values=True; set use_expression_values=True, or omit value_encoder.",
                value_encoder=value_encoder,
            )
        if (value_encoder == "soft_bins") != (n_value_bins is not None):
            raise OptionError(
                f"does not work with value_encoder={value_encoder!r}; set n_value_bins "
                "if and only if value_encoder='soft_bins'.",
                n_value_bins=n_value_bins,
            )
        self.max_seq_len = max_seq_len
        self.gene_embedding = token_embedding(vocab_size, hidden_dim, gene_vectors)
        self.position_embedding = nn.Embedding(max_seq_len, hidden_dim) if position_embedding == "learned" else None
        linear = use_expression_values and value_encoder == "linear"
        self.expression_projection = nn.Linear(1, hidden_dim) if linear else None
        # Values of 5 and more times Xavier weights would drown gene embeddings of standard deviation 0.02 (measured on
        # PBMC 3k: masked-gene loss 5.9 instead of 4.2). So values start on the scale of the gene embeddings.
        self.expression_scale = nn.Parameter(torch.tensor(_VALUE_SCALE)) if linear else None
        self.value_encoder: ValueMLP | SoftBins | None = None
        if value_encoder == "mlp":
            self.value_encoder = ValueMLP(hidden_dim, layer_norm_eps)
        if n_value_bins is not None:
            self.value_encoder = SoftBins(hidden_dim, n_value_bins, value_bins_alpha)
        self.embedding_norm = embedding_norm
        self.layer_norm = nn.Identity() if embedding_norm == "none" else nn.LayerNorm(hidden_dim, eps=layer_norm_eps)
        self.dropout = Dropout(dropout)

    def forward(
        self, input_ids: torch.Tensor, values: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Embed tokens.

        Parameters
        ----------
        input_ids
            Token ids, shape (B, S).
        values
            Expression values, shape (B, S). If None, uses zeros.
        positions
            Position of each token, int64, shape (S,) or (B, S). If None, uses 0, 1, 2, ...

        Returns
        -------
        The embeddings, shape (B, S, H).
        """
        seq_len = input_ids.shape[1]
        if seq_len > self.max_seq_len:
            raise OptionError(
                f"a cell has {seq_len} tokens, but max_seq_len={self.max_seq_len}; increase max_seq_len, or lower the "
                "tokenizer's max_len."
            )
        values = torch.zeros_like(input_ids) if values is None else values
        hidden = self.gene_embedding(input_ids)
        if self.embedding_norm == "genes":
            hidden = self.layer_norm(hidden)
        if self.position_embedding is not None:
            positions = torch.arange(seq_len, device=input_ids.device) if positions is None else positions
            hidden = hidden + self.position_embedding(positions)
        if self.expression_projection is not None:
            projected = self.expression_projection(values.unsqueeze(-1).to(self.expression_projection.weight.dtype))
            hidden = hidden + self.expression_scale * projected
        if self.value_encoder is not None:
            hidden = hidden + self.value_encoder(values)
        return self.dropout(self.layer_norm(hidden) if self.embedding_norm == "sum" else hidden)
