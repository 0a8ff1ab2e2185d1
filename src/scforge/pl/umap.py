"""Embeddings side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge.errors import DataError, did_you_mean, listing

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
    """Draw a UMAP of each embedding, cells coloured by a column of obs, with one legend for all.

    Parameters
    ----------
    adata
        Annotated data. ``obsm["<key>_umap"]`` is computed with scanpy for each embedding, and stays there.
    obsm_keys
        Key or keys in ``adata.obsm``; as a mapping, with the title of each.
    color
        Column of ``adata.obs`` with categories.
    n_neighbors, seed
        Of the neighbour graph and of UMAP.
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
    for argument, name, known in [("color", color, adata.obs), *[("obsm_keys", key, adata.obsm) for key in titles]]:
        if name not in known:
            names = list(known)
            hint = did_you_mean(name, names)
            raise DataError(f"{argument}={name!r} is not in the data{hint} (known: {listing(names)})")
    column = adata.obs[color].astype("category")
    colours = _palette(len(column.cat.categories))
    # A longer legend than this would press the axes together.
    n_columns = math.ceil((len(colours) + column.hasnans) / 16)
    if axes is None:
        figure = plt.figure(figsize=(4 * len(titles) + 2 * n_columns, 4), layout="constrained")
        axes = [figure.add_subplot(1, len(titles), index + 1) for index in range(len(titles))]
    for key in titles:
        work = sc.AnnData(obs=adata.obs[[]].copy(), obsm={key: np.asarray(adata.obsm[key])})
        sc.pp.neighbors(work, use_rep=key, n_neighbors=n_neighbors, random_state=seed)
        sc.tl.umap(work, random_state=seed)
        adata.obsm[f"{key}_umap"] = work.obsm["X_umap"]
    for ax, (key, title) in zip(axes, titles.items(), strict=True):
        points = adata.obsm[f"{key}_umap"]
        groups = [(str(name), np.asarray(column == name)) for name in column.cat.categories]
        missing = np.asarray(column.isna())
        if missing.any():
            ax.scatter(points[missing, 0], points[missing, 1], s=3, color="lightgrey", linewidths=0, label="no label")
        for index, (name, chosen) in enumerate(groups):
            ax.scatter(points[chosen, 0], points[chosen, 1], s=3, color=colours[index], linewidths=0, label=name)
        ax.set(title=title, xlabel="UMAP 1", ylabel="UMAP 2", xticks=[], yticks=[])
    axes[-1].legend(
        frameon=False,
        markerscale=4,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        fontsize="small",
        ncols=n_columns,
    )
    return axes


def _palette(n: int) -> list[Any]:
    """Return a colour for each of `n` groups; beyond 102 they repeat."""
    import matplotlib.pyplot as plt
    from scanpy.plotting import palettes

    if n <= 20:
        palette = plt.get_cmap("tab10" if n <= 10 else "tab20")
        # Without its grey, which is for cells without a label, where there are colours enough.
        return [palette(index) for index in range(palette.N) if n > 9 or index != 7][:n]
    many = palettes.default_28 if n <= 28 else palettes.default_102
    return [many[index % len(many)] for index in range(n)]
