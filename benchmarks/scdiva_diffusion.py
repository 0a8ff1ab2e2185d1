"""Does ScDiVa give back the order of the genes of cells that it never saw, better than a mean profile does?

PBMC 3k, 80 % of the cells for training. The true order of a cell is that of its tokens: genes by value times weight,
the first ``--top`` of them. Figures are L-Dist, BLEU and Spearman (:class:`scforge.eval.RankReconstruction`).

``decoded``
    Expression decoded from the embedding of the cell; as many of the highest genes as the cell has.
``mean profile``
    The same of the mean expression of the training cells, for all cells alike.
``decoded, genes given``, ``mean profile, genes given``
    The genes of the cell are known, their order is not.
``denoised, genes given``
    Each value from the other genes of the cell, in folds (``model.denoise``).
``weights alone, genes given``
    All values alike: many genes of a cell have one count, and their order is that of their weights.

Because weights decide so much of these orders, a second table leaves them out: Spearman of true and predicted values
over those genes of a cell (equal ones have their mean rank), mean over cells, with the weights as one more prediction.

Baselines of the report (mean orders, chance) need no model either::

    python benchmarks/scdiva_diffusion.py [--seeds 3] [--epochs 20] [--genes 2000] [--top 100]
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import numpy as np
import torch
from anndata import AnnData
from scipy.stats import spearmanr

import scforge
from scforge.eval.rank_reconstruction import evaluate_reconstruction
from scforge.models import ScDiVa
from scforge.tokenizers.entropy_ranked import serialization_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="default: that of the recipe")
    parser.add_argument("--genes", type=int, default=2_000, help="highly variable genes")
    parser.add_argument("--top", type=int, default=100, help="genes of a cell that are put in order")
    parser.add_argument("--cells", type=int, help="use so many cells only")
    parser.add_argument("--modes", nargs="+", default=["tokens", "vector"], choices=["vector", "tokens"])
    parser.add_argument("--objective", type=json.loads, default={"name": "masked_diffusion"}, help="JSON")
    parser.add_argument("--options", type=json.loads, default={}, help="of the architecture, JSON")
    parser.add_argument("--folds", type=int, default=5, help="folds of denoise")
    parser.add_argument("--threads", type=int, help="threads of torch")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    adata = scforge.datasets.pbmc3k()
    order = np.random.default_rng(0).permutation(adata.n_obs)[: args.cells]
    cut = int(0.8 * len(order))
    train, test = adata[np.sort(order[:cut])].copy(), adata[np.sort(order[cut:])].copy()
    for mode in args.modes:
        for seed in range(args.seeds):
            report_on(train, test, mode, seed, args)


def report_on(train: AnnData, test: AnnData, mode: str, seed: int, args: argparse.Namespace) -> None:
    """Train once, and print the table."""
    start = time.perf_counter()
    ScDiVa.setup_anndata(train)
    model = ScDiVa(train, objective=args.objective, n_top_genes=args.genes, seed=seed, mode=mode, **args.options)
    model.train(args.epochs, progress_bar=False, accelerator="cpu")
    spent = time.perf_counter() - start
    weights = serialization_weights(model.vocab)
    known, true = expression(model, train), expression(model, test)
    mean = np.broadcast_to(known.mean(axis=0), true.shape)
    given = true > 0
    decoded = model.get_normalized_expression(test, key_added=None).to_numpy()
    denoised = model.denoise(test, n_folds=args.folds, key_added=None).toarray()
    true_orders = orders(true * weights, given, args.top)
    sizes = (true_orders >= 0).sum(axis=1)
    everything, in_order = np.ones_like(given), np.zeros_like(given)
    rows, places = np.nonzero(true_orders >= 0)
    in_order[rows, true_orders[rows, places]] = True
    made = {
        "decoded": (decoded, everything),
        "mean profile": (mean, everything),
        "decoded, genes given": (decoded, in_order),
        "mean profile, genes given": (mean, in_order),
        "denoised, genes given": (denoised, in_order),
        "weights alone, genes given": (np.ones_like(true), in_order),
    }
    report = evaluate_reconstruction(
        {name: orders(values * weights, allowed, args.top, sizes) for name, (values, allowed) in made.items()},
        true_orders,
        orders(known * weights, known > 0, args.top),
        kinds={name: "baseline" for name in made if name.startswith(("mean", "weights"))},
        seed=seed,
        title=f"Orders of genes, mode {mode}, seed {seed}, {model.n_epochs_} epochs, {spent:.0f} s",
    )
    print(report.to_markdown(), flush=True)
    print("\n| values, genes given | Spearman |\n|---|---|")
    predicted = {"decoded": decoded, "mean profile": mean, "denoised": denoised}
    for name, values in {**predicted, "weights": np.broadcast_to(weights, true.shape)}.items():
        print(f"| {name} | {agreement(true, values, in_order):.3f} |", flush=True)


def expression(model: ScDiVa, adata: AnnData) -> np.ndarray:
    """Return log1p CP10K over the genes of the model, shape (cells, genes)."""
    cells = model.open_cells(adata)
    scale = 1e4 / np.maximum(cells.totals, 1.0)
    return np.log1p(cells.counts.multiply(scale[:, None]).toarray()).astype(np.float32)


def agreement(true: np.ndarray, predicted: np.ndarray, genes: np.ndarray) -> float:
    """Return the mean over cells of Spearman's correlation over the chosen genes; 0 where all predictions are alike."""
    found = []
    for cell in range(len(true)):
        one, other = true[cell, genes[cell]], predicted[cell, genes[cell]]
        if len(one) > 1 and np.ptp(one) > 0:
            found.append(spearmanr(one, other).statistic if np.ptp(other) > 0 else 0.0)
    return float(np.mean(found)) if found else float("nan")


def orders(scores: np.ndarray, allowed: np.ndarray, top: int, sizes: np.ndarray | None = None) -> np.ndarray:
    """Return the allowed genes by their score, at most `top` (and `sizes` of each cell), -1 behind the last."""
    scores = np.where(allowed, scores, -np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    n = allowed.sum(axis=1) if sizes is None else np.minimum(sizes, allowed.sum(axis=1))
    return np.where(np.arange(order.shape[1]) < n[:, None], order, -1)


if __name__ == "__main__":
    main()
