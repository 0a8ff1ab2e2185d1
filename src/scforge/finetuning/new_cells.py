"""Predict the classes of cells that a model was not fine-tuned on, e.g. cells of another study.

Shapes: N cells, S labeled cells, D dimensions, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import nn

from scforge._progress import announce
from scforge.errors import ModelFileError, warn
from scforge.finetuning.heads import balanced_weights, fit_logistic, fit_temperature, probabilities_of

_MOST, _NEIGHBORS, _NEAREST = 2_000, 30, 5
"""Maximum number of labeled cells, number of neighbors that vote, and number of neighbors for distances."""
_FOLDS, _LEAST = 5, 50
"""Number of folds for the temperature, and minimum number of cells for folds and for warnings."""
_MOST_DISTANCES = 10**9
_TINY = 1e-6
_FEW_GENES, _LARGE_FACTOR, _MANY_FAR = 0.5, 1.4, 0.2
"""Fraction of genes, factor of expression, and fraction of distant cells from which predictions are unreliable."""


def votes_of(distances: np.ndarray) -> np.ndarray:
    """Return the vote weights ``exp(-d^2 / (2 s^2))``, with s the mean distance of a cell, shape (N, K)."""
    # Cells at the position of all their neighbors count each neighbor equally.
    scale = np.maximum(distances.mean(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return np.exp(-0.5 * np.square(distances / scale))


def neighbor_votes(
    labeled: np.ndarray, classes: np.ndarray, others: np.ndarray, *, n_neighbors: int, n_classes: int, seed: int = 0
) -> np.ndarray:
    """Return the weighted fraction of votes of the nearest labeled cells for each class, float64, shape (N, C).

    Neighbors are found by an approximate search (pynndescent) if the number of distances exceeds a billion.
    """
    from sklearn.neighbors import NearestNeighbors

    k = min(n_neighbors, len(labeled))
    if len(labeled) * len(others) <= _MOST_DISTANCES:
        distances, nearest = NearestNeighbors(n_neighbors=k).fit(labeled).kneighbors(others)
    else:
        from pynndescent import NNDescent

        index = NNDescent(labeled, n_neighbors=max(k, _NEIGHBORS), random_state=seed)
        nearest, distances = index.query(others, k=k)
    weights = votes_of(np.asarray(distances, dtype=np.float64))
    cells = np.repeat(np.arange(len(others)), k)
    size = len(others) * n_classes
    places = cells * n_classes + classes[nearest].ravel()
    votes = np.bincount(places, weights=weights.ravel(), minlength=size).reshape(len(others), n_classes)
    return votes / votes.sum(axis=1, keepdims=True)


def choose_labeled(classes: np.ndarray, *, seed: int, most: int = _MOST) -> np.ndarray:
    """Return the positions of at most `most` cells, sorted; classes with few cells keep more of them."""
    order = np.random.default_rng(seed).permutation(len(classes))
    ranks = pd.Series(order).groupby(classes[order]).cumcount().to_numpy()
    is_first = ranks < max(most // (2 * len(np.unique(classes))), 1)
    return np.sort(np.concatenate([order[is_first], order[~is_first]])[:most])


@dataclass(frozen=True)
class LabeledCells:
    """Training cells of a classifier, whose embeddings and classes predict cells of other studies.

    Attributes
    ----------
    embeddings
        Embeddings, float32, shape (S, D).
    classes
        Class of each cell, int64, shape (S,).
    temperature
        Temperature of the predictions for new cells, at least 1.
    in_base
        Whether these are embeddings of the base model, onto whose training cells new cells are mapped.
    """

    embeddings: np.ndarray
    classes: np.ndarray
    temperature: float = 1.0
    in_base: bool = False

    @classmethod
    def calibrated(
        cls, embeddings: np.ndarray, classes: np.ndarray, batches: np.ndarray | None, *, in_base: bool
    ) -> LabeledCells:
        """Create an instance whose temperature is fitted on held-out batches, or on random folds without batches."""
        from sklearn.model_selection import GroupKFold, KFold

        n_cells, n_classes = len(classes), int(classes.max()) + 1
        n_batches = 1 if batches is None else len(np.unique(batches))
        if n_cells < _LEAST:
            return cls(embeddings, classes, in_base=in_base)
        if n_batches < 2:
            folds, batches = KFold(_FOLDS, shuffle=True, random_state=0), None
        else:
            folds = GroupKFold(min(_FOLDS, n_batches))
        logs, truth = [], []
        for kept, held_out in folds.split(embeddings, groups=batches):
            held_out = held_out[np.isin(classes[held_out], classes[kept])]
            if len(held_out):
                others = cls(embeddings[kept], classes[kept])
                logs.append(np.log(others.probabilities(embeddings[held_out], n_classes) + _TINY))
                truth.append(classes[held_out])
        temperature = fit_temperature(np.concatenate(logs), np.concatenate(truth)) if logs else 1.0
        return cls(embeddings, classes, max(temperature, 1.0), in_base)

    def probabilities(self, embeddings: np.ndarray, n_classes: int) -> np.ndarray:
        """Return the mean of a balanced logistic regression and of neighbor votes, float64, shape (N, C)."""
        mean, scale = self.embeddings.mean(axis=0), np.maximum(self.embeddings.std(axis=0), _TINY)
        balanced = balanced_weights(self.classes, n_classes)
        weights, biases = fit_logistic((self.embeddings - mean) / scale, self.classes, n_classes, balanced)
        summed = probabilities_of((embeddings - mean) / scale @ weights.T + biases)
        summed += neighbor_votes(self.embeddings, self.classes, embeddings, n_neighbors=_NEIGHBORS, n_classes=n_classes)
        return summed / summed.sum(axis=1, keepdims=True)

    def share_far(self, embeddings: np.ndarray) -> float:
        """Return the fraction of cells that are farther from these cells than 95% of these cells are."""
        from sklearn.neighbors import NearestNeighbors

        index = NearestNeighbors(n_neighbors=min(_NEAREST, len(self.classes) - 1)).fit(self.embeddings)
        limit = np.quantile(index.kneighbors()[0].mean(axis=1), 0.95)
        return float((index.kneighbors(embeddings)[0].mean(axis=1) > limit).mean())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the content as tensors, to be saved."""
        return {
            "embeddings": torch.from_numpy(self.embeddings),
            "classes": torch.from_numpy(self.classes),
            "temperature": torch.tensor(self.temperature, dtype=torch.float64),
            "in_base": torch.tensor(self.in_base),
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor], *, n_classes: int, source: str) -> LabeledCells:
        """Create an instance from the result of :meth:`tensors`, which was read from the folder `source`."""
        try:
            temperature, in_base = float(tensors["temperature"]), bool(tensors["in_base"])
            labeled = cls(tensors["embeddings"].numpy(), tensors["classes"].numpy(), temperature, in_base)
            is_valid = labeled.embeddings.ndim == 2 and labeled.classes.shape == labeled.embeddings.shape[:1]
            is_valid &= bool(np.isfinite(labeled.embeddings).all()) and labeled.temperature >= 1
            is_valid &= labeled.classes.dtype == np.int64 and bool(np.isin(labeled.classes, np.arange(n_classes)).all())
        except (KeyError, RuntimeError, TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise ModelFileError(f"the labeled cells in {source!r} are invalid; save the model again.")
        return labeled


@dataclass(frozen=True)
class NewCells:
    """The cells of a predictor that its model was not fine-tuned on.

    Attributes
    ----------
    is_new
        Which cells these are, bool, shape (N,).
    module
        The model for these cells.
    probabilities
        Their class probabilities by the labeled cells, shape (number of these cells, C).
    temperature
        Temperature of the combined probabilities.
    shift
        Measured differences from the training cells, as scalars that h5ad files can store.
    """

    is_new: np.ndarray
    module: nn.Module
    probabilities: np.ndarray
    temperature: float
    shift: dict[str, float]

    def combine(self, probabilities: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
        """Return probabilities of the head for `rows`, shape (N, C), in which new cells have combined ones.

        The combination is the mean of three classifiers: the head, the logistic regression and the neighbor votes.
        """
        rows = np.arange(len(self.is_new)) if rows is None else rows
        chosen = self.is_new[rows]
        by_labeled = self.probabilities[np.cumsum(self.is_new)[rows[chosen]] - 1]
        combined = (probabilities[chosen] + 2 * by_labeled) / 3
        updated = probabilities.copy()
        updated[chosen] = probabilities_of(np.log(combined + _TINY), self.temperature)
        return updated

    def report(self) -> None:
        """Print the measured differences, or warn if they make predictions unreliable."""
        shift, n_cells = self.shift, int(self.is_new.sum())
        facts = [f"{shift['gene_overlap']:.1%} of the genes of the model were found"]
        if "gene_factor" in shift:
            facts.append(f"the expression of a gene typically differs by a factor of {shift['gene_factor']:.2f}")
        facts.append(f"{shift['share_far']:.1%} of the cells are far from all training cells (expected: about 5%)")
        text = f"Cells that are not from the fine-tuning data: {n_cells:,}; {', '.join(facts)}"
        is_far = shift["share_far"] > _MANY_FAR or shift["gene_overlap"] < _FEW_GENES
        if n_cells >= _LEAST and (is_far or shift.get("gene_factor", 1.0) > _LARGE_FACTOR):
            warn(
                f"{text}. Their labels and confidence are less reliable than those of cells like the training cells; "
                "check them with marker genes."
            )
        else:
            announce(f"{text}.")
