"""Evaluate models on benchmarks with baselines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData

from scforge._checks import check_key
from scforge._columns import check_column, labels_of, texts_of
from scforge._progress import announce
from scforge._registry import check_options
from scforge.data.checks import check_is_adata, gene_names
from scforge.errors import DataError, OptionError, listing, spelled, warn
from scforge.estimators.encoder import Encoder
from scforge.estimators.generate import check_generates
from scforge.estimators.genes import untrained_embedder
from scforge.estimators.setup import setup_of, write_embedding
from scforge.estimators.tasks import learned_labels_of
from scforge.eval.base import Entry, Evaluation, to_evaluation
from scforge.eval.generation import evaluate_generation
from scforge.eval.harness import check_seeds, entries_of, evaluate
from scforge.eval.label_prediction import is_collapsed
from scforge.eval.networks import check_edges, edges_from_embeddings, evaluate_network, read_network
from scforge.eval.report import Kind, Report, write_scores
from scforge.insilico.gene_embeddings import input_gene_embeddings

BENCHMARKS_OF_EMBEDDINGS = ("cell_type_probe", "scib", "geometry")
"""The default benchmarks of embeddings."""

_BASELINES = ("hvg", "pca", "pca_scaled", "harmony", "scvi")
_UNTRAINED = "X_untrained"
_MIN_FOR_SCIB = 91
"""Minimum number of labeled cells for scib-metrics, which uses 90 neighbors."""

_MANY = 2_000
"""Number of cells above which the cost of scib-metrics, which grows quadratically up to 5,000 cells, is announced."""

_OPTIONS = {"gene_network": ["tfs", "targets"], "generation": ["labels_key", "n_comps", "max_cells"]}
"""A mapping from benchmarks of models, not of embeddings, to their options."""

_KEYS = ("labels_key", "batch_key", "groups_key")

_UNTRAINED_NAME = "untrained"


def evaluate_models(
    models: Encoder | Mapping[str, Encoder | Sequence[Encoder]],
    adata: AnnData,
    *,
    benchmarks: Entry | Sequence[Entry] | None = None,
    obsm_keys: str | Sequence[str] = (),
    baselines: bool | Sequence[int | str] = True,
    labels_key: str | None = None,
    batch_key: str | None = None,
    groups_key: str | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    intervals: bool = True,
    untrained: bool = True,
    network: str | os.PathLike[str] | pd.DataFrame | None = None,
    gene_key: str | None = None,
    batch_size: int = 256,
    title: str | None = None,
    key_added: str | None = "report",
    progress_bar: bool = True,
) -> Report:
    """Score models on benchmarks, each with its baselines.

    Parameters
    ----------
    models
        A model, whose row is named ``"scforge"``, or a mapping from row names to models. A list of models, trained with
        different seeds, results in one row with their means. Training cells of a fine-tuned model are not scored.
    adata
        Cells with raw counts. Embeddings are written into ``adata.obsm``, as ``X_<name>``.
    benchmarks
        Names (:func:`scforge.eval.list_benchmarks`), ``{name: {option: value}}`` or benchmarks. If None, scores
        embeddings with ``cell_type_probe``, ``scib`` and ``geometry``. ``gene_network`` compares the similarity of gene
        embeddings with `network`. ``generation`` compares cells that a model generates with `adata`, which must not be
        the training cells of the model.
    obsm_keys
        Additional embeddings in ``adata.obsm``, with one row each.
    baselines
        Baseline embeddings, as in :func:`scforge.eval.evaluate`. If True, uses highly variable genes, PCA, scVI and,
        with batches, Harmony. Other benchmarks have separate baselines.
    labels_key, batch_key, groups_key
        Columns of ``adata.obs`` with cell types, batches, and groups (e.g. donors) that must not be split across folds.
        If None, uses cell types and batches from the setup of the models, if `adata` contains these columns.
    seeds
        Random seeds for the benchmarks.
    intervals
        Whether to add confidence intervals and tests.
    untrained
        Whether to add a row for the first model with random weights.
    network
        True edges for ``gene_network``: a file that :func:`scforge.eval.read_network` reads, or a table.
    gene_key
        Column of ``adata.var`` with the gene names used in `network`. If None, uses ``adata.var_names``.
    batch_size
        Number of cells per batch.
    title
        Heading of the report.
    key_added
        Key in ``adata.uns["scforge"]`` for the scores. If None, neither scores nor embeddings are written.
    progress_bar
        Whether to print a line for each model, baseline and score, with its run time.

    Returns
    -------
    The report, with one row for each model, embedding and baseline.

    Raises
    ------
    OptionError
        If a required argument of a benchmark is missing, or no baseline remains.
    DataError
        If a model was trained on all cells, or a column is missing.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:200].copy()
    >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
    >>> model = scforge.models.Encoder(adata, n_top_genes=200)
    >>> model.train(max_epochs=1, progress_bar=False)
    >>> probe = scforge.eval.LabelPrediction("cell_type", n_folds=3)
    >>> options = {"benchmarks": probe, "baselines": [10], "seeds": (0,), "intervals": False}
    >>> report = scforge.workflows.evaluate_models({"light": model}, adata, **options)
    >>> sorted({row.kind for row in report.rows})
    ['baseline', 'model', 'untrained']
    """
    check_key("key_added", key_added)
    check_is_adata(adata)
    check_seeds(seeds)
    trained = {"scforge": [models]} if isinstance(models, Encoder) else _lists(models)
    evaluations = [] if benchmarks is None else [to_evaluation(entry) for entry in entries_of(benchmarks)]
    others = [one for one in evaluations if one.subject != "embedding"]
    of_embeddings = [one for one in evaluations if one.subject == "embedding"]
    # Each training run has a name; the runs of one model are name_0, name_1, ...
    every = {
        f"{name}_{i}" if len(some) > 1 else name: one for name, some in trained.items() for i, one in enumerate(some)
    }
    if network is not None and not any(one.subject == "network" for one in others):
        raise OptionError("has no effect without the benchmark 'gene_network'; omit network.", argument="network")
    for one in others:  # before any time is spent
        if one.benchmark not in _OPTIONS:
            raise OptionError(
                f"the benchmark {one.title!r} scores results that models do not compute themselves; pass the results "
                "to scforge.eval.compare."
            )
        check_options("option", str(one.benchmark), one.options, _OPTIONS[str(one.benchmark)])
        if one.subject == "network" and network is None:
            raise OptionError(
                f"the benchmark {one.benchmark!r} requires known edges; pass a file of edges, e.g. from TRRUST, as "
                f"{spelled('network', '--network')}."
            )
        for name, model in every.items() if one.subject == "expression" else ():
            if model.adata is None or model.adata is adata:
                raise OptionError(
                    f"the benchmark {one.benchmark!r} requires held-out cells and the training cells of the model "
                    f"{name!r}; pass cells that the model was not trained on, and "
                    f"{spelled('load the model with its training cells', 'its training cells as --trained-on')}."
                )
            check_generates(model.fitted)
    if others and not of_embeddings and (obsm_keys or baselines is not True):
        unused = "obsm_keys" if obsm_keys else "baselines"
        raise OptionError(f"{unused} has no effect, because no embedding benchmark is selected; omit {unused}.")
    report: Any = None
    if of_embeddings or not others:
        report = _evaluate_embeddings(
            trained,
            every,
            adata,
            of_embeddings,
            obsm_keys=[obsm_keys] if isinstance(obsm_keys, str) else list(obsm_keys),
            baselines=baselines,
            given={"labels_key": labels_key, "batch_key": batch_key, "groups_key": groups_key},
            seeds=seeds,
            intervals=intervals,
            untrained=untrained,
            batch_size=batch_size,
            title=title,
            key_added=key_added,
            progress_bar=progress_bar,
        )
    for one in others:
        if one.subject == "network":
            found = _networks(
                every, adata, one, network, gene_key, untrained=untrained, seed=seeds[0], intervals=intervals
            )
        else:
            found = _generated(every, adata, one, seeds=seeds, intervals=intervals, batch_size=batch_size)
        if report is None:
            report = found
            report.title = title or report.title
        else:
            report.extend(found, one.title)
    if others and key_added is not None:
        write_scores(adata, key_added, report.to_frame())
    return report


def _evaluate_embeddings(
    trained: Mapping[str, Sequence[Encoder]],
    every: Mapping[str, Encoder],
    adata: AnnData,
    evaluations: list[Evaluation],
    *,
    obsm_keys: list[str],
    baselines: bool | Sequence[int | str],
    given: dict[str, str | None],
    untrained: bool,
    batch_size: int,
    title: str | None,
    key_added: str | None,
    progress_bar: bool,
    **options: Any,
) -> Report:
    """Embed cells with models, and score the embeddings together with baselines."""
    if baselines is False or (isinstance(baselines, Sequence) and not len(baselines)):
        raise OptionError("leaves no baseline for the embeddings; pass e.g. baselines=['pca'].", baselines=False)
    keys = _keys(every, adata, given)
    chosen: list[Any] = evaluations or list(BENCHMARKS_OF_EMBEDDINGS)
    if not evaluations and keys["labels_key"] is None:
        raise OptionError(
            ", but cell types are required to score embeddings; pass the obs column of the cell types.", labels_key=None
        )
    several = {name: len(some) for name, some in trained.items() if len(some) > 1}
    names = [*(f"X_{name}" for name in (*every, *several)), *obsm_keys, *([_UNTRAINED] if untrained else [])]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise OptionError(f"two rows of the report have the name {twice[0]!r}; rename the model or the embedding.")
    rows = _unseen(every, adata)
    needed = given["batch_key"] is not None or (not isinstance(baselines, bool) and "harmony" in baselines)
    notes = [] if evaluations else _fit_to(chosen, keys, adata, rows, needs_batches=needed)
    before = dict(adata.obsm)
    first_name, first = next(iter(every.items()))
    kinds: dict[str, Kind] = {}
    try:
        for name, model in every.items():
            if progress_bar:
                announce(f"{name}: embedding {adata.n_obs:,} cells ...")
            adata.obsm[f"X_{name}"] = model.get_latent_representation(adata, key_added=None, batch_size=batch_size)
            kinds[f"X_{name}"] = "supervised" if knows_labels(model) else "model"
        kinds |= dict.fromkeys(obsm_keys, "model")
        if untrained:
            try:
                adata.obsm[_UNTRAINED] = untrained_embedder(first.fitted, batch_size)(first.open_cells(adata))
                kinds[_UNTRAINED] = "untrained"
            except OptionError as error:
                notes.append(f"There is no row for random weights: {error}")
            if len(trained) > 1:
                notes.append(f"{_UNTRAINED} has the architecture of {first_name!r}.")
        if baselines is True:
            baselines = [name for name in _BASELINES if name != "harmony" or keys["batch_key"] is not None]
        if progress_bar and not evaluations and "scib" in chosen and adata.n_obs > _MANY:
            others = ("benchmarks=['cell_type_probe', 'geometry']", "--benchmarks cell_type_probe geometry")
            announce(
                f"benchmark 'scib' on {adata.n_obs:,} cells takes longer than all others; use {spelled(*others)} to "
                "skip it ..."
            )
        report = evaluate(
            adata,
            chosen,
            kinds,
            layer=(setup_of(type(first), adata) or first.fitted.setup).get("layer"),
            baselines=baselines,
            replicates={f"X_{name}": [f"X_{name}_{i}" for i in range(n)] for name, n in several.items()},
            rows=rows,
            title=title or f"{', '.join(trained)} on {adata.n_obs:,} cells",
            key_added=None,
            progress_bar=progress_bar,
            **{**keys, **options},
        )
        computed = {key: adata.obsm[key] for key in kinds if key not in obsm_keys}
    finally:
        # The cells are changed at the end, or not at all.
        for key in set(adata.obsm) - set(before):
            del adata.obsm[key]
        adata.obsm.update(before)
    n_scored = adata.n_obs if rows is None else len(rows)
    report.facts = _facts(trained, adata, n_scored, keys) | report.facts
    figures = [row for row in report.rows if "effective_rank" in row.scores and row.kind in ("model", "supervised")]
    if collapsed := [row.name for row in figures if is_collapsed(row.scores)]:
        notes.append(
            f"{listing(collapsed)} has collapsed: nearly all cells are in one place, in one direction or on one line."
        )
    report.notes += notes + _explanations(every, adata, obsm_keys)
    if key_added is not None:
        for name, model in every.items():
            write_embedding(model.fitted, adata, f"X_{name}", computed.pop(f"X_{name}"), model.open_cells(adata))
        adata.obsm.update({key: computed[key] for key in computed if key != _UNTRAINED})
        write_scores(adata, key_added, report.to_frame())
    return report


def _fit_to(
    chosen: list[Any], keys: dict[str, str | None], adata: AnnData, rows: np.ndarray | None, *, needs_batches: bool
) -> list[str]:
    """Remove default benchmarks that cannot be computed for these cells, and return notes for the report."""
    notes = []
    obs = adata.obs if rows is None else adata.obs.iloc[rows]
    batch = keys["batch_key"]
    batches = None if batch is None else texts_of(obs[batch], key=batch, argument="batch_key")
    if not needs_batches and batches is not None and (len(batches.categories) < 2 or batches.isna().any()):
        keys["batch_key"] = None
        notes.append(f"obs[{batch!r}], the batch column, has only one batch or missing values, so batches are ignored.")
    n_labeled = int(labels_of(obs[keys["labels_key"]], key=str(keys["labels_key"])).notna().sum())
    if n_labeled < _MIN_FOR_SCIB:
        chosen.remove("scib")
        notes.append(f"scib needs {_MIN_FOR_SCIB} cells with a label, but there are {n_labeled}; it is left out.")
    return notes


def _lists(models: Any) -> dict[str, list[Encoder]]:
    """Return a mapping from name to the training runs of each model."""
    lists = {}
    if isinstance(models, Mapping):
        lists = {name: [some] if isinstance(some, Encoder) else list(some) for name, some in models.items()}
    if not lists or not all(some and all(isinstance(one, Encoder) for one in some) for some in lists.values()):
        raise OptionError(
            "must be a model or a dict {name: model}; load a model folder with Encoder.load.", argument="models"
        )
    return lists


def _keys(models: Mapping[str, Encoder], adata: AnnData, given: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the given obs columns, or else the columns in the setup of the models, if the cells contain them."""
    keys = dict(given)
    for name in _KEYS:
        if keys[name] is not None:
            check_column(name, str(keys[name]), adata.obs)
            continue
        setups = [setup_of(type(model), adata) for model in models.values()]
        setups += [model.fitted.setup for model in models.values()]
        found = (setup.get(name) for setup in setups)
        keys[name] = next((key for key in found if key is not None and key in adata.obs), None)
    return keys


