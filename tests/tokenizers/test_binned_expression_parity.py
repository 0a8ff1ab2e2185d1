"""Bins against scGPT's and Tahoe-x1's definitions, one cell at a time, written here without scforge."""

import numpy as np
import pytest
import torch
from scipy import sparse

from scforge.data import CellBlock, GeneVocab
from scforge.data.cells import CellSource
from scforge.errors import DataError, OptionError
from scforge.testing import raises
from scforge.tokenizers import get_tokenizer
from scforge.tokenizers.binned_expression import quantile_bins

EXAMPLE = [0, 1, 1, 1, 2, 3, 5, 8, 0, 13]


def scgpt_row(row, n_bins, side):
    """Bin one cell as scGPT's Preprocessor does (Cui et al. 2024), with NumPy's global random numbers."""
    bins = np.zeros(len(row), dtype=np.int64)
    there = np.flatnonzero(row)
    if len(there) == 0:
        return bins
    values = row[there]
    edges = np.quantile(values, np.linspace(0, 1, n_bins - 1))
    left = np.digitize(values, edges)
    if side == "both":
        right = np.digitize(values, edges, right=True)
        left = np.ceil(np.random.rand(len(values)) * (right - left) + left).astype(np.int64)
    bins[there] = left
    return bins


def scgpt(dense, n_bins=51, side="both", seed=0):
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        return np.stack([scgpt_row(row, n_bins, side) for row in dense])
    finally:
        np.random.set_state(state)


def tahoe(dense, n_bins=51, dtype=torch.float64):
    """Bin as Tahoe-x1 does: torch's quantiles, bucketize from the left, plus one."""
    bins = np.zeros(dense.shape, dtype=np.int64)
    # Rounded as NumPy's, since one position in the last place decides where an edge meets a count.
    shares = torch.as_tensor(np.linspace(0, 1, n_bins - 1))
    if dtype != torch.float64:
        shares = torch.linspace(0, 1, n_bins - 1)
    for row, out in zip(dense, bins, strict=True):
        there = np.flatnonzero(row)
        if len(there):
            values = torch.as_tensor(row[there]).to(dtype)
            out[there] = torch.bucketize(values, torch.quantile(values, shares), right=False).numpy() + 1
    return bins


@pytest.fixture(scope="module")
def tables():
    """Cells without counts, of one gene, of equal counts, and without a zero."""
    generator = np.random.default_rng(0)
    counts = generator.poisson(0.7, (40, 90)) * generator.choice([1, 1, 1, 3, 50], (40, 90))
    counts[0] = 0
    counts[1], counts[1, 7] = 0, 4
    counts[2], counts[2, 5:9] = 0, 6
    counts[3] = np.arange(1, 91)
    counts[4] = 1
    counts[5, :3] = [5000, 1_000_000, 2**31]
    log1p = np.log1p(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1) * 1e4)
    return {"counts": counts, "float32": counts.astype(np.float32), "log1p": log1p}


def test_worked_example():
    cell = sparse.csr_matrix([EXAMPLE])
    np.random.seed(5)
    state = np.random.get_state()[1].copy()
    for seed, expected in ((0, [0, 7, 5, 6, 22, 29, 36, 43, 0, 50]), (1, [0, 9, 5, 15, 22, 29, 36, 43, 0, 50])):
        assert quantile_bins(cell, random_state=seed).toarray()[0].tolist() == expected
        assert scgpt(np.array([EXAMPLE]), seed=seed)[0].tolist() == expected
    assert quantile_bins(cell, side="one").data.tolist() == [15, 15, 15, 22, 29, 36, 43, 50]
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # the global generator is left alone
    for bad in (-1.0, np.nan):
        with raises(DataError, "counts"):
            quantile_bins(sparse.csr_matrix([[1.0, bad]]))
    with raises(OptionError, "side"):
        quantile_bins(cell, side="left")
    with raises(OptionError, "n_bins"):
        quantile_bins(cell, n_bins=2)


@pytest.mark.parametrize("table", ["counts", "float32", "log1p"])
@pytest.mark.parametrize("n_bins", [3, 7, 51, 200])
@pytest.mark.parametrize("side", ["one", "both", "tahoe"])
def test_published_definitions(tables, table, n_bins, side):
    dense = tables[table]
    for seed in (0, 3) if side == "both" else (0,):
        expected = tahoe(dense.astype(np.float64), n_bins) if side == "tahoe" else scgpt(dense, n_bins, side, seed)
        ours = quantile_bins(sparse.csr_matrix(dense), n_bins=n_bins, side=side, random_state=seed)
        np.testing.assert_array_equal(ours.toarray(), expected)
        assert ours.dtype == np.int64
        assert ours.nnz == np.count_nonzero(dense)
        assert ours.data.min() >= 1
        assert ours.data.max() <= n_bins - 1


def test_published_definitions_on_pbmc3k(pbmc):
    counts = pbmc.X[:400]
    for side in ("one", "both"):
        ours = quantile_bins(counts, side=side, random_state=11)
        np.testing.assert_array_equal(ours.toarray(), scgpt(counts.toarray(), side=side, seed=11))
    ours = quantile_bins(counts, side="tahoe").toarray()
    np.testing.assert_array_equal(ours, tahoe(counts.toarray()))
    # Tahoe-x1 computes in float32, where an edge may fall on the other side of a count that it should meet.
    single = tahoe(counts.toarray(), dtype=torch.float32)
    assert (ours != single).sum() < 0.01 * counts.nnz


