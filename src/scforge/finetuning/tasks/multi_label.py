"""Predict several labels of a cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import expit
from torch import nn

from scforge._checks import check_bool, check_positive, check_share
from scforge.errors import DataError, OptionError, TrainingError, listing, warn
from scforge.eval.baselines import multi_label_baselines
from scforge.finetuning.base import Evaluated, Task, register_task
from scforge.finetuning.baselines import baseline_inputs
from scforge.finetuning.heads import PredictionHead, check_head, fit_separate_logistic, probe
from scforge.finetuning.labels import check_classes, check_key, write_probabilities
from scforge.finetuning.metrics import mean_of_known, multi_label_figures
from scforge.finetuning.splits import Split, split_for, warn_of_unlearned, with_each_in_training
from scforge.training.objectives.base import TrainingDefaults

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

    from scforge.data.cells import Cells, CellSource
    from scforge.finetuning.base import EvaluationContext, Predictor
    from scforge.finetuning.heads import FineTunedModule
    from scforge.tokenizers.base import Tokenizer


type Column = Callable[[str], pd.Series]


@dataclass(frozen=True)
class LabelSets:
    """Where the labels of cells stand.

    Attributes
    ----------
    keys
        Columns with truth values, one a label; None if there is one column of text.
    key
        The column of text.
    separator
        What stands between labels in it.
    """

    keys: list[str] | None
    key: str | None
    separator: str

    @classmethod
    def of(cls, keys: Any, key: Any, separator: Any) -> LabelSets:
        """Check the options of a task.

        Raises
        ------
        OptionError
            Unless one of `keys` and `key` is given, and can be used.
        """
        if (keys is None) == (key is None):
            raise OptionError(
                f"labels_keys={keys!r} and labels_key={key!r}: give either columns of truth values, or one column of "
                "text."
            )
        if not isinstance(separator, str) or not separator.strip():
            raise OptionError(f"separator={separator!r} is not a text that can stand between labels.")
        if keys is None:
            return cls(None, check_key("labels_key", key), separator)
        if isinstance(keys, str) or not isinstance(keys, Sequence) or not keys:
            raise OptionError(f"labels_keys={keys!r} is not a list of columns of obs.")
        if len(set(keys)) < len(keys):
            raise OptionError(f"labels_keys={list(keys)!r} names a column twice; name each once.")
        return cls([check_key("labels_keys", one) for one in keys], None, separator)

    @property
    def argument(self) -> str:
        """What to call it in messages."""
        return f"labels_key={self.key!r}" if self.keys is None else f"labels_keys={self.keys!r}"

    def known(self, column: Column) -> np.ndarray:
        """Return which cells have values, bool, shape (N,)."""
        keys = [self.key] if self.keys is None else self.keys
        return np.all([np.asarray(column(str(key)).notna()) for key in keys], axis=0)

    def names(self, column: Column) -> list[str]:
        """Return the labels that occur, sorted; of columns of truth values their names."""
        if self.keys is not None:
            return list(self.keys)
        return sorted({label for value in column(str(self.key)).dropna().unique() for label in self._split(value)})

    def targets(self, column: Column, classes: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return whether each cell has each label, whether it has values, and whether it has labels not in `classes`.

        Returns
        -------
        Bool, of the shapes (N, C), (N,) and (N,).

        Raises
        ------
        DataError
            If a column of truth values has others.
        """
        import pandas as pd

        known = self.known(column)
        if self.keys is not None:
            targets = np.stack([_truth(column(key), key) for key in self.keys], axis=1)
            return targets, known, np.zeros(len(known), dtype=bool)
        codes, values = pd.factorize(column(str(self.key)))
        number = {name: i for i, name in enumerate(classes)}
        # One row a text that occurs, and an empty one at the end for the missing, whose code is -1.
        targets = np.zeros((len(values) + 1, len(classes)), dtype=bool)
        unknown = np.zeros(len(values) + 1, dtype=bool)
        for row, value in enumerate(values):
            for label in self._split(value):
                if label in number:
                    targets[row, number[label]] = True
                else:
                    unknown[row] = True
        return targets[codes], known, unknown[codes]

    def joined(self, targets: np.ndarray, classes: Sequence[str]) -> list[str]:
        """Return the labels of each cell as text."""
        return [self.separator.join(np.asarray(classes, dtype=object)[has]) for has in targets]

    def _split(self, value: Any) -> list[str]:
        if not isinstance(value, str):
            raise DataError(
                f"{self.argument} holds {str(value)!r}, not text such as 'a{self.separator}b'; name columns of truth "
                "values with labels_keys, or make text of it."
            )
        return [label.strip() for label in value.split(self.separator) if label.strip()]


