import errno
import json
import logging
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, OptionError
from scforge.eval import Benchmark, LabelPrediction, Report, compare, evaluate
from scforge.eval.report import Comparison, Measured, Row, compare_paired
from scforge.testing import raises


@pytest.fixture
def embedded(tiny_adata: ad.AnnData) -> ad.AnnData:
    """The tiny data with an embedding that tells the groups apart, and one that does not."""
    noise = np.random.default_rng(0).normal(size=(60, 4))
    tiny_adata.obsm["X_good"] = noise + 10.0 * (tiny_adata.obs["group"] == "a").to_numpy()[:, None]
    tiny_adata.obsm["X_noise"] = noise
    return tiny_adata


def test_models_stand_beside_baselines(embedded: ad.AnnData, tmp_path: Path) -> None:
    embedded.uns["scforge"] = {"mine": 1}
    kinds = {"X_good": "model", "X_noise": "untrained"}
    report = evaluate(embedded, LabelPrediction("group"), kinds, baselines=(3, 5), seconds={"X_good": 12.4})
    baselines = [(f"PCA{of}, {n} components", "baseline", n) for n in (3, 5) for of in ("", " of scaled genes")]
    found = [(row.name, row.kind, row.n_dims) for row in report.rows]
    assert found == [("X_good", "model", 4), ("X_noise", "untrained", 4), *baselines]
    assert report.rows[0].scores["knn_macro_f1"] == 1.0
    assert report.rows[1].scores["knn_macro_f1"] < 0.8
    metrics = embedded.uns["scforge"]["report"]
    assert set(metrics["method"]) == {row.name for row in report.rows}
    embedded.write_h5ad(tmp_path / "cells.h5ad")
    again = ad.read_h5ad(tmp_path / "cells.h5ad").uns["scforge"]["report"]
    assert again.query("method == 'X_good' and metric == 'knn_macro_f1'")["value"].tolist() == [1.0]
    pd.testing.assert_frame_equal(again, metrics, check_index_type=False, check_dtype=False)
    for key in ("scores", None):
        one = evaluate(embedded, LabelPrediction("group"), "X_good", baselines=(3,), intervals=False, key_added=key)
        assert one.rows[0].name == "X_good"
        assert set(embedded.uns["scforge"]) == {"mine", "report", "scores"}


def test_mistakes(embedded: ad.AnnData) -> None:
    with raises(DataError, "obsm_keys"):
        evaluate(embedded, LabelPrediction("group"), ["X_goood"])
    with raises(DataError, "layer"):
        evaluate(embedded, LabelPrediction("group"), ["X_good"], layer="count")
    embedded.X = embedded.X * 0.5
    with pytest.raises(DataError, match=r"adata\.X contains values that are not whole numbers"):
        evaluate(embedded, LabelPrediction("group"), ["X_good"])
    with pytest.raises(OptionError, match="is empty; pass at least one"):
        evaluate(embedded, LabelPrediction("group"), ["X_good"], baselines=())


def test_several_benchmarks_and_seeds(embedded: ad.AnnData) -> None:
    entries = ["label_prediction", {"geometry": {}}]
    kinds = {"X_good": "model", "X_noise": "model"}
    report = evaluate(embedded, entries, kinds, baselines=(3,), seeds=(0, 1, 2), labels_key="group")
    assert report.benchmarks == ["label_prediction", "geometry"]
    assert [row.name for row in report.of("geometry")][:2] == ["X_good", "X_noise"]
    noise = report.of("label_prediction")[1]
    alone = [LabelPrediction("group", seed=seed).run(embedded.obsm["X_noise"], embedded.obs) for seed in (0, 1, 2)]
    assert noise.scores["knn_macro_f1"] == pytest.approx(np.mean([one["knn_macro_f1"] for one in alone]))
    assert noise.spreads["knn_macro_f1"] == pytest.approx(np.std([one["knn_macro_f1"] for one in alone], ddof=1))
    low, high = noise.intervals["knn_macro_f1"]
    assert low < noise.scores["knn_macro_f1"] < high
    assert noise.comparisons["knn_macro_f1"].baseline.startswith("PCA")
    assert not report.of("geometry")[0].spreads  # it has no seed


