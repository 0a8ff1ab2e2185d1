from __future__ import annotations

import numpy as np
import pytest
import scanpy as sc

from scforge.data import open_cells
from scforge.errors import DataError
from scforge.eval.expression import ExpressionSpace, log_expression


@pytest.fixture
def cells(many_adata, tiny_vocab):
    return open_cells(many_adata, tiny_vocab)


@pytest.fixture
def reference(many_adata):
    work = many_adata.copy()
    sc.pp.normalize_total(work, target_sum=1e4)
    sc.pp.log1p(work)
    return work


def test_expression_is_what_scanpy_computes(cells, reference):
    rows = np.array([5, 3, 3, 600])
    np.testing.assert_allclose(log_expression(cells).toarray(), reference.X.toarray(), rtol=1e-5)
    np.testing.assert_allclose(log_expression(cells, rows).toarray(), reference.X[rows].toarray(), rtol=1e-5)


def test_expression_of_no_cell(cells):
    assert log_expression(cells, np.zeros(0, dtype=np.int64)).shape == (0, 80)


def test_genes_and_components_are_those_of_scanpy(cells, reference):
    expression = log_expression(cells)
    space = ExpressionSpace.fit(expression, n_top_genes=30, n_comps=4)
    sc.pp.highly_variable_genes(reference, n_top_genes=30)
    np.testing.assert_array_equal(space.genes, np.flatnonzero(reference.var["highly_variable"]))
    chosen = reference[:, space.genes].copy()
    chosen.X = chosen.X.toarray()
    sc.pp.scale(chosen, max_value=10)
    sc.pp.pca(chosen, n_comps=4)
    ours = np.abs(space.components(expression))
    # scanpy divides by n - 1.
    np.testing.assert_allclose(ours, np.abs(chosen.obsm["X_pca"]) * np.sqrt(700 / 699), rtol=0.02, atol=0.02)


def test_only_training_cells_decide(cells):
    expression = log_expression(cells)
    space = ExpressionSpace.fit(expression[:300], n_top_genes=30, n_comps=4)
    others = expression[300:].copy()
    before = space.components(others)[:10]
    others.data[others.indptr[10] :] *= 3
    np.testing.assert_array_equal(space.components(others)[:10], before)
    np.testing.assert_allclose(space.components(expression[:300]).mean(axis=0), 0, atol=1e-5)
    again = ExpressionSpace.fit(expression[:300], n_top_genes=30, n_comps=4)
    np.testing.assert_array_equal(again.components(others), space.components(others))


def test_high_values_are_cut(cells):
    expression = log_expression(cells)
    space = ExpressionSpace.fit(expression, n_comps=4)
    loud = expression.copy()
    loud.data *= 1e4
    centred = space.scaled(loud).toarray() - space.mean / space.scale
    assert centred.max() == pytest.approx(10, abs=1e-3)


def test_too_little_to_learn_from(cells):
    with pytest.raises(DataError, match="2 training cells .* too few for baselines"):
        ExpressionSpace.fit(log_expression(cells)[:2])
