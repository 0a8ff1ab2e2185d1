"""Sets of labels of cells, from one column of text or from a column a label.

Shapes: N cells, C labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge.errors import DataError, OptionError
from scforge.finetuning.labels import check_key

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LabelSets"]

type Column = Callable[[str], pd.Series]


@dataclass(frozen=True)
class LabelSets:
    """Where the labels of cells stand.

    Attributes
    ----------
    keys
        Columns with truth values, one a label; None if there is one column of text.
    key
        The column of text.
    separator
        What stands between labels in it.
    """

    keys: list[str] | None
    key: str | None
    separator: str

    @classmethod
    def of(cls, keys: Any, key: Any, separator: Any) -> LabelSets:
        """Check the options of a task.

        Raises
        ------
        OptionError
            Unless one of `keys` and `key` is given, and can be used.
        """
        if (keys is None) == (key is None):
            raise OptionError(
                f"labels_keys={keys!r} and labels_key={key!r}: give either columns of truth values, or one column of "
                "text."
            )
        if not isinstance(separator, str) or not separator.strip():
            raise OptionError(f"separator={separator!r} is not a text that can stand between labels.")
        if keys is None:
            return cls(None, check_key("labels_key", key), separator)
        if isinstance(keys, str) or not isinstance(keys, Sequence) or not keys:
            raise OptionError(f"labels_keys={keys!r} is not a list of columns of obs.")
        if len(set(keys)) < len(keys):
            raise OptionError(f"labels_keys={list(keys)!r} names a column twice; name each once.")
        return cls([check_key("labels_keys", one) for one in keys], None, separator)

    @property
    def argument(self) -> str:
        """What to call it in messages."""
        return f"labels_key={self.key!r}" if self.keys is None else f"labels_keys={self.keys!r}"

    def known(self, column: Column) -> np.ndarray:
        """Return which cells have values, bool, shape (N,)."""
        keys = [self.key] if self.keys is None else self.keys
        return np.all([np.asarray(column(str(key)).notna()) for key in keys], axis=0)

    def names(self, column: Column) -> list[str]:
        """Return the labels that occur, sorted; of columns of truth values their names."""
        if self.keys is not None:
            return list(self.keys)
        return sorted({label for value in column(str(self.key)).dropna().unique() for label in self._split(value)})

    def targets(self, column: Column, classes: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return whether each cell has each label, whether it has values, and whether it has labels not in `classes`.

        Returns
        -------
        Bool, of the shapes (N, C), (N,) and (N,).

        Raises
        ------
        DataError
            If a column of truth values has others.
        """
        import pandas as pd

        known = self.known(column)
        if self.keys is not None:
            targets = np.stack([_truth(column(key), key) for key in self.keys], axis=1)
            return targets, known, np.zeros(len(known), dtype=bool)
        codes, values = pd.factorize(column(str(self.key)))
        number = {name: i for i, name in enumerate(classes)}
        # One row a text that occurs, and an empty one at the end for the missing, whose code is -1.
        targets = np.zeros((len(values) + 1, len(classes)), dtype=bool)
        unknown = np.zeros(len(values) + 1, dtype=bool)
        for row, value in enumerate(values):
            for label in self._split(value):
                if label in number:
                    targets[row, number[label]] = True
                else:
                    unknown[row] = True
        return targets[codes], known, unknown[codes]

    def joined(self, targets: np.ndarray, classes: Sequence[str]) -> list[str]:
        """Return the labels of each cell as text."""
        return [self.separator.join(np.asarray(classes, dtype=object)[has]) for has in targets]

    def _split(self, value: Any) -> list[str]:
        if not isinstance(value, str):
            raise DataError(
                f"{self.argument} holds {str(value)!r}, not text such as 'a{self.separator}b'; name columns of truth "
                "values with labels_keys, or make text of it."
            )
        return [label.strip() for label in value.split(self.separator) if label.strip()]


def _truth(values: pd.Series, key: str) -> np.ndarray:
    """Return a column of truth values, or of 0 and 1, as bool; False where it is missing."""
    present = values.dropna()
    odd = [value for value in present.unique() if isinstance(value, str) or value not in (0, 1)]
    if odd:
        raise DataError(
            f"labels_keys: {key!r} holds {str(odd[0])!r}, which is neither a truth value nor 0 or 1; name columns of "
            "these, or one column of text with labels_key."
        )
    result = np.zeros(len(values), dtype=bool)
    result[np.asarray(values.notna())] = np.asarray(present, dtype=object).astype(bool)
    return result
