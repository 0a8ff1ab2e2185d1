import numpy as np
import pytest
import scanpy as sc
from scipy import sparse, stats

from scforge.errors import DataError
from scforge.perturbation.effects import PerturbedCells, effects_of, moments_of
from scforge.perturbation.keys import PerturbationKeys
from scforge.perturbation.metrics import de_genes

KEYS = PerturbationKeys("target", "control", context="type")


def test_mistakes_are_told(perturbed, tmp_path) -> None:
    adata = perturbed(("g0",), contexts=("x", "y"))
    adata.write_h5ad(tmp_path / "cells.h5ad")
    backed, missing, twice = sc.read_h5ad(tmp_path / "cells.h5ad", backed="r"), adata.copy(), adata.copy()
    missing.obs.loc[missing.obs_names[0], "type"] = None
    twice.var_names = ["g0", *twice.var_names[:-1]]
    for some, message in [
        (adata[adata.obs["target"] == "g0"].copy(), "control='control' is not in obs"),
        (missing, "is missing for 1 cells of real"),
        (twice, "var_names of .* contains duplicates .'g0'."),
        (backed, r"X of real is backed by a file; pass an AnnData with values in memory, e.g. adata.to_memory\(\)"),
    ]:
        with pytest.raises(DataError, match=message):
            PerturbedCells.read(some, KEYS, argument="real")
    backed.file.close()


def test_effects_scores_and_p_values_are_those_of_scipy() -> None:
    cells = np.random.default_rng(0).poisson(1.0, (50, 30)).astype(np.float64)
    cells[:, 0] = 0.0
    groups = np.repeat([0, 1, 2, -1], [14, 1, 30, 5])
    moments = moments_of(sparse.csr_matrix(cells), groups, 3)
    found = effects_of(moments, np.array([0, 1]), np.array([2, 2]))
    one, other = cells[:14, 1:], cells[15:45, 1:]
    expected = stats.ttest_ind(one, other, equal_var=False)
    np.testing.assert_allclose(found.deltas[0, 1:], one.mean(axis=0) - other.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(found.scores[0, 1:], expected.statistic, rtol=1e-5)
    np.testing.assert_allclose(found.p_values[0, 1:], expected.pvalue, rtol=1e-9)
    assert found.p_values[0, 0] == 1.0
    assert (found.p_values[1] == 1.0).all()  # one cell has no spread
    assert (found.n_cells.tolist(), found.n_controls.tolist()) == ([14, 1], [30, 30])
    expected = stats.false_discovery_control(found.p_values[0]) <= 0.05
    np.testing.assert_array_equal(de_genes(found.p_values)[0], expected)
