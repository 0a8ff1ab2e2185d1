import random
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import torch
from lightning.pytorch.callbacks import LambdaCallback
from scipy import sparse

from scforge.data import GeneVocab, open_cells, select_genes
from scforge.errors import DataError, GeneMismatchError, NotTrainedWarning, OptionError, TrainingError
from scforge.estimators import Encoder, ScDiVa
from scforge.estimators.setup import setup_of
from scforge.models import list_models
from scforge.models.registry import MODELS
from scforge.tokenizers import ContinuousProjectionTokenizer, list_tokenizers, register_tokenizer
from scforge.tokenizers.base import TOKENIZERS
from scforge.training.monitoring import TableLogger
from scforge.training.objectives import list_objectives


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
    expected = {"architecture": "gene_pooling", "objective": "neighbor_denoising", "vocab_hash": model.vocab.hash}
    expected |= {"is_trained": True, "n_epochs": 2, "gene_overlap": 1}
    assert {name: provenance[name] for name in expected} == expected
    assert 0 < float(provenance["counts_kept"]) < 1


def test_it_learns(build, quick, tiny_adata: ad.AnnData) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    model = build()
    model.train(**(quick | {"max_epochs": 60, "validation_size": 0.0}))
    loss = model.history["train_loss"]["train_loss"]
    assert loss.iloc[-1] < loss.iloc[0] - 0.1
    embedding, group = model.get_latent_representation(), tiny_adata.obs["group"]
    knn = KNeighborsClassifier(5).fit(embedding[:40], group[:40])
    assert knn.score(embedding[40:], group[40:]) > 0.9


def test_key_added(build, quick, tiny_adata: ad.AnnData) -> None:
    model = build()
    with pytest.warns(NotTrainedWarning, match="not trained"):
        model.get_latent_representation(key_added=None)
    assert not model.is_trained_
    assert not tiny_adata.obsm
    assert "scforge" not in tiny_adata.uns
    tiny_adata.uns["scforge"] = {"mine": 1}
    tiny_adata.obsm["X_pca"] = np.zeros((60, 2))
    with pytest.warns(NotTrainedWarning, match="not trained"):
        model.get_latent_representation(key_added="X_mine")
    assert tiny_adata.uns["scforge"]["X_mine"]["is_trained"] is False
    model.train(**quick)
    model.get_latent_representation()
    assert set(tiny_adata.uns["scforge"]) == {"mine", "X_mine", "X_scforge"}
    assert set(tiny_adata.obsm) == {"X_pca", "X_mine", "X_scforge"}


def test_training_changes_neither_counts_nor_global_random_state(tiny_adata: ad.AnnData, trained) -> None:
    before = tiny_adata.copy()
    np.random.seed(5)
    torch.manual_seed(5)
    numpy_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    trained().get_latent_representation()
    assert (before.X != tiny_adata.X).nnz == 0
    assert tiny_adata.X.dtype == before.X.dtype
    assert (list(tiny_adata.obs), list(tiny_adata.var)) == (list(before.obs), list(before.var))
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
    model, modes = build(dropout=0.5), []
    model.train(**quick)
    assert not model.module.training
    model.get_latent_representation()
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    split = model.validation_indices_.copy()
    looks = LambdaCallback(on_train_batch_start=lambda trainer, plan, *_: modes.append(plan.module.training))
    model.train(**(quick | {"max_epochs": 3}), callbacks=[looks])
    assert modes
    assert all(modes), "dropout is not active in the second training"
    assert not all(value.equal(before[name]) for name, value in model.module.state_dict().items())
    assert model.n_epochs_ == 5
    loss = model.history["train_loss"]
    assert (loss.index.tolist(), loss.index.name) == ([0, 1, 2, 3, 4], "epoch")
    assert loss["train_loss"].nunique() == 5, "the same views are drawn again"
    np.testing.assert_array_equal(model.get_latent_representation(), model.get_latent_representation())
    np.testing.assert_array_equal(model.validation_indices_, split)
    assert sorted([*model.train_indices_, *split]) == list(range(60))


def test_checkpoints_of_a_second_training_go_on_with_the_numbers(build, quick, tmp_path) -> None:
    model = build()
    for _ in range(2):
        model.train(**quick, checkpoint_dir=tmp_path, save_top_k=-1)
    epochs = sorted(tmp_path.glob("epoch=*"))
    assert [path.name for path in epochs] == ["epoch=00", "epoch=01", "epoch=02", "epoch=03"]
    assert [Encoder.load(path).n_epochs_ for path in epochs] == [1, 2, 3, 4]
    assert len(list(tmp_path.glob("step=*"))) == 1


