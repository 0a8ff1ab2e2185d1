"""Does the default Encoder embed cells better than PCA, Harmony and scVI?

Every method is fitted on all cells of a data set without labels, and scored on the same cells, drawn once. Rows of
trained methods are means and standard deviations over seeds. ``--scenario shift`` takes the commonest label from half
of the batches and does all again; ``--scenario donors`` deals the cells of a data set without batches to made donors.
What each column is stands in ``docs/embeddings.md``. With ``--cache`` embeddings and their figures are kept, so that an
interrupted run goes on, and scVI is trained once per data set::

    python benchmarks/embedding_quality.py --data FOLDER --cache CACHE --scenario whole --scenario shift --threads 1
    python benchmarks/embedding_quality.py --datasets sc_mixology --methods default --seeds 2 --baselines pca harmony
    python benchmarks/embedding_quality.py --objective 'wide={"name": "joint_embedding", "weight": 0.1}' --methods wide

What is kept is known by the arguments of a method, not by its code: name methods whose code has changed in ``--refit``.
Means and standard deviations of the default and of the baselines go into ``benchmarks/results/embedding_quality.csv``;
``--docs PAGE`` rewrites the tables of a page behind comments ``% embeddings DATA_SCENARIO`` from it.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from _embedding_quality_data import DATASETS, FIGURES, SCENARIOS, SCORING, UNSEEN, Data, Scorer, open_data
from _tables import rewrite
from anndata import AnnData
from finetuning import BASES
from scipy.sparse import csr_matrix

from scforge._io import atomic_path, atomic_write_text
from scforge.errors import ScforgeError
from scforge.estimators.spec import defaults_for
from scforge.eval import embedding_baselines
from scforge.models import Encoder, ScDiVa
from scforge.training.objectives.base import OBJECTIVES

BATCH = "{batch_key}"
"""Stands for the data set's ``batch_key``; a method that has it among its arguments needs batches."""


@dataclass(frozen=True)
class Method:
    """A front class, its arguments, and whether it is trained."""

    options: dict[str, Any] = field(default_factory=dict)
    front: type[Encoder] = Encoder
    trained: bool = True


METHODS = {
    "default": Method(),
    "joint embedding": Method({"objective": {"name": "joint_embedding"}}),
    "joint embedding per batch": Method(
        {"objective": {"name": "joint_embedding", "per_batch": True, "batch_key": BATCH}}
    ),
    "joint embedding per batch, 20 clusters": Method(
        {"objective": {"name": "joint_embedding", "per_batch": True, "batch_key": BATCH, "clusters": 20}}
    ),
    "no neighbors": Method({"objective": {"name": "neighbor_denoising", "agreement": 0.0, "translation": 0.0}}),
    # Beside "neighbors drawn alike": in components those of other batches lie far off, and would rarely be drawn.
    "neighbors in components": Method(
        {"objective": {"name": "neighbor_denoising", "space": "components", "temperature": None}}
    ),
    "neighbors drawn alike": Method({"objective": {"name": "neighbor_denoising", "temperature": None}}),
    "agreement .03": Method({"objective": {"name": "neighbor_denoising", "agreement": 0.03}}),
    "beta 1": Method({"objective": {"name": "neighbor_denoising", "beta": 1.0}}),
    "mlp": Method({"architecture": "mlp"}),
    "16 dimensions": Method({"latent_dim": 16}),
    "64 dimensions": Method({"latent_dim": 64}),
    # As Geneformer learns, but small: with all genes and 2,048 tokens it takes days of a CPU.
    "masked genes": Method(BASES["transformer"]),
    "masked values": Method({"architecture": "masked_autoencoder"}),
    "scdiva vector": Method({"mode": "vector"}, front=ScDiVa),
    "scdiva tokens": Method(front=ScDiVa),
    "untrained": Method(trained=False),
}
BASELINES = {"pca": "PCA", "harmony": "Harmony", "scvi": "scVI"}
RESULTS = Path(__file__).parent / "results" / "embedding_quality.csv"
OURS = "light encoder"
"""The name of the default in the results."""
SUMMARY = {
    ("pbmc3k", "whole"): ("PBMC 3k, no batches", ("bio", "knn_f1")),
    ("kang_ctrl_8donor", "whole"): ("eight donors (kang_ctrl_8donor)", ("total", "bio", "batch", "linear_f1")),
    ("sc_mixology", "whole"): ("cell lines, two protocols (sc_mixology)", ("total", "bio")),
    ("kang_ifnb", "whole"): ("a treatment as the batch (kang_ifnb)", ("total", "bio", "batch", "knn_f1")),
    ("merfish_mouse_brain", "donors"): ("MERFISH, small simulated donors", ("total", "linear_f1")),
}
"""Data set and scenario to the title and the scores in the summary of the documentation."""


