from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity

from scforge.errors import DataError
from scforge.eval import Geometry, is_collapsed


def figures(embedding: np.ndarray) -> dict[str, float]:
    return Geometry().run(embedding, pd.DataFrame(index=range(len(embedding))))


@pytest.mark.parametrize("shape", [(80, 12), (12, 80)])
def test_the_figures_are_those_of_their_definitions(shape) -> None:
    embedding = np.random.default_rng(0).gamma(1.0, size=shape).astype(np.float32)
    embedding[:, 3] = 2.0
    shares = np.linalg.svd(embedding.astype(np.float64), compute_uv=False)
    shares /= shares.sum()
    pairs = cosine_similarity(embedding.astype(np.float64))[~np.eye(len(embedding), dtype=bool)]
    assert figures(embedding) == pytest.approx(
        {
            "effective_rank": np.exp(-np.sum(shares * np.log(shares))),
            "mean_cosine": pairs.mean(),
            "top_component_share": PCA().fit(embedding.astype(np.float64)).explained_variance_ratio_[0],
            "constant_dims": 1 / shape[1],
        },
        abs=1e-6,
    )


CELLS = np.random.default_rng(1).normal(size=(200, 8))


@pytest.mark.parametrize(
    ("embedding", "collapsed", "expected"),
    [
        (CELLS, False, {"effective_rank": 8, "mean_cosine": 0, "constant_dims": 0}),
        (CELLS[:, :1] * np.arange(1, 9), True, {"effective_rank": 1, "top_component_share": 1}),
        (CELLS * 0.01 + 5, True, {"mean_cosine": 1, "constant_dims": 0}),
        (CELLS * 1e-9 + 5, True, {"mean_cosine": 1, "constant_dims": 1, "top_component_share": 1}),
        (
            np.full((200, 8), 0.1, dtype=np.float32),
            True,
            {"effective_rank": 1, "constant_dims": 1, "top_component_share": 1},
        ),
        (np.zeros((200, 8)), True, {"effective_rank": 0, "mean_cosine": np.nan, "constant_dims": 1}),
    ],
    ids=["noise", "a line", "an offset", "almost a point", "a point", "nothing"],
)
def test_a_collapse_shows(embedding, collapsed, expected) -> None:
    scores = figures(embedding)
    assert is_collapsed(scores) == collapsed
    assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=0.2, nan_ok=True)


def test_there_is_nothing_to_test() -> None:
    assert Geometry().resampled(CELLS, pd.DataFrame(index=range(200)), n=5, seed=0) is None


def test_bad_input() -> None:
    with pytest.raises(DataError, match="at least 2 cells, but there are 1"):
        figures(CELLS[:1])
    with pytest.raises(DataError, match=r"has the shape \(200,\)"):
        figures(CELLS[:, 0])
