"""Do ScDiVa's two modes embed cells as well as PCA and scVI, and is the latent in use?

Rows are means over trainings with different seeds, without labels; figures are those of scib-metrics and of a probe
(logistic regression and nearest neighbors, 5 folds) over the same cells, drawn once. PCA and scVI are fitted on all
cells. A dimension of the latent is active if its mean varies by more than 0.01 over cells (Burda et al. 2016)::

    python benchmarks/scdiva.py --data FOLDER
    python benchmarks/scdiva.py --datasets pbmc3k --modes tokens --options '{"max_tokens": 256}' --seeds 1
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings

import numpy as np
import torch

from scforge.datasets import get_card, load
from scforge.eval import CellTypeProbe, Scib, evaluate
from scforge.models import ScDiVa

DATASETS = ("pbmc3k", "kang_ctrl_8donor", "sc_mixology")
ACTIVE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("SCFORGE_DATA"), help="folder with the h5ad files")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=list(DATASETS))
    parser.add_argument("--modes", nargs="+", default=["vector", "tokens"], choices=["vector", "tokens"])
    parser.add_argument("--baselines", nargs="+", default=["pca", "scvi"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="default: that of the recipe")
    parser.add_argument("--genes", type=int, help="highly variable genes; default: that of the recipe")
    parser.add_argument("--objective", type=json.loads, help='JSON, e.g. {"name": "variational", "beta": 0.001}')
    parser.add_argument("--options", type=json.loads, default={}, help='of the architecture, JSON: {"max_tokens": 256}')
    parser.add_argument("--train-cells", type=int, help="train on so many cells, drawn once")
    parser.add_argument("--cells", type=int, default=4_000, help="cells that are scored")
    parser.add_argument("--no-batch", action="store_true", help="do not tell the decoder the batch")
    parser.add_argument("--threads", type=int, help="threads of torch")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    for name in args.datasets:
        report_on(name, args)


def report_on(name: str, args: argparse.Namespace) -> None:
    """Train on a data set, and print its table."""
    card, adata = get_card(name), load(name, args.data)
    if args.train_cells is not None and args.train_cells < adata.n_obs:
        kept = np.sort(np.random.default_rng(0).permutation(adata.n_obs)[: args.train_cells])
        adata = adata[kept].copy()
    ScDiVa.setup_anndata(
        adata, labels_key=card.labels_key, batch_key=None if args.no_batch else getattr(card, "batch_key", None)
    )
    rows: dict[str, list[str]] = {}
    said: list[str] = []
    for mode in args.modes:
        for seed in range(args.seeds):
            start = time.perf_counter()
            model = ScDiVa(
                adata, objective=args.objective, n_top_genes=args.genes, seed=seed, mode=mode, **args.options
            )
            model.train(args.epochs, progress_bar=False, accelerator="cpu")
            spent = time.perf_counter() - start
            mean, variance = model.get_latent_representation(return_dist=True, key_added=None, uncertainty_key=None)
            key = f"{mode}, seed {seed}"
            adata.obsm[key] = mean
            rows.setdefault(mode, []).append(key)
            active = int((mean.var(axis=0) > ACTIVE).sum())
            said.append(
                f"| {key} | {active} of {mean.shape[1]} | {variance.mean():.3f} | {model.n_epochs_} | {spent:.0f} |"
            )
    labeled = np.flatnonzero(adata.obs[card.labels_key].notna())
    scored = np.sort(np.random.default_rng(0).permutation(labeled)[: args.cells])
    report = evaluate(
        adata,
        [Scib(card.labels_key, getattr(card, "batch_key", None)), CellTypeProbe(card.labels_key)],
        [key for keys in rows.values() for key in keys],
        baselines=args.baselines,
        batch_key=getattr(card, "batch_key", None),
        replicates=rows,
        rows=scored,
        intervals=False,
        key_added=None,
        title=card.title,
    )
    print(report.to_markdown(), flush=True)
    print("\n| training | active units | mean variance | epochs | s |\n|---|---|---|---|---|")
    print("\n".join(said), flush=True)


if __name__ == "__main__":
    main()
