import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.neighbors import NearestNeighbors

from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.eval.scib import BATCH, BIO
from scforge.finetuning import get_task
from scforge.finetuning.tasks.integration import IntegrationHead, negative_binomial
from scforge.models.components import SIGReg
from scforge.models.components.heads import count_loss
from scforge.testing import raises
from scforge.training.objectives._alignment import align

QUIET = {"progress_bar": False, "accelerator": "cpu", "num_threads": 0}


def planted(n_cells: int = 240) -> ad.AnnData:
    """Two types, of which 8 genes each tell, in two batches, which 20 other genes tell apart loudly."""
    generator, n_genes = np.random.default_rng(0), 60
    kind, batch = np.arange(n_cells) % 2, np.arange(n_cells) // 2 % 2
    mean = np.full((n_cells, n_genes), 1.0)
    for of_type in (0, 1):
        mean[kind == of_type, of_type * 8 : of_type * 8 + 8] = 8.0
    mean[batch == 1, 20:40] = 12.0
    obs = pd.DataFrame(
        {"kind": np.where(kind, "t1", "t0"), "batch": pd.Categorical(np.where(batch, "b1", "b0"))},
        index=[f"cell{i}" for i in range(n_cells)],
    )
    var = pd.DataFrame(index=[f"gene{i}" for i in range(n_genes)])
    return ad.AnnData(sparse.csr_matrix(generator.poisson(mean).astype(np.float32)), obs=obs, var=var)


def same(embedding: np.ndarray, values: pd.Series, k: int = 15) -> float:
    """Share of the nearest cells that are of the same group."""
    nearest = NearestNeighbors(n_neighbors=k + 1).fit(embedding).kneighbors(embedding)[1][:, 1:]
    codes = np.asarray(values.astype("category").cat.codes)
    return float((codes[nearest] == codes[:, None]).mean())


@pytest.fixture(scope="module")
def base() -> Encoder:
    """A small light encoder of the planted cells; nothing in its training knows of batches."""
    adata = planted()
    Encoder.setup_anndata(adata, batch_key="batch", labels_key="kind")
    model = Encoder(adata, objective="joint_embedding", n_top_genes=60, hidden_dim=32, ffn_dim=32, latent_dim=4)
    model.train(max_epochs=25, batch_size=60, **QUIET)
    return model


@pytest.fixture(scope="module")
def integrated(base: Encoder) -> Encoder:
    return base.finetune("integration", max_epochs=40, batch_size=96, lr=5e-3, alignment=0.02, **QUIET)


@pytest.mark.slow
def test_batches_mix_and_types_stay_apart(base, integrated):
    adata = base.adata
    before = base.get_latent_representation(key_added=None)
    after = integrated.predict(adata)
    assert same(before, adata.obs["batch"]) > 0.8
    assert same(after, adata.obs["batch"]) < 0.65
    assert same(after, adata.obs["kind"]) > 0.9


def test_what_is_written(integrated, tmp_path):
    adata = planted()
    embedding = integrated.predict(adata)
    assert embedding.dtype == np.float32
    assert embedding.shape == (240, 4)
    np.testing.assert_array_equal(adata.obsm["X_scforge_integrated"], embedding)
    np.testing.assert_array_equal(integrated.get_latent_representation(adata, key_added=None, correction=1), embedding)
    integrated.save(tmp_path / "model")
    loaded = Encoder.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict(adata), embedding)
    uncorrected = loaded.predict(adata, correction=0)
    assert np.abs(uncorrected - embedding).max() > 1e-3
    np.testing.assert_array_equal(loaded.get_latent_representation(adata, key_added=None), uncorrected)
    np.testing.assert_allclose(loaded.predict(adata, correction=0.5), (embedding + uncorrected) / 2, atol=1e-5)