def knows_labels(model: Encoder) -> bool:
    """Return whether a model learned from cell labels, in fine-tuning or in pretraining."""
    return model.fitted.learned is not None or getattr(model.fitted.pretraining, "labels_key", None) is not None


def _unseen(models: Mapping[str, Encoder], adata: AnnData) -> np.ndarray | None:
    """Return the rows of cells whose labels no model learned from, or None if these are all rows."""
    kept = np.ones(adata.n_obs, dtype=bool)
    for name, model in models.items():
        if model.fitted.learned is None:
            continue
        kept &= ~learned_labels_of(model.fitted, model.open_cells(adata))
        if not kept.any():
            raise DataError(
                f"the model {name!r} was fine-tuned on all of these cells, so its embedding contains their labels; "
                "pass other cells."
            )
    if kept.all():
        return None
    warn(f"A model was fine-tuned on {int((~kept).sum())} of the {adata.n_obs} cells; these cells are not scored.")
    return np.flatnonzero(kept)


def _facts(
    models: Mapping[str, Sequence[Encoder]], adata: AnnData, n_scored: int, keys: Mapping[str, str | None]
) -> dict[str, Any]:
    facts: dict[str, Any] = {"cells": f"{n_scored:,} of {adata.n_obs:,}, {adata.n_vars:,} genes"}
    for name, key in keys.items():
        if key is not None:
            facts[name] = f"{key} ({len(texts_of(adata.obs[key], key=key, argument=name).categories)})"
    for name, some in models.items():
        spec, epochs = some[0].spec, ", ".join(sorted({str(model.n_epochs_) for model in some}))
        times = f", {len(some)} training runs" if len(some) > 1 else ""
        facts[f"model {name}"] = f"{spec.architecture}, {spec.tokenizer}, trained {epochs} epochs{times}"
    return facts


