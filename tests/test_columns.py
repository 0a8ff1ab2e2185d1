"""Columns of obs become text by one rule, whatever their type and whoever reads them."""

import datetime
import enum
from decimal import Decimal
from fractions import Fraction

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from scforge._columns import codes_among, labels_of, means_no_label, text_of, texts_of
from scforge.data.cells import CellSource
from scforge.data.sampling import split_cells
from scforge.errors import DataError, ScforgeWarning
from scforge.estimators.finetune import with_batches_of
from scforge.eval.label_prediction import texts_in
from scforge.finetuning import get_task
from scforge.finetuning.splits import split_for
from scforge.insilico.perturb import cells_in_state, rows_of_groups
from scforge.models import Encoder
from scforge.perturbation.keys import PerturbationKeys, parse_perturbations
from scforge.testing import raises
from scforge.training.objectives._conditioning import classes_found, numbers_of_cells

pyarrow = pytest.importorskip("pyarrow")

WHOLE = {
    "int8": lambda values: pd.Series(values, dtype="int8"),
    "big-endian integers": lambda values: pd.Series(np.array(values, dtype=">i4")),
    "big-endian floats": lambda values: pd.Series(np.array(values, dtype=">f8")),
    **{f"float{bits}": lambda values, bits=bits: pd.Series(values, dtype=f"float{bits}") for bits in (16, 32, 64)},
    "nullable integers": lambda values: pd.Series(values, dtype="Int16"),
    "nullable floats": lambda values: pd.Series(values, dtype="Float32"),
    "Arrow integers": lambda values: pd.Series(values, dtype=pd.ArrowDtype(pyarrow.int64())),
    "Arrow floats": lambda values: pd.Series(values, dtype=pd.ArrowDtype(pyarrow.float32())),
    "Arrow text": lambda values: pd.Series(map(str, values), dtype=pd.ArrowDtype(pyarrow.string())),
    "Arrow dictionary": lambda values: pd.Series(
        map(str, values), dtype=pd.ArrowDtype(pyarrow.dictionary(pyarrow.int8(), pyarrow.string()))
    ),
    "text": lambda values: pd.Series(map(str, values), dtype=object),
    "strings": lambda values: pd.Series(map(str, values), dtype="string"),
    "categories of integers": lambda values: pd.Series(values, dtype="category"),
    "categories of floats": lambda values: pd.Series(map(float, values), dtype="category"),
    "unused categories": lambda values: pd.Series(pd.Categorical(values, categories=[9, *sorted(set(values)), 7])),
    "sparse": lambda values: pd.Series(pd.arrays.SparseArray(values)),
    "decimals": lambda values: pd.Series([Decimal(value) / 1 for value in values]),
    "Arrow decimals": lambda values: pd.Series(map(Decimal, values), dtype=pd.ArrowDtype(pyarrow.decimal128(5, 2))),
    "mixed": lambda values: pd.Series(
        [(int, float, str, Decimal, np.float32)[i % 5](value) for i, value in enumerate(values)], dtype=object
    ),
}
"""Functions that hold whole numbers in a column of each type."""

