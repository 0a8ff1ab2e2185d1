import numpy as np

from scforge.perturbation.baselines import baseline_effects
from scforge.perturbation.effects import KnownEffects, WantedEffects
from scforge.perturbation.keys import Effect


def test_kernels_use_the_sources_that_tell_effects() -> None:
    rng = np.random.default_rng(0)
    names = [f"g{i}" for i in range(60)]
    told, other = rng.normal(size=(60, 4)), rng.normal(size=(60, 4))
    effects = 1.0 + told @ rng.normal(size=(4, 30))
    deltas = effects[:50] + 0.1 * rng.normal(size=(50, 30))
    # Effects of few cells are mostly noise.
    few = np.arange(50) % 5 == 0
    deltas[few] += 20 * rng.normal(size=(10, 30))
    singles = [Effect((name,), "all") for name in names]
    tables = {"told": dict(zip(names, told, strict=True)), "other": dict(zip(names, other, strict=True))}
    controls = {"all": np.zeros(30)}

    def error(n_cells: np.ndarray | None, **some: dict[str, np.ndarray]) -> float:
        known = KnownEffects(singles[:50], deltas, controls, n_cells)
        made = baseline_effects(known, WantedEffects(singles[50:], tables=some))["kernels"]
        return float(np.square(made - effects[50:]).mean() / effects[50:].var(axis=0).mean())

    n_cells = np.where(few, 1, 400)
    assert error(n_cells, **tables) < 0.15
    assert error(n_cells, **tables) < error(None, **tables)
    # Features that tell nothing leave the mean, by the number of cells.
    assert 0.8 < error(n_cells, other=tables["other"]) < 1.5
    known = KnownEffects(singles[:50], deltas, controls, n_cells)
    pair = baseline_effects(known, WantedEffects([Effect(("g1", "g2"), "all")], tables=tables))
    np.testing.assert_allclose(pair["kernels"], pair["additive"], atol=0.5)
