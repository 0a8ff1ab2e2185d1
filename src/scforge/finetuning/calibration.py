"""Confidence that means what it says: temperature scaling, and how unsure a prediction is.

Shapes: N cells, C classes, D dimensions.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from scforge.finetuning.heads import PredictionHead

__all__ = ["CalibratedHead", "fit_temperature", "normalised_entropy", "probabilities_of"]

_LOG_RANGE = (float(np.log(1e-2)), float(np.log(1e2)))


class CalibratedHead(PredictionHead):
    """A head for classes with a temperature, which is fitted after training and saved with the weights.

    ``forward`` returns logits as they are, so that further training does not depend on the temperature; divide them by
    it to get calibrated ones.

    Attributes
    ----------
    temperature
        Float32 scalar, 1 until it is fitted.
    """

    temperature: torch.Tensor

    def __init__(self, n_in: int, n_out: int, *, hidden_dim: int = 0, dropout: float = 0.1) -> None:
        super().__init__(n_in, n_out, hidden_dim=hidden_dim, dropout=dropout)
        self.register_buffer("temperature", torch.ones(()))


def fit_temperature(logits: np.ndarray, classes: np.ndarray) -> float:
    """Return the temperature that makes the classes of held-out cells likeliest (Guo et al. 2017, section 4.2).

    Where all held-out cells are predicted right, the likeliest temperature is zero, and all confidence one. So the
    targets are those of Platt (1999): a cell has its class with the probability (N + 1) / (N + 2).

    Parameters
    ----------
    logits
        Of cells that were not trained on, shape (N, C).
    classes
        Their classes, shape (N,).

    Returns
    -------
    A number from 0.01 to 100; 1 if there is no cell.

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


def normalised_entropy(probabilities: np.ndarray) -> np.ndarray:
    """Return the entropy of each row divided by that of C equal probabilities, in [0, 1], shape (N,)."""
    logs = np.log(probabilities, out=np.zeros_like(probabilities), where=probabilities > 0)
    return np.clip(-(probabilities * logs).sum(axis=1) / np.log(probabilities.shape[1]), 0.0, 1.0)
