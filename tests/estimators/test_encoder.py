"""The front class: set-up, training, embedding, going on with scanpy."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scanpy as sc
import torch
from lightning.pytorch.callbacks import Callback
from scipy import sparse

from scforge.data import GeneVocab
from scforge.errors import NotTrainedWarning, OptionError, TrainingError
from scforge.estimators import Encoder, ScDiVa
from scforge.models import list_models
from scforge.models.registry import MODELS
from scforge.tokenizers import ContinuousProjectionTokenizer, list_tokenizers, register_tokenizer
from scforge.tokenizers.registry import TOKENIZERS
from scforge.training.loggers import TableLogger
from scforge.training.objectives import list_objectives


def weights(model: Encoder) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


class Modes(Callback):
    """Notes whether the module is in training mode, and whether dropout drops anything."""

    def __init__(self) -> None:
        self.training: list[bool] = []
        self.differ: list[bool] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.training.append(pl_module.module.training)
        with torch.no_grad():
            first, second = pl_module.module.encode(**batch), pl_module.module.encode(**batch)
        self.differ.append(not torch.equal(first, second))


def test_the_loop_of_the_readme(model: Encoder, tiny_adata: ad.AnnData, tmp_path) -> None:
    embedding = model.get_latent_representation()
    assert embedding.shape == (60, 4)
    assert embedding.dtype == np.float32
    assert np.isfinite(embedding).all()
    assert embedding.std(axis=0).min() > 0
    np.testing.assert_array_equal(tiny_adata.obsm["X_scforge"], embedding)
    sc.pp.neighbors(tiny_adata, use_rep="X_scforge", n_neighbors=5)
    tiny_adata.write_h5ad(tmp_path / "result.h5ad")
    again = ad.read_h5ad(tmp_path / "result.h5ad")
    np.testing.assert_array_equal(again.obsm["X_scforge"], embedding)
    provenance = again.uns["scforge"]["X_scforge"]
    assert provenance["architecture"] == "gene_pooling"
    assert provenance["objective"] == "neighbor_denoising"
    assert provenance["vocab_hash"] == model.vocab.hash
    assert bool(provenance["is_trained"]) is True
    assert int(provenance["n_epochs"]) == 2
    assert 0 < float(provenance["counts_kept"]) < 1
    assert float(provenance["gene_overlap"]) == 1


@pytest.mark.filterwarnings("ignore:.*n_jobs value.*:UserWarning")  # umap, whenever it is seeded
def test_scanpy_draws_the_result(model: Encoder, tiny_adata: ad.AnnData, tmp_path) -> None:
    import matplotlib.pyplot as plt

    model.get_latent_representation()
    sc.pp.neighbors(tiny_adata, use_rep="X_scforge", n_neighbors=5)
    sc.tl.umap(tiny_adata)
    sc.pl.umap(tiny_adata, color="group", show=False)
    plt.savefig(tmp_path / "umap.png")
    plt.close("all")
    assert tiny_adata.obsm["X_umap"].shape == (60, 2)
    assert (tmp_path / "umap.png").stat().st_size > 1000


def test_it_learns(build, quick, tiny_adata: ad.AnnData) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    model = build()
    model.train(**(quick | {"max_epochs": 60, "validation_size": 0.0}))
    loss = model.history["train_loss"]["train_loss"]
    # Half the logarithm of the error, the most of which is noise of counting.
    assert loss.iloc[-1] < loss.iloc[0] - 0.1
    embedding, group = model.get_latent_representation(), tiny_adata.obs["group"]
    knn = KNeighborsClassifier(5).fit(embedding[:40], group[:40])
    assert knn.score(embedding[40:], group[40:]) > 0.9


def test_an_untrained_model_says_so(build) -> None:
    model = build()
    with pytest.warns(NotTrainedWarning, match="not trained"):
        model.get_latent_representation()
    assert not model.is_trained_
    assert model.adata.uns["scforge"]["X_scforge"]["is_trained"] is False


def test_key_added(model: Encoder, tiny_adata: ad.AnnData) -> None:
    before = set(tiny_adata.obsm)
    model.get_latent_representation(key_added=None)
    assert set(tiny_adata.obsm) == before
    assert "scforge" not in tiny_adata.uns
    model.get_latent_representation(key_added="X_mine")
    assert tiny_adata.obsm["X_mine"].shape == (60, 4)
    assert set(tiny_adata.uns["scforge"]) == {"X_mine"}


def test_what_stands_in_adata_is_kept(model: Encoder, tiny_adata: ad.AnnData) -> None:
    tiny_adata.uns["scforge"] = {"mine": 1}
    tiny_adata.obs["scforge"] = "text"
    tiny_adata.obsm["X_pca"] = np.zeros((60, 2))
    model.get_latent_representation()
    assert tiny_adata.uns["scforge"]["mine"] == 1
    assert set(tiny_adata.uns["scforge"]) == {"mine", "X_scforge"}
    assert (tiny_adata.obs["scforge"] == "text").all()
    assert "X_pca" in tiny_adata.obsm


def test_training_changes_neither_counts_nor_global_random_state(tiny_adata: ad.AnnData, trained) -> None:
    before, obs = tiny_adata.X.copy(), list(tiny_adata.obs)
    np.random.seed(5)
    torch.manual_seed(5)
    numpy_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    trained().get_latent_representation()
    assert (before != tiny_adata.X).nnz == 0
    assert tiny_adata.X.dtype == before.dtype
    assert list(tiny_adata.obs) == obs
    assert list(tiny_adata.var) == ["ensembl", "length"]
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)
    assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.mark.parametrize("architecture", [None, "transformer_encoder"])
def test_seeds(architecture, tiny_adata: ad.AnnData, trained) -> None:
    def embedding(seed: int, noise: int) -> np.ndarray:
        torch.manual_seed(noise)
        np.random.seed(noise)
        model = trained(architecture, adata=tiny_adata.copy(), seed=seed, dropout=0.2)
        return model.get_latent_representation()

    first = embedding(0, 1)
    np.testing.assert_array_equal(first, embedding(0, 2))
    assert np.abs(first - embedding(1, 1)).max() > 1e-3


def test_a_second_training_goes_on(build, quick) -> None:
    model = build(dropout=0.5)
    modes = Modes()
    model.train(**quick)
    assert not model.module.training
    model.get_latent_representation()
    before = weights(model)
    model.train(**(quick | {"max_epochs": 3}), callbacks=[modes])
    assert modes.training
    assert all(modes.training)
    assert all(modes.differ), "dropout is not active in the second training"
    assert not same(before, weights(model))
    assert model.n_epochs_ == 5
    loss = model.history["train_loss"]
    assert loss.index.tolist() == [0, 1, 2, 3, 4]
    assert loss.index.name == "epoch"
    first, second = model.get_latent_representation(), model.get_latent_representation()
    np.testing.assert_array_equal(first, second)


def test_a_second_training_draws_new_views_on_the_same_split(trained, quick) -> None:
    model = trained()
    split = model.validation_indices_.copy()
    model.train(**quick)
    np.testing.assert_array_equal(model.validation_indices_, split)
    assert not np.intersect1d(model.train_indices_, model.validation_indices_).size
    assert len(model.train_indices_) + len(model.validation_indices_) == 60
    losses = model.history["train_loss"]["train_loss"]
    assert losses.nunique() == 4


def test_checkpoints_of_a_second_training_go_on_with_the_numbers(build, quick, tmp_path) -> None:
    model = build()
    for _ in range(2):
        model.train(**quick, checkpoint_dir=tmp_path, save_top_k=-1)
    epochs = sorted(tmp_path.glob("epoch=*"))
    assert [path.name for path in epochs] == ["epoch=00", "epoch=01", "epoch=02", "epoch=03"]
    assert [Encoder.load(path).n_epochs_ for path in epochs] == [1, 2, 3, 4]
    assert len(list(tmp_path.glob("step=*"))) == 1


def test_the_best_epoch_is_kept(build, quick, tmp_path) -> None:
    model = build()
    model.train(**(quick | {"max_epochs": 8, "lr": 0.5}), early_stopping=False, checkpoint_dir=tmp_path, save_top_k=-1)
    loss = model.history["validation_loss"]["validation_loss"]
    assert loss.argmin() != 7, "the test needs a training that gets worse"
    assert same(weights(model), weights(Encoder.load(tmp_path / f"epoch={loss.argmin():02d}")))
    assert not same(weights(model), weights(Encoder.load(tmp_path / "epoch=07")))


def test_inference_does_not_look_at_the_other_cells(model: Encoder, tiny_adata: ad.AnnData) -> None:
    whole = model.get_latent_representation(key_added=None)
    for rows in (np.arange(5), np.array([59, 3, 17]), np.array([8])):
        part = model.get_latent_representation(tiny_adata[rows].copy(), key_added=None)
        np.testing.assert_allclose(part, whole[rows], atol=1e-6)
    np.testing.assert_allclose(model.get_latent_representation(key_added=None, batch_size=7), whole, atol=1e-6)


@pytest.mark.parametrize("architecture", [None, "transformer_encoder"])
def test_genes_are_matched_by_name(architecture, trained, tiny_adata: ad.AnnData) -> None:
    model = trained(architecture)
    whole = model.get_latent_representation(key_added=None)
    order = np.random.default_rng(3).permutation(80)
    shuffled = tiny_adata[:, order].copy()
    np.testing.assert_allclose(model.get_latent_representation(shuffled, key_added=None), whole, atol=1e-6)
    more = ad.concat([tiny_adata, ad.AnnData(np.zeros((60, 5)), obs=tiny_adata.obs)], axis=1)
    np.testing.assert_allclose(model.get_latent_representation(more, key_added=None), whole, atol=1e-6)


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.toarray(),
        lambda x: x.tocsc(),
        lambda x: x.astype(np.int64),
        lambda x: x.astype(np.uint16),
        lambda x: x.astype(np.float64),
        lambda x: x.toarray().astype(np.float16),
    ],
    ids=["dense", "csc", "int64", "uint16", "float64", "float16"],
)
def test_any_matrix_of_counts_gives_the_same(convert, trained, tiny_adata: ad.AnnData) -> None:
    reference = trained(adata=tiny_adata.copy()).get_latent_representation()
    tiny_adata.X = convert(tiny_adata.X)
    kind, dtype = type(tiny_adata.X), tiny_adata.X.dtype
    np.testing.assert_array_equal(trained().get_latent_representation(), reference)
    assert isinstance(tiny_adata.X, kind)
    assert tiny_adata.X.dtype == dtype


def test_counts_in_a_layer(trained, tiny_adata: ad.AnnData) -> None:
    reference = trained(adata=tiny_adata.copy()).get_latent_representation()
    tiny_adata.layers["counts"] = tiny_adata.X.copy()
    sc.pp.normalize_total(tiny_adata)
    sc.pp.log1p(tiny_adata)
    np.testing.assert_array_equal(trained(setup={"layer": "counts"}).get_latent_representation(), reference)


@pytest.mark.parametrize("n_cells", [1, 3])
def test_very_few_cells(n_cells: int, build, quick, tiny_adata: ad.AnnData) -> None:
    few = tiny_adata[:n_cells].copy()
    model = build(adata=few, vocab=GeneVocab.from_adata(few), n_top_genes=0)
    model.train(**quick)
    embedding = model.get_latent_representation()
    assert embedding.shape == (n_cells, 4)
    assert np.isfinite(embedding).all()


@pytest.mark.parametrize("architecture", [None, "transformer_encoder"])
def test_identical_cells(architecture, trained, tiny_adata: ad.AnnData) -> None:
    tiny_adata.X = sparse.csr_matrix(np.repeat(tiny_adata.X.toarray()[:1], 60, axis=0))
    embedding = trained(architecture, n_top_genes=0).get_latent_representation()
    np.testing.assert_allclose(embedding, np.repeat(embedding[:1], 60, axis=0), atol=1e-5)


def test_more_genes_asked_for_than_there_are(build) -> None:
    assert build(n_top_genes=5_000).vocab.n_genes == 80


def test_repr_names_what_one_can_pass(build, trained) -> None:
    for model in (trained(), trained("transformer_encoder")):
        text = repr(model)
        name, tokenizer, objective = (
            text.split("(", 1)[1].split(",")[0],
            text.split("tokenizer: ")[1].split()[0],
            text.split("objective: ")[1].split()[0],
        )
        assert name in list_models()
        assert tokenizer in list_tokenizers()
        assert objective in list_objectives()
        assert "trained for 2 epochs" in text
        assert "60 cells" in text
        build(name, tokenizer, objective)
    assert "not trained" in repr(build())


def test_view_anndata_setup_prints(model: Encoder, capsys) -> None:
    model.view_anndata_setup()
    shown = capsys.readouterr().out
    assert "Encoder.setup_anndata" in shown
    assert "adata.X" in shown
    assert "group" in shown


def test_a_custom_architecture(custom_architecture: str, trained, tiny_adata: ad.AnnData, tmp_path) -> None:
    model = trained(custom_architecture, hidden_dim=16, num_layers=1)
    assert "my_pooling" in repr(model)
    embedding = model.get_latent_representation()
    assert embedding.shape == (60, 16)
    assert len(model.module.layers) == 1
    model.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model", tiny_adata)
    np.testing.assert_allclose(again.get_latent_representation(), embedding, atol=1e-6)


def test_an_architecture_without_encode_is_told_and_one_that_sets_it_later_is_not(tiny_adata, monkeypatch) -> None:
    class Bare(torch.nn.Module):
        def __init__(self, vocab_size: int, hidden_dim: int = 8) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(vocab_size, hidden_dim)

        @classmethod
        def from_config(cls, config):
            return cls(config.vocab_size)

    class Set(Bare):
        def __init__(self, vocab_size: int, hidden_dim: int = 8) -> None:
            super().__init__(vocab_size, hidden_dim)
            self.encode = self.forward = lambda input_ids, attention_mask, **kwargs: self.embedding(input_ids).mean(1)

    monkeypatch.setattr(MODELS, "_entries", MODELS._entries | {"bare": Bare, "set": Set})
    Encoder.setup_anndata(tiny_adata)
    with pytest.raises(OptionError, match="architecture='bare' is .*Bare, which does not define 'encode', 'forward'"):
        Encoder(tiny_adata, "bare", n_top_genes=0)
    assert isinstance(Encoder(tiny_adata, "set", n_top_genes=0).module, Set)


class Means(torch.nn.Module):
    """What the architectures below have in common."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 8)

    @classmethod
    def from_config(cls, config):
        return cls(config.vocab_size)

    def encode(self, input_ids, attention_mask, values=None, **kwargs):
        return self.embedding(input_ids).mean(1)

    def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
        return self.encode(input_ids, attention_mask).sum(), None


