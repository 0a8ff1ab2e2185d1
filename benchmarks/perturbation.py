"""What does the task "perturbation" predict for perturbations it never saw, beside baselines that need no model?

- ``papalexi``: ECCITE-seq knock-outs of Papalexi et al. 2021 (``papalexi_eccite.h5ad``, 25 knock-outs, 299 genes).
  The nine whose targets are among the genes are held out, three at a time.
- ``kang``: PBMC with and without interferon beta of Kang et al. 2018 (``kang_ifnb.h5ad``). One cell type after the
  other is held out: its response to a stimulus that was seen in the others.

The base model is trained on cells that are never held out: controls, and in ``papalexi`` the knock-outs of other genes.
``untrained`` is the same fine-tuning on random weights. Each figure is the mean over held-out effects; beside it stand
the standard error over the seeds, and the calibrated score: 0 is the mean
of the training effects, 1 a second experiment with as many cells, over the effects that have cells for one. Below are
the paired differences over held-out effects, which are the unit: seeds are not. ``rank`` is among the few effects that
are held out together, so it says nothing here.

Run with ``python benchmarks/perturbation.py --data FOLDER [--seeds 3] [--cells 150]``; FOLDER has the files.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import torch
from scipy.stats import ttest_1samp

from scforge.errors import NotTrainedWarning
from scforge.eval.perturbation_metrics import METRICS, calibrated, comparable
from scforge.models import Encoder

N_AT_ONCE = 3


def papalexi(folder: Path, n_cells: int, seed: int) -> tuple[ad.AnnData, np.ndarray, list[dict], dict]:
    """Return cells, which of them the base model sees, what is held out together, and the options of the task."""
    adata = ad.read_h5ad(folder / "papalexi_eccite.h5ad")
    adata = adata[adata.obs["grna_frac"] >= 0.8].copy()
    rng = np.random.default_rng(0)
    label = np.asarray(adata.obs["perturbation"].astype(str))
    kept = [
        rng.permutation(np.flatnonzero(label == name))[: n_cells * (4 if name == "control" else 1)]
        for name in np.unique(label)
    ]
    adata = adata[np.sort(np.concatenate(kept))].copy()
    label = np.asarray(adata.obs["perturbation"].astype(str))
    known = sorted(set(label) & set(adata.var_names))
    shuffled = np.random.default_rng(seed).permutation(known).tolist()
    folds = [{"heldout": shuffled[i : i + N_AT_ONCE]} for i in range(0, len(shuffled), N_AT_ONCE)]
    return adata, ~np.isin(label, known), folds, {"perturbation_key": "perturbation", "control": "control"}


def kang(folder: Path, n_cells: int, seed: int) -> tuple[ad.AnnData, np.ndarray, list[dict], dict]:
    """Return cells, which of them the base model sees, what is held out together, and the options of the task."""
    adata = ad.read_h5ad(folder / "kang_ifnb.h5ad")
    folds = [{"heldout_contexts": [str(name)]} for name in sorted(adata.obs["cell_type"].unique())]
    options = {"perturbation_key": "condition", "control": "control", "context_key": "cell_type"}
    return adata, np.asarray(adata.obs["condition"] == "control"), folds, options


def base_model(adata: ad.AnnData, seed: int, epochs: int) -> Encoder:
    """Train the light encoder; 0 epochs leave random weights."""
    Encoder.setup_anndata(adata)
    model = Encoder(adata, seed=seed)
    if epochs:
        model.train(epochs, progress_bar=False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=os.environ.get("SCFORGE_DATA"), help="folder with the h5ad files")
    parser.add_argument("--datasets", nargs="+", choices=["papalexi", "kang"], default=["papalexi", "kang"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cells", type=int, default=150, help="most cells of a knock-out; four times as many controls")
    parser.add_argument("--base-epochs", type=int, default=10)
    parser.add_argument("--delta-loss", default="mse")
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("name the folder with the data, --data or SCFORGE_DATA")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", category=NotTrainedWarning)
    torch.set_num_threads(2)
    for name in arguments.datasets:
        found: dict[int, list[pd.DataFrame]] = {}
        start = time.perf_counter()
        for seed in range(arguments.seeds):
            adata, seen, folds, options = {"papalexi": papalexi, "kang": kang}[name](
                Path(arguments.data), arguments.cells, seed
            )
            models = {
                "scforge": base_model(adata[seen].copy(), seed, arguments.base_epochs),
                "untrained": base_model(adata[seen].copy(), seed, 0),
            }
            for fold in folds:
                for label, model in models.items():
                    tuned = model.finetune(
                        {"name": "perturbation", **options, **fold, "delta_loss": arguments.delta_loss},
                        adata,
                        seed=seed,
                        progress_bar=False,
                    )
                    tuned.evaluate()
                    table = adata.uns["scforge"]["metrics_per_perturbation"]
                    if label != "scforge":
                        table = table[table["method"] == "scforge"].assign(method=label)
                    found.setdefault(seed, []).append(table)
            print(f"{name}, seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
        show(name, adata, [pd.concat(tables) for tables in found.values()])


def show(name: str, adata: ad.AnnData, seeds: list[pd.DataFrame]) -> None:
    """Print the table of a data set."""
    n_effects = len(seeds[0].drop_duplicates(["perturbation", "context"]))
    print(f"\n{name}: {adata.n_obs} cells, {adata.n_vars} genes, {n_effects} held-out effects, {len(seeds)} seeds")
    means = [table.groupby("method", sort=False)[list(METRICS)].mean() for table in seeds]
    mean = sum(means[1:], start=means[0]) / len(means)
    error = pd.concat(means).groupby(level=0).sem().loc[mean.index]  # not a number with one seed
    same = [comparable(table, "technical_duplicate").groupby("method")[list(METRICS)].mean() for table in seeds]
    scores = calibrated(
        (sum(same[1:], start=same[0]) / len(same)).reindex(mean.index), "train_mean", "technical_duplicate"
    )
    print(f"{'':20}" + "".join(f"{metric:>27}" for metric in METRICS))
    for method in mean.index:
        cells = (
            f"{mean.loc[method, m]:.4f} ± {error.loc[method, m]:.4f} ({scores.loc[method, m]:+.2f})" for m in METRICS
        )
        print(f"{method:20}" + "".join(f"{cell:>27}" for cell in cells))
    effects = pd.concat(seeds).groupby(["perturbation", "context", "method"])["pearson_delta"].mean().unstack()
    print(
        "\npearson_delta of scforge less that of the method, means of the seeds; standard error and p over the effects"
    )
    for method in mean.index.drop("scforge"):
        gain = effects["scforge"] - effects[method]
        print(f"{method:20}{gain.mean():+.4f} ± {gain.sem():.4f}, p = {ttest_1samp(gain, 0).pvalue:.2g}")
    print(flush=True)


if __name__ == "__main__":
    main()
