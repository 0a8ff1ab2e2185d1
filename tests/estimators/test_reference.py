from __future__ import annotations

import copy
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.neighbors import NearestNeighbors

from scforge.errors import DataError, GeneMismatchError, OptionError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.estimators.reference import weighted_vote
from scforge.pl import calibration

QUIET = {"progress_bar": False, "accelerator": "cpu", "num_threads": 0}
N_GENES = 60
REAL = Path(__file__).parents[3] / "shared" / "data" / "cells"
VECTORS = "encoder.decoder.expression.batch_embedding.weight"
LEFT = "not comparable with the one that the reference model wrote"


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
def viewed() -> Encoder:
    """A model of an objective that has no decoder, so that its encoder has to adapt to a query."""
    adata = cells(["b0", "b1"], ["t0", "t1", "t2"], n=240)
    Encoder.setup_anndata(adata, labels_key="kind")
    objective = {"objective": "joint_embedding", "architecture": "gene_pooling", "pooling": "weighted_sum"}
    model = Encoder(adata, **objective, hidden_dim=32, ffn_dim=32, latent_dim=8)
    model.train(max_epochs=5, batch_size=60, **QUIET)
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


def mixing(reference: np.ndarray, query: np.ndarray) -> float:
    """Return the share of reference cells among the 30 nearest neighbours of query cells."""
    found = NearestNeighbors(n_neighbors=31).fit(np.concatenate([reference, query])).kneighbors(query)[1]
    others = found != len(reference) + np.arange(len(query))[:, None]
    return float(np.average(found < len(reference), weights=others))


def test_training_teaches_the_decoder_the_batches_of_the_query_alone(reference, query, tmp_path):
    query.obs = query.obs.drop(columns="kind")
    before, embedded = weights(reference), reference.get_latent_representation(query, key_added=None)
    mapped = Encoder.load_query_data(query, reference, lora=False)
    np.testing.assert_array_equal(mapped.get_latent_representation(key_added=None), embedded)
    assert mapped.spec.objective_options["batches"] == ["b0", "b1", "b2"]
    own = weights(mapped)
    torch.testing.assert_close(own[VECTORS][2], own[VECTORS][:2].mean(dim=0))
    for options in ({}, {"weight_decay": 1.0, "ema_decay": 0.9}):
        mapped.train(max_epochs=4, batch_size=40, **options, **QUIET)
    np.testing.assert_array_equal(mapped.get_latent_representation(), embedded)
    assert [key for key in query.obsm if "scforge" in key] == ["X_scforge"]
    changed = [name for name, value in weights(mapped).items() if not torch.equal(value, own[name])]
    assert changed == [VECTORS]
    assert torch.equal(weights(mapped)[VECTORS][:2], own[VECTORS][:2])
    errors = mapped.history_["validation_squared_error"]["validation_squared_error"]
    assert errors.iloc[-1] < errors.iloc[0]
    assert all(torch.equal(value, before[name]) for name, value in weights(reference).items())
    mapped.save(tmp_path / "query")
    loaded = Encoder.load(tmp_path / "query", query)
    loaded.train(max_epochs=1, batch_size=40, **QUIET)
    assert not torch.equal(weights(loaded)[VECTORS][2], weights(mapped)[VECTORS][2])
    assert torch.equal(weights(loaded)[VECTORS][:2], own[VECTORS][:2])
    np.testing.assert_array_equal(loaded.get_latent_representation(key_added=None), embedded)
    chained = Encoder.load_query_data(cells(["b2", "b3"], ["t0"], n=60, seed=2), mapped)
    assert chained.spec.objective_options["batches"] == ["b0", "b1", "b2", "b3"]


def test_a_copy_of_a_query_model_teaches_the_new_batches_alone(reference, query):
    mapped = Encoder.load_query_data(query, reference)
    before = weights(mapped)[VECTORS]
    mapped.module = copy.deepcopy(mapped.module)
    mapped.train(max_epochs=1, batch_size=40, **QUIET)
    assert torch.equal(weights(mapped)[VECTORS][:2], before[:2])
    assert not torch.equal(weights(mapped)[VECTORS][2], before[2])


