"""Query cells of types that the reference lacks have low p-values."""

import numpy as np
import pytest
from scipy import sparse
from scipy.special import log_softmax
from sklearn.metrics import roc_auc_score

from scforge.data.cells import CellSource
from scforge.finetuning import unknown as module
from scforge.finetuning.consensus import VIEWS, Labeled, consensus
from scforge.finetuning.unknown import HeldOut

DIM, NOISE, N_TYPES = 12, 0.35, 4
CENTERS = np.eye(DIM)[: N_TYPES + 1]
"""Centers of the types; the last one is missing in the reference."""


def embedded(types: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of cells, and log probabilities of the types of the reference by two views."""
    generator = np.random.default_rng(seed)
    embeddings = CENTERS[types] + generator.normal(0, NOISE, (len(types), DIM))
    views = embeddings + generator.normal(0, 0.1, (2, *embeddings.shape))
    return embeddings.astype(np.float32), log_softmax(views @ CENTERS[:N_TYPES].T / NOISE**2, axis=2)


def held_out(types: np.ndarray, seed: int = 0) -> tuple[HeldOut, np.ndarray]:
    """Held-out cells of five random folds, and the embeddings of all."""
    embeddings, logs = embedded(types, seed)
    parts = np.array_split(np.random.default_rng(seed).permutation(len(types)), 5)
    folds = [(np.setdiff1d(np.arange(len(types)), part), part) for part in parts]
    logs = logs[:, np.concatenate(parts)]
    return HeldOut.of(embeddings, folds, logs, logs.sum(axis=0).argmax(axis=1)), embeddings


def p_values(known: tuple[HeldOut, np.ndarray], embeddings: np.ndarray, logs: np.ndarray) -> np.ndarray:
    return known[0].p_values(embeddings, logs, logs.sum(axis=0).argmax(axis=1), (known[1], embeddings))


def drawn(n: int, n_types: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, n_types, n)


def test_about_one_cell_in_twenty_of_known_types_has_a_p_value_below_005():
    """Somewhat fewer, because query cells are compared with all reference cells, not with those of the other folds."""
    known = held_out(drawn(1_500, N_TYPES, 0))
    types = drawn(1_500, N_TYPES, 1)
    found = p_values(known, *embedded(types, 1))
    assert found.dtype == np.float32
    assert found.shape == (1_500,)
    assert 0.01 < (found < 0.05).mean() < 0.07
    assert 0.4 < (found < 0.5).mean() < 0.6
    assert max((found[types == one] < 0.05).mean() for one in range(N_TYPES)) < 0.08


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_cells_of_an_unknown_type_are_found_also_in_another_batch(shift):
    types = drawn(800, N_TYPES + 1, 1)
    embeddings, logs = embedded(types, 1)
    embeddings[:, -1] += shift
    found = p_values(held_out(drawn(800, N_TYPES, 0)), embeddings, logs)
    is_new = types == N_TYPES
    assert roc_auc_score(is_new, -found) > 0.95
    assert (found[~is_new] < 0.05).mean() < 0.1
    assert (found[is_new] < 0.05).mean() > 0.75


@pytest.mark.parametrize("most", [module._MOST_OF_QUERY, 200])
def test_the_order_of_cells_changes_nothing(monkeypatch, most):
    monkeypatch.setattr(module, "_MOST_OF_QUERY", most)
    known = held_out(drawn(400, N_TYPES, 0))
    embeddings, logs = embedded(drawn(500, N_TYPES + 1, 1), 1)
    order = np.random.default_rng(0).permutation(500)
    np.testing.assert_allclose(
        p_values(known, embeddings[order], logs[:, order]), p_values(known, embeddings, logs)[order], atol=0.02
    )


def test_a_class_of_few_cells_is_compared_with_all():
    types = np.concatenate([drawn(600, N_TYPES - 1, 0), np.full(8, N_TYPES - 1)])
    query = np.concatenate([drawn(600, N_TYPES - 1, 1), np.full(8, N_TYPES - 1), np.full(60, N_TYPES)])
    found = p_values(held_out(types), *embedded(query, 1))
    assert np.isfinite(found).all()
    assert np.median(found[query == N_TYPES - 1]) > 0.05
    assert (found[query == N_TYPES] < 0.05).mean() > 0.6


@pytest.mark.parametrize("n", [1, 5])
def test_few_query_cells(n):
    found = p_values(held_out(drawn(300, N_TYPES, 0)), *embedded(np.zeros(n, dtype=int), 1))
    assert found.shape == (n,)
    assert ((found > 0) & (found <= 1)).all()


def of_genes(types: np.ndarray, batches: int, seed: int) -> tuple[np.ndarray, CellSource, np.ndarray]:
    """Embeddings, counts and batches; each type has ten genes."""
    mean = np.full((len(types), 80), 1.0)
    for one in range(N_TYPES + 1):
        mean[types == one, 10 * one : 10 * one + 10] = 3.0
    batch = np.arange(len(types)) % batches
    mean[:, 60:] *= (1.0 + batch * 0.3)[:, None]
    counts = sparse.csr_matrix(np.random.default_rng(seed).poisson(mean).astype(np.float32))
    cells = CellSource(counts, np.asarray(counts.sum(axis=1), dtype=np.float64).ravel())
    return embedded(types, seed)[0], cells, batch.astype(str)


@pytest.mark.parametrize(("batches", "views"), [(1, VIEWS), (3, VIEWS), (3, VIEWS[:1])])
def test_consensus_finds_an_unknown_type(batches, views):
    types = drawn(400, N_TYPES + 1, 1)
    reference = drawn(400, N_TYPES, 0)
    embeddings, cells, in_batches = of_genes(types, 1, 1)
    labeled = Labeled(*of_genes(reference, batches, 0), reference)
    found = consensus(labeled, embeddings, cells, in_batches, N_TYPES, views=views).p_values
    is_new = types == N_TYPES
    assert roc_auc_score(is_new, -found) > 0.9
    assert (found[~is_new] < 0.05).mean() < 0.1
    assert (found[is_new] < 0.05).mean() > 0.5


def test_a_small_reference_has_no_p_values():
    reference = drawn(40, N_TYPES, 0)
    embeddings, cells, batches = of_genes(drawn(50, N_TYPES, 1), 1, 1)
    labeled = Labeled(*of_genes(reference, 1, 0), reference)
    found = consensus(labeled, embeddings, cells, batches, N_TYPES, views=VIEWS[:1])
    assert np.isnan(found.p_values).all()
    assert np.isfinite(found.probabilities).all()