DAYS = [datetime.date(2024, 1, 1), datetime.date(2024, 2, 29)]
OTHERS = {
    "booleans": (pd.Series([True, False]), ["True", "False"]),
    "nullable booleans": (pd.Series([True, None], dtype="boolean"), ["True", None]),
    "booleans and numbers": (pd.Series([True, 1, 0, False, "True"], dtype=object), ["True", "1", "0", "False", "True"]),
    "missing": (pd.Series([None, np.nan, pd.NA, pd.NaT, "a", Decimal("NaN")], dtype=object), [None] * 4 + ["a", None]),
    "nothing": (pd.Series([None, None], dtype="float64"), [None, None]),
    "none": (pd.Series([], dtype="float64"), []),
    "floats": (pd.Series([0.1, 1e-7, 1e22, -0.0, np.inf]), ["0.1", "1e-07", f"1{'0' * 22}", "0", "inf"]),
    "float32": (pd.Series([0.1, 1e22], dtype="float32"), ["0.1", f"1{'0' * 22}"]),
    "float16": (pd.Series([0.1, 2.0], dtype="float16"), ["0.1", "2"]),
    "categories of float32": (pd.Series(pd.Categorical(np.array([0.1, 2], dtype="f4"))), ["0.1", "2"]),
    "nullable float32": (pd.Series([0.1, None], dtype="Float32"), ["0.1", None]),
    "NaN in nullable floats": (
        pd.Series([0.0, 1], dtype="Float64") / pd.Series([0.0, 1], dtype="Float64"),
        [None, "1"],
    ),
    "Arrow float32": (pd.Series([0.1, None], dtype=pd.ArrowDtype(pyarrow.float32())), ["0.1", None]),
    "large integers": (pd.Series([2**63, 1], dtype="uint64"), [str(2**63), "1"]),
    "integers of Python": (pd.Series([2**70, -1], dtype=object), [str(2**70), "-1"]),
    "fractions": (pd.Series([Fraction(1, 2), Fraction(4, 2)]), ["1/2", "2"]),
    "decimals": (pd.Series([Decimal("0.10"), Decimal("-0.0"), Decimal("1E+3")]), ["0.1", "0", "1000"]),
    "days": (pd.Series(pd.to_datetime(DAYS)), ["2024-01-01", "2024-02-29"]),
    "objects of days": (pd.Series(DAYS, dtype=object), ["2024-01-01", "2024-02-29"]),
    "Arrow days": (pd.Series(DAYS, dtype=pd.ArrowDtype(pyarrow.date32())), ["2024-01-01", "2024-02-29"]),
    "categories of days": (pd.Series(pd.to_datetime(DAYS)).astype("category"), ["2024-01-01", "2024-02-29"]),
    "times": (pd.Series(pd.to_datetime(["2024-01-01 12:30", None])), ["2024-01-01T12:30:00", None]),
    "time zones": (pd.Series(pd.to_datetime(DAYS[:1])).dt.tz_localize("UTC"), ["2024-01-01T00:00:00+00:00"]),
    "spans": (pd.Series(pd.to_timedelta([2 * 86400, 60], unit="s")), ["2 days", "0 days 00:01:00"]),
    "periods": (pd.Series(pd.period_range("2024-01", periods=2, freq="M")), ["2024-01", "2024-02"]),
    "intervals": (pd.Series(pd.arrays.IntervalArray.from_breaks([0.0, 1, 2.5])), ["(0, 1]", "(1, 2.5]"]),
    "bins": (pd.cut(pd.Series([1, 3]), [0, 2, 4]), ["(0, 2]", "(2, 4]"]),
}


def text(values: pd.Categorical) -> list[str | None]:
    return [None if value != value else value for value in values]


@pytest.mark.parametrize("name", OTHERS)
def test_values_have_an_obvious_text(name):
    values, expected = OTHERS[name]
    found = texts_of(values, key="x", argument="batch_key")
    assert text(found) == expected
    assert list(found.categories) == sorted({one for one in expected if one is not None})

    assert text(texts_of(values.iloc[::-1], key="x", argument="batch_key")) == expected[::-1]


@given(
    values=st.lists(st.sampled_from([-2, 0, 1, 3, 12]), min_size=1, max_size=20), kind=st.sampled_from(sorted(WHOLE))
)
def test_equal_numbers_have_the_same_text_in_every_type(values, kind):
    column = WHOLE[kind](values)
    assert text(texts_of(column, key="x", argument="batch_key")) == [str(value) for value in values]
    assert text(labels_of(column, key="x")) == [str(value) for value in values]


@given(value=st.floats(allow_nan=False) | st.floats(width=32, allow_nan=False).map(np.float32))
def test_floats_have_their_shortest_text(value):
    found = text_of(value)
    assert found is not None
    assert type(value)(found) == value
    assert found == (str(int(found)) if value == np.floor(value) and np.isfinite(value) else str(value))


@pytest.mark.parametrize(
    ("value", "kind"), [([1], "list"), ({"a": 1}, "dict"), (1j, "complex"), ((1,), "tuple"), (b"a", "bytes")]
)
def test_values_without_an_obvious_text_are_refused(value, kind):
    with pytest.raises(DataError, match=f"batch_key='x' contains values of type '{kind}', which have no unique text"):
        texts_of(pd.Series(["a", value], dtype=object), key="x", argument="batch_key")
    for dtype in (pyarrow.list_(pyarrow.int8()), pyarrow.struct([("a", pyarrow.int8())])):
        nested = pd.Series([None, None], dtype=pd.ArrowDtype(dtype))
        assert text(texts_of(nested, key="x", argument="batch_key")) == [None, None]


def test_unused_categories_are_not_looked_at():
    values = pd.Series(pd.Categorical.from_codes([0, -1], categories=pd.Index(["a", 1j], dtype=object)))
    assert text(texts_of(values, key="x", argument="batch_key")) == ["a", None]


N = 24
NUMBERS = [(7 * i) % 3 - 1 for i in range(N)]


def cells_with(column: pd.Series) -> CellSource:
    counts = sparse.csr_matrix(np.ones((N, 3), dtype=np.float32))
    return CellSource(counts, totals=np.full(N, 3.0), obs=pd.DataFrame({"x": column}))


def of_setup(column):
    adata = ad.AnnData(np.ones((N, 3), dtype=np.float32), obs=pd.DataFrame(index=[f"cell{i}" for i in range(N)]))
    adata.obs["x"] = column.set_axis(adata.obs_names)
    Encoder.setup_anndata(adata, batch_key="x", labels_key="x")
    mappings = []
    for name in ("batch", "labels"):
        registry = Encoder._get_most_recent_anndata_manager(adata).get_state_registry(name)
        mapping, codes = list(registry["categorical_mapping"]), np.asarray(adata.obs[f"_scvi_{name}"])
        mappings.append([mapping[code] for code in codes])
    return mappings


