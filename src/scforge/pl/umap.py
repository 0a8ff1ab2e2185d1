"""Plot embeddings side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from scforge._checks import check_known
from scforge._text import literal

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes


def embeddings(
    adata: AnnData,
    obsm_keys: str | Sequence[str] | Mapping[str, str],
    *,
    color: str | Sequence[str],
    n_neighbors: int = 15,
    seed: int = 0,
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Plot a UMAP of each embedding, with cells colored by obs columns and one legend per column.

    Parameters
    ----------
    adata
        Annotated data. ``obsm["<key>_umap"]`` is computed with scanpy for each embedding and kept.
    obsm_keys
        Key or keys in ``adata.obsm``, or a mapping from key to title.
    color
        Column of ``adata.obs`` with categories. A list plots one row of UMAPs per column.
    n_neighbors, seed
        Number of neighbors, and random seed, for the neighbor graph and UMAP.
    axes
        Axes to plot on, one for each column and embedding, row by row. If None, creates new axes.

    Returns
    -------
    The axes.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:100].copy()
    >>> adata.obsm["X_pca"] = scforge.eval.pca_embedding(adata, n_comps=10)
    >>> axes = scforge.pl.embeddings(adata, "X_pca", color="cell_type")  # doctest: +SKIP
    """
    import matplotlib.pyplot as plt
    import scanpy as sc

    obsm_keys = [obsm_keys] if isinstance(obsm_keys, str) else obsm_keys
    titles = dict(obsm_keys) if isinstance(obsm_keys, Mapping) else {key: key for key in obsm_keys}
    colors = [color] if isinstance(color, str) else list(color)
    for column in colors:
        check_known("color", column, adata.obs, "adata.obs")
    for key in titles:
        check_known("obsm_keys", key, adata.obsm, "adata.obsm")
    # What scanpy writes stays in a copy.
    work = sc.AnnData(obs=adata.obs[colors].astype("category"))
    for key in titles:
        work.obsm[key] = np.asarray(adata.obsm[key])
        sc.pp.neighbors(work, use_rep=key, n_neighbors=n_neighbors, random_state=seed)
        sc.tl.umap(work, random_state=seed)
        adata.obsm[f"{key}_umap"] = work.obsm["X_umap"]
    n_rows, n_columns = len(colors), len(titles)
    if axes is None:
        figure = plt.figure(figsize=(4 * n_columns + 2, 4 * n_rows), layout="constrained")
        axes = [figure.add_subplot(n_rows, n_columns, index + 1) for index in range(n_rows * n_columns)]
    panels = [(column, key) for column in colors for key in titles]
    last = list(titles)[-1]
    for ax, (column, key) in zip(axes, panels, strict=True):
        work.obsm["X_umap"] = adata.obsm[f"{key}_umap"]
        legend = "right margin" if key == last else None
        sc.pl.umap(
            work, color=column, title=titles[key], ax=ax, show=False, size=20, legend_loc=legend, na_in_legend=True
        )
        literal(ax)
    return axes
