"""Baselines: PCA, Harmony and scVI embeddings, and simple predictors of labels and values."""

from __future__ import annotations

import io
import logging
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_bool, check_count, check_known, check_seed
from scforge._columns import check_column, texts_of
from scforge._constants import TARGET_SUM
from scforge._progress import announce, duration
from scforge.data.cells import choose_rows
from scforge.data.checks import counts_of
from scforge.data.expression import log_expression
from scforge.data.neighbors import harmony_correct
from scforge.errors import DataError, OptionError, spelled, warn
from scforge.eval.expression import ExpressionSpace

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.data.cells import Cells


_MIN_CELLS = 3
"""Minimum number of cells that express a gene."""

BASELINES = ("hvg", "pca", "pca_scaled", "harmony", "scvi", "random")

_SHARE, _BATCH_SIZE, _MAX_EPOCHS = 0.9, 128, 400
"""Training fraction, batch size and maximum number of epochs for scVI (its defaults)."""

_PATIENCE = 15
"""Number of epochs without a better held-out ELBO after which scVI stops; the default of scvi-tools is 45."""

_SECONDS_BETWEEN = 15
"""Seconds between two scVI progress messages."""

_WARM_UP = 50
"""Number of KL warm-up epochs of scVI. The default of 400 is longer than the training."""

_MAX_FITTED = 50_000
"""Maximum number of training cells for the baselines."""

_N_NEIGHBORS = 15

_RIDGE = np.logspace(-2, 4, 13)
"""Candidate penalties for ridge regression, selected by leave-one-out cross-validation on the training cells."""


def pca_embedding(
    adata: AnnData,
    *,
    n_comps: int = 50,
    n_top_genes: int = 2_000,
    layer: str | None = None,
    batch_key: str | None = None,
    scale: bool = False,
    seed: int = 0,
) -> np.ndarray:
    """Compute principal components of the log-normalized highly variable genes, as in scanpy.

    The steps are library-size normalization to 10,000, log1p, selection of highly variable genes (``flavor="seurat"``),
    optional scaling (clipped at 10), and PCA.

    Parameters
    ----------
    adata
        Annotated data with raw counts; not changed.
    n_comps
        Number of components.
    n_top_genes
        Number of genes.
    layer
        Key in ``adata.layers`` with raw counts. If None, reads ``adata.X``.
    batch_key
        Column of ``adata.obs`` with the batches, within which genes are selected (:func:`variable_genes`). The
        components are not corrected for batches.
    scale
        Whether to scale each gene to unit variance before PCA.
    seed
        Seed for the solver.

    Returns
    -------
    The components, float32, shape (n_obs, n_comps).

    Raises
    ------
    DataError
        If there are no raw counts, or `batch_key` is not a column.
    OptionError
        If there are too few cells or genes for this many components. Genes expressed in fewer than three cells do not
        count.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:200].copy()
    >>> scforge.eval.pca_embedding(adata, n_comps=10).shape
    (200, 10)
    """
    import scanpy as sc

    check_n_comps(n_comps, adata)
    work = variable_genes(adata, n_top_genes=n_top_genes, layer=layer, batch_key=batch_key)
    if n_comps >= work.n_vars:
        raise OptionError(f"is too large for {work.n_vars} variable genes; lower n_comps.", n_comps=n_comps)
    if scale:
        work.X = work.X.toarray()  # scaled values are not sparse, and scanpy would warn of it
        sc.pp.scale(work, max_value=10)
    sc.pp.pca(work, n_comps=n_comps, random_state=seed)
    return np.asarray(work.obsm["X_pca"], dtype=np.float32)


def check_n_comps(n_comps: int, adata: AnnData) -> None:
    """Raise :class:`~scforge.errors.OptionError` if there are too few cells or genes for this many components."""
    if not 0 < n_comps < min(adata.n_obs, adata.n_vars):
        raise OptionError(f"must be positive and below both dimensions of adata, {adata.shape}.", n_comps=n_comps)


