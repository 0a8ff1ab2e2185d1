from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

from scforge.errors import DataError, GeneMismatchError, OptionError
from scforge.estimators import Encoder
from scforge.estimators.reference import weighted_vote

QUIET = {"progress_bar": False, "accelerator": "cpu", "num_threads": 0}
N_GENES = 60


def cells(batches: list[str], types: list[str], n: int = 120, seed: int = 0) -> ad.AnnData:
    """Types t0 .. t3, of which 8 genes each tell; each batch has a shift of its own."""
    generator = np.random.default_rng(seed)
    kind, batch = np.array(types)[np.arange(n) % len(types)], generator.permutation(np.resize(batches, n))
    mean = np.full((n, N_GENES), 1.0)
    for name in types:
        first = 8 * int(name[1])
        mean[kind == name, first : first + 8] = 10.0
    for name in batches:
        mean[batch == name, 32 + 4 * int(name[1]) : 36 + 4 * int(name[1])] *= 4.0
    obs = pd.DataFrame({"kind": kind, "lane": batch}, index=[f"{seed}-{i}" for i in range(n)])
    var = pd.DataFrame(index=[f"gene{i}" for i in range(N_GENES)])
    return ad.AnnData(sparse.csr_matrix(generator.poisson(mean).astype(np.float32)), obs=obs, var=var)


@pytest.fixture(scope="module")
def reference() -> Encoder:
    """A model of three types in two batches."""
    adata = cells(["b0", "b1"], ["t0", "t1", "t2"], n=240)
    Encoder.setup_anndata(adata, batch_key="lane", labels_key="kind")
    model = Encoder(adata, n_top_genes=N_GENES, hidden_dim=32, ffn_dim=32, latent_dim=8)
    model.train(max_epochs=20, batch_size=60, **QUIET)
    return model


@pytest.fixture(scope="module")
def integrated(reference: Encoder) -> Encoder:
    return reference.finetune("integration", max_epochs=3, batch_size=60, **QUIET)


@pytest.fixture
def query() -> ad.AnnData:
    """Cells of a batch and of a type that the reference does not have; nobody has labelled them."""
    return cells(["b1", "b2"], ["t0", "t1", "t3"], seed=1)


def weights(model: Encoder) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.module.state_dict().items()}


@pytest.mark.parametrize("which", ["reference", "integrated"])
def test_the_query_is_learned_beside_a_reference_that_stays(which, query, request, tmp_path):
    model = request.getfixturevalue(which)
    query.obs = query.obs.drop(columns="kind")
    before, embedded = weights(model), model.get_latent_representation(query, key_added=None)
    mapped = Encoder.load_query_data(query, model)
    np.testing.assert_allclose(mapped.get_latent_representation(key_added=None), embedded, atol=1e-5)
    backbone = {name: p.clone() for name, p in mapped.backbone.named_parameters() if "base_layer" in name}
    mapped.train(max_epochs=2, batch_size=40, lr=1e-2, **QUIET)
    assert backbone
    assert all(torch.equal(dict(mapped.backbone.named_parameters())[name], value) for name, value in backbone.items())
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    learned = mapped.get_latent_representation(key_added=None)
    assert np.abs(learned - embedded).max() > 1e-3
    np.testing.assert_allclose(model.get_latent_representation(query, key_added=None), embedded, atol=1e-6)
    assert np.isfinite(mapped.history_["validation_loss"]["validation_loss"]).all()
    mapped.save(tmp_path / "query")
    loaded = Encoder.load(tmp_path / "query", query)
    np.testing.assert_array_equal(loaded.get_latent_representation(key_added=None), learned)
    loaded.train(max_epochs=1, batch_size=40, **QUIET)
    table = loaded.transfer_labels(labels_key="kind", reference=model)
    assert set(table["label"]) <= {"t0", "t1", "t2"}


def test_new_batches_get_parameters_of_their_own(integrated, query, caplog):
    with caplog.at_level("INFO", logger="scforge"):
        mapped = Encoder.load_query_data(query, integrated)
    assert "obs['lane'] that the reference knows, and that are taken for its own: 'b1'." in caplog.text
    assert mapped.spec.tuning.task_options["batches"] == ["b0", "b1", "b2"]
    trained = {name for name, p in mapped.module.head.named_parameters() if p.requires_grad}
    assert trained == {"batches"}
    assert mapped.module.head.batches.shape[0] == 1
    known = Encoder.load_query_data(query[query.obs["lane"] == "b1"].copy(), integrated)
    assert known.module.head.batches.shape[0] == 0
    query.obs = query.obs.rename(columns={"lane": "plate"})
    assert (
        Encoder.load_query_data(query, integrated, batch_key="plate").spec.tuning.task_options["batch_key"] == "plate"
    )
    with pytest.raises(DataError, match="'lane' is not a column of obs"):
        Encoder.load_query_data(query, integrated)


