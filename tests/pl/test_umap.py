from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pytest

from scforge.errors import DataError
from scforge.pl import embeddings

# umap-learn says so whenever it is seeded.
pytestmark = pytest.mark.filterwarnings("ignore:.*n_jobs value.*:UserWarning")


@pytest.fixture(autouse=True)
def _close() -> None:
    yield
    plt.close("all")


@pytest.fixture
def embedded(tiny_adata: ad.AnnData) -> ad.AnnData:
    generator = np.random.default_rng(0)
    for key in ("X_one", "X_two"):
        tiny_adata.obsm[key] = generator.normal(size=(60, 4)).astype(np.float32)
        tiny_adata.obsm[f"{key}_umap"] = generator.normal(size=(60, 2))
    return tiny_adata


def points(ax) -> dict[str, np.ndarray]:
    return {collection.get_label(): np.asarray(collection.get_offsets()) for collection in ax.collections}


@pytest.mark.slow
def test_each_group_at_its_place(embedded: ad.AnnData) -> None:
    axes = embeddings(embedded, {"X_one": "the first", "X_two": "the second"}, color="group")
    assert [ax.get_title() for ax in axes] == ["the first", "the second"]
    for ax, key in zip(axes, ("X_one", "X_two"), strict=True):
        drawn = points(ax)
        assert set(drawn) == {"a", "b"}
        for name, places in drawn.items():
            expected = embedded.obsm[f"{key}_umap"][(embedded.obs["group"] == name).to_numpy()]
            np.testing.assert_allclose(places, expected)
    assert axes[0].get_legend() is None
    assert [text.get_text() for text in axes[1].get_legend().get_texts()] == ["a", "b"]


def test_cells_without_a_label_are_grey(embedded: ad.AnnData) -> None:
    embedded.obs.loc[["cell0", "cell1"], "group"] = np.nan
    (ax,) = embeddings(embedded, ["X_one"], color="group")
    drawn = points(ax)
    assert len(drawn["no label"]) == 2
    assert len(drawn["a"]) + len(drawn["b"]) == 58


def test_many_groups_have_a_colour_each(embedded: ad.AnnData) -> None:
    embedded.obs["many"] = [f"group {i % 15:02d}" for i in range(60)]
    (ax,) = embeddings(embedded, ["X_one"], color="many")
    colours = {tuple(collection.get_facecolor()[0]) for collection in ax.collections}
    assert len(colours) == 15


def test_a_umap_is_of_the_embedding_as_it_is_and_neighbours_stay(embedded: ad.AnnData) -> None:
    del embedded.obsm["X_one_umap"]
    embedded.obsm["X_one"][:30] += 20
    embeddings(embedded, ["X_one"], color="group", n_neighbors=5)
    computed = embedded.obsm["X_one_umap"]
    assert computed.shape == (60, 2)
    centres = computed[:30].mean(axis=0), computed[30:].mean(axis=0)
    assert np.linalg.norm(centres[0] - centres[1]) > 2 * computed[:30].std()
    assert "neighbors" not in embedded.uns
    assert "connectivities" not in embedded.obsp
    embedded.obsm["X_one"] = embedded.obsm["X_one"][::-1].copy()
    embeddings(embedded, ["X_one"], color="group", n_neighbors=5)
    assert not np.allclose(embedded.obsm["X_one_umap"], computed)


def test_mistakes(embedded: ad.AnnData) -> None:
    with pytest.raises(DataError, match=r"color='grupo' is not in the data; did you mean 'group'\? \(known: 'group'"):
        embeddings(embedded, ["X_one"], color="grupo")
    with pytest.raises(DataError, match=r"obsm_keys='X_on' is not in the data; did you mean 'X_one'\?"):
        embeddings(embedded, ["X_on"], color="group")
    assert not plt.get_fignums()


def test_one_key_as_text(embedded: ad.AnnData) -> None:
    (ax,) = embeddings(embedded, "X_one", color="group")
    assert ax.get_title() == "X_one"


@pytest.mark.parametrize(("n_groups", "n_columns"), [(9, 1), (25, 2), (40, 3)])
def test_a_long_legend_has_columns_and_every_group_a_colour(
    embedded: ad.AnnData, monkeypatch: pytest.MonkeyPatch, n_groups: int, n_columns: int
) -> None:
    import scanpy as sc

    for name in ("pp.neighbors", "tl.umap"):
        room, function = name.split(".")
        monkeypatch.setattr(getattr(sc, room), function, lambda work, **_: work.obsm.update(X_umap=np.zeros((60, 2))))
    embedded.obs["many"] = [f"group {i % n_groups:02d}" for i in range(60)]
    (ax,) = embeddings(embedded, ["X_one"], color="many")
    assert ax.get_legend()._ncols == n_columns
    assert len({tuple(collection.get_facecolor()[0]) for collection in ax.collections}) == n_groups
