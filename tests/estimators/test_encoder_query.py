import copy
import re
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors

from scforge.data import GeneVocab, convert
from scforge.errors import DataError, GeneMismatchError, OptionError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.pl import calibration
from scforge.testing import raises
from scforge.training import CellDataModule

QUIET = {"progress_bar": False, "accelerator": "cpu", "num_threads": 0}
N_GENES = 60
VECTORS = "encoder.decoder.expression.batch_embedding.weight"
LEFT = "not comparable with the embedding of the reference model"


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


def of_three_types(epochs: int, setup: dict, **options) -> Encoder:
    adata = cells(["b0", "b1"], ["t0", "t1", "t2"], n=240)
    Encoder.setup_anndata(adata, labels_key="kind", **setup)
    model = Encoder(adata, hidden_dim=32, ffn_dim=32, latent_dim=8, **options)
    model.train(max_epochs=epochs, batch_size=60, **QUIET)
    return model


@pytest.fixture(scope="module")
def reference() -> Encoder:
    return of_three_types(20, {"batch_key": "lane"}, n_top_genes=N_GENES)


@pytest.fixture(scope="module")
def viewed() -> Encoder:
    """A model of an objective that has no decoder, so that its encoder has to adapt to a query."""
    return of_three_types(5, {}, objective="joint_embedding", architecture="gene_pooling", pooling="weighted_sum")


@pytest.fixture(scope="module")
def integrated(reference: Encoder) -> Encoder:
    return reference.finetune("integration", max_epochs=3, batch_size=60, **QUIET)


@pytest.fixture
def query() -> ad.AnnData:
    """Cells of a batch and of a type that the reference does not have; nobody has labeled them."""
    return cells(["b1", "b2"], ["t0", "t1", "t3"], seed=1)


def weights(model: Encoder) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def same_votes(table: pd.DataFrame, space: np.ndarray, points: np.ndarray, kinds: pd.Series, n_neighbors: int) -> None:
    distances, nearest = NearestNeighbors(n_neighbors=n_neighbors).fit(space).kneighbors(points)
    kernel = np.exp(-(distances**2) / (2 * distances.mean(axis=1, keepdims=True) ** 2))
    codes, names = pd.factorize(np.asarray(kinds), sort=True)
    votes = np.stack([(kernel * (codes[nearest] == code)).sum(axis=1) for code in range(len(names))], axis=1)
    np.testing.assert_array_equal(np.asarray(table["label"]), names[votes.argmax(axis=1)])
    np.testing.assert_allclose(table["probability"], votes.max(axis=1) / kernel.sum(axis=1), atol=1e-4)


def test_training_teaches_the_decoder_the_batches_of_the_query_alone(reference, query, tmp_path):
    query.obs = query.obs.drop(columns="kind")
    before, embedded = weights(reference), reference.get_latent_representation(query, key_added=None)
    mapped = Encoder.load_query_data(query, reference, lora=False)
    moved = mapped.get_latent_representation(key_added=None)
    assert mapped.spec.objective_options["batches"] == ["b0", "b1", "b2"]
    own = weights(mapped)
    torch.testing.assert_close(own[VECTORS][2], own[VECTORS][:2].mean(dim=0))
    for options in ({}, {"weight_decay": 1.0, "ema_decay": 0.9}):
        mapped.train(max_epochs=4, batch_size=40, **options, **QUIET)
    np.testing.assert_array_equal(mapped.get_latent_representation(), moved)
    np.testing.assert_array_equal(reference.get_latent_representation(query, key_added=None), embedded)
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
    np.testing.assert_array_equal(loaded.get_latent_representation(key_added=None), moved)
    chained = Encoder.load_query_data(cells(["b2", "b3"], ["t0"], n=60, seed=2), mapped)
    assert chained.spec.objective_options["batches"] == ["b0", "b1", "b2", "b3"]


def share_of_reference(space: np.ndarray, points: np.ndarray) -> float:
    """Share of reference cells among the 20 nearest neighbors of cells of the query."""
    nearest = NearestNeighbors(n_neighbors=21).fit(np.vstack([space, points])).kneighbors(points)[1][:, 1:]
    return float((nearest < len(space)).mean())


