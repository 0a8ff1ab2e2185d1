"""Prediction heads for an encoder: the module, linear probes and calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_count, check_share
from scforge._registry import check_options
from scforge.data.cells import CellSource
from scforge.data.neighbors import SHARPNESS, query_shifts
from scforge.errors import OptionError
from scforge.models._utils import evaluating
from scforge.models.components.heads import Standardize
from scforge.models.protocol import ModelOutput
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives.base import Objective
from scforge.training.predict import embed

_FACTOR_PRIOR, _MOST_OF_CLUSTER, _LARGEST_FACTOR = 30.0, 20.0, 5.0
"""Pseudo-expression for shrinkage, maximum weight of a cluster, and maximum factor; chosen on kang_ifnb."""

_LOG_RANGE = (float(np.log(1e-2)), float(np.log(1e2)))


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


def check_head(head: Any) -> dict[str, Any]:
    """Return the `head` option of a task. Raises :class:`~scforge.errors.OptionError` if it is invalid."""
    if head is None:
        return {}
    if not isinstance(head, Mapping):
        raise OptionError(f"head={head!r} is not a dict of options; pass e.g. {{'hidden_dim': 128, 'dropout': 0.1}}.")
    check_options("option of head", "head", head, ["hidden_dim", "dropout"])
    check_count("head['hidden_dim']", head.get("hidden_dim", 0), "dimensions", least=0)
    check_share("head['dropout']", head.get("dropout", 0))
    return dict(head)


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
        found = query_shifts(reference, query)
        for buffer, value in zip((self.center, self.clusters, self.shifts), found, strict=True):
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
        found = QueryMapping(n_latent, 1, len(self.factors))
        found.factors.copy_(self.factors)
        return found

    def scaled(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a token batch with the expression that the encoder expects."""
        return {**batch, "values": batch["values"] * self.factors[batch["input_ids"]]} if "values" in batch else batch

    def move(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of query cells in the space of the reference, shape (B, D)."""
        return embeddings + (SHARPNESS * self.cosines(embeddings)).softmax(dim=1) @ self.shifts

    def cosines(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the cosine similarity between cells and clusters, shape (B, K)."""
        return F.normalize(embeddings - self.center, dim=1) @ self.clusters.T


class PredictionHead(nn.Module):
    """Standardization of the embeddings, an optional hidden layer, and a linear layer.

    Parameters
    ----------
    n_in, n_out
        Number of dimensions D and outputs K.
    hidden_dim
        Width of the hidden layer; 0 for no hidden layer.
    dropout
        Dropout rate before the last layer.

    Examples
    --------
    >>> PredictionHead(8, 3)(torch.randn(5, 8)).shape
    torch.Size([5, 3])
    """

    def __init__(self, n_in: int, n_out: int, *, hidden_dim: int = 0, dropout: float = 0.1) -> None:
        super().__init__()
        self.standardize = Standardize(n_in)
        self.hidden = nn.Sequential(nn.Linear(n_in, hidden_dim), nn.GELU()) if hidden_dim else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(hidden_dim or n_in, n_out)

    def forward(self, embeddings: torch.Tensor, batch: Mapping[str, Any] | None = None) -> torch.Tensor:
        """Return outputs, shape (B, K)."""
        return self.out(self.dropout(self.hidden(self.standardize(embeddings))))


class CalibratedHead(PredictionHead):
    """A classification head with a temperature that is fitted after training and saved with the weights.

    ``forward`` returns uncalibrated logits, so further training does not depend on the temperature. Divide the logits
    by the temperature to calibrate them.

    Attributes
    ----------
    temperature
        The temperature, a float32 scalar; 1 until it is fitted.
    """

    temperature: torch.Tensor

    def __init__(self, n_in: int, n_out: int, **options: Any) -> None:
        super().__init__(n_in, n_out, **options)
        self.register_buffer("temperature", torch.ones(()))


def fit_temperature(logits: np.ndarray, classes: np.ndarray) -> float:
    """Return the maximum-likelihood temperature on held-out cells (Guo et al. 2017, section 4.2).

    If all held-out cells are predicted correctly, the maximum-likelihood temperature is zero, which makes all
    confidences one. The targets therefore follow Platt (1999): a cell belongs to its class with the probability (N + 1)
    / (N + 2).

    Parameters
    ----------
    logits
        Logits of cells that were not used for training, shape (N, C).
    classes
        Classes of the cells, shape (N,).

    Returns
    -------
    A number from 0.01 to 100, or 1 if there are no cells.

    Examples
    --------
    >>> sure_of_everything = np.array([[8.0, 0.0], [8.0, 0.0], [8.0, 0.0]])
    >>> fit_temperature(sure_of_everything, np.array([0, 0, 1])) > 8
    True
    """
    n_cells, n_classes = logits.shape
    if not n_cells:
        return 1.0
    targets = np.full(logits.shape, 1 / ((n_cells + 2) * (n_classes - 1)))
    targets[np.arange(n_cells), classes] = (n_cells + 1) / (n_cells + 2)
    exact = logits.astype(np.float64)

    def loss(log_temperature: float) -> float:
        return float(-(targets * log_softmax(exact / np.exp(log_temperature), axis=1)).sum() / n_cells)

    found = minimize_scalar(loss, bounds=_LOG_RANGE, method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x))