class NoKwargs(Means):
    def encode(self, input_ids, attention_mask, values=None):
        return self.embedding(input_ids).mean(1)


class OneProfile(Means):
    def forward(self, profile, **kwargs):
        return profile


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (
            NoKwargs,
            r"encode of NoKwargs takes no \*\*kwargs; write it as encode\(self, input_ids, attention_mask, values=",
        ),
        (OneProfile, "forward of OneProfile needs 'profile', which it may not be given; write it as forward"),
    ],
)
def test_methods_that_cannot_be_called_are_told_before_training(tiny_adata, monkeypatch, architecture, message) -> None:
    monkeypatch.setattr(MODELS, "_entries", MODELS._entries | {"own": architecture})
    Encoder.setup_anndata(tiny_adata)
    with pytest.raises(OptionError, match=message):
        Encoder(tiny_adata, "own", n_top_genes=0)


def test_a_forward_that_returns_a_tuple_is_told(tiny_adata, monkeypatch) -> None:
    monkeypatch.setattr(MODELS, "_entries", MODELS._entries | {"own": Means})
    Encoder.setup_anndata(tiny_adata)
    model = Encoder(tiny_adata, "own", tokenizer="rank_value", objective="masked_gene_prediction", n_top_genes=0)
    with pytest.raises(
        TrainingError, match=r"Means.forward returned a tuple; let it return scforge.models.ModelOutput"
    ):
        model.train(1, progress_bar=False)


