"""What all front classes can do, done with ScDiVa in both modes: genes, attention, files of other formats."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

from scforge.errors import NotTrainedWarning, OptionError, ScforgeWarning
from scforge.estimators import ScDiVa

SMALL = {"n_top_genes": 0, "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "latent_dim": 4, "max_tokens": 8}
MODES = ["tokens", "vector"]
NEEDS_ONNX = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs the extra onnx",
)


@pytest.fixture(scope="module")
def cells() -> ad.AnnData:
    """60 cells of 40 genes, more than there is room for."""
    generator = np.random.default_rng(0)
    group = np.arange(60) % 2
    mean = np.where((np.arange(40) % 2)[None, :] == group[:, None], 6.0, 0.3)
    obs = pd.DataFrame({"group": pd.Categorical(np.where(group == 0, "a", "b"))}, index=[f"cell{i}" for i in range(60)])
    var = pd.DataFrame(index=[f"gene{i}" for i in range(40)])
    return ad.AnnData(generator.poisson(mean).astype(np.float32), obs=obs, var=var)


def made(cells: ad.AnnData, mode: str = "tokens", **options) -> ScDiVa:
    """Return a model that counts as trained, and is not."""
    ScDiVa.setup_anndata(cells, labels_key="group")
    model = ScDiVa(cells, mode=mode, **{**SMALL, **options})
    model.is_trained_ = True
    return model


@pytest.mark.parametrize("mode", MODES)
def test_vectors_of_genes(cells: ad.AnnData, mode: str) -> None:
    model = made(cells, mode)
    vectors = model.get_gene_embeddings()
    part = model.module.gene_embedding
    with torch.no_grad():
        wanted = part.norm(part.weight + part.bias)
    np.testing.assert_allclose(vectors, wanted, atol=1e-6)
    assert list(vectors.index) == list(model.vocab.genes)


def test_states_of_genes_are_of_cells_where_they_had_room(cells: ad.AnnData) -> None:
    """A gene that is never among the first has none; that of others is no mean with zeros."""
    model = made(cells)
    states = model.get_gene_embeddings(contextual=True, key_added=None)
    block = model.cells(cells).block(np.arange(60))
    tokens = model.tokenizer(block)
    room = tokens["input_ids"][:, :8].numpy() - model.vocab.n_special
    seldom = model.vocab.genes[int(np.argmin(np.bincount(room.ravel(), minlength=40)))]
    number = list(model.vocab.genes).index(seldom)
    assert states.loc[seldom].isna().all() == (number not in room)
    with torch.no_grad():
        out = model.module.eval()(**tokens, return_logits=False, output_hidden_states=True).hidden_states[-1]
    gene = int(room[0, 0])
    at = (tokens["input_ids"][:, :8] - model.vocab.n_special) == gene
    np.testing.assert_allclose(states.iloc[gene], out[:, :8][at].mean(dim=0), atol=1e-5)
    with pytest.raises(OptionError, match="one state for all tokens of a cell; choose contextual=False"):
        made(cells, "vector").get_gene_embeddings(contextual=True)


def test_attention_is_of_cells_where_genes_had_room(cells: ad.AnnData) -> None:
    model = made(cells)
    graph = model.get_attention(top_k=40, min_cells=1, key_added=None)
    tokens = model.tokenizer(model.cells(cells).block(np.arange(60)))
    with torch.no_grad():
        weights = model.module.eval()(**tokens, return_logits=False, output_attentions=True).attentions[-1].mean(dim=1)
    genes = tokens["input_ids"][:, :8] - model.vocab.n_special
    one, other = int(genes[0, 0]), int(genes[0, 1])
    together = [
        float(weights[cell, genes[cell].tolist().index(one), genes[cell].tolist().index(other)])
        for cell in range(60)
        if {one, other} <= set(genes[cell].tolist())
    ]
    np.testing.assert_allclose(graph[one, other], np.mean(together), rtol=1e-5)
    with pytest.raises(OptionError, match="needs mode='tokens'; one vector attends to nothing else"):
        made(cells, "vector").get_attention()


@pytest.mark.parametrize(("mode", "format"), [("vector", "torch"), pytest.param("tokens", "onnx", marks=NEEDS_ONNX)])
def test_files_of_other_runtimes(cells: ad.AnnData, tmp_path: Path, mode: str, format: str) -> None:
    """Also of cells with more tokens than there is room for, and of one cell."""
    model = made(cells, mode, num_layers=1)
    model.export(tmp_path / "out", format)
    parity = json.loads((tmp_path / "out" / "export.json").read_text())["parity"]
    assert parity["batches"] == [[1, 1], [2, 7], [5, 40]]
    assert parity["max_abs_difference"] < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_what_is_made_of_a_model(cells: ad.AnnData, tmp_path: Path, mode: str) -> None:
    model = made(cells, mode)
    model.save(tmp_path / "model", scvi_format=True)
    assert (tmp_path / "model" / "model.pt").exists()
    quick = {"progress_bar": False, "accelerator": "cpu"}
    query = ScDiVa.load_query_data(cells, model)
    with pytest.warns(ScforgeWarning, match="embed the reference again"):
        query.train(1, **quick)
    assert query.get_latent_representation(return_dist=True, key_added=None)[1].shape == (60, 4)
    assert query.get_normalized_expression(key_added=None).shape == (60, 40)
    tuned = model.finetune("annotation", lora=True, max_epochs=1, **quick)
    assert tuned.predict(cells).shape == (60, 3)
    for modes in ("delete", "activate"):
        assert len(model.perturb_in_silico(cells, ["gene0", "gene1"], modes, n_permutations=0, key_added=None)) == 2


# ---- masked diffusion


def test_values_of_more_genes_than_there_is_room_for(cells: ad.AnnData) -> None:
    denoised = made(cells, objective="masked_diffusion").denoise(cells, n_folds=2, key_added=None)
    assert denoised.nnz == np.count_nonzero(cells.X)


def test_imputing_names_what_can_be_done(cells: ad.AnnData) -> None:
    with pytest.warns(ScforgeWarning, match=r"never saw a gene that is off .* get_normalized_expression") as caught:
        made(cells, objective="masked_diffusion").impute(cells, genes=["gene0"], key_added=None)
    assert not any("masked_value_prediction" in str(warning.message) for warning in caught)


def test_latents_that_were_not_trained(cells: ad.AnnData) -> None:
    model = made(cells, objective={"name": "masked_diffusion", "reconstruction_weight": 0.0})
    with pytest.raises(OptionError, match="reconstruction_weight=0 trains no latent"):
        model.get_latent_representation(return_dist=True)
    with pytest.warns(NotTrainedWarning, match="its embedding is random"):
        model.get_latent_representation(key_added=None)


def test_generating_names_the_arguments_of_the_user(cells: ad.AnnData) -> None:
    model = made(cells, objective="masked_diffusion")
    for options, message in {
        "long": ({"max_len": 9}, "max_len=9 but the model has room for 8 tokens; lower it"),
        "none": ({"max_len": 0}, "max_len=0"),
        "class": ({"condition": "a"}, "condition='a' but 'masked_diffusion' learns no classes; leave it out"),
    }.values():
        with pytest.raises(OptionError, match=message):
            model.generate(2, **options)
    tuned = model.finetune("annotation", max_epochs=1, progress_bar=False, accelerator="cpu")
    with pytest.raises(OptionError, match="was fine-tuned for 'annotation', which what generates cells has not foll"):
        tuned.generate(2)


def test_batches_that_are_one_name(cells: ad.AnnData) -> None:
    cells.obs["batch"] = np.arange(60) % 2
    ScDiVa.setup_anndata(cells, batch_key="batch")
    model = ScDiVa(cells, **SMALL)
    model.is_trained_ = True
    one = model.get_normalized_expression(transform_batch=1, key_added=None)
    pd.testing.assert_frame_equal(one, model.get_normalized_expression(transform_batch="1", key_added=None))
    with pytest.raises(OptionError, match="transform_batch=2 is no batch of the model"):
        model.get_normalized_expression(transform_batch=2)
