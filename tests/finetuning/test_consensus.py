"""A consensus of views labels cells of another batch."""

import numpy as np
import pytest
from scipy import sparse
from sklearn.metrics import f1_score

from scforge.data.cells import CellSource
from scforge.finetuning import consensus as module
from scforge.finetuning.consensus import VIEWS, Labeled, consensus

N_GENES = 80


def made(
    n: int, seed: int, *, shift: float = 1.0, batches: int = 1
) -> tuple[np.ndarray, CellSource, np.ndarray, np.ndarray]:
    """Embeddings, counts, batches and classes of cells: three frequent types and a rare one."""
    generator = np.random.default_rng(seed)
    classes = generator.choice(4, n, p=[0.4, 0.3, 0.27, 0.03])
    mean = np.full((n, N_GENES), 1.0)
    for one in range(4):
        mean[classes == one, 10 * one : 10 * one + 10] = 2.2
    batch = np.arange(n) % batches
    mean[:, 40:60] *= (1.0 + batch * 0.3)[:, None] * shift
    counts = sparse.csr_matrix(generator.poisson(mean).astype(np.float32))
    embeddings = np.eye(4)[classes] + generator.normal(0, 0.45, (n, 4))
    cells = CellSource(counts, np.asarray(counts.sum(axis=1), dtype=np.float64).ravel())
    return embeddings.astype(np.float32), cells, batch.astype(str), classes


def labeled(n: int, *, batches: int = 3) -> Labeled:
    return Labeled(*made(n, 0, batches=batches))


def f1(truth: np.ndarray, probabilities: np.ndarray) -> float:
    return f1_score(truth, probabilities.argmax(axis=1), average="macro")


@pytest.mark.parametrize("batches", [1, 3])
def test_it_is_better_than_the_embedding_alone(batches):
    embeddings, cells, in_batches, truth = made(400, 1, shift=2.0)
    reference = labeled(400, batches=batches)
    found = consensus(reference, embeddings, cells, in_batches, 4)
    alone = consensus(reference, embeddings, cells, in_batches, 4, views=VIEWS[:1])
    assert f1(truth, found.probabilities) > f1(truth, alone.probabilities) + 0.02
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1)
    assert set((3 * np.unique(found.agreement)).round(5)) <= {0, 1, 2, 3}
    wrong = found.probabilities.argmax(axis=1) != truth
    assert found.agreement[wrong].mean() < found.agreement[~wrong].mean()
    assert sum(found.weights.values()) == pytest.approx(1)
    assert min(found.weights.values()) >= 1 / 6 - 1e-9


def test_the_order_of_cells_and_a_common_batch_name_change_nothing(monkeypatch):
    embeddings, cells, batches, truth = made(300, 1)
    order = np.random.default_rng(0).permutation(300)
    reference = labeled(300)
    found = consensus(reference, embeddings, cells, batches, 4)
    shuffled = consensus(reference, embeddings[order], cells.take(order), batches[order], 4)
    np.testing.assert_allclose(shuffled.probabilities, found.probabilities[order], atol=1e-6)
    renamed = consensus(reference, embeddings, cells, np.full(300, "new"), 4)
    np.testing.assert_array_equal(renamed.probabilities, found.probabilities)
    # A large query is corrected in groups.
    monkeypatch.setattr(module, "_AT_ONCE", 120)
    in_groups = consensus(reference, embeddings, cells, batches, 4)
    assert (in_groups.probabilities.argmax(axis=1) == found.probabilities.argmax(axis=1)).mean() > 0.93


@pytest.mark.parametrize("n", [20, 45])
def test_few_cells(n):
    """Of each class two cells and more, too few for folds."""
    embeddings, cells, batches, classes = made(600, 0, batches=2)
    rows = np.sort(np.concatenate([np.flatnonzero(classes == one)[: n // 4] for one in range(4)]))
    reference = Labeled(embeddings[rows], cells.take(rows), batches[rows], classes[rows])
    query, of_query, in_batches, truth = made(200, 1)
    found = consensus(reference, query, of_query, in_batches, 4)
    assert (found.probabilities.argmax(axis=1) == truth).mean() > 0.6
    assert found.temperature == 1
    one = consensus(reference, query[:1], of_query.take(np.array([0])), in_batches[:1], 4)
    assert one.probabilities.shape == (1, 4)


def test_a_class_of_one_batch_and_genes_that_the_query_lacks():
    reference = labeled(300)
    reference.batches[reference.classes == 3] = "0"
    embeddings, cells, batches, truth = made(200, 1)
    measured = np.arange(N_GENES) >= 5
    counts = sparse.csr_matrix(cells.counts.toarray() * measured)
    found = consensus(reference, embeddings, CellSource(counts, cells.totals, measured=measured), batches, 4)
    assert f1(truth, found.probabilities) > 0.7
