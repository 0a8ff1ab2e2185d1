"""Plot embeddings side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from anndata import AnnData

from scforge._checks import check_known
from scforge._columns import texts_of
from scforge._constants import UNS_KEY
from scforge._text import literal
from scforge.errors import DataError, listing
from scforge.pl._style import check_columns, legend_name
from scforge.pl.scores import TOTALS, scores_by_method

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NUMBERS = 20
"""Maximum number of different whole numbers, e.g. of clusters, that are plotted as categories."""
_MOST_ENTRIES, _LONGEST = 60, 60
"""Maximum number of entries of a legend, and maximum length of an entry."""
_FEWEST = 5
"""Minimum number of cells for a UMAP."""
_AREA = 40_000
"""Size of all points together; a point has at least 20 and at most 200."""


def embeddings(
    adata: AnnData,
    obsm_keys: str | Sequence[str] | Mapping[str, str],
    *,
    color: str | Sequence[str],
    n_neighbors: int = 15,
    seed: int = 0,
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Plot a UMAP of each embedding, with cells colored by obs columns or genes, and a legend or color bar for each.

    Parameters
    ----------
    adata
        Annotated data. ``obsm["<key>_umap"]`` is computed with scanpy for each embedding and kept; for fewer than 5
        cells, it contains the first two principal components.
    obsm_keys
        Key or keys in ``adata.obsm``, or a mapping from key to title.
    color
        Column of ``adata.obs``, or a gene in ``adata.var_names``, whose values in ``adata.X`` are shown as they are.
        Numbers with fractions, or with more than 20 different values, get a color bar, all other values a legend. A
        list plots one row of UMAPs per column or gene.
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
    # What scanpy writes stays in a copy.
    work = sc.AnnData(obs=pd.DataFrame({column: _colored(adata, column) for column in colors}, index=adata.obs_names))
    for key in titles:
        check_known("obsm_keys", key, adata.obsm, "adata.obsm")
    for key in titles:
        adata.obsm[f"{key}_umap"] = umap_of(np.asarray(adata.obsm[key]), n_neighbors, seed)
    n_rows, n_columns = len(colors), len(titles)
    if axes is None:
        figure = plt.figure(figsize=(4 * n_columns + 2, 4 * n_rows), layout="constrained")
        axes = [figure.add_subplot(n_rows, n_columns, index + 1) for index in range(n_rows * n_columns)]
    panels = [(column, key) for column in colors for key in titles]
    last = list(titles)[-1]
    for ax, (column, key) in zip(axes, panels, strict=True):
        work.obsm["X_umap"] = adata.obsm[f"{key}_umap"]
        n_values = _n_categories(work.obs[column])
        sc.pl.umap(
            work,
            color=column,
            title=titles[key],
            ax=ax,
            show=False,
            size=float(np.clip(_AREA / adata.n_obs, 20, 200)),
            legend_loc="right margin" if key == last and n_values <= _MOST_ENTRIES else None,
            colorbar_loc="right" if key == last else None,
            na_in_legend=True,
        )
        literal(ax)
        if adata.n_obs < _FEWEST:
            ax.set(xlabel="PC1", ylabel="PC2")
        if n_values > _MOST_ENTRIES:
            ax.set_title(f"{titles[key]}, {column}: {n_values} values")
        if key == last and work.obs[column].dtype.kind == "f":  # a legend has a title in its entries, a bar has none
            ax.figure.axes[-1].set_ylabel(column)
    return axes


def integration(
    adata: AnnData,
    obsm_keys: str | Sequence[str] | Mapping[str, str],
    *,
    batch_key: str,
    labels_key: str,
    report: Any = None,
    benchmark: str | None = None,
    n_neighbors: int = 15,
    seed: int = 0,
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Plot embeddings before and after integration: a column of UMAPs per embedding, by batch (top) and by label.

    Scores of batch correction and the total are above the top row, and scores of biological conservation above the
    bottom row.

    Parameters
    ----------
    adata
        Annotated data. Nothing is written.
    obsm_keys
        Key or keys in ``adata.obsm``, e.g. ``["X_pca", "X_scforge"]``, or a mapping from key to title.
    batch_key, labels_key
        Columns of ``adata.obs`` with the batches and the cell types.
    report
        A :class:`~scforge.eval.Report` with scIB scores, or a table, as for :func:`scib_table`; rows are named like the
        keys, with or without ``X_``. If None, uses ``adata.uns["scforge"]["report"]``, which
        :func:`scforge.eval.evaluate` writes, and plots no scores if it has none of these embeddings. The scores are
        those of the embeddings at that time.
    benchmark
        Benchmark with the scores, if there are several with scIB scores.
    n_neighbors, seed
        Number of neighbors, and random seed, for the neighbor graph and UMAP.
    axes
        Axes to plot on, first those of the top row. If None, creates new axes.

    Returns
    -------
    The axes.

    Raises
    ------
    DataError
        If a key or column is missing, or `report` has scores of none of the embeddings.
    OptionError
        If the benchmark is not in the report, or must be chosen.

    Examples
    --------
    >>> import pandas as pd, scforge
    >>> adata = scforge.datasets.pbmc3k()[:100].copy()
    >>> adata.obs["half"] = ["first", "second"] * 50
    >>> adata.obsm["X_pca"] = scforge.eval.pca_embedding(adata, n_comps=10)
    >>> scores = pd.DataFrame({"bio": [0.7], "batch": [0.8], "total": [0.74]}, index=["X_pca"])
    >>> keys = {"batch_key": "half", "labels_key": "cell_type"}
    >>> axes = scforge.pl.integration(adata, "X_pca", report=scores, **keys)  # doctest: +SKIP
    """
    obs = {}
    for argument, key in (("batch_key", batch_key), ("labels_key", labels_key)):
        check_known(argument, key, adata.obs, "adata.obs")
        obs[key] = texts_of(adata.obs[key], key=key, argument=argument)
    obsm_keys = [obsm_keys] if isinstance(obsm_keys, str) else obsm_keys
    titles = dict(obsm_keys) if isinstance(obsm_keys, Mapping) else {key: key for key in obsm_keys}
    for key in titles:
        check_known("obsm_keys", key, adata.obsm, "adata.obsm")
    scores: dict[str, dict[str, float]] = {}  # totals of each embedding that has any
    given = adata.uns.get(UNS_KEY, {}).get("report") if report is None else report
    if given is not None:
        frame = check_columns("report", given, ())
        if "metric" in frame:
            frame = frame[frame["metric"].isin(TOTALS)]
        table = scores_by_method(frame, benchmark)[0] if len(frame) else pd.DataFrame()
        table = table[[name for name in TOTALS if name in table]]
        for key in titles:
            names = [name for name in (key, key.removeprefix("X_")) if name in table.index]
            if names:
                scores[key] = table.loc[names[0]].dropna().to_dict()
        if report is not None and (table.empty or not scores):
            raise DataError(
                f"has no scIB scores of {listing(titles)}; name its rows by these obsm_keys, and score them with "
                "scforge.eval.Scib.",
                argument="report",
            )
    # UMAPs stay in a copy.
    work = AnnData(obs=pd.DataFrame(obs, index=adata.obs_names), obsm={key: adata.obsm[key] for key in titles})
    axes = embeddings(work, titles, color=[batch_key, labels_key], n_neighbors=n_neighbors, seed=seed, axes=axes)
    for ax in axes:
        ax.set(xlabel="", ylabel="")
    for row, column in enumerate((batch_key, labels_key)):
        n_values = _n_categories(work.obs[column])
        label = f"{column}: {n_values} values" if n_values > _MOST_ENTRIES else column
        axes[row * len(titles)].set_ylabel(label, parse_math=False)
    for panel, (key, title) in enumerate(titles.items()):
        of_key = scores.get(key, {})
        total = f", total {of_key['total']:.2f}" if "total" in of_key else ""
        batch = f"\nbatch correction {of_key['batch']:.2f}" if "batch" in of_key else ""
        axes[panel].set_title(f"{title}{total}{batch}", parse_math=False)
        axes[len(titles) + panel].set_title(f"bio conservation {of_key['bio']:.2f}" if "bio" in of_key else "")
    return axes