def test_replicates_are_one_row(embedded: ad.AnnData) -> None:
    keys = ["X_good", "X_noise"]
    kinds = dict.fromkeys(keys, "model")
    report = evaluate(embedded, LabelPrediction("group"), kinds, baselines=(3,), replicates={"X": keys})
    (row,) = (row for row in report.rows if row.name.startswith("X"))
    alone = [LabelPrediction("group").run(embedded.obsm[key], embedded.obs)["knn_macro_f1"] for key in keys]
    assert row.name == "X"
    assert row.scores["knn_macro_f1"] == pytest.approx(np.mean(alone))
    assert row.spreads["knn_macro_f1"] == pytest.approx(np.std(alone, ddof=1))
    # The interval is of the mean over two very different runs, not of cells alone.
    low, high = row.intervals["knn_macro_f1"]
    assert high - low > np.std(alone, ddof=1)


def test_a_benchmark_without_metrics_is_refused_by_name(embedded: ad.AnnData) -> None:
    class Nameless(Benchmark):
        def run(self, made: np.ndarray, reference: pd.DataFrame) -> dict[str, float]:
            return {}

    for call in (
        lambda: evaluate(embedded, Nameless(), "X_good", baselines=(3,)),
        lambda: compare(Nameless(), {"X_good": embedded.obsm["X_good"]}, embedded.obs, kinds={"X_good": "model"}),
    ):
        with pytest.raises(OptionError, match="the benchmark 'Nameless', which lacks 'metrics'; add it"):
            call()


def test_other_subjects() -> None:
    class Distance(Benchmark):
        subject = "ranking"
        metrics = ("near", "far")
        lower_is_better = frozenset({"far"})

        def run(self, made: np.ndarray, reference: np.ndarray) -> dict[str, float]:
            away = float(np.abs(made - reference).mean())
            return {"near": -away, "far": away}

    reference, benchmark = np.array([[1, 2]]), Distance()
    made = {"mine": np.array([[1, 2]]), "worst": np.array([[9, 9]]), "random": np.array([[2, 3]])}
    kinds = {"mine": "model", "worst": "baseline", "random": "baseline"}
    report = compare(benchmark, made, reference, kinds=kinds)
    beside = {metric: one.baseline for metric, one in report.rows[0].comparisons.items()}
    assert beside == {"near": "random", "far": "random"}
    assert report.verdicts() == ["mine is above random in near of Distance: 0.000 against -1.000, without a test."]
    with raises(OptionError, "kinds['mine']"):
        compare(benchmark, made, reference, kinds={**kinds, "mine": "modell"})
    with raises(OptionError, "kinds"):
        compare(benchmark, made, reference, kinds={"mine": "model", "worst": "baseline"})
    with pytest.raises(OptionError, match="has no baseline for the model"):
        compare(benchmark, {"mine": made["mine"]}, reference, kinds=kinds)


def report() -> Report:
    rows = [
        Row("X_scforge", "model", {"f1": 0.9, "accuracy": 0.5}, 32, 41.6),
        Row("PCA", "baseline", {"f1": 0.8, "accuracy": 0.75}, 50),
    ]
    return Report("Title", facts={"data": "60 cells"}, notes=["A note."], rows=rows)


def compared(p_value: float, difference: float = 0.1, lower: frozenset[str] = frozenset()) -> Report:
    """A model against a baseline, with draws behind it."""
    beside = {"f1": Comparison("PCA", difference, difference - 0.05, difference + 0.05, p_value)}
    rows = [
        Row("mine", "model", {"f1": 0.8 + difference}, intervals={"f1": (0.85, 0.95)}, comparisons=beside),
        Row("PCA", "baseline", {"f1": 0.8}, intervals={"f1": (0.7, 0.9)}),
        Row("again", "ceiling", {"f1": 1.0}),
    ]
    return Report("Title", rows=rows, measured={"": Measured(("f1",), "f1", lower)})


