"""Cells that a model was not fine-tuned on: mapped before prediction, marked, and their differences reported."""

import copy
import logging
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

from scforge.errors import ModelFileError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.finetuning.new_cells import LabeledCells
from scforge.models._weights import read_weights
from scforge.workflows import evaluate_models

REAL = Path(__file__).parents[3] / "shared" / "data" / "cells"
QUICK = {"progress_bar": False, "accelerator": "cpu", "num_threads": 0}


@pytest.fixture(scope="module")
def cells(many_adata: ad.AnnData) -> ad.AnnData:
    return many_adata[:300].copy()


@pytest.fixture(scope="module")
def query(many_adata: ad.AnnData) -> ad.AnnData:
    """Cells of another protocol, which detects some genes four times as well."""
    query = many_adata[300:500].copy()
    query.X = (query.X @ sparse.diags(np.where(np.arange(query.n_vars) % 3 == 0, 4.0, 1.0))).astype(np.float32).tocsr()
    return query


@pytest.fixture(scope="module")
def base(cells: ad.AnnData) -> Encoder:
    Encoder.setup_anndata(cells, labels_key="group", batch_key="donor")
    model = Encoder(cells, hidden_dim=8)
    model.train(5, **QUICK)
    return model


@pytest.fixture(scope="module")
def annotator(base: Encoder) -> Encoder:
    return base.finetune("annotation", max_epochs=2, **QUICK)


def test_another_model_may_hold_a_fine_tuned_one(annotator: Encoder, query: ad.AnnData) -> None:
    again = Encoder.of_fitted(annotator.fitted)
    labels = again.predict(query.copy())
    pd.testing.assert_frame_equal(labels, annotator.predict(query.copy()))
    mapped, expected = (Encoder.load_query_data(query.copy(), reference) for reference in (again, annotator))
    np.testing.assert_array_equal(mapped.get_latent_representation(), expected.get_latent_representation())


def test_a_wrong_head_is_outvoted_and_not_confident(annotator: Encoder, query: ad.AnnData) -> None:
    """New cells get the label of similar training cells, and the disagreement shows; other cells and options do not."""
    truth, own = query.obs["group"].astype(str).to_numpy(), annotator.adata
    head = copy.deepcopy(annotator.module.head.state_dict())
    try:
        annotator.module.head.out.weight.data.neg_()
        annotator.module.head.out.bias.data.neg_()
        mapped = annotator.predict(query)
        as_is = annotator.predict(query.copy(), map_query=False)
        of_own = annotator.predict(own.copy())
    finally:
        annotator.module.head.load_state_dict(head)
    assert (mapped["label"].astype(str) == truth).mean() > 0.9
    assert mapped["confidence"].max() < 0.9
    assert (as_is["label"].astype(str) == truth).mean() < 0.1
    assert (of_own["label"].astype(str) == own.obs["group"].astype(str)).mean() < 0.1
    assert query.uns["scforge"]["scforge_group"]["gene_factor"] > 1.1
    assert query.uns["scforge"]["scforge_group"]["gene_overlap"] == 1.0


def test_new_cells_do_not_depend_on_cells_of_the_fine_tuning(
    annotator: Encoder, cells: ad.AnnData, query: ad.AnnData, caplog: pytest.LogCaptureFixture
) -> None:
    both = ad.concat([cells, query])
    with caplog.at_level(logging.INFO, logger="scforge"):
        found = annotator.predict(both)
    expected = pd.concat([annotator.predict(cells.copy()), annotator.predict(query.copy())])
    np.testing.assert_allclose(found["confidence"], expected["confidence"], atol=1e-5)
    assert f"knows the labels of {270} of the 500 cells from fine-tuning (obs['scforge_split'])" in caplog.text
    assert "from the fine-tuning data: 200; 100.0% of the genes of the model were found" in caplog.text
    parts = both.obs["scforge_split"].astype(str).to_numpy()
    assert (parts[300:] == "new").all()
    for part in ("train", "validation", "test"):
        rows = getattr(annotator, f"{part}_indices_")
        assert (parts[rows] == part).all()
    annotator.predict(both, key_added="mine")
    assert both.obs["mine_split"].astype(str).equals(both.obs["scforge_split"].astype(str))