def test_inference_does_not_look_at_the_other_cells(model: Encoder, tiny_adata: ad.AnnData) -> None:
    whole = model.get_latent_representation(key_added=None)
    for rows in (np.arange(5), np.array([59, 3, 17]), np.array([8])):
        part = model.get_latent_representation(tiny_adata[rows].copy(), key_added=None)
        np.testing.assert_allclose(part, whole[rows], atol=1e-6)
    np.testing.assert_allclose(model.get_latent_representation(key_added=None, batch_size=7), whole, atol=1e-6)
    for some in ([3, 0], np.arange(60) < 2):
        np.testing.assert_allclose(model.get_latent_representation(indices=some), whole[some], atol=1e-6)
    with pytest.raises(OptionError, match="indices are not valid positions of 60 cells"):
        model.get_latent_representation(indices=[10_000])


@pytest.mark.parametrize("form", [np.asarray, sparse.csc_matrix, partial(np.asarray, dtype=np.float16), "layer"])
def test_any_matrix_of_counts_gives_the_same(form, trained, tiny_adata: ad.AnnData) -> None:
    reference = trained(adata=tiny_adata.copy()).get_latent_representation()
    if form == "layer":
        tiny_adata.layers["counts"] = tiny_adata.X.copy()
        sc.pp.normalize_total(tiny_adata)
    else:
        tiny_adata.X = form(tiny_adata.X.toarray())
    kind, dtype = type(tiny_adata.X), tiny_adata.X.dtype
    model = trained(setup={"layer": "counts"} if form == "layer" else {})
    np.testing.assert_array_equal(model.get_latent_representation(), reference)
    assert (type(tiny_adata.X), tiny_adata.X.dtype) == (kind, dtype)


@pytest.mark.parametrize("rows", [[0], [0, 1, 2], [0] * 60], ids=["one cell", "three cells", "identical cells"])
def test_cells_of_little_information(rows: list[int], build, quick, tiny_adata: ad.AnnData) -> None:
    few = ad.AnnData(tiny_adata.X[rows], var=tiny_adata.var)
    for architecture in (None, "transformer_encoder"):
        model = build(architecture, adata=few, vocab=GeneVocab.from_adata(few), n_top_genes=0)
        model.train(**quick)
        embedding = model.get_latent_representation()
        assert embedding.shape == (len(rows), 4 if architecture is None else 8)
        assert np.isfinite(embedding).all()
        if len(rows) == 60:
            np.testing.assert_allclose(embedding, np.repeat(embedding[:1], 60, axis=0), atol=1e-5)


def test_repr_names_what_one_can_pass(build, trained, model: Encoder, capsys) -> None:
    for made in (trained(), trained("transformer_encoder")):
        text = repr(made)
        name = text.split("(", 1)[1].split(",")[0]
        tokenizer, objective = (text.split(f"{part}: ")[1].split()[0] for part in ("tokenizer", "objective"))
        assert name in list_models()
        assert tokenizer in list_tokenizers()
        assert objective in list_objectives()
        assert "trained for 2 epochs" in text
        build(name, tokenizer, objective)
        assert len(text.splitlines()) <= 5
        assert "dropout=" not in text, "a default"
        assert "dropout=" in made._repr_html_()
    assert "tokenizer: rank_value (max_len=7)" in repr(
        build("transformer_encoder", {"name": "rank_value", "max_len": 7})
    )
    assert "not trained" in repr(build(n_top_genes=5_000))
    model.view_anndata_setup()
    assert "adata.X" in capsys.readouterr().out
    assert ">labels_key=&#x27;group&#x27;<" in model._repr_html_()


class Bare(torch.nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 8)

    @classmethod
    def from_config(cls, config):
        return cls(config.vocab_size)


class SetsLater(Bare):
    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.encode = self.forward = lambda input_ids, attention_mask, **kwargs: self.embedding(input_ids).mean(1)


