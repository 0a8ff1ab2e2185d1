"""The exception family and the words that messages are made of."""

from __future__ import annotations

import pytest

from scforge import errors
from scforge.errors import did_you_mean, listing


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("DataError", ValueError),
        ("GeneMismatchError", ValueError),
        ("HubError", OSError),
        ("OptionError", ValueError),
        ("MissingFileError", FileNotFoundError),
        ("ModelFileError", ValueError),
        ("TrainingError", RuntimeError),
    ],
)
def test_each_error_is_ours_and_the_expected_builtin(name, builtin):
    error = getattr(errors, name)
    assert issubclass(error, errors.ScforgeError)
    assert issubclass(error, builtin)
    assert str(error("one sentence.")) == "one sentence."


def test_family_is_complete():
    public = [getattr(errors, name) for name in errors.__all__]
    classes = [thing for thing in public if isinstance(thing, type)]
    assert all(issubclass(c, errors.ScforgeError | errors.ScforgeWarning) for c in classes)
    assert issubclass(errors.GeneMismatchError, errors.DataError)
    assert issubclass(errors.NotTrainedWarning, UserWarning)


def test_listing():
    assert listing([]) == "nothing"
    assert listing(["a", 1]) == "'a', '1'"
    assert listing(map(str, range(12))).count(",") == 11
    assert listing(range(14)).endswith("'11', ... (2 more)")
    assert listing("abc", most=1) == "'a', ... (2 more)"


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("celltype", ["batch", "cell_type"], "; did you mean 'cell_type'?"),
        ("CELL_TYPE", ["cell_type"], "; did you mean 'cell_type'?"),
        ("xyz", ["cell_type"], ""),
        ("x", [], ""),
        (None, ["none"], "; did you mean 'none'?"),
        ("1", [1, 2], "; did you mean '1'?"),
    ],
)
def test_did_you_mean(name, known, expected):
    assert did_you_mean(name, known) == expected
