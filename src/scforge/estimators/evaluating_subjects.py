"""Models evaluated by benchmarks of any subject: embeddings, networks of genes, cells that they generate."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from scforge._registry import check_options
from scforge.errors import OptionError, listing
from scforge.estimators.evaluating import each_model, evaluate_embeddings, untrained_module
from scforge.eval.base import Evaluation, to_evaluation
from scforge.eval.harness import entries_of, write_metrics
from scforge.models.protocol import GeneratingModule

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.estimators.base import CellModel
    from scforge.eval.base import Entry
    from scforge.eval.report import Kind, Report


OPTIONS = (
    *("labels_key", "batch_key", "groups_key", "seeds", "intervals", "untrained", "obsm_keys", "title"),
    *("network", "gene_key", "progress_bar"),
)
"""Options of :func:`evaluate_models` beside the cells, the benchmarks and the baselines."""

_UNTRAINED = "untrained"
_OPTIONS = {"gene_network": ["tfs", "targets"], "generation": ["labels_key", "n_comps", "max_cells"]}
"""Benchmarks of other subjects that a model is enough for, with their options."""

_ELSEWHERE = {
    "perturbation": "is run by the task of a model that was fine-tuned for perturbations (model.evaluate() without "
    "benchmarks), or by scforge.eval.evaluate_perturbations",
    "ranking": "needs orders of genes that a model put back; pass these to scforge.eval.compare",
}


def evaluate_models(
    models: Mapping[str, CellModel | Sequence[CellModel]],
    adata: AnnData,
    *,
    benchmarks: Entry | Sequence[Entry] | None = None,
    baselines: bool | Sequence[int | str] = True,
    network: str | os.PathLike[str] | pd.DataFrame | None = None,
    gene_key: str | None = None,
    key_added: str | None = "metrics",
    batch_size: int = 256,
    **options: Any,
) -> Report:
    """Score models by benchmarks, each beside its baselines.

    Parameters
    ----------
    models
        Name of a row to its model, or to several that were trained with different seeds.
    adata
        Cells with raw counts.
    benchmarks
        As in :meth:`Encoder.evaluate`. Beside those of embeddings, ``gene_network`` scores the similarity of gene
        embeddings against `network`, and ``generation`` the cells that a model generates against `adata`, which
        must not be the cells that it was trained on.
    baselines
        Of embeddings; see :func:`evaluate_embeddings`. Other benchmarks have their own.
    network
        True edges for ``gene_network``: a file that :func:`scforge.eval.read_network` reads, or a table.
    gene_key
        Column of ``adata.var`` with the names of genes that `network` uses; None takes ``adata.var_names``.
    key_added
        Key in ``adata.uns["scforge"]`` for the figures; None writes nothing.
    batch_size
        Cells a batch.
    **options
        Of :func:`evaluate_embeddings`.

    Returns
    -------
    The report, with each benchmark's own baselines.

    Raises
    ------
    OptionError
        If a benchmark needs what is not given.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:100].copy()
    >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
    >>> model = scforge.models.Encoder(adata, n_top_genes=200)
    >>> model.train(max_epochs=1, progress_bar=False)
    >>> options = {"benchmarks": "geometry", "baselines": [10], "seeds": (0,), "untrained": False}
    >>> report = scforge.estimators.evaluate_models({"light": model}, adata, **options)
    >>> report.benchmarks
    ['geometry']
    """
    evaluations = [] if benchmarks is None else [to_evaluation(entry) for entry in entries_of(benchmarks)]
    others = [one for one in evaluations if one.subject != "embedding"]
    if network is not None and not any(one.subject == "network" for one in others):
        raise OptionError("network names true edges, which only the benchmark gene_network needs; leave it out.")
    for one in others:
        _check_other(one, models, adata, network)
    report = None
    of_embeddings = [one for one in evaluations if one.subject == "embedding"]
    if of_embeddings or not others:
        report = evaluate_embeddings(
            models,
            adata,
            benchmarks=of_embeddings or None,
            baselines=baselines,
            batch_size=batch_size,
            key_added=key_added,
            **options,
        )
    seeds, intervals = options.get("seeds", (0, 1, 2)), options.get("intervals", True)
    kinds = _kinds(each_model(models), untrained=options.get("untrained", True))
    for one in others:
        if one.subject == "network":
            found = _networks(models, adata, one, network, gene_key, kinds=kinds, seed=seeds[0], intervals=intervals)
        else:
            found = _generated(models, adata, one, seeds=seeds, intervals=intervals, batch_size=batch_size)
        if report is None:
            report = found
            report.title = options.get("title") or report.title
        else:
            report.extend(found, one.title)
    assert report is not None
    if others and key_added is not None:
        write_metrics(adata, report, key_added)
    return report


def _check_other(
    one: Evaluation, models: Mapping[str, CellModel | Sequence[CellModel]], adata: AnnData, network: Any
) -> None:
    """Raise, before any time is spent, where a benchmark of another subject than embeddings cannot be run."""
    if one.subject in _ELSEWHERE:
        raise OptionError(f"the benchmark {one.title!r} {_ELSEWHERE[one.subject]}.")
    if one.benchmark not in _OPTIONS:
        raise OptionError(
            f"the benchmark {one.title!r} scores what scforge cannot make of a model by itself; make it, and pass both "
            f"to scforge.eval.compare (by their names go {listing(_OPTIONS)})."
        )
    name = str(one.benchmark)
    check_options("option", name, one.options, _OPTIONS[name])
    if one.subject == "network" and network is None:
        raise OptionError(f"the benchmark {name!r} needs true edges; pass network=FILE (--network), e.g. of TRRUST.")
    if one.subject != "expression":
        return
    for model_name, model in each_model(models).items():
        if model.adata is None or model.adata is adata:
            raise OptionError(
                f"the benchmark {name!r} compares generated cells with others than those of the training; load the "
                f"model {model_name!r} with its training cells (--trained-on), and pass held-out cells as adata."
            )
        if not isinstance(model.backbone, GeneratingModule):
            raise OptionError(
                f"the benchmark {name!r} needs a model that generates cells, and {model_name!r} does not."
            )


def _kinds(models: Mapping[str, Any], *, untrained: bool) -> dict[str, Kind]:
    kinds: dict[str, Kind] = dict.fromkeys(models, "model")
    return {**kinds, _UNTRAINED: "untrained"} if untrained else kinds


def _networks(
    models: Mapping[str, CellModel | Sequence[CellModel]],
    adata: AnnData,
    evaluation: Evaluation,
    network: str | os.PathLike[str] | pd.DataFrame | None,
    gene_key: str | None,
    *,
    kinds: Mapping[str, Kind],
    seed: int,
    intervals: bool,
) -> Report:
    """Score how alike the gene embeddings of transcription factors and of their targets are."""
    from scforge.eval.networks import edges_from_embeddings, evaluate_network, read_network
    from scforge.insilico.gene_embeddings import input_gene_embeddings

    assert network is not None
    truth = network if isinstance(network, pd.DataFrame) else read_network(network)
    first = next(iter(each_model(models).values()))
    vectors = {name: model.get_gene_embeddings(key_added=None) for name, model in each_model(models).items()}
    if _UNTRAINED in kinds:
        module, tokenizer = untrained_module(first)
        genes = pd.Index(first.vocab.genes, dtype=str)
        vectors[_UNTRAINED] = pd.DataFrame(input_gene_embeddings(module, tokenizer), index=genes)
    known = _names_of(adata, gene_key)
    vectors = {name: table.rename(index=known) for name, table in vectors.items()}
    vectors = {name: table[~table.index.duplicated()] for name, table in vectors.items()}
    # What is asked is what models know of genes that all of them know.
    named = set.intersection(*(set(table.index) for table in vectors.values()))
    sources = sorted(set(truth["source"]) & named)
    scores = {}
    for name, table in vectors.items():
        scores[name] = edges_from_embeddings(table, [tf for tf in sources if tf in table.index], center=True)
    return evaluate_network(
        scores,
        truth,
        adata,
        gene_key=gene_key,
        genes=sorted(named),
        kinds={name: kinds.get(name, "model") for name in scores},
        seed=seed,
        intervals=intervals,
        title="Gene networks",
        **dict(evaluation.options),
    )


def _names_of(adata: AnnData, gene_key: str | None) -> dict[str, str]:
    """Return what `gene_key` calls the genes of the cells; nothing without one."""
    if gene_key is None:
        return {}
    if gene_key not in adata.var:
        raise OptionError(f"gene_key={gene_key!r} is not a column of var (there are: {listing(adata.var.columns)}).")
    return dict(zip(adata.var_names.astype(str), adata.var[gene_key].astype(str), strict=True))


def _generated(
    models: Mapping[str, CellModel | Sequence[CellModel]],
    adata: AnnData,
    evaluation: Evaluation,
    *,
    seeds: Sequence[int],
    intervals: bool,
    batch_size: int,
) -> Report:
    """Score the cells that models generate against cells that they have not seen."""
    from scforge.eval.generation import evaluate_generation

    every = each_model(models)
    made = {
        name: model.generate(adata.n_obs, seed=int(seeds[0]), batch_size=batch_size) for name, model in every.items()
    }
    cells = {id(model.adata): model.adata for model in every.values()}
    if len(cells) > 1:
        raise OptionError(
            f"the models {listing(every)} have training cells of their own, and generated cells are compared with "
            "those of one training; evaluate one model at a time, or load all with the same AnnData."
        )
    (trained,) = cells.values()
    layer = (next(iter(every.values()))._setup_of(adata) or {}).get("layer")
    options = dict(evaluation.options)
    return evaluate_generation(made, adata, trained, layer=layer, seeds=seeds, intervals=intervals, **options)
