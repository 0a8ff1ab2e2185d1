"""Heads that start where a linear model of the embeddings stands.

Linear probing before fine-tuning keeps the first steps from distorting what the encoder knows (Kumar et al. 2022,
arXiv:2202.10054).

Shapes: N cells, D dimensions, F inputs of the last layer, C classes, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from scforge.models._utils import evaluating
from scforge.training.predict import embed

if TYPE_CHECKING:
    from scforge.data.cells import CellSource
    from scforge.finetuning.base import Task
    from scforge.finetuning.heads import PredictionHead
    from scforge.finetuning.module import FineTunedModule
    from scforge.tokenizers.base import Tokenizer

__all__ = ["Fit", "fit_logistic", "fit_ridge", "fit_separate_logistic", "probe"]

type Fit = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Takes features of cells (N, F), and returns weights (K, F) and biases (K,)."""


def probe(module: FineTunedModule, cells: CellSource, tokenizer: Tokenizer, task: Task, fit: Fit | None) -> None:
    """Set the standardisation of a :class:`~scforge.finetuning.PredictionHead`, and its last layer if `fit` is given.

    Parameters
    ----------
    module
        The module, with a :class:`~scforge.finetuning.PredictionHead`.
    cells
        Training cells that have a target.
    tokenizer, task
        As for :func:`scforge.training.predict.embed`.
    fit
        Fits the linear model on what the last layer sees: the standardised embeddings, or the hidden layer.
    """
    head: PredictionHead = module.head
    embeddings = embed(module, cells, tokenizer, objective=task)
    head.standardise.set_from(embeddings)
    if fit is None:
        return
    device = head.out.weight.device
    with torch.inference_mode(), evaluating(head):
        features = head.hidden(head.standardise(torch.from_numpy(embeddings).to(device))).cpu().numpy()
    weights, biases = fit(features)
    with torch.no_grad():
        head.out.weight.copy_(torch.from_numpy(weights))
        head.out.bias.copy_(torch.from_numpy(biases))


def fit_logistic(
    features: np.ndarray, classes: np.ndarray, n_classes: int, class_weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (C, F) and biases (C,) of a logistic regression (L2, C = 1).

    A class without a cell gets no weights, and the smallest bias.

    Parameters
    ----------
    features
        Shape (N, F).
    classes
        Class of each cell, shape (N,).
    n_classes
        Number of classes C.
    class_weights
        Weight of each class, shape (C,); None for 1.
    """
    from sklearn.linear_model import LogisticRegression

    weights, biases = np.zeros((n_classes, features.shape[1])), np.zeros(n_classes)
    known = np.unique(classes)
    if len(known) < 2:
        biases[known] = 1.0
        return weights, biases
    of_cells = None if class_weights is None else class_weights[classes]
    model = LogisticRegression(max_iter=2_000).fit(features, classes, sample_weight=of_cells)
    two = len(known) == 2
    # Of two classes scikit-learn has the difference only.
    weights[known] = np.concatenate([-model.coef_, model.coef_]) / 2 if two else model.coef_
    intercepts = np.concatenate([-model.intercept_, model.intercept_]) / 2 if two else model.intercept_
    biases[:] = intercepts.min()
    biases[known] = intercepts
    return weights, biases


def fit_separate_logistic(features: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (C, F) and biases (C,) of one logistic regression a label; `targets` is bool, shape (N, C)."""
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
    """Return weights (1, F) and bias (1,) of a ridge regression, its penalty chosen by leave-one-out."""
    from sklearn.linear_model import RidgeCV

    model = RidgeCV(np.logspace(-2, 4, 13)).fit(features, target)
    return np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)
