import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scanpy as sc

from scforge.errors import DataError, OptionError
from scforge.eval import Report
from scforge.eval.report import Row, write_scores
from scforge.pl import embeddings, integration
from scforge.testing import raises

# umap-learn says so whenever it is seeded.
pytestmark = pytest.mark.filterwarnings("ignore:.*n_jobs value.*:UserWarning")


@pytest.fixture
def embedded(tiny_adata: ad.AnnData) -> ad.AnnData:
    generator = np.random.default_rng(0)
    for key in ("X_one", "X_two"):
        tiny_adata.obsm[key] = generator.normal(size=(60, 4)).astype(np.float32)
    return tiny_adata


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take random coordinates for UMAP, which is compiled for long."""
    monkeypatch.setattr(sc.pp, "neighbors", lambda work, **_: None)
    places = np.random.default_rng(1).normal(size=(120, 2))
    monkeypatch.setattr(sc.tl, "umap", lambda work, **_: work.obsm.update(X_umap=places[: work.n_obs]))


def test_a_row_of_panels_per_column_with_a_legend_each(embedded: ad.AnnData, quick, texts) -> None:
    embedded.obs["half"] = np.where(np.arange(60) < 30, "first", "second")
    axes = embeddings(embedded, ["X_one", "X_two"], color=["group", "half"])
    assert [ax.get_title() for ax in axes] == ["X_one", "X_two"] * 2
    assert [ax.get_legend() is None for ax in axes] == [True, False, True, False]
    assert set(texts(axes[3].get_legend().get_texts())) == {"first", "second"}


def test_each_group_has_a_color_and_cells_without_a_label_are_gray(embedded: ad.AnnData, quick, texts) -> None:
    embedded.obs.loc[["cell0", "cell1"], "group"] = np.nan
    axes = embeddings(embedded, {"X_one": "the first", "X_two": "the second"}, color="group")
    assert [ax.get_title() for ax in axes] == ["the first", "the second"]
    for ax, key in zip(axes, ("X_one", "X_two"), strict=True):
        drawn = [points for points in ax.collections if len(points.get_offsets())]
        places = np.concatenate([points.get_offsets() for points in drawn])
        colors = np.concatenate([points.get_facecolor() for points in drawn])
        of_place = {tuple(place): tuple(color) for place, color in zip(places.round(6), colors, strict=True)}
        found = pd.Series([of_place[tuple(place)] for place in embedded.obsm[f"{key}_umap"].round(6)])
        groups = found.groupby(embedded.obs["group"].astype(object).fillna("no label").to_numpy())
        assert groups.nunique().tolist() == [1, 1, 1]
        assert found.nunique() == 3
    assert axes[0].get_legend() is None
    assert set(texts(axes[1].get_legend().get_texts())) == {"a", "b", "NA"}
    assert list(embedded.uns) == [], "what scanpy writes stays in a copy"
    (ax,) = embeddings(embedded, "X_one", color="group")
    assert ax.get_title() == "X_one"


@pytest.mark.slow
def test_a_umap_is_of_the_embedding_as_it_is_and_neighbors_stay(embedded: ad.AnnData) -> None:
    embedded.obsm["X_one"][:30] += 20
    embeddings(embedded, ["X_one"], color="group", n_neighbors=5)
    computed = embedded.obsm["X_one_umap"]
    assert computed.shape == (60, 2)
    centers = computed[:30].mean(axis=0), computed[30:].mean(axis=0)
    assert np.linalg.norm(centers[0] - centers[1]) > 2 * computed[:30].std()
    assert "neighbors" not in embedded.uns
    assert "connectivities" not in embedded.obsp
    embedded.obsm["X_one"] = embedded.obsm["X_one"][::-1].copy()
    embeddings(embedded, ["X_one"], color="group", n_neighbors=5)
    assert not np.allclose(embedded.obsm["X_one_umap"], computed)


def bars(ax: plt.Axes) -> list[plt.Axes]:
    """Return the color bars of the figure."""
    return [one for one in ax.figure.axes if one.get_label() == "<colorbar>"]


def test_numbers_and_genes_get_a_color_bar(embedded: ad.AnnData, quick) -> None:
    embedded.obs["score"] = np.linspace(0, 1, 60)
    embedded.obs["size"] = pd.array(np.arange(60), dtype="Int64")
    gene = embedded.var_names[0]
    axes = embeddings(embedded, ["X_one", "X_two"], color=["score", "size", gene])
    assert [ax.get_legend() for ax in axes] == [None] * 6
    assert [bar.get_ylabel() for bar in bars(axes[0])] == ["score", "size", gene]
    counts = np.asarray(embedded[:, gene].X.sum(axis=1)).ravel()
    shown = np.concatenate([np.ma.getdata(points.get_array()) for points in axes[4].collections])
    assert sorted(shown) == sorted(counts)


def test_numbers_of_clusters_and_booleans_get_a_legend_of_those_that_occur(embedded: ad.AnnData, quick, texts) -> None:
    embedded.obs["cluster"] = np.arange(60) % 3
    embedded.obs["is_first"] = np.arange(60) < 1
    embedded.obs["group"] = embedded.obs["group"].astype(pd.CategoricalDtype(["a", "b", "never"]))
    axes = embeddings(embedded, "X_one", color=["cluster", "is_first", "group"])
    assert not bars(axes[0])
    legends = [set(texts(ax.get_legend().get_texts())) for ax in axes]
    assert legends == [{"0", "1", "2"}, {"True", "False"}, {"a", "b"}]


@pytest.mark.parametrize("n_cells", [1, 2, 3, 4])
def test_a_few_cells_are_plotted_by_principal_components(embedded: ad.AnnData, n_cells: int) -> None:
    few = embedded[:n_cells].copy()
    (ax,) = embeddings(few, "X_one", color="group")
    assert few.obsm["X_one_umap"].shape == (n_cells, 2)
    assert np.isfinite(few.obsm["X_one_umap"]).all()
    assert ax.get_xlabel() == "PC1"


@pytest.mark.slow
def test_fewer_cells_than_neighbors(embedded: ad.AnnData) -> None:
    few = embedded[:5].copy()
    (ax,) = embeddings(few, "X_one", color="group")
    assert (few.obsm["X_one_umap"].shape, ax.get_xlabel()) == ((5, 2), "UMAP1")


def test_mistakes(embedded: ad.AnnData) -> None:
    with raises(DataError, "color"):
        embeddings(embedded, ["X_one"], color="grupo")
    with raises(DataError, "obsm_keys"):
        embeddings(embedded, ["X_on"], color="group")
    assert not plt.get_fignums()


def test_entries_that_matplotlib_hides_and_long_names(embedded) -> None:
    names = ["_hidden", "x" * 300, "b"]
    embedded.obs["odd"] = [names[i % 3] for i in range(embedded.n_obs)]
    (ax,) = embeddings(embedded, "X_one", color="odd")
    found = [entry.get_text() for entry in ax.get_legend().get_texts()]
    assert [name.lstrip("\u200b")[:5] for name in sorted(found)] == ["b", "xxxxx", "_hidd"]
    assert max(map(len, found)) == 60


def test_more_values_than_a_legend_can_show(embedded, monkeypatch) -> None:
    monkeypatch.setattr("scforge.pl.umap._MOST_ENTRIES", 20)
    embedded.obs["many"] = [f"type {i}" for i in range(embedded.n_obs)]
    (ax,) = embeddings(embedded, "X_one", color="many")
    assert ax.get_legend() is None
    assert ax.get_title() == f"X_one, many: {embedded.n_obs} values"


KEYS = {"batch_key": "batch", "labels_key": "group"}
SCORES = pd.DataFrame({"bio": [0.9, 0.8], "batch": [0.5, np.nan], "total": [0.74, np.nan]}, index=["X_one", "two"])


def test_integration_has_a_row_per_column_and_the_scores_of_each_embedding(embedded: ad.AnnData, quick, texts) -> None:
    embedded.obs["batch"] = np.arange(60) % 30  # too many for a legend of numbers
    axes = integration(embedded, {"X_one": "before $", "X_two": "after"}, report=SCORES, **KEYS)
    above = ["before $, total 0.74\nbatch correction 0.50", "after", "bio conservation 0.90", "bio conservation 0.80"]
    assert [ax.get_title() for ax in axes] == above
    assert [ax.get_ylabel() for ax in axes] == ["batch", "", "group", ""]
    legends = [set(texts(ax.get_legend().get_texts())) for ax in axes[1::2]]
    assert legends == [{str(code) for code in range(30)}, {"a", "b"}]
    axes[0].figure.canvas.draw()


def test_integration_reads_the_scores_that_evaluate_writes(embedded: ad.AnnData, quick) -> None:
    report = Report("of an embedding")
    report.add(Row("X_one", "baseline", {"accuracy": 0.1}, benchmark="probe"))
    report.add(Row("X_one", "baseline", {"bio": 0.9, "batch": 0.5, "total": 0.74}, benchmark="scib"))
    write_scores(embedded, "report", report.to_frame())
    scored = ["X_one, total 0.74\nbatch correction 0.50", "bio conservation 0.90"]
    assert [ax.get_title() for ax in integration(embedded, "X_one", **KEYS)] == scored
    assert [ax.get_title() for ax in integration(embedded, "X_two", **KEYS)] == ["X_two", ""]
    report.add(Row("X_one", "baseline", {"bio": 0.2}, benchmark="nuclei"))
    with raises(OptionError, "benchmark"):
        integration(embedded, "X_one", report=report, **KEYS)
    axes = integration(embedded, "X_one", report=report, benchmark="nuclei", **KEYS)
    assert [ax.get_title() for ax in axes] == ["X_one", "bio conservation 0.20"]


@pytest.mark.slow
def test_integration_leaves_the_cells_alone(embedded: ad.AnnData) -> None:
    embedded.obsm["X_umap"], embedded.uns["neighbors"] = np.ones((60, 2)), {"params": {"n_neighbors": 3}}
    embedded.obsm["X"] = embedded.obsm["X_one"]
    before = embedded.copy()
    integration(embedded, ["X", "X_one"], **KEYS)
    assert list(embedded.obsm) == list(before.obsm)
    assert (embedded.obsm["X_umap"] == 1).all()
    assert (embedded.uns, list(embedded.obsp)) == (before.uns, [])
    pd.testing.assert_frame_equal(embedded.obs, before.obs)


def test_mistakes_of_integration(embedded: ad.AnnData) -> None:
    for changed, message in (
        ({"batch_key": "bach"}, r"batch_key='bach' is not in adata.obs; did you mean 'batch'\?"),
        ({"labels_key": "grup"}, r"labels_key='grup' is not in adata.obs; did you mean 'group'\?"),
        ({"obsm_keys": ["X_one", "X_tow"]}, r"obsm_keys='X_tow' is not in adata.obsm; did you mean 'X_two'\?"),
        ({"report": SCORES.rename(index=str.upper)}, r"report has no scIB scores of 'X_one'; name its rows by these"),
        ({"report": SCORES[[]].assign(f1=1.0)}, "report has no scIB scores of 'X_one'"),
    ):
        with pytest.raises(DataError, match=message):
            integration(embedded, **({"obsm_keys": "X_one"} | KEYS | changed))
    assert not plt.get_fignums()
