import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError
from scforge.finetuning.tasks.annotation import majority_vote, resolution_for
from scforge.testing import raises


@pytest.mark.parametrize("min_share", [0.0, 0.7, 1.0])
def test_it_is_the_vote_of_celltypist(min_share):
    """As CellTypist documents it."""
    generator = np.random.default_rng(0)
    labels, clusters = generator.choice(["B", "NK", "T"], 300), generator.integers(60, size=300)
    votes = pd.crosstab(labels, clusters)
    majority = votes.idxmax(axis=0).astype(object)
    majority[(votes / votes.sum(axis=0)).max(axis=0) < min_share] = "Heterogeneous"
    expected = majority.loc[clusters].to_numpy()
    np.testing.assert_array_equal(majority_vote(labels, clusters, min_share=min_share), expected)
    of_categories = pd.Series(pd.Categorical(clusters, categories=[*range(99, 59, -1), *range(60)]))
    np.testing.assert_array_equal(majority_vote(labels, of_categories, min_share=min_share), expected)


def test_ties_and_cells_without_cluster():
    labels = np.array(["T", "B"])
    assert majority_vote(labels, np.array(["x", "x"])).tolist() == ["B", "B"]
    with raises(DataError, "majority_voting"):
        majority_vote(labels, pd.Series(["x", None]))
    numbers = {4_999: 5, 5_000: 10, 20_000: 15, 40_000: 20, 100_000: 25, 200_000: 30}
    assert {n_cells: resolution_for(n_cells) for n_cells in numbers} == numbers
