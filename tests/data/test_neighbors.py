import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from scipy import sparse
from sklearn.neighbors import NearestNeighbors

import scforge
from scforge.data import open_cells
from scforge.data.cells import CellSource
from scforge.data.neighbors import (
    SHARPNESS,
    harmony_correct,
    mutual_neighbors,
    neighbor_weights,
    principal_components,
    query_shifts,
)
from scforge.errors import DataError

PER_GROUP = 30


def two_batches(*, missing: bool = False):
    """Three groups in two batches that lie apart; one group only in the first batch if `missing`."""
    generator = np.random.default_rng(0)
    places = [(batch, group) for batch in range(2) for group in range(3) if not (missing and (batch, group) == (1, 2))]
    batches, groups = np.repeat(np.array(places), PER_GROUP, axis=0).T
    coordinates = generator.normal(0, 0.3, (len(groups), 6))
    coordinates[np.arange(len(groups)), groups] += 8.0
    coordinates[:, 3] += 3.0 * batches
    return coordinates, batches, groups


def test_a_query_moves_onto_its_reference_and_a_new_group_onto_no_other():
    coordinates, batches, groups = two_batches()
    coordinates[:, 4] += 1.5 * batches * (groups == 1)  # the batch differs by group, too
    reference, query = coordinates[(batches == 0) & (groups != 2)], coordinates[batches == 1]
    center, clusters, shifts = query_shifts(reference, query)
    away = query - center
    assigned = np.exp(SHARPNESS * (away / np.linalg.norm(away, axis=1, keepdims=True)) @ clusters.T)
    moved = query + assigned / assigned.sum(axis=1, keepdims=True) @ shifts
    for group in range(3):
        place = coordinates[(batches == 0) & (groups == group)].mean(axis=0)
        now = moved[groups[batches == 1] == group].mean(axis=0)
        assert np.linalg.norm(now - place) < 1.2 < np.linalg.norm(query[groups[batches == 1] == group].mean(0) - place)
    for part in query_shifts(reference, query[:5])[1:]:
        assert not part.any()  # too few to have neighbors


@pytest.mark.parametrize("missing", [False, True])
def test_neighbors_are_of_the_same_group(missing):
    coordinates, batches, groups = two_batches(missing=missing)
    found = mutual_neighbors(coordinates, batches, within=0)
    rows, columns = found.nonzero()
    has = np.diff(found.indptr) > 0
    assert has[groups != 2].mean() > 0.2
    assert has[groups == 2].any() != missing  # a group that the other batch lacks has none there
    assert (batches[rows] != batches[columns]).all()
    assert (groups[rows] == groups[columns]).all()
    for single in (np.zeros(8, dtype=int), np.arange(8)):  # batches of one cell, and one batch
        few = mutual_neighbors(coordinates[:8], single)
        assert few.shape == (8, 8)
        assert few.diagonal().sum() == 0
    rows, columns = mutual_neighbors(coordinates, batches, across=0, within=3).nonzero()
    assert (batches[rows] == batches[columns]).all()
    assert (groups[rows] == groups[columns]).all()
    many = mutual_neighbors(coordinates, batches, across=1_000, within=0)
    assert np.diff(many.indptr).max() <= 3 * PER_GROUP // 10  # a tenth of a batch at most
    both = mutual_neighbors(coordinates, batches)
    assert (both != both.T).nnz == 0
    assert both.diagonal().sum() == 0
    assert both.dtype == bool


def test_harmony_brings_batches_together_and_leaves_groups_apart():
    coordinates, batches, groups = two_batches()
    found = harmony_correct(coordinates, batches)

    def gap(values, of, a, b):
        return np.linalg.norm(values[of == a].mean(axis=0) - values[of == b].mean(axis=0))

    assert gap(found, batches, 0, 1) < gap(coordinates, batches, 0, 1) / 3
    assert gap(found, groups, 0, 1) > gap(coordinates, groups, 0, 1) / 2
    np.testing.assert_array_equal(found, harmony_correct(coordinates, np.where(batches, "b", "a")))


@pytest.mark.slow
def test_harmony_agrees_with_its_authors_package():
    harmonypy = pytest.importorskip("harmonypy")
    adata = scforge.datasets.pbmc3k()
    batches = np.random.default_rng(0).integers(0, 3, adata.n_obs)
    counts = adata.X.toarray()
    often = np.argsort(-counts.sum(axis=0))[:90]
    for batch in range(3):
        counts[np.ix_(batches == batch, often[batch::3])] *= 4
    components, _, _ = principal_components(open_cells(AnnData(sparse.csr_matrix(counts), var=adata.var)))
    found = harmony_correct(components, batches)
    obs = pd.DataFrame({"batch": batches.astype(str)})
    other = np.asarray(harmonypy.run_harmony(components.astype(float), obs, ["batch"], verbose=False, ncores=1).Z_corr)

    def agreement(first, second):
        return [np.corrcoef(first[:, i], second[:, i])[0, 1] for i in range(20)]

    def mixing(values):  # share of neighbors of the same batch; a third if batches are mixed
        found = NearestNeighbors(n_neighbors=16).fit(values).kneighbors(values, return_distance=False)[:, 1:]
        return float((batches[found] == batches[:, None]).mean())

    assert np.mean(agreement(found, other)) > 0.99
    assert np.mean(agreement(found, other)) > np.mean(agreement(components, other)) + 0.01
    assert mixing(components) > 0.6
    assert mixing(found) == pytest.approx(mixing(other), abs=0.03)


