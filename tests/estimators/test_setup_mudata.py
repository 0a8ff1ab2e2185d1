import anndata as ad
import mudata as md
import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, GeneMismatchError, NotTrainedWarning, OptionError
from scforge.estimators import Encoder
from scforge.testing import raises

LIGHT = {"n_top_genes": 40, "hidden_dim": 8, "ffn_dim": 8, "latent_dim": 4}


@pytest.fixture
def mdata(tiny_adata: ad.AnnData) -> md.MuData:
    """RNA and protein; protein was measured in fewer cells, in another order, and donors stand in mdata.obs only."""
    generator = np.random.default_rng(3)
    obs = pd.DataFrame(index=tiny_adata.obs_names[:9:-1])
    protein = ad.AnnData(generator.lognormal(size=(50, 4)).astype(np.float32), obs=obs)
    protein.var_names = [f"protein{i}" for i in range(4)]
    whole = md.MuData({"rna": tiny_adata, "protein": protein})
    whole.obs["donor"] = pd.Categorical(np.where(np.arange(60) < 30, "d1", "d2"))
    return whole


def again(mdata: md.MuData, path) -> md.MuData:
    mdata.write(path)
    return md.read(path)


def test_training_on_a_modality_is_training_on_an_anndata(mdata, tiny_adata, quick, tmp_path):
    plain = tiny_adata.copy()
    plain.obs["donor"] = mdata.obs["donor"]
    Encoder.setup_anndata(plain, labels_key="group", batch_key="donor")
    expected = Encoder(plain, **LIGHT)
    expected.train(**quick)
    Encoder.setup_mudata(mdata, modality="rna", labels_key="rna:group", batch_key="donor")
    model = Encoder(mdata, **LIGHT)
    model.train(**quick)
    assert model.adata is mdata.mod["rna"]
    embedding = model.get_latent_representation()
    np.testing.assert_array_equal(embedding, expected.get_latent_representation())
    np.testing.assert_array_equal(model.get_latent_representation(mdata), embedding)
    np.testing.assert_array_equal(model.get_latent_representation(plain), embedding)
    mdata.update()
    fresh = again(mdata, tmp_path / "a.h5mu")
    for data in (mdata, fresh):
        np.testing.assert_array_equal(data.mod["rna"].obsm["X_scforge"], embedding)
    model.save(tmp_path / "model")
    del fresh.mod["rna"].obs["donor"]
    loaded = Encoder.load(tmp_path / "model", fresh)
    np.testing.assert_allclose(loaded.get_latent_representation(), embedding, atol=1e-6)
    assert fresh.mod["rna"].obs["donor"].tolist() == mdata.obs["donor"].tolist()
    loaded.train(**quick)
    loaded.save(tmp_path / "model2")
    copied = again(mdata, tmp_path / "b.h5mu")
    del copied.mod["rna"].obsm["X_scforge"]
    assert Encoder.load(tmp_path / "model2").get_latent_representation(copied).shape == (60, 4)
    assert "X_scforge" in copied.mod["rna"].obsm


def test_columns_come_from_either_table(mdata, quick):
    for key in ("donor", "rna:donor"):
        Encoder.setup_mudata(mdata, batch_key=key)
        assert mdata.mod["rna"].obs["donor"].tolist() == mdata.obs["donor"].tolist()
        assert Encoder(mdata, **LIGHT).registry["setup_args"]["batch_key"] == "donor"
    mdata.mod["protein"].X = np.ones((50, 4), dtype=np.float32)
    Encoder.setup_mudata(mdata, "protein", labels_key="donor")
    found = mdata.mod["protein"].obs["donor"]
    assert found.tolist() == mdata.obs.loc[found.index, "donor"].tolist()
    Encoder.setup_mudata(mdata, "rna", labels_key="rna:group")
    with pytest.warns(NotTrainedWarning, match="fine-tuning starts from random weights"):
        Encoder(mdata, **LIGHT).finetune("annotation", **quick).predict(mdata)
    assert "scforge_group" in mdata.mod["rna"].obs


def test_a_model_keeps_to_its_modality(mdata, quick):
    Encoder.setup_mudata(mdata, "rna")
    model = Encoder(mdata, **LIGHT)
    model.train(**quick)
    mdata.mod["protein"].X = np.ones((50, 4), dtype=np.float32)
    Encoder.setup_mudata(mdata, "protein")
    assert Encoder(mdata, hidden_dim=8, ffn_dim=8, latent_dim=4).adata is mdata.mod["protein"]
    assert model.get_latent_representation(mdata).shape == (60, 4)
    other = md.MuData({"gex": mdata.mod["rna"].copy()})
    with raises(OptionError, "modality"):
        model.get_latent_representation(other)
    Encoder.setup_mudata(other, "gex")
    assert model.get_latent_representation(other).shape == (60, 4)
    with pytest.raises(GeneMismatchError):
        model.get_latent_representation(mdata.mod["protein"])


def test_what_cannot_be_set_up(mdata, tiny_adata):
    with raises(OptionError, "mdata"):
        Encoder(mdata)
    for data, arguments, error, message in [
        (mdata, {"modality": "RNA"}, OptionError, "modality='RNA' is not in 'mdata'; did you mean 'rna'"),
        (mdata, {"batch_key": "doner"}, DataError, "batch_key='doner' is not in .* or mdata.obs; did you mean 'donor'"),
        (mdata, {"layer": "raw"}, DataError, "modality='rna': layer='raw' is not in adata.layers"),
        (tiny_adata, {}, OptionError, "mdata is of type 'AnnData'; call setup_anndata"),
        (mdata[:20], {}, DataError, "mdata is a view"),
    ]:
        with pytest.raises(error, match=message):
            Encoder.setup_mudata(data, **arguments)
    with raises(OptionError, "adata"):
        Encoder.setup_anndata(mdata)
    Encoder.setup_mudata(mdata)
    with raises(OptionError, "mdata"):
        Encoder(mdata.copy())
