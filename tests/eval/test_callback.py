import random
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

from scforge.data import GeneVocab
from scforge.errors import DataError, MissingFileError, OptionError, ScforgeWarning
from scforge.eval import Benchmark, BenchmarkCallback, register_benchmark
from scforge.eval.base import BENCHMARKS, Evaluation, ScoredCells, resolve, to_evaluation
from scforge.models import Encoder
from scforge.testing import raises

CELL_TYPES = {"cell_type_annotation": {"n_folds": 3, "n_neighbors": 5}}
KEYS = {"labels_key": "group", "batch_key": "batch"}


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


def fit(adata: ad.AnnData, *benchmarks: Any, keys: dict[str, str] = KEYS, every: int = 1, **options: Any) -> Encoder:
    """Train a small model for two epochs, with half of the cells held out."""
    Encoder.setup_anndata(adata, **keys)
    model = Encoder(adata, hidden_dim=16, ffn_dim=16, latent_dim=4)
    datasets = options.pop("datasets", None)
    callbacks = [BenchmarkCallback(benchmarks, every_n_epochs=every, datasets=datasets)] if benchmarks else []
    options = {"max_epochs": 2, "validation_size": 0.5, "batch_size": 10} | options
    model.train(progress_bar=False, accelerator="cpu", callbacks=callbacks, **options)
    return model


def test_a_registered_benchmark_gets_the_columns_of_the_data(tiny_adata: ad.AnnData) -> None:
    @register_benchmark("purity")
    class Purity(Benchmark):
        metrics = ("share",)

        def __init__(self, labels_key: str, batch_key: str | None = None, of: str = "a") -> None:
            self.labels_key, self.batch_key, self.of = labels_key, batch_key, of

        def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
            assert self.batch_key == "batch"
            return {"share": float((obs[self.labels_key] == self.of).mean())}

    try:
        history = fit(tiny_adata, {"purity": {"of": "b"}}, {"purity": {"name": "of_a"}}, CELL_TYPES).history
    finally:
        BENCHMARKS._entries.pop("purity")
    np.testing.assert_allclose(np.ravel(history["purity_share"]), 1 - np.ravel(history["of_a_share"]))
    figures = np.ravel(history["cell_type_annotation_macro_f1"])
    assert figures.shape == (2,)
    assert ((figures > 0) & (figures <= 1)).all()


def test_training_is_the_same_with_and_without(tiny_adata: ad.AnnData) -> None:
    models, states = [], []
    for benchmarks in ((), (Draws(), CELL_TYPES)):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        models.append(fit(tiny_adata, *benchmarks))
        states.append((random.getstate(), np.random.get_state()[1].tolist()))
    plain, scored = models
    assert states[0] == states[1]
    for name, weights in plain.module.state_dict().items():
        assert torch.equal(weights, scored.module.state_dict()[name]), name
    assert np.ravel(scored.history["Draws_runs"]).tolist() == [1, 2]
    drawn = np.ravel(scored.history["Draws_drawn"])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("options", "epochs"), [({"max_epochs": 5}, [2, 4, 5]), ({"max_epochs": -1, "max_steps": 9}, [2, 3])]
)
def test_which_epochs(tiny_adata: ad.AnnData, options: dict[str, int], epochs: list[int]) -> None:
    figures = np.ravel(fit(tiny_adata, Draws(), every=2, **options).history["Draws_runs"])
    assert len(figures) == max(epochs)
    assert (np.flatnonzero(~np.isnan(figures)) + 1).tolist() == epochs


def test_held_out_cells_and_other_data_sets(tiny_adata: ad.AnnData, many_adata, tmp_path, monkeypatch) -> None:
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
    rows = []
    begin = BenchmarkCallback.on_fit_start

    def spied(self, trainer, plan) -> None:
        begin(self, trainer, plan)
        rows.extend(trainer.datamodule.validation_rows)

    monkeypatch.setattr(BenchmarkCallback, "on_fit_start", spied)
    datasets = {"mapped": str(tmp_path / "atlas.h5ad")}
    model = fit(tiny_adata, *evaluations, max_epochs=1, datasets=datasets)
    names = ["path", "Draws_atlas", "Draws_mapped", "Draws_held_out", "limited"]
    assert {f"{name}_{metric}" for name in names for metric in Draws.metrics} <= set(model.history)
    expected = model.get_latent_representation(many_adata)
    for benchmark in (path, named, mapped):
        np.testing.assert_allclose(benchmark.seen[0][0], expected, atol=1e-5)
    ((embedding, obs),) = held_out.seen
    assert obs.index.tolist() == tiny_adata.obs_names[rows].tolist()
    assert len(rows) == 30
    np.testing.assert_allclose(embedding, model.get_latent_representation(tiny_adata)[rows], atol=1e-5)
    ((embedding, obs),) = limited.seen
    assert len(obs) == 50
    np.testing.assert_allclose(embedding, expected[many_adata.obs_names.get_indexer(obs.index)], atol=1e-5)


