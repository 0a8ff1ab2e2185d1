from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scforge.data.sampling import split_cells
from scforge.errors import DataError, OptionError


@pytest.mark.parametrize(("n", "share"), [(100, 0.1), (3, 0.1), (1000, 0.33), (1, 0.0)])
def test_by_cell_the_split_is_disjoint_and_whole(n, share):
    train, validation = split_cells(n, share, seed=0)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, validation])), np.arange(n))
    assert len(train) > 0
    assert (len(validation) > 0) is (share > 0)
    assert train.dtype == validation.dtype == np.int64
    # The split of a seed never changes.
    order = np.random.default_rng(5).permutation(12)
    groups = np.repeat(np.arange(30), 10)
    held_out = [frozenset(groups[split_cells(300, 0.2, seed, groups=groups)[1]]) for seed in (0, 0, 1, 2)]
    assert held_out[0] == held_out[1]
    assert (len(set(held_out)), {len(some) for some in held_out}) == (3, {6})
    for found, expected in zip(split_cells(12, 0.3, seed=5), (order[4:], order[:4]), strict=True):
        np.testing.assert_array_equal(found, np.sort(expected))


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.floats(0.01, 0.99), st.integers(0, 100))
def test_whole_groups_nearest_to_the_share(sizes, share, seed):
    groups = np.random.default_rng(seed).permutation(np.repeat([f"donor{i}" for i in range(len(sizes))], sizes))
    train, validation = split_cells(len(groups), share, seed, groups=groups)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, validation])), np.arange(len(groups)))
    assert (np.diff(train) > 0).all()
    assert len(train)
    assert len(validation)
    assert not set(groups[train]) & set(groups[validation])
    choices = [sum(some) for k in range(1, len(sizes)) for some in combinations(sizes, k)]
    best = min(abs(n - share * len(groups)) for n in choices)
    assert abs(len(validation) - share * len(groups)) == pytest.approx(best)


def test_many_groups_of_many_cells_come_near_the_share():
    sizes = np.random.default_rng(0).lognormal(8, 1.5, 600).astype(int) + 1
    groups = np.repeat(np.arange(600), sizes)
    train, validation = split_cells(len(groups), 0.1, 0, groups=groups)
    assert len(groups) > 1 << 22  # more than are told apart one by one
    assert len(validation) / len(groups) == pytest.approx(0.1, abs=1e-4)
    assert not np.intersect1d(groups[train], groups[validation]).size


@pytest.mark.parametrize("kind", [pd.Series, pd.Categorical, np.array, list])
def test_some_rows_only(kind):
    groups = np.array(["a", "a", "b", "b", "c", "d"])
    rows = np.array([5, 0, 2, 3])
    train, validation = split_cells(6, 0.5, 0, groups=kind(groups), rows=rows)
    assert np.sort(np.concatenate([train, validation])).tolist() == [0, 2, 3, 5]
    assert len(train) == len(validation) == 2
    assert set(groups[train]).isdisjoint(groups[validation])
    train, validation = split_cells(6, 0.25, 0, rows=rows)
    assert np.sort(np.concatenate([train, validation])).tolist() == [0, 2, 3, 5]
    assert len(validation) == 1
    # A missing group outside of the rows does not matter.
    train, validation = split_cells(3, 0.5, 0, groups=["a", None, "b"], rows=np.array([0, 2]))
    assert sorted([*train, *validation]) == [0, 2]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *(({"validation_size": share}, OptionError, "validation_size=") for share in (1.0, -0.1, np.nan, None)),
        ({"n_cells": 2, "validation_size": 0.9}, OptionError, "leaves none of the 2 cells"),
        ({"groups": ["a", "b"]}, OptionError, "groups has 2 values for 3 cells"),
        *(({"rows": rows}, OptionError, "not a cell position") for rows in ([0, 3], [-1, 1], [True, False, True])),
        ({"groups": ["a", "a", "a"]}, DataError, r"groups contains only one group, 'a'; use two or more"),
        ({"groups": pd.Categorical(["a", "b", None])}, DataError, r"missing for 1 of 3 cells, e.g. cell 2"),
        ({"groups": np.array([0, 1, -1])}, DataError, r"missing for 1 of 3 cells, e.g. cell 2"),
    ],
)
def test_arguments_that_do_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        split_cells(**{"n_cells": 3, "validation_size": 0.3, "seed": 0} | options)
