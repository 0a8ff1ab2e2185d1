import csv
import json
import math

import pytest

from scforge.errors import DataError, OptionError
from scforge.testing import raises
from scforge.training import make_loggers
from scforge.training.monitoring import TableLogger


def table(path) -> list[dict[str, str]]:
    with path.open(newline="") as handle:
        return list(csv.DictReader(handle))


def test_columns_come_as_figures_do(tmp_path):
    logger = TableLogger(tmp_path / "logs")
    logger.begin()
    logger.log_metrics({"loss": 0.1}, step=1)
    logger.log_metrics({"loss": 1e-300, "f1": math.nan}, step=2)
    logger.log_metrics({"f1": 1}, step=2)
    assert table(logger.path) == [
        {"step": "1", "loss": "0.1", "f1": ""},
        {"step": "2", "loss": "1e-300", "f1": "nan"},
        {"step": "2", "loss": "", "f1": "1.0"},
    ]
    assert logger.n_rows == 3
    # A new training begins a new table, and sets the old one aside.
    again = TableLogger(tmp_path / "logs")
    again.begin()
    again.log_metrics({"loss": 2.0}, step=1)
    assert [row["loss"] for row in table(again.path)] == ["2.0"]
    assert len(table(tmp_path / "logs" / "metrics_1.csv")) == 3
    again.log_hyperparams({"lr": 0.1, "folder": tmp_path})
    assert json.loads((tmp_path / "logs" / "settings.json").read_text())["lr"] == 0.1


def test_rows_behind_a_state_are_removed(tmp_path):
    first = TableLogger(tmp_path)
    first.begin()
    for step in range(1, 6):
        first.log_metrics({"loss": step, "lr": 0.5}, step=step)
    with first.path.open("a") as handle:
        handle.write("2,1")  # half a row
    second = TableLogger(tmp_path)
    second.begin(3)
    second.log_metrics({"loss": 40, "more": 1}, step=4)
    rows = [(row["step"], row["loss"]) for row in table(second.path)]
    assert rows == [("1", "1.0"), ("2", "2.0"), ("3", "3.0"), ("4", "40.0")]


def test_tensorboard_writes_events(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (logger,) = make_loggers(["tensorboard"], tmp_path, run_name="first")
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.log_metrics({"loss": 0.25}, step=2)
    logger.finalize("success")
    (again,) = make_loggers(["tensorboard"], tmp_path, run_name="first")
    again.go_on_behind(1)
    again.log_metrics({"loss": 0.75}, step=2)
    again.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard" / "first"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.75)]


@pytest.mark.slow
def test_wandb_works_offline(tmp_path):
    pytest.importorskip("wandb")
    (logger,) = make_loggers(["wandb"], tmp_path, project="cells", run_name="one", wandb_mode="offline")
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.experiment.finish()
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


def test_what_cannot_be_logged_to(tmp_path):
    with raises(OptionError, "loggers"):
        make_loggers(["cvs"], tmp_path)
    with raises(OptionError, "wandb_mode"):
        make_loggers(["wandb"], tmp_path, wandb_mode="off")
    (tmp_path / "metrics.csv").write_text("name,age\nx,3\n")
    with pytest.raises(DataError, match=r"metrics\.csv' is not the log table of a training"):
        TableLogger(tmp_path).begin(5)
    with raises(OptionError, "log_dir"):
        make_loggers(["csv"], tmp_path / "metrics.csv")