@dataclass(frozen=True)
class Made:
    """An embedding of all cells, float32, and what making it took."""

    embedding: np.ndarray
    seconds: float
    cpu_seconds: float


def main() -> None:
    args = parsed()
    if args.docs is not None:
        rewrite(args.docs, "embeddings", lambda name: documented(pd.read_csv(RESULTS), name))
        return
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    set_threads(args.threads)
    for scenario in args.scenario or ["whole"]:
        for name in args.datasets:
            data = open_data(name, args.data, scenario, args.cells)
            if data is None:
                why = "has batches of its own" if scenario == "donors" else "has no batches"
                say(f"{name} {why}, so there is no scenario {scenario!r} of it")
            else:
                report_on(data, args)


def parsed() -> argparse.Namespace:
    """Return the arguments of the command line; ``args.configured`` has the methods to train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("SCFORGE_DATA"), help="folder with the h5ad files")
    parser.add_argument("--cache", type=Path, help="folder that keeps embeddings and figures")
    parser.add_argument("--refit", nargs="+", default=[], metavar="NAME", help="methods, baselines to make anew")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=[*DATASETS, *UNSEEN])
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="repeatable; default: whole")
    parser.add_argument("--methods", nargs="+", help=f"of {', '.join(METHODS)}, and those of --objective; default: all")
    parser.add_argument("--objective", action="append", default=[], metavar="NAME=JSON", help="another; repeatable")
    parser.add_argument("--baselines", nargs="+", default=list(BASELINES), choices=list(BASELINES))
    parser.add_argument("--judge", nargs="+", metavar="NAME", help="methods of the verdict; default: the first")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seeds-of", action="append", default=[], metavar="NAME=N", help="of a slow one; repeatable")
    parser.add_argument("--baseline-seeds", type=int, default=1)
    parser.add_argument("--cells", type=int, default=4_000, help="cells that are scored, drawn once")
    parser.add_argument("--epochs", type=int, help="of methods that are trained; default: their own number")
    parser.add_argument("--threads", type=int, help="threads of torch, numba and linear algebra")
    parser.add_argument("--docs", type=Path, help="rewrite the tables of this page, and measure nothing")
    args = parser.parse_args()
    known = dict(METHODS)
    for text in args.objective:
        name, equals, given = text.partition("=")
        try:
            objective = json.loads(given)
        except json.JSONDecodeError as error:
            parser.error(f"--objective {text!r} is not NAME=JSON ({error})")
        if not equals or not name or name in METHODS or not isinstance(objective, dict) or "name" not in objective:
            parser.error(f"--objective {text!r} is not NEW_NAME=JSON with the name of an objective in it")
        known[name] = Method({"objective": objective})
    chosen = args.methods or list(known)
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"--methods names {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    if unknown := [name for name in args.judge or [] if name not in chosen]:
        parser.error(f"--judge names {', '.join(map(repr, unknown))}, which --methods does not")
    if unknown := [name for name in args.refit if name not in known and name not in BASELINES]:
        parser.error(f"--refit names {', '.join(map(repr, unknown))}; there are {', '.join([*known, *BASELINES])}")
    if min(args.seeds, args.baseline_seeds, args.cells) < 1:
        parser.error("--seeds, --baseline-seeds and --cells are positive numbers")
    args.own_seeds = {}
    for text in args.seeds_of:
        name, _, number = text.partition("=")
        if name not in chosen or not number.isdecimal() or int(number) < 1:
            parser.error(f"--seeds-of {text!r} is not NAME=N with a name of --methods and a positive number")
        args.own_seeds[name] = int(number)
    args.configured = {name: known[name] for name in chosen}
    return args


def report_on(data: Data, args: argparse.Namespace) -> None:
    """Make all embeddings of a data set in a scenario, and print its table and its verdict."""
    notes = list(data.notes)
    components = baseline(data, "pca", 0, args)
    scorer = Scorer(data, components.embedding)
    rows: dict[str, list[dict[str, float]]] = {}
    dims: dict[str, int] = {}
    for title, n_seeds, make in makers(data, args):
        for seed in range(n_seeds):
            try:
                made = make(seed)
            except ScforgeError as error:
                notes.append(f"{title!r} stopped at seed {seed}: {error}")
                break
            say(f"{data.name}, {data.scenario}: {title}, seed {seed}, {made.seconds:.0f} s")
            of_time = {"seconds": made.seconds, "cpu_seconds": made.cpu_seconds}
            rows.setdefault(title, []).append(scores(made.embedding, data, scorer, args) | of_time)
            dims[title] = made.embedding.shape[1]
    tables = {title: pd.DataFrame(figures).reindex(columns=list(FIGURES)) for title, figures in rows.items()}
    print_table(data, tables, dims, notes)
    keep(data, tables)
    for name in args.judge or list(args.configured)[:1]:
        if name in tables:
            print_verdict(name, tables, data)


def makers(data: Data, args: argparse.Namespace) -> list[tuple[str, int, Callable[[int], Made]]]:
    """Return name, seeds and maker of each row of a table; what needs batches is not there without them."""
    found: list[tuple[str, int, Callable[[int], Made]]] = []
    for name, method in args.configured.items():
        if data.batch_key is None and BATCH in json.dumps(method.options):
            say(f"{data.name}: {name!r} needs batches")
            continue
        found.append((name, args.own_seeds.get(name, args.seeds), _trainer(data, name, method, args)))
    for name in args.baselines:
        if data.batch_key is not None or name != "harmony":
            found.append((BASELINES[name], args.baseline_seeds, _fitter(data, name, args)))
    return found


def _trainer(data: Data, name: str, method: Method, args: argparse.Namespace) -> Callable[[int], Made]:
    return lambda seed: trained(data, name, method, seed, args)


def _fitter(data: Data, name: str, args: argparse.Namespace) -> Callable[[int], Made]:
    return lambda seed: baseline(data, name, seed, args)


def baseline(data: Data, name: str, seed: int, args: argparse.Namespace) -> Made:
    """Return the embedding of a baseline; the choice of genes, and components below Harmony, count among its time."""
    # Their first import takes seconds.
    import scanpy  # noqa: F401
    import scvi  # noqa: F401

    facts = {"versions": [version(one) for one in ("scanpy", "scvi-tools", "torch")]}

    def make() -> np.ndarray:
        return embedding_baselines(data.adata, [name], batch_key=data.batch_key, seed=seed)[name]

    return kept(data, name, seed, facts, make, args)


def trained(data: Data, name: str, method: Method, seed: int, args: argparse.Namespace) -> Made:
    """Return the embedding of a method; setting up the cells, training and embedding count among its time."""
    text = json.dumps(method.options).replace(json.dumps(BATCH), json.dumps(data.batch_key))
    options = json.loads(text)
    recipe = defaults_for("scdiva" if method.front is ScDiVa else options.get("architecture"), options)
    objective = options.get("objective", {"name": recipe.objective})["name"]
    # Defaults that change make another method, so what is kept of the old ones is not taken.
    defaults = str(inspect.signature(OBJECTIVES.get(objective)))
    facts = {"front": method.front.__name__, "options": options, "recipe": asdict(recipe), "defaults": defaults}
    facts |= {"trained": method.trained, "epochs": args.epochs if method.trained else None}

    def make() -> np.ndarray:
        method.front.setup_anndata(data.adata, labels_key=data.labels_key, batch_key=data.batch_key)
        model: Any = method.front(data.adata, seed=seed, **options)
        if method.trained:
            model.train(args.epochs, progress_bar=False, accelerator="cpu")
        unsaid = {"uncertainty_key": None} if method.front is ScDiVa else {}
        return model.get_latent_representation(key_added=None, **unsaid)

    return kept(data, name, seed, facts, make, args)


def kept(
    data: Data, name: str, seed: int, facts: dict[str, Any], make: Callable[[], np.ndarray], args: argparse.Namespace
) -> Made:
    """Return what the cache has of a method, or make it and keep it."""
    facts = facts | {"cells": data.adata.n_obs, "genes": data.adata.n_vars, "batch_key": data.batch_key}
    facts |= {"threads": args.threads}
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=6).hexdigest()
    slug = re.sub(r"\W+", "_", name)
    file = None if args.cache is None else args.cache / f"{data.name}-{data.scenario}-{slug}-{seed}-{digest}.npz"
    if file is not None and file.exists() and (name not in args.refit or file in _WRITTEN):
        with np.load(file) as stored:
            return Made(stored["embedding"], float(stored["seconds"]), float(stored["cpu_seconds"]))
    warm_up()
    say(f"{data.name}, {data.scenario}: makes {name}, seed {seed}")
    start, cpu_start = time.perf_counter(), time.process_time()
    embedding = np.asarray(make(), dtype=np.float32)
    made = Made(embedding, time.perf_counter() - start, time.process_time() - cpu_start)
    if file is not None:
        with atomic_path(file) as temporary:
            np.savez(temporary, **asdict(made))
        _WRITTEN.add(file)
    return made


_WRITTEN: set[Path] = set()
"""Files of this run, which --refit need not make a second time."""
_WARM: list[bool] = []


def warm_up() -> None:
    """Train and fit for a moment, once, so that the first method does not pay for what is compiled and imported."""
    if _WARM:
        return
    _WARM.append(True)
    counts = csr_matrix(np.random.default_rng(0).poisson(1.0, (256, 100)).astype(np.float32))
    cells = AnnData(counts, obs=pd.DataFrame(index=[f"cell {i}" for i in range(256)]))
    cells.var_names = [f"gene {i}" for i in range(100)]
    Encoder.setup_anndata(cells)
    model = Encoder(cells)
    model.train(1, progress_bar=False, accelerator="cpu")
    model.get_latent_representation(key_added=None)
    cells.obs["batch"] = np.repeat(["a", "b"], 128)
    embedding_baselines(cells, ["harmony"], batch_key="batch")


def scores(embedding: np.ndarray, data: Data, scorer: Scorer, args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of an embedding, from the cache if it has them."""
    facts = json.dumps([data.name, data.scenario, SCORING, version("scib-metrics"), version("scikit-learn")])
    digest = hashlib.blake2b(facts.encode() + data.scored.tobytes() + embedding.tobytes(), digest_size=12).hexdigest()
    file = None if args.cache is None else args.cache / f"figures-{digest}.json"
    if file is not None and file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    found = scorer.figures(embedding)
    if file is not None:
        atomic_write_text(file, json.dumps(found))
    return found