def probabilities_of(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the probability of each class, float64, shape (N, C)."""
    return softmax(logits.astype(np.float64) / temperature, axis=1)


def normalized_entropy(probabilities: np.ndarray) -> np.ndarray:
    """Return the entropy of each row divided by the entropy of C equal probabilities, in [0, 1], shape (N,)."""
    logs = np.log(probabilities, out=np.zeros_like(probabilities), where=probabilities > 0)
    return np.clip(-(probabilities * logs).sum(axis=1) / np.log(probabilities.shape[1]), 0.0, 1.0)


type Fit = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Function that takes cell features (N, F), and returns weights (K, F) and biases (K,)."""


def probe(module: FineTunedModule, cells: CellSource, tokenizer: Tokenizer, task: Objective, fit: Fit | None) -> None:
    """Fit the standardization of a :class:`~scforge.finetuning.PredictionHead`, and its last layer if `fit` is given.

    Parameters
    ----------
    module
        The module, with a :class:`~scforge.finetuning.PredictionHead`.
    cells
        Training cells that have a target.
    tokenizer, task
        See :func:`scforge.training.predict.embed`.
    fit
        Function that fits the linear model on the input of the last layer: the standardized embeddings, or the hidden
        layer.
    """
    head: PredictionHead = module.head
    embeddings = embed(module, cells, tokenizer, objective=task)
    head.standardize.set_from(embeddings)
    if fit is None:
        return
    device = head.out.weight.device
    with torch.inference_mode(), evaluating(head):
        features = head.hidden(head.standardize(torch.from_numpy(embeddings).to(device))).cpu().numpy()
    weights, biases = fit(features)
    with torch.no_grad():
        head.out.weight.copy_(torch.from_numpy(weights))
        head.out.bias.copy_(torch.from_numpy(biases))


def fit_logistic(
    features: Any, classes: np.ndarray, n_classes: int, class_weights: np.ndarray | None = None, strength: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (C, F) and biases (C,) of a logistic regression with an L2 penalty.

    A class without cells receives zero weights and the smallest bias.

    Parameters
    ----------
    features
        Features of each cell, dense or sparse, shape (N, F).
    classes
        Class of each cell, shape (N,).
    n_classes
        Number of classes C.
    class_weights
        Weight of each class, shape (C,). If None, all weights are 1.
    strength
        Inverse of the regularization strength, ``C`` of scikit-learn.
    """
    from sklearn.linear_model import LogisticRegression

    weights, biases = np.zeros((n_classes, features.shape[1])), np.zeros(n_classes)
    known = np.unique(classes)
    if len(known) < 2:
        biases[known] = 1.0
        return weights, biases
    of_cells = None if class_weights is None else class_weights[classes]
    model = LogisticRegression(C=strength, max_iter=2_000).fit(features, classes, sample_weight=of_cells)
    two = len(known) == 2
    # Of two classes scikit-learn has the difference only.
    weights[known] = np.concatenate([-model.coef_, model.coef_]) / 2 if two else model.coef_
    intercepts = np.concatenate([-model.intercept_, model.intercept_]) / 2 if two else model.intercept_
    biases[:] = intercepts.min()
    biases[known] = intercepts
    return weights, biases


def balanced_weights(classes: np.ndarray, n_classes: int) -> np.ndarray:
    """Return weights that give each class with cells the same total weight, shape (C,)."""
    sizes = np.bincount(classes, minlength=n_classes)
    # A class without cells has the weight of a class with one cell, which has no effect.
    return sizes.sum() / (np.count_nonzero(sizes) * np.maximum(sizes, 1))


def fit_separate_logistic(features: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (C, F) and biases (C,) of a logistic regression for each label; `targets` is bool, (N, C)."""
    from sklearn.linear_model import LogisticRegression

    weights, biases = np.zeros((targets.shape[1], features.shape[1])), np.zeros(targets.shape[1])
    for label, has in enumerate(targets.T):
        if has.all() or not has.any():
            share = (has.sum() + 1) / (len(has) + 2)
            biases[label] = np.log(share / (1 - share))
            continue
        model = LogisticRegression(max_iter=2_000).fit(features, has)
        weights[label], biases[label] = model.coef_[0], model.intercept_[0]
    return weights, biases


def fit_ridge(features: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (1, F) and bias (1,) of a ridge regression, with the penalty chosen by leave-one-out."""
    from sklearn.linear_model import RidgeCV

    model = RidgeCV(np.logspace(-2, 4, 13)).fit(features, target)
    return np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)
