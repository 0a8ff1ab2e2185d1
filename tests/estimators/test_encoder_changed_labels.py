"""Labels that are corrected, renamed or removed after fine-tuning, and columns of every type in a whole workflow."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.cli import main
from scforge.data import open_cells
from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.models import Encoder
from scforge.testing import raises
from scforge.training import CellDataModule

QUICK = {"max_epochs": 1, "progress_bar": False, "accelerator": "cpu"}


@pytest.fixture(scope="module")
def trained(module_adata):
    Encoder.setup_anndata(module_adata)
    model = Encoder(module_adata, objective={"name": "joint_embedding", "views": 2, "slices": 16}, latent_dim=8)
    model.train(**QUICK)
    return model


@pytest.fixture(scope="module")
def module_adata():
    rng = np.random.default_rng(0)
    counts = rng.poisson(1 + 4 * (np.arange(40) % 2 == (np.arange(160) % 2)[:, None]), size=(160, 40))
    adata = ad.AnnData(counts.astype(np.float32), obs=pd.DataFrame(index=[f"cell{i}" for i in range(160)]))
    adata.var_names = [f"G{i}" for i in range(40)]
    adata.obs["kind"] = np.array(["a", "b"])[np.arange(160) % 2]
    adata.obs["age"] = np.arange(160) % 2 * 10 + rng.normal(size=160)
    return adata


def test_labels_that_changed_are_scored_where_they_are_known(trained, module_adata, tmp_path, capsys):
    adata = module_adata.copy()
    annotator = trained.finetune("annotation", adata, labels_key="kind", test_size=0.3, **QUICK)
    annotator.save(tmp_path / "annotator")
    changed = adata.obs["kind"].astype(object)
    changed.iloc[::8], changed.iloc[1::8] = np.nan, "B cell"
    adata.obs["kind"] = changed
    with pytest.warns(ScforgeWarning) as told:
        table = annotator.evaluate(adata)
    texts = [str(one.message) for one in told]
    test = changed.iloc[annotator.test_indices_]
    n_new, n_missing = int((test == "B cell").sum()), int(test.isna().sum())
    n_scored = len(test) - n_new - n_missing
    assert (
        f"labels_key='kind': {n_new} cells have labels that the model does not know ('B cell') and {n_missing} cells "
        f"have no label; {n_scored} of {len(test)} cells are scored." in texts
    )
    assert any(
        "training cells no longer have a known value; baselines are fitted on the others" in one for one in texts
    )
    assert (table["n_scored"] == n_scored).all()
    assert table.notna().all(axis=None)
    adata.write_h5ad(tmp_path / "changed.h5ad")
    files = [str(tmp_path / name) for name in ("changed.h5ad", "annotator", "scores.csv")]
    assert main(["evaluate", files[0], "-m", files[1], "--trained-on", files[0], "-o", files[2]]) == 0
    assert "Traceback" not in capsys.readouterr().err
    adata.obs["kind"] = "B cell"
    with pytest.raises(DataError, match="has no value that the model predicts in any of the"):
        annotator.evaluate(adata)


def test_a_regression_is_scored_without_the_cells_that_lack_a_number(trained, module_adata):
    adata = module_adata.copy()
    tuned = trained.finetune("regression", adata, labels_key="age", test_size=0.3, **QUICK)
    adata.obs.iloc[::4, adata.obs.columns.get_loc("age")] = np.nan
    n_missing = int(adata.obs["age"].iloc[tuned.test_indices_].isna().sum())
    with pytest.warns(ScforgeWarning, match=f"{n_missing} cells have no label|no longer have a known value"):
        table = tuned.evaluate(adata)
    assert (table["n_unlabeled"] == n_missing).all()
    assert np.isfinite(table["mae"]).all()


def test_an_annotator_that_is_trained_again_continues_at_a_low_learning_rate(trained, module_adata, tmp_path):
    annotator = trained.finetune("annotation", module_adata, labels_key="kind", **QUICK)
    annotator.save(tmp_path / "annotator")
    rates = []

    def watch(**options):
        from lightning.pytorch.callbacks import Callback

        class Watch(Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                rates.append(trainer.optimizers[0].param_groups[0]["lr"])

        rates.clear()
        loaded = Encoder.load(tmp_path / "annotator", module_adata)
        loaded.train(**QUICK, callbacks=[Watch()], batch_size=16, **options)
        return max(rates)

    peak = annotator.objective.defaults.lr
    assert watch() == pytest.approx(0.1 * peak)
    assert min(rates) == max(rates)
    assert watch(lr=2e-3) == pytest.approx(2e-3)
    assert watch(schedule="cosine") == pytest.approx(peak)


MIXED = {
    "mixed": pd.Series([1, "a", True, 2.0] * 40, dtype=object),
    "negative": pd.Series([-1, 3, -1, 2] * 40),
    "half": pd.Series([0, 1, 2, 0] * 40, dtype="float16"),
    "days": pd.Series(pd.to_datetime(["2024-01-01", "2024-01-02"] * 80)),
    "spans": pd.Series(pd.to_timedelta([1, 2] * 80, unit="D")),
    "periods": pd.Series(pd.PeriodIndex(["2024-01", "2024-02"] * 80, freq="M")),
    "fractions": pd.Series([0.5, 1.5] * 80).astype("category"),
    "nullable": pd.Series([1, 2] * 80, dtype="Int64"),
}


@pytest.mark.parametrize("name", MIXED)
def test_columns_of_every_type_are_batches_labels_and_groups(trained, module_adata, name):
    adata = module_adata.copy()
    adata.obs["x"] = MIXED[name].set_axis(adata.obs_names)
    adata.obs["donor"] = adata.obs["x"]
    Encoder.setup_anndata(adata, batch_key="x", labels_key="x")
    model = Encoder(adata, objective={"name": "joint_embedding", "views": 2, "slices": 16}, latent_dim=8)
    assert model.adata is adata
    task = trained.finetune("annotation", adata, labels_key="x", **QUICK).objective
    n_classes = {"mixed": 4, "negative": 3, "half": 3}  # all others have two values
    assert len(task.known_classes) == n_classes.get(name, 2)
    CellDataModule(open_cells(adata, trained.vocab), split_by="x")


def test_lists_are_refused_in_one_sentence(trained, module_adata):
    adata = module_adata.copy()
    adata.obs["x"] = pd.Series([[1], {"a": 2}] * 80, index=adata.obs_names)
    for call in (
        lambda: Encoder.setup_anndata(adata, batch_key="x"),
        lambda: trained.finetune("annotation", adata, labels_key="x", **QUICK),
        lambda: trained.transfer_labels(adata, reference=adata, labels_key="x"),
    ):
        with pytest.raises(DataError, match="='x' contains values of type 'list', which have no unique text"):
            call()


def test_names_with_a_slash_are_refused_before_anything_is_computed(trained, module_adata):
    adata = module_adata.copy()
    adata.obs["a/b"] = adata.obs["kind"]
    calls = {
        "labels_key": lambda: trained.finetune("annotation", adata, labels_key="a/b", **QUICK),
        "key_added": lambda: trained.get_latent_representation(adata, key_added="a/b"),
    }
    for argument, call in calls.items():
        with pytest.raises(OptionError, match=f"{argument}='a/b' contains a slash, which h5ad files do not allow"):
            call()
    with raises(OptionError, "labels_key"):
        trained.transfer_labels(adata, reference=adata, labels_key="a/b")
    with raises(OptionError, "key_added"):
        trained.impute(adata, key_added="")


def test_big_endian_counts_and_views_of_files(trained, module_adata, tmp_path):
    expected = trained.get_latent_representation(module_adata.copy())
    swapped = module_adata.copy()
    swapped.X = swapped.X.astype(">f4")
    np.testing.assert_array_equal(trained.get_latent_representation(swapped), expected)
    Encoder.setup_anndata(swapped)
    module_adata.write_h5ad(tmp_path / "cells.h5ad")
    backed = ad.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    view = backed[:, ::-1]
    with raises(DataError, "adata"):
        trained.get_latent_representation(view)
    np.testing.assert_allclose(
        trained.get_latent_representation(backed.to_memory()[:, ::-1].copy()), expected, atol=1e-6
    )


def test_a_device_without_a_driver_is_one_sentence(trained):
    with raises(OptionError, "device"):
        trained.to_device("cuda:99")
