"""``get_latent_representation(correction=)`` and what it needs of a model."""

import anndata as ad
import numpy as np
import pytest
import torch

from scforge.errors import ModelFileError, OptionError, ScforgeWarning
from scforge.models import Encoder, ScDiVa
from scforge.testing import raises
from scforge.training.correction import BatchCorrection
from scforge.workflows import embed_to


@pytest.fixture
def cells(tiny_adata: ad.AnnData) -> ad.AnnData:
    tiny_adata.obs["donor"] = tiny_adata.obs["batch"].map({"x": "a", "y": "b"})
    return tiny_adata


@pytest.fixture
def integrated(trained, cells) -> Encoder:
    return trained(adata=cells, setup={"batch_key": "donor"})


def test_the_correction_is_a_dial_that_is_off_by_default(integrated, cells):
    off, half, whole = (integrated.get_latent_representation(key_added=None, correction=share) for share in (0, 0.5, 1))
    assert np.array_equal(off, integrated.get_latent_representation())
    assert cells.uns["scforge"]["X_scforge"]["correction"] == 0
    assert not np.allclose(off, whole, atol=1e-3)
    np.testing.assert_allclose(half, (off + whole) / 2, atol=1e-6)
    integrated.get_latent_representation(correction=1)
    assert np.array_equal(cells.obsm["X_scforge"], whole)
    assert cells.uns["scforge"]["X_scforge"]["correction"] == 1


def test_a_loaded_model_and_embed_give_the_same_numbers(integrated, cells, tmp_path):
    before = integrated.get_latent_representation(key_added=None, correction=1)
    integrated.save(tmp_path / "model")
    loaded = Encoder.load(tmp_path / "model")
    assert np.array_equal(loaded.get_latent_representation(cells, key_added=None, correction=1), before)
    some = loaded.get_latent_representation(cells, indices=[5, 3], correction=1)
    np.testing.assert_allclose(some, before[[5, 3]], atol=1e-5)
    for place in ("embedded.h5ad", "embedded.zarr"):
        embed_to(loaded, cells, tmp_path / place, correction=1, block_size=7, progress_bar=False)
    found = ad.read_h5ad(tmp_path / "embedded.h5ad")
    np.testing.assert_allclose(found.obsm["X_scforge"], before, atol=1e-5)
    assert found.uns["scforge"]["X_scforge"]["correction"] == 1
    assert np.array_equal(ad.read_zarr(tmp_path / "embedded.zarr").obsm["X_scforge"], found.obsm["X_scforge"])


def test_training_further_fits_it_anew(integrated, cells, quick):
    before = integrated.fitted.correction
    integrated.train(**quick)
    assert integrated.fitted.correction is not before


