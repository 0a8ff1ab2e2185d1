"""The front class ScDiVa: posteriors, labels, expression without batches, and the class that stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import torch

from scforge.config import load_config, recipe_path
from scforge.errors import GeneMismatchError, ModelFileError, NotTrainedWarning, OptionError
from scforge.estimators import Encoder, ScDiVa, predict_to, train_from_config
from scforge.estimators.evaluating import knows_labels
from scforge.estimators.front_classes import class_in_place_of, class_of_architecture
from scforge.estimators.model_folder import load_named
from scforge.tokenizers import serialisation_weights
from scforge.training import CellDataModule

SMALL = {"n_top_genes": 40, "hidden_dim": 16, "num_layers": 1, "num_heads": 2, "latent_dim": 4, "max_tokens": 16}
FAST = {"batch_size": 20, "lr": 1e-2, "validation_size": 0.0}


@pytest.fixture
def make(tiny_adata: ad.AnnData) -> Callable[..., ScDiVa]:
    """Return a function that makes a small model of cells with labels and batches."""
    tiny_adata.obs["batch"] = np.where(np.arange(tiny_adata.n_obs) % 3 == 0, "one", "two")

    def make(adata: ad.AnnData = tiny_adata, setup: dict | None = None, **options) -> ScDiVa:
        ScDiVa.setup_anndata(adata, **({"labels_key": "group", "batch_key": "batch"} if setup is None else setup))
        return ScDiVa(adata, **{**SMALL, **options})

    return make


@pytest.fixture
def trained(make: Callable[..., ScDiVa], quick: dict) -> Callable[..., ScDiVa]:
    def trained(*args, train: dict | None = None, **options) -> ScDiVa:
        model = make(*args, **options)
        model.train(**(quick | (train or {})))
        return model

    return trained


def test_what_it_takes_where_nothing_is_said(tiny_adata: ad.AnnData) -> None:
    ScDiVa.setup_anndata(tiny_adata)
    spec = ScDiVa(tiny_adata).spec
    assert (spec.architecture, spec.tokenizer, spec.objective) == ("scdiva", "entropy_ranked", "variational")
    assert (spec.model_options["hidden_dim"], spec.model_options["latent_dim"]) == (128, 32)
    assert (spec.model_options["n_special"], spec.model_options["num_cell_types"]) == (spec.vocab.n_special, 0)
    Encoder.setup_anndata(tiny_adata)
    assert Encoder(tiny_adata, "scdiva").spec == spec


def test_weights_of_genes_are_those_of_the_vocabulary(make) -> None:
    model = make()
    torch.testing.assert_close(
        model.module.gene_weights, torch.from_numpy(serialisation_weights(model.vocab)), rtol=0, atol=0
    )
    inverse = make(tokenizer={"name": "entropy_ranked", "weighting": "inverse"})
    torch.testing.assert_close(
        inverse.module.gene_weights, torch.from_numpy(serialisation_weights(model.vocab, "inverse"))
    )
    assert not torch.equal(inverse.module.gene_weights, model.module.gene_weights)


def test_special_tokens_are_counted(make) -> None:
    model = make(tokenizer={"name": "entropy_ranked", "append_eos": True})
    assert model.spec.model_options["n_special"] == model.vocab.n_special == 5
    with pytest.raises(OptionError, match="n_special=9 but the vocabulary has 4 special tokens"):
        make(n_special=9)


# ---- posteriors


def test_posterior(trained, tmp_path: Path) -> None:
    model = trained()
    mean, variance = model.get_latent_representation(return_dist=True)
    assert mean.shape == variance.shape == (60, 4)
    assert (variance > 0).all()
    np.testing.assert_allclose(model.get_latent_representation(key_added=None), mean, atol=1e-6)
    np.testing.assert_allclose(model.adata.obsm["X_scforge"], mean)
    np.testing.assert_allclose(model.adata.obs["scforge_uncertainty"], variance.mean(axis=1), rtol=1e-6)
    assert model.adata.uns["scforge"]["X_scforge"]["n_latent"] == 4
    del model.adata.obs["scforge_uncertainty"]
    model.get_latent_representation(return_dist=True, key_added=None, uncertainty_key=None)
    assert "scforge_uncertainty" not in model.adata.obs


def test_the_posterior_is_the_module_s(trained) -> None:
    """The dense interface of the module gives what the tokens gave."""
    model = trained(tokenizer={"name": "entropy_ranked"})
    mean, variance = model.get_latent_representation(return_dist=True, key_added=None, uncertainty_key=None)
    cells = model.cells()
    profile = torch.from_numpy(np.log1p(cells.counts.toarray() * (1e4 / cells.totals[:, None]))).float()
    with torch.inference_mode():
        found = model.module.encode(profile)
    np.testing.assert_allclose(found["mu"], mean, atol=1e-5)
    np.testing.assert_allclose(found["logvar"].exp(), variance, atol=1e-5)


def test_posteriors_that_are_none(trained, make) -> None:
    with pytest.warns(NotTrainedWarning, match="its embedding is random"):
        make().get_latent_representation(return_dist=True)
    with pytest.raises(OptionError, match="made with variational=False; make one without it"):
        make(variational=False).get_latent_representation(return_dist=True)
    with pytest.raises(OptionError, match="the objective 'masked_gene_prediction' trains no variances"):
        make(objective="masked_gene_prediction").get_latent_representation(return_dist=True)
    for name in ("key_added", "uncertainty_key"):
        with pytest.raises(OptionError, match=f"{name}=3 is not a name; give text, or None"):
            make().get_latent_representation(return_dist=True, **{name: 3})
    tuned = trained(train={"max_epochs": 1}).finetune("annotation", max_epochs=1, progress_bar=False)
    with pytest.raises(OptionError, match="return_dist=True: the model was fine-tuned for 'annotation'"):
        tuned.get_latent_representation(return_dist=True)
    assert tuned.get_latent_representation(key_added=None).shape == (60, 4)


# ---- labels


def test_labels_without_fine_tuning(trained, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    model = trained(supervised=True, train={"max_epochs": 30, **FAST})
    assert model.spec.model_options["num_cell_types"] == 2
    found = model.predict(tiny_adata)
    assert list(found) == ["label", "confidence", "entropy"]
    assert (found["label"] == tiny_adata.obs["group"]).mean() > 0.9
    assert (tiny_adata.obs["scforge_group"] == found["label"]).all()
    model.save(tmp_path / "model")
    again = ScDiVa.load(tmp_path / "model")
    other = tiny_adata[:10].copy()
    np.testing.assert_allclose(
        again.predict(other, task="annotation")["confidence"], found["confidence"][:10], atol=1e-5
    )
    probabilities = again.predict(other, soft=True)
    assert list(probabilities) == ["a", "b"]
    assert knows_labels(again)
    with pytest.raises(OptionError, match=r"'treshold' is unknown to 'annotation'; did you mean 'threshold'"):
        again.predict(other, treshold=0.5)


def test_labels_that_were_not_learned(trained, make, tiny_adata: ad.AnnData) -> None:
    model = trained()
    assert not knows_labels(model)
    with pytest.raises(OptionError, match="learned no labels, .* supervised=True"):
        model.predict(tiny_adata)
    with pytest.raises(OptionError, match="task='annotations' is not known"):
        model.predict(tiny_adata, task="annotations")
    with pytest.raises(OptionError, match="supervised=True but there are no labels"):
        make(setup={}, supervised=True)
    with pytest.raises(OptionError, match="the objective 'masked_gene_prediction' learns no labels"):
        make(supervised=True, objective="masked_gene_prediction")
    with pytest.raises(OptionError, match="supervised='yes'"):
        make(supervised="yes")


def test_predictions_of_a_fine_tuned_model(trained, tiny_adata: ad.AnnData) -> None:
    tuned = trained(supervised=True).finetune("annotation", max_epochs=1, progress_bar=False)
    assert type(tuned) is ScDiVa
    assert list(tuned.predict(tiny_adata, task="annotation")) == ["label", "confidence", "entropy"]
    with pytest.raises(OptionError, match="task='regression' but the model was fine-tuned for 'annotation'"):
        tuned.predict(tiny_adata, task="regression")


# ---- expression


def test_expression(trained, tiny_adata: ad.AnnData) -> None:
    model = trained(train={"max_epochs": 4})
    expression = model.get_normalized_expression()
    assert expression.shape == (60, 40)
    assert list(expression) == list(model.vocab.genes)
    assert (expression.to_numpy() >= 0).all()
    layer = tiny_adata.layers["scforge_normalized"]
    assert layer.shape == tiny_adata.shape
    known = tiny_adata.var_names.isin(model.vocab.genes)
    assert np.isnan(layer[:, ~known]).all()
    np.testing.assert_array_equal(layer[:, known], expression[list(tiny_adata.var_names[known])].to_numpy())
    genes = [model.vocab.genes[7], model.vocab.genes[2]]
    some = model.get_normalized_expression(gene_list=genes, key_added=None)
    np.testing.assert_array_equal(some, expression[genes])
    counts = model.get_normalized_expression(gene_list=genes, key_added=None, library_size=1e6)
    np.testing.assert_allclose(counts, np.expm1(some) * 100, rtol=1e-4)
    predicted = model.predict(task="batch_integration", gene_list=genes)
    np.testing.assert_array_equal(predicted, some)


@pytest.mark.slow
def test_the_decoder_knows_the_batch(trained, tiny_adata: ad.AnnData, quick: dict) -> None:
    """A gene that one batch lacks is low as if of that batch, and the other way round."""
    counts = tiny_adata.X.toarray() if hasattr(tiny_adata.X, "toarray") else np.array(tiny_adata.X)
    counts[:, 0] = np.where(tiny_adata.obs["batch"] == "one", 60, 1)
    tiny_adata.X = counts.astype(np.float32)
    model = trained(
        objective={"name": "variational", "beta": 0.0},
        n_top_genes=0,
        train={"max_epochs": 60, **FAST},
    )
    assert model.spec.objective_options["batches"] == ["one", "two"]
    assert model.spec.model_options["n_batches"] == 2
    gene = [tiny_adata.var_names[0]]

    def mean(batch) -> float:
        return float(
            model.get_normalized_expression(transform_batch=batch, gene_list=gene, key_added=None).to_numpy().mean()
        )

    assert mean("one") > mean("two")
    np.testing.assert_allclose(mean(["one", "two"]), (mean("one") + mean("two")) / 2, rtol=1e-4)
    with pytest.raises(OptionError, match=r"transform_batch='three' is no batch of the model.*\(known: 'one', 'two'\)"):
        mean("three")
    with pytest.raises(OptionError, match="names no batch"):
        mean([])


def test_expression_that_cannot_be(trained, make) -> None:
    model = trained(setup={})
    assert model.spec.model_options["n_batches"] == 0
    for options, message in {
        "transform_batch": ({"transform_batch": "one"}, "the model knows no batches; call setup_anndata"),
        "library_size": ({"library_size": "latent"}, "library_size='latent' is neither 'log1p' nor a positive number"),
        "negative": ({"library_size": -1.0}, r"library_size=-1\.0 is neither"),
        "key": ({"key_added": ""}, "key_added='' is not a name"),
    }.values():
        with pytest.raises(OptionError, match=message):
            model.get_normalized_expression(**options)
    with pytest.raises(GeneMismatchError, match="genes names 'nothing'"):
        model.get_normalized_expression(gene_list=["nothing"])
    with pytest.raises(OptionError, match="decoder of the model was not trained by the objective 'masked_gene_pred"):
        make(setup={}, objective="masked_gene_prediction").get_normalized_expression()
    labels = {"name": "variational", "reconstruction_weight": 0.0}
    with pytest.raises(OptionError, match="the decoder of the model was not trained by the objective 'variational'"):
        make(supervised=True, objective={**labels, "labels_key": "group"}).get_normalized_expression()


# ---- the class


def test_the_class_stays(trained, quick: dict, tmp_path: Path, tiny_adata: ad.AnnData) -> None:
    model = trained()
    mean = model.get_latent_representation(key_added=None)
    model.save(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["class"] == "ScDiVa"
    for again in (ScDiVa.load(tmp_path / "model", tiny_adata), Encoder.load(tmp_path / "model", tiny_adata)):
        assert type(again) is ScDiVa
        np.testing.assert_array_equal(again.get_latent_representation(key_added=None), mean)
        assert again.spec == model.spec
    again.train(**quick)
    assert type(load_named(tmp_path / "model", "model")) is ScDiVa
    tuned = again.finetune("annotation", lora={"r": 2}, max_epochs=1, progress_bar=False)
    assert type(tuned) is ScDiVa
    tuned.save_adapter(tmp_path / "adapter")
    assert type(Encoder.load_adapter(again, tmp_path / "adapter", tiny_adata)) is ScDiVa
    assert type(Encoder.from_pretrained(tmp_path / "model")) is ScDiVa
    query = ScDiVa.load_query_data(tiny_adata, model)
    assert type(query) is ScDiVa


def test_folders_of_the_class_encoder(tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    """One with the architecture is a ScDiVa if asked for; another one is not."""
    Encoder.setup_anndata(tiny_adata)
    Encoder(tiny_adata, "scdiva", **SMALL).save(tmp_path / "plain")
    assert type(Encoder.load(tmp_path / "plain")) is Encoder
    assert type(ScDiVa.load(tmp_path / "plain")) is ScDiVa
    Encoder(tiny_adata, n_top_genes=20, hidden_dim=8).save(tmp_path / "light")
    with pytest.raises(ModelFileError, match=r"of the class 'Encoder'; load it with scforge\.models\.Enc"):
        ScDiVa.load(tmp_path / "light")
    assert class_in_place_of(Encoder, "SCVI", "scdiva") is None
    assert class_of_architecture("scdiva") is ScDiVa
    with pytest.raises(OptionError, match="architecture='gene_pooling' is none of ScDiVa"):
        ScDiVa(tiny_adata, "gene_pooling")


def test_cells_of_a_data_module(tiny_adata: ad.AnnData, quick: dict) -> None:
    tiny_adata.obs["batch"] = np.where(np.arange(tiny_adata.n_obs) % 3 == 0, "one", "two")
    Encoder.setup_anndata(tiny_adata)
    cells = Encoder(tiny_adata, "scdiva", **SMALL).cells()
    data = CellDataModule(cells, batch_size=20, batch_key="batch", labels_key="group")
    model = ScDiVa(datamodule=data, supervised=True, **{**SMALL, "n_top_genes": None})
    assert model.spec.objective_options["batches"] == ["one", "two"]
    assert model.spec.objective_options["labels"] == ["a", "b"]
    model.train(1, progress_bar=False, accelerator="cpu")
    assert model.predict().shape == (60, 3)


# ---- files


@pytest.fixture
def folder(tiny_adata: ad.AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the cells that the recipe names."""
    monkeypatch.chdir(tmp_path)
    tiny_adata.write_h5ad("data.h5ad")
    return tmp_path


