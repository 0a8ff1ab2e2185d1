import pickle
import sysconfig
import warnings
from pathlib import Path

import pytest

from scforge import errors
from scforge.errors import did_you_mean, listing, redacted, safe_cause


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("DataError", ValueError),
        ("GeneMismatchError", errors.DataError),
        ("HubError", OSError),
        ("MissingFileError", FileNotFoundError),
        ("TrainingError", RuntimeError),
    ],
)
def test_each_error_is_ours_and_the_expected_builtin(name, builtin):
    error = getattr(errors, name)
    assert issubclass(error, errors.ScforgeError)
    assert issubclass(error, builtin)
    assert str(error("one sentence.")) == "one sentence."


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("celltype", ["batch", "cell_type"], "; did you mean 'cell_type'?"),
        ("CELL_TYPE", ["cell_type"], "; did you mean 'cell_type'?"),
        (None, ["none"], "; did you mean 'none'?"),
    ],
)
def test_did_you_mean_and_lists(name, known, expected):
    assert did_you_mean(name, known) == expected
    assert listing([]) == "nothing"
    assert listing(range(14)).endswith("'11', ... (2 more)")


@pytest.mark.parametrize(
    "path", [f"{Path(errors.__file__).parent}_extra/code.py", f"{sysconfig.get_path('purelib')}/mylab/run.py"]
)
def test_a_warning_names_the_line_of_the_user(path: str) -> None:
    """Whose package may be installed, and may be called ``scforge_extra``."""
    code = compile("def call():\n    warn('one sentence.')\n", path, "exec")
    found = {"warn": errors.warn}
    exec(code, found)
    with warnings.catch_warnings(record=True, action="always") as caught:
        found["call"]()
    assert caught[0].filename == path


TOKEN = "hf_" + "aB3" * 11 + "x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"no answer to {TOKEN}.", "no answer to ***."),
        ("{'authorization': 'Bearer abc'}", "{'authorization': 'Bearer ***'}"),
        (f"https://me:pass@host/{TOKEN}?x=1", "https://***@host/***?***"),
        ("hf_jwt_head.load.sign and Bearer of news", "*** and Bearer of news"),
        *((text, text) for text in ("no 'hf_ventricular_cardiomyocyte_subtype'", "no 'hf_score' in //shared/me@work")),
    ],
)
def test_credentials_are_not_shown(text: str, expected: str) -> None:
    assert redacted(text) == expected
    assert str(errors.HubError(text)) == str(errors.ScforgeWarning(text)) == expected
    cause = OSError(text)
    assert safe_cause(cause) is (cause if text == expected else None)


def test_an_error_carries_its_argument_and_value() -> None:
    """Whatever the message says after them."""
    short = errors.OptionError("is too large; pass at most 10.", n_layers=12)
    assert str(short) == "n_layers=12 is too large; pass at most 10."
    assert (short.argument, short.value) == ("n_layers", 12)
    dotted = errors.ConfigError(", but there are no cells.", argument="data.paths", value=None)
    assert (str(dotted), dotted.value) == ("data.paths=None, but there are no cells.", None)
    assert str(errors.DataError("is empty.", argument="adata")) == "adata is empty."
    assert str(errors.DataError("is not a column.", value="batch")) == "'batch' is not a column."
    assert str(short.located("line 3: ")) == "line 3: n_layers=12 is too large; pass at most 10."
    copy = pickle.loads(pickle.dumps(short))
    assert (str(copy), copy.argument, copy.problem) == (str(short), "n_layers", short.problem)
    assert "secret" not in str(errors.OptionError("is a URL.", path="https://me:secret@host/a"))
