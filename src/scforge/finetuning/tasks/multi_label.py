"""Prediction of several labels per cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from anndata import AnnData
from scipy.special import expit
from torch import nn

from scforge._checks import check_bool, check_share
from scforge._columns import labels_of
from scforge.data.cells import Cells, cell_names
from scforge.errors import DataError, OptionError, listing, warn
from scforge.eval.baselines import BaselineInputs, multi_label_baselines
from scforge.finetuning.base import Batch, Column, Loss, Predictor, register_task
from scforge.finetuning.heads import PredictionHead, fit_separate_logistic
from scforge.finetuning.labels import check_names, check_weights, write_probabilities
from scforge.finetuning.metrics import mean_of_known, multi_label_figures
from scforge.finetuning.splits import Split, split_for, warn_of_unlearned, with_each_in_training
from scforge.finetuning.supervised import SupervisedTask


def _truth(values: pd.Series, key: str) -> np.ndarray:
    """Return a column of booleans, or of 0 and 1, as bool; missing values become False."""
    present = values.dropna()
    odd = [value for value in present.unique() if isinstance(value, str) or value not in (0, 1)]
    if odd:
        raise DataError(
            f": {key!r} contains {str(odd[0])!r}; use only True and False, or 1 and 0.",
            argument="labels_keys",
        )
    result = np.zeros(len(values), dtype=bool)
    result[np.asarray(values.notna())] = np.asarray(present, dtype=object).astype(bool)
    return result


@register_task("multi_label")
class MultiLabel(SupervisedTask):
    """Binary cross entropy of each label of each cell.

    Parameters
    ----------
    labels_keys
        Columns of ``obs``, one per label, with booleans or 0 and 1. Cells with a missing value are not used.
    labels_key
        Alternatively, one column with the labels of a cell as text. Cells with NaN are not used; an empty text means no
        labels.
    separator
        Separator of the labels in `labels_key`.
    classes
        The labels, in the order of the outputs. If None, uses `labels_keys`, or the sorted labels of the training
        cells.
    pos_weight
        Weight of cells with a label relative to cells without it: ``"balanced"`` for equal total weights (cells without
        / cells with the label), or a dict from label to weight. If None, the weight is 1.
    head
        Head options, a dict with ``hidden_dim`` (0: linear) and ``dropout``.
    probe_first
        Whether to initialize the last layer of the head from logistic regressions on the embeddings of the training
        cells.
    """

    # A labels_key of setup_anndata has one label per cell, so that it is no default here.
    keys = ()

    def __init__(
        self,
        *,
        labels_keys: Sequence[str] | None = None,
        labels_key: str | None = None,
        separator: str = ";",
        classes: Sequence[str] | None = None,
        pos_weight: str | Mapping[str, float] | None = None,
        head: Mapping[str, Any] | None = None,
        probe_first: bool = True,
    ) -> None:
        super().__init__(head, probe_first)
        if (labels_keys is None) == (labels_key is None):
            raise OptionError("pass either labels_keys (boolean columns) or labels_key (one column of text).")
        if not isinstance(separator, str) or not separator.strip():
            raise OptionError("is not a valid label separator; pass e.g. ';'.", separator=separator)
        self.labels_keys = check_names("labels_keys", labels_keys)
        self.labels_key = labels_key
        self.separator = separator
        self.classes = check_names("classes", classes)
        if self.labels_keys is not None and self.classes not in (None, self.labels_keys):
            raise OptionError("does not match labels_keys; omit classes.", classes=self.classes)
        self.pos_weight = check_weights("pos_weight", pos_weight, self.classes)
        self._weight: torch.Tensor | None = None

    @property
    def targets_option(self) -> dict[str, Any]:
        """The option that specifies the labels, for use in errors."""
        return super().targets_option if self.labels_keys is None else {"labels_keys": self.labels_keys}

    def usable(self, column: Column) -> np.ndarray:
        """Return which cells have values."""
        return self._has_values(column, warns=True)

    def _has_values(self, column: Column, *, warns: bool = False) -> np.ndarray:
        if self.labels_keys is None:
            return np.asarray(self._texts(column, warns=warns).notna())
        return np.all([np.asarray(column(key).notna()) for key in self.labels_keys], axis=0)

    def _texts(self, column: Column, *, warns: bool = False) -> pd.Categorical:
        """Return the labels of each cell as one text; an empty text means that a cell has no labels, but is known."""
        key = str(self.labels_key)
        values = column(key)
        return labels_of(values, key=key, classes=("", *(self.classes or ())), warns=warns)

    def _occurring(self, column: Column) -> list[str]:
        """Return the labels that occur, sorted, or the names of the boolean columns."""
        if self.labels_keys is not None:
            return self.labels_keys
        return sorted({label for text in self._texts(column).categories for label in self._split(text)})

    def _split(self, text: str) -> list[str]:
        return [label.strip() for label in text.split(self.separator) if label.strip()]

    def _lookup(self, column: Column, classes: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return whether each cell has each label, bool, (N, C), and whether it has labels not in `classes`, (N,)."""
        if self.labels_keys is not None:
            targets = np.stack([_truth(column(key), key) for key in self.labels_keys], axis=1)
            return targets, np.zeros(len(targets), dtype=bool)
        cells = self._texts(column)
        codes, texts = np.asarray(cells.codes), cells.categories
        number = {name: i for i, name in enumerate(classes)}
        # One row a text that occurs, and an empty one at the end for the missing, whose code is -1.
        targets = np.zeros((len(texts) + 1, len(classes)), dtype=bool)
        unknown = np.zeros(len(texts) + 1, dtype=bool)
        for row, text in enumerate(texts):
            for label in self._split(text):
                if label in number:
                    targets[row, number[label]] = True
                else:
                    unknown[row] = True
        return targets[codes], unknown[codes]

    def split(
        self, column: Column, *, validation_size: float, test_size: float, split_by: str | None, seed: int
    ) -> Split | None:
        """Split cells at random such that training contains a cell with each label and a cell without it."""
        if split_by is not None:
            return None
        targets, _ = self._lookup(column, self.classes or self._occurring(column))
        shares = {"validation_size": validation_size, "test_size": test_size}
        split = split_for(len(targets), **shares, seed=seed, usable=self._has_values(column))
        return with_each_in_training(split, np.concatenate([targets, ~targets], axis=1))

    def check_split(self, column: Column, split: Split) -> None:
        """Report labels that only held-out cells have."""
        names = self.classes or self._occurring(column)
        targets, _ = self._lookup(column, names)
        held_out = targets[np.concatenate([split.validation, split.test])]
        lacking = held_out.any(axis=0) & ~targets[split.train].any(axis=0)
        n_cells = int(held_out[:, lacking].any(axis=1).sum())
        warn_of_unlearned(self.argument, [names[i] for i in np.flatnonzero(lacking)], n_cells)

    def options_from(self, column: Column) -> dict[str, Any]:
        """Return the labels of the training cells, unless they are already known.

        Raises
        ------
        DataError
            If all training cells or no training cells have a label.

        Warns
        -----
        ScforgeWarning
            If `classes` leaves out labels of training cells.
        """
        classes = self.classes or self._occurring(column)
        targets, unknown = self._lookup(column, classes)
        targets = targets[self._has_values(column)]
        if not classes:
            raise DataError("has no label for any training cell; choose another column.", **self.targets_option)
        if same := [name for name, has in zip(classes, targets.T, strict=True) if has.all() or not has.any()]:
            raise DataError(
                f"contains labels of all or none of the training cells ({listing(same)}); remove these labels.",
                **self.targets_option,
            )
        if unknown.any():
            lacking = f"labels of {self.argument} ({listing(sorted({*self._occurring(column)} - {*classes}))})"
            warn(f"classes lacks {lacking} that {int(unknown.sum())} of the {len(unknown)} training cells have.")
        return {"classes": classes} if self.classes is None else {}

    def read(self, column: Column) -> np.ndarray:
        """Return 0 or 1 for each label of each cell, or NaN if there is no value, float32, shape (N, C)."""
        targets, _ = self._lookup(column, self.known_classes)
        return np.where(self._has_values(column)[:, None], targets, np.nan).astype(np.float32)

    def has_target(self, targets: np.ndarray) -> np.ndarray:
        """Return which cells have values."""
        return ~np.isnan(targets).any(axis=1)

    def make_head(self, n_latent: int, module: nn.Module) -> PredictionHead:
        """Create the head, with one output per label."""
        return PredictionHead(n_latent, len(self.known_classes), **self.head)

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the labels of each cell, and the weights of the labels."""
        super().bind(cells, train_rows)
        having = np.maximum((self._targets[train_rows] > 0).sum(axis=0), 1)
        self._weight = self.weights_of(self.pos_weight, (len(train_rows) - having) / having)

    def fit(self, features: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fit a logistic regression for each label."""
        return fit_separate_logistic(features, targets > 0)

    def loss_of(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Return the loss averaged over cells and labels, and the TP, FN and FP of each label."""
        logits, target = outputs.float(), batch["target"]
        labeled = ~torch.isnan(target)
        weight = None if self._weight is None else self._weight.to(logits.device)
        summed = F.binary_cross_entropy_with_logits(
            logits, target.nan_to_num(0.0), labeled.float(), pos_weight=weight, reduction="sum"
        )
        predicted, has, has_not = logits.detach() > 0, target > 0, target == 0
        counts = torch.stack([predicted & has, ~predicted & has, predicted & has_not]).float().mean(dim=1)
        return summed / labeled.sum().clamp_min(1), {"counts": counts}

    def summarize(self, means: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the loss, and the macro F1 of the labels that occur or are predicted."""
        right, missed, wrong = means["counts"]
        seen = right + missed + wrong > 0
        f1 = 2 * right[seen] / (2 * right + missed + wrong)[seen]
        return {"loss": float(means["loss"]), "macro_f1": mean_of_known(f1)}

    def estimate(self, predictor: Predictor, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the probability of each label, float32, shape (N, C)."""
        return expit(predictor.outputs(rows))

    def predict(  # type: ignore[override]
        self,
        predictor: Predictor,
        adata: AnnData | None,
        *,
        key_added: str | None = None,
        soft: bool = False,
        threshold: float = 0.5,
    ) -> pd.DataFrame:
        """Predict the labels of each cell.

        Writes the probabilities into ``obsm["scforge_<labels_key>_probabilities"]`` (``scforge_labels_probabilities``
        with `labels_keys`). The labels of the columns are in ``uns["scforge"]["scforge_<labels_key>_classes"]``. Writes
        the labels into ``obs``: the joined text ``scforge_<labels_key>``, or one boolean column per label,
        ``scforge_<label>``.

        Parameters
        ----------
        predictor, adata
            The model applied to the cells, and the AnnData to write to, or None.
        key_added
            Name to use instead of ``"scforge_<labels_key>"``; for the label columns, it is the prefix before
            ``_<label>``.
        soft
            Whether to return the probabilities.
        threshold
            Minimum probability at which a cell receives a label.

        Returns
        -------
        A table with one column per label: booleans, or probabilities (float32).
        """
        check_bool("soft", soft)
        check_share("threshold", threshold)
        probabilities = self.estimate(predictor)
        index = cell_names(predictor.cells)
        table = pd.DataFrame(probabilities, index=index, columns=self.known_classes)
        predictions = table >= threshold
        if adata is not None:
            if self.labels_key is None:
                key, prefix = key_added or "scforge_labels", key_added or "scforge"
                for name in self.known_classes:
                    adata.obs[f"{prefix}_{name}"] = predictions[name]
            else:
                key = key_added or f"scforge_{self.labels_key}"
                names = np.asarray(self.known_classes, dtype=object)
                adata.obs[key] = pd.Categorical([self.separator.join(names[has]) for has in np.asarray(predictions)])
            write_probabilities(adata, key, table)
        return table if soft else predictions

    def baselines(self, inputs: BaselineInputs, targets: np.ndarray) -> dict[str, np.ndarray]:
        """Return the estimates of :func:`scforge.eval.baselines.multi_label_baselines`."""
        return multi_label_baselines(inputs, targets > 0)

    def count_unscored(self, targets: np.ndarray, column: Column) -> dict[str, int]:
        """Return the number of cells with unknown labels, which are ignored, and the number of cells without labels."""
        _, unknown = self._lookup(column, self.known_classes)
        return {"n_unknown_label": int(unknown.sum()), **super().count_unscored(targets, column)}

    def unknown_labels(self, column: Column) -> list[str]:
        """Return the labels in a column that are not classes."""
        return [name for name in self._occurring(column) if name not in self.known_classes]

    def scores(self, truth: np.ndarray, estimates: np.ndarray) -> dict[str, float]:
        """Return the scores over all labels.

        ``auroc`` and ``average_precision`` are averaged over the labels for which they are defined. ``macro_f1`` uses
        a probability threshold of 0.5 and is averaged over the labels that occur in at least one cell.
        ``subset_accuracy`` is the fraction of cells whose labels are all correct.
        """
        of_labels = multi_label_figures(truth > 0, estimates)
        return {
            "auroc": mean_of_known(of_labels["auroc"]),
            "average_precision": mean_of_known(of_labels["average_precision"]),
            "macro_f1": mean_of_known(of_labels["f1"]),
            "subset_accuracy": float(((estimates > 0.5) == truth).all(axis=1).mean()),
        }

    def tables(self, truth: np.ndarray, estimates: np.ndarray) -> dict[str, pd.DataFrame]:
        """Return the scores of each label."""
        of_labels = multi_label_figures(truth > 0, estimates)
        return {"per_label": pd.DataFrame(of_labels, index=self.known_classes).rename_axis("label")}
