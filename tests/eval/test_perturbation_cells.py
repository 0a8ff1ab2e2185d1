import numpy as np
import pytest
import scanpy as sc
from scipy import sparse
from sklearn.decomposition import PCA

from scforge.data.expression import log_normalized
from scforge.errors import DataError
from scforge.eval.perturbation import KnownEffects, WantedEffects, baseline_effects, gene_scores, linear_effects
from scforge.eval.perturbation_metrics import EffectKeys, PerturbedCells

KEYS = EffectKeys("target", "control", "type")
DELTAS = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 3.0]])
CONTROL = np.array([0.5, 1.0, 2.0, 0.0])
KNOWN = KnownEffects((("A",), ("B",), ("A", "C")), ("all",) * 3, DELTAS, {"all": CONTROL})


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


def test_simple_baselines_by_hand() -> None:
    found = baseline_effects(KNOWN, WantedEffects((("A", "B"), ("D",), ("B", "D")), ("all",) * 3))
    mean, typical = DELTAS.mean(axis=0), np.array([0.5, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(found["no_change"], 0.0)
    np.testing.assert_allclose(found["control_mean"], 0.0)
    np.testing.assert_allclose(found["additive"], [[1, 2, 0, 0], typical, typical + DELTAS[1]])
    # Nothing is known of what is perturbed.
    for name in ("train_mean", "linear_pca", "linear_embedding", "nearest"):
        np.testing.assert_allclose(found[name], [mean] * 3)
    assert "perturbation_mean" not in found
    assert "additive" not in baseline_effects(KNOWN, WantedEffects((("D",),), ("all",))), "for combinations only"


def test_baselines_of_contexts() -> None:
    controls = {"x": np.zeros(4), "y": np.ones(4), "z": np.full(4, 0.9)}
    known = KnownEffects((("A",), ("B",), ("A",)), ("x", "x", "y"), DELTAS, controls)
    found = baseline_effects(known, WantedEffects((("A",), ("D",)), ("z", "x")))
    np.testing.assert_allclose(found["train_mean"], [DELTAS.mean(axis=0), DELTAS[:2].mean(axis=0)])
    np.testing.assert_allclose(found["perturbation_mean"], [DELTAS[[0, 2]].mean(axis=0), DELTAS[:2].mean(axis=0)])
    np.testing.assert_allclose(found["nearest"][0], DELTAS[2])
    np.testing.assert_allclose(found["control_mean"][:, 0], [1.9 / 3 - 0.9, 1.9 / 3])


def test_the_linear_model_is_the_published_formula() -> None:
    rng = np.random.default_rng(0)
    deltas, genes, seen, wanted = (rng.normal(size=shape) for shape in ((7, 20), (20, 3), (7, 4), (2, 4)))
    center = deltas.mean(axis=0)
    inverse = np.linalg.inv(genes.T @ genes + 0.1 * np.eye(3))
    weights = inverse @ genes.T @ (deltas - center).T @ seen @ np.linalg.inv(seen.T @ seen + 0.1 * np.eye(4))
    expected = (genes @ weights @ wanted.T).T + center
    np.testing.assert_allclose(linear_effects(deltas, genes, seen, wanted), expected)
    wanted[1, 0] = np.nan
    np.testing.assert_allclose(linear_effects(deltas, genes, seen, wanted)[1], center)
    # The scores of genes are their principal components.
    expected = PCA(3).fit_transform(np.concatenate([CONTROL[None], CONTROL + DELTAS]).T)
    np.testing.assert_allclose(np.abs(gene_scores(KNOWN)[:, :3]), np.abs(expected), atol=1e-9)


def test_the_nearest_perturbation_has_the_most_similar_genes() -> None:
    # Genes 0 and 1 respond alike under all perturbations, gene 2 does not.
    deltas = np.array([[3.0, 3.0, 0.0, 0.0], [0.0, 0.0, 4.0, 1.0], [2.0, 2.0, 0.0, 1.0]])
    known = KnownEffects((("g0",), ("g2",), ("g3",)), ("all",) * 3, deltas, {"all": np.zeros(4)})
    wanted = WantedEffects((("g1",),), ("all",), {f"g{i}": i for i in range(4)})
    np.testing.assert_allclose(baseline_effects(known, wanted)["nearest"], deltas[:1])