@pytest.fixture
def distant() -> ad.AnnData:
    """Cells of two types of the reference and of one that it lacks, with a batch effect in other genes."""
    found = cells(["b3"], ["t0", "t1", "t3"], n=150, seed=5)
    scales = np.random.default_rng(1).lognormal(0, 0.7, N_GENES)
    found.X = sparse.csr_matrix(np.random.default_rng(2).poisson(found.X.toarray() * scales).astype(np.float32))
    return found


def test_a_query_is_moved_onto_its_reference_without_training(reference, distant, tmp_path):
    space = reference.get_latent_representation(key_added=None)
    before = reference.get_latent_representation(distant, key_added=None)
    mapped = Encoder.load_query_data(distant, reference)
    after = mapped.get_latent_representation()
    known = np.asarray(distant.obs["kind"]) != "t3"
    assert share_of_reference(space, after[known]) > share_of_reference(space, before[known])
    np.testing.assert_array_equal(distant.obsm["X_scforge"], after)
    far = NearestNeighbors(n_neighbors=15).fit(space).kneighbors(after)[0].mean(axis=1)
    assert roc_auc_score(~known, far) > 0.85
    mapped.save(tmp_path / "query")
    loaded = Encoder.load(tmp_path / "query", distant)
    np.testing.assert_array_equal(loaded.get_latent_representation(key_added=None), after)
    reference.save(tmp_path / "reference", overwrite=True)
    elsewhere = Encoder.load_query_data(distant, tmp_path / "reference")
    np.testing.assert_allclose(elsewhere.get_latent_representation(key_added=None), after, atol=1e-5)
    pd.testing.assert_frame_equal(reference.transfer_labels(distant), mapped.transfer_labels())
    few = Encoder.load_query_data(distant[:5].copy(), reference)
    np.testing.assert_allclose(few.get_latent_representation(key_added=None), before[:5], atol=1e-5)


@pytest.mark.parametrize("has_batches", [True, False])
def test_query_and_reference_are_trained_on_together(reference, distant, has_batches, tmp_path):
    model = reference if has_batches else of_three_types(10, {}, n_top_genes=N_GENES)
    joint = Encoder.load_query_data(distant, model, reference_cells=model.adata)
    np.testing.assert_allclose(
        joint.get_latent_representation(key_added=None),
        model.get_latent_representation(distant, key_added=None),
        atol=1e-5,
    )
    unchanged = weights(model)
    with pytest.warns(ScforgeWarning, match=LEFT):
        joint.train(max_epochs=10, batch_size=60, **QUIET)
    assert joint.objective.pretraining.batches == (["b0", "b1", "b3"] if has_batches else ["query", "reference"])
    after = joint.get_latent_representation()
    assert after.shape == (150, 8)
    np.testing.assert_array_equal(distant.obsm["X_scforge_query"], after)
    assert all(torch.equal(value, unchanged[name]) for name, value in weights(model).items())
    joint.save(tmp_path / "joint")
    loaded = Encoder.load(tmp_path / "joint", distant)
    np.testing.assert_array_equal(loaded.get_latent_representation(key_added=None), after)
    with pytest.raises(DataError, match="the cells are not exactly the cells used for fine-tuning"):
        loaded.train(max_epochs=1, **QUIET)
    assert (joint.transfer_labels()["label"] == distant.obs["kind"])[distant.obs["kind"] != "t3"].mean() > 0.8


def test_joint_trainings_keep_the_batches_of_the_first_reference(reference, distant, query):
    joint = Encoder.load_query_data(distant, reference, reference_cells=reference.adata)
    with pytest.warns(ScforgeWarning, match="of the query and the reference have the same name .'b1'."):
        again = Encoder.load_query_data(query, joint, reference_cells=reference.adata)
    column = again.objective.pretraining.batch_key
    assert column == joint.objective.pretraining.batch_key == "lane"
    assert again.objective.pretraining.batches == ["b0", "b1", "b3", "b2"]
    assert set(again.datamodule.cells.obs[column]) == {"b0", "b1", "b2"}


def test_cells_of_the_reference_are_of_use_to_neighbors_alone(viewed, distant):
    with raises(OptionError, "reference_cells"):
        Encoder.load_query_data(distant, viewed, reference_cells=viewed.adata)


