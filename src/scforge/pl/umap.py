"""Embeddings side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from scforge._checks import check_known

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.axes import Axes


def embeddings(
    adata: AnnData,
    obsm_keys: str | Sequence[str] | Mapping[str, str],
    *,
    color: str,
    n_neighbors: int = 15,
    seed: int = 0,
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Plot a UMAP of each embedding, colored by a column of obs, with a shared legend.

    Parameters
    ----------
    adata
        Annotated data. ``obsm["<key>_umap"]`` is computed with scanpy for each embedding, and stays there.
    obsm_keys
        Key or keys in ``adata.obsm``; as a mapping, with the title of each.
    color
        Column of ``adata.obs`` with categories.
    n_neighbors, seed
        Of the neighbor graph and of UMAP.
    axes
        Axes to draw on, one for each embedding; new ones if None.

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
    check_known("color", color, adata.obs, "adata.obs")
    for key in titles:
        check_known("obsm_keys", key, adata.obsm, "adata.obsm")
    # What scanpy writes stays in a copy.
    work = sc.AnnData(obs=adata.obs[[color]].astype("category"))
    for key in titles:
        work.obsm[key] = np.asarray(adata.obsm[key])
        sc.pp.neighbors(work, use_rep=key, n_neighbors=n_neighbors, random_state=seed)
        sc.tl.umap(work, random_state=seed)
        adata.obsm[f"{key}_umap"] = work.obsm["X_umap"]
    if axes is None:
        figure = plt.figure(figsize=(4 * len(titles) + 2, 4), layout="constrained")
        axes = [figure.add_subplot(1, len(titles), index + 1) for index in range(len(titles))]
    for ax, (key, title) in zip(axes, titles.items(), strict=True):
        work.obsm["X_umap"] = adata.obsm[f"{key}_umap"]
        legend = "right margin" if ax is axes[-1] else None
        sc.pl.umap(work, color=color, title=title, ax=ax, show=False, size=20, legend_loc=legend, na_in_legend=True)
    return axes
