import numpy as np
import pytest

from scforge.data import CensusQuery, open_cells
from scforge.errors import OptionError
from scforge.testing import raises


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (None, None),
        ({"tissue": "lung"}, "tissue == 'lung'"),
        ({"tissue": ["lung", "heart"]}, "tissue in ['lung', 'heart']"),
        ({"is_primary_data": True, "nnz": 5}, "(is_primary_data == True) and (nnz == 5)"),
        ({"a": [True, False], "n": 1}, "(a == True or a == False) and (n == 1)"),
        ({"disease": 'Crohn\'s "disease"'}, "disease == 'Crohn\\'s \"disease\"'"),
        ({"cell type": "a"}, "attr('cell type') == 'a'"),
        ({"in": ["a", "b"]}, "attr('in') in ['a', 'b']"),
        ({"nnz": np.array([1, 2])}, "nnz in [1, 2]"),
        ({"nnz": [np.int64(1), np.int64(2)], "x": np.bool_(True)}, "(nnz in [1, 2]) and (x == True)"),
        ("nnz > 5 or nnz < 2", "nnz > 5 or nnz < 2"),
    ],
)
def test_conditions(filters, expected):
    assert CensusQuery(filters=filters).value_filter == expected


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"filters": {"tissue": []}}, "filters"),
        ({"filters": ["lung"]}, "filters"),
        ({"obs": "cell_type"}, "obs"),
    ],
)
def test_what_is_no_filter(options, argument):
    with raises(OptionError, argument):
        CensusQuery(**options)


@pytest.mark.parametrize(("uri", "module"), [(None, "cellxgene_census"), ("census", "tiledbsoma")])
def test_missing_clients_are_told_with_the_remedy(monkeypatch, uri, module):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    message = rf"requires the package '{module}'.*pip install \"scforge\[census\]\" in a separate environment"
    with pytest.raises(OptionError, match=message):
        open_cells(CensusQuery(uri=uri))
