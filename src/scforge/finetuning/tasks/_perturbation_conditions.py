"""Which perturbation, in which context, a cell is of, and which perturbations are held out.

Shapes: N cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scforge.data.perturbation import PerturbationKeys, parse_perturbations
from scforge.errors import DataError, OptionError, did_you_mean, listing
from scforge.finetuning.labels import text_labels
from scforge.finetuning.splits import Split, check_shares

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ALL", "CONTROL", "UNLABELLED", "Conditions", "hold_out"]

CONTROL, UNLABELLED = -1, -2
"""Codes of control cells, and of cells without a label."""

ALL = "all"
"""Name of the context where there is one only."""

_TEST_CONTROLS = 1 / 3


@dataclass(frozen=True)
class Conditions:
    """Perturbation and context of cells.

    Attributes
    ----------
    names
        Names of the perturbations, with sorted parts.
    targets
        Targets of each.
    contexts
        Names of the contexts.
    perturbation
        Number of the perturbation of each cell, -1 for controls, -2 for cells without a label, int64, shape (N,).
    context
        Number of the context of each cell, int64, shape (N,); that of a cell without one is -2, and so is its
        `perturbation`.
    """

    names: tuple[str, ...]
    targets: tuple[tuple[str, ...], ...]
    contexts: tuple[str, ...]
    perturbation: np.ndarray
    context: np.ndarray

    @classmethod
    def read(
        cls,
        column: Callable[[str], pd.Series],
        *,
        perturbation_key: str,
        control: str,
        separator: str | None,
        context_key: str | None,
    ) -> Conditions:
        """Read them out of columns of obs.

        Raises
        ------
        DataError
            If a column is missing, cannot be read, or has no control.
        """
        import pandas as pd

        labels = column(perturbation_key)
        labelled = np.asarray(labels.notna())
        context = np.zeros(len(labels), dtype=np.int64)
        contexts: tuple[str, ...] = (ALL,)
        if context_key is not None:
            of_cells = text_labels(column(context_key), key=context_key, argument="context_key")
            context = np.array(of_cells.codes, dtype=np.int64)
            contexts = tuple(str(name) for name in of_cells.categories)
            labelled = labelled & (context >= 0)
        keys = PerturbationKeys(perturbation_key, control=control, separator=separator)
        parsed = parse_perturbations(pd.DataFrame({perturbation_key: labels[labelled]}), keys)
        targets = sorted(set(parsed.targets) - {()})
        number = {some: i for i, some in enumerate(targets)} | {(): CONTROL}
        perturbation = np.full(len(labels), UNLABELLED, dtype=np.int64)
        perturbation[labelled] = [number[some] for some in parsed.targets]
        context[~labelled] = UNLABELLED
        names = tuple((separator or "+").join(some) for some in targets)
        return cls(names, tuple(targets), contexts, perturbation, context)

    @property
    def usable(self) -> np.ndarray:
        """Cells with a label, bool, shape (N,)."""
        return self.perturbation != UNLABELLED

    @property
    def perturbed(self) -> np.ndarray:
        """Perturbed cells, bool, shape (N,)."""
        return self.perturbation >= 0

    @property
    def controls(self) -> np.ndarray:
        """Control cells, bool, shape (N,)."""
        return self.perturbation == CONTROL

    def pairs(self, rows: np.ndarray) -> dict[str, list[str]]:
        """Return the perturbations of cells, and the contexts in which each is."""
        rows = rows[self.perturbation[rows] >= 0]
        found = np.unique(np.stack([self.perturbation[rows], self.context[rows]], axis=1), axis=0)
        pairs: dict[str, list[str]] = {}
        for perturbation, context in found.tolist():
            pairs.setdefault(self.names[perturbation], []).append(self.contexts[context])
        return pairs


def hold_out(
    conditions: Conditions,
    *,
    by_context: bool,
    named: Sequence[str] | None,
    argument: str,
    known: Callable[[str], bool] | None,
    validation_size: float,
    test_size: float,
    seed: int,
) -> Split:
    """Hold out whole perturbations, or whole contexts.

    A third of the controls of each context is tested against; all are of the training if nothing is tested.

    Parameters
    ----------
    conditions
        Of all cells.
    by_context
        Hold out contexts, rather than perturbations.
    named
        Names of what is tested; None draws a share of `test_size`.
    argument
        What `named` is called in messages.
    known
        Says whether a target has a vector without being seen in training, e.g. because it is a gene of the model.
        Others are drawn only while a perturbation with the same target is left. None: all are.
    validation_size, test_size
        Shares of the perturbations, or contexts; at least one each if above 0, and of validation only if two are left.
    seed
        Of what is drawn.

    Raises
    ------
    OptionError
        If a name is unknown, or nothing is left to train on.
    DataError
        If no cell is perturbed, or a context has too few controls.
    """
    check_shares(validation_size, test_size)
    names = conditions.contexts if by_context else conditions.names
    known = None if by_context else known
    codes = np.where(conditions.perturbed, conditions.context if by_context else conditions.perturbation, UNLABELLED)
    present = [int(code) for code in np.unique(codes[codes >= 0])]
    what = "context" if by_context else "perturbation"
    if not present:
        raise DataError("no cell is perturbed, all are controls; there is nothing to learn from.")
    rng = np.random.default_rng(seed)
    order = [int(code) for code in rng.permutation(present)]
    if named is None:
        test = _draw(order, test_size, len(present), known, conditions.targets)
    else:
        test = _numbers(names, present, named, argument)
    rest = [code for code in order if code not in test]
    if not rest or (named is None and test_size and not test):
        raise OptionError(
            f"holding out {listing(names[code] for code in test or order)} leaves no {what} to train on (there is: "
            f"{listing(names[code] for code in present)}); name fewer in {argument}, or set test_size=0 to train on "
            "all."
        )
    validation: list[int] = []
    if len(rest) > 1:
        validation = _draw(rest, validation_size, len(present), known, conditions.targets)
    train = [code for code in rest if code not in validation]
    assert train
    assert len({*train, *validation, *test}) == len(train) + len(validation) + len(test) == len(present)
    input_controls, test_controls = _split_controls(conditions, rng)
    if not test:
        # Nothing is tested against them.
        input_controls = conditions.controls
    parts = [np.isin(codes, some) for some in (train, validation, test)]
    return Split(
        train=np.flatnonzero(parts[0] | input_controls),
        validation=np.flatnonzero(parts[1]),
        test=np.flatnonzero(parts[2] | test_controls) if test else np.empty(0, dtype=np.int64),
    )


def _numbers(names: Sequence[str], present: list[int], named: Sequence[str], argument: str) -> list[int]:
    number = {names[code]: code for code in present}
    for name in named:
        if name not in number:
            raise OptionError(
                f"{argument} names {name!r}, which no perturbed cell has{did_you_mean(name, number)} "
                f"(there is: {listing(number)})"
            )
    return sorted({number[name] for name in named})


def _draw(
    order: list[int], share: float, n_all: int, known: Callable[[str], bool] | None, targets: Sequence[tuple[str, ...]]
) -> list[int]:
    """Take a share of all from the front of `order`, at least one, and leave at least one."""
    wanted = min(max(1, round(share * n_all)), len(order) - 1) if share else 0
    if known is None:
        return order[:wanted]
    drawn: list[int] = []
    for code in order:
        if len(drawn) == wanted:
            break
        unknown = {target for target in targets[code] if not known(target)}
        left = [targets[other] for other in order if other not in {code, *drawn}]
        if unknown <= {target for some in left for target in some}:
            drawn.append(code)
    return drawn


def _split_controls(conditions: Conditions, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return which controls are inputs of the training, and which are tested against, bool, shape (N,)."""
    tested = np.zeros(len(conditions.perturbation), dtype=bool)
    few = []
    for code, name in enumerate(conditions.contexts):
        rows = np.flatnonzero(conditions.controls & (conditions.context == code))
        if len(rows) < 2 and (conditions.perturbed & (conditions.context == code)).any():
            few.append(name)
        tested[rng.permutation(rows)[: round(len(rows) * _TEST_CONTROLS) or len(rows) // 2]] = True
    if few:
        raise DataError(
            f"the contexts {listing(few)} have fewer than 2 control cells, so that effects cannot be measured there; "
            "leave their cells out, or choose another context_key."
        )
    return conditions.controls & ~tested, tested