def test_cells_of_other_batches_are_scaled_and_named(integrated, cells):
    other = cells.copy()
    other.obs["donor"] = ["a", "new"] * (other.n_obs // 2)
    with pytest.warns(ScforgeWarning, match="30 of 60 cells have no batch among .*new: 'new'"):
        found = integrated.get_latent_representation(other, key_added=None, correction=1)
    assert np.isfinite(found).all()
    some = integrated.get_latent_representation(other, indices=[0, 2], correction=1)  # these have, so no warning
    assert np.isfinite(some).all()
    other.obs["donor"] = [None, "b"] * (other.n_obs // 2)
    with pytest.warns(ScforgeWarning, match="30 of 60 cells have no batch among those of the training cells and"):
        found = integrated.get_latent_representation(other, key_added=None, correction=1)
    assert np.isfinite(found).all()


def test_a_query_that_is_mapped_is_scaled_like_its_reference(integrated, cells, tmp_path):
    query = cells[:20].copy()
    query.obs["donor"] = "c"
    model = Encoder.load_query_data(query, integrated)
    found = model.get_latent_representation(key_added=None, correction=1)
    assert not np.allclose(found, model.get_latent_representation(key_added=None), atol=1e-3)
    model.save(tmp_path / "query")
    loaded = Encoder.load(tmp_path / "query", query)
    assert np.array_equal(loaded.get_latent_representation(key_added=None, correction=1), found)


@pytest.mark.parametrize("correction", [-0.1, 1.5, "all", True])
def test_correction_is_a_share(integrated, correction):
    with raises(OptionError, "correction"):
        integrated.get_latent_representation(correction=correction)


def test_models_without_batches_say_so(trained, cells, tmp_path):
    model = trained(adata=cells)
    with raises(OptionError, "correction"):
        model.get_latent_representation(correction=1)
    with raises(OptionError, "correction"):
        embed_to(model, cells, tmp_path / "embedded.h5ad", correction=0.5)
    assert not (tmp_path / "embedded.h5ad").exists()
    cells.obs["donor"] = "one"
    with raises(OptionError, "correction"):
        trained(adata=cells, setup={"batch_key": "donor"}).get_latent_representation(correction=1)


def test_cells_without_the_column_say_so(integrated, cells):
    other = cells.copy()
    del other.obs["donor"]
    with raises(OptionError, "correction"):
        integrated.get_latent_representation(other, correction=1)


@pytest.mark.filterwarnings("ignore::scforge.errors.ScforgeWarning")
def test_a_batch_of_one_cell(trained, cells):
    cells.obs["donor"] = ["alone", *["other"] * 59]
    model = trained(adata=cells, setup={"batch_key": "donor"})
    assert np.isfinite(model.get_latent_representation(correction=1)).all()


def test_variances_cannot_be_corrected(cells, quick):
    ScDiVa.setup_anndata(cells, batch_key="donor")
    model = ScDiVa(cells, hidden_dim=8, num_layers=1, num_heads=2, latent_dim=4)
    model.train(**quick)
    with raises(OptionError, "correction"):
        model.get_latent_representation(return_dist=True, correction=1)


def test_an_output_with_other_batches_is_another_embedding(integrated, cells, tmp_path):
    embed_to(integrated, cells, tmp_path / "embedded.h5ad", correction=1, progress_bar=False)
    assert embed_to(integrated, cells, tmp_path / "embedded.h5ad", correction=1, progress_bar=False).n_embedded == 0
    cells.obs["donor"] = cells.obs["donor"].map({"a": "b", "b": "a"})
    with pytest.raises(OptionError, match="other cells or from another model"):
        embed_to(integrated, cells, tmp_path / "embedded.h5ad", correction=1, progress_bar=False)


def test_cells_that_are_set_up_without_batches_have_those_of_the_model(integrated, cells):
    other = cells.copy()
    Encoder.setup_anndata(other)
    found = integrated.get_latent_representation(other, key_added=None, correction=1)
    np.testing.assert_allclose(found, integrated.get_latent_representation(key_added=None, correction=1), atol=1e-5)


def test_queries_of_a_saved_annotator_are_corrected(trained, cells, quick, tmp_path):
    model = trained(adata=cells, setup={"batch_key": "donor", "labels_key": "group"})
    annotator = model.finetune("annotation", max_epochs=1, progress_bar=False, accelerator="cpu")
    with raises(OptionError, "correction"):
        annotator.get_latent_representation(correction=1)
    query = cells[:20].copy()
    query.obs["donor"] = "c"
    before = Encoder.load_query_data(query, annotator).get_latent_representation(key_added=None, correction=1)
    annotator.save(tmp_path / "annotator")
    after = Encoder.load_query_data(query, Encoder.load(tmp_path / "annotator"))
    assert np.array_equal(after.get_latent_representation(key_added=None, correction=1), before)


@pytest.mark.parametrize("damage", ["short", "flat", "wide", "double", "infinite", "names", "missing"])
def test_damage_is_found(integrated, damage):
    tensors, batches = integrated.fitted.correction.tensors(), list(integrated.fitted.correction.batches)
    changes = {
        "short": {"shifts": tensors["shifts"][:1]},
        "flat": {"centroids": tensors["centroids"].flatten()},
        "wide": {"centroids": torch.zeros(0, 2**40)},  # allocates nothing
        "double": {"center": tensors["center"].double()},
        "infinite": {"scaling": tensors["scaling"] * np.inf},
    }
    damaged = tensors | changes.get(damage, {})
    if damage == "missing":
        del damaged["center"]
    batches = [batches[0]] * 2 if damage == "names" else batches
    with pytest.raises(ModelFileError):
        BatchCorrection.of_tensors(damaged, batches, source="folder")