def test_cells_of_new_batches_and_without_batches_are_embedded(integrated):
    adata = planted()
    uncorrected = integrated.get_latent_representation(adata, key_added=None)
    adata.obs["batch"] = "new"
    with pytest.warns(ScforgeWarning, match="240 of 240 cells have no batch among those of the training cells"):
        integrated.predict(adata, key_added="mine")
    assert "mine" in adata.obsm
    del adata.obs["batch"]
    with pytest.warns(ScforgeWarning, match="not corrected for batches: 'batch' is not a column"):
        np.testing.assert_array_equal(integrated.predict(adata), uncorrected)
    with raises(OptionError, "correction"):
        integrated.predict(adata, correction=1)


def test_adapters_keep_the_correction_for_the_batches_of_the_task(base, tmp_path):
    adata = planted()
    adata.obs["donor"] = np.where(np.arange(240) % 3 == 0, "b0", "b1")  # the names of batches, for other cells
    tuned = base.finetune("integration", adata, batch_key="donor", lora=True, max_epochs=1, **QUIET)
    Encoder.setup_anndata(adata, batch_key="batch", labels_key="kind")
    embedding = tuned.predict(adata)
    np.testing.assert_array_equal(tuned.get_latent_representation(adata, key_added=None, correction=1), embedding)
    base.save(tmp_path / "base")
    tuned.save(tmp_path / "adapter", adapter_only=True)
    np.testing.assert_array_equal(Encoder.load(tmp_path / "adapter").predict(adata), embedding)


def test_training_reconstructs_cells_from_their_neighbors(cells200, tuned, step):
    cells200.obs["lane"] = [f"l{i % 3}" for i in range(200)]
    rows = np.arange(40)
    for translation in (0.0, 2.0):
        predictor = tuned("integration", cells200, batch_key="lane", translation=translation, alignment=0)
        module, task = predictor.module, predictor.task
        for part in module.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        module.train()
        loss, figures = step(predictor, rows)
        assert ("translated" in figures) == (translation > 0)
        if not translation:
            torch.testing.assert_close(loss.detach(), figures["decoder"])
            continue
        batch = task.prepare(predictor.cells.block(rows), predictor.tokenizer, epoch=0, seed=0)
        has = batch["has_neighbor"].bool()
        assert has.any()
        tokens = {name: batch[name] for name in ("input_ids", "attention_mask", "values")}
        of_neighbors, counts = module.encode(**tokens)[40:][has], batch["counts"][has]
        logits = module.head.decode(of_neighbors, batch["batch"][has])[:, -counts.shape[1] :]
        by_hand = negative_binomial(logits, counts, module.head.log_dispersion[-counts.shape[1] :], None)
        torch.testing.assert_close(loss, figures["decoder"] + 2.0 * by_hand, rtol=1e-4, atol=1e-5)


def test_labels_change_nothing(base):
    def trained(labels: np.ndarray) -> np.ndarray:
        adata = planted()
        adata.obs["kind"] = labels
        Encoder.setup_anndata(adata, batch_key="batch", labels_key="kind")
        return base.finetune("integration", adata, max_epochs=1, **QUIET).predict(adata)

    labels = np.asarray(planted().obs["kind"])
    np.testing.assert_array_equal(trained(labels), trained(np.random.default_rng(0).permutation(labels)))


def test_cells_without_batch_take_no_part(base, tmp_path):
    adata = planted()
    adata.obs["donor"] = [None, None, *(f"d{i // 2 % 2}" for i in range(238))]
    model = base.finetune("integration", adata, batch_key="donor", max_epochs=1, **QUIET)
    split = model.fitted.split_of(model.open_cells())
    assert sorted(np.concatenate([split.train, split.validation, split.test])) == list(range(2, 240))
    assert model.spec.tuning.task_options["batches"] == ["d0", "d1"]
    model.save(tmp_path / "model")
    loaded = Encoder.load(tmp_path / "model", adata)
    loaded.train(max_epochs=1, **QUIET)
    with pytest.warns(ScforgeWarning, match="2 of 240 cells have no batch"):
        assert np.isfinite(loaded.predict(adata)).all()
    for batch, message in (("b0", "batch_key='batch' has only one batch"), (None, None)):
        adata.obs["batch"] = batch
        with pytest.raises(DataError, match=message):
            base.finetune("integration", adata, batch_key="batch", **QUIET)


