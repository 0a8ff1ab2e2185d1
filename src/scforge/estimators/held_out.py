"""Which cells a fine-tuned model may be scored on, and which it has learned from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scforge.errors import warn
from scforge.finetuning.base import Task

if TYPE_CHECKING:
    pass


def is_scored_by_labels(task: Task) -> bool:
    return task.learns_labels or getattr(task, "labels_key", None) is not None


def warn_of_undecided(unclear: np.ndarray) -> None:
    if unclear.any():
        warn(
            f"{int(unclear.sum())} of the {len(unclear)} cells may be cells of a fine-tuning: other genes are missing "
            "in one of the two, so counts do not tell, and there are no names of cells to compare; pass cells that "
            "the model did not see."
        )