def test_a_failure_costs_the_score_only(tiny_adata: ad.AnnData) -> None:
    with pytest.warns(
        ScforgeWarning, match="'Draws' failed during training, so its scores are NaN: it broke"
    ) as warned:
        history = fit(tiny_adata, Draws(DataError), CELL_TYPES).history
    assert sum("failed during training" in str(warning.message) for warning in warned) == 1
    assert np.isnan(np.ravel(history["Draws_runs"])).all()
    assert (np.ravel(history["cell_type_annotation_accuracy"]) > 0).all()
    with pytest.raises(ZeroDivisionError):  # a mistake is not hidden
        fit(tiny_adata, Draws(ZeroDivisionError))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ([], OptionError, r"benchmarks=\[\] is empty"),
        (["cell_type_anotation"], OptionError, "did you mean 'cell_type_annotation'"),
        ([3], OptionError, "benchmark=3 is not known"),
        ([{"label_prediction": {"folds": 3}}], OptionError, "option 'folds' is unknown to 'label_prediction'"),
        (
            [{"label_prediction": 3}],
            OptionError,
            "is not a valid benchmark entry; pass one name with a dict of its options",
        ),
        ([{"label_prediction": None, "dataset": "x"}], OptionError, "is not a valid benchmark entry"),
        ([Evaluation(Draws(), max_cells=5), Draws()], OptionError, "two evaluations have the name 'Draws_held_out'"),
        ([{"label_prediction": {"n_folds": n, "name": "same"}} for n in (3, 4)], OptionError, "have the name 'same'"),
        ([{"label_prediction": {"dataset": "atlas"}}], OptionError, r"put the file at \$SCFORGE_DATA/atlas.h5ad"),
        ([{"label_prediction": {"dataset": "/no.h5ad"}}], MissingFileError, "no.h5ad' of .* not exist"),
    ],
)
def test_bad_input_on_construction(wrong: Any, error: type[Exception], message: str, monkeypatch) -> None:
    monkeypatch.delenv("SCFORGE_DATA", raising=False)
    with pytest.raises(error, match=message):
        BenchmarkCallback(wrong)
    with raises(OptionError, "options"):
        Evaluation(Draws(), options={"a": 1})
    with raises(OptionError, "max_cells"):
        Evaluation(Draws(), max_cells=0)
    with raises(OptionError, "every_n_epochs"):
        BenchmarkCallback([Draws()], every_n_epochs=0)


@pytest.mark.parametrize(
    ("benchmark", "options", "error", "message"),
    [
        ("label_prediction", {"keys": {}}, OptionError, "requires labels_key, a column of obs"),
        ("batch_integration", {"keys": {"labels_key": "group"}}, OptionError, "requires batch_key, a column of obs"),
        ("label_prediction", {"validation_size": 0.0}, OptionError, "no cells are held out; set validation_size abov"),
        ({"label_prediction": {"labels_key": "grup"}}, {}, DataError, "held-out cells: .*'grup' .* mean 'group'"),
        ("cell_type_annotation", {"validation_size": 0.3}, DataError, "n_neighbors=15 is larger .*; lower it"),
        ({"label_prediction": {"n_folds": 20}}, {}, DataError, "score the held-out cells: fewer than 2 labels"),
    ],
)
def test_bad_input_is_told_before_training(tiny_adata, benchmark, options, error, message: str) -> None:
    with pytest.raises(error, match=message):
        fit(tiny_adata, benchmark, **options)


def test_data_sets_by_their_name(pbmc: ad.AnnData, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(dataset: str, **datasets: str) -> object:
        (one,) = resolve([Evaluation("label_prediction", dataset=dataset)], datasets)
        return one.dataset

    monkeypatch.delenv("SCFORGE_DATA", raising=False)
    scored = ScoredCells.open(found("pbmc3k"), GeneVocab.from_adata(pbmc), 50)
    assert len(scored.obs) == 50
    assert scored.obs["cell_type"].equals(pbmc.obs["cell_type"].iloc[scored.rows])
    with raises(OptionError, "dataset"):
        found("pbmc3")
    # A card says how to get what is not there.
    with pytest.raises(MissingFileError):
        found("norman")
    monkeypatch.setenv("SCFORGE_DATA", str(tmp_path))
    (tmp_path / "norman.h5ad").touch()
    path = str(tmp_path / "norman.h5ad")
    assert found("norman") == path
    assert found("pbmc3k", pbmc3k=path) == path, "a path that is given for a name goes first"
    # ``max_cells`` is an option of evaluations, and of some benchmarks.
    assert to_evaluation({"scib": {"labels_key": "group", "max_cells": 500}}).options["max_cells"] == 500
    assert to_evaluation({"geometry": {"max_cells": 500}}).max_cells == 500
