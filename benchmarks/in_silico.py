"""Does the test of genes in silico hold, and do deletions group the genes of a pathway?

``null``: p-values of 40 specific and 40 broad genes of PBMC 3k (all cells, and CD14+ monocytes), by the default encoder
with random weights and trained. Specific genes have the highest level among those in 2 to 30 % of the cells, broad ones
are the most widely expressed. With random weights, a share of 0.05 should have p < 0.05, and the median should be 0.5.

``held_out``: the same with random weights, for genes, cells and seeds on which the matching of controls was not chosen:
the 40 specific and 40 broad genes that follow, 40 genes drawn from those in at least 1 % of the cells; all cells and B
cells; seeds 100 to 102.

``pathway``: cells with knock-outs of Papalexi et al. (2021, ECCITE-seq): STAT1, JAK2 and IFNGR2 are in one pathway, and
their knock-outs change expression alike. A model is trained on all cells without the knock-outs' labels. Each of the
panel's genes that enough control cells express is deleted in these; the mean moves of the embedding (less their mean
over genes) are compared by cosine. Each of the three genes ranks all others; the rank of the other two is given, 1
being the nearest, and the share of the genes that are nearer. By chance it is a half. In the same table: the
correlation of expression over the control cells, a model that was not trained, and the knock-outs themselves (the
cosine of the mean changes of expression; among the targets).

Results are in ``benchmarks/results/in_silico.csv``; ``--docs PAGE`` rewrites the tables of a page behind comments
``% in_silico NAME``.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
from _tables import rewrite

import scforge
from scforge.data.cells import Cells, CellSource
from scforge.data.expression import log_expression
from scforge.insilico.screening import Perturbation, mean_moves, screen, strata_of
from scforge.models import Encoder
from scforge.training.predict import embed

RESULTS = Path(__file__).parent / "results" / "in_silico.csv"
type Embedder = Callable[[Cells], np.ndarray]
KEYS = ["part", "seed", "method", "metric"]
N_TESTED = 40

GENES = ("STAT1", "JAK2", "IFNGR2")


def cosines(vectors: np.ndarray) -> np.ndarray:
    """Return the cosine of all pairs, NaN for vectors that are none."""
    vectors = vectors - np.nanmean(vectors, axis=0)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)) @ (
        vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    ).T


def ranks(similarity: np.ndarray, names: list[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return for each pair of `GENES` the rank of the second among the neighbors of the first, and of how many."""
    found = {}
    for first, second in permutations(GENES, 2):
        if first not in names or second not in names:
            continue
        row = similarity[names.index(first)]
        others = [i for i, name in enumerate(names) if name != first and np.isfinite(row[i])]
        rank = 1 + sum(row[i] > row[names.index(second)] for i in others)
        found[first, second] = (int(rank), len(others))
    return found


def tested_genes(cells: CellSource) -> dict[str, np.ndarray]:
    """Return the specific and the broad genes of cells, those of the first and those of the held-out part."""
    n_on = cells.counts.getnnz(axis=0)
    level = np.asarray(cells.counts.sum(axis=0)).ravel() / np.maximum(n_on, 1)
    few = np.flatnonzero((n_on > 0.02 * len(cells)) & (n_on < 0.3 * len(cells)))
    return {"specific": few[np.argsort(-level[few])][: 2 * N_TESTED], "broad": np.argsort(-n_on)[: 2 * N_TESTED]}


def p_values(
    cells: CellSource, embedders: dict[str, Embedder], genes: dict[str, np.ndarray], kind: str, seed: int
) -> Iterator[tuple[str, str, float]]:
    """Yield method, metric and value of the p-values of sets of genes."""
    for weights, embed_cells in embedders.items():
        embedding = embed_cells(cells)
        table = screen(
            cells,
            embed_cells,
            Perturbation("delete"),
            np.concatenate([*genes.values()])[:, None],
            strata=strata_of(cells, embedding, seed=seed),
            embedding=embedding,
            seed=seed,
        )
        for name, some in zip(genes, np.split(table["p_value"].to_numpy(), len(genes)), strict=True):
            yield f"{kind}, {name} genes, {weights}", "median p", float(np.median(some))
            yield f"{kind}, {name} genes, {weights}", "share of p < 0.05", float((some < 0.05).mean())


def null(folder: Path, seed: int) -> Iterator[tuple[str, str, float]]:
    """Yield method, metric and value of the p-values of a seed."""
    adata = scforge.datasets.pbmc3k()
    Encoder.setup_anndata(adata)
    trained = Encoder(adata, seed=seed)
    trained.train(progress_bar=False, accelerator="cpu")
    of = partial(embed, objective=trained.spec.build_objective())
    random, tokenizer = trained.spec.build_untrained()
    embedders = {
        "random weights": partial(of, random, tokenizer=tokenizer),
        "trained": partial(of, trained.module, tokenizer=tokenizer),
    }
    for kind, cells in sampled(trained, adata, ("all cells", "CD14+ Mono"), seed):
        genes = {name: some[:N_TESTED] for name, some in tested_genes(cells).items()}
        yield from p_values(cells, embedders, genes, kind, seed)