TINY = ["model.hidden_dim=16", "model.num_layers=1", "model.num_heads=2", "training.max_epochs=1"]


def test_the_recipe_and_the_command_line(folder: Path, tiny_adata: ad.AnnData, capsys) -> None:
    from scforge.cli import main

    more = [*TINY, "training.accelerator=cpu", "training.batch_size=20"]
    config = load_config(recipe_path("scdiva"), [*more, "objective.labels_key=group"])
    assert type(train_from_config(config, progress_bar=False)) is ScDiVa
    final = "checkpoints/scdiva/final"
    assert predict_to(final, "data.h5ad", "labels.csv") == "60 cells"
    assert main(["embed", "data.h5ad", "-m", final, "-o", "out.h5ad", "--quiet"]) == 0
    np.testing.assert_allclose(
        ad.read_h5ad("out.h5ad").obsm["X_scforge"],
        ScDiVa.load(final).get_latent_representation(tiny_adata, key_added=None),
        atol=1e-5,
    )
    assert main(
        ["finetune", "--base-model", final, "--data", "data.h5ad", "--task", "annotation", "--labels-key", "group",
         "--max-epochs", "1", "--output", "tuned", "--quiet"]
    ) == 0  # fmt: skip
    assert json.loads(Path("tuned/final/config.json").read_text())["class"] == "ScDiVa"
    assert main(["predict", "data.h5ad", "--model", "tuned/final", "-o", "labelled.h5ad"]) == 0
    assert "scforge_group" in ad.read_h5ad("labelled.h5ad").obs
    assert "Traceback" not in capsys.readouterr().err
