"""Scores for predicted classes, labels and numbers.

Shapes: N cells, C classes.
"""

from __future__ import annotations

import warnings

import numpy as np

_N_BINS = 15


def confusion_of(truth: np.ndarray, predicted: np.ndarray, n_classes: int) -> np.ndarray:
    """Return the number of cells of each class (row) that are predicted as each class (column), int64, (C, C)."""
    return np.bincount(truth * n_classes + predicted, minlength=n_classes**2).reshape(n_classes, n_classes)


def class_table(confusion: np.ndarray) -> dict[str, np.ndarray]:
    """Return ``precision``, ``recall``, ``f1`` and ``support`` of each class, shape (C,); 0 if there are no cells."""
    right, support, predicted = np.diag(confusion), confusion.sum(axis=1), confusion.sum(axis=0)
    return {
        "precision": _ratio(right, predicted),
        "recall": _ratio(right, support),
        "f1": _ratio(2 * right, support + predicted),
        "support": support,
    }


def confusion_figures(confusion: np.ndarray) -> dict[str, float]:
    """Return accuracy, balanced accuracy, and macro and weighted F1 of a confusion matrix of counts or fractions.

    The scores are defined as in scikit-learn. Balanced accuracy is the recall averaged over the classes that occur, and
    macro F1 is the F1 averaged over the classes that occur or are predicted. Scores are NaN if there are no cells.

    Examples
    --------
    >>> confusion_figures(np.array([[2, 0, 0], [1, 1, 0], [0, 0, 0]]))["balanced_accuracy"]
    0.75
    """
    total = confusion.sum()
    if not total:
        return dict.fromkeys(("accuracy", "balanced_accuracy", "macro_f1", "weighted_f1"), float("nan"))
    table = class_table(confusion)
    occurs = table["support"] > 0
    seen = occurs | (confusion.sum(axis=0) > 0)
    return {
        "accuracy": float(np.trace(confusion) / total),
        "balanced_accuracy": float(table["recall"][occurs].mean()),
        "macro_f1": float(table["f1"][seen].mean()),
        "weighted_f1": float(table["f1"] @ table["support"] / total),
    }


def calibration_error(confidence: np.ndarray, correct: np.ndarray, *, n_bins: int = _N_BINS) -> float:
    """Return the expected calibration error: the mean gap between confidence and accuracy (Guo et al. 2017, eq. 3).

    Parameters
    ----------
    confidence
        Probability of the predicted class, in [0, 1], shape (N,).
    correct
        Whether the prediction is correct, bool, shape (N,).
    n_bins
        Number of bins of equal width, (0, 1/n], (1/n, 2/n], ...

    Examples
    --------
    >>> float(calibration_error(np.array([0.9, 0.9]), np.array([True, False])).__round__(2))
    0.4
    """
    if not len(confidence):
        return float("nan")
    bins = np.clip(np.ceil(confidence * n_bins).astype(np.int64) - 1, 0, n_bins - 1)
    gaps = np.bincount(bins, weights=confidence - correct, minlength=n_bins)
    return float(np.abs(gaps).sum() / len(confidence))


def regression_figures(target: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return ``mae``, ``rmse``, ``r2``, ``pearson`` and ``spearman``, or NaN if a score is undefined."""
    from scipy.stats import spearmanr
    from sklearn.metrics import r2_score

    if not len(target):
        return dict.fromkeys(("mae", "rmse", "r2", "pearson", "spearman"), float("nan"))
    error = predicted - target
    varies = len(target) > 1 and np.ptp(target) > 0
    correlates = varies and np.ptp(predicted) > 0
    return {
        "mae": float(np.abs(error).mean()),
        "rmse": float(np.sqrt(np.square(error).mean())),
        "r2": float(r2_score(target, predicted)) if varies else float("nan"),
        "pearson": float(np.corrcoef(target, predicted)[0, 1]) if correlates else float("nan"),
        "spearman": float(spearmanr(target, predicted).statistic) if correlates else float("nan"),
    }


def multi_label_figures(targets: np.ndarray, probabilities: np.ndarray) -> dict[str, np.ndarray]:
    """Return ``auroc``, ``average_precision``, ``f1`` and ``support`` of each label, shape (C,).

    Parameters
    ----------
    targets
        Whether each cell has each label, bool, shape (N, C).
    probabilities
        Probability of each label, shape (N, C). F1 counts probabilities above 0.5 as predictions.

    Returns
    -------
    The scores. AUROC is NaN for labels that all cells or no cells have; the other scores are NaN for labels that no
    cell has.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    support, predicted = targets.sum(axis=0), probabilities > 0.5
    occurs, varies = support > 0, (support > 0) & (support < len(targets))
    auroc, average_precision = np.full((2, len(support)), np.nan)
    if varies.any():
        auroc[varies] = roc_auc_score(targets[:, varies], probabilities[:, varies], average=None)
    if occurs.any():
        average_precision[occurs] = average_precision_score(targets[:, occurs], probabilities[:, occurs], average=None)
    f1 = np.where(occurs, _ratio(2 * (targets & predicted).sum(axis=0), support + predicted.sum(axis=0)), np.nan)
    return {"auroc": auroc, "average_precision": average_precision, "f1": f1, "support": support}


def mean_of_known(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN, or NaN if there are none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        return float(np.nanmean(values)) if len(values) else float("nan")


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(len(whole)), where=whole > 0)
