import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, OptionError
from scforge.perturbation.keys import PerturbationKeys, parse_perturbations
from scforge.testing import raises

LABELS = ["ctrl", "KLF1+ctrl", "ctrl+KLF1", " KLF1 + BAK1", "BAK1+KLF1", "BAK1"]


def table(labels: list) -> pd.DataFrame:
    return pd.DataFrame({"gene": labels}, index=[f"cell{i}" for i in range(len(labels))])


@pytest.mark.parametrize("dtype", ["str", "object", "category"])
def test_combinations_and_controls(dtype):
    obs = table(LABELS).astype({"gene": dtype})
    both = ("BAK1", "KLF1")
    targets = parse_perturbations(obs, PerturbationKeys("gene", "ctrl"))
    assert targets == [(), ("KLF1",), ("KLF1",), both, both, ("BAK1",)]
    assert parse_perturbations(table(["ctrl", "ctrl+ctrl"]), PerturbationKeys("gene", "ctrl")) == [(), ()]


def test_labels_that_are_not_taken_apart():
    obs = table(["(+)-JQ1", "vehicle", "A+B"])
    with raises(DataError, "separator"):
        parse_perturbations(obs, PerturbationKeys("gene", "vehicle"))
    for separator in ("", " ", 3):
        with raises(OptionError, "separator"):
            PerturbationKeys("gene", "vehicle", separator=separator)
    targets = parse_perturbations(obs, PerturbationKeys("gene", "vehicle", separator=None))
    assert targets == [("(+)-JQ1",), (), ("A+B",)]
    assert parse_perturbations(table(["no+guide", "A"]), PerturbationKeys("gene", "no+guide")) == [(), ("A",)]


@pytest.mark.parametrize(
    ("obs", "keys", "argument"),
    [
        (table(["A", "ctrl"]), ("genes", "ctrl"), "perturbation"),
        (table(["A", "control"]), ("gene", "Controls"), "control"),
        (table(["A", None, "ctrl"]), ("gene", "ctrl"), "obs"),
        (table(["A+", "ctrl"]), ("gene", "ctrl"), "separator"),
    ],
)
def test_columns_that_cannot_be_read(obs, keys, argument):
    with raises(DataError, argument):
        parse_perturbations(obs, PerturbationKeys(*keys))


def test_pertpy_takes_labels_apart_alike():
    from pertpy.tools import PseudobulkSpace

    names = ["control", "A", "B", "C", "A+B", "B+C", "C+D"]
    values = np.random.default_rng(0).normal(size=(len(names), 5))
    scores = PseudobulkSpace().evaluate_combinations(ad.AnnData(values, obs=pd.DataFrame(index=names)))
    targets = parse_perturbations(table(names), PerturbationKeys("gene", "control"))
    singles = {some[0] for some in targets if len(some) == 1}
    ours = {"+".join(some) for some in targets if len(some) == 2 and singles.issuperset(some)}
    assert set(scores.index) == ours == {"A+B", "B+C"}


def test_a_control_with_the_separator_in_its_name_is_part_of_a_combination():
    obs = pd.DataFrame({"gene": ["A+non+targeting", "non+targeting", "A + B", "non+targeting+B"]})
    keys = PerturbationKeys("gene", control="non+targeting")
    assert parse_perturbations(obs, keys) == [("A",), (), ("A", "B"), ("B",)]
