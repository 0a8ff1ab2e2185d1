"""Figures of the documentation from the files in ``benchmarks/results``; nothing is measured.

Points are means and bars their 95 % confidence intervals over runs, held-out effects or training seeds, where there are
at least three::

    python benchmarks/figures.py docs/_static/benchmarks

``make results`` calls this after the scripts that rewrite the tables.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from scipy import stats

mpl.use("svg")
from matplotlib import pyplot as plt

RESULTS = Path(__file__).parent / "results"
OURS, OTHERS = "#c4501b", "#5b6b7f"
TASKS = {
    "condition": "Stimulated cells from control cells\n(kang_ifnb, used for tuning)",
    "missing": "The same, one type missing\n(kang_ifnb, used for tuning)",
    "protocol": "Drop-seq from CEL-seq2\n(sc_mixology, used for tuning)",
    "donors": "Two unseen donors from six\n(kang_ctrl_8donor, test)",
    "study": "PBMC 3k from another study\n(test)",
    "collection": "PBMC 3k from two other data sets\n(test)",
    "species": "Simulated other species\n(half of PBMC 3k, test)",
}
EFFECTS = {
    "papalexi": "Unseen knockouts\n(papalexi_eccite)",
    "kang": "Interferon response of an unseen cell type\n(kang_ifnb)",
    "planted": "Unseen knockouts\n(simulated screen)",
    "pairs": "Unseen pairs of knockouts\n(simulated screen)",
}
EMBEDDINGS = {
    "pbmc3k": "PBMC 3k\nno batches",
    "sc_mixology": "sc_mixology\ntwo protocols",
    "kang_ctrl_8donor": "kang_ctrl_8donor\neight donors",
    "kang_ifnb": "kang_ifnb\na treatment as the batch",
}
SCORES = {"bio": "Biological conservation", "batch": "Batch correction", "linear_f1": "Macro-F1, logistic regression"}


def interval(sd: pd.Series, n: pd.Series) -> pd.Series:
    """Return half of the 95 % confidence interval of a mean; NaN for fewer than three values, where it says little."""
    return stats.t.ppf(0.975, (n - 1).where(n > 2)) * sd / np.sqrt(n)


def means(values: pd.DataFrame) -> pd.DataFrame:
    """Return mean, half interval and n of the column `value` of each method, in the order of the methods."""
    found = values.groupby("method", sort=False)["value"].agg(["mean", "std", "count"])
    return pd.DataFrame({"mean": found["mean"], "half": interval(found["std"], found["count"]), "n": found["count"]})


def points(axes: plt.Axes, found: pd.DataFrame, is_ours: str) -> None:
    """Draw a row for each method of a table as `means` returns it, the first at the top."""
    for row, (method, (mean, half, _)) in enumerate(found.iterrows()):
        color = OURS if str(method).startswith(is_ours) else OTHERS
        axes.errorbar(mean, row, xerr=None if np.isnan(half) else half, fmt="o", color=color, capsize=2, markersize=5)
    names = [f"{method} ({n:.0f})" for method, n in found["n"].items()]
    axes.set_yticks(range(len(found)), names)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)


def transfer() -> plt.Figure:
    """Macro-F1 of transferred labels, a panel for each task."""
    results = pd.read_csv(RESULTS / "transfer.csv")
    results = results[results["metric"] == "f1_linear"]
    tasks = [task for task in TASKS if task in set(results["task"])]
    rows = -(-len(tasks) // 2)
    figure, grid = plt.subplots(rows, 2, figsize=(12, 3.8 * rows), layout="constrained", squeeze=False)
    for axes in grid.flat[len(tasks) :]:
        axes.remove()
    for axes, task in zip(grid.flat, tasks, strict=False):
        points(axes, means(results[results["task"] == task]).sort_values("mean", ascending=False), "scforge")
        axes.set_title(TASKS[task])
        axes.set_xlabel("Macro-F1 on the query")
    return figure


def few_labels() -> plt.Figure:
    """Macro-F1 over the number of labeled reference cells of each type."""
    results = pd.read_csv(RESULTS / "transfer.csv")
    results = results[results["metric"].str.fullmatch(r"f1_linear_\d+") & (results["task"] != "protocol")]
    results = results.assign(labels=results["metric"].str.rpartition("_")[2].astype(int))
    tasks = [task for task in TASKS if task in set(results["task"])]
    rows = -(-len(tasks) // 2)
    figure, grid = plt.subplots(rows, 2, figsize=(12, 4 * rows), layout="constrained", squeeze=False)
    methods = list(dict.fromkeys(results["method"]))
    colors = dict(zip(methods, mpl.color_sequences["tab20"], strict=False))
    for axes in grid.flat[len(tasks) :]:
        axes.remove()
    for axes, task in zip(grid.flat, tasks, strict=False):
        for method, of_method in results[results["task"] == task].groupby("method", sort=False):
            found = of_method.groupby("labels")["value"].agg(["mean", "std", "count"])
            half = interval(found["std"], found["count"]).fillna(0)
            style = "-" if method.startswith("scforge") else "--"
            # Methods are a little apart, so that their bars do not hide each other.
            at = found.index * 1.03 ** (methods.index(method) - len(methods) / 2)
            axes.errorbar(at, found["mean"], half, label=method, color=colors[method], ls=style, marker=".", capsize=2)
        axes.set_xscale("log")
        axes.set_xticks([5, 20, 100], ["5", "20", "100"], minor=False)
        axes.minorticks_off()
        axes.set_title(TASKS[task])
        axes.set_xlabel("Labeled reference cells per type")
        axes.set_ylabel("Macro-F1 on the query")
    handles = {text: line for axes in figure.axes for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def effects() -> plt.Figure:
    """Correlation of predicted and measured effects, a panel for each data set."""
    results = pd.read_csv(RESULTS / "perturbation_effects.csv")
    by_effect = results.groupby(["data", "method", "perturbation"], sort=False)["pearson_delta"].mean()
    results = by_effect.rename("value").reset_index()
    names = sorted(set(results["data"]), key=lambda name: (name not in EFFECTS, name))
    figure, grid = plt.subplots(1, len(names), figsize=(6.5 * len(names), 4.2), layout="constrained", squeeze=False)
    for axes, name in zip(grid.flat, names, strict=True):
        points(axes, means(results[results["data"] == name]).sort_values("mean", ascending=False), "kernels")
        axes.axvline(0, color="black", lw=0.8)
        axes.set_title(EFFECTS.get(name, name))
        axes.set_xlabel("Pearson correlation of predicted and measured change")
    return figure


def in_silico() -> plt.Figure:
    """Calibration of p-values of in silico deletions: their median and how many are small."""
    results = pd.read_csv(RESULTS / "in_silico.csv", keep_default_na=False)
    results = results[results["part"] == "null"].astype({"value": float})
    expected = {"median p": 0.5, "share of p < 0.05": 0.05}
    figure, grid = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for axes, (metric, value) in zip(grid, expected.items(), strict=True):
        of_metric = results[results["metric"] == metric]
        is_trained = of_metric["method"].str.endswith("trained")
        found = means(
            of_metric.assign(method=of_metric["method"].where(~is_trained, "trained: " + of_metric["method"]))
        )
        found = found.sort_index()
        points(axes, found, "trained: ")
        axes.set_yticks(
            range(len(found)), [f"{name.removeprefix('trained: ')} ({n})" for name, n in found["n"].items()]
        )
        axes.axvline(value, color="black", lw=0.8, ls="--")
        axes.set_xlabel({"median p": "Median p-value", "share of p < 0.05": "Fraction of p-values below 0.05"}[metric])
    return figure


def embeddings() -> plt.Figure:
    """Scores of the default encoder and of its baselines, a row for each data set."""
    results = pd.read_csv(RESULTS / "embedding_quality.csv")
    results = results[results["scenario"] == "whole"]
    figure, grid = plt.subplots(
        len(EMBEDDINGS), len(SCORES), figsize=(12, 8), layout="constrained", sharex="col", squeeze=False
    )
    for line, (data, title) in zip(grid, EMBEDDINGS.items(), strict=True):
        for axes, metric in zip(line, SCORES, strict=True):
            rows = results[(results["data"] == data) & (results["metric"] == metric)].set_index("method")
            if rows.empty:
                axes.axis("off")
                continue
            half = interval(rows["sd"], rows["n"])
            points(axes, pd.DataFrame({"mean": rows["mean"], "half": half, "n": rows["n"]}), "light")
            axes.tick_params(labelbottom=True)
        line[0].set_ylabel(title)
    for axes, text in zip(grid[0], SCORES.values(), strict=True):
        axes.set_title(text)
    return figure


FIGURES = {
    "embeddings": embeddings,
    "transfer": transfer,
    "few_labels": few_labels,
    "effects": effects,
    "in_silico": in_silico,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the figures, one SVG file each")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    # The same results give the same files: ids of elements do not depend on chance, and there is no date.
    plt.rcParams.update(
        {
            "svg.hashsalt": "scforge",
            "svg.fonttype": "none",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    for name, draw in FIGURES.items():
        figure = draw()
        figure.savefig(args.folder / f"{name}.svg", metadata={"Date": None, "Creator": None}, facecolor="white")
        plt.close(figure)


if __name__ == "__main__":
    main()
