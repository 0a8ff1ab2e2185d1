"""ScDiVa trained by masked diffusion, through the front class: cells by unmasking, values of hidden genes."""

from __future__ import annotations

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.errors import OptionError, ScforgeWarning
from scforge.estimators import Encoder, ScDiVa

SMALL = {"n_top_genes": 40, "hidden_dim": 16, "num_layers": 1, "num_heads": 2, "latent_dim": 4, "max_tokens": 32}


@pytest.fixture(scope="module")
def cells() -> ad.AnnData:
    """60 cells of two groups, which express 20 of 40 genes each, and some of the others."""
    generator = np.random.default_rng(0)
    group = np.arange(60) % 2
    mean = np.where((np.arange(40) % 2)[None, :] == group[:, None], 6.0, 0.1)
    obs = pd.DataFrame({"group": pd.Categorical(np.where(group == 0, "a", "b"))}, index=[f"cell{i}" for i in range(60)])
    var = pd.DataFrame(index=[f"gene{i}" for i in range(40)])
    return ad.AnnData(generator.poisson(mean).astype(np.float32), obs=obs, var=var)


@pytest.fixture(scope="module")
def model(cells: ad.AnnData) -> ScDiVa:
    ScDiVa.setup_anndata(cells)
    model = ScDiVa(cells, objective="masked_diffusion", **(SMALL | {"n_top_genes": 0}))
    model.train(40, batch_size=20, lr=1e-2, validation_size=0.0, progress_bar=False, accelerator="cpu")
    return model


@pytest.mark.slow
def test_it_learns(model: ScDiVa) -> None:
    loss = model.history_["train_loss"]["train_loss"]
    assert loss.iloc[-1] < 0.8 * loss.iloc[0]
    assert model.spec.model_options["denoising"] is True
    assert model.get_latent_representation(key_added=None).shape == (60, 4)


def test_generated_cells(model: ScDiVa, cells: ad.AnnData, tmp_path: Path) -> None:
    made = model.generate(40, seed=1, batch_size=16)
    assert made.shape == (40, 40)
    assert "bins" not in made.layers
    assert made.X.dtype == np.float32
    assert made.X.data.min() >= 0
    n_genes = (cells.X > 0).sum(axis=1)
    assert n_genes.min() <= made.obs["n_genes"].min() <= made.obs["n_genes"].max() <= n_genes.max()
    assert made.uns["scforge"]["generated"]["seed"] == 1
    again = model.generate(40, seed=1)
    assert ((again.X > 0) != (made.X > 0)).nnz == 0
    np.testing.assert_allclose(again.X.toarray(), made.X.toarray(), atol=1e-4)
    assert (model.generate(40, seed=2).X != made.X).nnz > 0
    assert set(model.generate(3, max_len=7, n_steps=3).obs["n_genes"]) == {7}
    model.save(tmp_path / "model")
    loaded = Encoder.load(tmp_path / "model").generate(40, seed=1)
    np.testing.assert_allclose(loaded.X.toarray(), made.X.toarray(), atol=1e-4)


def test_cells_are_of_one_group(model: ScDiVa) -> None:
    """Genes of one group come together, and a prompt decides of which."""
    made = model.generate(60, seed=0, prompt={"gene0": 5.0})
    of_a = np.asarray((made.X[:, ::2] > 0).sum(axis=1)).ravel()
    of_b = np.asarray((made.X[:, 1::2] > 0).sum(axis=1)).ravel()
    np.testing.assert_allclose(made[:, "gene0"].X.toarray(), 5.0)
    assert of_a.mean() > 1.5 * of_b.mean()


def test_cells_to_go_on_with(model: ScDiVa, cells: ad.AnnData) -> None:
    some = cells[5:8].copy()
    made = model.generate(prompt=some)
    assert list(made.obs_names) == ["cell5", "cell6", "cell7"]
    assert ((made.X > 0).toarray() >= (some.X > 0)).all()


def test_values_of_counted_genes(model: ScDiVa, cells: ad.AnnData) -> None:
    """Each from the others; nearer to the truth than to those of other cells."""
    denoised = model.denoise(cells)
    truth = np.log1p(cells.X / cells.X.sum(axis=1, keepdims=True) * 1e4)
    counted = cells.X > 0
    assert denoised.shape == (60, 40)
    assert (denoised.toarray()[~counted] == 0).all()
    error = np.square(denoised.toarray() - truth)[counted].mean()
    assert error < truth[counted].var()
    np.testing.assert_allclose(cells.layers["denoised"].toarray(), denoised.toarray())


def test_a_value_is_not_predicted_from_itself(model: ScDiVa, cells: ad.AnnData) -> None:
    tokens = model.tokenizer(model.cells(cells).block(np.arange(6)))
    hidden = tokens["input_ids"] == model.vocab.n_special
    assert hidden.any()
    found = [
        model.module.predict_values(**(tokens | {"values": values}), masked_values=hidden)
        for values in (tokens["values"].masked_fill(hidden, value) for value in (9.0, 1.0))
    ]
    np.testing.assert_array_equal(*(values.detach() for values in found))
    assert (found[0][hidden] != 0).all()


def test_values_of_other_genes(model: ScDiVa, cells: ad.AnnData) -> None:
    with pytest.warns(ScforgeWarning, match="never saw a gene that is off"):
        imputed = model.impute(cells, genes=["gene1", "gene0"])
    assert list(imputed) == ["gene1", "gene0"]
    assert np.isfinite(imputed.to_numpy()).all()
    truth = np.log1p(cells.X / cells.X.sum(axis=1, keepdims=True) * 1e4)
    counted = cells.X[:, 0] > 0
    np.testing.assert_allclose(imputed["gene0"].to_numpy()[counted], truth[counted, 0], rtol=1e-5)


def test_expression_is_decoded_too(model: ScDiVa, cells: ad.AnnData) -> None:
    expression = model.get_normalized_expression(key_added=None)
    of_a = expression.to_numpy()[::2]
    assert of_a[:, ::2].mean() > 1.5 * of_a[:, 1::2].mean()


def test_models_that_cannot(cells: ad.AnnData, model: ScDiVa) -> None:
    plain = ScDiVa(cells, **SMALL)
    plain.is_trained_ = True
    with pytest.raises(OptionError, match=r"objective 'variational', which does not learn .* 'masked_diffusion'"):
        plain.generate(3)
    with pytest.raises(OptionError, match=r"predicts no expression of hidden genes; .* objective='masked_diffusion'"):
        plain.denoise()
    with pytest.raises(OptionError, match="condition='a' but 'masked_diffusion' learns no classes"):
        model.generate(3, condition="a")
    with pytest.raises(OptionError, match="n_steps=0"):
        model.generate(3, n_steps=0)
    with pytest.raises(OptionError, match="n_cells=None; say how many"):
        model.generate(prompt=["gene0"])
    with pytest.raises(OptionError, match="supervised=True but the objective 'masked_diffusion' learns no labels"):
        ScDiVa(cells, objective="masked_diffusion", supervised=True, **SMALL)
    autoregressive = Encoder(_set_up(cells), "autoregressive_transformer", hidden_dim=8, num_layers=1, num_heads=2)
    autoregressive.is_trained_ = True
    with pytest.raises(OptionError, match="n_steps=4 is for models of 'masked_diffusion'; leave it out"):
        autoregressive.generate(3, n_steps=4)


def _set_up(cells: ad.AnnData) -> ad.AnnData:
    Encoder.setup_anndata(cells)
    return cells
