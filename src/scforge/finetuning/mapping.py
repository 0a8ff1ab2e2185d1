"""An architecture with a head, and the mapping of query cells onto training cells without training.

Shapes: Q query cells, R training cells, D dimensions, K query clusters, G genes, V tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from scforge.data.cells import Cells
from scforge.data.neighbors import SHARPNESS, n_query_clusters, query_shifts
from scforge.models._utils import evaluating
from scforge.models.protocol import ModelOutput
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives.base import Objective
from scforge.training.objectives.variational import expression_sums
from scforge.training.predict import embed

_MOST_OF_QUERY = 5_000
"""Maximum number of query cells used to fit a mapping."""

_FACTOR_PRIOR, _MOST_OF_CLUSTER, _LARGEST_FACTOR = 30.0, 20.0, 5.0
"""Pseudo-expression for shrinkage, maximum weight of a cluster, and maximum factor; chosen on kang_ifnb."""


class FineTunedModule(nn.Module):
    """An architecture with a head that takes its cell embeddings.

    Parameters
    ----------
    encoder
        The architecture.
    head
        Head whose ``forward(embeddings, batch)`` takes embeddings of shape (B, D) and the batch, and returns shape (B,
        K).
    mapping
        Mapping of query cells onto the training cells. If None, cells are not mapped, unless `head` is a mapping.

    Attributes
    ----------
    frozen
        Whether the whole encoder is frozen; it then computes without dropout.

    Examples
    --------
    >>> import scforge
    >>> class Head(nn.Linear):
    ...     def forward(self, embeddings, batch):
    ...         return super().forward(embeddings)
    >>> encoder = scforge.models.GenePoolingModel(50, hidden_dim=8)
    >>> module = FineTunedModule(encoder, Head(8, 3))
    >>> ids, mask = torch.tensor([[5, 9]]), torch.ones(1, 2)
    >>> module(ids, mask, values=torch.ones(1, 2)).logits.shape
    torch.Size([1, 3])
    """

    def __init__(self, encoder: nn.Module, head: nn.Module, mapping: QueryMapping | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.mapping = mapping
        self.frozen = False

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **batch: Any) -> torch.Tensor:
        """Return cell embeddings, shape (B, D); query embeddings are in the space of the reference."""
        whole = {"input_ids": input_ids, "attention_mask": attention_mask, **batch}
        mapping = self.head if isinstance(self.head, QueryMapping) else self.mapping
        if mapping is None:
            return self.encoder.encode(**whole)
        return mapping.move(self.encoder.encode(**mapping.scaled(whole)))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **batch: Any) -> ModelOutput:
        """Return the head outputs as ``logits``, shape (B, K), and ``embeddings``, shape (B, D)."""
        whole = {"input_ids": input_ids, "attention_mask": attention_mask, **batch}
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            embeddings = self.encode(**whole)
        return ModelOutput(logits=self.head(embeddings, whole), embeddings=embeddings)

    def train(self, mode: bool = True) -> FineTunedModule:
        """Switch between training and evaluation mode; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self


class Unchanged(nn.Module):
    """Return embeddings unchanged."""

    def forward(self, embeddings: torch.Tensor, batch: Mapping[str, Any] | None = None) -> torch.Tensor:
        """Return the embeddings, shape (B, D)."""
        return embeddings