def _colored(adata: AnnData, color: str) -> pd.Series:
    """Return the values of a column or gene: numbers (float64) for a color bar, else the categories that occur."""
    if color not in adata.obs and color in adata.var_names:
        counts = adata.X[:, np.flatnonzero(adata.var_names == color)]
        return pd.Series(np.asarray(counts.sum(axis=1), dtype=np.float64).ravel(), index=adata.obs_names)
    check_known("color", color, adata.obs, "adata.obs")
    values = adata.obs[color]
    if pd.api.types.is_numeric_dtype(values.dtype) and not pd.api.types.is_bool_dtype(values.dtype):
        numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
        finite = numbers[np.isfinite(numbers)]
        if (finite % 1 != 0).any() or len(np.unique(finite)) > _MOST_NUMBERS:
            return pd.Series(numbers, index=adata.obs_names)
    categories = values.astype("category").cat.remove_unused_categories()
    names = [str(name) for name in categories.cat.categories]
    short = [name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…" for name in names]
    short = short if len(set(short)) == len(short) else names
    return categories.cat.rename_categories([legend_name(name) for name in short])


def _n_categories(values: pd.Series) -> int:
    return len(values.cat.categories) if isinstance(values.dtype, pd.CategoricalDtype) else 0


def umap_of(embedding: np.ndarray, n_neighbors: int, seed: int) -> np.ndarray:
    """Return the UMAP of an embedding, or the first principal components of too few cells, float32, shape (N, 2)."""
    import scanpy as sc

    n_cells = len(embedding)
    if n_cells < _FEWEST:
        centered = embedding - embedding.mean(axis=0)
        components = np.zeros((n_cells, 2), dtype=np.float32)
        left, scale, _ = np.linalg.svd(centered, full_matrices=False)
        projected = (left * scale)[:, :2]
        components[:, : projected.shape[1]] = projected
        return components
    work = sc.AnnData(obsm={"X": embedding})
    sc.pp.neighbors(work, use_rep="X", n_neighbors=min(n_neighbors, n_cells - 1), random_state=seed)
    sc.tl.umap(work, random_state=seed)
    return work.obsm["X_umap"]
