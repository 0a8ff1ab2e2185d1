"""Cutting cells into batches."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scforge.data import Window
from scforge.data.windows import by_length, cut_by_tokens, part_ends, split_largest


def fewest_batches(lengths: list[int], budget: int, most: int) -> int:
    """Count the batches of the best cut of sorted cells, by trying all."""
    best = [0]
    for end in range(1, len(lengths) + 1):
        starts = [s for s in range(max(0, end - most), end) if (end - s) * max(1, lengths[end - 1]) <= budget]
        best.append(1 + min(best[start] for start in starts))
    return best[-1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(30, 200), st.integers(1, 20))
def test_as_few_batches_as_fit(lengths, budget, most):
    ends = cut_by_tokens(np.sort(lengths), budget, most)
    assert len(ends) == fewest_batches(sorted(lengths), budget, most)
    sizes = np.diff(ends, prepend=0)
    assert (sizes > 0).all()
    assert (sizes <= most).all()
    assert (sizes * np.sort(lengths)[ends - 1] <= budget).all()
    assert ends[-1] == len(lengths)


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.data())
def test_splitting_keeps_the_cuts_and_evens_the_sizes(sizes, data):
    ends = np.cumsum(sizes)
    n_batches = data.draw(st.integers(len(sizes), sum(sizes)))
    cut = split_largest(ends, n_batches)
    assert len(cut) == n_batches
    assert (np.diff(cut, prepend=0) > 0).all()
    assert set(ends) <= set(cut)
    # No batch stays whole that is larger than the parts of another.
    parts = np.diff(cut, prepend=0)
    split = np.setdiff1d(cut, ends)
    if len(split):
        assert parts.max() <= max(sizes[np.searchsorted(ends, place)] for place in split)


@settings(deadline=None)
@given(st.integers(2, 20), st.integers(1, 200), st.integers(0, 1))
def test_no_part_is_empty_where_a_rank_has_one_cell_fewer(size, most, fewer):
    n_parts = -(-most // size)
    n_cells = most - fewer
    if n_cells < n_parts:
        return
    ends = part_ends(np.arange(n_parts + 1), size, n_cells, n_parts)
    assert ends[0] == 0
    assert ends[-1] == n_cells
    assert (np.diff(ends) > 0).all()
    assert (np.diff(ends) <= size).all()


def test_sorting_by_length_is_stable_for_any_integers():
    lengths = np.array([3, 1, 3, 1, 2])
    for kind in ("i8", "u4", "u2", "i1"):
        assert by_length(lengths.astype(kind)).tolist() == [1, 3, 4, 0, 2]
    assert by_length(np.array([70_000, 3, 70_000, 2**16 + 3])).tolist() == [1, 3, 0, 2]


def test_the_rest_of_a_window():
    window = Window(rows=np.array([7, 5, 9, 1]), ends=np.array([2, 3, 4]), draw=1)
    assert [rows.tolist() for rows in window.batches()] == [[7, 5], [9], [1]]
    rest = window.after(1)
    assert [rows.tolist() for rows in rest.batches()] == [[9], [1]]
    assert rest.draw == 1
    assert window.after(0) is window
