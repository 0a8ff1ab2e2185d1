import json
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import torch

from scforge.cli import main
from scforge.config import load_config, recipe_path
from scforge.errors import GeneMismatchError, ModelFileError, NotTrainedWarning, OptionError
from scforge.estimators import Encoder, ScDiVa
from scforge.estimators.evaluate import knows_labels
from scforge.testing import raises
from scforge.tokenizers.entropy_ranked import serialization_weights
from scforge.workflows import train_from_config

SMALL = {"n_top_genes": 40, "hidden_dim": 16, "num_layers": 1, "num_heads": 2, "latent_dim": 4, "max_tokens": 16}
FAST = {"batch_size": 20, "lr": 1e-2, "validation_size": 0.0}


@pytest.fixture
def make(tiny_adata: ad.AnnData) -> Callable[..., ScDiVa]:
    def make(setup: dict | None = None, **options) -> ScDiVa:
        ScDiVa.setup_anndata(tiny_adata, **({"labels_key": "group", "batch_key": "batch"} if setup is None else setup))
        return ScDiVa(tiny_adata, **{**SMALL, **options})

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
    ScDiVa.setup_anndata(tiny_adata)
    for weighting in ("complement", "inverse"):
        model = ScDiVa(tiny_adata, tokenizer={"name": "entropy_ranked", "weighting": weighting}, **SMALL)
        expected = torch.from_numpy(serialization_weights(model.vocab, weighting))
        torch.testing.assert_close(model.module.gene_weights, expected)


def test_posterior(trained) -> None:
    model = trained()
    mean, variance = model.get_latent_representation(return_dist=True)
    assert mean.shape == variance.shape == (60, 4)
    np.testing.assert_allclose(model.get_latent_representation(key_added=None), mean, atol=1e-6)
    np.testing.assert_allclose(model.adata.obsm["X_scforge"], mean)
    np.testing.assert_allclose(model.adata.obs["scforge_uncertainty"], variance.mean(axis=1), rtol=1e-6)
    assert model.adata.uns["scforge"]["X_scforge"]["n_latent"] == 4
    # The dense interface of the module gives the same.
    cells = model.open_cells()
    profile = torch.from_numpy(np.log1p(cells.counts.toarray() * (1e4 / cells.totals[:, None]))).float()
    with torch.inference_mode():
        found = model.module.encode(profile)
    np.testing.assert_allclose(found["mu"], mean, atol=1e-5)
    np.testing.assert_allclose(found["logvar"].exp(), variance, atol=1e-5)


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
    with raises(OptionError, "treshold"):
        again.predict(other, treshold=0.5)


def test_what_cannot_be_made_or_asked(trained, make) -> None:
    masked = {"objective": "masked_gene_prediction"}
    without = {"name": "variational", "reconstruction_weight": 0.0, "labels_key": "group"}
    for options, message in [
        ({"setup": {}, "supervised": True}, "supervised=True requires labels"),
        ({"supervised": True, **masked}, "the objective 'masked_gene_prediction' does not learn labels"),
        ({"n_special": 9}, "n_special=9 is invalid, because the vocabulary has 4 special tokens"),
        ({"architecture": "gene_pooling"}, "architecture='gene_pooling' does not work with ScDiVa"),
    ]:
        with pytest.raises(OptionError, match=message):
            make(**options)
    eos = make(tokenizer={"name": "entropy_ranked", "append_eos": True})
    assert eos.spec.model_options["n_special"] == eos.vocab.n_special == 5
    plain, tuned = trained(), trained(supervised=True).finetune("annotation", max_epochs=1, progress_bar=False)
    assert not knows_labels(plain)
    assert list(tuned.predict(task="annotation")) == ["label", "confidence", "entropy"]
    assert tuned.get_latent_representation(key_added=None).shape == (60, 4)
    latent, expression = ScDiVa.get_latent_representation, ScDiVa.get_normalized_expression
    for model, method, options, message in [
        (make(variational=False), latent, {"return_dist": True}, "return_dist=True, but .* does not train variances"),
        (
            make(**masked),
            latent,
            {"return_dist": True},
            "prediction' does not train variances",
        ),
        (tuned, latent, {"return_dist": True}, "return_dist=True is not available, .* fine-tuned for 'annotation'"),
        (plain, ScDiVa.predict, {}, "learned no labels .* supervised=True"),
        (plain, ScDiVa.predict, {"task": "annotations"}, "task='annotations' is unknown"),
        (tuned, ScDiVa.predict, {"task": "regression"}, "task='regression', but .* fine-tuned for 'annotation'"),
        (
            trained(setup={}),
            expression,
            {"transform_batch": "one"},
            "transform_batch='one' is not in the model .*call setup_anndata",
        ),
        (
            plain,
            expression,
            {"transform_batch": "z"},
            r"transform_batch=.z. is not in the model .*: .x., .y.",
        ),
        (plain, expression, {"transform_batch": []}, "contains no batch"),
        (plain, expression, {"library_size": "latent"}, "library_size='latent' must be a positive number"),
        (plain, expression, {"gene_list": ["nothing"]}, "genes of the model: 'nothing'"),
        (make(**masked), expression, {}, "'masked_gene_prediction' does not train a decoder"),
        (make(supervised=True, objective=without), expression, {}, "'variational' does not train a decoder"),
    ]:
        with pytest.raises((OptionError, GeneMismatchError), match=message):
            method(model, **options)
    with pytest.warns(NotTrainedWarning, match="its embedding is random"):
        make().get_latent_representation(return_dist=True)


