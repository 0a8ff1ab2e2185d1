"""Which cells a fine-tuned model may be scored on, and which it has learned from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge.errors import DataError, OptionError, warn
from scforge.finetuning.base import Task
from scforge.finetuning.held_out import CellMarks, fingerprints
from scforge.finetuning.splits import Split

if TYPE_CHECKING:
    from scforge.data.cells import Cells
    from scforge.training.datamodule import CellDataModule

__all__ = ["HeldOutMethods"]


class HeldOutMethods:
    """Methods around the cells of fine-tunings."""

    def learned_labels_of(self: Any, cells: Cells) -> np.ndarray:
        """Return which cells' labels the model learned from, in any fine-tuning that led to it.

        Cells are known again by their counts; where other genes are measured than in the fine-tuning, by their names.

        Parameters
        ----------
        cells
            Cells over the genes of the model, as from :meth:`cells`.

        Returns
        -------
        Bool, shape (N,).

        Warns
        -----
        ScforgeWarning
            If genes and names are missing, so that cells of a fine-tuning may not be known again.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:800, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> annotator = model.finetune("annotation", lora=True, max_epochs=1, progress_bar=False)
        >>> learned = annotator.learned_labels_of(annotator.cells())
        >>> learned.shape, bool(learned.all())
        ((800,), False)
        """
        learned = self._learned
        if learned is None:
            return np.zeros(len(cells), dtype=bool)
        marks = CellMarks.of(cells)
        _warn_of_undecided(marks.undecided(learned))
        return marks.among(learned)

    @property
    def _learned(self: Any) -> CellMarks | None:
        """Marks of all cells whose labels the model learned from; None if there are none."""
        if self._seen is None:
            return None
        learned: CellMarks = self._seen.learned
        task = self.spec.build_objective()
        if isinstance(task, Task) and task.learns_labels:
            learned = learned.union(self._seen.trained)
        return learned if len(learned) else None

    def _rows_of_split(self: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the cells to train and to validate on, of a model with a task."""
        if self.spec.tuning is None:
            return {}
        if options.get("validation_size") is not None:
            raise OptionError("validation_size was chosen by finetune, and stays; leave it out.")
        split = self._known_split()
        if split is None:
            raise DataError("the cells are not those of the fine-tuning, or not all of them; call finetune(adata=...).")
        return {"train_rows": split.train, "validation_rows": split.validation}

    def _learn_from_others(self: Any, data: CellDataModule) -> None:
        """Remember the cells of a data module that a fine-tuned model is trained on.

        Raises
        ------
        OptionError
            If its evaluation is about some of them.
        """
        if self._seen is None:
            return
        marks = CellMarks.of(self._open(data.cells))
        learned = np.concatenate([data.train_rows, data.validation_rows])
        if n_tested := int(self._seen.tested(marks.numbers)[learned].sum()):
            raise OptionError(
                f"datamodule has {n_tested} cells that the fine-tuning held out for testing; leave these out of "
                "train_rows and validation_rows, or call finetune again."
            )
        if self.spec.build_objective().learns_labels:
            self._seen = self._seen.with_learned(marks.take(learned))

    def _rows_to_score(self: Any, cells: Cells, *, within: bool) -> tuple[np.ndarray, Split | None]:
        """Return the rows of cells that the model did not learn from; and their split, if these are its cells."""
        if self._seen is None:
            return np.arange(len(cells)), None
        marks = CellMarks.of(cells)
        split = self._seen.split_of(marks.numbers)
        of_others = self._seen.learned if _is_scored_by_labels(self.spec.build_objective()) else CellMarks.none()
        learned, unclear = marks.among(of_others), marks.undecided(of_others)
        if split is not None and (within or len(marks) == len(self._seen.numbers)):
            if not len(split.test):
                # load_query_data has no test_size.
                more = "" if self.spec.tuning.base.get("reference") else ", or test_size=0.1"
                raise OptionError(f"the fine-tuning held no cells out for testing; pass other cells{more}.")
            rows = split.test[~learned[split.test]]
            n_learned, n_all, what = int(learned[split.test].sum()), len(split.test), "cells held out for testing"
        else:
            learned |= marks.among(self._seen.trained)
            unclear |= marks.undecided(self._seen.trained)
            rows = np.flatnonzero(self._seen.tested(marks.numbers) & ~learned if within else ~learned)
            n_learned, n_all, what = int(learned.sum()), len(learned), "cells"
        if not len(rows):
            raise OptionError(
                f"the model learned from {n_learned} of these {n_all} {what}, and none is left; "
                "pass cells that it did not see."
            )
        if n_learned:
            warn(f"The model learned from {n_learned} of the {n_all} {what}; they are not scored.")
        _warn_of_undecided(unclear[rows])
        return rows, split

    def _known_split(self: Any) -> Split | None:
        """Return the split of the fine-tuning; None where the model does not have those cells."""
        source = self.adata if self._data is None else self._data.cells
        if self._seen is None or source is None:
            return None
        return self._seen.split_of(fingerprints(self._open(source)))


def _is_scored_by_labels(task: Task) -> bool:
    return task.learns_labels or getattr(task, "labels_key", None) is not None


def _warn_of_undecided(unclear: np.ndarray) -> None:
    if unclear.any():
        warn(
            f"{int(unclear.sum())} of the {len(unclear)} cells may be cells of a fine-tuning: other genes are missing "
            "in one of the two, so counts do not tell, and there are no names of cells to compare; pass cells that "
            "the model did not see."
        )