def variable_genes(
    adata: AnnData, *, n_top_genes: int = 2_000, layer: str | None = None, batch_key: str | None = None
) -> AnnData:
    """Return the highly variable genes: log-normalized values as CSR float32, and the counts in ``layers["counts"]``.

    Genes expressed in fewer than three cells are left out. The steps are library-size normalization to 10,000, log1p,
    and selection of highly variable genes (``flavor="seurat"``). With several batches, genes are ranked in each batch
    and selected by the number of batches in which they are variable. This avoids genes that differ only between
    batches. Cells without a batch form a separate batch.
    """
    import anndata
    import scanpy as sc

    if batch_key is not None:
        check_column("batch_key", batch_key, adata.obs)
    counts = counts_of(adata, layer).astype(np.float32)
    work = anndata.AnnData(counts, obs=adata.obs[[]].copy(), var=adata.var[[]].copy())
    sc.pp.filter_genes(work, min_cells=_MIN_CELLS)
    if not work.n_vars:
        raise DataError(f"no gene is expressed in at least {_MIN_CELLS} of the {adata.n_obs} cells; use more cells.")
    work.layers["counts"] = work.X.copy()
    sc.pp.normalize_total(work, target_sum=TARGET_SUM)
    sc.pp.log1p(work)
    chosen = np.ones(work.n_vars, dtype=bool)
    # All genes are all genes, however they are ranked.
    if n_top_genes < work.n_vars:
        if batch_key is not None:
            work.obs["batch"] = pd.Categorical(_batches(adata, batch_key))
        several = batch_key is not None and work.obs["batch"].nunique() > 1
        sc.pp.highly_variable_genes(work, n_top_genes=n_top_genes, batch_key="batch" if several else None)
        chosen = np.asarray(work.var["highly_variable"])
    work.obs = work.obs[[]].copy()
    work.var["highly_variable"] = chosen
    return work[:, chosen].copy()


def _batches(adata: AnnData, key: str) -> np.ndarray:
    """Return the batch of each cell as text, "nan" if it is missing, shape (N,)."""
    return np.asarray(texts_of(adata.obs[key], key=key, argument="batch_key"), dtype=object).astype(str)


def embedding_baselines(
    adata: AnnData,
    names: Sequence[str | int] = ("hvg", "pca", "harmony", "scvi"),
    *,
    batch_key: str | None = None,
    layer: str | None = None,
    n_comps: int = 50,
    n_top_genes: int = 2_000,
    seed: int = 0,
    scvi_max_epochs: int | None = None,
    progress_bar: bool = False,
) -> dict[str, np.ndarray]:
    """Embed cells with simple methods, all fitted on these cells and the same highly variable genes.

    Parameters
    ----------
    adata
        Annotated data with raw counts; not changed. Methods are fitted on all of its cells; labels are not used.
    names
        Some of:

        ``"hvg"``
            The log-normalized highly variable genes themselves, dense.
        ``"pca"``, ``"pca_scaled"``
            Principal components of these genes, without and with scaling to unit variance (:func:`pca_embedding`).
        ``"harmony"``
            The components of ``"pca"`` after Harmony; requires `batch_key`.
        ``"scvi"``
            The latent space of scVI (:func:`scvi_embedding`), corrected for `batch_key` if there is one.
        ``"random"``
            Standard normal random numbers: chance level.

        An integer stands for this number of principal components and adds two baselines: without and with scaling.
    batch_key
        Column of ``adata.obs`` with the batches. If given, genes are selected across batches for all methods, and
        Harmony and scVI correct for the batch.
    layer
        Key in ``adata.layers`` with raw counts. If None, reads ``adata.X``.
    n_comps
        Number of principal components, and of dimensions of ``"random"``; at most one less than the number of cells and
        of genes.
    n_top_genes
        Number of highly variable genes; all genes if there are fewer.
    seed
        Random seed for all methods.
    scvi_max_epochs
        Maximum number of scVI epochs. If None, uses the default of scVI: 400 epochs for up to 20,000 cells, and as many
        epochs as process 8 million cells in total for more.
    progress_bar
        Whether to print a line for each baseline, with its time.

    Returns
    -------
    A mapping from name to embedding, float32, shape (N, D), in the order of `names`. For a number D, the baselines are
    called ``"PCA, D components"`` and ``"PCA of scaled genes, D components"``.

    Raises
    ------
    OptionError
        If a name is unknown or named twice, Harmony is requested without `batch_key`, or there are too many components.
    DataError
        If there are no raw counts, or `batch_key` is not a column, or contains only one batch or missing values.

    References
    ----------
    Korsunsky et al. (2019), Nature Methods 16, 1289-1296 (Harmony); Lopez et al. (2018), Nature Methods 15, 1053-1058
    (scVI).

    Examples
    --------
    >>> import scforge
    >>> found = embedding_baselines(scforge.datasets.pbmc3k()[:200], ["pca", "random"], n_comps=10)
    >>> {name: embedding.shape for name, embedding in found.items()}
    {'pca': (200, 10), 'random': (200, 10)}
    """
    check_baselines(adata, names, batch_key=batch_key)
    check_count("n_comps", n_comps, "components")
    check_count("n_top_genes", n_top_genes, "genes")
    check_seed(seed)
    check_bool("progress_bar", progress_bar)
    genes: dict[str, Any] = {"n_top_genes": n_top_genes, "layer": layer, "batch_key": batch_key}
    chosen = variable_genes(adata, **genes)
    dims = min(n_comps, min(chosen.shape) - 1)

    @cache
    def components(n_comps: int, scale: bool = False) -> np.ndarray:
        return pca_embedding(adata, n_comps=n_comps, scale=scale, seed=seed, **genes)

    embeddings: dict[str, np.ndarray] = {}
    for name in names:
        start = time.perf_counter()
        if name == "hvg":
            embeddings[name] = chosen.X.toarray()
        elif name in ("pca", "pca_scaled"):
            embeddings[str(name)] = components(dims, name == "pca_scaled")
        elif name == "harmony":
            assert batch_key is not None
            embeddings[name] = harmony_correct(components(dims), _batches(adata, batch_key), seed=seed)
        elif name == "scvi":
            if progress_bar:
                announce(
                    f"baseline 'scvi': training scVI on {adata.n_obs:,} cells, which is the slowest baseline; use "
                    f"{spelled("baselines=['pca']", '--against pca')} to skip it ..."
                )
            embeddings[name] = scvi_embedding(
                *(adata, batch_key),
                layer=layer,
                n_top_genes=n_top_genes,
                max_epochs=scvi_max_epochs,
                seed=seed,
                progress_bar=progress_bar,
            )
        elif name == "random":
            embeddings[name] = np.random.default_rng(seed).standard_normal((adata.n_obs, dims), dtype=np.float32)
        else:
            embeddings[f"PCA, {name} components"] = components(int(name))
            embeddings[f"PCA of scaled genes, {name} components"] = components(int(name), True)
        if progress_bar:
            announce(f"baseline {name!r}: {duration(time.perf_counter() - start)}")
    return embeddings