def test_a_query_model_keeps_to_its_reference(reference, query):
    mapped = Encoder.load_query_data(query, reference)
    without = Encoder.load_query_data(query[query.obs["lane"] == "b1"].copy(), reference)
    assert mapped.spec.tuning.base["sha256"] == without.spec.tuning.base["sha256"]
    with pytest.raises(OptionError, match=r"'bf16-true' .* change weights .* with its reference; use .*='bf16-mixed'"):
        mapped.train(max_epochs=1, precision="bf16-true", **QUIET)
    with pytest.raises(OptionError, match="strategy='fsdp' would change weights that a query model shares"):
        mapped.train(max_epochs=1, strategy="fsdp", **QUIET)
    before = weights(mapped)[VECTORS]
    mapped.module = copy.deepcopy(mapped.module)
    mapped.train(max_epochs=1, batch_size=40, **QUIET)
    assert torch.equal(weights(mapped)[VECTORS][:2], before[:2])
    assert not torch.equal(weights(mapped)[VECTORS][2], before[2])


def test_batches_of_the_query_have_a_column_of_their_own(reference, query):
    query.obs = query.obs.rename(columns={"lane": "plate"})
    mapped = Encoder.load_query_data(query, reference)
    with pytest.raises(OptionError, match=r"nothing to train, .*load_query_data\(\.\.\., batch_key=\.\.\.\)"):
        mapped.train(max_epochs=1, **QUIET)
    assert mapped.get_latent_representation(key_added=None).shape == (120, 8)
    with pytest.raises(DataError, match="'lane' is not a column of obs"):
        Encoder.load_query_data(query, reference, batch_key="lane")
    options = Encoder.load_query_data(query, reference, batch_key="plate").spec.objective_options
    assert (options["batch_key"], options["batches"]) == ("plate", ["b0", "b1", "b2"])
    Encoder.setup_anndata(query, batch_key="plate")
    assert Encoder.load_query_data(query, reference).spec.objective_options["batch_key"] == "plate"
    known = Encoder.load_query_data(query[query.obs["plate"] == "b1"].copy(), reference, batch_key="plate")
    with pytest.raises(OptionError, match="only new batches are trained"):
        known.train(max_epochs=1, **QUIET)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "usual"), [("viewed", "X_scforge"), ("integrated", "X_scforge_integrated")])
def test_adapters_take_the_query_out_of_the_space_of_the_reference(which, usual, query, request, tmp_path):
    model = request.getfixturevalue(which)
    query.obs = query.obs.drop(columns="kind")
    before, embedded = weights(model), model.get_latent_representation(query, key_added=None)
    mapped = Encoder.load_query_data(query, model)
    np.testing.assert_allclose(mapped.get_latent_representation(key_added=None), embedded, atol=1e-5)
    backbone = {name: p.clone() for name, p in mapped.fitted.backbone.named_parameters() if "base_layer" in name}
    mapped.get_latent_representation()
    mapped.predict()
    assert {key for key in query.obsm if "scforge" in key} == {"X_scforge", usual}
    with pytest.warns(ScforgeWarning, match=LEFT):
        mapped.train(max_epochs=2, batch_size=40, lr=1e-2, **QUIET)
    assert backbone
    assert all(
        torch.equal(dict(mapped.fitted.backbone.named_parameters())[name], value) for name, value in backbone.items()
    )
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    learned = mapped.get_latent_representation(key_added=None)
    assert np.abs(learned - embedded).max() > 1e-3
    np.testing.assert_allclose(model.get_latent_representation(query, key_added=None), embedded, atol=1e-6)
    np.testing.assert_array_equal(mapped.get_latent_representation(), query.obsm.pop("X_scforge_query"))
    np.testing.assert_array_equal(mapped.predict(), query.obsm.pop("X_scforge_query"))
    mapped.get_latent_representation(key_added="X_scforge")
    np.testing.assert_array_equal(query.obsm["X_scforge"], learned)
    mapped.save(tmp_path / "query")
    loaded = Encoder.load(tmp_path / "query", query)
    np.testing.assert_array_equal(loaded.get_latent_representation(key_added=None), learned)
    table = loaded.transfer_labels(labels_key="kind", reference=model)
    pd.testing.assert_frame_equal(table, mapped.transfer_labels())
    space = mapped.get_latent_representation(model.adata, key_added=None)
    table = loaded.transfer_labels(labels_key="kind", reference=model, method="knn")
    same_votes(table, space, learned, model.adata.obs["kind"], 50)
    with pytest.warns(ScforgeWarning, match=LEFT):
        loaded.train(max_epochs=1, batch_size=40, **QUIET)


