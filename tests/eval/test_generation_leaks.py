import numpy as np
import pandas as pd
import pytest
import scanpy as sc
from scipy import sparse

from scforge.data.expression import log_normalized
from scforge.errors import DataError, ScforgeWarning
from scforge.eval.generation import SAME_CELL, check_copies, check_disjoint, check_features, copied_rows
from scforge.perturbation.keys import PerturbationKeys
from scforge.testing import raises

KEYS = PerturbationKeys("target", control="control")


@pytest.fixture(scope="module")
def six(perturbed):
    """Cells under six perturbations, with the embedding of a model."""
    real = perturbed([f"g{i}" for i in range(6)], n_cells=10, n_controls=10)
    real.layers["logs"] = real.X.log1p()
    real.obsm["X_model"] = np.random.default_rng(0).normal(size=(real.n_obs, 8)).astype(np.float32)
    return real


def means_of(matrix, adata) -> pd.DataFrame:
    dense = matrix.toarray() if sparse.issparse(matrix) else matrix
    return pd.DataFrame(dense).groupby(adata.obs["target"].to_numpy()).mean()


def test_what_is_in_both_is_found(perturbed) -> None:
    train, test = perturbed(), perturbed(seed=1, prefix="other")
    check_disjoint(train, test)
    check_disjoint(["a"], ["b"], what="donors")
    with pytest.raises(DataError, match=r"1 of 1 test donors are also training donors \(first: 'a'\)"):
        check_disjoint(["a", "b"], ["a"], what="donors")
    test.obs_names = [train.obs_names[3], *test.obs_names[1:]]
    with pytest.raises(DataError, match="1 of 220 test cells are also training cells"):
        check_disjoint(train, test)


def test_cells_under_another_name_are_found(perturbed) -> None:
    train, test = perturbed(), perturbed(seed=1, prefix="other")
    counts = test.X.toarray()
    for n_copies in (1, 3):
        counts[:n_copies] = train.X[:n_copies].toarray()
        # Whatever the order of the genes, and whether they are stored as floats or not.
        test.X = sparse.csr_matrix(counts.astype(np.int32))
        if n_copies == 1:
            with pytest.warns(ScforgeWarning, match="1 of 220 test cells have exactly the same expression"):
                check_disjoint(train, test[:, ::-1].copy())
    with pytest.raises(DataError, match="3 of 220 test cells have exactly the same expression .* copies"):
        check_disjoint(train, test[:, ::-1].copy())


@pytest.mark.slow
def test_leaked_cells_are_found_where_one_side_is_counts_and_the_other_logs(perturbed) -> None:
    counts, logs = perturbed(), perturbed()
    logs.X = logs.X.astype(np.float64)
    sc.pp.normalize_total(logs, target_sum=1e4)
    sc.pp.log1p(logs)
    one, other = log_normalized(counts), log_normalized(logs)
    assert not np.array_equal(one.toarray(), other.toarray())
    with pytest.raises(DataError, match="220 of 220 test cells have exactly the same expression"):
        check_copies(copied_rows(other, one), f"test cells {SAME_CELL}")


def test_copies_of_held_out_cells_are_found() -> None:
    rng = np.random.default_rng(0)
    real, made = (sparse.random(50, 40, 0.5, format="csr", random_state=i, data_rvs=rng.random) for i in (0, 1))
    assert not copied_rows(made, real).any()
    some = sparse.vstack([made[:45], real[10:15]], format="csr")
    some.data += rng.uniform(-1e-6, 1e-6, some.nnz)
    with pytest.raises(DataError, match="5 of 50 predicted cells are identical to held-out cells"):
        check_copies(copied_rows(some, real), "predicted cells are identical to held-out cells")
    empty = sparse.csr_matrix(np.eye(5, 40, dtype=np.float32))
    assert not copied_rows(empty, empty).any(), "too few genes tell nothing"


@pytest.mark.parametrize("where", ["X", "layer", "obsm"])
@pytest.mark.parametrize("how", ["mean", "scaled", "delta", "standardized"])
def test_features_made_of_the_held_out_cells_are_found(six, where: str, how: str) -> None:
    means = means_of({"X": six.X, "layer": six.layers["logs"], "obsm": six.obsm["X_model"]}[where], six)
    features = {
        "mean": means,
        "scaled": means * 3.0,
        "delta": means.drop(index="control") - means.loc["control"],
        "standardized": (means - means.mean()) / means.std(),
    }[how]
    with raises(DataError, "gene_features"):
        check_features(features, six, KEYS)


def test_features_of_the_logs_or_of_single_genes_are_found_and_others_pass(six, perturbed) -> None:
    logs = means_of(log_normalized(six), six)
    honest = pd.DataFrame(np.random.default_rng(1).normal(size=(7, 8)), index=logs.index)
    honest["known"] = (np.arange(7) == 2).astype(float)
    # Means of training cells are known of training perturbations.
    other = perturbed(("g7", "g8"))
    for features in (honest, honest.rename({"g5": "other"}), means_of(other.X, other).drop("control")):
        check_features(features, six, KEYS)
    for features in (logs, logs.iloc[:, [7, 3, 20]] * 2 - 1, honest.assign(leak=-logs[5])):
        with raises(DataError, "gene_features"):
            check_features(features, six, KEYS)
