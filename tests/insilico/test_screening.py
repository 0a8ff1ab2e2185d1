from functools import partial

import numpy as np
import pytest
from scipy import sparse
from scipy.stats import false_discovery_control, kstest

from scforge.data import GeneVocab, open_cells
from scforge.data.cells import Cells, CellSource
from scforge.datasets import pbmc3k
from scforge.insilico.screening import (
    Perturbation,
    PerturbedCells,
    centroid,
    mean_moves,
    screen,
    strata_of,
    units,
    with_rates,
)
from scforge.models import Encoder
from scforge.training.predict import embed

N_GENES = 60


@pytest.fixture
def cells() -> CellSource:
    """200 cells; gene 0 is on in all of the first half, and the last gene nowhere."""
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.uniform(0.2, 2.0, N_GENES), (200, N_GENES)).astype(np.float32)
    counts[:, 0] = 0
    counts[:100, 0] = 1 + rng.poisson(1.0, 100)
    counts[:, -1] = 0
    vocab = GeneVocab.from_genes([f"g{i}" for i in range(N_GENES)])
    return CellSource(sparse.csr_matrix(counts), counts.sum(axis=1, dtype=np.float64), vocab=vocab)


class Linear:
    def __init__(self, strength: float = 6.0) -> None:
        self.vectors = np.random.default_rng(1).normal(scale=0.4, size=(N_GENES, 8))
        self.vectors[0] = [strength, 0, 0, 0, 0, 0, 0, 0]

    def __call__(self, cells: Cells) -> np.ndarray:
        block = cells.block(np.arange(len(cells)))
        matrix = sparse.csr_matrix((block.counts > 0, block.genes, block.indptr), shape=(len(block), N_GENES))
        return np.asarray(matrix @ self.vectors + 3.0, dtype=np.float32)


def test_planted_gene_stands_out(cells: CellSource):
    embed = Linear()
    goal = centroid(embed(cells)[100:])  # cells without gene 0
    genes = np.array([[0], [5], [9], [N_GENES - 1]])
    table = with_rates(screen(cells, embed, Perturbation("delete"), genes, goal=goal, n_controls=40))
    assert table["n_cells"].tolist()[0] == 100
    assert table["p_value"][0] == pytest.approx(1 / 41)
    np.testing.assert_allclose(table["fdr"][:3], false_discovery_control(table["p_value"][:3]))
    assert table["shift"].idxmax() == 0
    assert table["goal_shift"][0] > 0
    assert table["goal_p_value"][0] == pytest.approx(2 / 41)
    assert table["p_value"][1:3].min() > 0.03
    assert table["n_cells"][3] == 0
    assert table.loc[3, ["shift", "p_value", "fdr", "goal_shift"]].isna().all()
    activate, goal = Perturbation("activate", shares=np.full(N_GENES, 0.02)), centroid(embed(cells)[:100])
    back = screen(cells.take(np.arange(100, 200)), embed, activate, genes[:1], goal=goal, n_controls=40)
    assert back["n_cells"][0] == 100
    assert back["goal_shift"][0] > 0
    assert back[["p_value", "shift_z"]].notna().all(axis=None)  # though none of these cells expresses it
    pairs = np.array([[0, other] for other in range(5, 15)])
    together = screen(cells, embed, Perturbation("delete"), pairs, n_controls=40)
    assert together["p_value"].tolist() == pytest.approx([1 / 41] * 10)  # not controls of each other


def test_genes_of_one_effect_move_cells_alike(cells: CellSource):
    embed = Linear()
    embed.vectors[8] = embed.vectors[0]
    moves = mean_moves(cells, embed, Perturbation("delete"), np.array([[0], [8], [5], [N_GENES - 1]]))
    assert np.isnan(moves[3]).all()
    cosines = units(moves[:3]) @ units(moves[:3]).T
    assert cosines[0, 1] > 0.9 > abs(cosines[0, 2])


def test_copies_held_at_a_time_change_nothing(cells: CellSource, monkeypatch: pytest.MonkeyPatch):
    genes = np.arange(10)[:, None]
    whole = screen(cells, Linear(), Perturbation("delete"), genes, n_controls=10)
    monkeypatch.setattr("scforge.insilico.screening._COPIES", 37)
    part = screen(cells, Linear(), Perturbation("delete"), genes, n_controls=10)
    np.testing.assert_allclose(part.to_numpy(), whole.to_numpy(), rtol=1e-9)