def test_figures_and_the_validation_loss(cells200, tuned, step):
    cells200.obs["lane"] = [f"l{i % 3}" for i in range(200)]
    predictor = tuned("integration", cells200, batch_key="lane", alignment=0.1)
    predictor.module.eval()
    first, figures = step(predictor, np.arange(40))
    again, _ = step(predictor, np.arange(40))
    assert first.item() == again.item()
    torch.testing.assert_close(first, figures["decoder"] + 0.1 * figures["sigreg"])
    assert all(torch.isfinite(value) for value in figures.values())


def test_alignment_is_about_each_batch():
    generator = torch.Generator().manual_seed(0)
    cells = torch.randn(200, 4, generator=generator)
    codes = torch.arange(200) % 2
    apart = cells + 2.0 * codes[:, None]
    sigreg = SIGReg(64)
    matched, unmatched = (align(sigreg, z, codes, 2, fresh=False) for z in (cells, apart - apart.mean(dim=0)))
    assert matched < 2.0 < unmatched
    # One batch, or one that is not known, is as the plain statistic.
    noise = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for code in (0, -1):
        one = align(sigreg, cells, torch.full((200,), code), 2, fresh=False)
        torch.testing.assert_close(one, sigreg.compute(cells, noise))
    few = torch.where(torch.arange(200) < 5, 1, 0)
    torch.testing.assert_close(align(sigreg, cells, few, 2, fresh=False), sigreg.compute(cells[5:], noise))


def test_the_likelihood_is_that_of_counts():
    generator = torch.Generator().manual_seed(0)
    logits, counts = torch.randn(5, 7, generator=generator), torch.poisson(torch.full((5, 7), 3.0))
    dispersion = torch.randn(7, generator=generator)
    measured = torch.tensor([True] * 6 + [False])
    counts[:, 6] = 0
    rate = logits[..., :6].log_softmax(dim=-1) + counts.sum(dim=1, keepdim=True).log()
    exact = count_loss("negative_binomial", rate, counts[:, :6], dispersion[:6].expand(5, 6))
    expected = (exact - torch.lgamma(counts[:, :6] + 1)).mean()
    torch.testing.assert_close(negative_binomial(logits, counts, dispersion, measured), expected)
    logits[..., 6] += 5.0
    torch.testing.assert_close(negative_binomial(logits, counts, dispersion, measured), expected)


def test_the_decoder_takes_over_a_reference():
    reference = IntegrationHead(4, 12, 2)
    query = IntegrationHead(4, 12, 3, n_reference=2)
    query.take_over(reference)
    z, codes = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
    torch.testing.assert_close(query.decode(z, codes), reference.decode(z, codes))
    torch.testing.assert_close(query.decode(z, codes * 0 + 2), reference.decode(z, codes * 0 - 1))
    assert [name for name, p in query.named_parameters() if p.requires_grad] == ["batches"]


@pytest.mark.slow
def test_evaluation(integrated, monkeypatch):
    monkeypatch.setattr(
        "scforge.finetuning.tasks.integration.embedding_baselines",
        lambda adata, names, batch_key, seed: {"pca": adata.X.toarray()[:, :40]},
    )
    table = integrated.evaluate()
    assert list(table.index) == ["scforge", "frozen_embedding", "pca"]
    assert {"bio", "batch", "total", *BIO, *BATCH} == set(table)
    assert table.loc["scforge", "batch"] > table.loc["pca", "batch"]
    np.testing.assert_allclose(table["total"], 0.6 * table["bio"] + 0.4 * table["batch"])
    without = get_task("integration", batch_key="batch")
    with pytest.raises(OptionError, match="labels_key=None"):
        without.evaluate(None)