def test_a_query_model_keeps_32_bit_weights(reference, query):
    mapped = Encoder.load_query_data(query, reference)
    with pytest.raises(OptionError, match=r"'bf16-true' rounds the weights .* with its reference; take 'bf16-mixed'\."):
        mapped.train(max_epochs=1, precision="bf16-true", **QUIET)
    with pytest.raises(OptionError, match="strategy='fsdp' would change what a query model shares"):
        mapped.train(max_epochs=1, strategy="fsdp", **QUIET)


def test_a_query_model_names_its_reference(reference, query):
    with_room = Encoder.load_query_data(query, reference)
    without = Encoder.load_query_data(query[query.obs["lane"] == "b1"].copy(), reference)
    assert with_room.spec.tuning.base["sha256"] == without.spec.tuning.base["sha256"]


def test_batches_of_the_query_have_a_column_of_their_own(reference, query):
    query.obs = query.obs.rename(columns={"lane": "plate"})
    mapped = Encoder.load_query_data(query, reference)
    with pytest.raises(OptionError, match=r"nothing to train: .*load_query_data\(\.\.\., batch_key=\.\.\.\)"):
        mapped.train(max_epochs=1, **QUIET)
    assert mapped.get_latent_representation(key_added=None).shape == (120, 8)
    with pytest.raises(DataError, match="'lane' is not a column of obs"):
        Encoder.load_query_data(query, reference, batch_key="lane")
    options = Encoder.load_query_data(query, reference, batch_key="plate").spec.objective_options
    assert (options["batch_key"], options["batches"]) == ("plate", ["b0", "b1", "b2"])
    Encoder.setup_anndata(query, batch_key="plate")
    assert Encoder.load_query_data(query, reference).spec.objective_options["batch_key"] == "plate"
    known = Encoder.load_query_data(query[query.obs["plate"] == "b1"].copy(), reference, batch_key="plate")
    with pytest.raises(OptionError, match="the query has no new ones"):
        known.train(max_epochs=1, **QUIET)


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize(
    ("file", "key", "held_out"),
    [
        ("sc_mixology", "batch", ["sc_celseq2"]),
        ("sc_mixology", "batch", ["sc_dropseq"]),
        ("kang_ctrl_8donor", "sample_id", ["1256", "1488"]),
    ],
)
def test_real_queries_mix_with_the_stored_embedding_of_the_reference(file, key, held_out):
    if not (REAL / f"{file}.h5ad").exists():
        pytest.skip("the shared real data are not here")
    adata = ad.read_h5ad(REAL / f"{file}.h5ad")
    adata = adata[np.random.default_rng(0).permutation(adata.n_obs)[:2000]].copy()
    of_query = adata.obs[key].isin(held_out).to_numpy()
    known, query = adata[~of_query].copy(), adata[of_query].copy()
    Encoder.setup_anndata(known, batch_key=key)
    model = Encoder(known)
    model.train(max_epochs=10, **QUIET)
    stored = model.get_latent_representation()
    mapped = Encoder.load_query_data(query, model)
    before = mixing(stored, mapped.get_latent_representation(key_added=None))
    mapped.train(max_epochs=20, **QUIET)
    assert before > 0.05
    assert mixing(stored, mapped.get_latent_representation()) >= before
    errors = mapped.history_["validation_squared_error"]["validation_squared_error"]
    assert errors.iloc[-1] < errors.iloc[0]


