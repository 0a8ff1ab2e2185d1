"""Does deleting genes in silico group the genes of a pathway, as deleting them in cells does?

Cells with knock-outs of Papalexi et al. (2021, ECCITE-seq): STAT1, JAK2 and IFNGR2 stand in one pathway, and their
knock-outs change expression alike. A model is trained on all cells, without being told of the knock-outs. Each of the
panel's genes that enough control cells express is deleted in these; the mean moves of the embedding (the mean over
genes taken off) are compared by cosine. Of the three genes each ranks all others; the rank of the other two is given, 1
being the nearest, and the share of the genes that stand nearer. By chance it is a half.

Beside it: the same with the correlation of expression over the control cells in place of the moves, with a model that
was not trained, and with the knock-outs themselves (the cosine of the mean changes of expression; among the targets).
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from itertools import permutations
from pathlib import Path

import anndata
import numpy as np

from scforge.eval.expression import log_expression
from scforge.insilico.screening import Perturbation, mean_moves
from scforge.models import Encoder
from scforge.training.predict import embed

GENES = ("STAT1", "JAK2", "IFNGR2")


def cosines(vectors: np.ndarray) -> np.ndarray:
    """Return the cosine of all pairs, NaN for vectors that are none."""
    vectors = vectors - np.nanmean(vectors, axis=0)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)) @ (
        vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    ).T


def shares(similarity: np.ndarray, names: list[str]) -> dict[tuple[str, str], tuple[int, int]]:
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


def shown(name: str, found: list[dict[tuple[str, str], tuple[int, int]]], seconds: float) -> str:
    """Return a row of the table, of several seeds."""
    of_pairs = [
        "/".join(f"{ranks[pair][0]}" for ranks in found if pair in ranks) or "-" for pair in permutations(GENES, 2)
    ]
    nearer = np.mean([(rank - 1) / (n - 1) for ranks in found for rank, n in ranks.values()])
    n_genes = next(iter(found[0].values()))[1]
    return f"| {name} | {n_genes} | {' | '.join(of_pairs)} | {nearer:.2f} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("SCFORGE_DATA"), help="folder with the h5ad files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--least", type=int, default=50, help="control cells that have to express a gene")
    args = parser.parse_args()
    if args.data is None:
        parser.error("name the folder with the data, --data or SCFORGE_DATA")
    warnings.simplefilter("ignore")
    adata = anndata.read_h5ad(Path(args.data) / "papalexi_eccite.h5ad")
    adata = adata[np.asarray(adata.obs["grna_frac"] >= 0.8)].copy()
    controls = adata[np.asarray(adata.obs["perturbation"] == "control")].copy()
    pairs = [f"{second} of {first}" for first, second in permutations(GENES, 2)]
    print(f"| neighbors by | genes | {' | '.join(pairs)} | share nearer | s |")
    print(f"|{'---|' * (len(pairs) + 4)}")
    for name, is_trained in {"moves in silico": True, "the same, not trained": False}.items():
        found, start = [], time.perf_counter()
        for seed in range(args.seeds):
            Encoder.setup_anndata(adata)
            model = Encoder(adata, n_top_genes=0, seed=seed)
            if is_trained:
                model.train(args.epochs, progress_bar=False, accelerator="cpu")
            cells = model._cells(controls)
            expressed = np.bincount(cells.counts.indices, minlength=model.vocab.n_genes)
            chosen = np.flatnonzero(expressed >= args.least)
            objective = model.spec.build_objective()
            moves = mean_moves(
                cells,
                lambda some, model=model, objective=objective: embed(
                    model.module, some, model.tokenizer, objective=objective
                ),
                Perturbation("delete"),
                chosen[:, None],
            )
            found.append(shares(cosines(moves), [model.vocab.genes[i] for i in chosen]))
        print(shown(name, found, (time.perf_counter() - start) / args.seeds), flush=True)
    expression = log_expression(cells).toarray()[:, chosen]
    names = [model.vocab.genes[i] for i in chosen]
    print(shown("correlation of expression", [shares(np.corrcoef(expression.T), names)], 0.0))
    everything = log_expression(model._cells(adata)).toarray()
    of = np.asarray(adata.obs["perturbation"].astype(str))
    targets = sorted({*of} - {"control"})
    means = np.stack([everything[of == target].mean(axis=0) for target in targets])
    print(shown("the knock-outs themselves", [shares(cosines(means), targets)], 0.0))


if __name__ == "__main__":
    main()