@pytest.mark.filterwarnings("ignore:The cells used for fine-tuning are not available")
def test_saved_models_map_as_before(base: Encoder, annotator: Encoder, query: ad.AnnData, tmp_path: Path) -> None:
    adapted = base.finetune("annotation", max_epochs=1, lora={"r": 2}, **QUICK)
    base.save(tmp_path / "base")
    annotator.save(tmp_path / "whole")
    adapted.save(tmp_path / "adapted")
    adapted.save(tmp_path / "adapter", adapter_only=True)
    for model, folder in ((annotator, "whole"), (adapted, "adapted"), (adapted, "adapter")):
        again = Encoder.load(tmp_path / folder, False, base=tmp_path / "base" if folder == "adapter" else None)
        pd.testing.assert_frame_equal(again.predict(query.copy()), model.predict(query.copy()))
    again = Encoder.load(tmp_path / "whole", base.adata)
    pd.testing.assert_frame_equal(again.evaluate(), annotator.evaluate())  # with the frozen embedding of the base model
    found = Encoder.load(tmp_path / "whole", False)
    found.predict(copied := query.copy())
    assert copied.uns["scforge"]["scforge_group"]["gene_factor"] > 1.1
    weights = read_weights(tmp_path / "whole" / "model.safetensors")
    labeled = {name: weights[f"scforge.labeled.{name}"] for name in ("embeddings", "classes", "temperature", "in_base")}
    for wrong in ({"embeddings": labeled["embeddings"] * torch.nan}, {"classes": labeled["classes"] + 1}):
        with pytest.raises(ModelFileError):
            LabeledCells.of_tensors({**labeled, **wrong}, n_classes=2, source="here")


def test_equal_barcodes_of_another_study_are_new_cells(annotator: Encoder, query: ad.AnnData) -> None:
    """A few names that training cells also have do not make cells known if other genes were measured."""
    other = query[:, :70].copy()
    names = other.obs_names.to_numpy().astype(object)
    names[:20] = annotator.adata.obs_names[annotator.train_indices_[:20]]
    other.obs_names = names
    annotator.predict(other)
    assert (other.obs["scforge_split"] == "new").all()
    same = annotator.adata[:, :70].copy()  # most names are known: these are the cells of the fine-tuning
    annotator.predict(same)
    assert set(same.obs["scforge_split"]) == {"train", "validation", "test"}
    assert "scforge_group" in other.uns["scforge"]
    annotator.predict(other, map_query=False)
    assert "scforge_group" not in other.uns["scforge"]


def test_a_base_that_was_trained_further_maps_no_cells(cells: ad.AnnData, query: ad.AnnData) -> None:
    cells = cells.copy()
    Encoder.setup_anndata(cells, labels_key="group")
    base = Encoder(cells, hidden_dim=8)
    base.train(1, **QUICK)
    annotator = base.finetune("annotation", max_epochs=1, **QUICK)
    base.train(1, **QUICK)
    with pytest.warns(ScforgeWarning, match="The fine-tuned head alone predicts cells that are not from .* again"):
        found = annotator.predict(query.copy())
    pd.testing.assert_frame_equal(found, annotator.predict(query.copy(), map_query=False))


@pytest.mark.parametrize("n_cells", [1, 12])
def test_few_new_cells(annotator: Encoder, query: ad.AnnData, n_cells: int) -> None:
    found = annotator.predict(query[:n_cells].copy())
    assert (found["label"].astype(str) == query.obs["group"][:n_cells].astype(str)).all()


def test_models_that_map_no_queries_use_their_own_embedding(cells: ad.AnnData, query: ad.AnnData) -> None:
    Encoder.setup_anndata(cells := cells.copy(), labels_key="group")
    base = Encoder(cells, objective="joint_embedding", hidden_dim=8)
    base.train(1, **QUICK)
    annotator = base.finetune("annotation", max_epochs=5, **QUICK)
    annotator.predict(query := query.copy())
    shift = query.uns["scforge"]["scforge_group"]
    assert "gene_factor" not in shift
    assert 0 <= shift["share_far"] <= 1
    assert (query.obs["scforge_split"] == "new").all()