def test_expression(trained, tiny_adata: ad.AnnData) -> None:
    model = trained(train={"max_epochs": 4})
    expression = model.get_normalized_expression()
    assert list(expression) == list(model.vocab.genes)
    assert (expression.to_numpy() >= 0).all()
    layer = tiny_adata.layers["scforge_normalized"]
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
def test_the_decoder_knows_the_batch(trained, tiny_adata: ad.AnnData) -> None:
    counts = tiny_adata.X.toarray()
    counts[:, 0] = np.where(tiny_adata.obs["batch"] == "x", 60, 1)
    tiny_adata.X = counts
    objective = {"name": "variational", "beta": 0.0}
    model = trained(objective=objective, n_top_genes=0, train={"max_epochs": 60, **FAST})
    assert model.spec.objective_options["batches"] == ["x", "y"]
    assert model.spec.model_options["n_batches"] == 2
    x, y, both = (
        model.get_normalized_expression(transform_batch=batch, gene_list=["gene0"], key_added=None).to_numpy().mean()
        for batch in ("x", "y", ["x", "y"])
    )
    assert x > y
    np.testing.assert_allclose(both, (x + y) / 2, rtol=1e-4)


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
    tuned = again.finetune("annotation", lora={"r": 2}, max_epochs=1, progress_bar=False)
    assert type(tuned) is ScDiVa
    tuned.save(tmp_path / "adapter", adapter_only=True)
    assert type(Encoder.load(tmp_path / "adapter", tiny_adata, base=again)) is ScDiVa
    assert type(Encoder.load(tmp_path / "model")) is ScDiVa
    assert type(ScDiVa.load_query_data(tiny_adata, model)) is ScDiVa


def test_folders_of_the_class_encoder(tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    Encoder.setup_anndata(tiny_adata)
    Encoder(tiny_adata, "scdiva", **SMALL).save(tmp_path / "plain")
    assert type(Encoder.load(tmp_path / "plain")) is Encoder
    assert type(ScDiVa.load(tmp_path / "plain")) is ScDiVa
    Encoder(tiny_adata, n_top_genes=20, hidden_dim=8).save(tmp_path / "light")
    with pytest.raises(ModelFileError):
        ScDiVa.load(tmp_path / "light")


def test_the_recipe_and_the_command_line(folder: Path, tiny_adata: ad.AnnData) -> None:
    tiny = ["model.hidden_dim=16", "model.num_layers=1", "model.num_heads=2", "training.max_epochs=1"]
    tiny += ["training.accelerator=cpu", "training.batch_size=20", "data.paths=[cells.h5ad]"]
    config = load_config(recipe_path("scdiva"), [*tiny, "objective.labels_key=group"])
    assert type(train_from_config(config, progress_bar=False)) is ScDiVa
    final = "checkpoints/scdiva/final"
    assert main(["embed", "cells.h5ad", "-m", final, "-o", "out.h5ad", "--quiet"]) == 0
    expected = ScDiVa.load(final).get_latent_representation(tiny_adata, key_added=None)
    np.testing.assert_allclose(ad.read_h5ad("out.h5ad").obsm["X_scforge"], expected, atol=1e-5)
    tune = "finetune --data cells.h5ad --task annotation --labels-key group --max-epochs 1 --output tuned --quiet"
    assert main([*tune.split(), "--base-model", final]) == 0
    assert json.loads(Path("tuned/final/config.json").read_text())["class"] == "ScDiVa"
    assert main(["predict", "cells.h5ad", "--model", "tuned/final", "-o", "labeled.h5ad"]) == 0
    assert "scforge_group" in ad.read_h5ad("labeled.h5ad").obs
