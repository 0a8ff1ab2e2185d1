"""Base class for the tasks with a target for each cell: annotation, multi_label and regression.

Shapes: N cells, D dimensions, C classes, labels or numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from torch import nn

from scforge._columns import texts_of
from scforge.data.cells import Cells, CellSource
from scforge.errors import DataError, listing, warn
from scforge.eval.base import has_enough_groups
from scforge.eval.baselines import BaselineInputs
from scforge.eval.report import bootstrap_weights, compare_paired
from scforge.finetuning.base import FROZEN, Column, Evaluated, EvaluationContext, Predictor, Task, warn_of_missing_base
from scforge.finetuning.heads import check_head, probe
from scforge.finetuning.labels import BALANCED
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives.base import TrainingDefaults

_N_DRAWS = 100
"""Number of bootstrap samples for the differences between methods."""


class SupervisedTask(Task):
    """A task with a target for each cell, whose head is initialized from a linear model on the embeddings.

    Parameters
    ----------
    head
        Head options, a dict with ``hidden_dim`` (0: linear) and ``dropout``.
    probe_first
        Whether to initialize the last layer of the head from a linear model on the embeddings of the training cells.

    Attributes
    ----------
    lower_is_better
        Scores for which lower is better.
    """

    lower_is_better: ClassVar[frozenset[str]] = frozenset()

    defaults = TrainingDefaults(batch_size=64, lr=3e-4, weight_decay=0.01, schedule="cosine_warmup", max_epochs=15)
    labels_key: str | None
    classes: list[str] | None = None
    _targets: np.ndarray

    def __init__(self, head: Mapping[str, Any] | None, probe_first: bool) -> None:
        self.head = check_head(head)
        self.probe_first = probe_first

    @property
    def targets_option(self) -> dict[str, Any]:
        """The option that specifies the targets, for use in errors."""
        return {"labels_key": self.labels_key}

    @property
    def argument(self) -> str:
        """The same as text, for use in warnings."""
        return ", ".join(f"{name}={value!r}" for name, value in self.targets_option.items())

    @property
    def known_classes(self) -> list[str]:
        """The classes, after they have been determined."""
        assert self.classes is not None
        return self.classes

    @abstractmethod
    def read(self, column: Column) -> np.ndarray:
        """Return the target of each cell, shape (N,) or (N, C)."""

    @abstractmethod
    def has_target(self, targets: np.ndarray) -> np.ndarray:
        """Return which targets are known, bool, shape (N,)."""

    @abstractmethod
    def fit(self, features: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fit the last layer of the head, and return its weights (shape (C, F)) and biases (shape (C,))."""

    @abstractmethod
    def estimate(self, predictor: Predictor, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the scored predictions: probabilities or numbers."""

    @abstractmethod
    def baselines(self, inputs: BaselineInputs, targets: np.ndarray) -> dict[str, np.ndarray]:
        """Return the estimates of baselines that are fitted to the targets of the training cells."""

    @abstractmethod
    def scores(self, truth: np.ndarray, estimates: np.ndarray) -> dict[str, float]:
        """Return the scores of estimates."""

    def tables(self, truth: np.ndarray, estimates: np.ndarray) -> dict[str, pd.DataFrame]:
        """Return additional tables for the estimates of the model."""
        return {}

    def count_unscored(self, targets: np.ndarray, column: Column) -> dict[str, int]:
        """Return the number of cells that are not scored, by reason."""
        return {"n_unlabeled": int((~self.has_target(targets)).sum())}

    def unknown_labels(self, column: Column) -> list[str]:
        """Return the labels in a column that the model does not know."""
        return []

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the target of each cell."""
        self._targets = self.read(cells.column)
        if lacking := int((~self.has_target(self._targets[train_rows])).sum()):
            raise DataError(
                f"is missing or unknown for {lacking} of {len(train_rows)} training cells; fill in the values. If "
                "labels were corrected after fine-tuning, fine-tune the base model again.",
                **self.targets_option,
            )

    def initialize(self, module: nn.Module, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Standardize the head input, and initialize the head from a linear model on the embeddings."""
        targets = self.read(cells.column)
        rows = np.flatnonzero(self.has_target(targets))
        fit = partial(self.fit, targets=targets[rows]) if self.probe_first else None
        probe(module, cells.take(rows), tokenizer, self, fit)

    def targets(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the targets of cells."""
        return {"target": torch.from_numpy(self._targets[rows])}

    def weights_of(self, option: Any, balanced: np.ndarray) -> torch.Tensor | None:
        """Return the class weights that an option specifies, float32, shape (C,), or None for no weights."""
        if option is None:
            return None
        if option == BALANCED:
            return torch.from_numpy(balanced).float()
        return torch.tensor([option.get(name, 1.0) for name in self.known_classes])

    def evaluate(self, context: EvaluationContext) -> Evaluated:
        """Score the estimates of cells, with baselines trained on the same cells.

        Scores are computed over the ``n_scored`` cells whose target is known to the model; see the method ``scores``.
        No method can predict the other cells correctly, so they are not counted as wrong. Columns report the number of
        these cells. With baselines, the table ``differences`` compares the model with each of them on bootstrap samples
        of the scored cells, or of whole groups.

        Raises
        ------
        DataError
            If there are no such cells.

        Warns
        -----
        ScforgeWarning
            If there are fewer than four groups, so that there are no differences; or if cells are not scored, because
            they have no label or one that the model does not know.
        """

        def column(key: str) -> pd.Series:
            return context.cells.column(key).iloc[context.rows]

        targets = self.read(column)
        is_known = self.has_target(targets)
        if not is_known.any():
            known_classes = f" (classes: {listing(self.classes)})" if self.classes else ""
            raise DataError(
                f"has no value that the model predicts in any of the {len(is_known)} scored cells{known_classes}; "
                "score other cells.",
                **self.targets_option,
            )
        rows, truth = context.rows[is_known], targets[is_known]
        methods = {"scforge": self.estimate(context.predictor, rows)}
        if context.baselines and context.train_cells is not None and context.train_rows is not None:
            of_train = self.read(context.train_cells.column)
            learned = self._still_labeled(of_train, context.train_rows)
            inputs = BaselineInputs.of(context.train_cells, learned, context.cells, rows, seed=context.seed)
            if context.base is None or context.base_train is None:
                warn_of_missing_base()
            else:
                frozen = context.base_train.embedding(inputs.rows), context.base.embedding(rows)
                inputs = replace(inputs, embeddings={FROZEN: frozen})
            methods |= self.baselines(inputs, of_train[inputs.rows])
        counts = {"n_scored": len(rows), **self.count_unscored(targets, column)}
        self._warn_of_unscored(counts, len(is_known), column)
        scores = {name: self.scores(truth, estimates) for name, estimates in methods.items()}
        table = {name: {**values, **counts} for name, values in scores.items()}
        metrics = pd.DataFrame.from_dict(table, orient="index").rename_axis("method")
        tables = self.tables(truth, methods["scforge"])
        if context.intervals and len(methods) > 1:
            key = context.groups_key
            groups = np.arange(len(rows))
            if key is not None:
                groups = pd.factorize(texts_of(column(key)[is_known], key=key, argument="groups_key"))[0]
            if key is None or has_enough_groups(key, int(groups.max()) + 1):
                tables["differences"] = self._differences(scores, truth, methods, groups, seed=context.seed)
        return Evaluated(metrics, tables)

    def _still_labeled(self, targets: np.ndarray, train_rows: np.ndarray) -> np.ndarray:
        """Return the training cells whose target is still known; labels may have been corrected since fine-tuning."""
        learned = train_rows[self.has_target(targets[train_rows])]
        if lacking := len(train_rows) - len(learned):
            what = f": {lacking} of {len(train_rows)} training cells no longer have a known value"
            if not len(learned):
                raise DataError(f"{what}; restore them, or pass baselines=False.", **self.targets_option)
            warn(f"{self.argument}{what}; baselines are fitted on the others.")
        return learned

    def _warn_of_unscored(self, counts: Mapping[str, int], n_cells: int, column: Column) -> None:
        """Warn about labels that the model does not know, and cells without a label."""
        parts = []
        if n_unknown := counts.get("n_unknown_label", 0):
            unknown = listing(self.unknown_labels(column))
            parts.append(f"{n_unknown} cells have labels that the model does not know ({unknown})")
        if counts["n_unlabeled"]:
            parts.append(f"{counts['n_unlabeled']} cells have no label")
        if parts:
            warn(f"{self.argument}: {' and '.join(parts)}; {counts['n_scored']} of {n_cells} cells are scored.")

    def _differences(
        self,
        values: Mapping[str, Mapping[str, float]],
        truth: np.ndarray,
        methods: Mapping[str, np.ndarray],
        groups: np.ndarray,
        *,
        seed: int,
    ) -> pd.DataFrame:
        """Return each score minus that of each baseline, with 95% intervals from bootstrap samples of the groups."""
        draws: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
        for i in range(_N_DRAWS):
            (times,) = bootstrap_weights(len(truth), 1, seed=seed * _N_DRAWS + i, groups=groups)
            rows = np.repeat(np.arange(len(truth)), times)
            for name, estimates in methods.items():
                draws[name].append(self.scores(truth[rows], estimates[rows]))
        tables, n_groups = {name: pd.DataFrame(drawn) for name, drawn in draws.items()}, int(groups.max()) + 1
        lines = []
        for other in list(methods)[1:]:
            for score, value in values["scforge"].items():
                comparison = compare_paired(
                    other, value, values[other][score], tables["scforge"][score], tables[other][score], n_units=n_groups
                )
                # Without a p-value, samples do not vary, e.g. because there are too few cells for an interval.
                low, high = (np.nan, np.nan) if np.isnan(comparison.p_value) else (comparison.low, comparison.high)
                verdict = "" if np.isnan(low) else "tie"
                if low > 0 or high < 0:
                    verdict = "better" if (low > 0) != (score in self.lower_is_better) else "worse"
                lines.append((other, score, comparison.difference, low, high, verdict))
        return pd.DataFrame(lines, columns=["method", "score", "difference", "low", "high", "verdict"])
