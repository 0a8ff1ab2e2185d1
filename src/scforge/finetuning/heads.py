"""Prediction heads for an encoder: linear probes and calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from torch import nn

from scforge._checks import check_count, check_share
from scforge._registry import check_options
from scforge.data.cells import CellSource
from scforge.errors import OptionError
from scforge.finetuning.mapping import FineTunedModule
from scforge.models._utils import evaluating
from scforge.models.components.heads import Standardize
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives.base import Objective
from scforge.training.predict import embed

_LOG_RANGE = (float(np.log(1e-2)), float(np.log(1e2)))


def check_head(head: Any) -> dict[str, Any]:
    """Return the `head` option of a task. Raises :class:`~scforge.errors.OptionError` if it is invalid."""
    if head is None:
        return {}
    if not isinstance(head, Mapping):
        raise OptionError("is not a dict of options; pass e.g. {'hidden_dim': 128, 'dropout': 0.1}.", head=head)
    check_options("option of head", "head", head, ["hidden_dim", "dropout"])
    check_count("head['hidden_dim']", head.get("hidden_dim", 0), "dimensions", least=0)
    check_share("head['dropout']", head.get("dropout", 0))
    return dict(head)


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

    optimum = minimize_scalar(loss, bounds=_LOG_RANGE, method="bounded", options={"xatol": 1e-4})
    return float(np.exp(optimum.x))


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
    present = np.unique(classes)
    if len(present) < 2:
        biases[present] = 1.0
        return weights, biases
    of_cells = None if class_weights is None else class_weights[classes]
    model = LogisticRegression(C=strength, max_iter=2_000).fit(features, classes, sample_weight=of_cells)
    two = len(present) == 2
    # Of two classes scikit-learn has the difference only.
    weights[present] = np.concatenate([-model.coef_, model.coef_]) / 2 if two else model.coef_
    intercepts = np.concatenate([-model.intercept_, model.intercept_]) / 2 if two else model.intercept_
    biases[:] = intercepts.min()
    biases[present] = intercepts
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