def test_a_known_embedding_is_not_computed_again(cells: CellSource):
    genes, seen = np.arange(10)[:, None], []

    def embed(some: Cells) -> np.ndarray:
        seen.append(some)
        return Linear()(some)

    found = screen(cells, embed, Perturbation("delete"), genes, n_controls=10, embedding=Linear()(cells))
    assert all(isinstance(some, PerturbedCells) for some in seen)
    np.testing.assert_array_equal(found, screen(cells, embed, Perturbation("delete"), genes, n_controls=10))


def test_p_values_of_a_null_are_uniform(cells: CellSource):
    # Shuffled labels: the goal is a mean of random cells, and no gene is any different from others.
    embed, tested = Linear(strength=2.0), np.arange(1, N_GENES - 1)[:, None]
    p_values, goal_p_values = [], []
    for seed in range(3):
        labels = np.random.default_rng(seed).permutation(200) < 100
        some = cells.take(np.flatnonzero(~labels))
        goal = centroid(embed(cells)[labels])
        table = screen(some, embed, Perturbation("delete"), tested, goal=goal, n_controls=50)
        p_values += table["p_value"].tolist()
        goal_p_values += table["goal_p_value"].tolist()
    for values in (p_values, goal_p_values):
        assert kstest(values, "uniform").statistic < 0.12
        assert np.mean(np.array(values) < 0.05) < 0.09


def test_a_gene_that_gets_counts_was_measured(cells: CellSource):
    measured = np.ones(N_GENES, dtype=bool)
    measured[-1] = False
    some = CellSource(cells.counts, cells.totals, measured=measured, vocab=cells.vocab)
    seen = []

    def embed(given: Cells) -> np.ndarray:
        seen.append(given.measured[-1])
        return Linear()(given)

    perturbation = Perturbation("overexpress", scales=np.ones(N_GENES))
    assert screen(some, embed, perturbation, np.array([[N_GENES - 1]]), n_controls=5)["n_cells"][0] == 200
    assert all(seen)
    assert not measured[-1]


def test_random_weights_find_neither_specific_nor_broad_genes():
    adata = pbmc3k()
    adata = adata[(adata.obs["cell_type"] == "CD14+ Mono").to_numpy()].copy()
    p_values: dict[str, list[float]] = {"specific": [], "broad": []}
    for seed in range(2):
        Encoder.setup_anndata(adata)
        model = Encoder(adata, seed=seed)
        module, tokenizer = model.spec.build_untrained()
        embed_cells = partial(embed, module, tokenizer=tokenizer, objective=model.spec.build_objective())
        cells = open_cells(adata, model.vocab)
        share = cells.counts.getnnz(axis=0) / len(cells)
        level = np.asarray(cells.counts.sum(axis=0)).ravel() / np.maximum(cells.counts.getnnz(axis=0), 1)
        few = np.flatnonzero((share > 0.02) & (share < 0.3))
        tested = {"specific": few[np.argsort(-level[few])[:40]], "broad": np.argsort(-share)[:40]}
        strata = strata_of(cells, embed_cells(cells))
        table = screen(
            cells, embed_cells, Perturbation("delete"), np.concatenate([*tested.values()])[:, None], strata=strata
        )
        assert (table["n_controls"] == 100).all()
        for name, some in zip(tested, np.split(table["p_value"].to_numpy(), 2), strict=True):
            p_values[name] += some.tolist()
    for some in p_values.values():
        assert 0.38 < np.median(some) < 0.62
        assert np.mean(np.array(some) < 0.05) <= 0.1


def test_controls_are_compared_in_cells_of_the_same_type(cells: CellSource):
    # In half of the cells every deletion moves four times as far, and the tested gene is deleted only there.
    kinds = (np.arange(200) < 100).astype(np.int64)
    linear = Linear(strength=0.4)

    def embed_cells(some: Cells) -> np.ndarray:
        rows = some.rows if isinstance(some, PerturbedCells) else np.arange(len(some))
        made = linear(some)
        return np.where(kinds[rows, None] == 1, made - 2.0, made + 8.0)

    asked = (cells, embed_cells, Perturbation("delete"), np.array([[0]]))
    blind, matched = (screen(*asked, n_controls=40, strata=strata) for strata in (None, kinds))
    assert matched["shift_z"][0] < blind["shift_z"][0]
    assert matched["shift"][0] == blind["shift"][0]