def check_baselines(adata: AnnData, names: Sequence[str | int], *, batch_key: str | None = None) -> None:
    """Raise the errors of :func:`embedding_baselines` for these names, before any computation starts.

    Raises
    ------
    OptionError, DataError
        As in :func:`embedding_baselines`, except that counts are not checked.
    """
    if isinstance(names, str | int):
        raise OptionError(f"is not a list of baselines; pass baselines=[{names!r}].", baselines=names)
    if min(adata.shape) < 3:
        raise DataError(f"{adata.n_obs} cells with {adata.n_vars} genes are too few for baselines; use more.")
    for name in names:
        if isinstance(name, str):
            fix = "or pass a number of principal components"
            check_known("baselines", name, BASELINES, "the baselines", fix=fix, error=OptionError)
        else:
            check_count("baselines", name, "principal components")
            check_n_comps(name, adata)
        if name == "harmony" and batch_key is None:
            raise OptionError(
                "contains 'harmony', which needs batch_key; pass batch_key, or omit 'harmony'.", argument="baselines"
            )
        if batch_key is not None and name != "random":
            check_column("batch_key", batch_key, adata.obs)
        if name in ("harmony", "scvi") and batch_key is not None:
            batches = texts_of(adata.obs[batch_key], key=batch_key, argument="batch_key")
            if batches.isna().any():
                raise DataError(
                    f"[{batch_key!r}] has missing values; assign a batch to each cell to use {name!r}.", argument="obs"
                )
            if name == "harmony" and len(batches.categories) < 2:
                raise DataError(
                    f"[{batch_key!r}] contains only one batch, so 'harmony' has nothing to correct; omit 'harmony'.",
                    argument="obs",
                )


