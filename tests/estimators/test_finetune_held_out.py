from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest

from scforge.errors import OptionError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.estimators.tasks import learned_labels_of
from scforge.testing import raises
from scforge.training import CellDataModule

PLAIN = {"max_epochs": 1, "progress_bar": False, "accelerator": "cpu"}
QUICK = {**PLAIN, "batch_size": 64, "num_threads": 0}

type Cut = Callable[..., ad.AnnData]


@pytest.fixture(scope="module")
def data(many_adata: ad.AnnData) -> Cut:
    return lambda start=0, stop=120, n_genes=None: many_adata[start:stop, :n_genes].copy()


@pytest.fixture(scope="module")
def annotator(data: Cut) -> Encoder:
    adata = data()
    Encoder.setup_anndata(adata)
    model = Encoder(adata, n_top_genes=0, hidden_dim=8, ffn_dim=8)
    model.train(**QUICK)
    return model.finetune("annotation", adata, labels_key="group", test_size=0.2, **QUICK)


def learned_rows(model: Encoder) -> np.ndarray:
    split = model.fitted.split_of(model.open_cells())
    return np.sort(np.concatenate([split.train, split.validation]))


def found(model: Encoder, adata: ad.AnnData) -> np.ndarray:
    return np.flatnonzero(learned_labels_of(model.fitted, model.open_cells(adata)))


def n_scored(model: Encoder, adata: Any = None) -> int:
    return int(model.evaluate(adata, baselines=False).loc["scforge", "n_scored"])


def test_labels_of_any_stage_are_remembered(annotator: Encoder, data: Cut, tmp_path: Path) -> None:
    first = learned_rows(annotator)
    np.testing.assert_array_equal(found(annotator, data()), first)
    assert not len(found(annotator.base_model, data()))
    unlabeled = annotator.base_model.finetune("integration", data(), batch_key="donor", labels_key="group", **QUICK)
    assert not len(found(unlabeled, data()))
    integrated = annotator.finetune("integration", data(0, 240), batch_key="donor", **QUICK)
    np.testing.assert_array_equal(found(integrated, data(0, 240)), first)
    second = integrated.finetune("annotation", data(240, 360), labels_key="group", lora=True, **QUICK)
    second.save(tmp_path / "model")
    second.save(tmp_path / "adapter", adapter_only=True)
    expected = np.concatenate([first, 240 + learned_rows(second)])
    loaded = Encoder.load(tmp_path / "model"), Encoder.load(tmp_path / "adapter", base=integrated)
    for model in (second, *loaded):
        np.testing.assert_array_equal(found(model, data(0, 400)), expected)
    with pytest.warns(ScforgeWarning, match=f"learned from {len(first)} of the 120 cells; these cells are not scored"):
        assert n_scored(second, data()) == 120 - len(first)


def test_held_out_cells_whose_labels_an_earlier_stage_learned(annotator: Encoder, data: Cut) -> None:
    again = annotator.finetune("annotation", data(), labels_key="kind", seed=7, test_size=0.3, **QUICK)
    test = again.fitted.split_of(again.open_cells()).test
    left = np.setdiff1d(test, learned_rows(annotator))
    assert 0 < len(left) < len(test)
    with pytest.warns(ScforgeWarning, match=f"of the {len(test)} fine-tuning test cells; these cells are not"):
        assert n_scored(again) == len(left)
    cells = data()[learned_rows(annotator)].copy()
    with pytest.raises(OptionError, match="fine-tuning test cells; pass other"):
        annotator.finetune("annotation", cells, labels_key="kind", **QUICK).evaluate()


def test_cells_of_a_data_module_are_remembered(annotator: Encoder, data: Cut, tmp_path: Path) -> None:
    annotator.save(tmp_path / "model")
    first, others, rows = learned_rows(annotator), data(200, 260), np.arange(40)
    for adata in (data(), None):
        model = Encoder.load(tmp_path / "model", adata)
        module = CellDataModule(
            model.open_cells(others), train_rows=rows[:30], validation_rows=rows[30:], batch_size=16
        )
        model.train(datamodule=module, **PLAIN)
        np.testing.assert_array_equal(found(model, data(0, 260)), [*first, *range(200, 240)])
        model.save(tmp_path / "more", overwrite=True)
        np.testing.assert_array_equal(found(Encoder.load(tmp_path / "more"), others), rows)
    bare = Encoder.load(tmp_path / "model")
    with raises(OptionError, "datamodule"):
        bare.train(datamodule=CellDataModule(bare.open_cells(data())), **PLAIN)


@pytest.mark.filterwarnings("ignore:.*genes")
def test_fewer_genes_make_no_new_cells(annotator: Encoder, data: Cut) -> None:
    first, fewer = learned_rows(annotator), data(0, 160, 60)
    np.testing.assert_array_equal(found(annotator, fewer), first)
    with pytest.warns(ScforgeWarning, match=f"learned from {len(first)} of the 160 cells; these cells are not scored"):
        assert n_scored(annotator, fewer) == 160 - len(first)
    fewer.obs_names = [str(i) for i in range(160)]
    with pytest.warns(ScforgeWarning, match="of the 160 cells may have been used for fine-tuning"):
        assert len(found(annotator, fewer)) < 5  # those without a count in the genes that are missing
