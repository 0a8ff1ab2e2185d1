"""Tokens of bytes, beside the published package."""

from __future__ import annotations

import time

import numpy as np
import pytest

from scforge.errors import DataError, OptionError
from scforge.soma.v1.tokenizer import TokenizedSequence, tokenize, tokenize_arrays

published = pytest.importorskip("soma_models.v1.tokenizer", reason="the published package is not installed")

CASES = [
    (b"", 8),
    (b"abc", 8),
    (b"abcdefgh", 8),
    (b"abcdefghi", 8),
    (b"abcdefghijklmnop", 8),
    (bytearray(b"\x00\xff\x80"), 2),
    (b"xyz", 1),
    (bytes(range(256)), 100),
    (b"a", 1024),
]


def test_what_the_documentation_says():
    (chunk,) = tokenize(b"abc", 8)
    assert chunk == TokenizedSequence(
        [97, 98, 99, 257, 256, 256, 256, 256], [98, 99, 257, 256, 256, 256, 256, 256], [0, 1, 2, 3, 3, 3, 3, 3]
    )
    _, last = tokenize(b"abcdefghi", 8)
    assert (last.token_ids[:3], last.pos_ids[:3]) == ([105, 257, 256], [8, 9, 9])
    assert 257 not in tokenize(b"abcdefgh", 8)[0].token_ids


@pytest.mark.parametrize(("data", "length"), CASES)
def test_equals_the_published(data, length):
    ours, theirs = tokenize(data, length), published.tokenize(data, length)
    assert ours == [TokenizedSequence(*chunk) for chunk in theirs]
    assert all(type(number) is int for chunk in ours for column in chunk for number in column)


def test_random_bytes_of_random_lengths():
    generator = np.random.default_rng(0)
    for _ in range(50):
        data, length = generator.bytes(int(generator.integers(0, 200))), int(generator.integers(1, 40))
        assert [tuple(chunk) for chunk in tokenize(data, length)] == [
            tuple(c) for c in published.tokenize(data, length)
        ]


@pytest.mark.parametrize(("data", "length"), CASES)
def test_arrays_hold_the_same(data, length):
    ids, targets, offsets = tokenize_arrays(data, length)
    assert ids.shape == targets.shape == offsets.shape == (-(-len(data) // length), length)
    assert (ids.dtype, targets.dtype, offsets.dtype) == (np.int32, np.int32, np.int64)
    expected = published.tokenize(data, length)
    assert [ids.tolist(), targets.tolist(), offsets.tolist()] == [
        [list(chunk[column]) for chunk in expected] for column in range(3)
    ]


def test_arrays_of_views_and_numbers():
    data = bytes(range(100))
    for given in (memoryview(data), bytearray(data), np.frombuffer(data, dtype=np.uint8)):
        for one, other in zip(tokenize_arrays(given, 7), tokenize_arrays(data, 7), strict=True):
            np.testing.assert_array_equal(one, other)


def test_megabytes_take_less_time():
    data = np.random.default_rng(0).bytes(400_000)
    start = time.process_time()
    published.tokenize(data)
    theirs = time.process_time() - start
    start = time.process_time()
    tokenize_arrays(data)
    assert time.process_time() - start < theirs / 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("text", "encode"),
        ([97, 98], "type list"),
        (memoryview(np.zeros(2)), r"format 'd' .*data\.cast"),
        (np.arange(3), "int64"),
        (np.zeros((2, 2), dtype=np.uint8), r"\(2, 2\)"),
    ],
)
def test_no_bytes(data, message):
    with pytest.raises(DataError, match=message):
        tokenize_arrays(data)


@pytest.mark.parametrize("length", [0, -1, 2.5])
def test_no_length(length):
    with pytest.raises(OptionError, match="max_seq_len"):
        tokenize(b"abc", length)


def test_a_view_with_steps():
    for one, other in zip(tokenize_arrays(memoryview(b"a-b-c")[::2], 4), tokenize_arrays(b"abc", 4), strict=True):
        np.testing.assert_array_equal(one, other)