@pytest.mark.parametrize("n_cells", [1, 9, 10, 70])
def test_harmony_of_what_leaves_little_to_correct(n_cells):
    coordinates = np.random.default_rng(0).normal(size=(n_cells, 5)).astype(np.float32)
    found = harmony_correct(coordinates, np.arange(n_cells) % 2)
    assert found.shape == (n_cells, 5)
    assert np.isfinite(found).all()
    assert np.array_equal(found, coordinates) == (n_cells < 10)
    np.testing.assert_array_equal(harmony_correct(coordinates, np.zeros(n_cells)), coordinates)
    assert np.isfinite(harmony_correct(np.zeros((n_cells, 3)), np.arange(n_cells) % 2)).all()
    # Batches without any cell type in common.
    coordinates, _, groups = two_batches()
    np.testing.assert_allclose(harmony_correct(coordinates, groups), coordinates, atol=1)


def test_mutual_neighbors_by_hand():
    generator = np.random.default_rng(1)
    coordinates, batches = generator.normal(size=(60, 4)), np.repeat([0, 1], 30)
    found = mutual_neighbors(coordinates, batches, across=2, within=0).toarray()
    unit = coordinates / np.linalg.norm(coordinates, axis=1, keepdims=True)
    distances = ((unit[:30, None] - unit[None, 30:]) ** 2).sum(axis=2)
    there = np.argsort(np.argsort(distances, axis=1), axis=1) < 2
    back = np.argsort(np.argsort(distances, axis=0), axis=0) < 2
    np.testing.assert_array_equal(found[:30, 30:], there & back)
    assert not found[:30, :30].any()


def test_of_many_batches_each_is_compared_with_ten_others():
    batches = np.repeat(np.arange(16), 10)
    found = mutual_neighbors(np.random.default_rng(0).normal(size=(160, 3)), batches, across=1, within=0)
    rows, columns = found.nonzero()
    partners = [len(set(batches[columns[batches[rows] == batch]])) for batch in range(16)]
    assert max(partners) <= 10
    assert min(partners) >= 5


@pytest.mark.parametrize("at_once", [7, 100_000])
def test_weights_of_neighbors_by_hand(monkeypatch, at_once):
    monkeypatch.setattr("scforge.data.neighbors._PAIRS_AT_ONCE", at_once)
    coordinates, batches, _ = two_batches()
    coordinates *= np.random.default_rng(1).uniform(0.5, 2, (len(coordinates), 1))  # lengths do not count
    pairs = mutual_neighbors(coordinates, batches)
    found = sparse.csr_matrix((neighbor_weights(coordinates, pairs, temperature=0.2), pairs.indices, pairs.indptr))
    unit = coordinates / np.linalg.norm(coordinates, axis=1, keepdims=True)
    expected = np.where(pairs.toarray(), np.exp(unit @ unit.T / 0.2), 0)
    expected /= np.maximum(expected.max(axis=1, keepdims=True), 1e-12)
    np.testing.assert_allclose(found.toarray(), expected, rtol=1e-4, atol=1e-6)
    # At the ends of the temperature one neighbor counts, or all do.
    has = np.diff(pairs.indptr) > 0
    for temperature, sums in [(1e-10, 1), (1e6, np.diff(pairs.indptr)[has]), (None, np.diff(pairs.indptr)[has])]:
        weights = neighbor_weights(coordinates, pairs, temperature=temperature)
        assert weights.shape == (pairs.nnz,)
        np.testing.assert_allclose(np.add.reduceat(weights, pairs.indptr[:-1][has]), sums, rtol=0.05)
    assert neighbor_weights(np.zeros((4, 2)), sparse.csr_matrix((4, 4), dtype=bool), temperature=0.1).shape == (0,)


def test_principal_components_are_those_of_log_normalized_values():
    counts = np.random.default_rng(0).poisson(2.0, (40, 12)).astype(np.float32)
    totals = counts.sum(axis=1).astype(float) + 5
    found, loadings, offset = principal_components(CellSource(sparse.csr_matrix(counts), totals), n_comps=3)
    values = np.log1p(counts / totals[:, None] * 1e4)
    np.testing.assert_allclose(values @ loadings - offset, found, atol=1e-3)
    values -= values.mean(axis=0)
    u, s, _ = np.linalg.svd(values, full_matrices=False)
    np.testing.assert_allclose(np.abs(found), np.abs(u[:, :3] * s[:3]), rtol=1e-3, atol=1e-3)
    with pytest.raises(DataError, match="40 cells and 1 genes are too few to find neighbors"):
        principal_components(CellSource(sparse.csr_matrix(counts[:, :1]), totals))
