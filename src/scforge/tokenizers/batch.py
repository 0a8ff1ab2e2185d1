"""Tokens of several cells: one after the other, or padded to the longest.

Shapes: B cells, S tokens of the longest cell of the batch, Z tokens of all cells together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

import numba
import numpy as np
import torch

__all__ = ["RaggedTokens", "TokenBatch", "concatenate", "frame", "pad"]


class TokenBatch(TypedDict):
    """A batch of tokenised cells: the keyword arguments of a model's ``forward`` and ``encode``.

    ``input_ids``
        Token ids, int64, shape (B, S); PAD (0) behind the last token of a cell.
    ``attention_mask``
        True for tokens, False for padding, bool, shape (B, S).
    ``values``
        Expression value of each token, float32, shape (B, S); 0 at CLS, EOS, padding and masked positions.
    ``bin_ids``
        Expression bin of each token, int64, shape (B, S); 0 for genes without counts, and where `values` is 0. Made by
        strategies that bin.
    ``attention_bias``
        Number to add to the attention scores of each token as a key, float32, shape (B, S); 0 where nothing is added.
        Made by strategies that offer it.
    ``labels``
        Token ids to predict, int64, shape (B, S); -100 where there is nothing to predict. Made by masking alone.
    ``bin_labels``
        Bins to predict, int64, shape (B, S); -100 where there is nothing to predict. Made by masking alone, where there
        are `bin_ids`.
    ``value_labels``
        Values that masking hid, float32, shape (B, S); 0 elsewhere. Made by masking alone.
    ``masked_positions``
        True where a token was chosen for prediction, bool, shape (B, S). Made by masking alone.

    Examples
    --------
    >>> import numpy as np, torch
    >>> from scforge.data import GeneVocab
    >>> from scforge.tokenizers import get_tokenizer
    >>> tokenizer = get_tokenizer("binned_expression", GeneVocab.from_genes(["A", "B", "C"]), n_bins=3, side="one")
    >>> batch = tokenizer(np.array([[1, 0, 3], [0, 2, 0]]))
    >>> sorted(batch), batch["attention_mask"].tolist()
    (['attention_mask', 'bin_ids', 'input_ids', 'values'], [[True, True, True], [True, True, False]])
    >>> ids = torch.tensor([[3, 4, 6]])
    >>> by_hand = TokenBatch(input_ids=ids, attention_mask=ids != 0, values=torch.tensor([[0.0, 1.5, 2.5]]))
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    values: torch.Tensor
    bin_ids: NotRequired[torch.Tensor]
    attention_bias: NotRequired[torch.Tensor]
    labels: NotRequired[torch.Tensor]
    bin_labels: NotRequired[torch.Tensor]
    value_labels: NotRequired[torch.Tensor]
    masked_positions: NotRequired[torch.Tensor]


class RaggedTokens(NamedTuple):
    """Tokens of several cells one after the other, without padding.

    Parameters
    ----------
    indptr
        Where each cell begins and the last one ends, int64, shape (B + 1,).
    ids
        Token ids, int32, shape (Z,).
    values
        Expression values, float32, shape (Z,).
    extras
        What else a strategy tells of its tokens (``bin_ids``, ``attention_bias``), arrays of shape (Z,).

    Examples
    --------
    >>> import numpy as np
    >>> indptr, ids = np.array([0, 2, 3]), np.array([4, 6, 5], dtype=np.int32)
    >>> tokens = RaggedTokens(indptr, ids, np.array([1.0, 3.0, 2.0], dtype=np.float32))
    >>> [cell.tolist() for cell in np.split(tokens.ids, tokens.indptr[1:-1])]
    [[4, 6], [5]]
    """

    indptr: np.ndarray
    ids: np.ndarray
    values: np.ndarray
    extras: Mapping[str, np.ndarray] = MappingProxyType({})


def frame(tokens: RaggedTokens, first: int, last: int) -> RaggedTokens:
    """Put the tokens `first` before and `last` behind each cell; -1 puts none."""
    if first < 0 and last < 0:
        return tokens
    before, around = int(first >= 0), int(first >= 0) + int(last >= 0)

    def framed(array: np.ndarray, head: int, tail: int) -> np.ndarray:
        out = np.empty(len(array) + around * (len(tokens.indptr) - 1), dtype=array.dtype)
        _frame(tokens.indptr, array, before, around, head, tail, out)
        return out

    return RaggedTokens(
        tokens.indptr + around * np.arange(len(tokens.indptr)),
        framed(tokens.ids, first, last),
        framed(tokens.values, 0, 0),
        {name: framed(array, 0, 0) for name, array in tokens.extras.items()},
    )


def concatenate(parts: Sequence[RaggedTokens]) -> RaggedTokens:
    """Return the cells of all `parts` in one."""
    shifts = np.cumsum([0, *[part.indptr[-1] for part in parts]])
    return RaggedTokens(
        np.concatenate([[0], *[part.indptr[1:] + shift for part, shift in zip(parts, shifts, strict=False)]]),
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.values for part in parts]),
        {name: np.concatenate([part.extras[name] for part in parts]) for name in parts[0].extras},
    )


def pad(tokens: RaggedTokens, first: int = -1, last: int = -1) -> TokenBatch:
    """Pad ragged tokens to the longest cell (at least one position), with `first` and `last` around each as in `frame`.

    Integers become int64 and numbers float32.
    """
    before, around = int(first >= 0), int(first >= 0) + int(last >= 0)
    longest = max(1, int(np.diff(tokens.indptr).max(initial=0)) + around)
    # Memory comes from NumPy, which asks for large pages: fresh small pages would cost as much as the tokenising.
    ids = np.empty((len(tokens.indptr) - 1, longest), dtype=np.int64)
    mask = np.empty(ids.shape, dtype=np.bool_)
    _pad_ids(tokens.indptr, tokens.ids, first, last, ids, mask)
    batch: dict[str, Any] = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    for name, array in {"values": tokens.values, **tokens.extras}.items():
        kind = np.int64 if array.dtype.kind in "iub" else np.float32
        out = np.empty(ids.shape, dtype=kind)
        _pad(tokens.indptr, array, before, out)
        batch[name] = torch.from_numpy(out)
    return cast(TokenBatch, batch)


@numba.njit(cache=True, nogil=True)
def _frame(indptr, array, before, around, head, tail, out):
    position = 0
    for cell in range(len(indptr) - 1):
        if before:
            out[position] = head
            position += 1
        for entry in range(indptr[cell], indptr[cell + 1]):
            out[position] = array[entry]
            position += 1
        if around > before:
            out[position] = tail
            position += 1


@numba.njit(cache=True, nogil=True)
def _pad_ids(indptr, ids, first, last, out, mask):
    for cell in range(len(indptr) - 1):
        position = 0
        if first >= 0:
            out[cell, 0] = first
            position = 1
        for entry in range(indptr[cell], indptr[cell + 1]):
            out[cell, position] = ids[entry]
            position += 1
        if last >= 0:
            out[cell, position] = last
            position += 1
        mask[cell, :position] = True
        mask[cell, position:] = False
        out[cell, position:] = 0


@numba.njit(cache=True, nogil=True)
def _pad(indptr, array, before, out):
    for cell in range(len(indptr) - 1):
        start, size = indptr[cell], indptr[cell + 1] - indptr[cell]
        out[cell, :before] = 0
        for entry in range(size):
            out[cell, before + entry] = array[start + entry]
        out[cell, before + size :] = 0
