import functools
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.errors import DataError, GeneMismatchError, NotTrainedWarning, OptionError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.testing import raises

SMALL = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "n_top_genes": 40}
ON_GROUPS = {"name": "next_gene_prediction", "condition_key": "group", "condition_dropout": 0.2}
NAME = "autoregressive_transformer"
SERIES = pd.Series([1.0] * 99)
KINDS = {
    "plain": {},
    "groups": {"objective": ON_GROUPS},
    "no cls": {"tokenizer": {"name": "binned_expression", "append_cls": False}, "pooling": "mean"},
    "no end": {"tokenizer": {"name": "binned_expression", "append_eos": False}},
    "short": {"tokenizer": {"name": "binned_expression", "append_eos": True, "max_len": 6}},
    "views": {"objective": "joint_embedding"},
}


@pytest.fixture(scope="module")
def made(many_adata: ad.AnnData) -> Callable[[str], Encoder]:

    @functools.cache
    def made(kind: str) -> Encoder:
        adata = many_adata[:60].copy()
        Encoder.setup_anndata(adata)
        model = Encoder(adata, NAME, **SMALL, **KINDS[kind])
        model.train(2, batch_size=16, progress_bar=False, accelerator="cpu")
        return model

    return made


@pytest.fixture
def model(made: Callable[[str], Encoder]) -> Encoder:
    return made("plain")


def test_defaults(model: Encoder):
    spec = model.spec
    assert (spec.tokenizer, spec.objective) == ("binned_expression", "next_gene_prediction")
    assert (spec.model_options["n_bins"], spec.model_options["max_seq_len"]) == (51, 42)
    assert model.get_latent_representation().shape == (60, 16)
    assert model.module.bin_values[50] > 3  # log1p CP10K, no longer numbers of bins
    assert Encoder(model.adata, NAME, {"name": "binned_expression", "n_bins": 8}, **SMALL).module.n_bins == 8


def test_generated_cells(model: Encoder, tmp_path: Path):
    cells = model.generate(7, seed=1, batch_size=3)
    assert cells.shape == (7, 40)
    assert cells.X.dtype == np.float32
    assert list(cells.var_names) == list(model.vocab.genes)
    bins = cells.layers["bins"].toarray()
    assert (cells.obs["n_genes"].to_numpy() == (bins > 0).sum(axis=1)).all()
    np.testing.assert_allclose(cells.X.toarray(), np.where(bins > 0, model.module.bin_values.numpy()[bins], 0))
    made_with = cells.uns["scforge"]["generated"]
    assert (made_with["seed"], made_with["vocab_hash"]) == (1, model.vocab.hash)
    cells.write_h5ad(tmp_path / "cells.h5ad")
    assert (ad.read_h5ad(tmp_path / "cells.h5ad").X != cells.X).nnz == 0
    assert (model.generate(7, seed=1).X != cells.X).nnz == 0
    assert (model.generate(7, seed=2).X != cells.X).nnz > 0
    assert model.generate(8, max_len=5).obs["n_genes"].max() <= 4


def test_saved_model_generates_the_same(made: Callable[[str], Encoder], tmp_path: Path):
    made("groups").save(tmp_path / "model")
    loaded = Encoder.load(tmp_path / "model")
    one, two = (m.generate(3, condition="b", top_k=5, temperature=0.5) for m in (made("groups"), loaded))
    assert (one.X != two.X).nnz == 0
    assert list(two.obs["group"]) == ["b"] * 3
    assert two.uns["scforge"]["generated"]["top_k"] == 5


@pytest.mark.slow
def test_classes_are_learnt(build: Callable[..., Encoder]):
    model = build(NAME, None, ON_GROUPS, **SMALL)
    model.train(40, batch_size=6, lr=5e-3, progress_bar=False, accelerator="cpu")
    cells = model.generate(60, condition=["a", "b", None] * 20)
    assert list(cells.obs["group"].cat.categories) == ["a", "b"]
    first = cells.var_names.isin([f"gene{i}" for i in range(10)])
    high = np.asarray(cells[:, first].X.sum(axis=1)).ravel()
    assert high[0::3].mean() > 1.5 * high[1::3].mean()


def test_missing_classes_are_none(made: Callable[[str], Encoder]):
    model = made("groups")
    none = model.generate(3, condition=["b", None, None])
    for missing in (["b", np.nan, None], pd.Series(["b", None, pd.NA], dtype="category")):
        cells = model.generate(3, condition=missing)
        assert (cells.X != none.X).nnz == 0
        assert list(cells.obs["group"].isna()) == [False, True, True]


