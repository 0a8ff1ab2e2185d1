from collections.abc import Sequence

import numpy as np
from sklearn.decomposition import PCA

from scforge.perturbation.baselines import baseline_effects, gene_scores
from scforge.perturbation.effects import KnownEffects, WantedEffects
from scforge.perturbation.kernels import linear_effects
from scforge.perturbation.keys import Effect


def effects(*targets: tuple[str, ...], contexts: Sequence[str] | None = None) -> list[Effect]:
    return [Effect(*pair) for pair in zip(targets, contexts or ["all"] * len(targets), strict=True)]


DELTAS = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 3.0]])
CONTROL = np.array([0.5, 1.0, 2.0, 0.0])
KNOWN = KnownEffects(effects(("A",), ("B",), ("A", "C")), DELTAS, {"all": CONTROL})


def test_simple_baselines_by_hand() -> None:
    found = baseline_effects(KNOWN, WantedEffects(effects(("A", "B"), ("D",), ("B", "D"))))
    mean, typical = DELTAS.mean(axis=0), np.array([0.5, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(found["no_change"], 0.0)
    np.testing.assert_allclose(found["control_mean"], 0.0)
    np.testing.assert_allclose(found["additive"], [[1, 2, 0, 0], typical, typical + DELTAS[1]])
    # Nothing is known of what is perturbed.
    for name in ("train_mean", "linear_pca", "linear_embedding", "nearest"):
        np.testing.assert_allclose(found[name], [mean] * 3)
    assert "perturbation_mean" not in found
    assert "additive" not in baseline_effects(KNOWN, WantedEffects(effects(("D",)))), "for combinations only"


def test_baselines_of_contexts() -> None:
    controls = {"x": np.zeros(4), "y": np.ones(4), "z": np.full(4, 0.9)}
    known = KnownEffects(effects(("A",), ("B",), ("A",), contexts="xxy"), DELTAS, controls)
    found = baseline_effects(known, WantedEffects(effects(("A",), ("D",), contexts="zx")))
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
    known = KnownEffects(effects(("g0",), ("g2",), ("g3",)), deltas, {"all": np.zeros(4)})
    wanted = WantedEffects(effects(("g1",)), {f"g{i}": i for i in range(4)})
    np.testing.assert_allclose(baseline_effects(known, wanted)["nearest"], deltas[:1])
