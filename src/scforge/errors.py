"""The exception family of scforge.

Each message is one sentence that names the argument, its value and the fix. The command line prints it as one line
on stderr and exits with code 2; from Python it is an exception that also is the builtin one a caller would expect.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "DataError",
    "GeneMismatchError",
    "HubError",
    "MissingFileError",
    "ModelFileError",
    "NotTrainedWarning",
    "OptionError",
    "ScforgeError",
    "ScforgeWarning",
    "TrainingError",
    "did_you_mean",
    "first_line",
    "listing",
]


class ScforgeError(Exception):
    """Base of every error that scforge raises for a mistake the user can mend."""


class ConfigError(ScforgeError, ValueError):
    """A configuration file or override that cannot be used."""


class DataError(ScforgeError, ValueError):
    """Cells, counts, genes or columns that cannot be used."""


class GeneMismatchError(DataError):
    """The genes of the data do not fit the vocabulary of the model."""


class HubError(ScforgeError, OSError):
    """A hub of models that cannot be reached, or fails."""


class OptionError(ScforgeError, ValueError):
    """An unknown name or an unusable value of an argument."""


class MissingFileError(ScforgeError, FileNotFoundError):
    """A file or folder that is not there."""


class ModelFileError(ScforgeError, ValueError):
    """A model folder with a missing, foreign or corrupted file."""


class TrainingError(ScforgeError, RuntimeError):
    """A training run that cannot go on, e.g. because the loss is not a number."""


class ScforgeWarning(UserWarning):
    """Something worth knowing that does not stop the work."""


class NotTrainedWarning(ScforgeWarning):
    """A result of a model that was never trained."""


def listing(names: Iterable[object], *, most: int = 12) -> str:
    """Return names as ``'a', 'b', 'c', ...``, cut after `most`."""
    shown = [repr(str(name)) for name in names]
    if not shown:
        return "nothing"
    tail = f", ... ({len(shown) - most} more)" if len(shown) > most else ""
    return ", ".join(shown[:most]) + tail


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name nearest to `name`, or an empty string."""
    candidates = {str(k).lower(): str(k) for k in known}
    near = difflib.get_close_matches(str(name).lower(), list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {candidates[near[0]]!r}?" if near else ""


def first_line(error: Exception) -> str:
    """Return what an error of another library says, for a sentence around it: one line without its full stop.

    Examples
    --------
    >>> first_line(KeyError("no such part.")), first_line(ValueError())
    ('no such part', 'ValueError')
    """
    # The text of a KeyError is the repr of its message.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