def test_new_batches_get_parameters_of_their_own(integrated, query, caplog):
    with caplog.at_level("INFO", logger="scforge"):
        mapped = Encoder.load_query_data(query, integrated)
    assert "obs['lane'] that have the name of a reference batch are treated as the same batch ('b1')" in caplog.text
    assert mapped.spec.tuning.task_options["batches"] == ["b0", "b1", "b2"]
    trained = {name for name, p in mapped.module.head.named_parameters() if p.requires_grad}
    assert trained == {"batches"}
    assert mapped.module.head.batches.shape[0] == 1
    known = Encoder.load_query_data(query[query.obs["lane"] == "b1"].copy(), integrated)
    assert known.module.head.batches.shape[0] == 0
    query.obs = query.obs.rename(columns={"lane": "plate"})
    of_plates = Encoder.load_query_data(query, integrated, batch_key="plate")
    assert of_plates.spec.tuning.task_options["batch_key"] == "plate"


def test_genes_are_found_by_name(reference, query, caplog):
    with caplog.at_level("INFO", logger="scforge"):
        plain = Encoder.load_query_data(query.copy(), reference).get_latent_representation(key_added=None)
    assert "The query contains 100.0% of the genes" in caplog.text
    order = np.random.default_rng(0).permutation(N_GENES)
    moved = Encoder.load_query_data(query[:, order].copy(), reference)
    np.testing.assert_allclose(moved.get_latent_representation(key_added=None), plain, atol=1e-5)
    fewer = Encoder.load_query_data(query[:, order[:45]].copy(), reference)
    fewer.train(max_epochs=1, batch_size=40, **QUIET)
    assert fewer.open_cells().overlap == pytest.approx(0.75)
    foreign = query.copy()
    foreign.var_names = [f"other{i}" for i in range(N_GENES)]
    with pytest.raises(GeneMismatchError):
        Encoder.load_query_data(foreign, reference)


@pytest.mark.parametrize("method", ["consensus", "linear", "knn"])
def test_labels_are_transferred(reference, query, method):
    truth = np.asarray(query.obs["kind"])
    table = reference.transfer_labels(query, method=method)
    known = truth != "t3"
    assert (np.asarray(table["label"])[known] == truth[known]).mean() > 0.9
    assert table["probability"].between(0, 1).all()
    assert ("agreement" in table) == (method == "consensus")
    assert query.obs["scforge_kind_transferred"].dtype == "category"
    assert query.obs["scforge_kind_transferred_probability"].dtype == np.float32
    np.testing.assert_array_equal(query.obs["kind"], truth)
    limit = float(table["probability"].quantile(0.1))
    strict = reference.transfer_labels(query, method=method, min_probability=limit, key_added="mine")
    assert ((strict["label"] == "unassigned") == (strict["probability"] < limit)).all()
    assert "mine_probability" in query.obs


def test_neighbors_vote(reference, query):
    space = reference.get_latent_representation(key_added=None)
    points = Encoder.load_query_data(query, reference).get_latent_representation(key_added=None)
    table = reference.transfer_labels(query, method="knn", n_neighbors=7)
    same_votes(table, space, points, reference.adata.obs["kind"], 7)
    assert reference.transfer_labels(query, method="knn", n_neighbors=10_000)["probability"].max() < 0.6


