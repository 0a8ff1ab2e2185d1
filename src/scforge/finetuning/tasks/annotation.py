"""Annotate cell types: train a classifier, calibrate, predict and score it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from scforge._checks import check_bool, check_positive, check_share
from scforge.data.cells import column_of
from scforge.data.checks import names_each_cell
from scforge.errors import DataError, OptionError, TrainingError, listing, warn
from scforge.eval.baselines import classification_baselines
from scforge.finetuning.base import Evaluated, Task, register_task
from scforge.finetuning.baselines import baseline_inputs
from scforge.finetuning.heads import (
    CalibratedHead,
    check_head,
    fit_logistic,
    fit_temperature,
    normalized_entropy,
    probabilities_of,
    probe,
)
from scforge.finetuning.labels import (
    UNKNOWN,
    UNLABELED,
    check_classes,
    check_key,
    codes_of,
    text_labels,
    write_probabilities,
)
from scforge.finetuning.metrics import calibration_error, class_table, confusion_figures, confusion_of
from scforge.finetuning.splits import Split, warn_of_unlearned
from scforge.training.objectives.base import TrainingDefaults

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.data.cells import Cells, CellSource
    from scforge.finetuning.base import EvaluationContext, Predictor
    from scforge.finetuning.heads import FineTunedModule
    from scforge.tokenizers.base import Tokenizer


HETEROGENEOUS = "Heterogeneous"
"""What cells of a cluster are called of which no label has the share that was asked for."""

_RESOLUTIONS = ((5_000, 5.0), (20_000, 10.0), (40_000, 15.0), (100_000, 20.0), (200_000, 25.0))
_N_NEIGHBORS = 15


def resolution_for(n_cells: int) -> float:
    """Return the resolution that CellTypist (1.7) clusters so many cells with.

    Examples
    --------
    >>> [resolution_for(n) for n in (4_999, 5_000, 1_000_000)]
    [5.0, 10.0, 30.0]
    """
    return next((resolution for limit, resolution in _RESOLUTIONS if n_cells < limit), 30.0)


def over_cluster(embedding: np.ndarray, *, resolution: float | None = None, seed: int = 0) -> np.ndarray:
    """Return many small Leiden clusters of cells, as text, shape (N,).

    Parameters
    ----------
    embedding
        Shape (N, D).
    resolution
        Of Leiden; None takes that of :func:`resolution_for`.
    seed
        Seed of the neighbors and of Leiden.
    """
    import anndata
    import scanpy as sc

    n_cells = len(embedding)
    if n_cells < 3:  # no graph
        return np.array([str(i) for i in range(n_cells)])
    cells = anndata.AnnData(obs=pd.DataFrame(index=[str(i) for i in range(n_cells)]), obsm={"X": embedding})
    sc.pp.neighbors(cells, n_neighbors=min(_N_NEIGHBORS, n_cells - 1), use_rep="X", random_state=seed)
    sc.tl.leiden(
        cells,
        resolution=resolution_for(n_cells) if resolution is None else resolution,
        flavor="igraph",
        n_iterations=2,
        directed=False,
        random_state=seed,
    )
    return np.asarray(cells.obs["leiden"], dtype=object).astype(str)


def majority_vote(labels: np.ndarray, clusters: pd.Series | np.ndarray, *, min_share: float = 0.0) -> np.ndarray:
    """Return for each cell the label that most cells of its cluster have, as text, shape (N,).

    The rule of CellTypist's ``majority_vote``: of equally frequent labels the first by name, and "Heterogeneous" where
    the most frequent label has less than `min_share` of the cluster.

    Parameters
    ----------
    labels
        Label of each cell, shape (N,).
    clusters
        Cluster of each cell, shape (N,).
    min_share
        In [0, 1]; 0 gives every cluster a label.

    Raises
    ------
    DataError
        If a cell has no cluster.

    Examples
    --------
    >>> majority_vote(np.array(["B", "B", "T", "T"]), np.array([0, 0, 0, 1])).tolist()
    ['B', 'B', 'B', 'T']
    """
    check_share("min_share", min_share)
    codes, names = pd.factorize(clusters)
    if (codes < 0).any():
        raise DataError(
            f"majority_voting: {int((codes < 0).sum())} of {len(codes)} cells have no cluster; give them one."
        )
    label_codes, label_names = pd.factorize(np.asarray(labels, dtype=object), sort=True)
    votes = np.zeros((len(names), len(label_names)), dtype=np.int64)
    np.add.at(votes, (codes, label_codes), 1)
    winners = np.asarray(label_names, dtype=object)[votes.argmax(axis=1)]
    shares = votes.max(axis=1) / votes.sum(axis=1)
    winners[shares < min_share] = HETEROGENEOUS
    return winners[codes].astype(str)


UNASSIGNED = "unassigned"
"""What cells are called whose confidence is below the threshold."""


def class_probabilities(predictor: Predictor, rows: np.ndarray | None = None) -> np.ndarray:
    """Return calibrated probabilities of each class, float64, shape (N, C)."""
    temperature = float(predictor.module.head.temperature)
    return probabilities_of(predictor.outputs(rows), temperature)


def predict_classes(
    task: Annotation,
    predictor: Predictor,
    adata: AnnData | None,
    *,
    key_added: str | None,
    soft: bool,
    threshold: float | None,
    majority_voting: bool | str,
    min_share: float,
) -> pd.DataFrame:
    """See :meth:`scforge.finetuning.tasks.annotation.Annotation.predict`."""
    check_bool("soft", soft)
    if threshold is not None:
        check_share("threshold", threshold)
    if not isinstance(majority_voting, bool | str):
        raise OptionError(
            f"majority_voting={majority_voting!r} is neither True, False nor the name of a column of obs."
        )
    check_share("min_share", min_share)
    clusters = _clusters_given(predictor, adata, majority_voting)
    if threshold is not None and float(predictor.module.head.temperature) == 1.0:
        warn(
            f"threshold={threshold}: the confidence of this model is not calibrated: it had no validation cells "
            "or is a state of its training, and may be too high; use what finetune returned, with validation_size > 0."
        )
    probabilities = class_probabilities(predictor)
    names = np.array(task.known_classes, dtype=object)
    labels, confidence = names[probabilities.argmax(axis=1)], probabilities.max(axis=1)
    categories = list(task.known_classes)
    if threshold is not None:
        labels[confidence < threshold] = UNASSIGNED
        categories += [UNASSIGNED] * (UNASSIGNED not in categories)
    index = pd.RangeIndex(len(labels)) if adata is None else adata.obs_names
    found = pd.DataFrame(
        {
            "label": pd.Categorical(labels, categories=categories),
            "confidence": confidence.astype(np.float32),
            "entropy": normalized_entropy(probabilities).astype(np.float32),
        },
        index=index,
    )
    if majority_voting is not False:
        if clusters is None:
            clusters = over_cluster(predictor.embedding())
        voted = majority_vote(labels, clusters, min_share=min_share)
        more = [HETEROGENEOUS] * (min_share > 0 and HETEROGENEOUS not in categories)
        found["voted"] = pd.Categorical(voted, categories=[*categories, *more])
    table = pd.DataFrame(probabilities.astype(np.float32), index=index, columns=task.known_classes)
    if adata is not None:
        _write(adata, found, f"scforge_{task.labels_key}", key_added)
        if soft:
            write_probabilities(adata, key_added or f"scforge_{task.labels_key}", table)
    return table if soft else found


def _clusters_given(predictor: Predictor, adata: AnnData | None, majority_voting: bool | str) -> pd.Series | None:
    if isinstance(majority_voting, bool):
        return None
    if adata is not None:
        return column_of(adata.obs, majority_voting)
    return predictor.cells.column(majority_voting)


def _write(adata: AnnData, found: pd.DataFrame, usual: str, key_added: str | None) -> None:
    key = key_added or usual
    for name in found:
        adata.obs[key if name == "label" else f"{key}_{name}"] = found[name]
    if key_added is None:
        for name in ("confidence", "entropy"):  # of the latest annotator, which may be one of several
            adata.obs[f"scforge_{name}"] = found[name]


def evaluate_classes(task: Annotation, context: EvaluationContext) -> Evaluated:
    """See :meth:`scforge.finetuning.tasks.annotation.Annotation.evaluate`."""
    column = context.cells.column(task.labels_key).iloc[context.rows]
    codes = task.codes_of(column)
    rows, truth = context.rows[codes >= 0], codes[codes >= 0]
    if not len(rows):
        raise DataError(
            f"labels_key={task.labels_key!r} has no label that the model knows among the {len(codes)} scored cells "
            f"(it knows: {listing(task.known_classes)}); rename the labels of the data."
        )
    methods = {"scforge": class_probabilities(context.predictor, rows)}
    inputs = baseline_inputs(context, rows)
    if inputs is not None:
        assert context.train_cells is not None
        training = task.codes_of(context.train_cells.column(task.labels_key).iloc[inputs.rows])
        methods |= classification_baselines(inputs, training, len(task.known_classes))
    counts = {
        "n_scored": len(rows),
        "n_unknown_label": int((codes == UNKNOWN).sum()),
        "n_unlabeled": int((codes == UNLABELED).sum()),
    }
    table = {name: {**_figures(truth, found), **counts} for name, found in methods.items()}
    confusion = confusion_of(truth, methods["scforge"].argmax(axis=1), len(task.known_classes))
    names = pd.Index(task.known_classes, name=task.labels_key)
    return Evaluated(
        pd.DataFrame.from_dict(table, orient="index").rename_axis("method"),
        {
            "per_class": pd.DataFrame(class_table(confusion), index=names),
            "confusion": _pairs(confusion, task.known_classes),
        },
    )


def _pairs(confusion: np.ndarray, classes: list[str]) -> pd.DataFrame:
    """Return a confusion matrix as a table that an h5ad file takes: names of classes may hold a slash."""
    names = np.array(classes, dtype=object)
    n_classes = len(names)
    return pd.DataFrame(
        {"label": np.repeat(names, n_classes), "predicted": np.tile(names, n_classes), "n_cells": confusion.ravel()}
    )


def _figures(truth: np.ndarray, probabilities: np.ndarray) -> dict[str, float]:
    predicted = probabilities.argmax(axis=1)
    return {
        **confusion_figures(confusion_of(truth, predicted, probabilities.shape[1])),
        "calibration_error": calibration_error(probabilities.max(axis=1), predicted == truth),
    }


BALANCED = "balanced"
_MISSING_TEXTS = ("nan", "NaN", "None", "<NA>", "")


@register_task("annotation")
class Annotation(Task):
    """Cross entropy of the class of each cell.

    Labels are compared and written as text. Cells without label (NaN) take no part in training.

    Parameters
    ----------
    labels_key
        Column of obs with the labels: text, categories, whole numbers or truth values.
    classes
        The classes of the training cells, in the order of the outputs; None sorts them.
    class_weights
        Weight of each class in the loss. None: every cell counts the same, as scGPT, Geneformer and CellTypist train.
        ``"balanced"``: the cells of each class together count the same (n_cells / (n_classes * cells of the class)),
        which finds more cells of rare classes and makes their probabilities too high. Or a dict of weights by class;
        classes that it leaves out have the weight 1.
    label_smoothing
        Share of the target that is spread over all classes, in [0, 1).
    head
        Options of the head, a dict of ``hidden_dim`` (0: linear) and ``dropout``.
    probe_first
        Start the last layer of the head at the logistic regression on the embeddings of the training cells, so that the
        first steps do not distort the encoder (linear probing, then fine-tuning; Kumar et al. 2022, arXiv:2202.10054).
    """

    defaults = TrainingDefaults(batch_size=64, lr=3e-4, weight_decay=0.01, schedule="cosine_warmup", max_epochs=15)
    monitor = "macro_f1"
    monitor_mode = "max"

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
        self.labels_key = check_key("labels_key", labels_key)
        self.classes = check_classes(classes)
        if self.classes is not None and len(self.classes) < 2:
            raise OptionError(f"classes={self.classes!r} has fewer than two classes; give all of them.")
        self.class_weights = _checked_weights(class_weights, self.classes)
        if check_share("label_smoothing", label_smoothing) == 1:
            raise OptionError(f"label_smoothing={label_smoothing!r} leaves nothing of the labels; give less than 1.")
        self.label_smoothing = float(label_smoothing)
        self.head = check_head(head)
        self.probe_first = check_bool("probe_first", probe_first)
        self._codes: np.ndarray | None = None
        self._weights: torch.Tensor | None = None

    def usable(self, column: Callable[[str], pd.Series]) -> np.ndarray:
        """Return which cells have a label."""
        return np.asarray(column(self.labels_key).notna())

    def strata(self, column: Callable[[str], pd.Series]) -> pd.Series:
        """Return the labels, so that each class keeps its share."""
        import pandas as pd

        values = column(self.labels_key)
        return pd.Series(text_labels(values, key=self.labels_key), index=values.index)

    def options_from(self, column: Callable[[str], pd.Series]) -> dict[str, Any]:
        """Return the classes of the training cells, unless they are known already.

        Raises
        ------
        DataError
            If there is one label only or one for each cell, there are numbers that are not whole, or `classes` are not
            those of the cells.

        Warns
        -----
        ScforgeWarning
            If a class has one cell, or a label looks like a missing value.
        """
        labels = text_labels(column(self.labels_key), key=self.labels_key)
        sizes = labels.value_counts()
        if self.classes is None and len(sizes) < 2:
            raise DataError(
                f"labels_key={self.labels_key!r} has {_one_label(labels)} among the training cells; annotation needs "
                "cells of two classes or more."
            )
        if names_each_cell(labeled := column(self.labels_key).dropna()):
            raise DataError(
                f"labels_key={self.labels_key!r} has another value for each of the {len(labeled):,} training cells "
                f"(first: {str(labeled.iloc[0])!r}), which are no classes; choose another column."
            )
        self._warn_of(sizes)
        if self.classes is None:
            return {"classes": [str(name) for name in labels.categories]}
        if differing := sorted({*self.classes} ^ {*labels.categories}):
            raise DataError(
                f"classes={self.classes!r} are not the labels of the training cells in labels_key={self.labels_key!r} "
                f"(not in both: {listing(differing)}); name all of these, or leave classes out."
            )
        return {}

    def check_split(self, column: Callable[[str], pd.Series], split: Split) -> None:
        """Tell which classes only held-out cells have."""
        labels = text_labels(column(self.labels_key), key=self.labels_key)
        held_out = labels.codes[np.concatenate([split.validation, split.test])]
        lacking = np.setdiff1d(held_out[held_out >= 0], labels.codes[split.train])
        n_cells = int(np.isin(held_out, lacking).sum())
        warn_of_unlearned(f"labels_key={self.labels_key!r}", list(labels.categories[lacking]), n_cells)

    def _warn_of(self, sizes: pd.Series) -> None:
        single = [str(name) for name, size in sizes.items() if size == 1]
        if single:
            warn(
                f"labels_key={self.labels_key!r}: no more than one training cell has the label {listing(single)}, so "
                "that nothing measures how well the model finds it; label more cells, or leave these without label."
            )
        if odd := [str(name) for name in sizes.index if name in _MISSING_TEXTS]:
            warn(
                f"labels_key={self.labels_key!r} has the label {listing(odd)}, which is taken for a class; if it "
                "stands for a missing label, replace it by numpy.nan."
            )

    def codes_of(self, values: pd.Series) -> np.ndarray:
        """Return the number of the class of each cell, int64, shape (N,); -1: no label, -2: an unknown one."""
        return codes_of(values, self.known_classes, key=self.labels_key)

    @property
    def known_classes(self) -> list[str]:
        """The classes, or an error if they are not known yet."""
        if self.classes is None:
            raise TrainingError("classes are not known yet; give classes=[...], or fine-tune with cells.")
        return self.classes

    def make_head(self, n_latent: int, module: nn.Module) -> CalibratedHead:
        """Make the head, one output a class."""
        return CalibratedHead(n_latent, len(self.known_classes), **self.head)

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the class of each cell, and the weights of the classes."""
        self._codes = self.codes_of(cells.column(self.labels_key))
        training = self._codes[train_rows]
        if unusable := int((training < 0).sum()):
            raise DataError(
                f"{unusable} of {len(train_rows)} training cells have no label in labels_key={self.labels_key!r} that "
                "the model knows; leave them out of the training rows."
            )
        self._weights = self._weights_of(np.bincount(training, minlength=len(self.known_classes)))

    def _weights_of(self, sizes: np.ndarray) -> torch.Tensor | None:
        if self.class_weights is None:
            return None
        if self.class_weights == BALANCED:
            # A class that these cells lack weighs as one of one cell would; there is nothing to weigh.
            weights = sizes.sum() / (np.count_nonzero(sizes) * np.maximum(sizes, 1))
        else:
            assert isinstance(self.class_weights, dict)
            if unknown := set(self.class_weights) - set(self.known_classes):
                raise OptionError(
                    f"class_weights has {min(unknown)!r}, which is no class (classes: {listing(self.known_classes)})."
                )
            weights = np.array([self.class_weights.get(name, 1.0) for name in self.known_classes])
        return torch.from_numpy(weights).float()

    def initialize(self, module: nn.Module, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Standardize what the head sees, and start it at the logistic regression on the embeddings."""
        codes = self.codes_of(cells.column(self.labels_key))
        labeled = np.flatnonzero(codes >= 0)
        weights = None if self._weights is None else self._weights.numpy()

        def fit(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return fit_logistic(features, codes[labeled], len(self.known_classes), weights)

        tuned: FineTunedModule = module
        probe(tuned, cells.take(labeled), tokenizer, self, fit if self.probe_first else None)

    def targets(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the number of the class of each cell, -1 where the model does not know it."""
        if self._codes is None:
            raise TrainingError(
                "the labels of the cells are not known; call bind(cells, train_rows) of the task first."
            )
        return {"target": torch.from_numpy(np.maximum(self._codes[rows], UNLABELED))}

    def loss_of(
        self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the weighted mean of the cross entropy over the labeled cells, and their confusion matrix."""
        logits, target = outputs.float(), batch["target"]
        weights = None if self._weights is None else self._weights.to(logits.device)
        labeled = target >= 0
        known = target.clamp_min(0)
        summed = F.cross_entropy(
            logits, target, weights, ignore_index=UNLABELED, reduction="sum", label_smoothing=self.label_smoothing
        )
        total = (labeled if weights is None else labeled * weights[known]).sum()
        n_classes = logits.shape[1]
        pairs = known * n_classes + logits.detach().argmax(dim=1)
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
        codes = self.codes_of(predictor.cells.column(self.labels_key))[rows]
        rows, codes = rows[codes >= 0], codes[codes >= 0]
        if len(rows):
            head: CalibratedHead = predictor.module.head
            head.temperature.fill_(fit_temperature(predictor.outputs(rows), codes))

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
        probabilities divided by the logarithm of the number of classes: 0 is certain, 1 is no idea). The latter two are
        also written as ``obs["scforge_confidence"]`` and ``obs["scforge_entropy"]``, which the next annotator replaces.

        Parameters
        ----------
        predictor, adata
            The model over the cells, and where to write; None: nowhere.
        key_added
            Name of the column, in place of ``"scforge_<labels_key>"``; the others are then called
            ``"<key_added>_confidence"`` and ``"<key_added>_entropy"``.
        soft
            Return the probabilities, and write them into ``obsm["scforge_<labels_key>_probabilities"]`` (float32; the
            classes of its columns are in ``uns["scforge"]["scforge_<labels_key>_classes"]``).
        threshold
            Cells of lower confidence are called ``"unassigned"``. Confidence is calibrated on cells that were held out:
            of the cells with the confidence 0.8 about a fifth is wrong.
        majority_voting
            True gives the cells of each small Leiden cluster of the embedding the label that most of them have, as
            CellTypist does, in ``obs["scforge_<labels_key>_voted"]``. The name of a column of obs takes its clusters.
        min_share
            Clusters in which no label has this share are called ``"Heterogeneous"`` in the vote.

        Returns
        -------
        Columns ``label``, ``confidence``, ``entropy`` and maybe ``voted``; with `soft` one column a class.
        """
        return predict_classes(
            self,
            predictor,
            adata,
            key_added=key_added,
            soft=soft,
            threshold=threshold,
            majority_voting=majority_voting,
            min_share=min_share,
        )

    def evaluate(self, context: EvaluationContext) -> Evaluated:
        """Score the classes of cells, beside baselines that learned from the same training cells.

        Figures are of the ``n_scored`` cells whose label the model knows. Cells of other labels cannot be right
        whatever the method, so that they do not count as wrong: ``n_unknown_label`` tells how many there are, and
        ``n_unlabeled`` how many have no label.

        Figures: ``accuracy``, ``balanced_accuracy``, ``macro_f1``, ``weighted_f1``, and ``calibration_error`` (expected
        calibration error of the confidence, 15 bins). Tables: ``per_class`` (precision, recall, F1 and support) and
        ``confusion`` (the number of cells of each label and prediction, one row a pair). Baselines: see
        :func:`scforge.eval.baselines.classification_baselines`, and ``frozen_embedding``, the logistic
        regression on the embedding of the model before fine-tuning.

        Raises
        ------
        DataError
            If no cell has a label that the model knows.
        """
        return evaluate_classes(self, context)


def _one_label(labels: pd.Categorical) -> str:
    return f"one label only ({str(labels.categories[0])!r})" if len(labels.categories) else "no label"


def _checked_weights(weights: Any, classes: list[str] | None) -> str | dict[str, float] | None:
    if weights is None or weights == BALANCED:
        return weights
    if not isinstance(weights, Mapping):
        raise OptionError(f"class_weights={weights!r} is neither None, 'balanced' nor a dict of weights by class.")
    for name, weight in weights.items():
        check_positive(f"class_weights[{name!r}]", weight)
        if classes is not None and str(name) not in classes:
            raise OptionError(f"class_weights has {name!r}, which is no class (classes: {listing(classes)}).")
    return {str(name): float(weight) for name, weight in weights.items()}