def source(dense):
    counts = sparse.csr_matrix(dense.astype(np.float32))
    return CellSource(counts, dense.sum(axis=1).astype(np.float64))


def vocab_of(n_genes):
    return GeneVocab.from_genes([f"g{i}" for i in range(n_genes)])


def dense_bins(batch, n_cells, n_genes):
    """Return the bin of each gene, -1 where it is not a token, shape (B, G)."""
    bins = np.full((n_cells, n_genes), -1)
    for row, (ids, of_cell) in enumerate(zip(batch["input_ids"].numpy(), batch["bin_ids"].numpy(), strict=True)):
        genes = ids >= 4
        bins[row, ids[genes] - 4] = of_cell[genes]
    return bins


def over_draws(tokenizer, dense, draws):
    """Return the bins of some cells in several draws; equal cells get equal random numbers in one draw."""
    cells, rows = source(dense), np.arange(len(dense))
    return np.concatenate([dense_bins(tokenizer(cells.block(rows, draw=draw)), *dense.shape) for draw in draws])


@pytest.mark.parametrize("n_bins", [3, 51])
@pytest.mark.parametrize("side", ["one", "tahoe"])
@pytest.mark.parametrize("zeros", [True, False])
def test_tokenizer(tables, n_bins, side, zeros):
    dense = tables["counts"]
    tokenizer = get_tokenizer("binned_expression", vocab_of(90), n_bins=n_bins, side=side, include_zero_genes=zeros)
    batch = tokenizer(source(dense).block(np.arange(40)))
    expected = scgpt(dense, n_bins, "one") if side == "one" else tahoe(dense, n_bins)
    bins = dense_bins(batch, 40, 90)
    np.testing.assert_array_equal(bins, expected if zeros else np.where(dense > 0, expected, -1))
    assert torch.equal(batch["values"], batch["bin_ids"].float())


def test_tokenizer_spreads_equal_counts_evenly(tables):
    """Equal counts go to all the bins that they span, as often, and anew with each draw."""
    dense, tokenizer = tables["counts"][6:8], get_tokenizer("binned_expression", vocab_of(90))
    cells = source(dense)
    one, two = (tokenizer(cells.block(np.arange(2), draw=draw)) for draw in (0, 1))
    assert not torch.equal(one["bin_ids"], two["bin_ids"])
    assert torch.equal(one["bin_ids"], tokenizer(cells.block(np.arange(2)))["bin_ids"])
    bins, low, high = over_draws(tokenizer, dense, range(200)), tahoe(dense[:1]), scgpt(dense[:1], side="one")
    for gene in np.flatnonzero(dense[0]):
        drawn = bins[::2, gene]
        span = high[0, gene] - low[0, gene] + 1
        assert drawn.min() >= low[0, gene]
        assert drawn.max() <= high[0, gene]
        middle, spread = (low[0, gene] + high[0, gene]) / 2, np.sqrt((span**2 - 1) / 12)
        assert abs(drawn.mean() - middle) <= 5 * spread / np.sqrt(200)
    # Genes of one cell are not drawn together.
    ones = np.flatnonzero(dense[0] == 1)
    correlation = np.corrcoef(bins[::2][:, ones].T) - np.eye(len(ones))
    assert np.abs(correlation).max() < 5 / np.sqrt(200)


@pytest.mark.parametrize("options", [{"side": "one", "truncation": "random"}, {"truncation": "highest"}])
def test_a_cell_that_is_cut_short_keeps_the_bins_of_the_whole_cell(tables, options):
    dense, vocab, bins = tables["counts"], vocab_of(90), []
    for most in (None, 12):
        tokenizer = get_tokenizer("binned_expression", vocab, max_len=most, **options)
        bins.append(dense_bins(tokenizer(source(dense).block(np.arange(40))), 40, 90))
    there = bins[1] >= 0
    assert there.sum(axis=1).max() == 11
    np.testing.assert_array_equal(bins[1][there], bins[0][there])


def test_random_truncation_draws_each_gene_as_often():
    tokenizer, dense = get_tokenizer("binned_expression", vocab_of(40), max_len=11), np.arange(1, 41)[None]
    kept = over_draws(tokenizer, dense, range(500)) >= 0
    assert (kept.sum(axis=1) == 10).all()
    assert np.abs(kept.mean(axis=0) - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 500)
    again = over_draws(tokenizer, dense, range(500, 1000)) >= 0
    assert 0.1 < (kept & again).sum() / kept.sum() < 0.4


def test_fixed_edges_are_the_same_in_all_cells():
    dense = np.array([[1, 10, 100, 0], [2, 20, 200, 0], [1, 10, 100, 7]])
    edges = [7.0, 8.0, 9.0]
    tokenizer = get_tokenizer("binned_expression", vocab_of(4), edges=edges)
    assert tokenizer.n_bins == 5
    values = np.log1p(dense / dense.sum(axis=1, keepdims=True) * 1e4)
    expected = np.where(dense > 0, 1 + (values[..., None] >= edges).sum(axis=-1), -1)
    np.testing.assert_array_equal(dense_bins(tokenizer(CellBlock.from_csr(sparse.csr_matrix(dense))), 3, 4), expected)
