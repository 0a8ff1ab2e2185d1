"""Apply the task of a fine-tuned model, and choose the cells and baselines that it is scored with."""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
from anndata import AnnData

from scforge.data.cells import Cells
from scforge.data.vocab import GeneVocab
from scforge.errors import NotTrainedWarning, OptionError, warn
from scforge.estimators.fitted import FittedModel
from scforge.estimators.setup import Model, training_source
from scforge.finetuning.base import Evaluated, Predictor, Task
from scforge.finetuning.held_out import CellFingerprints
from scforge.finetuning.splits import Split

_LEFT_OUT = ("self", "predictor", "adata", "key_added", "context")


def options_of(method: Any) -> list[str]:
    """Return the option names of a task method."""
    return [name for name in inspect.signature(method).parameters if name not in _LEFT_OUT]


def task_of(model: FittedModel, method: str) -> Task:
    """Return the task. Raises an OptionError if the model has no task."""
    if model.spec.tuning is None:
        raise OptionError(f'the model has no task, so it cannot {method}; call model.finetune("annotation") first.')
    if not model.is_trained:
        warn("The model is not trained; its predictions are random.", NotTrainedWarning)
    assert isinstance(model.objective, Task)
    return model.objective


def learned_labels_of(model: FittedModel, cells: Cells) -> np.ndarray:
    """Return a mask of the cells whose labels the model learned from in any fine-tuning, bool, shape (N,).

    Cells are recognized by their counts, or by their names if the measured genes differ from those in fine-tuning.
    """
    learned = model.learned
    if learned is None:
        return np.zeros(len(cells), dtype=bool)
    marks = CellFingerprints.of(cells)
    _warn_of_undecided(marks.undecided(learned))
    return marks.among(learned)


def rows_to_score(
    model: FittedModel, cells: Cells, marks: CellFingerprints | None, *, within: bool
) -> tuple[np.ndarray, Split | None]:
    """Return the rows of cells that the model did not learn from, and the split if it applies to these cells."""
    if model.seen is None or marks is None:
        return np.arange(len(cells)), None
    seen, split = model.seen, model.seen.split_of(marks.numbers)
    task: Any = model.objective  # of a fine-tuned model
    scored_by_labels = task.learns_labels or getattr(task, "labels_key", None) is not None
    of_others = seen.learned if scored_by_labels else CellFingerprints.none()
    learned, unclear = marks.among(of_others), marks.undecided(of_others)
    if split is not None and (within or len(marks) == len(seen.numbers)):
        if not len(split.test):
            # load_query_data has no test_size.
            more = "" if model.is_query else ", or fine-tune with test_size=0.1"
            raise OptionError(f"fine-tuning held out no test cells; pass other cells{more}.")
        rows = split.test[~learned[split.test]]
        n_learned, n_all, what = int(learned[split.test].sum()), len(split.test), "fine-tuning test cells"
    else:
        learned |= marks.among(seen.trained)
        unclear |= marks.undecided(seen.trained)
        rows = np.flatnonzero(seen.tested(marks.numbers) & ~learned if within else ~learned)
        n_learned, n_all, what = int(learned.sum()), len(learned), "cells"
    if not len(rows):
        raise OptionError(f"the model learned from {n_learned} of these {n_all} {what}; pass other cells.")
    if n_learned:
        warn(f"The model learned from {n_learned} of the {n_all} {what}; these cells are not scored.")
    _warn_of_undecided(unclear[rows])
    return rows, split


def _warn_of_undecided(unclear: np.ndarray) -> None:
    """Warn about cells that may have been used as training cells in fine-tuning."""
    if unclear.any():
        n_unclear = f"{int(unclear.sum())} of the {len(unclear)} cells"
        warn(
            f"{n_unclear} may have been used for fine-tuning; this cannot be checked, because they have other genes "
            "and no cell names to compare."
        )


def parts_for_baselines(
    model: Model, base: Model | None, source: Any, cells: Cells, split: Split | None, batch_size: int, *, needed: bool
) -> dict[str, Any]:
    """Return the parts of an EvaluationContext that baselines are trained on and scored with.

    `split` is that of the fine-tuning if `source`, opened as `cells`, are its cells.
    """
    fitted, own = model.fitted, training_source(model)
    if split is not None:
        own = source  # the cells of the fine-tuning, maybe in another object
    own_cells = cells if own is None or source is own else model.open_cells(own)
    if own is not None and source is not own:
        split = fitted.split_of(own_cells)
    has_own = own is not None and split is not None
    if needed and not has_own:
        warn(
            "The cells used for fine-tuning are not available, so there are no baselines; load the model with these "
            "cells."
        )

    def by_base(given: Any, opened: Cells) -> Predictor | None:
        if base is None:
            return None
        is_same = base.fitted.spec.vocab is fitted.spec.vocab
        return base.fitted.predictor(base.open_cells(opened if is_same else given), batch_size)

    def over_all_genes(given: Any, vocab: GeneVocab | None) -> Cells:
        if vocab is not None:
            return model.open_cells(given, vocab=vocab, min_overlap=0.0)
        return model.open_cells(given, vocab=None) if isinstance(given, AnnData) else model.open_cells(given)

    # Baselines use all genes over which the scored cells and those of the fine-tuning were opened.
    genes = None if isinstance(source, AnnData | str | os.PathLike) else source.vocab
    train_cells = over_all_genes(own, genes) if has_own else None
    scored_cells = train_cells or cells
    if train_cells is not None and source is not own:
        scored_cells = over_all_genes(source, train_cells.vocab)
    return {
        "train": fitted.predictor(own_cells, batch_size) if has_own else None,
        "train_rows": split.train if has_own and split is not None else None,
        "base": by_base(source, cells),
        "base_train": by_base(own, own_cells) if has_own else None,
        "cells": scored_cells,
        "train_cells": train_cells,
        "baselines": needed and has_own,
    }


def verdict(evaluated: Evaluated, place: str) -> str:
    """Return a sentence on the differences of the main score from all baselines; `place` has the others."""
    table = evaluated.tables["differences"]
    score = next(name for name in ("macro_f1", *table["score"]) if name in set(table["score"]))
    lines = table[table["score"] == score]
    parts = (
        f"{line.difference:+.3f} from {line.method}"
        + (f" ({line.low:+.3f} to {line.high:+.3f}, {line.verdict})" if line.verdict else " (no interval)")
        for line in lines.itertuples()
    )
    return f"{score} of scforge, difference and 95% interval: {'; '.join(parts)}. All scores: {place}."
