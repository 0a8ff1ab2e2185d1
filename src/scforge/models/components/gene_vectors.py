"""Token embeddings from pretrained gene vectors.

Shapes: B cells, S tokens, H hidden, V vocabulary, D dimensions of a pretrained vector, L tokens without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scforge._constants import PAD_ID
from scforge._registry import check_options
from scforge.errors import OptionError

_STD = 0.02


class _Vectors(nn.Embedding):
    """Vectors that are zero until they are filled, so that random numbers are never used as pretrained vectors."""

    initializes_itself = True

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class _Projection(nn.Linear):
    """Project vectors of length 1 to a standard deviation of 0.02, like the initial values of all embeddings."""

    initializes_itself = True

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_STD)


class GeneVectorEmbedding(nn.Module):
    """Projected pretrained vectors for tokens that have such a vector, and learned vectors for other tokens.

    The embedding of a token with the pretrained vector v is ``W (v - center) * scale``. `center` is the mean vector,
    because otherwise the part shared by all genes (most of an ESM-2 vector) would dominate their differences. `scale`
    sets the root mean square length to 1. W is initialized with standard deviation 0.02, so that embeddings have the
    usual scale and train at the usual rate, regardless of the vector length.

    :meth:`fill` sets the pretrained vectors; until then they are zeros.

    Parameters
    ----------
    vocab_size
        Number of tokens V, including special tokens.
    hidden_dim
        Width H.
    dim
        Number of dimensions D of a pretrained vector.
    learned
        Number L of tokens without a pretrained vector: special tokens (always including PAD) and genes.
    frozen
        Whether the pretrained vectors are fixed in training.

    Examples
    --------
    >>> embedding = GeneVectorEmbedding(vocab_size=6, hidden_dim=8, dim=3, learned=4)
    >>> vectors = torch.full((6, 3), torch.nan)
    >>> vectors[4:] = torch.tensor([[1.0, 0.0, 2.0], [3.0, 5.0, 0.0]])
    >>> embedding.fill(vectors)
    >>> embedding(torch.tensor([[3, 4, 5, 0]])).shape
    torch.Size([1, 4, 8])
    """

    row: torch.Tensor
    center: torch.Tensor
    scale: torch.Tensor

    def __init__(self, vocab_size: int, hidden_dim: int, dim: int, learned: int, frozen: bool = True) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.n_learned = learned
        self.learned = nn.Embedding(learned, hidden_dim, padding_idx=PAD_ID)
        self.vectors = _Vectors(vocab_size - learned, dim)
        self.vectors.weight.requires_grad_(not frozen)
        self.projection = _Projection(dim, hidden_dim, bias=False)
        # Where each token stands in a table of first the learned and then the pretrained vectors.
        self.register_buffer("row", torch.arange(vocab_size))
        # Kept so that the vectors of further genes can be brought onto the same scale; a scale of 0: not filled.
        self.register_buffer("center", torch.zeros(dim))
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed tokens.

        Parameters
        ----------
        input_ids
            Token ids, shape (B, S).

        Returns
        -------
        The embeddings, shape (B, S, H).
        """
        rows = self.row[input_ids]
        # (An exported graph has to do for batches of all sizes.)
        if torch.compiler.is_compiling() or rows.numel() > self.vocab_size:
            return F.embedding(rows, self.table(), padding_idx=PAD_ID)
        own = F.embedding(rows.clamp(max=self.n_learned - 1), self.learned.weight, padding_idx=PAD_ID)
        projected = self.projection(self.vectors((rows - self.n_learned).clamp(min=0))).to(own.dtype)
        return torch.where((rows < self.n_learned).unsqueeze(-1), own, projected)

    def table(self) -> torch.Tensor:
        """Return the embeddings of all tokens in the order of `row`, shape (V, H); this is faster for large batches."""
        projected = self.projection(self.vectors.weight)
        return torch.cat([self.learned.weight, projected.to(self.learned.weight.dtype)])

    @torch.no_grad()
    def fill(self, vectors: torch.Tensor) -> None:
        """Set the pretrained vectors.

        Parameters
        ----------
        vectors
            Vectors, shape (V, D), with rows of NaN for tokens without a vector.

        Raises
        ------
        OptionError
            If the vectors do not match `vocab_size`, `dim` and `learned`, or are all the same.
        """
        without = vectors.isnan().any(dim=1)
        expected = (self.vocab_size, self.vectors.embedding_dim)
        if tuple(vectors.shape) != expected or int(without.sum()) != self.n_learned or not without[PAD_ID]:
            raise OptionError(
                f"gene vectors of shape {tuple(vectors.shape)} with {int(without.sum())} rows of NaN do not match the "
                f"model; pass vectors of shape {expected} with {self.n_learned} rows of NaN, including the row of PAD."
            )
        present = vectors[~without].float()
        center = present.mean(dim=0)
        length = (present - center).square().sum(dim=1).mean().sqrt()
        if not length > 0:
            raise OptionError(
                "all gene vectors are identical and cannot distinguish genes; pass vectors that differ between genes."
            )
        device = self.row.device
        self.center.copy_(center)
        self.scale.copy_(1 / length)
        self.vectors.weight.copy_((present - center) / length)
        order = torch.cat([without.nonzero(), (~without).nonzero()]).flatten()
        self.row[order.to(device)] = torch.arange(self.vocab_size, device=device)


