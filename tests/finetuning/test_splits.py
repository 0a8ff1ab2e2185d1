import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, OptionError
from scforge.finetuning.splits import Split, check_shares, split_for, split_from, with_each_in_training
from scforge.testing import raises


def parts(split: Split) -> tuple[np.ndarray, ...]:
    return split.train, split.validation, split.test


def check(split: Split, rows: np.ndarray) -> None:
    np.testing.assert_array_equal(np.sort(np.concatenate(parts(split))), rows)
    assert all((np.diff(part) > 0).all() for part in parts(split))


def test_plain_and_repeatable() -> None:
    options = {"validation_size": 0.1, "test_size": 0.2}
    split = split_for(100, seed=3, **options)
    check(split, np.arange(100))
    assert [len(part) for part in parts(split)] == [70, 10, 20]
    for one, other in zip(parts(split), parts(split_for(100, seed=3, **options)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(split.test, split_for(100, seed=4, **options).test)
    assert [len(part) for part in parts(split_for(10, validation_size=0, test_size=0, seed=0))] == [10, 0, 0]


def test_classes_keep_their_shares() -> None:
    strata = pd.Series(np.where(np.arange(200) % 10 == 0, "rare", "common"))
    usable = np.arange(200) >= 20
    split = split_for(200, validation_size=0.1, test_size=0.1, seed=0, usable=usable, strata=strata)
    check(split, np.flatnonzero(usable))
    assert [(strata.iloc[part] == "rare").sum() for part in parts(split)] == [14, 2, 2]


def test_classes_of_few_cells() -> None:
    for size, expected in ((1, [1, 0, 0]), (2, [1, 0, 1]), (3, [1, 1, 1]), (10, [8, 1, 1])):
        strata = pd.Series(["few"] * size + ["many"] * 90)
        split = split_for(size + 90, validation_size=0.1, test_size=0.1, seed=0, strata=strata)
        assert [(strata.iloc[part] == "few").sum() for part in parts(split)] == expected


def test_whole_groups_are_held_out() -> None:
    groups = pd.Series([f"d{i % 10}" for i in range(200)])
    split = split_for(200, validation_size=0.2, test_size=0.2, seed=0, groups=groups)
    check(split, np.arange(200))
    sets = [set(groups.iloc[part]) for part in parts(split)]
    assert [len(one) for one in sets] == [6, 2, 2]
    assert len(set.union(*sets)) == 10


def test_a_column_says_it() -> None:
    column = pd.Series(["train", "test", None, "validation", "train"], dtype="category")
    split = split_from(column, np.array([True, True, True, True, False]), key="part")
    assert [part.tolist() for part in parts(split)] == [[0], [3], [1]]
    with raises(DataError, "split_key"):
        split_from(column, np.array([False, True, True, True, False]), key="part")
    with raises(DataError, "split_key"):
        split_from(column.cat.rename_categories({"validation": "val"}), None, key="part")


def test_what_is_no_split() -> None:
    for sizes, message in (
        ((1.1, 0.1), "validation_size=1.1 is not a number from 0 to 1"),
        ((0.1, -0.1), "test_size=-0.1 is not"),
        ((0.5, 0.5), "leave no training cells"),
    ):
        with pytest.raises(OptionError, match=message):
            check_shares(*sizes)
    with raises(OptionError, "train"):
        Split(np.array([0, 1]), np.array([1]), np.array([2]))
    with pytest.raises(OptionError, match="no training cells are left"):
        Split(np.array([], dtype=int), np.array([1]), np.array([2]))


def test_each_label_is_in_training() -> None:
    split = Split(train=np.arange(6), validation=np.arange(6, 8), test=np.arange(8, 10))
    has = np.zeros((10, 3), dtype=bool)
    has[[2, 9], 0] = True  # learned already
    has[[7, 8], 1] = True  # of held-out cells only
    has[:9, 2] = True  # of all cells but one, so that it is the lack of it that training has none of
    found = with_each_in_training(split, np.concatenate([has, ~has], axis=1))
    check(found, np.arange(10))
    assert [part.tolist() for part in parts(found)] == [[0, 1, 2, 3, 4, 5, 7, 9], [6], [8]]
    # Rare labels leave a cell to each part.
    found = with_each_in_training(split, np.eye(10, dtype=bool))
    check(found, np.arange(10))
    assert [len(part) for part in parts(found)] == [8, 1, 1]
