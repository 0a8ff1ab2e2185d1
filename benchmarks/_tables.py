"""Tables of the documentation that are made from results: where they are in a page, and how differences read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats


def rewrite(page: Path, name: str, table: Callable[[str], str]) -> int:
    """Write `table` of the argument behind each comment '% NAME ARGUMENT' or '<!-- NAME ARGUMENT -->' of a page.

    It takes the place of the table that is there. Returns the number of comments.
    """
    text, n = re.subn(
        rf"(?m)^(?P<comment>(?:% |<!-- ){name}(?: (?P<argument>\w+))?(?: -->)?)\n+(?:\|.*\n)*\n*",
        lambda found: f"{found['comment']}\n\n{table(found['argument'] or '')}\n\n",
        page.read_text(),
    )
    page.write_text(text.rstrip("\n") + "\n")
    return n


def difference(values: pd.Series) -> str:
    """Return the mean of paired differences with its 95 % interval, and whether this includes 0."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std() / np.sqrt(len(values))
    verdict = "tie" if not abs(values.mean()) > half else "better" if values.mean() > 0 else "worse"
    return f"{values.mean():+.3f} ± {half:.3f}, {verdict}"
