"""Tokens of bytes, beside the published package."""

from __future__ import annotations

import time

import numpy as np
import pytest

from scforge.errors import DataError, OptionError
from scforge.soma.v1.tokenizer import TokenizedSequence, tokenize, tokenize_arrays

published = pytest.importorskip("soma_models.v1.tokenizer", reason="the published package is not installed")


def test_what_the_documentation_says():
    (chunk,) = tokenize(b"abc", 8)
    assert chunk == TokenizedSequence(
        [97, 98, 99, 257, 256, 256, 256, 256], [98, 99, 257, 256, 256, 256, 256, 256], [0, 1, 2, 3, 3, 3, 3, 3]
    )
    _, last = tokenize(b"abcdefghi", 8)
    assert (last.token_ids[:3], last.pos_ids[:3]) == ([105, 257, 256], [8, 9, 9])
    assert 257 not in tokenize(b"abcdefgh", 8)[0].token_ids


RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("data", "length"),
    [
        *((b"abcdefghijklmnop"[:n], 8) for n in (0, 3, 8, 9, 16)),
        (bytearray(b"\x00\xff\x80"), 2),
        (b"xyz", 1),
        (bytes(range(256)), 100),
        (b"a", 1024),
        *((RANDOM.bytes(int(RANDOM.integers(200))), int(RANDOM.integers(1, 40))) for _ in range(20)),
    ],
)
def test_equals_the_published(data, length):
    ours, expected = tokenize(data, length), published.tokenize(data, length)
    assert ours == [TokenizedSequence(*chunk) for chunk in expected]
    assert all(type(number) is int for chunk in ours for column in chunk for number in column)
    arrays = tokenize_arrays(data, length)
    assert {array.shape for array in arrays} == {(-(-len(data) // length), length)}
    assert [array.dtype for array in arrays] == [np.int32, np.int32, np.int64]
    for column, array in enumerate(arrays):
        assert array.tolist() == [list(chunk[column]) for chunk in expected]


@pytest.mark.parametrize("given", [memoryview(b"a-b-c")[::2], bytearray(b"abc"), np.frombuffer(b"abc", dtype=np.uint8)])
def test_arrays_of_views_and_numbers(given):
    for one, other in zip(tokenize_arrays(given, 2), tokenize_arrays(b"abc", 2), strict=True):
        np.testing.assert_array_equal(one, other)


def test_megabytes_take_less_time():
    data = np.random.default_rng(0).bytes(400_000)
    times = [time.process_time()]
    for function in (published.tokenize, tokenize_arrays):
        function(data)
        times.append(time.process_time())
    assert times[2] - times[1] < (times[1] - times[0]) / 5


@pytest.mark.parametrize(
    ("data", "length", "error", "message"),
    [
        ("text", 8, DataError, "encode"),
        ([97, 98], 8, DataError, "type list"),
        (memoryview(np.zeros(2)), 8, DataError, r"format 'd' .*data\.cast"),
        (np.arange(3), 8, DataError, "int64"),
        (np.zeros((2, 2), dtype=np.uint8), 8, DataError, r"\(2, 2\)"),
        (b"abc", 0, OptionError, "max_seq_len"),
        (b"abc", 2.5, OptionError, "max_seq_len"),
    ],
)
def test_what_is_no_bytes_and_no_length(data, length, error, message):
    for function in (tokenize, tokenize_arrays):
        with pytest.raises(error, match=message):
            function(data, length)
