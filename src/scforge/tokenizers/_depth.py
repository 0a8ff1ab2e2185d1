"""The two tokens of scFoundation (Hao et al. 2024) that tell the sequencing depth wanted and the depth at hand.

Shapes: B cells, Z tokens of all cells together.
"""

from __future__ import annotations

import numpy as np

from scforge.errors import OptionError
from scforge.tokenizers.batch import RaggedTokens

__all__ = ["DEPTH_TOKENS", "append_depths", "check_target_depth"]

DEPTH_TOKENS = ("<target_depth>", "<source_depth>")


def check_target_depth(value: str | None) -> None:
    """Raise unless `value` is None, or one of ``"t"``, ``"f"`` and ``"a"`` with a number behind it."""
    if value is not None:
        try:
            kind, number = str(value)[:1], float(str(value)[1:])
        except ValueError:
            kind, number = "", 0.0
        if kind not in ("t", "f", "a") or not np.isfinite(number) or (kind == "f" and number <= 0):
            raise OptionError(
                f"target_depth={value!r} is not a depth; give 't4' for 10^4 counts, 'f2' for twice the counts of the "
                "cell, or 'a1' for 10^1 times the counts."
            )


def append_depths(tokens: RaggedTokens, totals: np.ndarray, target: str, ids: tuple[int, int]) -> RaggedTokens:
    """Put the tokens `ids` behind each cell, with log10 of the depth wanted and of the depth at hand as values.

    Parameters
    ----------
    tokens
        Tokens of B cells.
    totals
        Library size of each cell, shape (B,); one count where it is zero.
    target
        The depth wanted.
    ids
        Token ids of the two depths.
    """
    source = np.log10(np.maximum(totals, 1.0))
    number = float(target[1:])
    wanted = {"t": np.full_like(source, number), "f": source + np.log10(max(number, 1e-300)), "a": source + number}
    places = np.repeat(tokens.indptr[1:], 2)
    values = np.stack([wanted[target[0]], source], axis=1).ravel().astype(np.float32)
    return RaggedTokens(
        tokens.indptr + 2 * np.arange(len(tokens.indptr)),
        np.insert(tokens.ids, places, np.tile(np.asarray(ids, dtype=np.int32), len(totals))),
        np.insert(tokens.values, places, values),
        {name: np.insert(array, places, 0) for name, array in tokens.extras.items()},
    )
