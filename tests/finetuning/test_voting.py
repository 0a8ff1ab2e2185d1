from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, OptionError
from scforge.finetuning.voting import majority_vote, resolution_for

LABELS = np.array(["B", "T", "T", "NK", "B", "B", "T"])


def celltypist_vote(labels, clusters, min_prop):
    """Vote as CellTypist documents it."""
    votes = pd.crosstab(labels, clusters)
    majority = votes.idxmax(axis=0).astype(object)
    majority[(votes / votes.sum(axis=0)).max(axis=0) < min_prop] = "Heterogeneous"
    return majority.loc[clusters].to_numpy()


@pytest.mark.parametrize("min_share", [0.0, 0.5, 0.7, 1.0])
def test_it_is_the_vote_of_celltypist(min_share):
    generator = np.random.default_rng(0)
    labels, clusters = generator.choice(["B", "NK", "T"], 300), generator.integers(60, size=300)
    expected = celltypist_vote(labels, clusters, min_share)
    np.testing.assert_array_equal(majority_vote(labels, clusters, min_share=min_share), expected)


def test_ties_go_to_the_first_name():
    assert majority_vote(np.array(["T", "B"]), np.array(["x", "x"])).tolist() == ["B", "B"]


def test_clusters_of_categories():
    clusters = pd.Series(pd.Categorical(["x", "x", "x", "y", "y", "y", "y"], categories=["y", "unused", "x"]))
    assert majority_vote(LABELS, clusters).tolist() == ["T"] * 3 + ["B"] * 4


def test_cells_without_cluster():
    with pytest.raises(DataError, match="1 of 7 cells have no cluster"):
        majority_vote(LABELS, pd.Series(["x"] * 6 + [None]))
    with pytest.raises(OptionError, match="min_share=2"):
        majority_vote(LABELS, np.zeros(7), min_share=2)


@pytest.mark.parametrize(
    ("n_cells", "resolution"), [(4_999, 5), (5_000, 10), (20_000, 15), (40_000, 20), (100_000, 25), (200_000, 30)]
)
def test_resolution(n_cells, resolution):
    assert resolution_for(n_cells) == resolution