def test_evaluations_are_kept_apart(base: Encoder, annotator: Encoder, cells: ad.AnnData) -> None:
    cells = cells.copy()
    annotator.evaluate(cells)
    of_task = {name for name in cells.uns["scforge"] if name.startswith("metrics")}
    assert of_task == {
        "metrics",
        "metrics_tables",
        *(f"metrics_{n}" for n in ("per_class", "confusion", "differences")),
    }
    report = evaluate_models(
        base, cells, benchmarks=["cell_type_probe"], baselines=["pca"], labels_key="group", seeds=(0,), untrained=False
    )
    assert cells.uns["scforge"]["report"].equals(report.to_frame())
    assert of_task == {name for name in cells.uns["scforge"] if name.startswith("metrics")}
    annotator.evaluate(cells, intervals=False)
    assert "metrics_differences" not in cells.uns["scforge"]
    assert "metrics_per_class" in cells.uns["scforge"]


@pytest.mark.filterwarnings("ignore:adata.var_names has 27 of the 80 genes")
def test_large_differences_cause_a_warning(annotator: Encoder, query: ad.AnnData) -> None:
    few = query[:, ::3].copy()
    with pytest.warns(ScforgeWarning, match=r"data: 200; 33\.8% of the genes .* check them with marker genes"):
        annotator.predict(few)
    assert few.uns["scforge"]["scforge_group"]["gene_overlap"] == pytest.approx(27 / 80)
    labeled = LabeledCells(np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32), np.arange(200) % 2)
    assert labeled.share_far(labeled.embeddings + 20.0) == 1.0
    assert labeled.share_far(np.random.default_rng(1).normal(size=(500, 3))) < 0.2


def test_confidence_is_calibrated_on_held_out_batches() -> None:
    """Batches that differ need a higher temperature than random folds of the same cells."""
    generator = np.random.default_rng(0)
    classes, batches = generator.integers(2, size=600), generator.integers(4, size=600)
    embeddings = generator.normal(size=(600, 3)).astype(np.float32)
    embeddings[:, 0] += 6.0 * classes + generator.normal(0.0, 4.0, 4)[batches]
    within, across = (LabeledCells.calibrated(embeddings, classes, of, in_base=True) for of in (None, batches))
    assert across.temperature > 1.5 * within.temperature
    one = LabeledCells.calibrated(embeddings, classes, np.zeros(600), in_base=True)
    assert one.temperature == within.temperature


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.filterwarnings("ignore:adata.var_names")
def test_sorted_cells_label_gated_cells_without_confident_errors() -> None:
    """Protein-gated PBMC of another chemistry, by FACS-sorted cells: the head mistakes monocytes for CD34+ cells."""
    if not all((REAL / f"{name}.h5ad").exists() for name in ("zheng_facs_pbmc", "pbmc10k_cite")):
        pytest.skip("the shared real data are not here")
    names = {"T cell": "T", "B cell": "B", "NK cell": "NK", "CD14+": "monocyte", "CD34+": "CD34+"}
    cells = ad.read_h5ad(REAL / "zheng_facs_pbmc.h5ad")
    cells.obs["type"] = cells.obs["cell_type_coarse"].map(names).astype(str)
    cells.var_names = cells.var["feature"].astype(str)
    cells = cells[:, ~cells.var_names.duplicated()].copy()
    names = {"B": "B", "CD14 Mono": "monocyte", "CD16 Mono": "monocyte", "CD4 T": "T", "CD8 T": "T", "NK": "NK"}
    query = ad.read_h5ad(REAL / "pbmc10k_cite.h5ad")
    truth = query.obs["cell_type"].astype(object).map(names)
    Encoder.setup_anndata(cells, labels_key="type")
    model = Encoder(cells)
    model.train(**QUICK)
    annotator = model.finetune("annotation", **QUICK)
    as_is = annotator.predict(query.copy(), map_query=False)
    with pytest.warns(ScforgeWarning, match="check them with marker genes"):
        mapped = annotator.predict(query.copy())
    wrong = [(found["label"].astype(str) != truth) & truth.notna() for found in (as_is, mapped)]
    confident = [(found["confidence"][one] > 0.9).mean() for found, one in zip((as_is, mapped), wrong, strict=True)]
    assert wrong[1].sum() < wrong[0].sum()
    assert confident[1] < 0.1 < confident[0]
