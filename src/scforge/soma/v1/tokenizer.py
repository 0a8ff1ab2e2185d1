"""Conversion of bytes to tokens: chunks of equal length, without a vocabulary or a framework.

A byte is its own token. The last chunk ends with EOS (257) if there is room, and is padded with PAD (256).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scforge._checks import check_count
from scforge.errors import DataError
from scforge.soma.v1.configs import V1_EOS_TOKEN_ID, V1_MAX_SEQ_LEN, V1_PAD_TOKEN_ID


class TokenizedSequence(NamedTuple):
    """One chunk of bytes, as lists of `max_seq_len` numbers.

    ``token_ids`` contains the tokens. ``targets`` contains the next token at each position, and PAD at the last
    position. ``pos_ids`` contains the offset of each byte in the data; EOS and PAD have the offset after the last byte.

    Parameters
    ----------
    token_ids, targets, pos_ids
        Lists of `max_seq_len` integers.

    Examples
    --------
    >>> chunk = tokenize(b"ACGT", max_seq_len=4)[0]
    >>> chunk.token_ids, chunk.targets
    ([65, 67, 71, 84], [67, 71, 84, 256])
    """

    token_ids: list[int]
    targets: list[int]
    pos_ids: list[int]


def tokenize(data: bytes | bytearray, max_seq_len: int = V1_MAX_SEQ_LEN) -> list[TokenizedSequence]:
    """Return the chunks of `data`, or an empty list if `data` is empty.

    Parameters
    ----------
    data
        Any bytes.
    max_seq_len
        Number of tokens per chunk.

    Returns
    -------
    One :class:`TokenizedSequence` for each `max_seq_len` bytes; EOS follows the last byte if its chunk has room.

    Raises
    ------
    DataError
        If `data` is not bytes.
    OptionError
        If `max_seq_len` is not a positive integer.

    Examples
    --------
    >>> tokenize(b"abc", max_seq_len=5)
    [TokenizedSequence(token_ids=[97, 98, 99, 257, 256], targets=[98, 99, 257, 256, 256], pos_ids=[0, 1, 2, 3, 3])]
    """
    columns = (array.tolist() for array in tokenize_arrays(data, max_seq_len))
    return [TokenizedSequence(*chunk) for chunk in zip(*columns, strict=True)]


def tokenize_arrays(
    data: bytes | bytearray | memoryview | np.ndarray, max_seq_len: int = V1_MAX_SEQ_LEN
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the result of :func:`tokenize` as arrays, for large inputs.

    Parameters
    ----------
    data
        Bytes, or a uint8 array of shape (bytes,).
    max_seq_len
        Number of tokens per chunk.

    Returns
    -------
    Tokens and targets (int32) and offsets (int64), each of shape (chunks, max_seq_len).

    Raises
    ------
    DataError
        If `data` is not bytes.
    OptionError
        If `max_seq_len` is not a positive integer.

    Examples
    --------
    >>> ids, targets, pos = tokenize_arrays(b"abcd", max_seq_len=3)
    >>> ids
    array([[ 97,  98,  99],
           [100, 257, 256]], dtype=int32)
    >>> pos
    array([[0, 1, 2],
           [3, 4, 4]])
    """
    check_count("max_seq_len", max_seq_len, "tokens a chunk")
    try:
        view = memoryview(data)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"is of type {type(data).__name__}; pass bytes, e.g. text.encode().", argument="data"
        ) from error
    if view.format != "B" or view.ndim != 1:
        raise DataError(
            f"has format {view.format!r} and shape {view.shape}; pass bytes, or a 1D uint8 array.", argument="data"
        )
    given = np.frombuffer(view if view.c_contiguous else view.tobytes(), dtype=np.uint8)
    n_bytes, n_chunks = len(given), -(-len(given) // max_seq_len)
    ids = np.full((n_chunks, max_seq_len), V1_PAD_TOKEN_ID, dtype=np.int32)
    in_a_row = ids.reshape(-1)
    in_a_row[:n_bytes] = given
    in_a_row[n_bytes : n_bytes + 1] = V1_EOS_TOKEN_ID
    targets = np.full_like(ids, V1_PAD_TOKEN_ID)
    targets[:, :-1] = ids[:, 1:]
    offsets = np.minimum(np.arange(ids.size, dtype=np.int64), n_bytes).reshape(ids.shape)
    return ids, targets, offsets