@pytest.mark.slow
@pytest.mark.parametrize(("which", "usual"), [("viewed", "X_scforge"), ("integrated", "X_scforge_integrated")])
def test_adapters_take_the_query_out_of_the_space_of_the_reference(which, usual, query, request, tmp_path):
    model = request.getfixturevalue(which)
    query.obs = query.obs.drop(columns="kind")
    before, embedded = weights(model), model.get_latent_representation(query, key_added=None)
    mapped = Encoder.load_query_data(query, model)
    np.testing.assert_allclose(mapped.get_latent_representation(key_added=None), embedded, atol=1e-5)
    backbone = {name: p.clone() for name, p in mapped.backbone.named_parameters() if "base_layer" in name}
    mapped.get_latent_representation()
    mapped.predict()
    assert {key for key in query.obsm if "scforge" in key} == {"X_scforge", usual}
    with pytest.warns(ScforgeWarning, match=LEFT):
        mapped.train(max_epochs=2, batch_size=40, lr=1e-2, **QUIET)
    assert backbone
    assert all(torch.equal(dict(mapped.backbone.named_parameters())[name], value) for name, value in backbone.items())
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    learned = mapped.get_latent_representation(key_added=None)
    assert np.abs(learned - embedded).max() > 1e-3
    np.testing.assert_allclose(model.get_latent_representation(query, key_added=None), embedded, atol=1e-6)
    assert np.isfinite(mapped.history_["validation_loss"]["validation_loss"]).all()
    np.testing.assert_array_equal(mapped.get_latent_representation(), query.obsm.pop("X_scforge_query"))
    np.testing.assert_array_equal(mapped.predict(), query.obsm.pop("X_scforge_query"))
    mapped.get_latent_representation(key_added="X_scforge")
    np.testing.assert_array_equal(query.obsm["X_scforge"], learned)
    mapped.save(tmp_path / "query")
    loaded = Encoder.load(tmp_path / "query", query)
    np.testing.assert_array_equal(loaded.get_latent_representation(key_added=None), learned)
    table = loaded.transfer_labels(labels_key="kind", reference=model)
    pd.testing.assert_frame_equal(table, mapped.transfer_labels())
    kinds = np.asarray(model.adata.obs["kind"])
    # Distances are within the space of the query model.
    codes, names = pd.factorize(kinds, sort=True)
    space = mapped.get_latent_representation(model.adata, key_added=None)
    votes = weighted_vote(space, codes, learned, 3, 50)
    np.testing.assert_array_equal(np.asarray(table["label"]), names[votes.argmax(axis=1)])
    with pytest.warns(ScforgeWarning, match=LEFT):
        loaded.train(max_epochs=1, batch_size=40, **QUIET)


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
    assert query.obs["scforge_kind_transferred"].dtype == "category"
    assert query.obs["scforge_kind_transferred_uncertainty"].dtype == np.float32
    np.testing.assert_array_equal(query.obs["kind"], truth)
    limit = float(table["uncertainty"].quantile(0.9))
    strict = reference.transfer_labels(query, threshold=limit, key_added="mine", n_neighbors=10_000)
    assert ((strict["label"] == "unassigned") == (strict["uncertainty"] > limit)).all()
    assert "mine_uncertainty" in query.obs


def test_predicted_and_transferred_labels_are_kept_apart(reference, query):
    annotator = reference.finetune("annotation", max_epochs=1, **QUIET)
    predicted = annotator.predict(query)
    reference.transfer_labels(query)
    for column in ("label", "confidence", "entropy"):
        written = query.obs["scforge_kind" if column == "label" else f"scforge_{column}"]
        pd.testing.assert_series_equal(written, predicted[column], check_names=False)
    with pytest.raises(DataError, match="scforge_kind_transferred_confidence"):
        calibration(query, "kind", "scforge_kind_transferred")


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


def test_what_cannot_be_done_is_said(reference, viewed, query, tmp_path):
    annotator = reference.finetune("annotation", max_epochs=1, **QUIET)
    for model, options, message in [
        (annotator, {}, "fine-tuned for 'annotation'"),
        (viewed, {"batch_key": "lane"}, "batch_key='lane' is of no use"),
        (viewed, {"lora": False}, "lora=False is of no use, as nothing is left to train"),
        (reference, {"lora": {"r": 2}}, "'neighbor_denoising' leaves the encoder as it is"),
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
