import numpy as np
import pytest
import torch

from scforge.data.neighbors import harmony_correct
from scforge.training.correction import LatentCorrection


@pytest.fixture
def two_types():
    """Two types in three batches, of which the second type is absent from the last; batches differ within each type."""
    generator = np.random.default_rng(0)
    types, batches = np.repeat([0, 1], [150, 150]), np.tile([0, 1, 2], 100)
    batches[types == 1] %= 2
    embeddings = generator.normal(0, [0.3, 0.3, 0.1, 0.1], (300, 4))
    embeddings[np.arange(300), types] += 4.0
    effects = generator.normal(0, 0.5, (3, 2, 4)) * [1, 1, 0.5, 0.5]
    return (embeddings + effects[batches, types]).astype(np.float32), batches, types


def gaps(embeddings, batches, types):
    """Return the mean distance between the centers of batches within types."""
    centers = [
        [embeddings[(types == label) & (batches == batch)].mean(axis=0) for batch in np.unique(batches[types == label])]
        for label in (0, 1)
    ]
    return np.mean([np.linalg.norm(np.array(of_type) - of_type[0], axis=1)[1:].mean() for of_type in centers])


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_the_formula_is_harmony_on_the_cells_that_it_was_fitted_on(two_types, power):
    embeddings, batches, _ = two_types
    correction = LatentCorrection.fit(embeddings, batches, power=power)
    found = correction.apply_to(embeddings, batches)
    center = correction.center.numpy()
    scaled = (embeddings - center) @ correction.scaling.numpy()
    by_harmony = harmony_correct(scaled, batches) + center
    moved = np.square(by_harmony - scaled - center).sum()
    assert np.square(found - by_harmony).sum() < 0.02 * moved
    np.testing.assert_allclose(correction.apply_to(embeddings, np.full(300, -1)), scaled + center, atol=1e-4)


def test_batches_come_together_and_types_stay_apart(two_types):
    embeddings, batches, types = two_types
    corrected = LatentCorrection.fit(embeddings, batches).apply_to(embeddings, batches)
    assert gaps(corrected, batches, types) < 0.4 * gaps(embeddings, batches, types)
    between = np.linalg.norm(corrected[types == 0].mean(axis=0) - corrected[types == 1].mean(axis=0))
    assert between > 3
    assert corrected.var(axis=0).sum() == pytest.approx(embeddings.var(axis=0).sum(), rel=0.2)


def test_a_cell_is_corrected_alike_alone_and_among_others(two_types):
    embeddings, batches, _ = two_types
    correction = LatentCorrection.fit(embeddings, batches)
    whole = correction.apply_to(embeddings, batches)
    few = correction.apply_to(embeddings[[7, 250]], batches[[7, 250]])
    np.testing.assert_allclose(few, whole[[7, 250]], atol=1e-5)


def test_a_smaller_power_brings_the_spread_of_components_closer(two_types):
    embeddings, batches, _ = two_types
    spreads = [
        np.sqrt(np.linalg.eigvalsh(np.cov(LatentCorrection.fit(embeddings, batches, power=power).apply_to(
            embeddings, np.full(300, -1)), rowvar=False)))
        for power in (1.0, 0.5, 0.0)
    ]  # fmt: skip
    ratios = [spread.max() / spread.min() for spread in spreads]
    assert ratios[0] ** 0.5 == pytest.approx(ratios[1], rel=0.01)
    assert ratios[2] == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("n_cells", [9, 40])
def test_without_batches_or_variance_there_is_nothing_to_correct(n_cells):
    embeddings = np.random.default_rng(0).normal(size=(n_cells, 3)).astype(np.float32)
    assert LatentCorrection.fit(embeddings, np.zeros(n_cells, dtype=np.int64)) is None
    assert LatentCorrection.fit(np.ones((n_cells, 3), dtype=np.float32), np.arange(n_cells) % 2) is None


def test_dimensions_without_variance_stay_finite():
    embeddings = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    embeddings[:, 2] = 0
    corrected = LatentCorrection.fit(embeddings, np.arange(60) % 2).apply_to(embeddings, np.arange(60) % 2)
    assert np.isfinite(corrected).all()
    assert torch.from_numpy(corrected[:, 2]).abs().max() < 1e-4
