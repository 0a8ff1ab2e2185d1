from collections.abc import Callable

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, OptionError
from scforge.pl import annotation
from scforge.testing import raises

pytestmark = pytest.mark.filterwarnings("ignore:.*n_jobs value.*:UserWarning")


@pytest.fixture
def labeled() -> ad.AnnData:
    """40 query cells among 60 reference cells of two types; two cells are unknown."""
    generator = np.random.default_rng(0)
    kinds = np.array(["_B", "T$x$"])
    adata = ad.AnnData(np.zeros((40, 1)), obs=pd.DataFrame(index=[f"cell{i}" for i in range(40)]))
    adata.obs["kind"] = pd.Categorical([*kinds[np.arange(38) % 2], "unknown", "unknown"])
    adata.obs["kind_probability"] = generator.random(40).astype(np.float32)
    adata.obsm["X_scforge"] = generator.normal(size=(40, 4)) + 5 * (np.arange(40) % 2)[:, None]
    reference = generator.normal(size=(60, 4)) + 5 * (np.arange(60) % 2)[:, None]
    made: dict = {"embedding_key": "X_scforge", "model": "a"}
    made |= {"reference_embedding": reference, "reference_labels": kinds[np.arange(60) % 2].astype(object)}
    adata.uns["scforge"] = {"kind": {**made, "labels_key": "cell_type"}, "X_scforge": {"model": "a"}}
    return adata


def test_query_cells_are_among_reference_cells_of_their_type(labeled: ad.AnnData, texts: Callable) -> None:
    axes = annotation(labeled)
    assert [ax.get_title() for ax in axes] == ["reference, cell_type", "query, predicted", "query, probability"]
    known, query, points = (ax.collections[1] for ax in axes)
    assert [len(part.get_offsets()) for part in (known, query, points)] == [60, 40, 40]
    middle = [np.asarray(known.get_offsets())[kind::2].mean(axis=0) for kind in (0, 1)]
    places = np.asarray(query.get_offsets())
    nearest = np.stack([np.linalg.norm(places - place, axis=1) for place in middle]).argmin(axis=0)
    np.testing.assert_array_equal(nearest, np.arange(40) % 2)
    colors = query.get_facecolor()
    assert len(np.unique(colors, axis=0)) == 3
    np.testing.assert_array_equal(colors[0], known.get_facecolor()[0])
    assert texts(axes[1].get_legend().get_texts()) == ["T$x$", "\u200b_B", "unknown"]
    assert sorted(points.get_array()) == sorted(labeled.obs["kind_probability"])


def test_a_written_file_can_be_plotted(labeled: ad.AnnData, tmp_path) -> None:
    labeled.write_h5ad(tmp_path / "cells.h5ad")
    axes = plt.subplots(1, 3)[1]
    assert annotation(ad.read_h5ad(tmp_path / "cells.h5ad"), "kind", axes=axes) is axes


def test_what_cannot_be_plotted(labeled: ad.AnnData) -> None:
    with raises(OptionError, "axes"):
        annotation(labeled, axes=plt.subplots(1, 2)[1])
    with raises(DataError, "key"):
        annotation(labeled, "other")
    labeled.uns["scforge"]["X_scforge"] = {"n_latent": 4}
    with pytest.raises(DataError, match="is not the embedding that the labels in 'kind' were made with"):
        annotation(labeled)
    labeled.obs["second"] = labeled.obs["kind"]
    labeled.uns["scforge"]["second"] = labeled.uns["scforge"]["kind"]
    with raises(OptionError, "adata"):
        annotation(labeled)
    with raises(DataError, "adata"):
        annotation(ad.AnnData(np.zeros((2, 1))))
