"""Encoder.generate: cells out, begun and conditioned as one wishes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.errors import DataError, NotTrainedWarning, OptionError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.estimators.from_config import train_from_config
from scforge.training import CellDataModule

SMALL = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "n_top_genes": 40}
ON_GROUPS = {"name": "next_gene_prediction", "condition_key": "group", "condition_dropout": 0.2}
NAME = "autoregressive_transformer"
SERIES = pd.Series([1.0] * 99)


@pytest.fixture
def model(trained: Callable[..., Encoder]) -> Encoder:
    return trained(NAME, **SMALL)


def test_recipe(model: Encoder, tiny_adata: ad.AnnData):
    spec = model.spec
    assert (spec.tokenizer, spec.objective) == ("binned_expression", "next_gene_prediction")
    assert spec.model_options["n_bins"] == 51
    assert spec.model_options["max_seq_len"] == 42
    assert model.get_latent_representation().shape == (60, 16)
    assert model.module.bin_values[50] > 3  # log1p CP10K, no longer numbers of bins
    with pytest.raises(OptionError, match="n_bins=20 but the tokenizer 'binned_expression' makes 51 bins"):
        Encoder(tiny_adata, NAME, n_bins=20)
    assert Encoder(tiny_adata, NAME, {"name": "binned_expression", "n_bins": 8}, **SMALL).module.n_bins == 8


def test_generated_cells(model: Encoder, tmp_path: Path):
    cells = model.generate(7, seed=1, batch_size=3)
    assert cells.shape == (7, 40)
    assert sparse.issparse(cells.X)
    assert cells.X.dtype == np.float32
    assert list(cells.var_names) == list(model.vocab.genes)
    bins = cells.layers["bins"].toarray()
    assert (cells.obs["n_genes"].to_numpy() == (bins > 0).sum(axis=1)).all()
    np.testing.assert_allclose(cells.X.toarray(), np.where(bins > 0, model.module.bin_values.numpy()[bins], 0))
    made_with = cells.uns["scforge"]["generated"]
    assert made_with["seed"] == 1
    assert made_with["vocab_hash"] == model.vocab.hash
    assert "top_k" not in made_with
    cells.write_h5ad(tmp_path / "cells.h5ad")
    again = ad.read_h5ad(tmp_path / "cells.h5ad")
    assert (again.X != cells.X).nnz == 0
    assert (model.generate(7, seed=1).X != cells.X).nnz == 0
    assert (model.generate(7, seed=2).X != cells.X).nnz > 0


def test_saved_model_generates_the_same(trained: Callable[..., Encoder], tmp_path: Path):
    model = trained(NAME, None, ON_GROUPS, **SMALL)
    model.save(tmp_path / "model")
    loaded = Encoder.load(tmp_path / "model")
    assert loaded.spec.objective_options["conditions"] == ["a", "b"]
    assert loaded.module.n_conditions == 2
    one, two = (m.generate(3, condition="b", top_k=5, temperature=0.5) for m in (model, loaded))
    assert (one.X != two.X).nnz == 0
    assert list(two.obs["group"]) == ["b"] * 3
    assert two.uns["scforge"]["generated"]["top_k"] == 5


@pytest.mark.slow
def test_classes_are_learnt(build: Callable[..., Encoder]):
    model = build(NAME, None, ON_GROUPS, **SMALL)
    model.train(40, batch_size=6, lr=5e-3, progress_bar=False, accelerator="cpu")
    cells = model.generate(60, condition=["a", "b", None] * 20)
    assert list(cells.obs["group"].cat.categories) == ["a", "b"]
    assert cells.obs["group"].isna().sum() == 20
    first = [name for name in cells.var_names if name in {f"gene{i}" for i in range(10)}]
    high = cells[:, first].X.sum(axis=1)
    high = np.asarray(high).ravel()
    assert high[0::3].mean() > 1.5 * high[1::3].mean()


def test_prompts(model: Encoder, tiny_adata: ad.AnnData):
    genes = list(model.vocab.genes[:3])
    listed = model.generate(5, prompt=genes)
    assert (listed[:, genes].layers["bins"].toarray() > 0).all()
    values = model.generate(5, prompt={genes[0]: 1e-3, genes[1]: 100.0})
    assert (values[:, genes[0]].layers["bins"].toarray() == 1).all()
    largest = int(model.module.bin_values[1:].argmax()) + 1
    assert (values[:, genes[1]].layers["bins"].toarray() == largest).all()
    some = tiny_adata[5:9].copy()
    continued = model.generate(prompt=some)
    assert list(continued.obs_names) == ["cell5", "cell6", "cell7", "cell8"]
    tokens = model.tokenizer(model.cells(some).block(np.arange(4)))
    bins = continued.layers["bins"].toarray()
    for row in range(4):
        mask = tokens["input_ids"][row] >= model.vocab.n_special
        kept = (tokens["input_ids"][row][mask] - model.vocab.n_special).numpy()
        assert (bins[row, kept] == tokens["bin_ids"][row][mask].numpy()).all()


def test_classes_come_from_a_data_module(tiny_adata: ad.AnnData):
    Encoder.setup_anndata(tiny_adata)
    cells = Encoder(tiny_adata, NAME, **SMALL).cells()
    data = CellDataModule(cells, batch_size=20)
    model = Encoder(None, NAME, None, ON_GROUPS, datamodule=data, **SMALL)
    assert model.spec.model_options["n_conditions"] == 2
    model.train(1, progress_bar=False, accelerator="cpu")
    assert model.generate(2, condition="a").n_obs == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_cells": None}, "n_cells=None; say how many"),
        ({"n_cells": 0}, "n_cells=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 0}, "top_k=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": "x"}, "seed='x'"),
        ({"condition": "a"}, "the model knows no classes"),
        ({"prompt": ["gene0", "nogene"]}, "prompt names 'nogene', not among the 40 genes"),
        ({"prompt": []}, "neither a list of genes"),
        ({"prompt": "gene0"}, "prompt='gene0' is neither a list of genes"),
        ({"prompt": 5}, "prompt=5 is neither a list of genes"),
        ({"prompt": {"a", "b", "c"}}, "AnnData; a set has no order"),
        ({"prompt": SERIES}, r"^prompt=Series is neither .*AnnData; use to_list\(\) or to_dict\(\).$"),
        ({"n_cells": ad.AnnData(np.ones((3, 4)))}, "^n_cells=AnnData is no number of cells; pass it as prompt= to go"),
        ({"n_cells": SERIES}, "^n_cells=Series is no number of cells; give a whole number.$"),
        ({"max_len": 1}, "max_len=1 is not at least 2"),
        ({"max_len": 99}, "max_len=99 is above max_seq_len=42 of the model"),
    ],
)
def test_bad_arguments(model: Encoder, options: dict, message: str):
    if isinstance(options.get("prompt"), list) and len(options["prompt"]) == 2:
        options = {"prompt": [model.vocab.genes[0], "nogene"]}
    with pytest.raises(OptionError, match=message):
        model.generate(**{"n_cells": 3, **options})


def test_bad_values_and_classes(trained: Callable[..., Encoder], tiny_adata: ad.AnnData):
    model = trained(NAME, None, ON_GROUPS, **SMALL)
    gene = model.vocab.genes[0]
    with pytest.raises(OptionError, match="is not a positive number"):
        model.generate(2, prompt={gene: -1.0})
    with pytest.raises(OptionError, match="condition='c' is no class of the model"):
        model.generate(2, condition="c")
    with pytest.raises(OptionError, match=r"condition='A' is no class of the model; did you mean 'a'\? \(known"):
        model.generate(2, condition=["A", "b"])
    with pytest.raises(OptionError, match="condition=1 is neither the name of a class nor a list of names"):
        model.generate(2, condition=1)
    with pytest.raises(OptionError, match=r"condition=\['b'\] is no class of the model"):
        model.generate(2, condition=[["b"], ["b"]])
    with pytest.raises(OptionError, match=f"prompt names '{gene}' twice; name each gene once"):
        model.generate(2, prompt=[gene, gene])
    with pytest.raises(OptionError, match="condition has 3 classes for 2 cells"):
        model.generate(2, condition=["a", "b", "a"])
    with pytest.raises(OptionError, match="prompt is AnnData, which says how many"):
        model.generate(2, prompt=tiny_adata)


def test_missing_classes_are_none(trained: Callable[..., Encoder]):
    model = trained(NAME, None, ON_GROUPS, **SMALL)
    none = model.generate(3, condition=["b", None, None])
    for missing in (["b", np.nan, None], pd.Series(["b", None, pd.NA], dtype="category")):
        cells = model.generate(3, condition=missing)
        assert (cells.X != none.X).nnz == 0
        assert list(cells.obs["group"].isna()) == [False, True, True]


def test_shorter_cells(model: Encoder):
    cells = model.generate(8, max_len=5)
    assert cells.obs["n_genes"].max() <= 4
    assert cells.uns["scforge"]["generated"]["max_len"] == 5


def test_a_model_without_cls(build: Callable[..., Encoder], trained: Callable[..., Encoder], tiny_adata: ad.AnnData):
    model = trained(NAME, {"name": "binned_expression", "append_cls": False}, pooling="mean", **SMALL)
    gene = model.vocab.genes[0]
    with pytest.raises(OptionError, match="prompt=None but the cells of the model have no CLS token"):
        model.generate(2)
    with pytest.raises(OptionError, match="gives no values, but the model has no CLS token"):
        model.generate(2, prompt=[gene])
    assert (model.generate(2, prompt={gene: 2.0})[:, gene].X.toarray() > 0).all()
    blank = tiny_adata[:3].copy()
    counts = np.ones(blank.shape, dtype=np.float32)
    counts[1, blank.var_names.isin(model.vocab.genes)] = 0
    blank.X = sparse.csr_matrix(counts)
    told = pytest.warns(ScforgeWarning, match="1 of 3 cells express no gene")
    with told, pytest.raises(DataError, match="prompt has no counts in cell 1, and the model no CLS token"):
        model.generate(prompt=blank)


def test_what_cannot_generate(build: Callable[..., Encoder], tiny_adata: ad.AnnData):
    with pytest.raises(OptionError, match="'gene_pooling' generates no cells"):
        build().generate(3)
    with pytest.warns(NotTrainedWarning, match="what it generates is random"):
        build(NAME, **SMALL).generate(1)
    with pytest.raises(OptionError, match="does not see the next token, which TransformerEncoder does"):
        build("transformer_encoder", "binned_expression", "next_gene_prediction")
    with pytest.raises(OptionError, match="n_conditions=5 but the objective 'next_gene_prediction' needs 2"):
        build(NAME, None, ON_GROUPS, n_conditions=5, **SMALL)
    with pytest.raises(DataError, match="condition_key='grp': 'grp' is not a column of obs"):
        build(NAME, None, {"condition_key": "grp"}, **SMALL)


def test_recipe_trains(tiny_adata: ad.AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from scforge.config import load_config, recipe_path

    tiny_adata.write_h5ad(tmp_path / "data.h5ad")
    monkeypatch.chdir(tmp_path)
    config = load_config(
        recipe_path("autoregressive"),
        overrides=["training.max_epochs=1", "model.hidden_dim=16", "data.preprocessing.hvg_selection=40"],
    )
    model = train_from_config(config, progress_bar=False)
    assert model.generate(2).n_vars == 40


def test_only_models_of_next_genes_generate(trained: Callable[..., Encoder]):
    model = trained(NAME, objective="joint_embedding", **SMALL)
    with pytest.raises(OptionError, match="made for the objective 'joint_embedding', which does not learn to generate"):
        model.generate(2)


def test_cells_without_an_end_need_a_length(trained: Callable[..., Encoder]):
    model = trained(NAME, {"name": "binned_expression", "append_eos": False}, **SMALL)
    with pytest.raises(OptionError, match="max_len=None but cells of this model have no end"):
        model.generate(2)
    assert (model.generate(2, max_len=5).obs["n_genes"] == 4).all()


def test_cells_to_go_on_with_must_fit(trained: Callable[..., Encoder], tiny_adata: ad.AnnData):
    model = trained(NAME, {"name": "binned_expression", "append_eos": True, "max_len": 6}, **SMALL)
    with pytest.raises(DataError, match="prompt has .* genes of the model in cell .*, but its cells have 4 at most"):
        model.generate(prompt=tiny_adata)
