"""Random numbers of a cell, and the views that they make."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse, stats

from scforge.data import CellBlock, CellSource
from scforge.data.random import cell_keys, uniform
from scforge.data.thinning import thin

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


def test_uniform_numbers_are_uniform():
    keys = cell_keys(np.arange(200), seed=3, epoch=1)
    draws = np.array([[uniform(key, np.uint64(i)) for i in range(100)] for key in keys])
    assert draws.min() >= 0
    assert draws.max() < 1
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.03


def test_keys_differ_by_everything_they_depend_on():
    sets = [
        {"seed": seed, "epoch": epoch, "stream": stream} for seed in (0, 1) for epoch in (0, 1) for stream in (0, 1)
    ]
    keys = np.concatenate([cell_keys(np.arange(1000), **options) for options in sets])
    assert len(np.unique(keys)) == len(keys)


def test_a_view_does_not_depend_on_the_batch(source):
    options = {"keep": (0.3, 1.0), "gene_dropout": (0.0, 0.4), "seed": 1, "epoch": 2, "view": 3}
    rows = np.array([17, 4, 150])
    whole, some = thin(source.block(np.arange(200)), **options), thin(source.block(rows), **options)
    for i, row in enumerate(rows):
        assert cell(some, i) == cell(whole, row)
    np.testing.assert_array_equal(some.rows, rows)


@pytest.mark.parametrize("change", [{"seed": 9}, {"epoch": 9}, {"view": 9}])
def test_seed_epoch_and_view_change_it(source, change):
    block = source.block(np.arange(20))
    one, two = thin(block, **PLAIN), thin(block, **PLAIN | change)
    assert all(cell(one, i) != cell(two, i) for i in range(20))


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
def test_share_of_counts_kept(source, keep):
    block = source.block(np.arange(200))
    view = thin(block, **PLAIN | {"keep": (keep, keep)})
    for before, after in ((block.counts.sum(), view.counts.sum()), (block.totals.sum(), view.totals.sum())):
        assert abs(after - before * keep) < 5 * np.sqrt(before * keep * (1 - keep))


def test_counts_are_binomial():
    block = CellBlock.from_csr(sparse.csr_matrix(np.full((4000, 1), 7.0)))
    view = thin(block, **PLAIN | {"keep": (0.3, 0.3)})
    drawn = np.zeros(4000, dtype=int)
    drawn[np.diff(view.indptr) == 1] = view.counts.astype(int)
    observed = np.bincount(drawn, minlength=8)
    expected = 4000 * stats.binom.pmf(np.arange(8), 7, 0.3)
    assert stats.chisquare(observed[:6], expected[:6] * observed[:6].sum() / expected[:6].sum()).pvalue > 1e-3


def test_large_counts_have_the_mean_and_spread_of_a_binomial():
    n = 50_000
    view = thin(CellBlock.from_csr(sparse.csr_matrix(np.full((3000, 1), float(n)))), **PLAIN | {"keep": (0.4, 0.4)})
    assert abs(view.counts.mean() - 0.4 * n) < 5 * np.sqrt(n * 0.24 / 3000)
    assert view.counts.std() == pytest.approx(np.sqrt(n * 0.24), rel=0.1)
    assert (view.counts == np.rint(view.counts)).all()
    assert view.counts.max() <= n


def test_counts_never_grow_and_genes_are_never_new(source):
    block = source.block(np.arange(200))
    view = thin(block, keep=(0.3, 1.0), gene_dropout=(0.0, 0.4), seed=0, epoch=0, view=0)
    before, after = (
        sparse.csr_matrix((b.counts, b.genes, b.indptr), shape=(200, 100)).toarray() for b in (block, view)
    )
    assert (after <= before).all()
    assert (view.counts >= 1).all()
    assert (view.totals >= after.sum(axis=1)).all()
    assert (view.totals <= block.totals).all()


def test_keeping_everything_changes_nothing(source):
    block = source.block(np.arange(50))
    view = thin(block, **PLAIN | {"keep": (1.0, 1.0)})
    assert all(cell(view, i) == cell(block, i) for i in range(50))


def test_totals_count_what_is_left_and_dropout_does_not_change_them(source):
    counts = source.counts
    inside = CellSource(counts, np.asarray(counts.sum(axis=1), dtype=float).ravel()).block(np.arange(200))
    view = thin(inside, **PLAIN)
    np.testing.assert_array_equal(view.totals, np.add.reduceat(view.counts, view.indptr[:-1]))
    dropped = thin(inside, **PLAIN | {"gene_dropout": (0.4, 0.4)})
    np.testing.assert_array_equal(dropped.totals, view.totals)
    share = len(dropped.genes) / len(view.genes)
    assert share == pytest.approx(0.6, abs=0.03)


def test_a_view_without_counts_has_a_total():
    block = CellBlock.from_csr(sparse.csr_matrix(np.ones((50, 1))))
    view = thin(block, **PLAIN | {"keep": (0.01, 0.01)})
    assert (np.diff(view.indptr) == 0).any()
    assert (view.totals >= 1).all()


def test_rates_are_drawn_for_each_cell():
    block = CellBlock.from_csr(sparse.csr_matrix(np.full((2000, 1), 50_000.0)))
    view = thin(block, **PLAIN | {"keep": (0.3, 1.0)})
    assert stats.kstest((view.counts / 50_000 - 0.3) / 0.7, "uniform").pvalue > 1e-3


def test_shares_whose_logarithm_is_drawn_evenly(source):
    options = PLAIN | {"keep": (0.1, 1.0), "log_uniform": True}
    blocks = [thin(source.block(np.arange(200)), **options | {"view": view}) for view in range(4)]
    shares = np.log10(np.concatenate([block.totals / source.totals for block in blocks])) + 1
    assert stats.kstest(shares, "uniform").pvalue > 1e-3
    even = thin(source.block(np.arange(200)), **options | {"log_uniform": False})
    assert np.mean(even.totals / source.totals) > 0.5  # against 0.39
    fixed = thin(source.block(np.arange(20)), **PLAIN | {"log_uniform": True})
    assert cell(fixed, 3) == cell(thin(source.block(np.arange(20)), **PLAIN), 3)