def test_genes_are_found_by_name(reference, query, caplog):
    with caplog.at_level("INFO", logger="scforge"):
        plain = Encoder.load_query_data(query.copy(), reference).get_latent_representation(key_added=None)
    assert "The query has 100.0 % of the genes" in caplog.text
    order = np.random.default_rng(0).permutation(N_GENES)
    moved = Encoder.load_query_data(query[:, order].copy(), reference)
    np.testing.assert_allclose(moved.get_latent_representation(key_added=None), plain, atol=1e-5)
    fewer = Encoder.load_query_data(query[:, order[:45]].copy(), reference)
    fewer.train(max_epochs=1, batch_size=40, **QUIET)
    assert fewer.cells().overlap == pytest.approx(0.75)
    foreign = query.copy()
    foreign.var_names = [f"other{i}" for i in range(N_GENES)]
    with pytest.raises(GeneMismatchError):
        Encoder.load_query_data(foreign, reference)


def test_labels_are_transferred(reference, query):
    truth = np.asarray(query.obs["kind"])
    table = reference.transfer_labels(query)
    known = truth != "t3"
    assert (np.asarray(table["label"])[known] == truth[known]).mean() > 0.9
    assert table["uncertainty"][~known].mean() > table["uncertainty"][known].mean() + 0.05
    assert query.obs["scforge_kind"].dtype == "category"
    assert query.obs["scforge_kind_uncertainty"].dtype == np.float32
    np.testing.assert_array_equal(query.obs["kind"], truth)
    limit = float(table["uncertainty"].quantile(0.9))
    strict = reference.transfer_labels(query, threshold=limit, key_added="mine", n_neighbors=10_000)
    assert ((strict["label"] == "unassigned") == (strict["uncertainty"] > limit)).all()
    assert "mine_uncertainty" in query.obs


def test_a_query_model_knows_its_reference(reference, query):
    mapped = Encoder.load_query_data(query, reference)
    with pytest.raises(OptionError, match="'adaptation' has no labels to be scored by"):
        mapped.evaluate()
    table = mapped.transfer_labels()
    pd.testing.assert_frame_equal(table, reference.transfer_labels(query))
    other = cells(["b0", "b1"], ["t0", "t1", "t2"], n=90, seed=3)
    assert (mapped.transfer_labels(reference=other)["label"] == table["label"]).mean() > 0.8


def test_reference_cells_without_label_do_not_vote(reference, query):
    few = cells(["b0", "b1"], ["t0", "t1", "t2"], n=90, seed=3)
    few.obs["kind"] = few.obs["kind"].where(few.obs["kind"] != "t1")
    assert set(reference.transfer_labels(query, reference=few)["label"]) <= {"t0", "t2"}
    few.obs["kind"] = "t0"
    with pytest.raises(DataError, match="labels_key='kind' has fewer than two labels"):
        reference.transfer_labels(query, reference=few)
    with pytest.raises(DataError, match="'type' is not a column of obs"):
        reference.transfer_labels(query, labels_key="type")


def test_what_cannot_be_done_is_said(reference, integrated, query, tmp_path):
    annotator = reference.finetune("annotation", max_epochs=1, **QUIET)
    for model, options, message in [
        (annotator, {}, "fine-tuned for 'annotation'"),
        (reference, {"batch_key": "lane"}, "batch_key='lane' has no use"),
        (reference, {"lora": False}, "lora=False leaves nothing to train"),
        (3, {}, "reference_model is of type 'int'"),
    ]:
        with pytest.raises(OptionError, match=message):
            Encoder.load_query_data(query, model, **options)
    with pytest.raises(OptionError, match="query=None"):
        reference.transfer_labels()
    reference.save(tmp_path / "reference")
    mapped = Encoder.load_query_data(query, tmp_path / "reference")
    with pytest.raises(OptionError, match="loaded without its cells"):
        mapped.transfer_labels(labels_key="kind")


def test_votes():
    generator = np.random.default_rng(0)
    landmarks, codes = generator.normal(size=(50, 3)), generator.integers(0, 4, 50)
    points = generator.normal(size=(6, 3))
    votes = weighted_vote(landmarks, codes, points, 5, 7)
    for point, vote in zip(points, votes, strict=True):
        distances = np.linalg.norm(landmarks - point, axis=1)
        nearest = np.argsort(distances)[:7]
        kernel = np.exp(-(distances[nearest] ** 2) / (2 * distances[nearest].mean() ** 2))
        expected = [kernel[codes[nearest] == code].sum() / kernel.sum() for code in range(5)]
        np.testing.assert_allclose(vote, expected)
    line, cell = np.array([[0.1], [-0.2], [2.0], [2.1]]), np.zeros((1, 1))
    vote = weighted_vote(line, np.array([0, 0, 1, 1]), cell, 2, 4)
    assert vote[0, 0] > 1.5 * vote[0, 1]  # as many neighbours of each class; the nearer ones win
    np.testing.assert_allclose(weighted_vote(1e-3 * line, np.array([0, 0, 1, 1]), cell, 2, 4), vote)
    same = weighted_vote(np.zeros((3, 2)), np.array([0, 0, 1]), np.zeros((1, 2)), 2, 3)
    np.testing.assert_allclose(same, [[2 / 3, 1 / 3]])
