"""Progress messages for long tasks."""

from __future__ import annotations

import datetime
import logging
import sys

from scforge._text import printable

logger = logging.getLogger("scforge")


def announce(text: str) -> None:
    """Log a line if logging is configured, and otherwise print it."""
    if (logger.hasHandlers() and logger.isEnabledFor(logging.INFO)) or logger.level:
        logger.info("%s", text)
    else:
        # Notebooks color stderr like errors.
        print(printable(text), file=sys.stdout if in_notebook() else sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Return a wall time in a readable format.

    Examples
    --------
    >>> duration(0.26), duration(42.4), duration(425)
    ('0.3 s', '42 s', '0:07:05')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 100 else str(datetime.timedelta(seconds=round(seconds)))


def in_notebook() -> bool:
    """Return whether the code runs in a notebook kernel."""
    return "ipykernel" in sys.modules