class GeneVectorBag(GeneVectorEmbedding):
    """Weighted sums of the embeddings of :class:`GeneVectorEmbedding`, called like :class:`torch.nn.EmbeddingBag`.

    Examples
    --------
    >>> bag = GeneVectorBag(vocab_size=6, hidden_dim=8, dim=3, learned=4)
    >>> bag(torch.tensor([[3, 4, 5, 0]]), torch.rand(1, 4)).shape
    torch.Size([1, 8])
    """

    def forward(self, input_ids: torch.Tensor, per_sample_weights: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a weighted sum of embeddings.

        Parameters
        ----------
        input_ids
            Token ids, shape (B, S).
        per_sample_weights
            Weights, shape (B, S). If None, uses ones.

        Returns
        -------
        The weighted sums, shape (B, H).
        """
        rows = self.row[input_ids]
        # (An exported graph has to do for batches of all sizes.)
        if torch.compiler.is_compiling() or rows.numel() > self.vocab_size:
            return F.embedding_bag(
                rows, self.table(), mode="sum", per_sample_weights=per_sample_weights, padding_idx=PAD_ID
            )
        embedded = super().forward(input_ids)
        if per_sample_weights is None:
            return embedded.sum(dim=1)
        return (embedded * per_sample_weights.to(embedded.dtype).unsqueeze(-1)).sum(dim=1)


def token_embedding(
    vocab_size: int, hidden_dim: int, gene_vectors: Mapping[str, Any] | None = None, *, bag: bool = False
) -> nn.Module:
    """Return a token embedding, plain or with pretrained vectors: the arguments of :class:`GeneVectorEmbedding`.

    With `bag`, the module returns weighted sums of the embeddings of a cell.
    """
    if gene_vectors is None and bag:
        return nn.EmbeddingBag(vocab_size, hidden_dim, mode="sum", padding_idx=PAD_ID)
    if gene_vectors is None:
        return nn.Embedding(vocab_size, hidden_dim, padding_idx=PAD_ID)
    if not isinstance(gene_vectors, Mapping) or not {"dim", "learned"} <= set(gene_vectors):
        raise OptionError(
            "is not a dict with 'dim' and 'learned'; omit gene_vectors, or pass e.g. {'dim': 1280, 'learned': 4}.",
            gene_vectors=gene_vectors,
        )
    check_options("option", "gene_vectors", gene_vectors, ["dim", "learned", "frozen"])
    return (GeneVectorBag if bag else GeneVectorEmbedding)(vocab_size, hidden_dim, **gene_vectors)


def fill_gene_vectors(module: nn.Module, vectors: torch.Tensor) -> None:
    """Set the pretrained vectors of all :class:`GeneVectorEmbedding` modules in a model.

    Parameters
    ----------
    module
        The model.
    vectors
        Vectors, shape (V, D), with rows of NaN for tokens without a vector.

    Raises
    ------
    OptionError
        If the model contains no such embedding, or the vectors do not match.

    Examples
    --------
    >>> import torch
    >>> from scforge.models import TransformerEncoder
    >>> model = TransformerEncoder(
    ...     vocab_size=6, hidden_dim=8, num_layers=1, num_heads=2, gene_vectors={"dim": 3, "learned": 4}
    ... )
    >>> vectors = torch.full((6, 3), torch.nan)  # four special tokens, then two genes with a vector
    >>> vectors[4:] = torch.tensor([[1.0, 0.0, 2.0], [3.0, 5.0, 0.0]])
    >>> fill_gene_vectors(model, vectors)
    >>> model.embedding.gene_embedding.vectors.weight.norm(dim=1)
    tensor([1., 1.])
    """
    parts = [part for part in module.modules() if isinstance(part, GeneVectorEmbedding)]
    if not parts:
        raise OptionError(
            f"{type(module).__name__} has an option 'gene_vectors', but does not embed gene vectors; pass the option "
            "on to GeneExpressionEmbedding or GeneVectorEmbedding."
        )
    for part in parts:
        part.fill(vectors)


def check_filled(module: nn.Module) -> None:
    """Raise an error if a :class:`GeneVectorEmbedding` of a model has not been filled."""
    if any(isinstance(part, GeneVectorEmbedding) and not part.scale for part in module.modules()):
        raise OptionError(
            "is set, but no vectors were passed to the model; omit gene_vectors, and pass the vectors "
            "with tokenizer={'name': 'gene_embedding', 'table': ...}.",
            argument="gene_vectors",
        )
