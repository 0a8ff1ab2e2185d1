import json
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

from scforge.errors import NotTrainedWarning, OptionError, ScforgeWarning
from scforge.estimators import Encoder, ScDiVa
from scforge.testing import raises

SMALL = {"n_top_genes": 0, "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "latent_dim": 4, "max_tokens": 8}
QUICK = {"progress_bar": False, "accelerator": "cpu"}
MODES = ["tokens", "vector"]


@pytest.fixture(scope="module")
def cells() -> ad.AnnData:
    """60 cells of two groups, which express 20 of 40 genes each, and some of the others."""
    generator = np.random.default_rng(0)
    group = np.arange(60) % 2
    mean = np.where((np.arange(40) % 2)[None, :] == group[:, None], 6.0, 0.1)
    obs = pd.DataFrame({"group": pd.Categorical(np.where(group == 0, "a", "b"))}, index=[f"cell{i}" for i in range(60)])
    obs["batch"] = group
    var = pd.DataFrame(index=[f"gene{i}" for i in range(40)])
    return ad.AnnData(generator.poisson(mean).astype(np.float32), obs=obs, var=var)


def made(cells: ad.AnnData, mode: str = "tokens", batch_key: str | None = None, **options) -> ScDiVa:
    """Return a model that counts as trained, and is not."""
    ScDiVa.setup_anndata(cells, labels_key="group", batch_key=batch_key)
    model = ScDiVa(cells, mode=mode, **{**SMALL, **options})
    model.is_trained_ = True
    return model


def test_vectors_of_genes(cells: ad.AnnData) -> None:
    model = made(cells)
    part = model.module.gene_embedding
    with torch.no_grad():
        expected = part.norm(part.weight + part.bias)
    np.testing.assert_allclose(model.get_gene_embeddings(), expected, atol=1e-6)


def test_states_of_genes_are_of_cells_where_they_had_room(cells: ad.AnnData) -> None:
    model = made(cells)
    states = model.get_gene_embeddings(contextual=True, key_added=None).to_numpy()
    tokens = model.tokenizer(model.open_cells(cells).block(np.arange(60)))
    room = tokens["input_ids"][:, :8] - model.vocab.n_special
    np.testing.assert_array_equal(np.isnan(states).all(axis=1), ~np.isin(np.arange(40), room))
    with torch.no_grad():
        out = model.module.eval()(**tokens, return_logits=False, output_hidden_states=True).hidden_states[-1]
    gene = int(room[0, 0])
    np.testing.assert_allclose(states[gene], out[:, :8][room == gene].mean(dim=0), atol=1e-5)
    with pytest.raises(OptionError, match="the same embedding for all tokens of a cell; pass contextual=False"):
        made(cells, "vector").get_gene_embeddings(contextual=True)


def test_attention_is_of_cells_where_genes_had_room(cells: ad.AnnData) -> None:
    model = made(cells)
    graph = model.get_attention(top_k=40, min_cells=1, key_added=None)
    tokens = model.tokenizer(model.open_cells(cells).block(np.arange(60)))
    with torch.no_grad():
        weights = model.module.eval()(**tokens, return_logits=False, output_attentions=True).attentions[-1].mean(dim=1)
    genes = (tokens["input_ids"][:, :8] - model.vocab.n_special).tolist()
    one, other = genes[0][:2]
    together = [
        float(weights[cell, here.index(one), here.index(other)])
        for cell, here in enumerate(genes)
        if {one, other} <= set(here)
    ]
    np.testing.assert_allclose(graph[one, other], np.mean(together), rtol=1e-5)
    with raises(OptionError, "output_attentions"):
        made(cells, "vector").get_attention()


@pytest.mark.parametrize(("mode", "format"), [("vector", "torch"), ("tokens", "onnx")])
def test_files_of_other_runtimes(cells: ad.AnnData, tmp_path: Path, mode: str, format: str) -> None:
    if format == "onnx":
        pytest.importorskip("onnxscript", reason="needs the extra onnx")
    made(cells, mode, num_layers=1).export(tmp_path / "out", format)
    parity = json.loads((tmp_path / "out" / "export.json").read_text())["parity"]
    assert parity["batches"] == [[1, 1], [2, 7], [5, 40]]
    assert parity["max_abs_difference"] < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_what_is_made_of_a_model(cells: ad.AnnData, tmp_path: Path, mode: str) -> None:
    model = made(cells, mode)
    query = ScDiVa.load_query_data(cells, model)
    with pytest.warns(ScforgeWarning, match="embed the reference again"):
        query.train(1, **QUICK)
    assert query.get_latent_representation(return_dist=True, key_added=None)[1].shape == (60, 4)
    assert query.get_normalized_expression(key_added=None).shape == (60, 40)
    assert model.finetune("annotation", lora=True, max_epochs=1, **QUICK).predict(cells).shape == (60, 3)
    for modes in ("delete", "activate"):
        assert len(model.perturb_in_silico(cells, ["gene0", "gene1"], modes, n_permutations=0, key_added=None)) == 2


@pytest.fixture(scope="module")
def model(cells: ad.AnnData) -> ScDiVa:
    ScDiVa.setup_anndata(cells)
    model = ScDiVa(cells, objective="masked_diffusion", **(SMALL | {"num_layers": 1, "max_tokens": 32}))
    model.train(40, batch_size=20, lr=1e-2, validation_size=0.0, **QUICK)
    return model


@pytest.mark.slow
def test_it_learns(model: ScDiVa) -> None:
    loss = model.history_["train_loss"]["train_loss"]
    assert loss.iloc[-1] < 0.8 * loss.iloc[0]
    assert model.spec.model_options["denoising"] is True
    assert model.get_latent_representation(key_added=None).shape == (60, 4)
    of_a = model.get_normalized_expression(key_added=None).to_numpy()[::2]
    assert of_a[:, ::2].mean() > 1.5 * of_a[:, 1::2].mean()


def test_generated_cells(model: ScDiVa, cells: ad.AnnData, tmp_path: Path) -> None:
    made = model.generate(40, seed=1, batch_size=16)
    assert made.shape == (40, 40)
    assert "bins" not in made.layers
    assert made.X.data.min() >= 0
    n_genes = (cells.X > 0).sum(axis=1)
    assert n_genes.min() <= made.obs["n_genes"].min() <= made.obs["n_genes"].max() <= n_genes.max()
    assert (model.generate(40, seed=2).X != made.X).nnz > 0
    assert set(model.generate(3, max_len=7, n_steps=3).obs["n_genes"]) == {7}
    model.save(tmp_path / "model")
    loaded = Encoder.load(tmp_path / "model").generate(40, seed=1)
    np.testing.assert_allclose(loaded.X.toarray(), made.X.toarray(), atol=1e-4)


def test_prompts_decide_of_which_group_cells_are(model: ScDiVa, cells: ad.AnnData) -> None:
    made = model.generate(60, seed=0, prompt={"gene0": 5.0})
    of_a, of_b = ((made.X[:, first::2] > 0).sum() for first in (0, 1))
    assert of_a > 1.5 * of_b
    np.testing.assert_allclose(made[:, "gene0"].X.toarray(), 5.0)
    some = cells[5:8].copy()
    made = model.generate(prompt=some)
    assert list(made.obs_names) == ["cell5", "cell6", "cell7"]
    assert ((made.X > 0).toarray() >= (some.X > 0)).all()


def test_values_of_genes(model: ScDiVa, cells: ad.AnnData) -> None:
    denoised = model.denoise(cells)
    truth, counted = np.log1p(cells.X / cells.X.sum(axis=1, keepdims=True) * 1e4), cells.X > 0
    assert (denoised.toarray()[~counted] == 0).all()
    assert np.square(denoised.toarray() - truth)[counted].mean() < truth[counted].var()
    np.testing.assert_allclose(cells.layers["denoised"].toarray(), denoised.toarray())
    told = r"was trained on expressed genes only.* get_normalized_expression((?!masked_value_prediction).)*$"
    with pytest.warns(ScforgeWarning, match=told):
        imputed = model.impute(cells, genes=["gene1", "gene0"])
    assert list(imputed) == ["gene1", "gene0"]
    np.testing.assert_allclose(imputed["gene0"].to_numpy()[counted[:, 0]], truth[counted[:, 0], 0], rtol=1e-5)
    assert made(cells, objective="masked_diffusion").denoise(cells, n_folds=2).nnz == counted.sum()


def test_a_value_is_not_predicted_from_itself(model: ScDiVa, cells: ad.AnnData) -> None:
    tokens = model.tokenizer(model.open_cells(cells).block(np.arange(6)))
    hidden = tokens["input_ids"] == model.vocab.n_special
    assert hidden.any()
    found = [
        model.module.predict_values(**(tokens | {"values": values}), masked_values=hidden)
        for values in (tokens["values"].masked_fill(hidden, value) for value in (9.0, 1.0))
    ]
    np.testing.assert_array_equal(*(values.detach() for values in found))
    assert (found[0][hidden] != 0).all()


def test_models_that_cannot(cells: ad.AnnData, model: ScDiVa) -> None:
    plain, small = made(cells), made(cells, objective="masked_diffusion")
    untrained = made(cells, objective={"name": "masked_diffusion", "reconstruction_weight": 0.0})
    tuned = small.finetune("annotation", max_epochs=1, **QUICK)
    Encoder.setup_anndata(cells)
    other = Encoder(cells, "autoregressive_transformer", hidden_dim=8, num_layers=1, num_heads=2)
    other.is_trained_ = True
    for call, options, message in [
        (plain.generate, {}, r"'scdiva' and objective='variational' cannot generate cells; .*='masked_diffusion'"),
        (plain.denoise, {}, r"does not predict the expression of masked genes; .* 'masked_diffusion' with 'scdiva'"),
        (model.generate, {"condition": "a"}, "the model has no classes; omit condition"),
        (model.generate, {"n_cells": None, "prompt": ["gene0"]}, "n_cells=None is not a whole number of cells"),
        (small.generate, {"max_len": 9}, "max_len=9 exceeds the 8 tokens that the model accepts; lower max_len"),
        (other.generate, {"n_steps": 4}, "n_steps=4 has no effect for models without 'masked_diffusion'; omit n_steps"),
        (tuned.generate, {}, "was fine-tuned for 'annotation' and cannot generate; use its base model"),
        (
            untrained.get_latent_representation,
            {"return_dist": True},
            "does not train variances in this model; omit return_dist",
        ),
    ]:
        given = {"n_cells": 2, **options} if call.__name__ == "generate" else options
        with pytest.raises(OptionError, match=message):
            call(**given)
    with pytest.warns(NotTrainedWarning, match="the embedding is random"):
        untrained.get_latent_representation(key_added=None)
    with raises(OptionError, "supervised"):
        made(cells, objective="masked_diffusion", supervised=True)


def test_a_batch_of_a_query_has_no_effect_for_a_model_with_batches(tiny_adata):
    ScDiVa.setup_anndata(tiny_adata, batch_key="batch")
    model = ScDiVa(tiny_adata, hidden_dim=8, num_layers=1, num_heads=2, latent_dim=4)
    model.is_trained_ = True
    with raises(OptionError, "batch_key"):
        ScDiVa.load_query_data(tiny_adata, model, batch_key="batch")
