from __future__ import annotations

import numpy as np
import pytest

from scforge.errors import DataError
from scforge.eval.perturbation_baselines import (
    KnownEffects,
    WantedEffects,
    baseline_effects,
    gene_scores,
    linear_effects,
)

DELTAS = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 3.0]])
CONTROL = np.array([0.5, 1.0, 2.0, 0.0])
KNOWN = KnownEffects((("A",), ("B",), ("A", "C")), ("all",) * 3, DELTAS, {"all": CONTROL})


def test_simple_baselines_by_hand() -> None:
    found = baseline_effects(KNOWN, WantedEffects((("A", "B"), ("D",), ("B", "D")), ("all",) * 3))
    mean, typical = DELTAS.mean(axis=0), np.array([0.5, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(found["no_change"], 0.0)
    np.testing.assert_allclose(found["train_mean"], [mean] * 3)
    np.testing.assert_allclose(found["control_mean"], 0.0)
    np.testing.assert_allclose(found["additive"], [[1, 2, 0, 0], typical, typical + DELTAS[1]])
    # Nothing is known of what is perturbed.
    for name in ("linear_pca", "linear_embedding", "nearest"):
        np.testing.assert_allclose(found[name], [mean] * 3)
    assert "perturbation_mean" not in found


def test_additive_is_there_for_combinations_only() -> None:
    assert "additive" not in baseline_effects(KNOWN, WantedEffects((("D",),), ("all",)))


def test_contexts() -> None:
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
    eye = np.eye
    center = deltas.mean(axis=0)
    inverse = np.linalg.inv(genes.T @ genes + 0.1 * eye(3))
    weights = inverse @ genes.T @ (deltas - center).T @ seen @ np.linalg.inv(seen.T @ seen + 0.1 * eye(4))
    expected = (genes @ weights @ wanted.T).T + center
    np.testing.assert_allclose(linear_effects(deltas, genes, seen, wanted), expected)
    wanted[1, 0] = np.nan
    np.testing.assert_allclose(linear_effects(deltas, genes, seen, wanted)[1], center)


def test_the_linear_model_finds_what_is_linear() -> None:
    rng = np.random.default_rng(1)
    genes = rng.normal(size=(60, 3)) * 5
    genes -= genes[:40].mean(axis=0)
    weights = rng.normal(size=(3, 3))
    deltas = genes[:40] @ weights @ genes.T
    names = [f"g{i}" for i in range(60)]
    features = {name: genes[i] for i, name in enumerate(names)}
    known = KnownEffects(tuple((name,) for name in names[:40]), ("all",) * 40, deltas, {"all": np.zeros(60)})
    wanted = WantedEffects(tuple((name,) for name in names[40:]), ("all",) * 20, {}, features)
    found = baseline_effects(known, wanted)["linear_embedding"]
    truth = genes[40:] @ weights @ genes.T
    assert np.square(found - truth).mean() < 0.01 * np.square(truth).mean()


def test_the_nearest_perturbation_has_the_most_similar_genes() -> None:
    # Genes 0 and 1 respond alike under all perturbations, gene 2 does not.
    deltas = np.array([[3.0, 3.0, 0.0, 0.0], [0.0, 0.0, 4.0, 1.0], [2.0, 2.0, 0.0, 1.0]])
    known = KnownEffects((("g0",), ("g2",), ("g3",)), ("all",) * 3, deltas, {"all": np.zeros(4)})
    wanted = WantedEffects((("g1",),), ("all",), {f"g{i}": i for i in range(4)})
    np.testing.assert_allclose(baseline_effects(known, wanted)["nearest"], deltas[:1])


def test_gene_scores_are_principal_components_of_genes() -> None:
    from sklearn.decomposition import PCA

    expression = np.concatenate([CONTROL[None], CONTROL + DELTAS]).T
    expected = PCA(3).fit_transform(expression)
    np.testing.assert_allclose(np.abs(gene_scores(KNOWN, 3)), np.abs(expected), atol=1e-9)


def test_effects_without_names_are_refused() -> None:
    with pytest.raises(DataError, match="2 targets, 3 contexts and 3 effects"):
        KnownEffects((("A",), ("B",)), ("all",) * 3, DELTAS, {"all": CONTROL})
