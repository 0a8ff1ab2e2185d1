import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from scforge.eval.base import Benchmark, half_samples
from scforge.eval.report import bootstrap_weights, compare_paired, interval


@pytest.mark.parametrize(("n", "options", "least"), [(100, {}, 0.88), (6, {"n_units": 6}, 0.91)])
def test_an_interval_of_a_mean_covers_as_often_as_it_says(n: int, options: dict, least: float) -> None:
    """Few units tell little."""
    rng = np.random.default_rng(0)
    covered = refused = 0
    for _ in range(300):
        sample = rng.normal(size=n)
        draws = bootstrap_weights(n, 200, seed=int(rng.integers(1 << 30))) @ sample / n
        low, high = interval(sample.mean(), draws, **options)
        covered += low <= 0.0 <= high
        refused += compare_paired("PCA", sample.mean(), 0.0, draws, np.zeros(200), **options).p_value < 0.05
    assert least <= covered / 300 <= 0.99
    assert refused / 300 <= 0.09


def test_few_draws_take_students_t() -> None:
    low, high = interval(0.5, np.array([0.1, 0.2, 0.3]))
    assert high - 0.5 == pytest.approx(stats.t.ppf(0.975, 2) * 0.1)
    assert 0.5 - low == pytest.approx(high - 0.5)
    for draws in ([], [0.1], [math.nan, math.nan, 0.1, 0.2, math.nan]):
        assert np.isnan(interval(0.5, np.array(draws))).all()
    assert np.isnan(interval(0.5, np.linspace(0, 1, 200), n_units=1)).all()


def test_pairs_see_what_single_intervals_do_not() -> None:
    common = np.random.default_rng(0).normal(0, 0.1, 200)
    noise = np.random.default_rng(1).normal(0, 0.001, 200)
    compared = compare_paired("PCA", 0.81, 0.80, common + noise, common)
    assert compared.difference == pytest.approx(0.01)
    assert compared.p_value < 1e-6
    assert 0.005 < compared.low < 0.01 < compared.high < 0.015
    assert compare_paired("PCA", 0.81, 0.80, common, common[::-1]).p_value > 0.5
    assert compare_paired("PCA", 0.5, 0.5, common, common).p_value == 1.0
    assert math.isnan(compare_paired("PCA", 0.5, 0.4, None, common).p_value)


def test_halves_keep_labels() -> None:
    obs = pd.DataFrame({"label": ["a"] * 10 + ["b"] * 30})
    halves, again = (list(half_samples(obs, 6, seed=0, labels_key="label")) for _ in range(2))
    assert all((obs["label"].iloc[rows] == "a").sum() == 5 and len(rows) == 20 for rows in halves)
    assert len({tuple(rows) for rows in halves}) == 6
    np.testing.assert_array_equal(halves, again)


class _Mean(Benchmark):
    metrics = ("mean",)
    groups_key = "donor"

    def run(self, embedding, obs):
        return {"mean": float(embedding.mean())}


@pytest.mark.parametrize("n_groups", [4, 7])
def test_halves_of_groups_tell_the_error_of_the_whole(n_groups) -> None:
    """With the factor for few units that intervals bring, the spread is s / sqrt(n), for odd numbers, too."""
    of_group = np.random.default_rng(0).normal(size=n_groups)
    obs = pd.DataFrame({"donor": np.repeat(np.arange(n_groups), 3)})
    draws = _Mean().resampled(np.repeat(of_group, 3)[:, None], obs, n=2_000, seed=0)["mean"].to_numpy()
    _, high = interval(0.0, draws, n_units=_Mean().n_units(obs))
    expected = of_group.std(ddof=1) / np.sqrt(n_groups) * stats.t.ppf(0.975, n_groups - 1)
    assert high == pytest.approx(expected, rel=0.07)
    few = obs["donor"] < 3
    assert _Mean().resampled(np.zeros((few.sum(), 1)), obs[few], n=5, seed=0) is None
