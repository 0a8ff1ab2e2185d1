"""Where figures go."""

from __future__ import annotations

import csv
import json
import math

import pytest

from scforge.errors import DataError, OptionError
from scforge.training import TableLogger, make_loggers


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


def test_rows_behind_a_state_are_removed(tmp_path):
    first = TableLogger(tmp_path)
    first.begin()
    for step in range(1, 6):
        first.log_metrics({"loss": step}, step=step)
    second = TableLogger(tmp_path)
    second.begin(3)
    second.log_metrics({"loss": 40, "more": 1}, step=4)
    assert [(row["step"], row["loss"]) for row in table(second.path)] == [
        ("1", "1.0"),
        ("2", "2.0"),
        ("3", "3.0"),
        ("4", "40.0"),
    ]


def test_a_new_training_begins_a_new_table_and_sets_the_old_one_aside(tmp_path):
    for value in (1.0, 2.0):
        logger = TableLogger(tmp_path)
        logger.begin()
        logger.log_metrics({"loss": value}, step=1)
    assert [row["loss"] for row in table(logger.path)] == ["2.0"]
    assert [row["loss"] for row in table(tmp_path / "metrics_1.csv")] == ["1.0"]


def test_half_a_row_is_not_read(tmp_path):
    logger = TableLogger(tmp_path)
    logger.begin()
    logger.log_metrics({"loss": 1.0, "lr": 0.5}, step=1)
    with logger.path.open("a") as handle:
        handle.write("2,1")
    again = TableLogger(tmp_path)
    again.begin(5)
    assert len(table(again.path)) == 1


def test_another_file_is_not_taken_for_a_table(tmp_path):
    (tmp_path / "metrics.csv").write_text("name,age\nx,3\n")
    with pytest.raises(DataError, match=r"metrics\.csv' is not a table of a training"):
        TableLogger(tmp_path).begin(5)


def test_settings_stand_beside_the_table(tmp_path):
    TableLogger(tmp_path).log_hyperparams({"lr": 0.1, "folder": tmp_path})
    assert json.loads((tmp_path / "settings.json").read_text())["lr"] == 0.1


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


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["cvs"], {}, "has 'cvs', which is not known; did you mean 'csv'"),
        (["wandb"], {"wandb_mode": "off"}, "wandb_mode='off' is not known"),
    ],
)
def test_bad_options(tmp_path, names, options, message):
    with pytest.raises(OptionError, match=message):
        make_loggers(names, tmp_path, **options)


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "logs").write_text("")
    with pytest.raises(OptionError, match="is a file"):
        make_loggers(["csv"], tmp_path / "logs")
