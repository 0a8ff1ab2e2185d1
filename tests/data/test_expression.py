import numpy as np
import pytest
import scanpy as sc
from scipy import sparse

from scforge.data.expression import log_normalized
from scforge.errors import DataError


def test_counts_and_their_logarithms_are_the_same(perturbed) -> None:
    counts = perturbed()
    logs = counts.copy()
    sc.pp.normalize_total(logs, target_sum=1e4)
    sc.pp.log1p(logs)
    expected = log_normalized(counts).toarray()
    np.testing.assert_allclose(expected, logs.X.toarray(), rtol=1e-5)
    for some in (logs, logs[:, :20].copy()):
        np.testing.assert_array_equal(log_normalized(some).toarray(), some.X.toarray())
    counts.layers["dense"] = counts.X.toarray()
    np.testing.assert_array_equal(log_normalized(counts, "dense").toarray(), expected)
    # Parts of a value are added up, and the input stays.
    halves = sparse.coo_matrix(counts.X)
    rows, columns = np.tile(halves.row, 2), np.tile(halves.col, 2)
    order = np.argsort(rows, kind="stable")
    parts = np.concatenate([halves.data - 1, np.ones_like(halves.data)])[order]
    indptr = np.r_[0, np.cumsum(np.bincount(rows, minlength=counts.n_obs))]
    counts.X = sparse.csr_matrix((parts, columns[order], indptr), counts.shape)
    np.testing.assert_allclose(log_normalized(counts).toarray(), expected, rtol=1e-6)
    assert counts.X.nnz == len(parts)
    counts.X = counts.layers["dense"].astype(np.float16)
    np.testing.assert_allclose(log_normalized(counts).toarray(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.multiply(-0.5), "X of adata contains negative values .* neither counts nor log1p"),
        (lambda x: x.log1p(), "log1p of counts that were not normalized"),
        (lambda x: x * 0.37, "neither counts nor log1p of counts per 10,000"),
        (lambda x: x * np.nan, "missing or infinite"),
        (lambda x: x.multiply(1e6 / x.sum(axis=1)).log1p(), "sums to 1e[+]06"),
        (lambda x: x.multiply(3e3 / x.sum(axis=1)).log1p(), "normalized to about 3,000 per cell instead of 10,000"),
    ],
)
def test_other_values_are_refused(perturbed, change, message: str) -> None:
    adata = perturbed(("g0",))
    adata.X = sparse.csr_matrix(change(adata.X))
    with pytest.raises(DataError, match=message):
        log_normalized(adata)
    if "3,000" in message:  # models may predict one profile for all cells
        assert log_normalized(adata, made=True).shape == adata.shape
