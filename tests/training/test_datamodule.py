import warnings

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from scforge.data import open_cells
from scforge.data.store import StoreCells
from scforge.errors import DataError, MissingFileError, OptionError, ScforgeWarning, TrainingError
from scforge.models import GenePoolingModel
from scforge.testing import raises
from scforge.tokenizers import get_tokenizer
from scforge.training import CellDataModule, MaskedGenePrediction, TrainingPlan


def epoch(loader, number=0):
    loader.sampler.set_epoch(number)
    return list(loader)


def same(one, two) -> bool:
    return all(torch.equal(a[key], b[key]) for a, b in zip(one, two, strict=True) for key in a)


def test_batches_follow_from_the_epoch(masked_setup):
    data = masked_setup.data()
    validation, training = data.val_dataloader(), data.train_dataloader()
    assert same(epoch(validation, 0), epoch(validation, 5))
    assert not same(epoch(training, 0), epoch(training, 1))
    assert same(epoch(training, 4), epoch(masked_setup.data(first_epoch=3).train_dataloader(), 1))
    for num_threads in (1, 5):
        threads = masked_setup.data(num_threads=num_threads)
        assert same(epoch(training, 2), epoch(threads.train_dataloader(), 2))
    assert masked_setup.data(n_validation=0).val_dataloader() == []
    # The size of batches does not change what happens to a cell.
    of_sizes = []
    for batch_size in (3, 10):
        batches = epoch(masked_setup.data(batch_size=batch_size).val_dataloader())
        of_sizes.append(sorted(tuple(row[row >= 0].tolist()) for batch in batches for row in batch["labels"]))
    assert of_sizes[0] == of_sizes[1]


def masked(cells, **options) -> CellDataModule:
    """A data module of masked gene prediction."""
    data = CellDataModule(cells, **options)
    data.bind(get_tokenizer("rank_value", data.cells.vocab), MaskedGenePrediction())
    return data


def test_whole_groups_are_held_out(store):
    data = CellDataModule(store, split_by="donor", validation_size=0.25)
    donors = data.cells.column("donor").to_numpy(dtype=str)
    assert set(donors[data.validation_rows])
    assert not set(donors[data.validation_rows]) & set(donors[data.train_rows])
    assert sorted([*data.train_rows, *data.validation_rows]) == list(range(700))
    assert len(data.validation_rows) == pytest.approx(175, rel=0.2)


def test_cells_that_cannot_be(store, tmp_path):
    assert len(CellDataModule(store).cells) == len(CellDataModule(str(store)).cells) == 700
    with pytest.raises(MissingFileError):
        CellDataModule(tmp_path / "no.zarr")
    with raises(OptionError, "cells"):
        CellDataModule(np.zeros((3, 3)))
    one = StoreCells.open(store).sample(700)
    one.obs["same"] = "x"
    with raises(DataError, "split_by"):
        CellDataModule(one, split_by="same")
    with pytest.raises(TrainingError, match="call bind"):
        CellDataModule(store).train_dataloader()


@pytest.mark.parametrize("where", ["store", "memory"])
def test_rare_classes_come_more_often_with_the_epochs_and_heavy_cells_at_once(store, many_adata, where):
    cells = StoreCells.open(store)
    cells = cells if where == "store" else open_cells(many_adata, cells.vocab)
    rare = (cells.column("kind") == "rare").to_numpy()

    def share_of_rare(data: CellDataModule, number: int) -> float:
        sampler = data.train_dataloader().sampler
        sampler.set_epoch(number)
        rows = np.concatenate([window.rows for window in sampler.windows()])
        assert np.isin(rows, data.train_rows).all()
        return float(rare[rows].mean())

    data = masked(cells, balance_by="kind", balance_epochs=4, batch_size=32)
    shares = [share_of_rare(data, number) for number in (0, 2, 4, 9)]
    assert shares[0] == pytest.approx(0.05, abs=0.03)
    assert 0.1 < shares[1] < 0.35
    assert shares[2:] == pytest.approx([0.5, 0.5], abs=0.07)
    half = masked(cells, balance_by="kind", balance_start=0.5, balance_end=0.5, batch_size=32)
    assert share_of_rare(half, 0) == pytest.approx(shares[1], abs=0.1)
    validation = np.concatenate([window.rows for window in data.val_dataloader().sampler.windows()])
    assert sorted(validation) == data.validation_rows.tolist()
    weights = masked(cells, weight_by="depth", validation_size=0.0, batch_size=32)
    drawn = np.concatenate([window.rows for window in weights.train_dataloader().sampler.windows()])
    assert 0.6 < cells.column("depth").to_numpy()[drawn].mean() < 0.73, "of even weights, drawn ones have 2/3"
    # Epochs of earlier trainings are counted.
    data.bind(data.tokenizer, data.objective, first_epoch=5)
    assert (data.train_dataloader().sampler.epoch, data.val_dataloader().sampler.epoch) == (5, 0)


