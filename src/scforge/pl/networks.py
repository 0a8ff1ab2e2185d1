"""Plot gene networks: precision-recall curves for true edges, and attention."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge._checks import check_known
from scforge._text import literal
from scforge.errors import DataError
from scforge.pl._style import COLORS, check_columns, legend_beside, new_axes

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from matplotlib.axes import Axes


def precision_recall(
    curves: pd.DataFrame,
    *,
    kinds: Mapping[str, str] | None = None,
    chance: float | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot precision-recall curves of networks; the legend shows the area under each curve, largest first.

    Parameters
    ----------
    curves
        Table with the columns ``method``, ``recall``, ``precision`` and ``auprc`` (the area in the legend), e.g. from
        :func:`scforge.eval.networks.network_curves`.
    kinds
        Kind of each method, ``"model"`` or ``"baseline"``; baselines are gray. If None, uses the column ``kind`` of
        `curves`, or plots all methods in color.
    chance
        Precision of random scores, drawn as a dotted line. If None, uses the precision at recall 1, where all pairs are
        included.
    title
        Title of the axes.
    ax
        Axes to draw on. If None, creates new axes.

    Returns
    -------
    The axes.

    Raises
    ------
    DataError
        If a column is missing.

    Examples
    --------
    >>> import pandas as pd, scforge
    >>> truth = pd.DataFrame({"source": ["A", "B"], "target": ["x", "y"]})
    >>> edges = pd.DataFrame({"source": ["A"], "target": ["x"], "weight": [1.0]})
    >>> from scforge.eval.networks import network_curves
    >>> ax = scforge.pl.precision_recall(network_curves({"mine": edges}, truth))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('recall', 'precision')
    """
    check_columns("curves", curves, ("method", "recall", "precision", "auprc"))
    if kinds is None and "kind" in curves:
        kinds = dict(zip(curves["method"], curves["kind"], strict=True))
    # Of points with one recall, those that come later have more false edges.
    ordered = curves.sort_values(["auprc", "recall", "precision"], ascending=[False, True, False])
    if chance is None and (ordered["recall"] >= 1 - 1e-9).any():
        chance = float(ordered[ordered["recall"] >= 1 - 1e-9].groupby("method")["precision"].min().median())
    ax = new_axes(ax, 6.0, 3.8)
    styles = {True: itertools.cycle(itertools.product(("0.25", "0.55"), ("-", "--", ":")))}
    styles[False] = itertools.cycle(itertools.product(COLORS, "-"))
    for name, line in ordered.groupby("method", sort=False):
        gray = (kinds or {}).get(str(name), "model") != "model"
        color, style = next(styles[gray])
        label, width = f"{name} ({line['auprc'].iloc[0]:.3f})", 1.2 if gray else 2
        ax.plot(line["recall"], line["precision"], color=color, linestyle=style, linewidth=width, label=label)
    if chance is not None:
        ax.axhline(chance, color="0.4", linestyle=(0, (1, 3)), linewidth=1, label=f"chance ({chance:.3f})")
    # The first few edges make a precision of 0 or 1 whatever the method: they do not set the scale.
    beyond = curves.loc[curves["recall"] >= 0.01, "precision"]
    top = min(1.02, 1.15 * max(float(beyond.max()), 1e-3)) if len(beyond) else 1.02
    ax.set(xlabel="recall", ylabel="precision", title=title, xlim=(0, 1), ylim=(0, top))
    ax.spines[["top", "right"]].set_visible(False)
    legend_beside(ax, title="area under the curve", title_fontsize="small", alignment="left")
    literal(ax)
    return ax


def attention_heatmap(
    adata: AnnData,
    genes: Sequence[str] | None = None,
    *,
    key: str = "scforge_attention",
    n_genes: int = 30,
    ax: Axes | None = None,
) -> Axes:
    """Plot the attention between genes as a clustered heatmap.

    Parameters
    ----------
    adata
        Annotated data with ``varp[key]`` from ``model.get_attention``, in which row i and column j contain the
        attention of gene i to gene j.
    genes
        Genes to plot, from ``adata.var_names``. If None, uses the `n_genes` genes with the highest attention.
    key
        Key in ``adata.varp``.
    n_genes
        Maximum number of genes if `genes` is None.
    ax
        Axes to draw on. If None, creates new axes.

    Returns
    -------
    The axes. Pairs that are not in the graph are white, because no attention was kept for them.

    Raises
    ------
    DataError
        If the key or a gene is missing, or there is no attention between the genes.

    Examples
    --------
    >>> import anndata, numpy as np, scforge
    >>> adata = anndata.AnnData(np.ones((2, 3), dtype="float32"))
    >>> adata.var_names = ["CD3D", "CD3E", "LYZ"]
    >>> adata.varp["scforge_attention"] = np.array([[0, 0.4, 0.1], [0.3, 0, 0.1], [0.1, 0.2, 0]])
    >>> ax = scforge.pl.attention_heatmap(adata)
    >>> sorted(label.get_text() for label in ax.get_yticklabels())
    ['CD3D', 'CD3E', 'LYZ']
    """
    import matplotlib as mpl
    from matplotlib.colors import ListedColormap
    from scipy.cluster.hierarchy import leaves_list, linkage

    check_known("key", key, adata.varp, "adata.varp", fix="call model.get_attention(adata) first")
    graph = sparse.csr_matrix(adata.varp[key])
    if genes is None:
        total = np.asarray(graph.sum(axis=0)).ravel() + np.asarray(graph.sum(axis=1)).ravel()
        chosen = np.argsort(-total, kind="stable")[:n_genes]
        rows = np.sort(chosen[total[chosen] > 0])
    else:
        for gene in genes:
            check_known("genes", gene, adata.var_names, "adata.var_names")
        rows = adata.var_names.get_indexer(list(dict.fromkeys(genes)))
    values = graph[rows][:, rows].toarray().astype(float)
    if not (values > 0).any():
        raise DataError("the graph contains no attention between these genes; choose other genes, or omit genes.")
    order = np.arange(len(values))
    if len(values) > 2:
        both = np.hstack([values, values.T])
        tree = linkage(both / max(both.max(), 1e-12), method="average", optimal_ordering=True)
        order = leaves_list(tree)
    values, names = values[np.ix_(order, order)], [str(adata.var_names[rows[row]]) for row in order]
    n_shown = len(names)
    ax = new_axes(ax, 2.6 + 0.19 * n_shown, max(3.0, 2.0 + 0.19 * n_shown), layout="compressed")
    positive = values[values > 0]
    # A few strong pairs would leave all others in one shade.
    most = float(np.quantile(positive, 0.98)) if len(positive) > 50 else float(positive.max())
    shown = np.ma.masked_less_equal(values, 0)
    # Without its lightest part, so that the least value differs from white.
    colors = ListedColormap(mpl.colormaps["Blues"](np.linspace(0.15, 1, 256)))
    image = ax.imshow(shown, cmap=colors, vmin=0, vmax=most, aspect="equal")
    extend = "max" if most < positive.max() else "neither"
    ax.figure.colorbar(
        image, ax=ax, fraction=0.045, pad=0.03, extend=extend, label="mean attention\n(white: none kept)"
    )
    size = 8 if n_shown <= 40 else 6
    ax.set_xticks(range(n_shown), names, rotation=90, fontsize=size)
    ax.set_yticks(range(n_shown), names, fontsize=size)
    ax.set(xlabel="to gene", ylabel="from gene")
    ax.tick_params(length=0)
    literal(ax)
    return ax
