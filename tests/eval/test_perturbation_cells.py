from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scanpy as sc
from scipy import sparse

from scforge.errors import DataError
from scforge.eval.log_scale import log_normalised
from scforge.eval.perturbation_cells import Effect, EffectKeys, PerturbedCells

KEYS = EffectKeys("target", "control", "type")


def test_counts_and_their_logarithms_are_the_same(perturbed) -> None:
    counts = perturbed()
    logs = counts.copy()
    sc.pp.normalize_total(logs, target_sum=1e4)
    sc.pp.log1p(logs)
    np.testing.assert_allclose(log_normalised(counts).toarray(), logs.X.toarray(), rtol=1e-5)
    np.testing.assert_array_equal(log_normalised(logs).toarray(), logs.X.toarray())
    part = logs[:, :20].copy()
    np.testing.assert_array_equal(log_normalised(part).toarray(), part.X.toarray())
    counts.layers["dense"] = counts.X.toarray()
    np.testing.assert_array_equal(log_normalised(counts, "dense").toarray(), log_normalised(counts).toarray())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.X.multiply(-0.5), "X of adata holds negative values .* neither counts nor log1p"),
        (lambda a: a.X.log1p(), "log1p of counts that were not normalised"),
        (lambda a: a.X * 0.37, "neither counts nor log1p of counts per 10,000"),
        (lambda a: a.X * np.nan, "missing or infinite"),
        (lambda a: (a.X.multiply(1e6 / a.X.sum(axis=1))).log1p(), "a total of 1e[+]06"),
    ],
)
def test_other_values_are_refused(perturbed, change, message: str) -> None:
    adata = perturbed(("g0",), n_cells=5, n_controls=5)
    adata.X = sparse.csr_matrix(change(adata))
    with pytest.raises(DataError, match=message):
        log_normalised(adata)


def test_cells_are_grouped_by_what_was_done_to_them(perturbed) -> None:
    adata = perturbed(("g0", "g2+g1"), n_cells=3, n_controls=4, contexts=("x", "y"))
    cells = PerturbedCells.read(adata, KEYS, argument="real")
    assert cells.effects == (
        Effect(("g0",), "x"),
        Effect(("g0",), "y"),
        Effect(("g1", "g2"), "x"),
        Effect(("g1", "g2"), "y"),
    )
    assert np.bincount(cells.groups).tolist() == [3, 3, 3, 3, 4, 4]
    assert cells.controls.tolist() == [4, 5, 4, 5]
    groups = cells.moments()
    both = np.asarray(cells.expression[:4].mean(axis=0)).ravel()
    np.testing.assert_allclose(groups.mean[4], both, rtol=1e-6)
    deltas = cells.measured(groups, argument="real").deltas
    np.testing.assert_allclose(deltas[0], groups.mean[0] - groups.mean[4])
    fewer = cells.over(adata.var_names[[5, 2]], argument="real")
    np.testing.assert_array_equal(fewer.expression.toarray(), cells.expression.toarray()[:, [5, 2]])
    assert KEYS.effect("g2+g1", "x") == cells.effects[2]


def test_predicted_cells_need_no_controls(perturbed) -> None:
    adata = perturbed(("g0",))
    adata = adata[adata.obs["target"] == "g0"].copy()
    assert PerturbedCells.read(adata, KEYS, argument="made", made=True).effects == (Effect(("g0",), "all"),)
    with pytest.raises(DataError, match="control='control' is no label"):
        PerturbedCells.read(adata, KEYS, argument="real")


def test_mistakes_are_told(perturbed) -> None:
    adata = perturbed(("g0",), contexts=("x", "y"))
    without = adata[~((adata.obs["target"] == "control") & (adata.obs["type"] == "y"))].copy()
    cells = PerturbedCells.read(without, KEYS, argument="real")
    with pytest.raises(DataError, match="real has no control cell in the contexts 'y'"):
        cells.measured(cells.moments(), argument="real")
    cells = PerturbedCells.read(adata, KEYS, argument="real")
    with pytest.raises(DataError, match=r"real lacks 1 of 2 genes \(first: 'G1'"):
        cells.over(pd.Index(["g0", "G1"]), argument="real")
    adata.obs.loc[adata.obs_names[0], "type"] = None
    with pytest.raises(DataError, match="no value for 1 of 200 cells"):
        PerturbedCells.read(adata, KEYS, argument="real")
    twice = perturbed(("g0",))
    twice.var_names = ["g0", *twice.var_names[:-1]]
    with pytest.raises(DataError, match="'g0' more than once"):
        PerturbedCells.read(twice, KEYS, argument="real")


def test_logs_of_another_total_are_refused(perturbed) -> None:
    adata = perturbed(("g0",))
    sc.pp.normalize_total(adata, target_sum=3_000)
    sc.pp.log1p(adata)
    with pytest.raises(DataError, match="normalised to about 3,000 per cell and not to 10,000"):
        log_normalised(adata)
    # Models may predict one profile for all cells.
    assert log_normalised(adata, made=True).shape == adata.shape


def test_parts_of_a_value_are_added_up_and_the_input_stays(perturbed) -> None:
    adata = perturbed(("g0",), n_cells=5, n_controls=5)
    whole = log_normalised(adata).toarray()
    rows, columns = adata.X.nonzero()
    half = np.asarray(adata.X[rows, columns]).ravel() - 1
    order = np.argsort(np.r_[rows, rows], kind="stable")
    indptr = np.r_[0, np.cumsum(np.bincount(np.r_[rows, rows], minlength=adata.n_obs))]
    split = sparse.csr_matrix(
        (np.r_[half, np.ones(len(half))][order], np.r_[columns, columns][order], indptr), adata.shape
    )
    adata.X = split
    n_stored = adata.X.nnz
    np.testing.assert_allclose(log_normalised(adata).toarray(), whole, rtol=1e-6)
    assert adata.X.nnz == n_stored


def test_half_precision_is_read_and_files_are_refused(perturbed, tmp_path) -> None:
    adata = perturbed(("g0",), n_cells=5, n_controls=5)
    whole = log_normalised(adata)
    adata.write_h5ad(tmp_path / "cells.h5ad")
    adata.X = adata.X.toarray().astype(np.float16)
    np.testing.assert_allclose(log_normalised(adata).toarray(), whole.toarray(), rtol=1e-6)
    backed = sc.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    with pytest.raises(DataError, match=r"real is backed by a file, .* pass it as adata.to_memory\(\)"):
        PerturbedCells.read(backed, EffectKeys("target", "control"), argument="real")
    backed.file.close()