class Means(Bare):
    def encode(self, input_ids, attention_mask, values=None, **kwargs):
        return self.embedding(input_ids).mean(1)

    def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
        return self.encode(input_ids, attention_mask).sum(), None


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (Bare, "architecture='own' is .*Bare, which lacks 'encode', 'forward'"),
        (Means, r"Means.forward returned a tuple; return scforge.models.ModelOutput"),
    ],
)
def test_architectures_that_are_none(build, quick, monkeypatch, architecture, message) -> None:
    monkeypatch.setitem(MODELS._entries, "own", architecture)
    monkeypatch.setitem(MODELS._entries, "set", SetsLater)
    with pytest.raises((OptionError, TrainingError), match=message):
        build("own", "rank_value", "masked_gene_prediction").train(**quick)
    assert isinstance(build("set").module, SetsLater)


def test_a_custom_tokenizer(trained, tiny_adata: ad.AnnData, tmp_path, request) -> None:
    request.addfinalizer(lambda: TOKENIZERS._entries.pop("every_second_gene"))

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

    model, other = (trained(None, {"name": "every_second_gene", "offset": offset}) for offset in (1, 0))
    embedding = model.get_latent_representation()
    assert np.abs(other.get_latent_representation(key_added=None) - embedding).max() > 1e-3
    model.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model", tiny_adata)
    assert again.tokenizer.offset == 1
    np.testing.assert_allclose(again.get_latent_representation(), embedding, atol=1e-6)


def test_a_custom_tokenizer_without_the_option_max_len(build, tmp_path, request) -> None:
    request.addfinalizer(lambda: TOKENIZERS._entries.pop("first_genes"))

    @register_tokenizer("first_genes")
    class FirstGenes(ContinuousProjectionTokenizer):
        def __init__(self, vocab, *, k=9) -> None:
            super().__init__(vocab, max_len=k)
            self.k = k

    build("transformer_encoder", "first_genes").save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model")
    assert (again.tokenizer.k, again.spec.model_options["max_seq_len"]) == (9, 9)


def test_what_only_scvi_tools_has_says_what_to_do(model: Encoder, build: Callable[..., Encoder]) -> None:
    for name, instead in (
        ("trainer", "Encoder has no trainer; use model.history for the training metrics"),
        ("get_normalized_expression", "use scforge.models.ScDiVa"),
        ("posterior_predictive_sample", "that scvi.criticism requires"),
        ("differential_expression", "compare their counts with scanpy.tl.rank_genes_groups"),
        ("get_elbo", "Encoder has no get_elbo; .*use model.history for the losses"),
        ("get_marginal_ll", "Encoder has no get_marginal_ll; "),
        ("get_reconstruction_error", "Encoder has no get_reconstruction_error; "),
        ("minify_adata", r"embed_to\(model, adata, output, counts=False\)"),
    ):
        for owner in (model, Encoder):
            assert name not in dir(owner)
            with pytest.raises(AttributeError, match=instead):
                getattr(owner, name)
    with pytest.raises(OptionError, match=r"^history has no 'elbo_train' \(known: .*'validation_loss', .*'train_loss'"):
        model.history["elbo_train"]
    with pytest.raises(OptionError, match="history has no 'elbo_train'; train the model first"):
        build().history["elbo_train"]
    for name, instead in (
        ("return_dist", "an embedding of this class has no variances"),
        ("mc_samples", "the embedding is always a mean"),
        ("use_raw", r"pass adata.raw.to_adata\(\) as adata"),
        ("key_add", "did you mean 'key_added'"),
    ):
        with pytest.raises(OptionError, match=f"argument '{name}' is unknown .*{instead}"):
            model.get_latent_representation(**{name: True})
    for architecture, width in ((None, "latent_dim"), ("transformer_encoder", "hidden_dim")):
        with pytest.raises(OptionError, match=f"option 'n_latent' is unknown to .*; pass {width}, as scforge calls it"):
            build(architecture, n_latent=10)
    with pytest.raises(OptionError, match="argument 'use_raw' is unknown .*layer with raw counts as layer"):
        Encoder.setup_anndata(model.adata, use_raw=True)
    assert "get_normalized_expression" in dir(ScDiVa)
    assert "train" in dir(Encoder)


def test_what_autotune_of_scvi_tools_asks_for(build, quick: dict) -> None:
    seen = []
    reports = LambdaCallback(on_validation_end=lambda trainer, _: seen.append(dict(trainer.callback_metrics)))
    options = {"accelerator": "auto", "devices": "auto", "check_val_every_n_epoch": 1, "enable_progress_bar": False}
    del quick["accelerator"], quick["progress_bar"]
    build().train(**quick, **options, logger=TableLogger("logs"), callbacks=[reports])
    assert ["validation_loss" in metrics for metrics in seen] == [True, True]


