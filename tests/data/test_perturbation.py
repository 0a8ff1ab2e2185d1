import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.data.perturbation import PerturbationKeys, parse_perturbations
from scforge.errors import DataError

LABELS = ["ctrl", "KLF1+ctrl", "ctrl+KLF1", " KLF1 + BAK1", "BAK1+KLF1", "BAK1"]


def table(labels: list, doses: list | None = None) -> pd.DataFrame:
    obs = pd.DataFrame({"gene": labels}, index=[f"cell{i}" for i in range(len(labels))])
    return obs if doses is None else obs.assign(dose=doses)


@pytest.mark.parametrize("dtype", ["str", "object", "category"])
def test_combinations_and_controls(dtype):
    obs = table(LABELS).astype({"gene": dtype})
    parsed = parse_perturbations(obs, PerturbationKeys("gene", "ctrl"))
    both = ("BAK1", "KLF1")
    assert parsed.targets == [(), ("KLF1",), ("KLF1",), both, both, ("BAK1",)]
    assert parsed.names == both
    assert parsed.matrix.toarray().tolist() == [[0, 0], [0, 1], [0, 1], [1, 1], [1, 1], [1, 0]]
    assert parsed.n_targets.tolist() == [0, 1, 1, 2, 2, 1]
    assert parsed.is_control.tolist() == [True] + 5 * [False]
    assert parsed.dose is None
    assert len(parsed) == 6


def test_doses_go_with_their_targets():
    doses = [np.nan, "1+0", "0+2", "0.1+0.5", "0.5 + 0.1", "3"]
    parsed = parse_perturbations(table(LABELS, doses), PerturbationKeys("gene", "ctrl", dose="dose"))
    # Targets are sorted, and " KLF1 + BAK1" names KLF1 first.
    assert parsed.dose.tolist() == [1, 2, 0.5, 0.1, 0.5, 0.1, 3]
    assert parsed.targets == parse_perturbations(table(LABELS), PerturbationKeys("gene", "ctrl")).targets
    labels = ["drug", "drug", "DMSO", "other"]
    parsed = parse_perturbations(table(labels, [0.1, 10.0, np.nan, 1.0]), PerturbationKeys("gene", "DMSO", "dose"))
    assert parsed.dose.tolist() == [0.1, 10, 1]
    assert parsed.targets == [("drug",), ("drug",), (), ("other",)]
    # The control part of a combination need not have a dose.
    parsed = parse_perturbations(table(["A+ctrl", "ctrl"], [0.5, 0.0]), PerturbationKeys("gene", "ctrl", "dose"))
    assert parsed.dose.tolist() == [0.5]
    parsed = parse_perturbations(table(["ctrl", "ctrl+ctrl"]), PerturbationKeys("gene", "ctrl"))
    assert (parsed.is_control.all(), parsed.matrix.shape) == (True, (2, 0))


def test_labels_that_are_not_taken_apart():
    obs = table(["(+)-JQ1", "vehicle", "A+B"])
    with pytest.raises(DataError, match=r"'\(\+\)-JQ1', which separator='\+' cuts within brackets"):
        parse_perturbations(obs, PerturbationKeys("gene", "vehicle"))
    parsed = parse_perturbations(obs, PerturbationKeys("gene", "vehicle", separator=None))
    assert parsed.targets == [("(+)-JQ1",), (), ("A+B",)]
    parsed = parse_perturbations(table(["no+guide", "A"]), PerturbationKeys("gene", "no+guide"))
    assert parsed.is_control.tolist() == [True, False]


@pytest.mark.parametrize(
    ("obs", "keys", "message"),
    [
        (table(["A", "ctrl"]), ("genes", "ctrl"), r"perturbation='genes' is not a column of obs; did you mean 'gene'"),
        (table(["A", "control"]), ("gene", "Controls"), r"control='Controls' is no label.*did you mean 'control'"),
        (table(["A", None, "ctrl"]), ("gene", "ctrl"), r"no label for 1 of 3 cells \(first: 'cell1'\)"),
        (table(["A+", "ctrl"]), ("gene", "ctrl"), r"label 'A\+', which .* cuts into parts that are empty"),
        (table(["A", "ctrl"], [None, 1]), ("gene", "ctrl", "dose"), r"no value for cells with the perturbation 'A'"),
        (table(["A", "ctrl"], [-1, 1]), ("gene", "ctrl", "dose"), r"'-1' for the perturbation 'A', not zero or"),
        (table(["A+B", "ctrl"], ["1", "1"]), ("gene", "ctrl", "dose"), r"'1' for the perturbation 'A\+B'; give 2"),
        (table(["A+A", "ctrl"], ["1+2", "1"]), ("gene", "ctrl", "dose"), r"'A\+A', which needs one dose"),
    ],
)
def test_columns_that_cannot_be_read(obs, keys, message):
    with pytest.raises(DataError, match=message):
        parse_perturbations(obs, PerturbationKeys(*keys))


def test_pertpy_takes_labels_apart_alike():
    from pertpy.tools import PseudobulkSpace

    names = ["control", "A", "B", "C", "A+B", "B+C", "C+D"]
    values = np.random.default_rng(0).normal(size=(len(names), 5))
    scores = PseudobulkSpace().evaluate_combinations(ad.AnnData(values, obs=pd.DataFrame(index=names)))
    parsed = parse_perturbations(table(names), PerturbationKeys("gene", "control"))
    singles = {some[0] for some in parsed.targets if len(some) == 1}
    ours = {"+".join(some) for some in parsed.targets if len(some) == 2 and singles.issuperset(some)}
    assert set(scores.index) == ours == {"A+B", "B+C"}
