from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import sparse

from scforge.data import GeneVocab, open_cells
from scforge.errors import DataError, ScforgeWarning
from scforge.eval.prediction_baselines import (
    BaselineInputs,
    classification_baselines,
    multi_label_baselines,
    regression_baselines,
)

TRAIN, TEST = np.arange(0, 200), np.arange(200, 300)


@pytest.fixture(scope="module")
def truth() -> np.ndarray:
    return np.arange(300) % 2


@pytest.fixture
def cells(many_adata):
    return open_cells(many_adata[:300], GeneVocab.from_adata(many_adata))


@pytest.fixture
def inputs(cells):
    made = BaselineInputs.of(cells, TRAIN, cells, TEST)
    embedding = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    embedding[:, 0] += np.arange(300) % 2 * 8
    return replace(made, embeddings={"frozen_embedding": (embedding[TRAIN], embedding[TEST])})


def test_planted_classes_are_found(inputs, truth):
    found = classification_baselines(inputs, truth[TRAIN], 3)
    assert list(found) == [
        "logistic_regression_pca",
        "knn_pca",
        "logistic_regression_genes",
        "frozen_embedding",
        "majority_class",
    ]
    for name, probabilities in found.items():
        assert probabilities.shape == (100, 3)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
        assert not probabilities[:, 2].any(), "no training cell is of the third class"
        accuracy = (probabilities.argmax(axis=1) == truth[TEST]).mean()
        assert accuracy == 0.5 if name == "majority_class" else accuracy > 0.97, name


def test_shuffled_classes_are_not_found(inputs, truth):
    shuffled = np.random.default_rng(0).permutation(truth[TRAIN])
    for probabilities in classification_baselines(inputs, shuffled, 2).values():
        assert (probabilities.argmax(axis=1) == truth[TEST]).mean() < 0.7


def test_one_class_in_training(inputs):
    found = classification_baselines(inputs, np.ones(200, dtype=np.int64), 2)
    assert all((probabilities.argmax(axis=1) == 1).all() for probabilities in found.values())


def test_numbers(inputs, truth):
    found = regression_baselines(inputs, truth[TRAIN] * 5.0 + 1.0)
    assert list(found) == ["ridge_pca", "knn_pca", "frozen_embedding", "mean"]
    target = truth[TEST] * 5.0 + 1.0
    for name, predicted in found.items():
        error = np.abs(predicted - target).mean()
        assert error == 2.5 if name == "mean" else error < 1.0, name


def test_label_sets(inputs, truth):
    rare = np.arange(300) % 7 == 0
    targets = np.stack([truth == 1, truth == 0, np.ones(300, dtype=bool), rare], axis=1)[TRAIN]
    found = multi_label_baselines(inputs, targets)
    assert list(found) == ["logistic_regression_pca", "frozen_embedding", "label_frequency"]
    for name in ("logistic_regression_pca", "frozen_embedding"):
        assert ((found[name][:, 0] > 0.5) == (truth[TEST] == 1)).mean() > 0.97
        assert ((found[name][:, 1] > 0.5) == (truth[TEST] == 0)).mean() > 0.97
        assert (found[name][:, 2] == 1).all()
    np.testing.assert_allclose(found["label_frequency"], np.tile(targets.mean(axis=0), (100, 1)))


def test_scored_cells_do_not_decide(cells, many_adata):
    changed = many_adata[:300].copy()
    dense = changed.X.toarray()
    dense[200:] = dense[200:, ::-1]
    changed.X = sparse.csr_matrix(dense)
    other = open_cells(changed, cells.vocab)
    one, two = (BaselineInputs.of(cells, TRAIN, scored, TEST) for scored in (cells, other))
    np.testing.assert_array_equal(one.components[0], two.components[0])
    assert not np.array_equal(one.components[1], two.components[1])


def test_fewer_training_cells_are_told(cells):
    with pytest.warns(ScforgeWarning, match="fitted on 50 of the 200 training cells"):
        made = BaselineInputs.of(cells, TRAIN, cells, TEST, max_cells=50)
    assert len(made.rows) == 50
    assert made.components[0].shape[0] == 50
    assert np.isin(made.rows, TRAIN).all()


def test_other_genes_are_refused(cells, many_adata):
    fewer = open_cells(many_adata[:300], GeneVocab(cells.vocab.genes[:60]))
    with pytest.raises(DataError, match="another vocabulary"):
        BaselineInputs.of(cells, TRAIN, fewer, TEST)