class QueryMapping(Unchanged):
    """Map query cells onto their reference, without training.

    Before the encoder, the expression of each gene is multiplied by a factor. After the encoder, the embedding of a
    cell is shifted like the clusters around it (:func:`scforge.data.neighbors.query_shifts`).

    Parameters
    ----------
    n_latent
        Dimensions D.
    n_clusters
        Number of query clusters K.
    n_tokens
        Size of the vocabulary V.
    """

    center: torch.Tensor
    clusters: torch.Tensor
    shifts: torch.Tensor
    factors: torch.Tensor

    def __init__(self, n_latent: int, n_clusters: int, n_tokens: int) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(n_latent))
        self.register_buffer("clusters", torch.zeros(n_clusters, n_latent))
        self.register_buffer("shifts", torch.zeros(n_clusters, n_latent))
        self.register_buffer("factors", torch.ones(n_tokens))

    def set_shifts(self, reference: np.ndarray, query: np.ndarray) -> None:
        """Compute the shifts from reference and query embeddings, shapes (R, D) and (Q, D)."""
        arrays = query_shifts(reference, query)
        for buffer, value in zip((self.center, self.clusters, self.shifts), arrays, strict=True):
            buffer.copy_(torch.from_numpy(value))

    def set_factors(self, expected: np.ndarray, observed: np.ndarray) -> None:
        """Compute the factors from decoded and observed log1p CP10K summed over each cluster, both of shape (K, G).

        The factor of a gene is the weighted median over clusters of the ratio of the two sums. Genes of a cell type
        that the reference lacks therefore keep their expression if other types express them as well.
        """
        prior = _FACTOR_PRIOR
        expected = expected.clip(min=0)
        ratios = np.log((expected + prior / 4) / (observed + prior / 4))
        weights = expected.clip(max=_MOST_OF_CLUSTER)
        order = ratios.argsort(axis=0)
        below = np.take_along_axis(weights, order, axis=0).cumsum(axis=0)
        middle = (below >= below[-1] / 2).argmax(axis=0)[None]
        median = np.take_along_axis(np.take_along_axis(ratios, order, axis=0), middle, axis=0)[0]
        median *= below[-1] / (below[-1] + prior)
        factors = np.where(observed.any(axis=0), np.exp(median), 1.0).clip(1 / _LARGEST_FACTOR, _LARGEST_FACTOR)
        self.factors[len(self.factors) - len(factors) :] = torch.from_numpy(factors).to(self.factors)

    def typical_factor(self) -> float:
        """Return the geometric standard deviation of the factors, which is 1 if all genes keep their expression."""
        logs = self.factors.log()
        changed = logs[logs != 0]
        return float(changed.std(correction=0).exp()) if len(changed) else 1.0

    def only_factors(self, n_latent: int) -> QueryMapping:
        """Return a mapping with these factors and without shifts, for an encoder with `n_latent` dimensions."""
        mapping = QueryMapping(n_latent, 1, len(self.factors))
        mapping.factors.copy_(self.factors)
        return mapping

    def scaled(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a token batch with the expression that the encoder expects."""
        return {**batch, "values": batch["values"] * self.factors[batch["input_ids"]]} if "values" in batch else batch

    def move(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of query cells in the space of the reference, shape (B, D)."""
        return embeddings + (SHARPNESS * self.cosines(embeddings)).softmax(dim=1) @ self.shifts

    def cosines(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the cosine similarity between cells and clusters, shape (B, K)."""
        return F.normalize(embeddings - self.center, dim=1) @ self.clusters.T


def fit_mapping(
    backbone: nn.Module,
    landmarks: np.ndarray,
    query: Cells,
    tokenizer: Tokenizer,
    objective: Objective,
    *,
    rows: np.ndarray | None = None,
    seed: int = 0,
) -> QueryMapping:
    """Return the mapping of query cells (in `rows`) onto training cells, on the device of the module.

    Parameters
    ----------
    backbone
        The trained architecture. If the tokenizer gives expression, it decodes expression, too.
    landmarks
        Embeddings of training cells, float32, shape (R, D).
    query
        Query cells over the genes of the model.
    tokenizer, objective
        See :func:`scforge.training.predict.embed`.
    rows
        Rows of the cells to map. If None, maps all cells.
    seed
        Random seed for sampling cells.
    """
    sampled = query.sample(_MOST_OF_QUERY, rows=rows, seed=seed)
    sampled = sampled.take(sampled.content_order())  # clusters depend on the order
    device = next(backbone.parameters()).device
    n_clusters = n_query_clusters(len(query) if rows is None else len(rows))
    mapping = QueryMapping(landmarks.shape[1], n_clusters, len(tokenizer.vocab)).to(device)
    module = FineTunedModule(backbone, mapping)
    embeddings = embed(module, sampled, tokenizer, objective=objective)
    mapping.set_shifts(landmarks, embeddings)
    if not (tokenizer.gives_expression and mapping.shifts.any()):
        return mapping
    decoder: Any = backbone
    with torch.inference_mode(), evaluating(backbone):
        points = torch.from_numpy(embeddings).to(device)
        clusters = mapping.cosines(points).argmax(dim=1).cpu()
        expected = torch.zeros(int(clusters.max()) + 1, sampled.counts.shape[1], dtype=torch.float64)
        for moved, members in zip(mapping.move(points).split(512), clusters.split(512), strict=True):
            expected.index_add_(0, members, decoder.decode(moved).cpu().double())
    mapping.set_factors(expected.numpy(), expression_sums(sampled, clusters.numpy()))
    mapping.shifts.zero_()
    mapping.set_shifts(landmarks, embed(module, sampled, tokenizer, objective=objective))
    return mapping
