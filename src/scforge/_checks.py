"""Checks of numbers that a user hands in."""

from __future__ import annotations

import math
import numbers
from typing import Any

from scforge.errors import OptionError

__all__ = ["check_count", "check_positive"]


def check_count(argument: str, value: Any, what: str, *, least: int = 1) -> None:
    """Raise unless `value` is a whole number of at least `least`; `what` names what it counts.

    Examples
    --------
    >>> check_count("batch_size", 0, "cells")
    Traceback (most recent call last):
        ...
    scforge.errors.OptionError: batch_size=0 is not a positive number of cells.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole:
        raise OptionError(f"{argument}={value!r} is not a whole number of {what}.")
    if value >= least:
        return
    limit = "a positive number" if least == 1 else f"at least {least}; give a number"
    raise OptionError(f"{argument}={value!r} is not {limit} of {what}.")


def check_positive(argument: str, value: Any, *, or_zero: bool = False) -> None:
    """Raise unless `value` is a finite number above zero, or zero where that is allowed."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not or_zero):
        raise OptionError(f"{argument}={value!r} is not {'zero or ' if or_zero else ''}a positive number.")
