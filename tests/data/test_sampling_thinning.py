import numpy as np
import pytest
from scipy import sparse, stats

from scforge.data import CellBlock
from scforge.data.cells import CellSource, content_keys
from scforge.data.sampling import cell_keys, uniform
from scforge.training.objectives._views import downsample_counts

PLAIN = {"keep": (0.5, 0.5), "gene_dropout": (0.0, 0.0), "seed": 0, "epoch": 0, "view": 0}


@pytest.fixture
def source() -> CellSource:
    generator = np.random.default_rng(0)
    counts = sparse.csr_matrix(generator.poisson(3.0, (200, 100)).astype(np.float32))
    outside = generator.poisson(50.0, 200)
    return CellSource(counts, np.asarray(counts.sum(axis=1), dtype=float).ravel() + outside)


def cell(block: CellBlock, i: int) -> tuple[list[int], list[float], float]:
    part = slice(block.indptr[i], block.indptr[i + 1])
    return block.genes[part].tolist(), block.counts[part].tolist(), float(block.totals[i])


def test_numbers_of_a_cell_depend_on_its_counts_and_not_on_its_place():
    def block(rows, draw=0) -> CellBlock:
        made = CellBlock.from_csr(counts[rows])
        return CellBlock(made.indptr, made.genes, made.counts, made.totals, made.rows, draw=draw)

    counts = sparse.csr_matrix(np.random.default_rng(0).poisson(0.5, (50, 40)).astype(np.float32))
    whole, order = content_keys(block(np.arange(50)), seed=3), np.random.default_rng(1).permutation(50)[:20]
    np.testing.assert_array_equal(content_keys(block(order), seed=3), whole[order])
    keys = [content_keys(block(range(50), d), seed=seed, stream=stream) for d, seed, stream in np.ndindex(2, 2, 2)]
    assert len(np.unique(np.concatenate(keys))) == 8 * 50
    # One count more or another gene changes them.
    cells = [[1, 2, 0, 0], [1, 3, 0, 0], [2, 1, 0, 0], [1, 0, 2, 0], [0, 0, 0, 0]]
    keys = content_keys(CellBlock.from_csr(sparse.csr_matrix(np.array(cells, dtype=np.float32))), seed=0)
    assert len(np.unique(keys)) == 5
    many = sparse.csr_matrix(np.random.default_rng(0).poisson(0.3, (4000, 30)).astype(np.float32))
    keys = content_keys(CellBlock.from_csr(many), seed=0)
    bits = (keys[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.04
    draws = np.array(
        [[uniform(key, np.uint64(i)) for i in range(50)] for key in cell_keys(np.arange(200), seed=3, epoch=1)]
    )
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.05
    options = [{"seed": s, "epoch": e, "stream": x} for s, e, x in np.ndindex(2, 2, 2)]
    assert len(np.unique([cell_keys(np.arange(1000), **some) for some in options])) == 8000


def test_a_view_does_not_depend_on_the_batch(source):
    options = {"keep": (0.3, 1.0), "gene_dropout": (0.0, 0.4), "seed": 1, "epoch": 2, "view": 3}
    rows = np.array([17, 4, 150])
    whole, some = (
        downsample_counts(source.block(np.arange(200)), **options),
        downsample_counts(source.block(rows), **options),
    )
    for i, row in enumerate(rows):
        assert cell(some, i) == cell(whole, row)
    np.testing.assert_array_equal(some.rows, rows)
    for change in ({"seed": 9}, {"epoch": 9}, {"view": 9}):
        other = downsample_counts(source.block(np.arange(200)), **options | change)
        assert all(cell(whole, i) != cell(other, i) for i in range(200))


def test_counts_are_binomial():
    def drawn(count: int, keep: tuple[float, float], n: int = 4000) -> np.ndarray:
        """Return what is left of one count in each of `n` cells."""
        view = downsample_counts(
            CellBlock.from_csr(sparse.csr_matrix(np.full((n, 1), float(count)))), **PLAIN | {"keep": keep}
        )
        left = np.zeros(n)
        left[np.diff(view.indptr) == 1] = view.counts
        assert (view.totals >= 1).all()
        return left

    observed = np.bincount(drawn(7, (0.3, 0.3)).astype(int), minlength=8)
    expected = 4000 * stats.binom.pmf(np.arange(8), 7, 0.3)
    assert stats.chisquare(observed[:6], expected[:6] * observed[:6].sum() / expected[:6].sum()).pvalue > 1e-3
    left = drawn(50_000, (0.4, 0.4))
    assert abs(left.mean() - 20_000) < 5 * np.sqrt(50_000 * 0.24 / 4000)
    assert left.std() == pytest.approx(np.sqrt(50_000 * 0.24), rel=0.1)
    assert (left == np.rint(left)).all()
    # Rates are drawn for each cell, and a view without counts has a total.
    assert stats.kstest((drawn(50_000, (0.3, 1.0)) / 50_000 - 0.3) / 0.7, "uniform").pvalue > 1e-3
    assert (drawn(1, (0.01, 0.01)) == 0).any()


def test_what_is_left_of_a_cell(source):
    block = source.block(np.arange(200))
    view = downsample_counts(block, keep=(0.3, 1.0), gene_dropout=(0.0, 0.4), seed=0, epoch=0, view=0)
    before, after = (
        sparse.csr_matrix((b.counts, b.genes, b.indptr), shape=(200, 100)).toarray() for b in (block, view)
    )
    assert (after <= before).all()
    assert (view.counts >= 1).all()
    assert ((view.totals >= after.sum(axis=1)) & (view.totals <= block.totals)).all()
    whole = downsample_counts(block, **PLAIN | {"keep": (1.0, 1.0)})
    assert all(cell(whole, i) == cell(block, i) for i in range(200))
    # Totals count what is left, and dropout does not change them.
    inside = CellBlock.from_csr(source.counts)
    view, dropped = (
        downsample_counts(inside, **PLAIN),
        downsample_counts(inside, **PLAIN | {"gene_dropout": (0.4, 0.4)}),
    )
    np.testing.assert_array_equal(view.totals, np.add.reduceat(view.counts, view.indptr[:-1]))
    np.testing.assert_array_equal(dropped.totals, view.totals)
    assert len(dropped.genes) / len(view.genes) == pytest.approx(0.6, abs=0.03)
    options = PLAIN | {"keep": (0.1, 1.0), "log_uniform": True}
    views = [downsample_counts(block, **options | {"view": view}) for view in range(4)]
    shares = np.log10(np.concatenate([view.totals / source.totals for view in views])) + 1
    assert stats.kstest(shares, "uniform").pvalue > 1e-3
