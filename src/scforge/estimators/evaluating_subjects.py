"""Models evaluated by benchmarks of any subject: embeddings, networks of genes, cells that they generate."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError, listing
from scforge.estimators.evaluating import each_model, evaluate_embeddings, untrained_module
from scforge.eval.evaluation import Evaluation, to_evaluation
from scforge.eval.harness import entries_of, write_metrics

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.estimators.encoder import Encoder
    from scforge.eval.evaluation import Entry
    from scforge.eval.report import Kind, Report

__all__ = ["OPTIONS", "evaluate_models"]

OPTIONS = (
    *("labels_key", "batch_key", "groups_key", "seeds", "intervals", "untrained", "obsm_keys", "title"),
    *("network", "gene_key"),
)
"""Options of :func:`evaluate_models` beside the cells, the benchmarks and the baselines."""

_UNTRAINED = "untrained"
_ELSEWHERE = {
    "perturbation": "is run by the task of a model that was fine-tuned for perturbations (model.evaluate() without "
    "benchmarks), or by scforge.eval.evaluate_perturbations",
    "ranking": "needs orders of genes that a model put back; pass these to scforge.eval.compare",
}


def evaluate_models(
    models: Mapping[str, Encoder | Sequence[Encoder]],
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

    Raises
    ------
    OptionError
        If a benchmark needs what is not given.
    """
    evaluations = [] if benchmarks is None else [to_evaluation(entry) for entry in entries_of(benchmarks)]
    others = [one for one in evaluations if one.subject != "embedding"]
    if network is not None and not any(one.subject == "network" for one in others):
        raise OptionError("network names true edges, which only the benchmark gene_network needs; leave it out.")
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
    kinds = _kinds(models, untrained=options.get("untrained", True))
    for one in others:
        if one.subject in _ELSEWHERE:
            raise OptionError(f"the benchmark {one.title!r} {_ELSEWHERE[one.subject]}.")
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


def _kinds(models: Mapping[str, Any], *, untrained: bool) -> dict[str, Kind]:
    kinds: dict[str, Kind] = dict.fromkeys(models, "model")
    return {**kinds, _UNTRAINED: "untrained"} if untrained else kinds


def _networks(
    models: Mapping[str, Encoder | Sequence[Encoder]],
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
    from scforge.eval.network_evaluation import evaluate_network
    from scforge.eval.network_files import read_network
    from scforge.eval.network_scores import edges_from_embeddings
    from scforge.insilico.gene_embeddings import input_gene_embeddings

    if network is None:
        raise OptionError(
            f"the benchmark {evaluation.title!r} needs true edges; pass network=FILE (--network), e.g. of TRRUST."
        )
    truth = network if isinstance(network, pd.DataFrame) else read_network(network)
    first = next(iter(each_model(models).values()))
    named = _names_of(first.vocab, adata, gene_key)
    vectors = {name: model.get_gene_embeddings(key_added=None) for name, model in each_model(models).items()}
    if _UNTRAINED in kinds:
        module, tokenizer = untrained_module(first)
        genes = pd.Index(first.vocab.genes, dtype=str)
        vectors[_UNTRAINED] = pd.DataFrame(input_gene_embeddings(module, tokenizer), index=genes)
    sources = sorted(set(truth["source"]) & set(named))
    scores = {}
    for name, table in vectors.items():
        table = table.rename(index=dict(zip(first.vocab.genes, named, strict=True)))
        table = table[~table.index.duplicated()]
        scores[name] = edges_from_embeddings(table, [tf for tf in sources if tf in table.index], center=True)
    return evaluate_network(
        scores,
        truth,
        adata,
        gene_key=gene_key,
        genes=sorted(set(named)),
        kinds={name: kinds.get(name, "model") for name in scores},
        seed=seed,
        intervals=intervals,
        title="Gene networks",
        **dict(evaluation.options),
    )


def _names_of(vocab: GeneVocab, adata: AnnData, gene_key: str | None) -> list[str]:
    """Return the genes of a vocabulary as `gene_key` names those of the cells; as they are, without one."""
    if gene_key is None:
        return list(vocab.genes)
    if gene_key not in adata.var:
        raise OptionError(f"gene_key={gene_key!r} is not a column of var (there are: {listing(adata.var.columns)}).")
    known = dict(zip(adata.var_names.astype(str), adata.var[gene_key].astype(str), strict=True))
    return [known.get(gene, gene) for gene in vocab.genes]


def _generated(
    models: Mapping[str, Encoder | Sequence[Encoder]],
    adata: AnnData,
    evaluation: Evaluation,
    *,
    seeds: Sequence[int],
    intervals: bool,
    batch_size: int,
) -> Report:
    """Score the cells that models generate against cells that they have not seen."""
    from scforge.eval.generation_report import evaluate_generation

    every = each_model(models)
    made, trained = {}, None
    for name, model in every.items():
        if model.adata is None or model.adata is adata:
            raise OptionError(
                f"the benchmark {evaluation.title!r} compares generated cells with others than those of the training; "
                f"load the model {name!r} with its training cells, and pass held-out cells as adata."
            )
        trained = model.adata
        made[name] = model.generate(adata.n_obs, seed=int(seeds[0]), batch_size=batch_size)
    assert trained is not None
    layer = (next(iter(every.values()))._setup_of(adata) or {}).get("layer")
    known: dict[str, Callable[[Any], Any]] = {"labels_key": str, "n_comps": int, "max_cells": int}
    options = {name: read(evaluation.options[name]) for name, read in known.items() if name in evaluation.options}
    return evaluate_generation(made, adata, trained, layer=layer, seeds=seeds, intervals=intervals, **options)