@pytest.mark.parametrize("where", ["store", "memory"])
def test_a_budget_of_tokens_is_kept(store, many_adata, setup, where):
    cells = StoreCells.open(store)
    cells = cells if where == "store" else open_cells(many_adata, cells.vocab)
    data = masked(cells, max_tokens_per_batch=1000)
    loader = data.train_dataloader()
    sizes = [batch["input_ids"].numel() for batch in loader]
    assert max(sizes) <= 1000
    assert np.median(sizes) > 600
    assert len(sizes) == len(loader)
    assert all(batch["input_ids"].numel() <= 1000 for batch in data.val_dataloader())
    with raises(OptionError, "max_tokens_per_batch"):
        masked(cells, max_tokens_per_batch=20).train_dataloader()
    with raises(OptionError, "max_tokens_per_batch"):
        setup.data(batch_size=None, max_tokens_per_batch=500)


ROWS = np.arange(5)
COLUMNS = ("balance_by", "split_by", "weight_by", "batch_key", "labels_key")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"train_rows": ROWS}, "must be given together; pass both, or neither"),
        ({"train_rows": ROWS, "validation_rows": np.arange(4, 8)}, "pass disjoint rows"),
        ({"train_rows": [], "validation_rows": [1]}, "train_rows is empty"),
        ({"train_rows": np.array([0, 700]), "validation_rows": ROWS}, "train_rows contains row 700, but there"),
        ({"train_rows": ROWS, "validation_rows": np.array([-1])}, "validation_rows contains row -1"),
        (
            {"train_rows": ROWS, "validation_rows": np.arange(5, 9), "split_by": "donor"},
            "split_by='donor' has no effect",
        ),
        ({"batch_size": 0}, "batch_size=0"),
        ({"pin_memory": "yes"}, "pin_memory='yes'"),
        ({"validation_size": 1.5}, r"validation_size=1\.5"),
        *(({name: "knd"}, rf"{name}='knd' is not a column .*mean 'kind'\?") for name in COLUMNS),
        ({"balance_by": "kind", "balance_end": 2.0}, "2"),
        ({"weight_by": "weight", "balance_by": "weight"}, "weight_by=.* and balance_by=.* both weight cells"),
    ],
)
def test_options_that_cannot_be(store, options, match):
    with pytest.raises((OptionError, DataError), match=match) as told:
        masked(store, **options).train_dataloader()
    assert "\n" not in str(told.value)


def test_batches_of_one_name_in_several_sources_are_reported(many_adata):
    first, second = many_adata[:40].copy(), many_adata[40:80].copy()
    first.obs["donor"], second.obs["donor"] = ["1", "2"] * 20, ["1"] * 30 + ["3"] * 10
    both = open_cells([first, second])
    with pytest.warns(
        ScforgeWarning, match=r"batch_key='donor': batches with the same name in several sources .*'1'.; give"
    ):
        CellDataModule(both, batch_key="donor")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CellDataModule(both, batch_key="scforge_source")
        CellDataModule(open_cells(first), batch_key="donor")


class Seen(Callback):
    """Notes the tokens of each training batch, and stops after some if told."""

    def __init__(self, stop_after=None):
        self.marks, self.stop_after = [], stop_after

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.marks.append(tuple(batch["input_ids"].flatten().tolist()))
        if len(self.marks) == self.stop_after:
            raise KeyError("the machine is gone")


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec.*is deprecated")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec", "ignore:.*logging interval")
@pytest.mark.filterwarnings("ignore:.*Checkpoint directory")
def test_lightning_goes_on_in_the_middle_of_an_epoch(store, tmp_path):
    """The checkpoint of a Trainer contains the state of the loader, and a new Trainer gets the very same rest."""

    def run(name, **seen):
        torch.manual_seed(0)
        data = masked(store, batch_size=64, num_threads=2, window_cells=128)
        module = GenePoolingModel(len(data.cells.vocab), 8, 1, ffn_dim=8, dropout=0.0)
        callbacks = [Seen(**seen), ModelCheckpoint(tmp_path / name, every_n_train_steps=4, save_top_k=-1)]
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        checks = {"num_sanity_val_steps": 0, "use_distributed_sampler": False}
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", callbacks=callbacks, **quiet, **checks)
        return trainer, TrainingPlan(module, data.objective, lr=1e-2), data, callbacks[0].marks

    trainer, plan, data, whole = run("whole")
    trainer.fit(plan, datamodule=data)
    broken, plan_2, data_2, first = run("broken", stop_after=14)
    with pytest.raises(KeyError, match="gone"):
        broken.fit(plan_2, datamodule=data_2)
    (checkpoint,) = (tmp_path / "broken").glob("*step=12.ckpt")
    again, plan_3, data_3, rest = run("broken")
    again.fit(plan_3, datamodule=data_3, ckpt_path=checkpoint, weights_only=False)
    assert len(whole) == 20
    assert first == whole[:14]
    assert rest == whole[12:]
    for one, two in zip(plan.module.parameters(), plan_3.module.parameters(), strict=True):
        torch.testing.assert_close(one, two)
