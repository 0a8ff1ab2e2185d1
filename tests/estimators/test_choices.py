from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import open_cells
from scforge.errors import DataError
from scforge.estimators.choices import cells_in_state


@pytest.mark.parametrize(
    ("values", "wanted", "expected"),
    [
        ([1.0, 2.0, np.nan], 1, [True, False, False]),
        ([1, 2, 10], "1", [True, False, False]),
        (["1", "2", "10"], 1.0, [True, False, False]),
        ([False, True, True], "True", [False, True, True]),
        ([0.5, 1.5, np.nan], [0.5, "1.5"], [True, True, False]),
        (pd.Categorical(["a", "b", None]), ("a", "b"), [True, True, False]),
    ],
)
def test_values_are_found_as_they_are_or_as_text(values, wanted, expected):
    obs = pd.DataFrame({"stage": values}, index=["c0", "c1", "c2"])
    cells = open_cells(ad.AnnData(sparse.csr_matrix(np.ones((3, 2), dtype=np.float32)), obs=obs))
    assert cells_in_state(cells, "goal", {"stage": wanted}).tolist() == expected
    for missing in ("c", 7, np.nan, None):
        with pytest.raises(DataError, match="goal: no cell has"):
            cells_in_state(cells, "goal", {"stage": missing})
