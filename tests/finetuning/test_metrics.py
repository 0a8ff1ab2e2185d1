import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn import metrics as sk

from scforge.finetuning.metrics import (
    calibration_error,
    class_table,
    confusion_figures,
    confusion_of,
    mean_of_known,
    multi_label_figures,
    regression_figures,
)


@pytest.mark.parametrize("missing", ["none", "never predicted", "no cell"])
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_figures_of_classes_are_those_of_scikit_learn(missing):
    generator = np.random.default_rng(0)
    truth, predicted = generator.integers(4, size=200), generator.integers(4, size=200)
    if missing == "no cell":
        truth[truth == 2] = 0
    if missing == "never predicted":
        predicted[predicted == 2] = 1
    confusion = confusion_of(truth, predicted, 4)
    np.testing.assert_array_equal(confusion, sk.confusion_matrix(truth, predicted, labels=range(4)))
    expected = {
        "accuracy": sk.accuracy_score(truth, predicted),
        "balanced_accuracy": sk.balanced_accuracy_score(truth, predicted),
        "macro_f1": sk.f1_score(truth, predicted, average="macro"),
        "weighted_f1": sk.f1_score(truth, predicted, average="weighted"),
    }
    assert confusion_figures(confusion) == pytest.approx(expected)
    assert confusion_figures(confusion / 200) == pytest.approx(expected), "shares do as well as counts"
    of_classes = sk.precision_recall_fscore_support(truth, predicted, labels=range(4), zero_division=0)
    for found, wanted in zip(class_table(confusion).values(), of_classes, strict=True):
        np.testing.assert_allclose(found, wanted)


def test_calibration_error_by_hand():
    confidence = np.array([0.95, 0.97, 0.5, 0.5, 1.0])
    correct = np.array([True, False, True, False, True])
    # Bins ((14/15, 1], three cells) and ((7/15, 8/15], two cells).
    expected = (abs(0.95 + 0.97 + 1.0 - 2) + abs(1.0 - 1)) / 5
    assert calibration_error(confidence, correct) == pytest.approx(expected)
    generator = np.random.default_rng(0)
    honest = generator.uniform(0.3, 1, 20_000)
    assert calibration_error(honest, generator.random(20_000) < honest) < 0.02
    assert calibration_error(honest, generator.random(20_000) < honest - 0.2) > 0.18


def test_figures_of_numbers():
    generator = np.random.default_rng(0)
    target = generator.normal(size=50)
    predicted = np.exp(target) + generator.normal(size=50) * 0.1
    scores = {"mae": sk.mean_absolute_error, "rmse": sk.root_mean_squared_error, "r2": sk.r2_score}
    expected = {name: score(target, predicted) for name, score in scores.items()}
    correlations = {"pearson": pearsonr(target, predicted)[0], "spearman": spearmanr(target, predicted)[0]}
    assert regression_figures(target, predicted) == pytest.approx({**expected, **correlations})
    constant = regression_figures(target, np.ones(50))
    assert np.isnan([constant["pearson"], constant["spearman"]]).all()
    assert constant["r2"] < 0
    assert np.isnan(regression_figures(np.ones(3), target[:3])["r2"])
    # Of no cell there are none.
    assert np.isnan([*regression_figures(np.zeros(0), np.zeros(0)).values()]).all()
    assert np.isnan([*confusion_figures(np.zeros((3, 3))).values()]).all()
    assert np.isnan(calibration_error(np.zeros(0), np.zeros(0, dtype=bool)))


def test_figures_of_label_sets():
    generator = np.random.default_rng(0)
    targets = generator.random((100, 4)) < [0.5, 0.1, 0.0, 1.0]
    probabilities = np.clip(targets * 0.4 + generator.random((100, 4)) * 0.6, 0, 1)
    found = multi_label_figures(targets, probabilities)
    for label in (0, 1):
        truth, given = targets[:, label], probabilities[:, label]
        assert found["auroc"][label] == sk.roc_auc_score(truth, given)
        assert found["average_precision"][label] == sk.average_precision_score(truth, given)
        assert found["f1"][label] == sk.f1_score(truth, given > 0.5)
    assert np.isnan(found["auroc"][2:]).all()
    assert np.isnan(found["f1"][2])
    assert mean_of_known(found["auroc"]) == found["auroc"][:2].mean()
    assert np.isnan(mean_of_known(found["auroc"][2:]))