def test_a_custom_tokenizer(trained, tiny_adata: ad.AnnData, tmp_path) -> None:
    @register_tokenizer("every_second_gene")
    class EverySecondGene(ContinuousProjectionTokenizer):
        def __init__(self, vocab, *, max_len=None, append_cls=True, offset=0) -> None:
            super().__init__(vocab, max_len=max_len, append_cls=append_cls)
            self.offset = offset

        def _tokenize(self, block):
            tokens = super()._tokenize(block)
            keep = tokens.ids % 2 == self.offset
            kept = np.concatenate([[0], np.cumsum(keep)])
            return tokens._replace(indptr=kept[tokens.indptr], ids=tokens.ids[keep], values=tokens.values[keep])

    try:
        model = trained(None, {"name": "every_second_gene", "offset": 1})
        embedding = model.get_latent_representation()
        model.save(tmp_path / "model")
        again = Encoder.load(tmp_path / "model", tiny_adata)
        assert again.tokenizer.offset == 1
        np.testing.assert_allclose(again.get_latent_representation(), embedding, atol=1e-6)
        other = trained(None, {"name": "every_second_gene", "offset": 0})
        assert np.abs(other.get_latent_representation(key_added=None) - embedding).max() > 1e-3
    finally:
        TOKENIZERS._entries.pop("every_second_gene")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("trainer", "Encoder has no trainer; the scores of a training are in model.history"),
        ("prepare_query_anndata", "genes are matched by name, call load_query_data"),
        ("get_normalized_expression", "make a scforge.models.ScDiVa"),
        ("differential_abundance", "compute it with another package"),
        ("posterior_predictive_sample", "which scvi.criticism needs"),
    ],
)
def test_what_only_scvi_tools_has_says_what_to_do(model: Encoder, name: str, instead: str) -> None:
    assert name not in dir(model)
    assert name not in dir(Encoder)
    for owner in (model, Encoder):
        with pytest.raises(AttributeError, match=instead):
            getattr(owner, name)
    assert "get_normalized_expression" in dir(ScDiVa)
    assert "train" in dir(Encoder)