def _explanations(models: Mapping[str, Encoder], adata: AnnData, obsm_keys: Sequence[str]) -> list[str]:
    """Return sentences for the report on the cells and labels that each row was trained on."""
    sentences = ["All baselines are fitted on the expression of all cells, without labels."]
    supervised = [name for name, model in models.items() if model.fitted.learned is not None]
    if supervised:
        sentences.append(
            f"{listing(supervised)} learned from labels of other cells, unlike the baselines, so there is no test."
        )
    for name, model in models.items():
        if (labels_key := getattr(model.fitted.pretraining, "labels_key", None)) is not None:
            sentences.append(
                f"{name!r} learned from obs[{labels_key!r}] in its pretraining, possibly of these cells, so there is "
                "no test."
            )
        condition = getattr(model.fitted.pretraining, "condition_key", None)
        if condition is not None:
            sentences.append(f"{name!r} was trained with obs[{condition!r}] as a condition.")
    own = [name for name, model in models.items() if model.adata is adata and not knows_labels(model)]
    if own:
        sentences.append(f"{listing(own)} has seen the expression of these cells in its training, without labels.")
    unknown = [name for name, model in models.items() if model.adata is None]
    if unknown or obsm_keys:
        sentences.append(f"What {listing([*unknown, *obsm_keys])} was trained on is unknown.")
    return [
        " ".join(sentences),
        "Intervals and p-values come from resampled data, as the facts state for each benchmark: they describe "
        "how scores vary over such data, not over training runs (sd of seeds). p-values and intervals of the "
        "sentences are corrected for their number (Holm), and 'worse' for the number of baselines; those in the tables "
        "are not.",
    ]


