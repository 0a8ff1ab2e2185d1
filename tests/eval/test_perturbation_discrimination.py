from __future__ import annotations

import numpy as np
import pytest

from scforge.errors import DataError, OptionError
from scforge.eval.perturbation_discrimination import discrimination_scores, own_genes


@pytest.mark.parametrize("metric", ["l1", "l2", "cosine"])
def test_a_score_is_one_less_the_share_of_nearer_effects(metric: str) -> None:
    from sklearn.metrics import pairwise_distances

    rng = np.random.default_rng(0)
    measured = rng.normal(size=(9, 30))
    predicted = measured + rng.normal(0, 5, size=measured.shape)
    distances = pairwise_distances(predicted, measured, metric=metric)
    expected = 1 - (distances < np.diagonal(distances)[:, None]).mean(axis=1)
    found = discrimination_scores(predicted, measured, metric)
    np.testing.assert_allclose(found, expected)
    assert len(set(found)) > 2
    assert (discrimination_scores(measured, measured, metric) == 1.0).all()


def test_one_prediction_for_all_scores_as_chance() -> None:
    measured = np.random.default_rng(1).normal(size=(8, 20))
    for metric in ("l1", "l2", "cosine"):
        same = np.tile(measured.mean(axis=0), (8, 1))
        assert discrimination_scores(same, measured, metric).mean() == pytest.approx((1 + 1 / 8) / 2)
    assert (discrimination_scores(measured * 0, measured, "cosine") == (1 + 1 / 8) / 2).all()


def test_the_perturbed_gene_does_not_count() -> None:
    # All that tells the effects apart is what happens to the perturbed genes.
    measured = np.full((3, 5), 1.0)
    measured[np.arange(3), np.arange(3)] = -9.0
    left_out = own_genes([("a",), ("b",), ("c",)], np.array(list("abcde")))
    assert left_out.sum(axis=1).tolist() == [1, 1, 1]
    assert discrimination_scores(measured, measured).tolist() == [1.0] * 3
    scores = discrimination_scores(np.ones_like(measured), measured, "l1", left_out)
    assert scores.tolist() == [1.0] * 3  # its own gene left out, the own effect is the flat one
    np.testing.assert_array_equal(own_genes([("a", "d"), ("x",)], np.array(list("abcde"))).sum(axis=1), [2, 0])


def test_mistakes_are_told() -> None:
    with pytest.raises(OptionError, match="metric='l3' is none of 'l1', 'l2', 'cosine'"):
        discrimination_scores(np.ones((2, 2)), np.ones((2, 2)), "l3")
    with pytest.raises(DataError, match="shapes"):
        discrimination_scores(np.ones((2, 2)), np.ones((2, 3)))
    assert np.isnan(discrimination_scores(np.ones((1, 2)), np.ones((1, 2)))).all()


def test_effects_of_other_contexts_are_no_candidates() -> None:
    rng = np.random.default_rng(0)
    contexts = ["x"] * 4 + ["y"] * 5 + ["z"]
    shared = {name: rng.normal(size=50) for name in "xyz"}
    own = np.array([shared[name] for name in contexts])
    measured = 3 * own + rng.normal(size=(10, 50))
    found = discrimination_scores(own, measured, "l1", None, contexts)
    # The chance of Q effects is (1 + 1 / Q) / 2.
    assert found[:4].mean() == pytest.approx((1 + 1 / 4) / 2)
    assert found[4:9].mean() == pytest.approx((1 + 1 / 5) / 2)
    assert np.isnan(found[9])
