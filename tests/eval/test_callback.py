from __future__ import annotations

import math
import random
from typing import Any

import anndata as ad
import lightning
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from scforge.config.schema import ModelConfig
from scforge.data import open_cells
from scforge.errors import DataError, MissingFileError, OptionError, ScforgeWarning
from scforge.eval import Benchmark, BenchmarkCallback, Evaluation, register_benchmark
from scforge.eval.base import BENCHMARKS
from scforge.models import Encoder, get_model
from scforge.tokenizers import get_tokenizer
from scforge.training import CellDataModule, get_objective
from scforge.training.predict import embed

# Remarks of Lightning that scforge's own training silences.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

CELL_TYPES = {"cell_type_annotation": {"n_folds": 3, "n_neighbors": 5}}


class Plan(lightning.LightningModule):
    """As little of a training plan as a callback needs."""

    def __init__(self, data: CellDataModule) -> None:
        super().__init__()
        assert data.bound.vocab is not None
        with torch.random.fork_rng():
            torch.manual_seed(0)
            size = len(data.bound.vocab)
            self.module: nn.Module = get_model(
                "transformer_encoder", ModelConfig(vocab_size=size, hidden_dim=16, num_layers=1, max_seq_len=128)
            )
        self.objective = data.objective
        self.figures: dict[str, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.objective.loss(self.module, batch)[0]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Keep(Callback):
    """Takes down the figures of each epoch, as the plan does."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self.epochs.append(dict(pl_module.figures))
        pl_module.figures.clear()


class Draws(Benchmark):
    """Keeps what it sees, and uses the global generators as a careless benchmark does."""

    metrics = ("runs", "drawn")

    def __init__(self, fail: type[Exception] | None = None) -> None:
        self.fail = fail
        self.seen: list[tuple[np.ndarray, pd.DataFrame]] = []

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        self.seen.append((embedding, obs))
        if self.fail is not None:
            raise self.fail("it broke.")
        drawn = np.random.rand() + random.random() + float(torch.rand(()))
        return {"runs": float(len(self.seen)), "drawn": drawn}


def data_of(adata: ad.AnnData, **options: Any) -> CellDataModule:
    cells = open_cells(adata)
    objective = get_objective("masked_gene_prediction")
    options = {"validation_size": 0.5, "labels_key": "group", "batch_key": "batch"} | options
    return CellDataModule(
        cells, get_tokenizer("rank_value", cells.vocab, use_medians=False), objective, batch_size=10, **options
    )


def fit(data: CellDataModule, *callbacks: Callback, **options: Any) -> tuple[Plan, list[dict[str, float]]]:
    plan, keep = Plan(data), Keep()
    options = {"max_epochs": 2, "num_sanity_val_steps": 0} | options
    trainer = lightning.Trainer(
        callbacks=[*callbacks, keep],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    torch.manual_seed(3)
    trainer.fit(plan, datamodule=data)
    return plan, keep.epochs


@pytest.fixture
def data(tiny_adata: ad.AnnData) -> CellDataModule:
    return data_of(tiny_adata)


def test_a_registered_benchmark_gets_the_columns_of_the_data(data: CellDataModule) -> None:
    @register_benchmark("purity")
    class Purity(Benchmark):
        metrics = ("share",)

        def __init__(self, labels_key: str, batch_key: str | None = None, of: str = "a") -> None:
            self.labels_key, self.batch_key, self.of = labels_key, batch_key, of

        def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
            assert self.batch_key == "batch"
            return {"share": float((obs[self.labels_key] == self.of).mean())}

    try:
        callback = BenchmarkCallback([{"purity": {"of": "b"}}, {"purity": {"name": "of_a"}}, CELL_TYPES])
        _, epochs = fit(data, callback)
    finally:
        BENCHMARKS._entries.pop("purity")
    assert len(epochs) == 2
    for figures in epochs:
        assert figures["purity_share"] == 1 - figures["of_a_share"]
        assert 0 < figures["cell_type_annotation_macro_f1"] <= 1


def test_figures_stand_in_the_history_of_a_model(many_adata: ad.AnnData) -> None:
    adata = many_adata[:200].copy()
    Encoder.setup_anndata(adata, labels_key="group")
    model = Encoder(adata, hidden_dim=16, ffn_dim=16, latent_dim=4)
    callback = BenchmarkCallback(["cell_type_annotation"], every_n_epochs=2, labels_key="group")
    model.train(3, validation_size=0.3, progress_bar=False, accelerator="cpu", callbacks=[callback])
    figures = np.ravel(model.history["cell_type_annotation_macro_f1"])
    assert len(model.history["validation_loss"]) == 3
    assert np.isnan(figures).tolist() == [True, False, False]
    assert (figures[1:] > 0.5).all()


def test_it_scores_the_held_out_cells_as_the_module_embeds_them(data: CellDataModule, tiny_adata: ad.AnnData) -> None:
    benchmark = Draws()
    plan, epochs = fit(data, BenchmarkCallback([benchmark]))
    assert [figures["Draws_runs"] for figures in epochs] == [1, 2]
    assert epochs[0]["Draws_drawn"] == epochs[1]["Draws_drawn"]
    embedding, obs = benchmark.seen[-1]
    rows = data.validation_rows
    assert obs.index.tolist() == tiny_adata.obs_names[rows].tolist()
    np.testing.assert_array_equal(embedding, embed(plan.module, data.bound, data.tokenizer, rows=rows))


def test_training_is_the_same_with_and_without(data: CellDataModule) -> None:
    plain, _ = fit(data)
    scored, epochs = fit(data, BenchmarkCallback([Draws(), CELL_TYPES]))
    assert len(epochs[0]) == 4
    for name, weights in plain.state_dict().items():
        assert torch.equal(weights, scored.state_dict()[name]), name
    states = random.getstate(), np.random.get_state()[1].tolist()
    fit(data, BenchmarkCallback([Draws()]), max_epochs=1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


@pytest.mark.parametrize(
    ("options", "epochs"),
    [({"max_epochs": 5}, [2, 4, 5]), ({"max_epochs": -1, "max_steps": 9}, [2, 3]), ({"num_sanity_val_steps": 1}, [2])],
)
def test_which_epochs(data: CellDataModule, options: dict[str, int], epochs: list[int]) -> None:
    _, figures = fit(data, BenchmarkCallback([Draws()], every_n_epochs=2), **options)
    ran = [bool(found) for found in figures[-max(epochs) :]]
    assert [epoch + 1 for epoch, done in enumerate(ran) if done] == epochs


def test_another_data_set(data: CellDataModule, many_adata: ad.AnnData, tmp_path, monkeypatch) -> None:
    many_adata.write_h5ad(tmp_path / "atlas.h5ad")
    monkeypatch.setenv("SCFORGE_DATA", str(tmp_path))
    path, named, mapped, held_out, limited = (Draws() for _ in range(5))
    evaluations = [
        Evaluation(path, dataset=tmp_path / "atlas.h5ad", name="path"),
        Evaluation(named, dataset="atlas"),
        Evaluation(mapped, dataset="mapped"),
        Evaluation(held_out),
        Evaluation(limited, dataset=many_adata, max_cells=50, name="limited"),
    ]
    datasets = {"mapped": str(tmp_path / "atlas.h5ad")}
    callback = BenchmarkCallback(evaluations, datasets=datasets)
    plan, (figures,) = fit(data, callback, max_epochs=1)
    names = ["path", "Draws_atlas", "Draws_mapped", "Draws_held_out", "limited"]
    assert list(figures) == [f"{name}_{metric}" for name in names for metric in Draws.metrics]
    expected = embed(plan.module, open_cells(many_adata, data.bound.vocab), data.tokenizer)
    for benchmark in (path, named, mapped):
        np.testing.assert_array_equal(benchmark.seen[0][0], expected)
    assert len(held_out.seen[0][1]) == 30
    ((embedding, obs),) = limited.seen
    assert len(obs) == 50
    np.testing.assert_allclose(embedding, expected[many_adata.obs_names.get_indexer(obs.index)], atol=1e-5)


def test_a_failure_costs_the_figure_only(data: CellDataModule) -> None:
    callback = BenchmarkCallback([Draws(DataError), CELL_TYPES])
    with pytest.warns(ScforgeWarning, match="'Draws' failed during training, its figures are NaN: it broke") as warned:
        _, epochs = fit(data, callback)
    assert sum(warning.category is ScforgeWarning for warning in warned) == 1
    for figures in epochs:
        assert math.isnan(figures["Draws_runs"])
        assert figures["cell_type_annotation_accuracy"] > 0


def test_a_mistake_in_a_benchmark_is_not_hidden(data: CellDataModule) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(data, BenchmarkCallback([Draws(ZeroDivisionError)]))


def test_bad_input_on_construction(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("SCFORGE_DATA", raising=False)
    for wrong, error, message in [
        ("cell_type_annotation", OptionError, r"is one; give a list"),
        ([], OptionError, r"benchmarks=\[\] names no benchmark"),
        (["cell_type_anotation"], OptionError, "did you mean 'cell_type_annotation'"),
        ([3], OptionError, "benchmark=3 is neither a registered name nor a Benchmark"),
        ([{"label_prediction": {"folds": 3}}], OptionError, "option 'folds' is unknown to 'label_prediction'"),
        ([{"label_prediction": 3}], OptionError, "the benchmark 'label_prediction' is given 3; give it options"),
        ([{"label_prediction": None, "dataset": "x"}], OptionError, "write one benchmark an entry"),
        ([Evaluation(Draws(), max_cells=5), Draws()], OptionError, "two evaluations are called 'Draws_held_out'"),
        ([{"label_prediction": {"n_folds": n, "name": "same"}} for n in (3, 4)], OptionError, "are called 'same'"),
        (
            [{"label_prediction": {"dataset": "atlas"}}],
            OptionError,
            r"dataset='atlas' of the benchmark 'label_prediction' is not known; put the file at "
            r"\$SCFORGE_DATA/atlas.h5ad and set SCFORGE_DATA, or say where it is in eval.datasets, atlas: PATH",
        ),
        ([{"label_prediction": {"dataset": str(tmp_path / "no.h5ad")}}], MissingFileError, "no.h5ad' of .* not exist"),
    ]:
        with pytest.raises(error, match=message):
            BenchmarkCallback(wrong)
    with pytest.raises(OptionError, match="options={'a': 1} are for a benchmark given by name"):
        Evaluation(Draws(), options={"a": 1})
    with pytest.raises(OptionError, match="max_cells=0"):
        Evaluation(Draws(), max_cells=0)
    with pytest.raises(OptionError, match="every_n_epochs=0"):
        BenchmarkCallback([Draws()], every_n_epochs=0)


def test_bad_input_is_told_before_training(tiny_adata: ad.AnnData) -> None:
    def told(error: type[Exception], message: str, benchmarks: list[Any], **options: Any) -> None:
        with pytest.raises(error, match=message):
            fit(data_of(tiny_adata, **options), BenchmarkCallback(benchmarks))

    told(OptionError, "needs labels_key, a column of obs, but", ["label_prediction"], labels_key=None)
    told(OptionError, "needs batch_key, a column of obs, but", ["batch_integration"], batch_key=None)
    told(OptionError, "no cells are held out; give validation_size above 0", ["label_prediction"], validation_size=0.0)
    wrong = {"cell_type_annotation": {"labels_key": "grup"}}
    told(DataError, "cannot score the held-out cells: labels_key='grup' is not .*did you mean 'group'", [wrong])
    told(DataError, "n_neighbors=15 is more than the .* lower it", ["cell_type_annotation"], validation_size=0.3)
    told(
        DataError,
        "cannot score the held-out cells: labels_key='group': label .* fewer than n_folds",
        [{"label_prediction": {"n_folds": 20}}],
    )
