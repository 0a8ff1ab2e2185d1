"""Cell type annotation: training, calibration, prediction and scoring of a classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from anndata import AnnData
from torch import nn

from scforge._checks import check_bool, check_share
from scforge._columns import HETEROGENEOUS, UNASSIGNED, codes_among, labels_of
from scforge.data.cells import Cells, cell_names, column_of
from scforge.data.checks import names_each_cell
from scforge.errors import DataError, OptionError, listing, warn
from scforge.eval.baselines import BaselineInputs, classification_baselines
from scforge.finetuning.base import Batch, Column, Loss, Predictor, register_task
from scforge.finetuning.heads import (
    CalibratedHead,
    balanced_weights,
    fit_logistic,
    fit_temperature,
    normalized_entropy,
    probabilities_of,
)
from scforge.finetuning.labels import (
    UNKNOWN,
    UNLABELED,
    check_names,
    check_weights,
    write_probabilities,
)
from scforge.finetuning.metrics import calibration_error, class_table, confusion_figures, confusion_of
from scforge.finetuning.splits import Split, warn_of_unlearned
from scforge.finetuning.supervised import SupervisedTask

_RESOLUTIONS = ((5_000, 5.0), (20_000, 10.0), (40_000, 15.0), (100_000, 20.0), (200_000, 25.0))
_N_NEIGHBORS = 15


def resolution_for(n_cells: int) -> float:
    """Return the clustering resolution that CellTypist (1.7) uses for this number of cells.

    Examples
    --------
    >>> [resolution_for(n) for n in (4_999, 5_000, 1_000_000)]
    [5.0, 10.0, 30.0]
    """
    return next((resolution for limit, resolution in _RESOLUTIONS if n_cells < limit), 30.0)


def over_cluster(embedding: np.ndarray) -> np.ndarray:
    """Return many small Leiden clusters of cells, as text, shape (N,)."""
    import scanpy as sc

    n_cells = len(embedding)
    if n_cells < 3:  # no graph
        return np.array([str(i) for i in range(n_cells)])
    cells = AnnData(obs=pd.DataFrame(index=[str(i) for i in range(n_cells)]), obsm={"X": embedding})
    sc.pp.neighbors(cells, n_neighbors=min(_N_NEIGHBORS, n_cells - 1), use_rep="X", random_state=0)
    sc.tl.leiden(
        cells, resolution=resolution_for(n_cells), flavor="igraph", n_iterations=2, directed=False, random_state=0
    )
    return np.asarray(cells.obs["leiden"], dtype=object).astype(str)


def majority_vote(labels: np.ndarray, clusters: pd.Series | np.ndarray, *, min_share: float = 0.0) -> np.ndarray:
    """Return for each cell the most frequent label in its cluster, as text, shape (N,).

    The rule is the same as in CellTypist's ``majority_vote``: ties are resolved by name, and clusters in which the most
    frequent label has a fraction below `min_share` are labeled "Heterogeneous".

    Parameters
    ----------
    labels
        Label of each cell, shape (N,).
    clusters
        Cluster of each cell, shape (N,).
    min_share
        Minimum fraction in [0, 1]; with 0, every cluster receives a label.

    Raises
    ------
    DataError
        If a cell has no cluster.

    Examples
    --------
    >>> majority_vote(np.array(["B", "B", "T", "T"]), np.array([0, 0, 0, 1])).tolist()
    ['B', 'B', 'B', 'T']
    """
    codes, names = pd.factorize(clusters)
    if (codes < 0).any():
        raise DataError(
            f": {int((codes < 0).sum())} of {len(codes)} cells have no cluster; assign a cluster to each cell.",
            argument="majority_voting",
        )
    label_codes, label_names = pd.factorize(np.asarray(labels, dtype=object), sort=True)
    votes = np.zeros((len(names), len(label_names)), dtype=np.int64)
    np.add.at(votes, (codes, label_codes), 1)
    winners = np.asarray(label_names, dtype=object)[votes.argmax(axis=1)]
    shares = votes.max(axis=1) / votes.sum(axis=1)
    winners[shares < min_share] = HETEROGENEOUS
    return winners[codes].astype(str)


@register_task("annotation")
class Annotation(SupervisedTask):
    """Cross entropy of the class of each cell.

    Labels are compared and written as text. Cells without a label (NaN, or a word such as "unknown" that `classes` does
    not list) are not used for training.

    Parameters
    ----------
    labels_key
        Column of ``obs`` with the labels: text, categories, integers or booleans.
    classes
        Classes of the training cells, in the order of the outputs. If None, the classes are sorted.
    class_weights
        Weight of each class in the loss. If None, all cells have the same weight, as in scGPT, Geneformer and
        CellTypist. ``"balanced"`` gives each class the same total weight (n_cells / (n_classes * cells of the class)),
        which detects more cells of rare classes but overestimates their probabilities. Also accepts a dict from class
        to weight; classes that are not listed have the weight 1.
    label_smoothing
        Fraction of the target that is distributed over all classes, in [0, 1).
    head
        Head options, a dict with ``hidden_dim`` (0: linear) and ``dropout``.
    probe_first
        Whether to initialize the last layer of the head from a logistic regression on the embeddings of the training
        cells, so that the first steps do not distort the encoder (linear probing, then fine-tuning; Kumar et al. 2022,
        arXiv:2202.10054).
    """

    maps_new_cells = True
    monitor = "macro_f1"
    monitor_mode = "max"
    lower_is_better = frozenset({"calibration_error"})
    labels_key: str

    def __init__(
        self,
        *,
        labels_key: str,
        classes: Sequence[str] | None = None,
        class_weights: str | Mapping[str, float] | None = None,
        label_smoothing: float = 0.0,
        head: Mapping[str, Any] | None = None,
        probe_first: bool = True,
    ) -> None:
        super().__init__(head, probe_first)
        self.labels_key = labels_key
        self.classes = check_names("classes", classes)
        self.class_weights = check_weights("class_weights", class_weights, self.classes)
        if check_share("label_smoothing", label_smoothing) == 1:
            raise OptionError(
                "removes all information from the labels; pass a value below 1.", label_smoothing=label_smoothing
            )
        self.label_smoothing = float(label_smoothing)
        self._weights: torch.Tensor | None = None

    def _labels(self, column: Column, *, warns: bool = False) -> pd.Categorical:
        """Return the label of each cell as text; words such as "unknown" are no label, unless `classes` names them."""
        return labels_of(column(self.labels_key), key=self.labels_key, classes=self.classes, warns=warns)

    def usable(self, column: Column) -> np.ndarray:
        """Return which cells have a label, and warn about words that are treated as missing labels."""
        return np.asarray(self._labels(column, warns=True).notna())

    def strata(self, column: Column) -> pd.Series:
        """Return the labels, so that each part of the split preserves class proportions."""
        return pd.Series(self._labels(column))

    def options_from(self, column: Column) -> dict[str, Any]:
        """Return the classes of the training cells, unless they are already known.

        Raises
        ------
        DataError
            If there is only one label or one label per cell, labels are non-integer numbers, or `classes` does not
            match the cells.

        Warns
        -----
        ScforgeWarning
            If a class has only one cell.
        """
        labels = self._labels(column)
        names = [str(name) for name in labels.categories]
        if len(names) < 2:
            what = f"only one label ({names[0]!r})" if names else "no labels"
            problem = f"has {what} among the training cells; annotation needs two classes."
            raise DataError(problem, **self.targets_option)
        if names_each_cell(labels.dropna()):
            raise DataError(
                f"has a different value for each of the {len(names):,} training cells; choose another column.",
                **self.targets_option,
            )
        if single := [str(name) for name, size in labels.value_counts().items() if size == 1]:
            warn(f"{self.argument}: the labels {listing(single)} have only one cell each and cannot be scored.")
        if self.classes is None:
            return {"classes": names}
        if differing := sorted({*self.classes} ^ {*names}):
            raise DataError(
                f"does not match the labels in {self.argument} (difference: {listing(differing)}); correct classes.",
                argument="classes",
            )
        return {}

    def check_split(self, column: Column, split: Split) -> None:
        """Report classes that only held-out cells have."""
        labels = self._labels(column)
        if len(split.validation) and not np.isin(labels.codes[split.validation], labels.codes[split.train]).any():
            raise DataError(
                ": no validation cell has a label of the training cells, so the best epoch cannot be selected; change "
                "the split, or set validation_size=0.",
                **self.targets_option,
            )
        held_out = labels.codes[np.concatenate([split.validation, split.test])]
        lacking = np.setdiff1d(held_out[held_out >= 0], labels.codes[split.train])
        n_cells = int(np.isin(held_out, lacking).sum())
        warn_of_unlearned(self.argument, list(labels.categories[lacking]), n_cells)

    def read(self, column: Column) -> np.ndarray:
        """Return the class index of each cell, int64, shape (N,); -1 for no label, -2 for an unknown label."""
        return codes_among(self._labels(column), self.known_classes, unknown=UNKNOWN)

    def has_target(self, targets: np.ndarray) -> np.ndarray:
        """Return which cells have a label that is known to the model."""
        return targets >= 0

    def make_head(self, n_latent: int, module: nn.Module) -> CalibratedHead:
        """Create the head, with one output per class."""
        return CalibratedHead(n_latent, len(self.known_classes), **self.head)

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the class of each cell, and the weights of the classes."""
        super().bind(cells, train_rows)
        balanced = balanced_weights(self._targets[train_rows], len(self.known_classes))
        self._weights = self.weights_of(self.class_weights, balanced)

    def fit(self, features: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fit a logistic regression."""
        weights = None if self._weights is None else self._weights.numpy()
        return fit_logistic(features, targets, len(self.known_classes), weights)

    def targets(self, rows: np.ndarray) -> Batch:
        """Return the class index of each cell, or -1 if the class is unknown to the model."""
        return {"target": torch.from_numpy(np.maximum(self._targets[rows], UNLABELED))}

    def loss_of(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Return the weighted mean cross entropy over the labeled cells, and their confusion matrix."""
        logits, target = outputs.float(), batch["target"]
        weights = None if self._weights is None else self._weights.to(logits.device)
        labeled = target >= 0
        classes = target.clamp_min(0)
        summed = F.cross_entropy(
            logits, target, weights, ignore_index=UNLABELED, reduction="sum", label_smoothing=self.label_smoothing
        )
        total = (labeled if weights is None else labeled * weights[classes]).sum()
        n_classes = logits.shape[1]
        pairs = classes * n_classes + logits.detach().argmax(dim=1)
        # Unlike bincount and a choice of rows, this does not wait for a GPU.
        confusion = logits.new_zeros(n_classes**2).index_add_(0, pairs, labeled.to(logits.dtype))
        # Where no cell of a batch has a known label there is nothing to divide by.
        return summed / total.clamp_min(1e-12), {"confusion": confusion.view(n_classes, n_classes) / len(target)}

    def summarize(self, means: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the loss, accuracy, balanced accuracy and macro F1."""
        figures = confusion_figures(means["confusion"])
        return {"loss": float(means["loss"]), **{k: figures[k] for k in ("accuracy", "balanced_accuracy", "macro_f1")}}

    def calibrate(self, predictor: Predictor, rows: np.ndarray) -> None:
        """Fit the temperature on validation cells."""
        codes = self.read(predictor.cells.column)[rows]
        rows, codes = rows[codes >= 0], codes[codes >= 0]
        if len(rows):
            head: CalibratedHead = predictor.module.head
            head.temperature.fill_(fit_temperature(predictor.outputs(rows), codes))

    def estimate(self, predictor: Predictor, rows: np.ndarray | None = None) -> np.ndarray:
        """Return calibrated probabilities of each class, float64, shape (N, C)."""
        probabilities = probabilities_of(predictor.outputs(rows), float(predictor.module.head.temperature))
        return probabilities if predictor.new is None else predictor.new.combine(probabilities, rows)

    def predict(  # type: ignore[override]
        self,
        predictor: Predictor,
        adata: AnnData | None,
        *,
        key_added: str | None = None,
        soft: bool = False,
        threshold: float | None = None,
        majority_voting: bool | str = False,
        min_share: float = 0.0,
    ) -> pd.DataFrame:
        """Predict the class of each cell.

        Writes ``obs["scforge_<labels_key>"]`` (categories), ``obs["scforge_<labels_key>_confidence"]`` (float32,
        calibrated probability of the class) and ``obs["scforge_<labels_key>_entropy"]`` (float32, entropy of the
        probabilities divided by the logarithm of the number of classes: 0 is certain, 1 is uninformative). The latter
        two are also written as ``obs["scforge_confidence"]`` and ``obs["scforge_entropy"]``, which are overwritten by
        the next annotator.

        Parameters
        ----------
        predictor, adata
            The model applied to the cells, and the AnnData to write to, or None.
        key_added
            Name of the column to write instead of ``"scforge_<labels_key>"``. The other columns are then named
            ``"<key_added>_confidence"`` and ``"<key_added>_entropy"``.
        soft
            Whether to return the probabilities, and write them into ``obsm["scforge_<labels_key>_probabilities"]``
            (float32; the classes of the columns are in ``uns["scforge"]["scforge_<labels_key>_classes"]``).
        threshold
            Cells with lower confidence are labeled ``"unassigned"``. Confidence is calibrated on held-out cells: about
            a fifth of the predictions with a confidence of 0.8 are wrong.
        majority_voting
            If True, assigns the most frequent label in each small Leiden cluster of the embedding to all of its cells,
            as in CellTypist, and writes it into ``obs["scforge_<labels_key>_voted"]``. If the name of a column of obs,
            uses the clusters in this column.
        min_share
            Minimum fraction of the most frequent label; clusters below it are labeled ``"Heterogeneous"`` in the vote.

        Returns
        -------
        A table with the columns ``label``, ``confidence``, ``entropy`` and, with `majority_voting`, ``voted``; with
        `soft`, one column per class.
        """
        check_bool("soft", soft)
        check_share("min_share", min_share)
        clusters = None
        if not isinstance(majority_voting, bool | str):
            raise OptionError("must be True, False or a column of obs.", majority_voting=majority_voting)
        if isinstance(majority_voting, str):  # report a missing column early
            of_cells = predictor.cells.column
            clusters = of_cells(majority_voting) if adata is None else column_of(adata.obs, majority_voting)
        if threshold is not None and check_share("threshold", threshold) and predictor.module.head.temperature == 1.0:
            warn(
                f"threshold={threshold} requires a calibrated confidence, but this model was not calibrated; fine-tune "
                "it with validation_size above 0."
            )
        probabilities = self.estimate(predictor)
        categories = list(self.known_classes)
        labels = np.array(categories, dtype=object)[probabilities.argmax(axis=1)]
        confidence = probabilities.max(axis=1)
        if threshold is not None:
            labels[confidence < threshold] = UNASSIGNED
            categories += [UNASSIGNED] * (UNASSIGNED not in categories)
        index = cell_names(predictor.cells)
        predictions = pd.DataFrame(
            {
                "label": pd.Categorical(labels, categories=categories),
                "confidence": confidence.astype(np.float32),
                "entropy": normalized_entropy(probabilities).astype(np.float32),
            },
            index=index,
        )
        if majority_voting is not False:
            clusters = over_cluster(predictor.embedding()) if clusters is None else clusters
            voted = majority_vote(labels, clusters, min_share=min_share)
            more = [HETEROGENEOUS] * (min_share > 0 and HETEROGENEOUS not in categories)
            predictions["voted"] = pd.Categorical(voted, categories=[*categories, *more])
        table = pd.DataFrame(probabilities.astype(np.float32), index=index, columns=self.known_classes)
        if adata is not None:
            key = key_added or f"scforge_{self.labels_key}"
            for name in predictions:
                adata.obs[key if name == "label" else f"{key}_{name}"] = predictions[name]
            if key_added is None:
                for name in ("confidence", "entropy"):  # of the latest annotator, which may be one of several
                    adata.obs[f"scforge_{name}"] = predictions[name]
            if soft:
                write_probabilities(adata, key, table)
        return table if soft else predictions

    def baselines(self, inputs: BaselineInputs, targets: np.ndarray) -> dict[str, np.ndarray]:
        """Return the estimates of :func:`scforge.eval.baselines.classification_baselines`."""
        return classification_baselines(inputs, targets, len(self.known_classes))

    def count_unscored(self, targets: np.ndarray, column: Column) -> dict[str, int]:
        """Return the number of cells with a label that is unknown to the model, and the number without a label."""
        return {"n_unknown_label": int((targets == UNKNOWN).sum()), "n_unlabeled": int((targets == UNLABELED).sum())}

    def unknown_labels(self, column: Column) -> list[str]:
        """Return the labels in a column that are not classes."""
        return [str(name) for name in self._labels(column).categories if name not in self.known_classes]

    def scores(self, truth: np.ndarray, estimates: np.ndarray) -> dict[str, float]:
        """Return accuracy, balanced accuracy, macro and weighted F1, and the expected calibration error (15 bins)."""
        predicted = estimates.argmax(axis=1)
        return {
            **confusion_figures(confusion_of(truth, predicted, estimates.shape[1])),
            "calibration_error": calibration_error(estimates.max(axis=1), predicted == truth),
        }

    def tables(self, truth: np.ndarray, estimates: np.ndarray) -> dict[str, pd.DataFrame]:
        """Return precision, recall, F1 and support of each class, and the number of cells by label and prediction."""
        names = np.array(self.known_classes, dtype=object)
        confusion = confusion_of(truth, estimates.argmax(axis=1), len(names))
        # One row a pair, as names of classes may contain a slash, which an h5ad file takes in no name of a column.
        pairs = {"label": np.repeat(names, len(names)), "predicted": np.tile(names, len(names))}
        return {
            "per_class": pd.DataFrame(class_table(confusion), index=pd.Index(names, name=self.labels_key)),
            "confusion": pd.DataFrame({**pairs, "n_cells": confusion.ravel()}),
        }
