"""Are generated cells like real ones? PBMC 3k: train on 90 % of the cells, generate as many as were held out, compare.

Beside the model stand "independent", which draws each gene on its own (with its frequency in the training cells, and a
value that it has there), and "real", as many training cells: what a perfect generator would reach.

Run with ``python benchmarks/generation.py [--seeds 3] [--epochs 8] [--genes 1000]``. The classifier of the AUC is
linear, and sees means alone, which "independent" has right by construction.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings

import numpy as np
import torch
from anndata import AnnData
from scipy import sparse
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import scforge
from scforge.models import Encoder

MEASURES = ("gene means", "correlations", "energy distance", "AUC")
TOP_GENES, N_COMPONENTS = 200, 30


def expression(cells: scforge.data.cells.CellSource) -> np.ndarray:
    """Return log1p CP10K over the genes of the cells' vocabulary, shape (cells, genes)."""
    scale = sparse.diags(1e4 / np.maximum(cells.totals, 1.0))
    return np.log1p((scale @ cells.counts).toarray()).astype(np.float32)


def independent(train: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draw each gene of each cell on its own, from the values of the training cells."""
    rows = rng.integers(0, len(train), size=(n, train.shape[1]))
    return train[rows, np.arange(train.shape[1])]


def energy_distance(one: np.ndarray, two: np.ndarray) -> float:
    """Return ``2 E|x - y| - E|x - x'| - E|y - y'|`` (Szekely and Rizzo 2013), over distinct pairs."""
    within = sum(cdist(cells, cells).sum() / (len(cells) * (len(cells) - 1)) for cells in (one, two))
    return 2 * float(cdist(one, two).mean()) - float(within)


def correlations(cells: np.ndarray, genes: np.ndarray) -> np.ndarray:
    """Return the correlations of all pairs of some genes; 0 where a gene does not vary."""
    with np.errstate(invalid="ignore", divide="ignore"):
        matrix = np.nan_to_num(np.corrcoef(cells[:, genes], rowvar=False))
    return matrix[np.triu_indices(len(genes), k=1)]


def measures(held_out: np.ndarray, cells: np.ndarray) -> list[float]:
    """Compare cells with held-out ones: see `MEASURES`."""
    top = np.argsort(-held_out.mean(axis=0))[:TOP_GENES]
    pca = PCA(N_COMPONENTS, random_state=0).fit(held_out)
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    both = np.concatenate([held_out, cells])
    is_real = np.repeat([1, 0], [len(held_out), len(cells)])
    return [
        float(spearmanr(held_out.mean(axis=0), cells.mean(axis=0)).statistic),
        float(spearmanr(correlations(held_out, top), correlations(cells, top)).statistic),
        energy_distance(pca.transform(held_out), pca.transform(cells)),
        float(cross_val_score(classifier, both, is_real, cv=5, scoring="roc_auc").mean()),
    ]


def train_model(adata: AnnData, seed: int, epochs: int | None, genes: int | None, architecture: dict) -> Encoder:
    """Train the recipe."""
    Encoder.setup_anndata(adata)
    model = Encoder(adata, "autoregressive_transformer", n_top_genes=genes, seed=seed, **architecture)
    model.train(epochs, progress_bar=False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--genes", type=int, default=None)
    parser.add_argument("--load", help="folder of a model that was trained without the held-out cells of seed 0")
    parser.add_argument("--temperature", type=float, default=1.0)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    adata = scforge.datasets.pbmc3k()
    rows: dict[str, list[list[float]]] = {"model": [], "independent": [], "real": []}
    for seed in range(arguments.seeds):
        rng = np.random.default_rng(seed)
        held_out = np.sort(rng.choice(adata.n_obs, adata.n_obs // 10, replace=False))
        rest = np.setdiff1d(np.arange(adata.n_obs), held_out)
        start = time.perf_counter()
        if arguments.load:
            model = Encoder.load(arguments.load)
        else:
            model = train_model(adata[rest].copy(), seed, arguments.epochs, arguments.genes, {})
        trained = time.perf_counter()
        generated = model.generate(len(held_out), seed=seed, temperature=arguments.temperature)
        print(
            f"seed {seed}: {model.n_epochs_} epochs in {trained - start:.0f} s, {len(held_out)} cells generated in "
            f"{time.perf_counter() - trained:.0f} s, {torch.get_num_threads()} threads",
            flush=True,
        )
        real, known = (
            expression(model.open_cells(adata[held_out].copy())),
            expression(model.open_cells(adata[rest].copy())),
        )
        cells = {
            "model": generated.X.toarray(),
            "independent": independent(known, len(real), rng),
            "real": known[rng.choice(len(known), len(real), replace=False)],
        }
        for name, matrix in cells.items():
            rows[name].append(measures(real, matrix))
            print(f"    {name:12}" + "".join(f"{figure:8.3f}" for figure in rows[name][-1]), flush=True)
    print(f"\n{'':12}" + "".join(f"{name:>24}" for name in MEASURES))
    for name, results in rows.items():
        mean, least, most = np.mean(results, axis=0), np.min(results, axis=0), np.max(results, axis=0)
        figures = (f"{m:.3f} ({low:.3f} to {high:.3f})" for m, low, high in zip(mean, least, most, strict=True))
        print(f"{name:12}" + "".join(f"{figure:>24}" for figure in figures))


if __name__ == "__main__":
    main()
