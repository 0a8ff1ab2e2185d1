import anndata as ad
import numpy as np
import pytest
import scanpy as sc
import torch

import scforge.eval.baselines as room
from scforge.errors import DataError, OptionError
from scforge.eval import embedding_baselines, pca_embedding
from scforge.eval.baselines import check_baselines
from scforge.testing import raises


def gap(embedding: np.ndarray, adata: ad.AnnData, key: str) -> float:
    """Distance between the means of the first two values of a column, in standard deviations of all cells."""
    values = adata.obs[key].astype(str)
    first, second = (embedding[(values == value).to_numpy()].mean(axis=0) for value in sorted(set(values)))
    return float(np.linalg.norm(first - second) / np.linalg.norm(embedding.std(axis=0)))


@pytest.fixture
def shifted(tiny_adata: ad.AnnData) -> ad.AnnData:
    """The tiny data, with some genes of batch "x" three times as high."""
    counts = tiny_adata.X.toarray()
    counts[:30, 20:50] *= 3
    tiny_adata.layers["counts"] = counts
    tiny_adata.obs["site"] = np.tile([1, 1, 2], 20)
    return tiny_adata


@pytest.mark.parametrize(("scale", "batch_key"), [(False, None), (True, None), (False, "batch")])
def test_components_are_what_scanpy_computes(tiny_adata: ad.AnnData, scale: bool, batch_key: str | None) -> None:
    before = tiny_adata.copy()
    embedding = pca_embedding(tiny_adata, n_comps=5, n_top_genes=50, scale=scale, batch_key=batch_key)
    work = ad.AnnData(tiny_adata.X.copy(), obs=tiny_adata.obs, var=tiny_adata.var[[]])
    sc.pp.filter_genes(work, min_cells=3)
    sc.pp.normalize_total(work, target_sum=1e4)
    sc.pp.log1p(work)
    sc.pp.highly_variable_genes(work, n_top_genes=50, batch_key=batch_key)
    work = work[:, work.var["highly_variable"]].copy()
    if scale:
        work.X = work.X.toarray()
        sc.pp.scale(work, max_value=10)
    sc.pp.pca(work, n_comps=5, random_state=0)
    assert embedding.dtype == np.float32
    np.testing.assert_allclose(np.abs(embedding), np.abs(work.obsm["X_pca"]), atol=1e-4)
    assert (tiny_adata.X != before.X).nnz == 0
    assert list(tiny_adata.obsm) == []
    assert list(tiny_adata.var) == list(before.var)


def test_each_is_what_it_says(shifted) -> None:
    names = ["hvg", "pca", "pca_scaled", "harmony", "random", 3]
    options = {"n_comps": 5, "n_top_genes": 40, "layer": "counts", "seed": 1, "batch_key": "batch"}
    found = embedding_baselines(shifted, names, **options)
    assert list(found) == [*names[:5], "PCA, 3 components", "PCA of scaled genes, 3 components"]
    assert [embedding.shape[1] for embedding in found.values()] == [40, 5, 5, 5, 5, 3, 3]
    assert all(embedding.dtype == np.float32 and len(embedding) == 60 for embedding in found.values())
    work = ad.AnnData(shifted.layers["counts"].copy(), obs=shifted.obs[["batch"]].astype(str).astype("category"))
    sc.pp.normalize_total(work, target_sum=1e4)
    sc.pp.log1p(work)
    sc.pp.highly_variable_genes(work, n_top_genes=40, batch_key="batch")
    np.testing.assert_allclose(found["hvg"], work.X[:, work.var["highly_variable"]], rtol=1e-5)
    np.testing.assert_array_equal(found["pca"], pca_embedding(shifted, **options))
    np.testing.assert_array_equal(found["pca_scaled"], pca_embedding(shifted, scale=True, **options))
    assert abs(found["random"].mean()) < 0.2
    assert found["random"].std() == pytest.approx(1, abs=0.1)
    # Harmony brings the batches together, and the groups stay apart.
    assert gap(found["harmony"], shifted, "batch") < gap(found["pca"], shifted, "batch") / 3
    assert gap(found["harmony"], shifted, "group") > 1
    by_number = embedding_baselines(shifted, ["harmony"], batch_key="site", n_comps=5)
    assert by_number["harmony"].shape == (60, 5), "batches may be numbers"