def held_out(folder: Path, seed: int) -> Iterator[tuple[str, str, float]]:
    """Yield method, metric and value of the p-values of a seed, of genes and cells that no choice depended on."""
    adata, seed = scforge.datasets.pbmc3k(), seed + 100
    Encoder.setup_anndata(adata)
    model = Encoder(adata, seed=seed)
    random, tokenizer = model.spec.build_untrained()
    embedders = {"random weights": partial(embed, random, tokenizer=tokenizer, objective=model.spec.build_objective())}
    for kind, cells in sampled(model, adata, ("all cells", "B"), seed):
        both = tested_genes(cells)
        genes = {name: some[N_TESTED:] for name, some in both.items()}
        usual = np.flatnonzero(cells.counts.getnnz(axis=0) >= 0.01 * len(cells))
        usual = np.setdiff1d(usual, np.concatenate([*both.values()]))
        genes["random"] = np.random.default_rng(seed).choice(usual, N_TESTED, replace=False)
        yield from p_values(cells, embedders, genes, kind, seed)


def sampled(
    model: Encoder, adata: anndata.AnnData, kinds: tuple[str, ...], seed: int
) -> Iterator[tuple[str, CellSource]]:
    """Yield the name of a cell type, or of all cells, and at most 1,000 of the cells."""
    for kind in kinds:
        rows = np.flatnonzero(adata.obs["cell_type"].astype(str) == kind) if kind != "all cells" else None
        yield kind, model.open_cells(adata).sample(1000, rows=rows, seed=seed)


def pathway(folder: Path, seed: int, epochs: int | None = None, least: int = 50) -> Iterator[tuple[str, str, float]]:
    """Yield method, metric (a pair of genes, or the share that is nearer) and value of a seed."""
    adata = anndata.read_h5ad(folder / "papalexi_eccite.h5ad")
    adata = adata[np.asarray(adata.obs["grna_frac"] >= 0.8)].copy()
    controls = adata[np.asarray(adata.obs["perturbation"] == "control")].copy()

    def told(method: str, similarity: np.ndarray, names: list[str]) -> Iterator[tuple[str, str, float]]:
        found = ranks(similarity, names)
        yield method, "genes", float(next(iter(found.values()))[1])
        yield method, "share nearer", float(np.mean([(rank - 1) / (n - 1) for rank, n in found.values()]))
        for (first, second), (rank, _) in found.items():
            yield method, f"{second} of {first}", float(rank)

    for method in ("in silico shifts", "in silico shifts, random weights"):
        Encoder.setup_anndata(adata)
        model = Encoder(adata, n_top_genes=0, seed=seed)
        if method == "in silico shifts":
            model.train(epochs, progress_bar=False, accelerator="cpu")
        cells = model.open_cells(controls)
        chosen = np.flatnonzero(cells.counts.getnnz(axis=0) >= least)
        embed_cells = partial(embed, model.module, tokenizer=model.tokenizer, objective=model.spec.build_objective())
        moves = mean_moves(cells, embed_cells, Perturbation("delete"), chosen[:, None])
        yield from told(method, cosines(moves), [model.vocab.genes[i] for i in chosen])
    if seed == 0:
        expression = log_expression(cells).toarray()[:, chosen]
        names = [model.vocab.genes[i] for i in chosen]
        yield from told("correlation of expression", np.corrcoef(expression.T), names)
        everything = log_expression(model.open_cells(adata)).toarray()
        of = np.asarray(adata.obs["perturbation"].astype(str))
        targets = sorted({*of} - {"control"})
        means = np.stack([everything[of == target].mean(axis=0) for target in targets])
        yield from told("measured knock-outs", cosines(means), targets)


PARTS = {"null": null, "held_out": held_out, "pathway": pathway}


def summary(results: pd.DataFrame, part: str) -> str:
    """Return the means over seeds of a part as Markdown, one row a method; ranks of each seed."""
    of_part = results[results["part"] == part]
    lines, metrics = [], of_part["metric"].unique()
    for method, of_method in of_part.groupby("method", sort=False):
        cells = []
        for metric in metrics:
            values = of_method.loc[of_method["metric"] == metric, "value"]
            is_rank = " of " in metric and "share" not in metric
            cells.append(", ".join(f"{value:.0f}" for value in values) if is_rank else f"{values.mean():.2f}")
            if metric == "genes":
                cells[-1] = f"{values.iloc[0]:.0f}"
        lines.append(f"| {method} | {of_method['seed'].nunique()} | {' | '.join(cells)} |")
    return "\n".join([f"| | seeds | {' | '.join(metrics)} |", f"|{'---|' * (len(metrics) + 2)}", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SCFORGE_DATA"), help="folder with the h5ad files")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--docs", type=Path, help="rewrite the tables of this page, and measure nothing")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    kept = pd.read_csv(RESULTS, keep_default_na=False) if RESULTS.exists() else pd.DataFrame(columns=[*KEYS, "value"])
    if args.docs is not None:
        rewrite(args.docs, "in_silico", partial(summary, kept))
        return
    for part in args.parts:
        if part == "pathway" and args.data is None:
            parser.error("name the folder with the data, --data or SCFORGE_DATA")
        for seed in range(args.seeds):
            rows = [(part, seed, *row) for row in PARTS[part](args.data, seed)]
            kept = pd.concat([kept, pd.DataFrame(rows, columns=[*KEYS, "value"])]).drop_duplicates(KEYS, keep="last")
            kept.to_csv(RESULTS, index=False, float_format="%.5f")
        print(summary(kept, part), flush=True)


if __name__ == "__main__":
    main()