def of_training(column):
    names = classes_found("batch_key", "x", lambda key: column)
    return names, numbers_of_cells("batch_key", "x", "batches", names, cells_with(column)).tolist()


def of_annotation(column):
    task = get_task("annotation", labels_key="x")
    found = task.options_from(lambda key: column)
    read = get_task("annotation", labels_key="x", **found).read(lambda key: column)
    return found, read.tolist(), pd.Series(task.strata(lambda key: column)).tolist()


def of_integration(column):
    task = get_task("integration", batch_key="x")
    return task.options_from(lambda key: column), pd.Series(task.strata(lambda key: column)).tolist()


def of_mapping(column):
    return with_batches_of(cells_with(column), "x", ["0", "5"])


def of_splits(column):
    by_group = split_for(N, validation_size=0.3, test_size=0.3, seed=0, groups=column.rename("x"))
    parts = [*split_cells(N, 0.4, 0, groups=column), by_group.train, by_group.validation, by_group.test]
    return [part.tolist() for part in parts]


def of_in_silico(column):
    cells = cells_with(column)
    groups = {name: rows.tolist() for name, rows in rows_of_groups(cells, "x", np.ones(N, dtype=bool))}
    states = [cells_in_state(cells, "cells", {"x": value}).tolist() for value in ("1", 1, 1.0, [-1, "0"])]
    return groups, states


def of_perturbations(column):
    return parse_perturbations(pd.DataFrame({"x": column}), PerturbationKeys("x", control="0"))


def of_evaluation(column):
    return text(texts_in(pd.DataFrame({"x": column}), "x")), text(
        texts_in(pd.DataFrame({"x": column}), "x", argument="batch_key")
    )


ROUTES = [
    of_setup,
    of_training,
    of_annotation,
    of_integration,
    of_mapping,
    of_splits,
    of_in_silico,
    of_perturbations,
    of_evaluation,
]


@pytest.mark.parametrize("route", ROUTES, ids=[route.__name__ for route in ROUTES])
@pytest.mark.parametrize("kind", WHOLE)
def test_all_who_read_a_column_see_the_same_text(kind, route):
    assert route(WHOLE[kind](NUMBERS)) == route(pd.Series(map(str, NUMBERS), dtype=object))


@pytest.mark.parametrize("word", ["", " nan", "NaN", "None", "<NA>", "NA", "n/a", "NULL", "Unknown", "not_assigned"])
def test_words_for_no_label_are_told_once_and_left_out(word):
    values = pd.Series(["B", word, "T", word])
    with pytest.warns(ScforgeWarning, match="labels_key='x': 2 of 4 cells have the label .*treated as missing") as told:
        assert text(labels_of(values, key="x", warns=True)) == ["B", None, "T", None]
    assert len(told) == 1
    assert text(labels_of(values, key="x", classes=["B", word])) == ["B", word, "T", word]
    # Batches keep their names.
    assert text(texts_of(values, key="x", argument="batch_key")) == ["B", word, "T", word]


def test_what_the_package_writes_for_no_label_is_no_label():
    assert all(map(means_no_label, ("unassigned", "Unassigned", "Heterogeneous")))
    assert not any(map(means_no_label, ("unassigned T", "NK", "0", "-", "other")))


def test_codes():
    texts = texts_of(["b", None, "c"], key="x", argument="batch_key")
    assert codes_among(texts, ["a", "b"]).tolist() == [1, -1, -1]
    assert codes_among(texts, ["a", "b"], unknown=-2).tolist() == [1, -1, -2]


def test_classes_are_no_measurements():
    with raises(DataError, "labels_key"):
        labels_of(pd.Series([1.0, 0.5]), key="x")
    assert text(labels_of(pd.Series([1.0, np.nan]), key="x")) == ["1", None]
    assert text(labels_of(pd.Series([1.0, 0.5]).astype("category"), key="x")) == ["1", "0.5"]


def test_negative_integers_are_groups_and_not_missing():
    groups = pd.Series([-1, -1, 2, 2, 3, 3])
    train, validation = split_cells(6, 0.4, seed=0, groups=groups)
    assert len(train) + len(validation) == 6
    with raises(DataError, "groups"):  # codes of a categorical
        split_cells(6, 0.4, seed=0, groups=groups.to_numpy())


def test_enumerations_are_their_text():
    class Lane(enum.StrEnum):
        A = "x"

    class Old(str, enum.Enum):  # noqa: UP042 -- its str() differs
        A = "x"

    for kind in (Lane, Old):
        assert text_of(kind.A) == "x"