def test_some_cells_are_embedded_and_nothing_is_written(model: Encoder) -> None:
    model.adata.obsm.clear()
    whole = model.get_latent_representation(key_added=None)
    some = model.get_latent_representation(indices=[3, 0])
    np.testing.assert_allclose(some, whole[[3, 0]], atol=1e-6)
    of_mask = model.get_latent_representation(indices=np.arange(len(whole)) < 2)
    np.testing.assert_allclose(of_mask, whole[:2], atol=1e-6)
    assert "X_scforge" not in model.adata.obsm
    with pytest.raises(OptionError, match="indices are no positions of the 60 cells"):
        model.get_latent_representation(indices=[10_000])


def test_a_model_in_a_notebook(model: Encoder) -> None:
    shown = model._repr_html_()
    assert shown.startswith("<b>Encoder(gene_pooling, ")
    assert ">labels_key=&#x27;group&#x27;<" in shown


def test_what_autotune_of_scvi_tools_asks_for(build, quick: dict) -> None:
    seen = []

    class Reports(Callback):
        def on_validation_end(self, trainer, pl_module) -> None:
            seen.append(float(trainer.callback_metrics["validation_loss"]))

    options = {"accelerator": "auto", "devices": "auto", "check_val_every_n_epoch": 1, "enable_progress_bar": False}
    del quick["accelerator"], quick["progress_bar"]
    build().train(**quick, **options, logger=TableLogger("logs"), callbacks=[Reports()])
    assert len(seen) == 2
