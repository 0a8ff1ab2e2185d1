import numpy as np
import pytest

from scforge.errors import DataError, OptionError
from scforge.soma.v1.tokenizer import TokenizedSequence, tokenize, tokenize_arrays
from scforge.testing import raises

published = pytest.importorskip("soma_models.v1.tokenizer", reason="the published package is not installed")


RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("data", "length"),
    [
        *((b"abcdefghijklmnop"[:n], 8) for n in (0, 3, 8, 9, 16)),
        (b"xyz", 1),
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


@pytest.mark.parametrize(
    ("data", "length", "error", "argument"),
    [
        ("text", 8, DataError, "data"),
        ([97, 98], 8, DataError, "data"),
        (memoryview(np.zeros(2)), 8, DataError, "data"),
        (np.arange(3), 8, DataError, "data"),
        (np.zeros((2, 2), dtype=np.uint8), 8, DataError, "data"),
        (b"abc", 0, OptionError, "max_seq_len"),
    ],
)
def test_what_is_no_bytes_and_no_length(data, length, error, argument):
    for function in (tokenize, tokenize_arrays):
        with raises(error, argument):
            function(data, length)
