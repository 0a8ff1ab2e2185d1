import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scforge.data import CellOrder
from scforge.data.sampling import CellWeights, ClassBalance
from scforge.errors import OptionError
from scforge.testing import raises

CODES = np.random.default_rng(0).choice([-1, 0, 1, 2], 20_000, p=[0.05, 0.8, 0.14, 0.01]).astype(np.int8)


def drawn(order: CellOrder, epoch: int = 0) -> np.ndarray:
    order.set_epoch(epoch)
    return np.concatenate([window.rows for window in order.windows()])


def shares(rows: np.ndarray) -> np.ndarray:
    return np.bincount(CODES[rows] + 1, minlength=4) / len(rows)


@pytest.mark.parametrize("chunk_size", [1, 256])
def test_classes_come_equally_often(chunk_size):
    order = CellOrder(np.arange(len(CODES)), 64, chunk_size=chunk_size, balance=ClassBalance(CODES))
    rows = drawn(order)
    assert len(rows) == len(CODES)
    np.testing.assert_allclose(shares(rows), 0.25, atol=0.015)


@pytest.mark.parametrize("chunk_size", [1, 256])
def test_the_strength_grows_from_epoch_to_epoch(chunk_size):
    balance = ClassBalance(CODES, warmup_epochs=4, start=0.0, end=1.0)
    order = CellOrder(np.arange(len(CODES)), 64, chunk_size=chunk_size, balance=balance)
    natural = np.bincount(CODES + 1) / len(CODES)
    np.testing.assert_allclose(shares(drawn(order, 0)), natural, atol=0.015)
    halfway = natural**0.5 / (natural**0.5).sum()
    np.testing.assert_allclose(shares(drawn(order, 2)), halfway, atol=0.015)
    for epoch in (4, 9):
        np.testing.assert_allclose(shares(drawn(order, epoch)), 0.25, atol=0.015)


@pytest.mark.parametrize("chunk_size", [1, 64])
def test_cells_are_drawn_in_proportion_to_their_weights(chunk_size):
    weights = np.random.default_rng(1).choice([0.0, 0.5, 1.0, 7.0], 200)
    order = CellOrder(np.arange(200), 32, chunk_size=chunk_size, balance=CellWeights(weights), window_cells=64)
    found = np.bincount(np.concatenate([drawn(order, epoch) for epoch in range(400)]), minlength=200)
    expected = weights / weights.sum() * 200 * 400
    assert (found[weights == 0] == 0).all()
    drawable = weights > 0
    chi_square = ((found - expected)[drawable] ** 2 / expected[drawable]).sum()
    degrees = drawable.sum() - 1
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-12, 1.0, 1e9]), min_size=1, max_size=100).filter(any),
    st.sampled_from([1, 3, 16]),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_ranks_share_the_draws_and_none_has_weight_zero(weights, chunk_size, world_size, epoch):
    weights = np.array(weights)
    rows, world_size = np.arange(len(weights)) * 2, min(world_size, len(weights))
    options = {"chunk_size": chunk_size, "balance": CellWeights(weights), "world_size": world_size}
    whole = drawn(CellOrder(rows, 7, **options | {"world_size": 1}), epoch)
    parts = [drawn(CellOrder(rows, 7, rank=rank, **options), epoch) for rank in range(world_size)]
    assert len(whole) == len(rows)
    assert (weights[whole // 2] > 0).all()
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.sort(whole))


def test_draws_depend_on_epoch_and_seed_and_the_state_on_the_weights():
    def order(balance, n=500, **options) -> CellOrder:
        return CellOrder(np.arange(n), 64, chunk_size=16, balance=balance, **options)

    balance = ClassBalance(CODES[:500])
    first = drawn(order(balance), 1)
    np.testing.assert_array_equal(first, drawn(order(ClassBalance(CODES[:500])), 1))
    for other in (drawn(order(balance), 0), drawn(order(balance, seed=1), 1)):
        assert sorted(first) != sorted(other)
    codes = np.array([0, 0, 1, 1])
    state = order(ClassBalance(codes), 4).state_dict()
    order(ClassBalance(codes), 4).load_state_dict(state)
    for other in (ClassBalance(codes, end=0.5), ClassBalance(codes[::-1]), CellWeights(codes), None):
        with raises(OptionError, "state"):
            order(other, 4).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CellWeights([1.0, -1.0]), "must be finite and not negative"),
        (lambda: CellWeights([0.0, 0.0]), "must be finite and not negative, and at least one must be positive"),
        (lambda: ClassBalance([0], end=2), "end=2 is not a number from 0 to 1"),
    ],
)
def test_arguments(make, message):
    with pytest.raises(OptionError, match=message):
        make()
