from dataclasses import replace

import numpy as np
import pytest
import scanpy as sc
from scipy import sparse

from scforge.data import GeneVocab, open_cells
from scforge.data.expression import log_expression
from scforge.errors import DataError, ScforgeWarning
from scforge.eval.baselines import (
    BaselineInputs,
    classification_baselines,
    multi_label_baselines,
    regression_baselines,
)
from scforge.eval.expression import ExpressionSpace

TRAIN, TEST = np.arange(0, 200), np.arange(200, 300)
TRUTH = np.arange(300) % 2


@pytest.fixture
def cells(many_adata):
    return open_cells(many_adata[:300], GeneVocab.from_adata(many_adata))


@pytest.fixture
def inputs(cells):
    made = BaselineInputs.of(cells, TRAIN, cells, TEST)
    embedding = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    embedding[:, 0] += TRUTH * 8
    return replace(made, embeddings={"frozen_embedding": (embedding[TRAIN], embedding[TEST])})


def test_planted_classes_are_found_and_shuffled_ones_are_not(inputs):
    found = classification_baselines(inputs, TRUTH[TRAIN], 3)
    names = ["logistic_regression_pca", "knn_pca", "logistic_regression_genes", "frozen_embedding", "majority_class"]
    assert list(found) == names
    for name, probabilities in found.items():
        assert probabilities.shape == (100, 3)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
        assert not probabilities[:, 2].any(), "no training cell is of the third class"
        accuracy = (probabilities.argmax(axis=1) == TRUTH[TEST]).mean()
        assert accuracy == 0.5 if name == "majority_class" else accuracy > 0.97, name
    shuffled = np.random.default_rng(0).permutation(TRUTH[TRAIN])
    for probabilities in classification_baselines(inputs, shuffled, 2).values():
        assert (probabilities.argmax(axis=1) == TRUTH[TEST]).mean() < 0.7
    one_class = classification_baselines(inputs, np.ones(200, dtype=np.int64), 2)
    assert all((probabilities.argmax(axis=1) == 1).all() for probabilities in one_class.values())


def test_planted_numbers_and_label_sets_are_found(inputs):
    found = regression_baselines(inputs, TRUTH[TRAIN] * 5.0 + 1.0)
    assert list(found) == ["ridge_pca", "knn_pca", "frozen_embedding", "mean"]
    for name, predicted in found.items():
        error = np.abs(predicted - TRUTH[TEST] * 5.0 - 1.0).mean()
        assert error == 2.5 if name == "mean" else error < 1.0, name
    rare = np.arange(300) % 7 == 0
    targets = np.stack([TRUTH == 1, TRUTH == 0, np.ones(300, dtype=bool), rare], axis=1)
    found = multi_label_baselines(inputs, targets[TRAIN])
    assert list(found) == ["logistic_regression_pca", "frozen_embedding", "label_frequency"]
    for name in ("logistic_regression_pca", "frozen_embedding"):
        right = ((found[name] > 0.5) == targets[TEST])[:, :3].mean(axis=0)
        assert (right[:2] > 0.97).all()
        assert (found[name][:, 2] == 1).all()
    np.testing.assert_allclose(found["label_frequency"], np.tile(targets[TRAIN].mean(axis=0), (100, 1)))


def test_scored_cells_do_not_decide(cells, many_adata):
    changed = many_adata[:300].copy()
    dense = changed.X.toarray()
    dense[200:] = dense[200:, ::-1]
    changed.X = sparse.csr_matrix(dense)
    one, two = (BaselineInputs.of(cells, TRAIN, some, TEST) for some in (cells, open_cells(changed, cells.vocab)))
    np.testing.assert_array_equal(one.components[0], two.components[0])
    assert not np.array_equal(one.components[1], two.components[1])


def test_fewer_training_cells_are_told(cells, monkeypatch):
    monkeypatch.setattr("scforge.eval.baselines._MAX_FITTED", 50)
    with pytest.warns(ScforgeWarning, match="fitted on 50 of the 200 training cells"):
        made = BaselineInputs.of(cells, TRAIN, cells, TEST)
    assert len(made.rows) == len(made.components[0]) == 50
    assert np.isin(made.rows, TRAIN).all()
    with pytest.raises(DataError, match="2 training cells .* too few for expression baselines"):
        ExpressionSpace(log_expression(cells)[:2])


def test_expression_and_components_are_those_of_scanpy(many_adata, tiny_vocab):
    cells, reference = open_cells(many_adata, tiny_vocab), many_adata.copy()
    sc.pp.normalize_total(reference, target_sum=1e4)
    sc.pp.log1p(reference)
    expression = log_expression(cells)
    np.testing.assert_allclose(expression.toarray(), reference.X.toarray(), rtol=1e-5)
    for rows in (np.array([5, 3, 3, 600]), np.zeros(0, dtype=np.int64)):
        np.testing.assert_allclose(log_expression(cells, rows).toarray(), reference.X[rows].toarray(), rtol=1e-5)
    space = ExpressionSpace(expression, n_top_genes=30, n_comps=4)
    sc.pp.highly_variable_genes(reference, n_top_genes=30)
    np.testing.assert_array_equal(space.genes, np.flatnonzero(reference.var["highly_variable"]))
    chosen = reference[:, space.genes].copy()
    chosen.X = chosen.X.toarray()
    sc.pp.scale(chosen, max_value=10)
    sc.pp.pca(chosen, n_comps=4)
    ours = np.abs(space.components(expression))
    # scanpy divides by n - 1.
    np.testing.assert_allclose(ours, np.abs(chosen.obsm["X_pca"]) * np.sqrt(700 / 699), rtol=0.02, atol=0.02)
    # Only training cells decide.
    fitted = ExpressionSpace(expression[:300], n_top_genes=30, n_comps=4)
    np.testing.assert_allclose(fitted.components(expression[:300]).mean(axis=0), 0, atol=1e-5)
    expression.data *= 1e4  # high values are cut
    centered = space.scaled(expression).toarray() - space.mean / space.scale
    assert centered.max() == pytest.approx(10, abs=1e-3)
