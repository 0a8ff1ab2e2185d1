"""Plot query cells and their labels among the reference cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scforge._checks import check_known
from scforge._constants import UNS_KEY
from scforge._text import literal
from scforge.errors import DataError, OptionError, listing
from scforge.pl._style import legend_beside, legend_name
from scforge.pl.umap import umap_of

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes

_MOST_CELLS, _NEIGHBORS, _NEIGHBORS_OF_UMAP = 20_000, 5, 15
"""Maximum number of query cells that are plotted, and numbers of neighbors that place a cell, and for UMAP."""
_MOST_ENTRIES, _LONGEST = 40, 40
_GRAY = "#D8D8D8"


def annotation(
    adata: AnnData, key: str | None = None, *, seed: int = 0, axes: Sequence[Axes] | None = None
) -> Sequence[Axes]:
    """Plot query cells on a UMAP of the reference, colored by their label and by its probability.

    The UMAP is computed from reference cells only; each query cell is placed at the weighted mean of its 5 nearest
    reference cells in the embedding. Query cells that are not among
    reference cells of their label are doubtful.

    Parameters
    ----------
    adata
        Query cells labeled by :func:`scforge.annotate` or :meth:`scforge.models.Encoder.transfer_labels`, which keep
        the embedding of up to 2,000 reference cells in ``uns["scforge"]``. At most 20,000 random cells are plotted.
    key
        Column of ``adata.obs`` with the labels. If None, uses the only one.
    seed
        Random seed for UMAP and the choice of cells.
    axes
        Three axes: reference labels, query labels, and probabilities. If None, creates new axes.

    Returns
    -------
    The axes.

    Raises
    ------
    DataError
        If no labels were transferred, or the embedding was replaced since, or is that of the reference itself.
    OptionError
        If there are several label columns, or a wrong number of axes.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.datasets.pbmc3k()
    >>> query = cells[300:400, :300].copy()
    >>> report = scforge.annotate(query, cells[:300, :300].copy())
    >>> axes = scforge.pl.annotation(query)
    >>> [ax.get_title() for ax in axes]
    ['reference, cell_type', 'query, predicted', 'query, probability']
    """
    import matplotlib.pyplot as plt
    from scanpy.plotting.palettes import default_102, vega_20_scanpy

    entries = adata.uns.get(UNS_KEY, {})
    keys = [name for name, entry in entries.items() if "reference_embedding" in entry and name in adata.obs]
    if not keys:
        raise DataError("has no transferred labels; call scforge.annotate(adata, reference) first.", argument="adata")
    if key is None and len(keys) > 1:
        raise OptionError(
            f"has several columns with transferred labels ({listing(keys)}); pass one as key.", argument="adata"
        )
    key = keys[0] if key is None else key
    check_known("key", key, keys, "the columns with transferred labels")
    if axes is None:
        axes = plt.subplots(1, 3, figsize=(17, 4.5), layout="constrained")[1]
    elif len(axes) != 3:
        raise OptionError(f"has {len(axes)} axes; pass three.", argument="axes")
    entry, rng = entries[key], np.random.default_rng(seed)
    obsm_key = str(entry["embedding_key"])
    if obsm_key not in adata.obsm or entries.get(obsm_key, {}).get("model") != entry["model"]:
        raise DataError(
            f"adata.obsm[{obsm_key!r}] is not the embedding that the labels in {key!r} were made with; transfer them "
            "again with this model."
        )
    rows = np.sort(rng.permutation(adata.n_obs)[:_MOST_CELLS])
    learned = np.asarray(entry["reference_embedding"], dtype=np.float32)
    reference = umap_of(learned, _NEIGHBORS_OF_UMAP, seed)
    query = _projected(learned, reference, np.asarray(adata.obsm[obsm_key])[rows])
    reference_labels = np.asarray(entry["reference_labels"]).astype(str)
    labels = adata.obs[key].iloc[rows].astype(str).to_numpy()
    names = [*np.unique(reference_labels), *sorted(set(labels) - set(reference_labels))]
    palette = vega_20_scanpy if len(names) <= len(vega_20_scanpy) else default_102
    colors = {name: palette[number % len(palette)] for number, name in enumerate(names)}
    size = float(np.clip(40_000 / max(len(rows), len(reference_labels)), 2, 30))
    panels = (
        (axes[0], reference, reference_labels, f"reference, {entry['labels_key']}"),
        (axes[1], query, labels, "query, predicted"),
    )
    for ax, places, of_cells, title in panels:
        ax.scatter(reference[:, 0], reference[:, 1], s=size, c=_GRAY, linewidths=0, rasterized=True)
        ax.scatter(
            places[:, 0], places[:, 1], s=size, c=[colors[name] for name in of_cells], linewidths=0, rasterized=True
        )
        ax.set_title(title)
    for name in names[:_MOST_ENTRIES]:
        short = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
        axes[1].scatter([], [], s=30, c=colors[name], label=legend_name(short))
    if len(names) > _MOST_ENTRIES:
        axes[1].scatter([], [], s=0, label=f"and {len(names) - _MOST_ENTRIES} more")
    legend_beside(axes[1])
    axes[2].scatter(reference[:, 0], reference[:, 1], s=size, c=_GRAY, linewidths=0, rasterized=True)
    probability = adata.obs[f"{key}_probability"].to_numpy(dtype=float)[rows]
    order = np.argsort(-probability, kind="stable")  # unsure cells on top
    points = axes[2].scatter(
        query[order, 0],
        query[order, 1],
        s=size,
        c=probability[order],
        cmap="viridis",
        vmin=0,
        vmax=1,
        linewidths=0,
        rasterized=True,
    )
    axes[2].figure.colorbar(points, ax=axes[2], label="probability")
    axes[2].set_title("query, probability")
    for ax in axes:
        ax.set(xticks=[], yticks=[], xlabel="UMAP1", ylabel="UMAP2")
        literal(ax)
    return axes


def _projected(reference: np.ndarray, places: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return the mean place of the nearest reference cells of each query cell, weighted by similarity, shape (N, 2)."""
    from sklearn.neighbors import NearestNeighbors

    k = min(_NEIGHBORS, len(reference))
    distances, nearest = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(reference).kneighbors(query)
    weights = np.exp(-0.5 * np.square(distances / np.maximum(distances.mean(axis=1, keepdims=True), 1e-12)))
    return (places[nearest] * weights[..., None]).sum(axis=1) / weights.sum(axis=1, keepdims=True)