def test_markdown_and_a_frame() -> None:
    assert report().to_markdown() == (
        "# Title\n\n- data: 60 cells\n\n"
        "| method | kind | dimensions | f1 | accuracy | seconds |\n"
        "|---|---|---|---|---|---|\n"
        "| X_scforge | model | 32 | **0.900** | 0.500 | 42 |\n"
        "| PCA | baseline | 50 | 0.800 | **0.750** |  |\n\n"
        "A note.\n"
    )
    text = compared(0.01).to_markdown()
    assert "| method | kind | f1 | 95% interval |" in text
    assert "| mine | model | **0.900** | 0.850 to 0.950 |" in text
    assert "| again | ceiling | 1.000 |  |" in text  # a ceiling is not the best method
    frame = compared(0.01).to_frame()
    assert frame["method"].tolist() == ["mine", "PCA", "again"]
    mine = frame.iloc[0]
    assert (mine["best_baseline"], mine["difference"], mine["p_value"]) == ("PCA", 0.1, 0.01)
    assert (mine["low"], mine["high"]) == (0.85, 0.95)
    assert frame["p_value"].isna().tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (compared(0.01), "mine is better than PCA in f1: 0.900 against 0.800 (difference +0.100"),
        (compared(0.2), "mine is tied with PCA in f1"),
        (compared(0.01, -0.1), "mine is worse than PCA in f1: 0.700 against 0.800"),
        (compared(0.01, -0.1, frozenset({"f1"})), "mine is better than PCA in f1: 0.700 against 0.800"),
        (compared(0.01, 0.1, frozenset({"f1"})), "mine is worse than PCA"),
        (compared(math.nan), "mine is above PCA in f1: 0.900 against 0.800, without a test."),
        (compared(math.nan, 0.0), "mine is not above PCA"),
        (compared(math.nan, -0.1), "mine is not above PCA in f1: 0.700 against 0.800, without a test."),
        (compared(math.nan, -0.1, frozenset({"f1"})), "mine is below (lower is better) PCA"),
    ],
)
def test_verdicts(made: Report, words: str) -> None:
    (sentence,) = made.verdicts()
    assert sentence.startswith(words)
    assert sentence in made.to_markdown()


@pytest.mark.parametrize(
    ("p_value", "difference", "model", "alone", "among_many"),
    [
        (0.03, 0.1, True, "is better", "is tied"),
        (0.02, 0.1, False, "is better", "is better"),
        (0.02, -0.1, False, "is worse", "is tied"),  # worse than the best of many is worse by chance, too
    ],
)
def test_verdicts_are_corrected_for_their_number(p_value, difference, model, alone, among_many) -> None:
    many = compared(p_value, difference)
    assert alone in many.verdicts()[0]
    names = ["other"] if model else ["scVI", "Harmony"]
    many.rows += [replace(many.rows[0 if model else 1], name=name) for name in names]
    assert all(among_many in one for one in many.verdicts())
    assert len(many.verdicts()) == 1 + model


def test_pages_and_notebooks_escape_what_they_show() -> None:
    made = compared(0.01)
    made.facts["data"] = "<b>60 cells</b>"
    for shown in (made.to_html(), made._repr_html_()):
        assert "&lt;b&gt;60 cells&lt;/b&gt;" in shown
        assert "<td class=best>0.900</td>" in shown
        assert made.verdicts()[0] in shown
    assert "<html" not in shown
    assert made.to_html().count("data:image/png;base64,") == 1
    # There is a picture only where one method can be better.
    made.measured = {"": Measured(("f1",), "f1", ranks=False)}
    assert "data:image" not in made.to_html()
    made.rows[1].scores["f1"] = 1234.5
    assert "| 1,234 |" in made.to_markdown()


def test_a_model_without_a_baseline_is_not_shown(tmp_path: Path) -> None:
    alone = Report("Title", rows=report().rows[:1])
    for show in (alone.to_markdown, alone.to_html, alone.to_dict, alone.to_frame, lambda: alone.write(tmp_path)):
        with pytest.raises(OptionError, match="has no baseline for the model"):
            show()
    assert not list(tmp_path.iterdir())
    assert "| PCA |" in Report("Title", rows=report().rows[1:]).to_markdown()
    elsewhere = Report("Title", rows=[replace(report().rows[0], benchmark="probe"), report().rows[1]])
    with pytest.raises(OptionError, match="the report of probe has no baseline for the model"):
        elsewhere.to_markdown()
    # What a session shows of an unfinished report is no error.
    assert "has no baseline for the model" in repr(alone)
    assert (alone._repr_html_(), alone._repr_markdown_(), Report("Empty")._repr_html_()) == (None, None, None)
    assert repr(Report("Empty")) == "Empty"