def scvi_embedding(
    adata: AnnData,
    batch_key: str | None = None,
    *,
    layer: str | None = None,
    n_top_genes: int = 2_000,
    max_epochs: int | None = None,
    seed: int = 0,
    progress_bar: bool = False,
) -> np.ndarray:
    """Train scVI on these cells and return its latent means, float32, shape (N, 10).

    All settings are scvi-tools defaults, except for the stopping rule. A tenth of the cells is held out, and training
    stops after 15 epochs without a better ELBO on these cells. The weight of the KL term rises over the first 50 epochs
    (at most a quarter of all epochs) instead of 400, and training does not stop during this warm-up. The weights of the
    epoch with the best ELBO after the warm-up are kept; scvi-tools keeps the weights of the last epoch.
    """
    import scvi
    import torch

    work = variable_genes(adata, n_top_genes=n_top_genes, layer=layer, batch_key=batch_key)
    work.X = work.layers.pop("counts")
    work.obs["batch"] = pd.Categorical(["all"] * adata.n_obs if batch_key is None else _batches(adata, batch_key))
    # scvi-tools samples the held-out cells with its global seed, which is unset by default.
    order = np.random.default_rng(seed).permutation(adata.n_obs)
    n_train = math.ceil(_SHARE * adata.n_obs)
    # The batch norm of scVI takes no batch of one cell.
    splitting = {"external_indexing": [order[:n_train], order[n_train:]], "drop_last": n_train % _BATCH_SIZE == 1}
    if max_epochs is None:
        max_epochs = max(1, min(_MAX_EPOCHS, round(_MAX_EPOCHS * 20_000 / adata.n_obs)))
    warm_up = min(_WARM_UP, max_epochs // 4)
    best = _best_epoch(warm_up, progress_bar=progress_bar)
    with quiet("scvi", "lightning.pytorch", "lightning.fabric"), warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # what scvi-tools and Lightning advise is not up to the user
        torch.manual_seed(seed)
        scvi.model.SCVI.setup_anndata(work, batch_key="batch")
        model: Any = scvi.model.SCVI(work)
        model.train(
            max_epochs,
            batch_size=_BATCH_SIZE,
            datasplitter_kwargs=splitting,
            plan_kwargs={"n_epochs_kl_warmup": warm_up},
            early_stopping=True,
            early_stopping_patience=_PATIENCE,
            early_stopping_warmup_epochs=warm_up,
            callbacks=[best],
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        if best.weights:
            model.module.load_state_dict(best.weights)
        latent = model.get_latent_representation()
    return np.asarray(latent, dtype=np.float32)


def _best_epoch(warm_up: int, *, progress_bar: bool) -> Any:
    """Return a Lightning callback that keeps the ``weights`` with the best held-out ELBO after the warm-up.

    With `progress_bar`, it reports progress; scvi-tools messages are hidden.

    The corresponding scvi-tools callback would write each better model to disk.
    """
    from lightning.pytorch.callbacks import Callback

    screen = sys.stdout

    class BestEpoch(Callback):
        lowest = math.inf

        def __init__(self) -> None:
            self.weights: dict[str, Any] = {}
            self.start = self.shown = time.perf_counter()

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            now = time.perf_counter()
            if progress_bar and now - self.shown > _SECONDS_BETWEEN:
                self.shown, n_epochs = now, trainer.current_epoch + 1
                with redirect_stdout(screen):
                    announce(
                        f"baseline 'scvi': epoch {n_epochs} of at most {trainer.max_epochs}, "
                        f"{duration((now - self.start) / n_epochs)} per epoch"
                    )
            elbo = float(trainer.callback_metrics["elbo_validation"])
            if trainer.current_epoch >= warm_up and elbo < self.lowest:
                self.lowest = elbo
                self.weights = {name: value.clone() for name, value in pl_module.module.state_dict().items()}

    return BestEpoch()


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence these loggers below the error level, and printed output, because scvi-tools prints why it stopped."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@dataclass(frozen=True)
class BaselineInputs:
    """Baseline input from training cells and scored cells.

    Attributes
    ----------
    rows
        Rows of the training cells that baselines are fitted on, int64, shape (M,).
    components
        Principal components of the variable genes: for the training cells, shape (M, D), and for the scored cells,
        shape (N, D).
    genes
        The scaled variable genes, CSR, shapes (M, H) and (N, H).
    embeddings
        A mapping from baseline name to additional representations of the training cells, shape (M, D), and the scored
        cells, shape (N, D).
    """

    rows: np.ndarray
    components: tuple[np.ndarray, np.ndarray]
    genes: tuple[sparse.csr_matrix, sparse.csr_matrix]
    embeddings: dict[str, tuple[np.ndarray, np.ndarray]]

    @classmethod
    def of(
        cls,
        train_cells: Cells,
        train_rows: np.ndarray,
        cells: Cells,
        rows: np.ndarray,
        *,
        seed: int = 0,
    ) -> BaselineInputs:
        """Fit genes and components on the training cells, and transform all cells.

        If there are more than 50,000 training cells, 50,000 are sampled at random, with a warning.
        """
        chosen = choose_rows(len(train_cells), _MAX_FITTED, rows=train_rows, seed=seed)
        if len(chosen) < len(train_rows):
            warn(f"baselines are fitted on {len(chosen):,} of the {len(train_rows):,} training cells.")
        expression = log_expression(train_cells, chosen), log_expression(cells, rows)
        space = ExpressionSpace(expression[0], seed=seed)
        return cls(
            rows=chosen,
            components=(space.components(expression[0]), space.components(expression[1])),
            genes=(space.scaled(expression[0]), space.scaled(expression[1])),
            embeddings={},
        )


def classification_baselines(inputs: BaselineInputs, classes: np.ndarray, n_classes: int) -> dict[str, np.ndarray]:
    """Return a mapping from baseline name to class probabilities for the scored cells, float64, shape (N, C).

    ``logistic_regression_pca`` and ``knn_pca`` (15 neighbors) use 50 principal components;
    ``logistic_regression_genes`` is the CellTypist model on the variable genes (Dominguez Conde et al. 2022: one
    logistic regression for each class, L2, C = 1, on scaled log1p CP10K). ``majority_class`` predicts the class
    frequencies. Each additional embedding gets a logistic regression on its standardized dimensions.
    """
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.neighbors import KNeighborsClassifier

    def probabilities(model: Any, features: tuple[Any, Any]) -> np.ndarray:
        full = np.zeros((features[1].shape[0], n_classes))
        present = np.unique(classes)
        if len(present) == 1:
            full[:, present] = 1.0
        elif features[1].shape[0]:
            full[:, present] = model.fit(features[0], classes).predict_proba(features[1])
        return full

    shares = np.bincount(classes, minlength=n_classes) / max(1, len(classes))
    neighbors = KNeighborsClassifier(min(_N_NEIGHBORS, len(classes)))
    return {
        "logistic_regression_pca": probabilities(_logistic(), inputs.components),
        "knn_pca": probabilities(neighbors, inputs.components),
        "logistic_regression_genes": probabilities(OneVsRestClassifier(_logistic(scale=False)), inputs.genes),
        **{name: probabilities(_logistic(), both) for name, both in inputs.embeddings.items()},
        "majority_class": np.tile(shares, (inputs.components[1].shape[0], 1)),
    }


def regression_baselines(inputs: BaselineInputs, target: np.ndarray) -> dict[str, np.ndarray]:
    """Return a mapping from baseline name to predictions for the scored cells, float64, shape (N,).

    ``ridge_pca`` and ``knn_pca`` use 50 principal components; ``mean`` is the mean of the training cells. Each
    additional embedding gets a ridge regression on its standardized dimensions. Penalties are chosen on the training
    cells.
    """
    from sklearn.neighbors import KNeighborsRegressor

    def predicted(model: Any, features: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        if not len(features[1]):
            return np.zeros(0)
        return np.asarray(model.fit(features[0], target).predict(features[1]), dtype=np.float64)

    return {
        "ridge_pca": predicted(_ridge(), inputs.components),
        "knn_pca": predicted(KNeighborsRegressor(min(_N_NEIGHBORS, len(target))), inputs.components),
        **{name: predicted(_ridge(), both) for name, both in inputs.embeddings.items()},
        "mean": np.full(inputs.components[1].shape[0], float(np.mean(target))),
    }


def multi_label_baselines(inputs: BaselineInputs, targets: np.ndarray) -> dict[str, np.ndarray]:
    """Return a mapping from baseline name to label probabilities for the scored cells, float64, shape (N, C).

    A separate logistic regression is fitted for each label, on 50 principal components (``logistic_regression_pca``)
    and on each additional embedding. ``label_frequency`` predicts the fraction of training cells with the label.
    """

    def probabilities(features: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        columns = []
        for has in targets.T:
            if has.all() or not has.any() or not len(features[1]):
                columns.append(np.full(len(features[1]), float(has.all())))
            else:
                columns.append(_logistic().fit(features[0], has).predict_proba(features[1])[:, 1])
        return np.stack(columns, axis=1)

    return {
        "logistic_regression_pca": probabilities(inputs.components),
        **{name: probabilities(both) for name, both in inputs.embeddings.items()},
        "label_frequency": np.tile(targets.mean(axis=0), (len(inputs.components[1]), 1)),
    }


def _logistic(*, scale: bool = True) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = LogisticRegression(max_iter=2_000)
    return make_pipeline(StandardScaler(), model) if scale else model


def _ridge() -> Any:
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), RidgeCV(_RIDGE))