def print_table(data: Data, tables: dict[str, pd.DataFrame], dims: dict[str, int], notes: list[str]) -> None:
    """Print the means and standard deviations of all methods, without columns that have no figure."""
    columns = [name for name in FIGURES if any(table[name].notna().any() for table in tables.values())]
    what = {"whole": "whole", "shift": "composition shift", "donors": "made donors"}[data.scenario]
    print(f"\n### {data.title} (`{data.name}`, {what})\n")
    print(f"| method | D | seeds | {' | '.join(FIGURES[name] for name in columns)} |")
    print(f"|---|---:|---:|{'---:|' * len(columns)}")
    for title, table in tables.items():
        cells = " | ".join(shown(table[name], name) for name in columns)
        print(f"| {title} | {dims[title]} | {len(table)} | {cells} |")
    print("\n" + "\n".join(f"- {note}" for note in notes), flush=True)


def keep(data: Data, tables: dict[str, pd.DataFrame]) -> None:
    """Replace the rows of the default and of the baselines in the results; those of other methods are ablations."""
    kept = pd.read_csv(RESULTS)
    for title in [name for name in ("default", *BASELINES.values()) if name in tables]:
        method, table = OURS if title == "default" else title, tables[title].dropna(axis=1, how="all")
        found = pd.DataFrame({"mean": table.mean(), "sd": table.std(), "n": len(table)}).round(4)
        found = found.rename_axis("metric").reset_index().assign(data=data.name, scenario=data.scenario, method=method)
        old = (kept[["data", "scenario", "method"]] == [data.name, data.scenario, method]).all(axis=1)
        kept = pd.concat([kept[~old], found[kept.columns]])
    with atomic_path(RESULTS) as path:
        kept.to_csv(path, index=False)


