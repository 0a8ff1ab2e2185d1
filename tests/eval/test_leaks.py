from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scanpy as sc
from scipy import sparse

from scforge.errors import DataError, ScforgeWarning
from scforge.eval.leaks import check_disjoint, check_features, check_no_copies, check_same_rows
from scforge.eval.log_scale import log_normalised

KEYS = {"perturbation_key": "target", "control": "control"}


def test_what_is_in_both_is_found(perturbed) -> None:
    train, test = perturbed(), perturbed(seed=1, prefix="other")
    check_disjoint(train, test)
    check_disjoint(["a"], ["b"], what="donors")
    with pytest.raises(DataError, match=r"1 of 1 test donors are training donors, too \(first: 'a'\)"):
        check_disjoint(["a", "b"], ["a"], what="donors")
    test.obs_names = [train.obs_names[3], *test.obs_names[1:]]
    with pytest.raises(DataError, match="1 of 220 test cells are training cells, too"):
        check_disjoint(train, test)


@pytest.mark.parametrize("n_copies", [1, 3])
def test_cells_under_another_name_are_found(perturbed, n_copies: int) -> None:
    train, test = perturbed(), perturbed(seed=1, prefix="other")
    counts = test.X.toarray()
    counts[:n_copies] = train.X[:n_copies].toarray()
    # Whatever the order of the genes, and whether they are stored as floats or not.
    test.X = sparse.csr_matrix(counts.astype(np.int32))
    test = test[:, ::-1].copy()
    if n_copies == 1:
        with pytest.warns(ScforgeWarning, match="1 of 220 test cells have the same expression"):
            check_disjoint(train, test)
    else:
        with pytest.raises(DataError, match="3 of 220 test cells have the same expression .* copies"):
            check_disjoint(train, test)


@pytest.mark.slow
def test_leaked_cells_are_found_where_one_side_is_counts_and_the_other_logs(perturbed) -> None:
    counts, logs = perturbed(), perturbed()
    logs.X = logs.X.astype(np.float64)
    sc.pp.normalize_total(logs, target_sum=1e4)
    sc.pp.log1p(logs)
    one, other = log_normalised(counts), log_normalised(logs)
    assert not np.array_equal(one.toarray(), other.toarray())
    with pytest.raises(DataError, match="220 of 220 test cells have the same expression"):
        check_same_rows(one, other)


def test_nearly_empty_cells_are_no_copies() -> None:
    rows = sparse.csr_matrix(np.eye(5, 40, dtype=np.float32))
    check_no_copies(rows, rows)


def test_copies_of_held_out_cells_are_found() -> None:
    real = sparse.random(50, 40, 0.5, format="csr", random_state=0, data_rvs=np.random.default_rng(0).random)
    made = sparse.random(50, 40, 0.5, format="csr", random_state=1, data_rvs=np.random.default_rng(1).random)
    check_no_copies(made, real)
    some = sparse.vstack([made[:45], real[10:15]], format="csr")
    some.data += np.random.default_rng(2).uniform(-1e-6, 1e-6, some.nnz)
    with pytest.raises(DataError, match=r"of 50 predicted cells of 'x' are copies of held-out cells \(first: row 45\)"):
        check_no_copies(some, real, argument="'x'")


@pytest.mark.parametrize("where", ["X", "layer", "obsm"])
@pytest.mark.parametrize("how", ["mean", "scaled", "delta", "standardised"])
def test_features_made_of_the_held_out_cells_are_found(perturbed, where: str, how: str) -> None:
    labels = [f"g{i}" for i in range(6)]
    real = perturbed(labels, n_cells=10, n_controls=10)
    rng = np.random.default_rng(0)
    real.layers["logs"] = real.X.log1p()
    real.obsm["X_model"] = rng.normal(size=(real.n_obs, 8)).astype(np.float32)
    matrix = {"X": real.X.toarray(), "layer": real.layers["logs"].toarray(), "obsm": real.obsm["X_model"]}[where]
    features = pd.DataFrame(matrix).groupby(real.obs["target"].to_numpy()).mean()
    if how == "delta":
        features = features.drop(index="control") - features.loc["control"]
    elif how == "scaled":
        features *= 3.0
    elif how == "standardised":
        features = (features - features.mean()) / features.std()
    with pytest.raises(DataError, match="gene_features has for 'g0' the mean of .* held-out cells under 'g0'"):
        check_features(features, real, **KEYS)


def test_other_features_pass(perturbed) -> None:
    real = perturbed()
    real.obsm["X_model"] = np.random.default_rng(0).normal(size=(real.n_obs, 8))
    names = [*real.obs["target"].unique(), "other"]
    honest = pd.DataFrame(np.random.default_rng(1).normal(size=(len(names), 8)), index=names)
    check_features(honest, real, **KEYS)
    # Means of training cells are known of training perturbations.
    other = perturbed(("g7", "g8"))
    check_features(
        pd.DataFrame(other.X.toarray()).groupby(other.obs["target"].to_numpy()).mean().drop("control"), real, **KEYS
    )


@pytest.mark.parametrize("how", ["log", "some genes", "one of many"])
def test_features_of_the_logs_or_of_single_genes_are_found(perturbed, how: str) -> None:
    real = perturbed([f"g{i}" for i in range(6)], n_cells=10, n_controls=10)
    logs = pd.DataFrame(log_normalised(real).toarray()).groupby(real.obs["target"].to_numpy()).mean()
    honest = pd.DataFrame(np.random.default_rng(0).normal(size=(len(logs), 8)), index=logs.index)
    honest["known"] = np.arange(len(logs)) == 2
    check_features(honest.astype(float), real, **KEYS)
    features = {
        "log": logs,
        "some genes": logs.iloc[:, [7, 3, 20]] * 2 - 1,
        "one of many": honest.astype(float).assign(leak=-logs[5]),
    }[how]
    with pytest.raises(DataError, match="the mean of the log1p CP10K of X over the held-out cells"):
        check_features(features, real, **KEYS)
