from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from scforge.data import GeneVocab, open_cells, select_genes
from scforge.data.store import StoreCells
from scforge.errors import GeneMismatchError, OptionError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.training import CellDataModule

LIGHT = {"n_top_genes": 40, "hidden_dim": 8, "ffn_dim": 8, "latent_dim": 4}
TRANSFORMER = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "ffn_dim": 16}
QUICK = {"max_epochs": 1, "progress_bar": False, "accelerator": "cpu"}


@pytest.fixture
def data(store: Path) -> Callable[..., CellDataModule]:
    return lambda **options: CellDataModule(store, **({"batch_size": 64} | options))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [None, "transformer_encoder"])
def test_train_embed_save_load(data, store, many_adata: ad.AnnData, tmp_path, architecture) -> None:
    made = data(batch_key="donor", labels_key="group", split_by="donor")
    model = Encoder(None, architecture, datamodule=made, **(LIGHT if architecture is None else TRANSFORMER))
    if architecture is not None:
        np.testing.assert_array_equal(model.vocab.medians, StoreCells.open(store).vocab.medians)
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    assert "700 cells" in repr(model)
    assert model.adata is None
    model.train(**QUICK)
    assert any(not value.equal(before[name]) for name, value in model.module.state_dict().items())
    assert (model.is_trained_, model.n_epochs_) == (True, 1)
    assert model.validation_indices_.tolist() == made.validation_rows.tolist()
    embedding = model.get_latent_representation()
    assert embedding.shape == (700, 4 if architecture is None else 8)
    place = many_adata.obs_names.get_indexer(StoreCells.open(store).names())
    adata = many_adata.copy()
    np.testing.assert_allclose(model.get_latent_representation(adata)[place], embedding, atol=1e-5)
    np.testing.assert_array_equal(adata.obsm["X_scforge"][place], model.get_latent_representation(adata)[place])
    model.save(tmp_path / "model")
    loaded = Encoder.load(tmp_path / "model")
    for source in (store, str(store), StoreCells.open(store), open_cells(store, obs=[])):
        np.testing.assert_allclose(loaded.get_latent_representation(source), embedding, atol=1e-6)
    remembered = {"layer": None, "gene_key": None, "batch_key": "donor", "labels_key": "group"}
    assert model.registry_["setup_args"] == loaded.registry_["setup_args"] == remembered
    with pytest.raises(OptionError, match="loaded without adata"):
        loaded.get_latent_representation()
    again = Encoder.load(tmp_path / "model", many_adata.copy())
    np.testing.assert_allclose(again.get_latent_representation()[place], embedding, atol=1e-5)


def test_a_loaded_model_is_trained_on(data, tmp_path) -> None:
    made = data()
    model = Encoder(datamodule=made, **LIGHT)
    model.train(**QUICK)
    model.save(tmp_path / "model")
    loaded = Encoder.load(tmp_path / "model")
    with pytest.raises(OptionError, match=r"pass adata to Encoder\.load, or datamodule to train"):
        loaded.train(**QUICK)
    more = data()
    loaded.train(datamodule=more, **QUICK)
    assert loaded.n_epochs_ == len(loaded.history["validation_loss"]) == 2
    assert more.first_epoch == 1
    other = Encoder(datamodule=made, **(LIGHT | {"n_top_genes": 60}))  # a data module serves one after the other
    other.train(**QUICK)
    assert other.get_latent_representation().shape == (700, 4)
    model.train(**QUICK)
    np.testing.assert_allclose(loaded.get_latent_representation(), model.get_latent_representation(), atol=1e-5)


def test_genes_are_chosen_from_training_cells(data, store, many_adata, monkeypatch) -> None:
    model = Encoder(datamodule=data(), **LIGHT)
    trained = many_adata[StoreCells.open(store).names()[model.datamodule.train_rows]].copy()
    assert set(model.vocab.genes) == set(select_genes(trained, n_top_genes=40).genes)
    sampled, sample = [], StoreCells.sample

    def spy(self, n, *, rows=None, seed=0):
        some = sample(self, n, rows=rows, seed=seed)
        sampled.append((n, len(some.obs), set(some.obs.index) <= set(rows)))
        return some

    monkeypatch.setattr(StoreCells, "sample", spy)
    monkeypatch.setattr("scforge.estimators.spec.SAMPLED_CELLS", 300)
    assert Encoder(datamodule=data(), **LIGHT).vocab.n_genes == 40
    assert set(sampled) == {(300, 300, True)}
    assert Encoder(datamodule=data(), **(LIGHT | {"n_top_genes": 0})).vocab == StoreCells.open(store).vocab


def test_a_vocabulary_of_its_own(data, store, many_adata, tmp_path) -> None:
    options = LIGHT | {"n_top_genes": None}
    vocab = GeneVocab.from_genes([f"gene{i}" for i in range(60, 10, -1)])
    vocab.save(tmp_path / "v.json")
    for given in (vocab, str(tmp_path / "v.json")):
        model = Encoder(datamodule=data(), vocab=given, **options)
        assert model.vocab.genes == vocab.genes
    model.train(**QUICK)
    place = many_adata.obs_names.get_indexer(StoreCells.open(store).names())
    found = model.get_latent_representation(many_adata.copy(), key_added=None)
    np.testing.assert_allclose(model.get_latent_representation(), found[place], atol=1e-5)
    with pytest.raises(GeneMismatchError):
        Encoder(datamodule=data(), vocab="human_protein_coding")
    few = GeneVocab.from_genes([f"gene{i}" for i in range(20)] + [f"other{i}" for i in range(40)])
    with pytest.warns(ScforgeWarning, match="has 20 of the 60 genes"):
        Encoder(datamodule=data(), vocab=few, **options)
    half = many_adata[:50, :58].copy()
    half.write_h5ad(tmp_path / "half.h5ad")
    memory = model.get_latent_representation(half, key_added=None)
    np.testing.assert_allclose(model.get_latent_representation(str(tmp_path / "half.h5ad")), memory, atol=1e-6)


def test_arguments_that_do_not_go_together(data, tiny_adata) -> None:
    Encoder.setup_anndata(tiny_adata)
    model = Encoder(datamodule=data(), **LIGHT)
    for message, call in (
        ("adata and datamodule both contain cells", lambda: Encoder(tiny_adata, datamodule=data())),
        (r"datamodule is of type 'str'; pass a .*CellDataModule", lambda: Encoder(datamodule="store.zarr")),
        (
            "batch_size=8 cannot be changed .*; pass batch_size to CellDataModule",
            lambda: model.train(**QUICK, batch_size=8),
        ),
        ("requires random batches", lambda: Encoder(datamodule=data(max_tokens_per_batch=500), **LIGHT).train(**QUICK)),
        ("save_anndata=True", lambda: model.save("model", save_anndata=True)),
    ):
        with pytest.raises(OptionError, match=message) as told:
            call()
        assert "\n" not in str(told.value)
