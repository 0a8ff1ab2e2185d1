"""Which cell was perturbed with what: columns of obs read the way pertpy writes them.

Shapes: N cells, T targets (genes or drugs that were perturbed), Z pairs of a cell and one of its targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scforge.data.sampling import ranges
from scforge.errors import DataError, suggest

if TYPE_CHECKING:
    import pandas as pd
    from scipy import sparse


@dataclass(frozen=True)
class PerturbationKeys:
    """Where obs says how a cell was perturbed.

    Attributes
    ----------
    perturbation
        Column with the label of the perturbation, pertpy's `target_col`.
    control
        Label of cells without perturbation, pertpy's `reference_key`, e.g. ``"control"``, ``"NT"`` or ``"ctrl"``.
    dose
        Column with the dose, pertpy's `dose_col`: a number, or one number for each part of a combination.
    separator
        What joins the parts of a combination, pertpy's `sep`. None: labels are never taken apart, e.g. because names
        of drugs have a plus sign, as ``"(+)-JQ1"``.

    Examples
    --------
    >>> PerturbationKeys("gene", control="ctrl")
    PerturbationKeys(perturbation='gene', control='ctrl', dose=None, separator='+')
    >>> PerturbationKeys("drug", control="DMSO", dose="dose_um", separator=None).dose
    'dose_um'
    """

    perturbation: str
    control: str
    dose: str | None = None
    separator: str | None = "+"


@dataclass(frozen=True)
class ParsedPerturbations:
    """The targets of cells.

    Attributes
    ----------
    names
        Names of all targets, sorted.
    matrix
        1 where a cell was perturbed at a target, CSR, float32, shape (N, T). Rows of control cells are empty.
    is_control
        True for cells without perturbation, bool, shape (N,).
    dose
        Dose of each entry of `matrix`, in the unit of obs, float64, shape (Z,); None without a column of doses.

    Examples
    --------
    >>> import pandas as pd
    >>> obs = pd.DataFrame({"drug": ["DMSO", "A+B", "A"], "dose": ["", "1+10", "5"]})
    >>> parsed = parse_perturbations(obs, PerturbationKeys("drug", control="DMSO", dose="dose"))
    >>> parsed.names, parsed.matrix.toarray().tolist(), parsed.dose.tolist(), parsed.n_targets.tolist()
    (('A', 'B'), [[0.0, 0.0], [1.0, 1.0], [1.0, 0.0]], [1.0, 10.0, 5.0], [0, 2, 1])
    """

    names: tuple[str, ...]
    matrix: sparse.csr_matrix
    is_control: np.ndarray
    dose: np.ndarray | None

    def __len__(self) -> int:
        return self.matrix.shape[0]

    @property
    def n_targets(self) -> np.ndarray:
        """Number of targets of each cell, 0 for controls, int64, shape (N,)."""
        return np.diff(self.matrix.indptr).astype(np.int64)

    @property
    def targets(self) -> list[tuple[str, ...]]:
        """Targets of each cell, sorted; empty for controls."""
        ends, indices = self.matrix.indptr.tolist(), self.matrix.indices.tolist()
        known: dict[tuple[int, ...], tuple[str, ...]] = {}
        found = []
        for start, end in zip(ends[:-1], ends[1:], strict=True):
            key = tuple(indices[start:end])
            if key not in known:
                known[key] = tuple(self.names[index] for index in key)
            found.append(known[key])
        return found


def parse_perturbations(obs: pd.DataFrame, keys: PerturbationKeys) -> ParsedPerturbations:
    """Read the targets of cells out of obs.

    The conventions are those of pertpy: one column holds the label, one of the labels is the control, the parts of a
    combination are joined by ``"+"`` (``GuideAssignment``, ``PerturbationSpace.add`` and ``.evaluate_combinations``),
    and control cells have no dose of their own (``PerturbationSpace.dose_response``). Labels that pertpy knows nothing
    special about, e.g. ``"negative"`` and ``"multiple"`` of its ``GuideAssignment``, are targets like others: remove
    such cells first. Beyond pertpy, a part that is the control is no target, so ``"KLF1+ctrl"`` is KLF1 alone, blanks
    around parts do not count, and the order of the parts does not matter.

    Parameters
    ----------
    obs
        Table of cells, e.g. ``adata.obs``.
    keys
        Its columns.

    Returns
    -------
    The targets, the control cells and the doses.

    Raises
    ------
    DataError
        If a column is missing, no cell has the control label, a cell has no label, a label has an empty part, or the
        dose of a perturbed cell is missing, negative or not one number a part.

    Examples
    --------
    >>> import pandas as pd
    >>> obs = pd.DataFrame({"gene": ["KLF1+ctrl", "ctrl", "KLF1+BAK1"]})
    >>> parsed = parse_perturbations(obs, PerturbationKeys("gene", control="ctrl"))
    >>> parsed.targets
    [('KLF1',), (), ('BAK1', 'KLF1')]
    >>> parsed.is_control.tolist()
    [False, True, False]
    """
    from scipy import sparse

    codes, labels = _labels(obs, keys)
    parts = [_parts(label, keys) for label in labels]
    if not any(keys.control in some for some in parts):
        known = sorted({part for some in parts for part in some})
        raise DataError(
            f"control={keys.control!r} is no label of obs[{keys.perturbation!r}]"
            f"{suggest(keys.control, known, 'it has')}"
        )
    names = sorted({part for some in parts for part in some} - {keys.control})
    index = {name: number for number, name in enumerate(names)}
    targets = [sorted({index[part] for part in some if part != keys.control}) for some in parts]
    if keys.dose is None:
        doses = None
    else:
        codes, parts, targets, doses = _with_doses(obs, keys, codes, parts, index)
    n_targets = np.array([len(some) for some in targets], dtype=np.int64)
    starts = np.cumsum(n_targets) - n_targets
    taken = ranges(starts[codes], n_targets[codes])
    flat = np.array([target for some in targets for target in some], dtype=np.int32)
    indptr = np.concatenate([[0], np.cumsum(n_targets[codes])])
    matrix = sparse.csr_matrix(
        (np.ones(len(taken), dtype=np.float32), flat[taken], indptr), shape=(len(codes), len(names))
    )
    return ParsedPerturbations(
        names=tuple(names),
        matrix=matrix,
        is_control=n_targets[codes] == 0,
        dose=None if doses is None else doses[taken],
    )


def _column(obs: pd.DataFrame, key: str, argument: str) -> tuple[np.ndarray, list[object]]:
    """Return the code of the value of each cell, -1 where it is missing, and the values."""
    import pandas as pd

    if key not in obs:
        raise DataError(f"{argument}={key!r} is not a column of obs{suggest(key, obs.columns, 'obs has')}")
    codes, values = pd.factorize(obs[key])
    return codes, list(values)


def _labels(obs: pd.DataFrame, keys: PerturbationKeys) -> tuple[np.ndarray, list[str]]:
    codes, values = _column(obs, keys.perturbation, "perturbation")
    if len(missing := np.flatnonzero(codes < 0)):
        raise DataError(
            f"obs[{keys.perturbation!r}] has no label for {len(missing)} of {len(codes)} cells (first: "
            f"{str(obs.index[missing[0]])!r}); label them, e.g. as {keys.control!r}, or remove them."
        )
    return codes, [str(value).strip() for value in values]


def _parts(label: str, keys: PerturbationKeys) -> list[str]:
    """Take a label apart."""
    # The control itself may have the separator in its name.
    if keys.separator is None or label == keys.control:
        parts = [label]
    else:
        parts = [part.strip() for part in label.split(keys.separator)]
    cut = any(part.count("(") != part.count(")") for part in parts) and label.count("(") == label.count(")")
    if cut or not all(parts):
        raise DataError(
            f"obs[{keys.perturbation!r}] has the label {label!r}, which separator={keys.separator!r} cuts "
            f"{'within brackets' if cut else 'into parts that are empty'}; mend it, or use another separator, or None."
        )
    return parts


def _with_doses(
    obs: pd.DataFrame, keys: PerturbationKeys, codes: np.ndarray, parts: list[list[str]], index: dict[str, int]
) -> tuple[np.ndarray, list[list[str]], list[list[int]], np.ndarray]:
    """Return the code of label and dose of each cell and, for each such pair, its parts, targets and their doses."""
    assert keys.dose is not None
    dose_codes, values = _column(obs, keys.dose, "dose")
    # One more than there are values, for the missing one.
    pairs, codes = np.unique(codes * (len(values) + 1) + dose_codes + 1, return_inverse=True)
    all_parts: list[list[str]] = []
    all_targets: list[list[int]] = []
    doses: list[float] = []
    for pair in pairs.tolist():
        label, dose = divmod(pair, len(values) + 1)
        some = parts[label]
        found = _doses(values[dose - 1] if dose else None, some, keys)
        all_parts.append(some)
        all_targets.append(sorted(index[name] for name in found))
        doses.extend(found[name] for name in sorted(found))
    return codes, all_parts, all_targets, np.array(doses, dtype=np.float64)


def _doses(value: object, parts: list[str], keys: PerturbationKeys) -> dict[str, float]:
    """Return the dose of each target."""
    targets = [part for part in parts if part != keys.control]
    if not targets:
        return {}
    name = (keys.separator or "+").join(parts)
    if len(set(targets)) < len(targets):
        raise DataError(f"obs[{keys.perturbation!r}] has the label {name!r}, which needs one dose for one target.")
    texts = [] if value is None else [str(value)]
    if texts and keys.separator is not None and len(parts) > 1:
        texts = [text.strip() for text in texts[0].split(keys.separator)]
    # The control part of "KLF1+ctrl" may have a dose of its own.
    named = parts if len(texts) == len(parts) else targets
    if len(texts) != len(named):
        raise DataError(
            f"obs[{keys.dose!r}] is {value!r} for the perturbation {name!r}; give {len(targets)} doses, joined by "
            f"{keys.separator!r}."
            if value is not None
            else f"obs[{keys.dose!r}] has no value for cells with the perturbation {name!r}; give their dose."
        )
    return {part: _number(text, name, keys) for part, text in zip(named, texts, strict=True) if part != keys.control}


def _number(text: str, name: str, keys: PerturbationKeys) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise DataError(
            f"obs[{keys.dose!r}] is {text!r} for the perturbation {name!r}, not zero or a positive number; mend it."
        )
    return number