def test_scvi_with_and_without_batches(shifted, monkeypatch) -> None:
    import scvi

    train, given = scvi.model.SCVI.train, []
    monkeypatch.setattr(scvi.model.SCVI, "train", lambda self, *a, **k: given.append((self, a)) or train(self, *a, **k))
    options = {"layer": "counts", "scvi_max_epochs": 2, "n_top_genes": 30}
    batches = {"batch_key": "batch"}
    first, again, other, without = (
        embedding_baselines(shifted, ["scvi"], **options, **some)["scvi"]
        for some in (batches, batches, {**batches, "seed": 1}, {})
    )
    np.testing.assert_array_equal(first, again)
    assert first.shape == without.shape == (60, 10)
    assert not np.allclose(first, other)
    models, epochs = zip(*given, strict=True)
    assert epochs == ((2,),) * 4
    assert [model.summary_stats["n_batch"] for model in models] == [2, 2, 2, 1]
    assert models[0].adata.n_vars == 30
    assert models[0].adata.X.sum() % 1 == 0
    assert len(models[0].validation_indices) == 6
    assert sorted([*models[0].validation_indices, *models[0].train_indices]) == list(range(60))


def test_scvi_warms_up_and_keeps_its_best_epoch(shifted, monkeypatch) -> None:
    """Weights of an epoch before the KL term has its weight do not count, however low their ELBO."""
    import scvi

    # The lowest of all comes before the end of warm-up, and the lowest after it is not the last.
    best, seen, elbos = room._best_epoch, [], [1.0, 9.0, 5.0, 3.0, 7.0, 8.0, 9.0, 9.0]

    def spied(warm_up: int, **options):
        made = best(warm_up, **options)
        ended = made.on_validation_end

        def on_validation_end(trainer, plan) -> None:
            trainer.callback_metrics["elbo_validation"] = torch.tensor(elbos[len(seen)])
            ended(trainer, plan)
            weights = {name: value.clone() for name, value in plan.module.state_dict().items()}
            seen.append((float(plan.kl_weight), weights))

        made.on_validation_end = on_validation_end
        return made

    monkeypatch.setattr(room, "_best_epoch", spied)
    train, models = scvi.model.SCVI.train, []
    monkeypatch.setattr(scvi.model.SCVI, "train", lambda self, *a, **k: models.append(self) or train(self, *a, **k))
    room.scvi_embedding(shifted, n_top_genes=30, max_epochs=8)
    assert [weight for weight, _ in seen] == [0.0, 0.5, *[1.0] * 6]
    for name, value in models[0].module.state_dict().items():
        torch.testing.assert_close(value, seen[3][1][name])
    assert any((seen[3][1][name] != seen[7][1][name]).any() for name in seen[3][1])


def test_components_are_no_more_than_the_genes_that_are_left(shifted) -> None:
    few = shifted.copy()
    few.X = few.X.toarray()
    few.X[2:, 6:] = 0
    few.X[:, :6] += 1
    found = embedding_baselines(few, ["pca", "harmony", "random"], batch_key="batch")
    assert {embedding.shape for embedding in found.values()} == {(60, 5)}
    with raises(OptionError, "n_comps"):
        embedding_baselines(few, [10])


def test_labels_are_not_looked_at_and_the_data_are_not_changed(shifted) -> None:
    options = {"batch_key": "batch", "scvi_max_epochs": 1}
    found = embedding_baselines(shifted, ["pca", "harmony", "scvi"], **options)
    assert not shifted.obsm
    shifted.obs["group"] = "one"
    for name, embedding in embedding_baselines(shifted, list(found), **options).items():
        np.testing.assert_array_equal(embedding, found[name])


@pytest.mark.parametrize(
    ("names", "options", "argument"),
    [
        (
            ["harmoni"],
            {},
            "baselines",
        ),
        ("pca", {}, "baselines"),
        (["harmony"], {}, "baselines"),
        ([60], {}, "n_comps"),
        ([0], {}, "baselines"),
        (["pca"], {"n_comps": 0}, "n_comps"),
    ],
)
def test_bad_options(tiny_adata, names, options, argument) -> None:
    with raises(OptionError, argument):
        embedding_baselines(tiny_adata, names, **options)


def test_bad_data(tiny_adata) -> None:
    with raises(DataError, "batch_key"):
        check_baselines(tiny_adata, ["scvi"], batch_key="bach")
    tiny_adata.obs["batch"] = tiny_adata.obs["batch"].astype(str)
    with raises(DataError, "obs"):
        check_baselines(tiny_adata[:20], ["harmony"], batch_key="batch")
    check_baselines(tiny_adata[:20], ["scvi"], batch_key="batch")
    tiny_adata.obs.iloc[3, 1] = None
    with raises(DataError, "obs"):
        check_baselines(tiny_adata, ["scvi"], batch_key="batch")
    with pytest.raises(DataError, match="2 cells with 80 genes are too few"):
        check_baselines(tiny_adata[:2], ["pca"])