def _truth(values: pd.Series, key: str) -> np.ndarray:
    """Return a column of truth values, or of 0 and 1, as bool; False where it is missing."""
    present = values.dropna()
    odd = [value for value in present.unique() if isinstance(value, str) or value not in (0, 1)]
    if odd:
        raise DataError(
            f"labels_keys: {key!r} holds {str(odd[0])!r}, which is neither a truth value nor 0 or 1; name columns of "
            "these, or one column of text with labels_key."
        )
    result = np.zeros(len(values), dtype=bool)
    result[np.asarray(values.notna())] = np.asarray(present, dtype=object).astype(bool)
    return result


BALANCED = "balanced"


@register_task("multi_label")
class MultiLabel(Task):
    """Binary cross entropy of each label of each cell.

    Parameters
    ----------
    labels_keys
        Columns of obs, one a label, with truth values or 0 and 1. A cell without value in one of them takes no part.
    labels_key
        In place of these, one column with the labels of a cell as text. NaN is a cell that takes no part, an empty text
        one that has no label.
    separator
        What stands between the labels in `labels_key`.
    classes
        The labels, in the order of the outputs; None takes `labels_keys`, or those of the training cells, sorted.
    pos_weight
        Weight of cells that have a label, against those that have not: None for 1, ``"balanced"`` for as much weight on
        both sides (cells without / cells with the label), or a dict by label.
    head
        Options of the head, a dict of ``hidden_dim`` (0: linear) and ``dropout``.
    probe_first
        Start the last layer of the head at logistic regressions on the embeddings of the training cells.
    """

    defaults = TrainingDefaults(batch_size=64, lr=3e-4, weight_decay=0.01, schedule="cosine_warmup", max_epochs=15)
    # A labels_key of setup_anndata has one label a cell, so that it is no default here.
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
        self._sets = LabelSets.of(labels_keys, labels_key, separator)
        self.labels_keys = self._sets.keys
        self.labels_key = labels_key
        self.separator = separator
        self.classes = check_classes(classes)
        if self.labels_keys is not None and self.classes not in (None, self.labels_keys):
            raise OptionError(f"classes={self.classes!r} are not labels_keys, which name the labels; leave them out.")
        self.pos_weight = _checked_weight(pos_weight)
        self.head = check_head(head)
        self.probe_first = check_bool("probe_first", probe_first)
        self._targets: np.ndarray | None = None
        self._weight: torch.Tensor | None = None

    @property
    def known_classes(self) -> list[str]:
        """The labels, or an error if they are not known yet."""
        if self.classes is None:
            raise TrainingError("classes are not known yet; give classes=[...], or fine-tune with cells.")
        return self.classes

    def usable(self, column: Callable[[str], pd.Series]) -> np.ndarray:
        """Return which cells have values."""
        return self._sets.known(column)

    def split(
        self,
        column: Callable[[str], pd.Series],
        *,
        validation_size: float,
        test_size: float,
        split_by: str | None,
        seed: int,
    ) -> Split | None:
        """Split cells at random, but so that training has a cell with each label, and one without."""
        if split_by is not None:
            return None
        targets, known, _ = self._sets.targets(column, self._labels(column))
        shares = {"validation_size": validation_size, "test_size": test_size}
        split = split_for(len(known), **shares, seed=seed, usable=known)
        return with_each_in_training(split, np.concatenate([targets, ~targets], axis=1))

    def check_split(self, column: Callable[[str], pd.Series], split: Split) -> None:
        """Tell which labels only held-out cells have."""
        names = self._labels(column)
        targets, _, _ = self._sets.targets(column, names)
        held_out = targets[np.concatenate([split.validation, split.test])]
        lacking = held_out.any(axis=0) & ~targets[split.train].any(axis=0)
        n_cells = int(held_out[:, lacking].any(axis=1).sum())
        warn_of_unlearned(self._sets.argument, [names[i] for i in np.flatnonzero(lacking)], n_cells)

    def _labels(self, column: Callable[[str], pd.Series]) -> list[str]:
        return self._sets.names(column) if self.classes is None else self.classes

    def options_from(self, column: Callable[[str], pd.Series]) -> dict[str, Any]:
        """Return the labels of the training cells, unless they are known already.

        Raises
        ------
        DataError
            If a label is one of all training cells, or of none.

        Warns
        -----
        ScforgeWarning
            If `classes` leaves out labels of training cells.
        """
        classes = self._labels(column)
        targets, known, unknown = self._sets.targets(column, classes)
        same = [name for name, has in zip(classes, targets[known].T, strict=True) if has.all() or not has.any()]
        if not classes:
            raise DataError(f"{self._sets.argument} has no label for any training cell; choose another column.")
        if same:
            raise DataError(
                f"{self._sets.argument} has {listing(same)} for all training cells or for none, so that there is "
                "nothing to learn; leave these labels out."
            )
        if unknown.any():
            warn(
                f"classes leaves out {listing(sorted({*self._sets.names(column)} - {*classes}))} of "
                f"{self._sets.argument}, which {int(unknown.sum())} of the {len(unknown)} training cells have, so that "
                "the model does not learn that; name all labels, or leave classes out."
            )
        return {"classes": classes} if self.classes is None else {}

    def make_head(self, n_latent: int, module: nn.Module) -> PredictionHead:
        """Make the head, one output a label."""
        return PredictionHead(n_latent, len(self.known_classes), **self.head)

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the labels of each cell, and the weights of the labels."""
        targets, known, _ = self._sets.targets(cells.column, self.known_classes)
        if missing := int((~known[train_rows]).sum()):
            raise DataError(
                f"{missing} of {len(train_rows)} training cells have no value in {self._sets.argument}; leave them out "
                "of the training rows."
            )
        self._targets = np.where(known[:, None], targets, np.nan).astype(np.float32)
        self._weight = self._weight_of(targets[train_rows])

    def _weight_of(self, targets: np.ndarray) -> torch.Tensor | None:
        if self.pos_weight is None:
            return None
        if self.pos_weight == BALANCED:
            having = np.maximum(targets.sum(axis=0), 1)
            return torch.from_numpy((len(targets) - having) / having).float()
        assert isinstance(self.pos_weight, dict)
        if unknown := set(self.pos_weight) - set(self.known_classes):
            raise OptionError(f"pos_weight has {min(unknown)!r}, which is no label ({listing(self.known_classes)}).")
        return torch.tensor([self.pos_weight.get(name, 1.0) for name in self.known_classes])

    def initialize(self, module: nn.Module, cells: CellSource, tokenizer: Tokenizer) -> None:
        """Standardize what the head sees, and start it at logistic regressions on the embeddings."""
        targets, known, _ = self._sets.targets(cells.column, self.known_classes)
        tuned: FineTunedModule = module
        fit = (lambda features: fit_separate_logistic(features, targets[known])) if self.probe_first else None
        probe(tuned, cells.take(np.flatnonzero(known)), tokenizer, self, fit)

    def targets(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Return 0 or 1 for each label of each cell, NaN where there is no value, shape (B, C)."""
        if self._targets is None:
            raise TrainingError(
                "the labels of the cells are not known; call bind(cells, train_rows) of the task first."
            )
        return {"target": torch.from_numpy(self._targets[rows])}

    def loss_of(
        self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean loss over cells and labels, and right, missed and wrong predictions of each label."""
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
        with `labels_keys`; the labels of its columns are in ``uns["scforge"]["scforge_<labels_key>_classes"]``), and
        the labels into ``obs``: the joined text ``scforge_<labels_key>``, or one column of truth values a label,
        ``scforge_<label>``.

        Parameters
        ----------
        predictor, adata
            The model over the cells, and where to write; None: nowhere.
        key_added
            In place of ``"scforge_<labels_key>"``; of the columns of labels it is what stands before ``_<label>``.
        soft
            Return the probabilities.
        threshold
            Probability from which on a cell has a label.

        Returns
        -------
        One column a label: truth values, or probabilities (float32).
        """
        import pandas as pd

        check_bool("soft", soft)
        check_share("threshold", threshold)
        probabilities = expit(predictor.outputs())
        index = pd.RangeIndex(len(probabilities)) if adata is None else adata.obs_names
        table = pd.DataFrame(probabilities, index=index, columns=self.known_classes)
        found = table >= threshold
        if adata is not None:
            if self.labels_key is None:
                key, prefix = key_added or "scforge_labels", key_added or "scforge"
                for name in self.known_classes:
                    adata.obs[f"{prefix}_{name}"] = found[name]
            else:
                key = key_added or f"scforge_{self.labels_key}"
                adata.obs[key] = pd.Categorical(self._sets.joined(np.asarray(found), self.known_classes))
            write_probabilities(adata, key, table)
        return table if soft else found

    def evaluate(self, context: EvaluationContext) -> Evaluated:
        """Score predicted labels, beside baselines that learned from the same training cells.

        Figures: ``auroc`` and ``average_precision`` (means over labels that they are defined for), ``macro_f1`` (mean
        over labels that a cell has, at the probability 0.5) and ``subset_accuracy`` (share of cells of which all labels
        are right). ``n_unlabeled`` cells have no value and are not scored, ``n_unknown_label`` have labels that the
        model does not know, which are passed over. The table ``per_label`` has the figures of each label.

        Raises
        ------
        DataError
            If no cell has values.
        """
        import pandas as pd

        def scored(key: str) -> pd.Series:
            return context.cells.column(key).iloc[context.rows]

        targets, known, unknown = self._sets.targets(scored, self.known_classes)
        if not known.any():
            raise DataError(f"{self._sets.argument} has no value for any of the {len(known)} scored cells.")
        rows, truth = context.rows[known], targets[known]
        methods = {"scforge": expit(context.predictor.outputs(rows))}
        inputs = baseline_inputs(context, rows)
        if inputs is not None:
            train_cells = context.train_cells
            assert train_cells is not None
            training, _, _ = self._sets.targets(
                lambda key: train_cells.column(key).iloc[inputs.rows], self.known_classes
            )
            methods |= multi_label_baselines(inputs, training)
        counts = {
            "n_scored": len(rows),
            "n_unknown_label": int(unknown.sum()),
            "n_unlabeled": int((~known).sum()),
        }
        table = {name: {**_figures(truth, found), **counts} for name, found in methods.items()}
        per_label = pd.DataFrame(multi_label_figures(truth, methods["scforge"]), index=self.known_classes)
        return Evaluated(
            pd.DataFrame.from_dict(table, orient="index").rename_axis("method"),
            {"per_label": per_label.rename_axis("label")},
        )


def _figures(truth: np.ndarray, probabilities: np.ndarray) -> dict[str, float]:
    of_labels = multi_label_figures(truth, probabilities)
    return {
        "auroc": mean_of_known(of_labels["auroc"]),
        "average_precision": mean_of_known(of_labels["average_precision"]),
        "macro_f1": mean_of_known(of_labels["f1"]),
        "subset_accuracy": float(((probabilities > 0.5) == truth).all(axis=1).mean()),
    }


def _checked_weight(weight: Any) -> str | dict[str, float] | None:
    if weight is None or weight == BALANCED:
        return weight
    if not isinstance(weight, Mapping):
        raise OptionError(f"pos_weight={weight!r} is neither None, 'balanced' nor a dict of weights by label.")
    for name, value in weight.items():
        check_positive(f"pos_weight[{name!r}]", value)
    return {str(name): float(value) for name, value in weight.items()}
