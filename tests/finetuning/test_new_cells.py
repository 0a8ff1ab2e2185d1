import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from scforge.finetuning import new_cells
from scforge.finetuning.new_cells import neighbor_votes, votes_of


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*:numba.core.errors.NumbaWarning")
def test_an_approximate_search_votes_as_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    classes = np.arange(600) % 3
    labeled = (generator.normal(size=(600, 8)) + 3 * classes[:, None]).astype(np.float32)
    others = (generator.normal(size=(90, 8)) + 3 * (np.arange(90) % 3)[:, None]).astype(np.float32)
    exact = neighbor_votes(labeled, classes, others, n_neighbors=15, n_classes=4)
    expected = KNeighborsClassifier(15, weights=votes_of).fit(labeled, classes).predict_proba(others)
    np.testing.assert_allclose(exact[:, :3], expected, atol=1e-6)
    assert not exact[:, 3].any(), "nobody has this class"
    monkeypatch.setattr(new_cells, "_MOST_DISTANCES", 0)
    found = neighbor_votes(labeled, classes, others, n_neighbors=15, n_classes=4)
    assert np.abs(found - exact).max() < 0.2
    np.testing.assert_array_equal(found.argmax(axis=1), exact.argmax(axis=1))