def documented(kept: pd.DataFrame, name: str) -> str:
    """Return the table of a data set in a scenario as Markdown, or the summary of several."""
    methods = [OURS, *BASELINES.values()]
    if name == "summary":
        lines = [f"| data set | score | {' | '.join(methods)} |", f"|{'---|' * (len(methods) + 2)}"]
        means = kept.set_index(["data", "scenario", "metric", "method"])["mean"]
        for (data, scenario), (title, metrics) in SUMMARY.items():
            for metric in metrics:
                cells = (means.get((data, scenario, metric, method)) for method in methods)
                shown_cells = " | ".join("" if mean is None else f"{mean:.3f}" for mean in cells)
                lines.append(f"| {title} | {FIGURES[metric].replace('F1', 'macro-F1')} | {shown_cells} |")
                title = ""
        return "\n".join(lines)
    data, _, scenario = name.rpartition("_")
    rows = kept[(kept["data"] == data) & (kept["scenario"] == scenario)]
    metrics = [metric for metric in FIGURES if metric in set(rows["metric"])]
    lines = [f"| | n | {' | '.join(FIGURES[metric] for metric in metrics)} |", f"|{'---|' * (len(metrics) + 2)}"]
    for method in [method for method in methods if method in set(rows["method"])]:
        of_method = rows[rows["method"] == method].set_index("metric")
        cells = []
        for metric in metrics:
            mean, sd = of_method.loc[metric, ["mean", "sd"]]
            digits = 1 if "seconds" in metric else 3
            cells.append(f"{mean:.{digits}f}" + (f" ± {sd:.{digits}f}" if sd == sd and digits == 3 else ""))
        lines.append(f"| {method} | {of_method['n'].iloc[0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(values: pd.Series, name: str) -> str:
    """Return mean ± standard deviation, the latter where there are several seeds."""
    digits = 1 if name in ("seconds", "cpu_seconds") else 3
    if values.isna().all():
        return "–"
    return f"{values.mean():.{digits}f}" + (f" ± {values.std():.{digits}f}" if values.notna().sum() > 1 else "")


def print_verdict(judged: str, tables: dict[str, pd.DataFrame], data: Data) -> None:
    """Print whether the means of a method meet each rule, with the figures."""
    main_figure = "bio" if data.batch_key is None else "total"
    rules: list[tuple[str, str, list[str], float | None]] = [(f"{main_figure} above scVI", main_figure, ["scVI"], None)]
    if data.batch_key is not None:
        rules.append(("total above Harmony", "total", ["Harmony"], None))
    rules.append(("bio within 0.01 of the better of Harmony and scVI", "bio", ["Harmony", "scVI"], 0.01))
    of_f1 = [name for name in FIGURES if "_f1" in name and tables[judged][name].notna().any()]
    rules += [
        (f"{FIGURES[name]} within 0.005 of the best of PCA and scVI", name, ["PCA", "scVI"], 0.005) for name in of_f1
    ]
    rules += [(f"{FIGURES[name]} not below PCA's", name, ["PCA"], 0.0) for name in ("knn_rare", "linear_rare")]
    rules += [(f"{FIGURES[name]} not above scVI's", name, ["scVI"], 0.0) for name in ("seconds", "cpu_seconds")]
    print(f"\nVerdict on {judged!r}, by means:\n")
    print("| asked | it has | beside | difference | answer |\n|---|---:|---:|---:|---|")
    for asked, name, others, slack in rules:
        mine = shown(tables[judged][name], name)
        there = {title: tables[title][name].mean() for title in others if title in tables}
        if not there:
            print(f"| {asked} | {mine} | – | – | not run: {', '.join(others)} |")
            continue
        sign = -1.0 if name in ("seconds", "cpu_seconds") else 1.0
        best = max(there, key=lambda title: sign * there[title])
        gain = sign * (tables[judged][name].mean() - there[best])
        answer = "yes" if (gain > 0 if slack is None else gain >= -slack) else "**no**"
        if lacking := [title for title in others if title not in there]:
            answer += f" ({', '.join(lacking)} not run)"
        digits = 1 if sign < 0 else 3
        beside = f"{best} {there[best]:.{digits}f}"
        print(f"| {asked} | {mine} | {beside} | {sign * gain:+.{digits}f} | {answer} |")
    sys.stdout.flush()


def set_threads(n_threads: int | None) -> None:
    """Limit the threads of torch, numba and linear algebra; scoring with JAX, which is not timed, takes its own."""
    if n_threads is None:
        return
    import numba
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(n_threads)
    numba.set_num_threads(min(n_threads, numba.get_num_threads()))
    threadpool_limits(n_threads)


def say(text: str) -> None:
    """Print progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
