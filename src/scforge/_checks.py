"""Check numbers and names given by users."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scforge.errors import DataError, OptionError, ScforgeError, suggest


def check_count(argument: str, value: Any, what: str, *, least: int = 1) -> int:
    """Return `value`. Raises an error if it is not an integer of at least `least`; `what` names the counted items.

    Examples
    --------
    >>> check_count("batch_size", 0, "cells")
    Traceback (most recent call last):
        ...
    scforge.errors.OptionError: batch_size=0 is not a positive number of cells.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole:
        raise OptionError(f"is not a whole number{what and f' of {what}'}.", argument=argument, value=value)
    if value >= least:
        return int(value)
    if least == 1:
        raise OptionError(f"is not a positive number of {what}.", argument=argument, value=value)
    raise OptionError(f"is too small; pass at least {least}{what and f' {what}'}.", argument=argument, value=value)


def check_positive(argument: str, value: Any, *, or_zero: bool = False, hint: str = "") -> float:
    """Return `value`. Raises an error if it is not a positive number (or zero, if `or_zero`); `hint` is advice."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not or_zero):
        raise OptionError(
            f"must be {'zero or ' if or_zero else ''}a positive number{hint and f'; {hint}'}.",
            argument=argument,
            value=value,
        )
    return float(value)


def check_mask_ratio(value: Any) -> None:
    """Raise an error if `value` is not a fraction between 0 and 1, a list of fractions, or a schedule.

    Examples
    --------
    >>> check_mask_ratio([0.25, 0.5, 0.75])
    >>> check_mask_ratio({"start": 0.15, "end": 1.5, "epochs": 10})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    scforge.errors.OptionError: mask_ratio={'start': 0.15, 'end': 1.5, 'epochs': 10} is not a valid schedule; ...
    """
    if isinstance(value, Mapping):
        epochs = value.get("epochs")
        whole = isinstance(epochs, numbers.Integral) and not isinstance(epochs, bool) and int(epochs) >= 1
        shape = value.get("shape", "linear") in ("linear", "cosine")
        ends = _is_share(value.get("start")) and _is_share(value.get("end"))
        if not (whole and shape and ends and set(value) <= {"start", "end", "epochs", "shape"}):
            raise OptionError(
                "is not a valid schedule; pass start and end between 0 and 1, a number of "
                "epochs, and optionally a shape ('linear' or 'cosine').",
                mask_ratio=dict(value),
            )
    elif isinstance(value, Sequence) and not isinstance(value, str):
        if not value or not all(_is_share(share) for share in value):
            raise OptionError("is not a list of fractions between 0 and 1.", mask_ratio=list(value))
    elif not _is_share(value):
        raise OptionError("is not between 0 and 1.", mask_ratio=value)


def _is_share(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < float(value) < 1


def check_bool(argument: str, value: Any) -> bool:
    """Return `value`. Raises an error if it is not True or False, because the text "false" is truthy in Python.

    Examples
    --------
    >>> check_bool("append_cls", "false")
    Traceback (most recent call last):
        ...
    scforge.errors.OptionError: append_cls='false' must be True or False.
    """
    if not isinstance(value, bool):
        raise OptionError("must be True or False.", argument=argument, value=value)
    return value


def check_seed(value: Any) -> int:
    """Return a seed as a Python integer. Raises an error if it is not an integer from 0 to 2^63 - 1."""
    check_count("seed", value, "", least=0)
    if value >= 2**63:
        raise OptionError("is too large; pass a number below 2^63.", seed=value)
    return int(value)


def check_share(argument: str, value: Any) -> float:
    """Return `value` as a float. Raises an error if it is not a number from 0 to 1."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 <= float(value) <= 1:
        raise OptionError("is not a number from 0 to 1.", argument=argument, value=value)
    return float(value)


def check_choice(argument: str, value: Any, known: Iterable[object]) -> str:
    """Return `value`. Raises an error if it is not one of `known`."""
    choices = list(known)
    if value not in choices:
        raise OptionError(f"is not known{suggest(value, choices)}", argument=argument, value=value)
    return str(value)


def check_key(argument: str, key: Any) -> None:
    """Raise an OptionError if a key, unless it is None, cannot be written to an h5ad file."""
    if key is None or (isinstance(key, str) and key and "/" not in key):
        return
    if isinstance(key, str) and key:
        raise OptionError(
            "contains a slash, which h5ad files do not allow; use another name.", argument=argument, value=key
        )
    raise OptionError("is not a name; pass text that is not empty.", argument=argument, value=key)


def check_known(
    argument: str,
    name: object,
    known: Iterable[object],
    where: str,
    *,
    fix: str = "",
    error: type[ScforgeError] = DataError,
) -> None:
    """Raise `error` if a name is not one of the `known` names in `where`; `fix` is advice.

    Examples
    --------
    >>> check_known("color", "celltype", ["cell_type"], "obs")
    Traceback (most recent call last):
        ...
    scforge.errors.DataError: color='celltype' is not in obs; did you mean 'cell_type'? (available: 'cell_type').
    """
    names = [choice for choice in known if choice is not None]
    if name not in names:
        end = f"; {fix}." if fix else "."
        raise error(f"is not in {where}{suggest(name, names, 'available')}{end}", argument=argument, value=name)