def _networks(
    models: Mapping[str, Encoder],
    adata: AnnData,
    evaluation: Evaluation,
    network: Any,
    gene_key: str | None,
    *,
    untrained: bool,
    **options: Any,
) -> Report:
    """Score the similarity of the gene embeddings of transcription factors and their targets."""
    vectors = {name: model.get_gene_embeddings(key_added=None) for name, model in models.items()}
    if untrained:
        first = next(iter(models.values()))
        module, tokenizer = first.spec.build_untrained()
        genes = pd.Index(first.vocab.genes, dtype=str)
        vectors[_UNTRAINED_NAME] = pd.DataFrame(input_gene_embeddings(module, tokenizer), index=genes)
    known = dict(zip(adata.var_names.astype(str), gene_names(adata, gene_key), strict=True))
    vectors = {name: table.rename(index=known) for name, table in vectors.items()}
    vectors = {name: table[~table.index.duplicated()] for name, table in vectors.items()}
    # Models are compared on the genes that all of them have.
    named = set.intersection(*(set(table.index) for table in vectors.values()))
    truth = network if isinstance(network, pd.DataFrame) else read_network(network)
    check_edges("the true edges", truth)
    sources = sorted(set(truth["source"]) & named)
    if not sources:
        raise DataError(f"none of the {len(named)} genes of the models is the source of an edge; check gene_key.")
    scores = {name: edges_from_embeddings(table, sources, center=True) for name, table in vectors.items()}
    return evaluate_network(
        scores,
        truth,
        adata,
        gene_key=gene_key,
        genes=sorted(named),
        kinds={name: "untrained" if name == _UNTRAINED_NAME else "model" for name in scores},
        title="Gene networks",
        **options,
        **dict(evaluation.options),
    )


def _generated(
    models: Mapping[str, Encoder], adata: AnnData, evaluation: Evaluation, *, batch_size: int, **options: Any
) -> Report:
    """Score the cells that models generate against unseen cells."""
    seed = int(options["seeds"][0])
    computed = {name: model.generate(adata.n_obs, seed=seed, batch_size=batch_size) for name, model in models.items()}
    cells = {id(model.adata): model.adata for model in models.values()}
    if len(cells) > 1:
        raise OptionError(f"the models {listing(models)} have different training cells; evaluate them one at a time.")
    (trained,) = cells.values()
    layer = setup_of(type(next(iter(models.values()))), adata).get("layer")
    return evaluate_generation(computed, adata, trained, layer=layer, **options, **dict(evaluation.options))