def test_only_scvi_entries_are_added(tiny_adata: ad.AnnData) -> None:
    before = tiny_adata.copy()
    Encoder.setup_anndata(tiny_adata, labels_key="batch")
    Encoder.setup_anndata(tiny_adata, batch_key="batch", labels_key="group", gene_key="ensembl")
    assert set(tiny_adata.obs) - set(before.obs) == {"_scvi_batch", "_scvi_labels"}
    assert all(key.startswith("_scvi") for key in tiny_adata.uns)
    assert (list(tiny_adata.var), list(tiny_adata.layers)) == (list(before.var), list(before.layers))
    np.testing.assert_array_equal(tiny_adata.obs["group"], before.obs["group"])
    np.testing.assert_array_equal(tiny_adata.obs["_scvi_labels"], before.obs["group"].cat.codes)
    assert Encoder(tiny_adata, n_top_genes=20, hidden_dim=8).registry_["setup_args"]["labels_key"] == "group"
    tiny_adata.obs.loc["cell3", "batch"] = np.nan
    with pytest.raises(
        DataError, match=r"adata.obs\['batch'\] is missing for 1 of 60 cells; fill in the values or drop"
    ):
        Encoder.setup_anndata(tiny_adata, batch_key="batch")


@pytest.mark.parametrize("missing", [None, np.nan])
@pytest.mark.parametrize("dtype", [object, "category"])
def test_labels_may_be_missing(trained, tiny_adata: ad.AnnData, missing, dtype) -> None:
    labels = tiny_adata.obs["group"].astype(object)
    labels.iloc[[3, 7]] = missing
    tiny_adata.obs["group"] = labels.astype(dtype)
    model = trained(setup={"labels_key": "group"})
    codes = tiny_adata.obs["_scvi_labels"].to_numpy()
    assert (codes[[3, 7]] == -1).all()
    assert (np.delete(codes, [3, 7]) >= 0).all()
    assert model.get_latent_representation().shape == (60, 4)


KINDS = [np.arange(60) % 3, np.arange(60) % 2 == 0, pd.Categorical(["b", "a"] * 30, categories=["b", "a"])]


@pytest.mark.parametrize("values", KINDS, ids=["numbers", "booleans", "ordered as said"])
def test_labels_of_any_kind(trained, tiny_adata: ad.AnnData, tmp_path, values) -> None:
    tiny_adata.obs["label"] = values
    trained(setup={"labels_key": "label"}).save(tmp_path / "model")
    Encoder.load(tmp_path / "model", tiny_adata)
    np.testing.assert_array_equal(tiny_adata.obs["_scvi_labels"], pd.Categorical(values).codes)


def test_batches_choose_the_genes(build, tiny_adata: ad.AnnData) -> None:
    counts = tiny_adata.X.toarray()
    counts[:30, 20:40] += 20
    tiny_adata.X = counts
    expected = select_genes(tiny_adata, n_top_genes=20, batch_key="batch").genes
    assert build(adata=tiny_adata.copy(), n_top_genes=20, setup={"batch_key": "batch"}).vocab.genes == expected
    assert build(adata=tiny_adata.copy(), n_top_genes=20).vocab.genes != expected


def test_gene_key_names_the_genes(trained, tiny_adata: ad.AnnData) -> None:
    plain = trained(adata=tiny_adata.copy())
    by_id = trained(setup={"gene_key": "ensembl"})
    assert plain.vocab.genes[0].startswith("gene")
    assert by_id.vocab.genes[0].startswith("ENSG")
    np.testing.assert_array_equal(by_id.get_latent_representation(), plain.get_latent_representation())


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("layer", "layer='counts' is not in adata.layers .*the training data contain it"),
        ("gene_key", "gene_key='ensembl' is not in adata.var; did you mean 'ensembl_id'"),
    ],
)
def test_new_cells_with_counts_or_names_elsewhere(trained, tiny_adata: ad.AnnData, argument: str, told: str) -> None:
    new = tiny_adata.copy()
    new.var = new.var.rename(columns={"ensembl": "ensembl_id"})
    tiny_adata.layers["counts"] = tiny_adata.X.copy()
    model = trained(setup={argument: {"layer": "counts", "gene_key": "ensembl"}[argument]})
    with pytest.raises(DataError, match=told + r".*call Encoder.setup_anndata\(adata, ...\)"):
        model.get_latent_representation(new)
    Encoder.setup_anndata(new, gene_key="ensembl_id" if argument == "gene_key" else None)
    np.testing.assert_array_equal(model.get_latent_representation(new), model.get_latent_representation())