def test_transfer_of_labels_writes_the_embedding(reference, query):
    """It is that of a query model; the embedding of the reference, which is not mapped, stays."""
    mapped = Encoder.load_query_data(query.copy(), reference)
    points = mapped.get_latent_representation()
    reference.transfer_labels(query)
    np.testing.assert_allclose(query.obsm["X_scforge"], points, atol=1e-6)
    expected = mapped.adata.uns["scforge"]["X_scforge"] | {"n_epochs": reference.n_epochs_}
    made = dict(query.uns["scforge"]["X_scforge"])
    assert made.pop("model") == query.uns["scforge"]["scforge_kind_transferred"]["model"]
    assert made == expected
    del mapped.adata.obsm["X_scforge"]
    mapped.transfer_labels()
    np.testing.assert_allclose(mapped.adata.obsm["X_scforge"], points, atol=1e-6)
    learned = reference.adata
    before = reference.get_latent_representation().copy()
    reference.transfer_labels(learned)
    mapped.transfer_labels(learned)
    np.testing.assert_array_equal(learned.obsm["X_scforge"], before)
    learned.obs = learned.obs.loc[:, ~learned.obs.columns.str.startswith("scforge_")]


@pytest.mark.parametrize("kind", ["adata", "h5ad", "store"])
def test_a_query_is_opened_and_warned_about_once(reference, query, kind, tmp_path, caplog):
    """Also if the decoder gets vectors for new batches, on a copy of the reference model."""
    few = query[:, :25].copy()
    few.write_h5ad(tmp_path / "few.h5ad")
    convert(tmp_path / "few.h5ad", tmp_path / "few.zarr", progress=False)
    source = {"adata": few, "h5ad": tmp_path / "few.h5ad", "store": tmp_path / "few.zarr"}[kind]
    caplog.clear()
    with pytest.warns(ScforgeWarning, match="has 25 of the 60 genes") as warned, caplog.at_level("INFO", "scforge"):
        Encoder.load_query_data(source, reference)
    assert len(warned) == 1
    assert sum(message.startswith(("Opened", "Read into memory")) for message in caplog.messages) == (kind != "adata")


def test_a_query_model_says_what_it_is(reference, viewed, query):
    mapped = Encoder.load_query_data(query, reference)
    heading = repr(mapped).splitlines()[0]
    assert heading.endswith(" parameters, mapped onto a reference trained for 20 epochs)")
    mapped.train(max_epochs=1, **QUIET)
    said = r", [\d,]+ of them trained, mapped onto a reference trained for 20 epochs, then trained for 1 epoch\)$"
    assert re.search(said, repr(mapped).splitlines()[0])
    assert "query model of a reference trained for 5 epochs)" in repr(Encoder.load_query_data(query, viewed))


@pytest.mark.filterwarnings("ignore:Cells that are not from the fine-tuning data")
def test_predicted_and_transferred_labels_are_kept_apart(reference, query):
    annotator = reference.finetune("annotation", max_epochs=1, **QUIET)
    predicted = annotator.predict(query)
    reference.transfer_labels(query)
    written = query.obs[["scforge_kind", "scforge_confidence", "scforge_entropy"]]
    pd.testing.assert_frame_equal(written.set_axis(predicted.columns, axis=1), predicted)
    with raises(DataError, "column"):
        calibration(query, "kind", "scforge_kind_transferred")


def test_labels_come_from_the_reference_or_cells_that_are_given(reference, query):
    mapped = Encoder.load_query_data(query, reference)
    with pytest.raises(OptionError, match="'adaptation' has no labels to score"):
        mapped.evaluate()
    table = mapped.transfer_labels()
    pd.testing.assert_frame_equal(table, reference.transfer_labels(query))
    few = cells(["b0", "b1"], ["t0", "t1", "t2"], n=90, seed=3)
    assert (mapped.transfer_labels(reference=few)["label"] == table["label"]).mean() > 0.8
    few.obs["kind"] = few.obs["kind"].where(few.obs["kind"] != "t1")
    assert set(reference.transfer_labels(query, reference=few)["label"]) <= {"t0", "t2"}
    few.obs["kind"] = "t0"
    with raises(DataError, "labels_key"):
        reference.transfer_labels(query, reference=few)
    with pytest.raises(DataError, match="'type' is not a column of obs"):
        reference.transfer_labels(query, labels_key="type")