def test_prompts(model: Encoder):
    genes = list(model.vocab.genes[:3])
    listed = model.generate(5, prompt=genes)
    assert (listed[:, genes].layers["bins"].toarray() > 0).all()
    values = model.generate(5, prompt={genes[0]: 1e-3, genes[1]: 100.0}).layers["bins"].toarray()
    means = model.module.bin_values[1:]
    assert (values[:, :2] == [int(means.argmin()) + 1, int(means.argmax()) + 1]).all()
    some = model.adata[5:9].copy()
    continued = model.generate(prompt=some)
    assert list(continued.obs_names) == ["cell5", "cell6", "cell7", "cell8"]
    tokens = model.tokenizer(model.open_cells(some).block(np.arange(4)))
    for row, bins in enumerate(continued.layers["bins"].toarray()):
        mask = tokens["input_ids"][row] >= model.vocab.n_special
        kept = (tokens["input_ids"][row][mask] - model.vocab.n_special).numpy()
        assert (bins[kept] == tokens["bin_ids"][row][mask].numpy()).all()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("plain", {"temperature": -1.0}, "temperature=-1.0"),
        ("plain", {"top_k": 0}, "top_k=0"),
        ("plain", {"condition": "a"}, "the model has no classes"),
        (
            "plain",
            {"prompt": ["gene60", "nogene"]},
            "prompt contains names that are not among the 40 genes of the model: 'nogene'",
        ),
        ("plain", {"prompt": ["gene60", "gene60"]}, "prompt contains the gene 'gene60' more than once, possibly"),
        ("plain", {"prompt": {"gene60": -1.0}}, "must be a positive number"),
        ("plain", {"prompt": SERIES}, r"^prompt is of type Series; pass a list of genes, a dict .*AnnData.$"),
        ("plain", {"prompt": ad.AnnData(np.ones((3, 4)))}, "no effect if prompt is an AnnData"),
        ("plain", {"n_cells": None}, "n_cells=None is not a whole number of cells"),
        ("plain", {"max_len": 1}, "max_len=1 is too small; pass at least 2"),
        ("plain", {"max_len": 99}, "max_len=99 is more than the 42 tokens"),
        ("groups", {"condition": ["A", "b", "b"]}, r"condition='A' is not a class .* did you mean 'a'\? \(known"),
        ("groups", {"condition": 1}, "condition='1' is not a class of the model"),
        ("groups", {"condition": ["a", "b"]}, "condition has 2 classes for 3 cells"),
        ("no cls", {}, "prompt must contain values, because the model has no CLS token"),
        ("no cls", {"prompt": ["gene60"]}, "must contain values, because the model has no CLS token"),
        ("no end", {}, "max_len=None, but the cells of this model have no end token"),
        ("views", {}, "and objective='joint_embedding' cannot generate cells"),
    ],
)
def test_bad_arguments(made: Callable[[str], Encoder], kind: str, options: dict, message: str):
    with pytest.raises((OptionError, GeneMismatchError), match=message):
        made(kind).generate(**{"n_cells": 3, **options})


def test_models_without_cls_or_end(made: Callable[[str], Encoder]):
    model = made("no cls")
    assert (model.generate(2, prompt={"gene60": 2.0})[:, "gene60"].X.toarray() > 0).all()
    blank = model.adata[:3].copy()
    counts = np.ones(blank.shape, dtype=np.float32)
    counts[1, blank.var_names.isin(model.vocab.genes)] = 0
    blank.X = sparse.csr_matrix(counts)
    told = pytest.warns(ScforgeWarning, match="1 of 3 cells express no gene")
    with told, raises(DataError, "prompt"):
        model.generate(prompt=blank)
    assert (made("no end").generate(2, max_len=5).obs["n_genes"] == 4).all()
    with raises(DataError, "prompt"):
        made("short").generate(prompt=made("short").adata)


def test_what_cannot_generate(build: Callable[..., Encoder]):
    with pytest.raises(OptionError, match="'gene_pooling' and objective='neighbor_denoising' cannot generate cells"):
        build().generate(3)
    with pytest.warns(NotTrainedWarning, match="its generated cells are random"):
        build(NAME, **SMALL).generate(1)
    for parts, options, error, message in [
        (
            ("transformer_encoder", "binned_expression", "next_gene_prediction"),
            {},
            OptionError,
            "receives the token that it has to predict",
        ),
        (
            (NAME, None, ON_GROUPS),
            {"n_conditions": 5},
            OptionError,
            "n_conditions=5 is invalid, .* objective .* requires 2",
        ),
        ((NAME, None, {"condition_key": "grp"}), {}, DataError, "condition_key='grp' is not a column of obs"),
        ((NAME,), {"n_bins": 20}, OptionError, "n_bins=20 is invalid, .* 'binned_expression' creates 51 bins"),
    ]:
        with pytest.raises(error, match=message):
            build(*parts, **(SMALL | options))
