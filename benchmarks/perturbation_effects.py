"""Effects of held-out perturbations, predicted by linear models, baselines and a fine-tuned encoder.

- ``planted``: a simulated screen of the shape of Norman et al. (2019) and Replogle et al. (2022): 500 knock-outs of
  genes in 20 programs and 60 pairs of them, 1,000 genes, negative binomial counts. A knock-out shifts the log means of
  its program's response genes by a strength of its own, and of a few genes that only it has; a pair shifts by the sum.
  40 % of the knock-outs do nothing. What is known about genes: noisy vectors that tell the program (``vectors``), the
  effects of the same genes in a noisier screen (``screen``), and vectors that tell nothing (``random``). ``program`` is
  the share of held-out knock-outs with an effect of which the prediction is nearest (cosine) to the response of the
  right program, less the mean of all programs; 0.05 is chance.
- ``papalexi``: all 25 knock-outs of Papalexi et al. (2021), with rows of three regulatory networks as vectors of genes.
- ``kang``: the response to interferon beta of each cell type of Kang et al. (2018).

Perturbations (cell types) are held out in five folds (one by one) and pooled; a third of the controls is only for the
test. Intervals are over perturbations. ``kernels`` is the linear model of scforge. ``fine_tuned`` (``--fine-tuned``)
is the task ``perturbation`` on a light encoder that was pretrained on the training controls; for targets that are not
genes of the data it is the mean training effect. ``network`` is the weight of its network. ``energy_cells`` is the
energy distance between measured cells and the cells that it predicts, ``energy_moved`` that of controls plus the same
effect, and ``energy_controls`` that of controls.

Results are in ``benchmarks/results/perturbation_effects.csv``, one row per held-out effect and method; ``--docs PAGE``
rewrites the tables of a page that follow a comment ``% effects NAME``.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from _tables import difference, rewrite

from scforge.data import GeneVocab
from scforge.eval.perturbation import CellSpace
from scforge.models import Encoder
from scforge.perturbation.baselines import perturbation_baselines
from scforge.perturbation.effects import PerturbedCells, known_effects
from scforge.perturbation.keys import Effect, PerturbationKeys
from scforge.perturbation.metrics import de_genes, energy_distance, score_deltas
from scforge.testing import simulate_screen

RESULTS = Path(__file__).parent / "results" / "perturbation_effects.csv"
N_FOLDS = 5
OURS = "kernels"
METRICS = ["pearson_delta", "mse", "de_overlap", "rank", "rank_in_screen"]
ENERGY = ["energy_cells", "energy_moved", "energy_controls"]


def fine_tuned(
    train: ad.AnnData, test: ad.AnnData, held_out: PerturbedCells, keys: PerturbationKeys, center: np.ndarray, seed: int
) -> tuple[np.ndarray, pd.DataFrame]:
    """Return the effects that a fine-tuned encoder predicts, and the energy distances of each effect."""
    controls = train[(train.obs[keys.perturbation] == keys.control).to_numpy()].copy()
    Encoder.setup_anndata(controls)
    # All genes, those that no control cell expresses as well.
    base = Encoder(controls, seed=seed, vocab=GeneVocab.from_genes(train.var_names), n_top_genes=0)
    base.train(5, progress_bar=False)
    options = {"perturbation_key": keys.perturbation, "control": keys.control, "context_key": keys.context}
    shares = {"test_size": 0, "validation_size": 0.2, "split_by": keys.context}
    train, test = train.copy(), test.copy()
    model = base.finetune("perturbation", train, **options, **shares, seed=seed, progress_bar=False, max_epochs=5)
    trained = {str(name) for name in train.obs[keys.perturbation]}
    known = {effect for effect in held_out.effects if {*effect.targets} <= {*train.var_names, *trained}}
    names = [keys.label(effect.targets) for effect in known]
    made, space = center.copy(), CellSpace(held_out.expression, n_comps=20, seed=seed)
    energy = pd.DataFrame(np.nan, index=range(len(center)), columns=["network", *ENERGY])
    if not names:
        return made, energy
    several = {"perturbations": sorted({*names}), "n_cells": test.n_obs}
    means = model.predict(test, **several)[:, held_out.genes]
    cells = PerturbedCells.read(model.predict(test, **several, single_cells=True), keys, argument="made", made=True)
    cells = cells.over(held_out.genes, argument="made")
    row_of = dict(
        zip(zip(means.obs["perturbation"], means.obs["context"], strict=True), means.layers["delta"], strict=True)
    )
    for row, effect in enumerate(held_out.effects):
        if effect in known:
            made[row] = row_of[keys.label(effect.targets), effect.context]
            real = space.cells(held_out.expression[held_out.rows(effect)])
            plain = space.cells(held_out.expression[held_out.rows(Effect((), effect.context))])
            groups = space.cells(cells.expression[cells.rows(effect)]), plain + space.shift(made[row][None]), plain
            energy.loc[row, ENERGY] = [energy_distance(group, real) for group in groups]
    energy["network"] = means.uns["scforge"]["predicted"]["network_weight"]
    return made, energy


def scored(
    train: ad.AnnData,
    test: ad.AnnData,
    keys: PerturbationKeys,
    tables: dict[str, pd.DataFrame],
    tuned: int | None = None,
) -> tuple[pd.DataFrame, dict[str, np.ndarray], np.ndarray]:
    """Return the scores of each held-out effect by each method, the predictions, and the mean training effect.

    An encoder is fine-tuned with the seed `tuned`, if it is given.
    """
    trained, held_out = (PerturbedCells.read(cells, keys, argument="cells") for cells in (train, test))
    effects = held_out.measured(held_out.moments(), argument="test")
    contexts = [effect.context for effect in held_out.effects]
    known = known_effects(trained, set(contexts))
    center = np.array([known.mean(context) for context in contexts])
    made = {
        name: table.to_numpy()
        for name, table in perturbation_baselines(trained, held_out.effects, keys, tables).items()
    }
    more = {}
    if tuned is not None:
        made["fine_tuned"], more["fine_tuned"] = fine_tuned(train, test, held_out, keys, center, tuned)
    measured = effects.deltas, effects.scores, de_genes(effects.p_values), center, contexts
    found = []
    for method, deltas in made.items():
        scores = score_deltas(deltas, *measured, (known.deltas, known.contexts))[METRICS]
        scores = scores.assign(perturbation=keys.titles(held_out.effects), method=method)
        found.append(pd.concat([scores, more[method]], axis=1) if method in more else scores)
    return pd.concat(found, ignore_index=True), made, center


def planted(folder: Path | None, seed: int, tuned: bool) -> Iterator[pd.DataFrame]:
    """Yield the scores of each fold of a simulated screen."""
    screen = simulate_screen(seed)
    labels = screen.adata.obs["perturbation"].to_numpy()
    of_programs = screen.responses - screen.responses.mean(axis=0)
    of_programs /= np.linalg.norm(of_programs, axis=1, keepdims=True)
    for train, test in folds(screen.adata, labels, seed):
        found, made, center = scored(train, test, PerturbationKeys("perturbation", "control"), dict(screen.tables))
        right = []
        for deltas in made.values():
            like = (deltas - center) @ of_programs.T
            best = like >= like.max(axis=1, keepdims=True) - 1e-12
            of_gene = [screen.program.get(name, -1) for name in found["perturbation"][: len(deltas)]]
            right += [b[gene] / b.sum() if gene >= 0 else np.nan for b, gene in zip(best, of_gene, strict=True)]
        is_pair = found["perturbation"].str.contains("+", regex=False)
        yield found.assign(program=right, data=np.where(is_pair, "pairs", "planted"))


def papalexi(folder: Path, seed: int, tuned: bool) -> Iterator[pd.DataFrame]:
    """Yield the scores of each fold of the knock-outs of Papalexi et al., with networks as tables of genes."""
    adata = ad.read_h5ad(folder / "cells" / "papalexi_eccite.h5ad")
    adata = adata[np.asarray(adata.obs["grna_frac"] >= 0.8)].copy()
    labels = np.asarray(adata.obs["perturbation"].astype(str))
    tables = {}
    for name in ("collectri", "dorothea_ABC", "trrust"):
        edges = pd.read_parquet(folder / "networks" / f"{name}_human.parquet")
        edges = edges.set_axis([str(column).lower() for column in edges.columns], axis=1)
        source, target = (next(c for c in edges if c in known) for known in (("source", "tf"), ("target", "gene")))
        both = pd.concat(
            [edges[[source, target]].set_axis(["a", "b"], axis=1), edges[[target, source]].set_axis(["a", "b"], axis=1)]
        )
        both = both[both["a"].isin(np.unique(labels))]
        tables[name] = pd.crosstab(both["a"], both["b"]).clip(upper=1).astype(float)
    for train, test in folds(adata, labels, seed):
        keys = PerturbationKeys("perturbation", "control")
        found, *_ = scored(train, test, keys, tables, seed if tuned else None)
        yield found.assign(data="papalexi")


def kang(folder: Path, seed: int, tuned: bool) -> Iterator[pd.DataFrame]:
    """Yield the scores of the response of each cell type of Kang et al., held out in turn."""
    adata = ad.read_h5ad(folder / "cells" / "kang_ifnb.h5ad")
    types = np.asarray(adata.obs["cell_type"].astype(str))
    is_control = np.asarray(adata.obs["condition"] == "control")
    tested_controls = is_control & (np.random.default_rng(seed).random(adata.n_obs) < 1 / 3)
    for name in np.unique(types):
        is_test = (types == name) & (~is_control | tested_controls)
        train = adata[(types != name) | (is_control & ~tested_controls)]
        keys = PerturbationKeys("condition", "control", context="cell_type")
        found, *_ = scored(train, adata[is_test], keys, {}, seed if tuned else None)
        yield found.assign(data="kang")


def folds(adata: ad.AnnData, labels: np.ndarray, seed: int) -> Iterator[tuple[ad.AnnData, ad.AnnData]]:
    """Yield training and test cells; each perturbation is held out once, and a third of the controls always."""
    rng = np.random.default_rng(seed)
    names = np.array(sorted({*labels} - {"control"}), dtype=object)
    fold = dict(zip(names, rng.permutation(len(names)) % N_FOLDS, strict=True)) | {"control": -1}
    of_cell = np.array([fold[name] for name in labels])
    tested_controls = (labels == "control") & (rng.random(len(labels)) < 1 / 3)
    for number in range(N_FOLDS):
        is_test = (of_cell == number) | tested_controls
        yield adata[~is_test], adata[is_test]


DATA = {"planted": planted, "papalexi": papalexi, "kang": kang}


def summary(results: pd.DataFrame, kind: str) -> str:
    """Return the means over held-out effects of a kind as Markdown, and paired differences of Pearson correlations."""
    of_kind = results[results["data"] == kind]
    metrics = [name for name in [*METRICS, "program"] if name in of_kind and of_kind[name].notna().any()]
    means = of_kind.groupby("method")[metrics].mean().sort_values("pearson_delta", ascending=False)
    wide = of_kind.pivot_table(index="perturbation", columns="method", values="pearson_delta")
    lines = [f"| method (n = {len(wide)} effects) | {' | '.join(metrics)} | `{OURS}` minus method, correlation |"]
    lines.append(f"|{'---|' * (len(metrics) + 2)}")
    for method, row in means.iterrows():
        gain = "" if method == OURS else difference(wide[OURS] - wide[method])
        values = " | ".join(f"{row[name]:.4f}" if name == "mse" else f"{row[name]:.3f}" for name in metrics)
        lines.append(f"| `{method}` | {values} | {gain} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with cells and networks; not for planted")
    parser.add_argument("--datasets", nargs="+", default=list(DATA), choices=list(DATA))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--fine-tuned", action="store_true", help="fine-tune an encoder in each fold; not in planted")
    parser.add_argument("--docs", type=Path, help="rewrite the tables of this page, and measure nothing")
    args = parser.parse_args()
    if args.docs is None and args.data is None and set(args.datasets) != {"planted"}:
        parser.error("name the folder with the data, --data")
    warnings.simplefilter("ignore")
    results = pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=["data"])
    for name in args.datasets if args.docs is None else ():
        parts = [
            part.assign(seed=seed)
            for seed in range(args.seeds)
            for part in DATA[name](args.data, seed, args.fine_tuned)
        ]
        found = pd.concat(parts)
        results = pd.concat([results[~results["data"].isin(found["data"])], found])
        results.to_csv(RESULTS, index=False, float_format="%.5f")
        for kind in found["data"].unique():
            print(kind, summary(results, kind), sep="\n", flush=True)
    if args.docs is not None:
        rewrite(args.docs, "effects", partial(summary, results))


if __name__ == "__main__":
    main()