def test_what_cannot_be_done_is_said(reference, viewed, query, tmp_path):
    annotator = viewed.finetune("annotation", max_epochs=1, **QUIET)
    for model, options, message in [
        (annotator, {}, "fine-tuned for 'annotation'"),
        (viewed, {"batch_key": "lane"}, "batch_key='lane' has no effect"),
        (viewed, {"lora": False}, "lora=False has no effect for .* trained with 'joint_embedding'"),
        (reference, {"lora": {"r": 2}}, "lora=.* has no effect for .* trained with 'neighbor_denoising'"),
    ]:
        with pytest.raises(OptionError, match=message):
            Encoder.load_query_data(query, model, **options)
    with raises(OptionError, "query"):
        reference.transfer_labels()
    reference.save(tmp_path / "reference", reference=False)
    mapped = Encoder.load_query_data(query, tmp_path / "reference")
    with pytest.raises(OptionError, match="neither its training cells nor saved reference cells"):
        mapped.transfer_labels(labels_key="kind")


REAL = Path(__file__).parents[3] / "shared" / "data" / "cells"


@pytest.mark.slow
@pytest.mark.real_data
def test_one_model_of_two_real_studies_labels_a_third(tmp_path):
    names = ("kang_ctrl_8donor", "kang_ifnb", "pbmc3k")
    if not all((REAL / f"{name}.h5ad").exists() for name in names):
        pytest.skip("the shared real data are not here")
    donors, ifnb, query = (ad.read_h5ad(REAL / f"{name}.h5ad") for name in names)
    donors = donors[::3].copy()
    donors.obs["type"] = donors.obs["cluster_id"].astype(str).str.replace(" cells", "").str.replace(" T", "T")
    donors.obs["type"] = donors.obs["type"].str.replace(" Monocytes", "+Mono").str.replace("++", "+")
    ifnb.obs["type"] = ifnb.obs["cell_type"].astype(str)
    donors.obs["batch"], ifnb.obs["batch"] = donors.obs["sample_id"].astype(str), ifnb.obs["condition"].astype(str)
    genes = GeneVocab.named("human_protein_coding")
    for number, adata in enumerate((donors, ifnb)):
        adata.write_h5ad(tmp_path / f"{number}.h5ad")
        genes = genes & GeneVocab.from_adata(adata)
    files, store = [tmp_path / "0.h5ad", tmp_path / "1.h5ad"], tmp_path / "blood.zarr"
    convert(files, store, vocab=genes, obs=["batch", "type"], progress=False)
    model = Encoder(datamodule=CellDataModule(store, batch_key="batch", labels_key="type", num_threads=0))
    model.train(max_epochs=30, progress_bar=False, accelerator="cpu")
    model.save(tmp_path / "blood")
    mapped = Encoder.load_query_data(query, tmp_path / "blood")
    embedding = mapped.get_latent_representation(key_added=None)
    found = Encoder.load_query_data(query, model).transfer_labels()
    np.testing.assert_allclose(mapped.get_latent_representation(key_added=None), embedding)
    truth = query.obs["cell_type"].astype(str).str.replace(" ", "").str.removeprefix("Naive").str.removeprefix("Memory")
    scored = truth.isin(["CD4T", "CD8T", "B", "NK", "CD14+Mono", "FCGR3A+Mono"]).to_numpy()
    alike = np.asarray(found["label"].astype(str).str.replace(" ", ""))[scored] == truth.to_numpy()[scored]
    assert alike.mean() > 0.8


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize(
    ("file", "key", "held_out"),
    [("sc_mixology", "batch", ["sc_celseq2"]), ("kang_ctrl_8donor", "sample_id", ["1256", "1488"])],
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

    def mixing() -> float:
        """Return the share of reference cells among the 30 nearest neighbors of query cells."""
        embedded = mapped.get_latent_representation(key_added=None)
        found = NearestNeighbors(n_neighbors=31).fit(np.concatenate([stored, embedded])).kneighbors(embedded)[1]
        others = found != len(stored) + np.arange(len(embedded))[:, None]
        return float(np.average(found < len(stored), weights=others))

    mapped = Encoder.load_query_data(query, model)
    before = mixing()
    mapped.train(max_epochs=20, **QUIET)
    assert mixing() >= before > 0.05
    errors = mapped.history_["validation_squared_error"]["validation_squared_error"]
    assert errors.iloc[-1] < errors.iloc[0]
