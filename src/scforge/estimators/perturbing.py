"""What a front class says of genes whose counts are changed.

Shapes: N cells, G genes of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scforge.errors import DataError, OptionError, listing, warn
from scforge.insilico.screening import Perturbation
from scforge.training.predict import embed

if TYPE_CHECKING:
    from scforge.data.cells import Cells
    from scforge.estimators.base import CellModel


USUAL_CELLS = 10_000
"""Cells that usual counts are taken from."""

_HIGH_FDR = 0.1


def untrained(model: CellModel, batch_size: int) -> Callable[[Cells], np.ndarray]:
    """Return what embeds cells with the architecture of a model and random weights."""
    module, tokenizer = model.spec.build_untrained(seed=0)
    module.to(next(model.module.parameters()).device)
    return partial(embed, module, tokenizer=tokenizer, objective=model.spec.build_pretraining(), batch_size=batch_size)


def lowest_fdr(results: pd.DataFrame, n_controls: int) -> float:
    """Return the false discovery rate of a test that alone has the lowest p-value there can be; warn if it is high."""
    p_values = results["goal_p_value" if "goal_p_value" in results else "p_value"]
    n_tests, sides = int(p_values.notna().sum()), 2 if "goal_p_value" in results else 1
    lowest = min(1.0, sides * n_tests / (n_controls + 1))
    if not any(name.endswith("untrained") for name in results):
        warn(
            "Genes are compared with genes of similar mean expression, not of a similar dose; markers stand out in a "
            "network with random weights as well; compare z-scores with those of untrained=True."
        )
    if lowest > _HIGH_FDR:
        warn(
            f"With {n_tests} tests and n_permutations={n_controls} the fdr of a gene that stands out alone is at least "
            f"{lowest:.2g}; raise n_permutations to {math.ceil(sides * n_tests / _HIGH_FDR)} or test fewer genes."
        )
    return lowest


def starting(chosen: np.ndarray | None, there: np.ndarray | None, n_cells: int) -> np.ndarray:
    """Return the cells to perturb, bool, shape (N,)."""
    if chosen is None:
        chosen = np.ones(n_cells, dtype=np.bool_) if there is None else ~there
    elif there is not None and (chosen & there).any():
        raise OptionError("start and goal share cells, which are there already; choose others.")
    if not chosen.any():
        raise DataError("all cells are at the goal, so none is left to perturb; name cells with start=...")
    return chosen


def check_activated(perturbation: Perturbation, numbers: np.ndarray, genes: Sequence[str]) -> None:
    """Raise if nothing tells what is usual for a gene to activate."""
    if perturbation.shares is None:
        return
    silent = [genes[number] for number in numbers if np.isnan(perturbation.shares[number])]
    if silent:
        raise DataError(
            f"mode='activate' gives genes the counts that are usual, but no cell expresses {listing(silent, most=5)}; "
            "leave them out, or choose mode='overexpress'."
        )