def test_written(tmp_path: Path) -> None:
    report().write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", "report.html", "report.json", "report.csv"}
    assert (tmp_path / "report.md").read_text() == report().to_markdown()
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["rows"][0].items() >= {"name": "X_scforge", "n_dims": 32, "seconds": 41.6}.items()
    assert content == report().to_dict()
    columns = ["method", "metric", "value"]
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "report.csv")[columns], report().to_frame()[columns])
    with raises(OptionError, "folder"):
        compared(math.nan).write(tmp_path)
    compared(math.nan).write(tmp_path, overwrite=True)
    content = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert content["rows"][0]["comparisons"]["f1"]["p_value"] is None


def test_a_new_report_is_there_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the process is killed, there are all of its files or none."""
    seen = []

    def seeing(step: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def see(path: Path, target: Path) -> Path:
            seen.append((tmp_path / "report").exists())
            done = step(path, target)
            seen.append((tmp_path / "report" / "report.json").exists())
            return done

        return see

    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, seeing(getattr(Path, name)))
    monkeypatch.setattr(os, "link", seeing(os.link))
    report().write(tmp_path / "report")
    assert seen == [False] * 9 + [True]
    assert len(list((tmp_path / "report").iterdir())) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_written_nothing_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report().write(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.suffix == ".html":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space.*report\.html'"):
        replace(report(), title="Another").write(tmp_path, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_a_terminal_shows_fits_it() -> None:
    many = compared(0.01)
    scores = {f"a_further_score_{i}": i / 10 for i in range(12)}
    many.rows = [replace(row, scores=row.scores | scores) for row in many.rows]
    many.measured = {}
    text = repr(many)
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(r"mine +model +0\.900 +0\.850 to 0\.950", text)
    assert re.search(r"Columns not shown: \d+; see to_frame\(\)", text)


def test_the_interval_of_a_sentence_never_contradicts_its_p_value() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    baselines = [Row(name, "baseline", {"f1": 0.8}) for name in ("PCA", "scVI", "Harmony")]
    for _ in range(60):
        common = rng.normal(size=30)
        drawn = [
            compare_paired("PCA", 0.8 + gain, 0.8, common + rng.normal(0, 0.05, 30) + gain, common, n_units=8)
            for gain in rng.normal(0, 0.12, 4)
        ]
        rows = [Row(f"m{i}", "model", {"f1": 0.8 + x.difference}, comparisons={"f1": x}) for i, x in enumerate(drawn)]
        for sentence in Report("Title", rows=rows + baselines).verdicts():
            low, high, p = map(float, re.search(r"interval (\S+) to (\S+), p = ([\d.e-]+)\)", sentence).groups())
            if abs(p - 0.05) > 0.001 and min(abs(low), abs(high)) > 0.001:
                assert (low > 0 or high < 0) == (p < 0.05), sentence
                assert (p < 0.05) == ("tied" not in sentence)
                seen.add(p < 0.05)
    assert seen == {True, False}


def test_each_step_is_shown_while_it_runs(embedded: ad.AnnData, caplog: pytest.LogCaptureFixture) -> None:
    options = {"baselines": ["random"], "intervals": False}
    with caplog.at_level(logging.INFO, logger="scforge"):
        evaluate(embedded, LabelPrediction("group"), ["X_good"], progress_bar=False, **options)
        assert not caplog.messages
        evaluate(embedded, LabelPrediction("group"), ["X_good"], **options)
    baseline, begins, score, _ = caplog.messages
    assert re.fullmatch(r"baseline 'random': \d+\.\d s", baseline)
    assert begins == "label_prediction: scoring 2 methods ..."
    assert re.fullmatch(r"label_prediction: X_good, knn_macro_f1 1\.000 \(after \d+\.\d s\)", score)
