import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from scforge.errors import DataError
from scforge.finetuning.metrics import calibration_error
from scforge.pl import calibration, confusion_matrix
from scforge.testing import raises


@pytest.fixture
def predicted(tiny_adata: ad.AnnData) -> ad.AnnData:
    """Of 30 cells "a" 6 are predicted "b", of 30 cells "b" none is "a"; two cells have no label."""
    labels = tiny_adata.obs["group"].astype(str).to_numpy(dtype=object)
    wrong = np.flatnonzero(labels == "a")[:6]
    tiny_adata.obs["scforge_group"] = np.where(np.isin(np.arange(60), wrong), "b", labels)
    tiny_adata.obs["scforge_group_confidence"] = np.linspace(0.5, 1.0, 60)
    tiny_adata.obs.loc[tiny_adata.obs_names[-2:], "group"] = np.nan
    return tiny_adata


def test_shares_of_the_true_class(predicted: ad.AnnData, texts) -> None:
    ax = confusion_matrix(predicted, "group")
    np.testing.assert_allclose(np.asarray(ax.images[0].get_array()), [[23 / 29, 6 / 29], [0, 1]])
    shown = {text.get_position(): text.get_text() for text in ax.texts if text.get_text()}
    assert shown == {(0, 0): ".79", (1, 0): ".21", (1, 1): "1"}
    assert texts(ax.get_yticklabels()) == ["a (29)", "b (29)"]
    assert ax.get_xlabel() == "predicted\n(cells left out, without a class: 2)"
    # Classes that are never predicted or never true stand last.
    ax = confusion_matrix(pd.DataFrame({"truth": list("acc"), "made": ["c", "c", "unassigned"]}), "truth", "made")
    assert texts(ax.get_yticklabels()) == ["c (2)", "a (1)", "unassigned (0)"]
    assert texts(ax.get_xticklabels()) == ["c", "a", "unassigned"]


def test_the_table_of_an_evaluation_is_drawn(tiny_adata: ad.AnnData) -> None:
    pairs = pd.DataFrame({"label": ["x", "x", "y", "y"], "predicted": ["x", "y", "x", "y"], "n_cells": [3, 1, 0, 4]})
    tiny_adata.uns["scforge"] = {"metrics_confusion": pairs}
    for given in (tiny_adata, pairs):
        ax = confusion_matrix(given)
        np.testing.assert_allclose(np.asarray(ax.images[0].get_array()), [[0.75, 0.25], [0, 1]])
        assert ax.get_xlabel() == "predicted"


def test_accuracy_over_confidence(predicted: ad.AnnData) -> None:
    ax = calibration(predicted, "group", n_bins=5)
    known = predicted.obs.dropna(subset="group")
    right = (known["group"].astype(str) == known["scforge_group"]).to_numpy()
    sure = known["scforge_group_confidence"].to_numpy()
    line = next(line for line in ax.lines if line.get_label() == "accuracy")
    for low, mean, accuracy in zip((0.4, 0.6, 0.8), line.get_xdata(), line.get_ydata(), strict=True):
        chosen = (sure > low) & (sure <= low + 0.2)
        assert mean == pytest.approx(sure[chosen].mean())
        assert accuracy == pytest.approx(right[chosen].mean())
    assert sum(patch.get_height() for patch in ax.patches) == pytest.approx(1)
    assert ax.get_xlabel() == "confidence\n(cells left out, without a class: 2)"
    # The error is the one of the evaluation.
    error = calibration_error(sure, right)
    assert calibration(predicted, "group").get_title() == f"calibration error {error:.3f}, 58 cells"
    predicted.obs["scforge_group"] = ["unassigned"] * 10 + list(predicted.obs["scforge_group"][10:])
    ax = calibration(predicted, "group")
    assert ax.get_title().endswith("48 cells"), "unassigned cells are not wrong"
    assert ax.get_xlabel() == "confidence\n(cells left out, without a class: 12)"


def test_intervals_are_those_of_wilson() -> None:
    frame = pd.DataFrame({"truth": ["a"] * 20, "made": ["a"] * 15 + ["b"] * 5, "sure": [0.7] * 20})
    (segment,) = calibration(frame, "truth", "made", "sure").collections[0].get_segments()
    interval = binomtest(15, 20).proportion_ci(method="wilson")
    np.testing.assert_allclose(segment[:, 1], [interval.low, interval.high], atol=1e-4)


def test_what_the_figures_need(predicted: ad.AnnData) -> None:
    with raises(DataError, "table"):
        confusion_matrix(predicted)
    with raises(DataError, "column"):
        confusion_matrix(predicted, "grup")
    with raises(DataError, "column"):
        calibration(predicted, "group", confidence="confidence")
    predicted.obs["scforge_group_confidence"] += 1
    with raises(DataError, "confidence"):
        calibration(predicted, "group")
    predicted.obs["group"] = None
    with pytest.raises(DataError, match=r"no cell has both a true class \('group'\)"):
        confusion_matrix(predicted, "group")
