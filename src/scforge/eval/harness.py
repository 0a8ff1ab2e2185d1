"""Running benchmarks on embeddings that stand in an AnnData."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from scforge._constants import UNS_KEY
from scforge.errors import DataError, OptionError, did_you_mean, listing
from scforge.eval.base import Benchmark
from scforge.eval.baselines import pca_embedding
from scforge.eval.report import Kind, Report, Row

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["evaluate"]

_BASELINES = (15, 50)


def evaluate(
    adata: AnnData,
    benchmark: Benchmark,
    obsm_keys: str | Sequence[str] | Mapping[str, Kind],
    *,
    layer: str | None = None,
    baselines: Sequence[int] = _BASELINES,
    seconds: Mapping[str, float] | None = None,
    title: str = "Embeddings compared",
    key_added: str | None = "metrics",
) -> Report:
    """Score embeddings in ``adata.obsm`` beside principal components of the same cells.

    Parameters
    ----------
    adata
        Annotated data with raw counts.
    benchmark
        What to score, e.g. :class:`scforge.eval.LabelPrediction`.
    obsm_keys
        Key or keys in ``adata.obsm``; as a mapping, with ``"model"``, ``"baseline"`` or ``"untrained"`` for each.
    layer
        Key in ``adata.layers`` with raw counts, for the baselines; None reads ``adata.X``.
    baselines
        Numbers of principal components to compare with; at least one. Each is taken with genes scaled to unit
        variance and without, because either may be the stronger one.
    seconds
        Wall time of an embedding, by key.
    title
        Heading of the report.
    key_added
        Key in ``adata.uns["scforge"]`` for the scores; None writes nothing.

    Returns
    -------
    The report. Its scores are also written to ``adata.uns["scforge"][key_added]``, by embedding and metric.

    Raises
    ------
    DataError
        If an embedding is not there.
    """
    if not baselines:
        raise OptionError("baselines=[] leaves nothing to compare with; name at least one number of components.")
    obsm_keys = [obsm_keys] if isinstance(obsm_keys, str) else obsm_keys
    kinds: dict[str, Kind] = dict(obsm_keys) if isinstance(obsm_keys, Mapping) else dict.fromkeys(obsm_keys, "model")
    for key in kinds:
        if key not in adata.obsm:
            known = list(adata.obsm)
            raise DataError(
                f"obsm_keys names {key!r}, which is not in adata.obsm{did_you_mean(key, known) or ';'} "
                f"(adata.obsm has: {listing(known)})"
            )
    report = Report(title)
    for key, kind in kinds.items():
        embedding = adata.obsm[key]
        scores = benchmark.run(embedding, adata.obs)
        report.add(Row(key, kind, scores, embedding.shape[1], (seconds or {}).get(key)))
    for n_comps in baselines:
        for scale, name in ((False, "PCA"), (True, "PCA of scaled genes")):
            scores = benchmark.run(pca_embedding(adata, n_comps=n_comps, layer=layer, scale=scale), adata.obs)
            report.add(Row(f"{name}, {n_comps} components", "baseline", scores, n_comps))
    if key_added is not None:
        scores_by_name = {row.name: dict(row.scores) for row in report.rows}
        adata.uns[UNS_KEY] = {**adata.uns.get(UNS_KEY, {}), key_added: scores_by_name}
    return report
