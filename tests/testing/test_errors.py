import pytest

from scforge.errors import DataError, OptionError, ScforgeError
from scforge.testing import raises


def test_only_an_error_about_the_argument_passes() -> None:
    with raises(ScforgeError, "lr"):
        raise OptionError("is too large.", lr=3)
    with (
        pytest.raises(AssertionError, match="the error is about 'lr', not 'batch_size': lr=3 is too large"),
        raises(OptionError, "batch_size"),
    ):
        raise OptionError("is too large.", lr=3)
    with pytest.raises(AssertionError, match="no OptionError was raised"), raises(OptionError, "lr"):
        pass
    with pytest.raises(AssertionError, match="several lines"), raises(OptionError, "lr"):
        raise OptionError("is\nlarge.", lr=3)
    with pytest.raises(DataError), raises(OptionError, "lr"):  # another class is left to the caller
        raise DataError("is empty.", argument="lr")
