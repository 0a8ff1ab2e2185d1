"""What a model that integrates batches has to beat, and how well an embedding does it.

Shapes: N cells, D dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scforge.errors import DataError
from scforge.eval.baselines import pca_embedding, variable_genes
from scforge.eval.batch_integration import BatchIntegration
from scforge.eval.reference_embeddings import harmony_embedding, scvi_embedding

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["integration_baselines", "integration_scores"]

BIO = (
    "isolated_labels",
    "nmi_ari_cluster_labels_kmeans_nmi",
    "nmi_ari_cluster_labels_kmeans_ari",
    "silhouette_label",
    "clisi_knn",
)
BATCH = ("bras", "ilisi_knn", "graph_connectivity")
_BIO_WEIGHT = 0.6
_N_COMPS = 50


def integration_scores(
    embedding: np.ndarray, obs: pd.DataFrame, *, labels_key: str, batch_key: str
) -> dict[str, float]:
    """Return ``bio``, ``batch`` and ``total``, and the figures that they are means of.

    ``bio`` is the mean of scIB's figures of biology, ``batch`` that of its figures of mixing (BRAS, iLISI, graph
    connectivity), ``total`` 0.6 bio + 0.4 batch [1]_. Figures are not scaled to the range of the methods compared, so
    that they do not depend on which these are.

    Parameters
    ----------
    embedding
        Shape (N, D).
    obs
        Table of the cells, N rows.
    labels_key, batch_key
        Its columns with cell types and batches.

    Returns
    -------
    Name of a figure to the figure, in [0, 1], higher is better.

    Raises
    ------
    DataError
        If cell types or batches cannot be compared.

    References
    ----------
    .. [1] Luecken et al. (2022), Nature Methods 19, 41-50.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> obs = pd.DataFrame({"label": np.repeat(["a", "b"], 50), "batch": np.tile(["x", "y"], 50)})
    >>> embedding = np.random.default_rng(0).normal(size=(100, 2)) + (obs["label"] == "a").to_numpy()[:, None] * 10
    >>> scores = integration_scores(embedding, obs, labels_key="label", batch_key="batch")
    >>> list(scores)[:3], scores["total"] > 0.7
    (['bio', 'batch', 'total'], True)
    """
    figures = BatchIntegration(labels_key, batch_key).run(embedding, obs)
    bio = float(np.mean([figures[name] for name in BIO]))
    batch = float(np.mean([figures[name] for name in BATCH]))
    total = _BIO_WEIGHT * bio + (1 - _BIO_WEIGHT) * batch
    return {"bio": bio, "batch": batch, "total": total, **{name: figures[name] for name in (*BIO, *BATCH)}}


def integration_baselines(
    adata: AnnData, batch_key: str, *, max_epochs: int | None = None, seed: int = 0
) -> dict[str, np.ndarray]:
    """Embed cells by PCA, Harmony and scVI, on 2,000 highly variable genes of the batches.

    They are those of :func:`scforge.eval.embedding_baselines`.

    Parameters
    ----------
    adata
        Cells with raw counts.
    batch_key
        Column of obs with the batches.
    max_epochs
        Most epochs of scVI; None for its default.
    seed
        Seed of PCA, Harmony and scVI.

    Returns
    -------
    ``"pca"``, ``"harmony"`` and ``"scvi"``, float32, shape (N, D).

    Raises
    ------
    DataError
        If there are too few cells.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:100].copy()
    >>> adata.obs["batch"] = np.repeat(["x", "y"], 50)
    >>> made = integration_baselines(adata, "batch", max_epochs=1)
    >>> sorted(made), made["pca"].shape
    (['harmony', 'pca', 'scvi'], (100, 50))
    """
    n_comps = min(_N_COMPS, min(variable_genes(adata, batch_key=batch_key).shape) - 1)
    if n_comps < 2:
        raise DataError(f"{adata.n_obs} cells of {adata.n_vars} genes are too few for baselines; pass baselines=False.")
    found = {"pca": pca_embedding(adata, n_comps=n_comps, batch_key=batch_key, seed=seed)}
    found["harmony"] = harmony_embedding(found["pca"], adata.obs, batch_key, seed=seed)
    found["scvi"] = scvi_embedding(adata, batch_key, max_epochs=max_epochs, seed=seed)
    return found