def test_kept_genes_and_genes_that_were_not_chosen(build, tiny_adata):
    usual = build(adata=tiny_adata.copy(), n_top_genes=20)
    usual.train(1, progress_bar=False)
    left_out = next(name for name in tiny_adata.var_names if name not in usual.vocab)
    said = f"genes contains names that are in adata but not among the 20 genes .*: '{left_out}'; create .*..{left_out}'"
    with pytest.raises(GeneMismatchError, match=said):
        usual.perturb_in_silico(genes=[left_out])
    with pytest.raises(GeneMismatchError, match="names that are not among the 20 genes of the model: 'GCG'; create"):
        usual.perturb_in_silico(genes=["GCG"])
    kept = build(adata=tiny_adata.copy(), n_top_genes=20, keep_genes=[left_out])
    assert left_out in kept.vocab
    assert kept.vocab.n_genes == 20
    with pytest.raises(OptionError, match="keep_genes contains 'gone', but only genes of adata"):
        build(adata=tiny_adata.copy(), n_top_genes=20, keep_genes=["gone"])


def test_variable_genes_are_chosen_within_an_annotation_but_not_within_a_list(tiny_adata):
    adata = ad.AnnData(sparse.csr_matrix(sparse.hstack([tiny_adata.X] * 30)))
    adata.var_names = [f"gene{i}" for i in range(adata.n_vars)]
    whole = GeneVocab(tuple(adata.var_names), release="some annotation")
    Encoder.setup_anndata(adata)
    chosen = Encoder(adata, vocab=whole, hidden_dim=8).vocab
    assert (chosen.n_genes, chosen.release) == (2_000, "some annotation, from_data")
    assert Encoder(adata, vocab=whole, n_top_genes=0, hidden_dim=8).vocab.n_genes == 2_400
    assert Encoder(adata, vocab=GeneVocab.from_genes(whole.genes), hidden_dim=8).vocab.n_genes == 2_400


def change_counts(adata: ad.AnnData) -> None:
    """Swap two counts of a cell, which changes neither its total nor any other sum."""
    start = adata.X.indptr[5]
    first = adata.X.data[start]
    other = start + int(np.flatnonzero(adata.X[5].data != first)[0])
    adata.X.data[start], adata.X.data[other] = adata.X.data[other], first


def change_names(adata: ad.AnnData) -> None:
    adata.var_names = adata.var_names[::-1]


def choose_a_layer(adata: ad.AnnData) -> None:
    adata.layers["other"] = adata.X[::-1].copy()
    Encoder.setup_anndata(adata, layer="other")


@pytest.mark.parametrize("change", [change_counts, change_names, choose_a_layer])
def test_cells_are_opened_again_where_they_have_changed(model: Encoder, monkeypatch, change: Callable) -> None:
    opened = Mock(side_effect=open_cells)
    monkeypatch.setattr("scforge.estimators.encoder.open_cells", opened)
    before = model.get_latent_representation()
    model.adata.obs["number"] = np.arange(60)
    assert model.open_cells().column("number").tolist() == list(range(60))
    np.testing.assert_array_equal(model.get_latent_representation(), before)
    assert not opened.called, "training has opened them"
    change(model.adata)
    after = model.get_latent_representation()
    assert opened.call_count == 1
    copy = model.adata.copy()
    Encoder.setup_anndata(copy, layer=setup_of(Encoder, model.adata)["layer"])
    np.testing.assert_array_equal(after, model.get_latent_representation(copy))
    assert np.abs(after - before).max() > 0


def _random_states() -> list[str]:
    numpy_state = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
    return [repr(state) for state in (random.getstate(), numpy_state, torch.get_rng_state().tolist())]


def test_random_numbers_of_the_caller_stay(tiny_adata: ad.AnnData) -> None:
    before = _random_states()
    Encoder.setup_anndata(tiny_adata, labels_key="group")
    model = Encoder(tiny_adata, hidden_dim=8)
    model.train(1, batch_size=16, progress_bar=False)
    model.get_latent_representation()
    annotator = model.finetune("annotation", max_epochs=1, batch_size=16, progress_bar=False)
    annotator.predict()
    annotator.evaluate()
    Encoder.load_query_data(tiny_adata[:30].copy(), model)
    assert _random_states() == before
