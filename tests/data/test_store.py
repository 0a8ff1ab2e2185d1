import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import CellBlock, CellOrder, GeneVocab, convert, open_cells
from scforge.data.sampling import Window
from scforge.data.store import StoreCells
from scforge.errors import DataError, GeneMismatchError, ScforgeWarning
from scforge.testing import raises

ALL = [f"gene{i}" for i in range(80)]


@pytest.fixture(scope="module")
def ordered(many_adata: ad.AnnData, tmp_path_factory) -> Path:
    """A store that is not shuffled, of two sources, one of which lacks genes."""
    folder = tmp_path_factory.mktemp("ordered")
    many_adata[:400].write_h5ad(folder / "a.h5ad")
    many_adata[400:, :60].write_h5ad(folder / "b.h5ad")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scforge.data.conversion.dataset_size", lambda *_: 350)
        with pytest.warns(ScforgeWarning, match="not measured in all sources"):
            convert([folder / "a.h5ad", folder / "b.h5ad"], folder / "s.zarr", shuffle=False, progress=False)
    return folder / "s.zarr"


@pytest.mark.parametrize(
    "rows", [[5, 699, 0, 0, 234, 232, 233, 466, 467, 5], range(699, -1, -1), [466]], ids=["any", "back", "one"]
)
def test_a_block_is_that_of_the_cells_in_memory(store, many_adata, rows, twin, assert_same):
    cells = StoreCells.open(store)
    rows = np.array(rows)
    block = cells.block(rows, draw=3)
    assert_same(block, twin(cells, many_adata).block(rows))
    assert (block.draw, block.rows.tolist()) == (3, rows.tolist())
    assert block.rows.dtype == np.int64


def test_cells_of_several_sources_in_their_order(ordered, many_adata):
    cells = open_cells(ordered)
    assert not cells.shuffled
    assert cells.names().tolist() == many_adata.obs_names.tolist()
    counts = many_adata.X.toarray()
    counts[400:, 60:] = 0
    rows = np.random.default_rng(0).permutation(700)
    block = cells.block(rows)
    dense = sparse.csr_matrix((block.counts, block.genes, block.indptr), shape=(700, 80)).toarray()
    np.testing.assert_array_equal(dense, counts[rows])
    np.testing.assert_array_equal(block.totals, counts[rows].sum(axis=1))
    assert block.measured.all()


def test_no_rows_and_rows_that_are_not_there(store):
    cells = StoreCells.open(store)
    block = cells.block(np.array([], dtype=int))
    assert (len(block), block.indptr.tolist(), block.totals.shape) == (0, [0], (0,))
    assert list(cells.stream([])) == []
    for rows in ([700], [0, -1]):
        with raises(ValueError, "windows"):
            cells.block(np.array(rows))


def test_what_is_known_of_the_cells(store, many_adata):
    cells = StoreCells.open(store)
    expected = many_adata.obs.loc[cells.names()]
    assert sorted(cells.names()) == sorted(many_adata.obs_names)
    assert cells.names().tolist() != many_adata.obs_names.tolist()
    assert len(cells) == 700
    assert (cells.chunk_size, cells.shuffled, cells.overlap, cells.counts_kept) == (256, True, 1.0, 1.0)
    for key in expected:
        assert cells.column(key).tolist() == expected[key].tolist()
    assert isinstance(cells.column("group").dtype, pd.CategoricalDtype)
    np.testing.assert_array_equal(cells.n_expressed, np.diff(many_adata[cells.names()].X.indptr))


def test_columns_are_chosen(store):
    cells = StoreCells.open(store, obs=["donor"])
    assert cells.obs.columns.tolist() == ["donor"]
    with pytest.raises(DataError, match="'group' is not a column of obs"):
        cells.column("group")
    assert StoreCells.open(store, obs=[]).obs.shape == (700, 0)
    with raises(DataError, "obs"):
        StoreCells.open(store, obs=["donr"])


VOCABS = {
    "permuted": [ALL[i] for i in np.random.default_rng(1).permutation(80)],
    "partly absent and permuted": [ALL[7], "other", ALL[3], *ALL[60:20:-1]],
}


@pytest.mark.parametrize("genes", VOCABS.values(), ids=VOCABS)
def test_another_vocabulary(store, many_adata, genes, twin, assert_same):
    vocab = GeneVocab.from_genes(genes)
    cells = open_cells(store, vocab)
    memory = twin(cells, many_adata, vocab)
    rows = np.random.default_rng(0).integers(700, size=300)
    assert_same(cells.block(rows), memory.block(rows))
    for name in ("overlap", "counts_kept"):
        assert getattr(cells, name) == pytest.approx(getattr(memory, name), rel=1e-6)
    assert (cells.n_expressed >= memory.n_expressed).all()
    # And back to all genes, for a model of more of them and with more special tokens, which change no gene.
    plain = StoreCells.open(store)
    more = plain.vocab.with_special_tokens("[MORE]")
    again = cells.with_vocab(more)
    assert_same(again.block(rows), plain.block(rows))
    assert (again.vocab.n_special, again.overlap, again.counts_kept) == (plain.vocab.n_special + 1, 1.0, 1.0)


def test_genes_that_only_one_source_lacks_are_measured(ordered):
    assert open_cells(ordered, GeneVocab.from_genes(ALL[50:70])).measured.all()
    cells = open_cells(ordered, GeneVocab.from_genes([*ALL[70:], "other"]))
    assert cells.measured.tolist() == [True] * 10 + [False]
    assert cells.overlap == pytest.approx(10 / 11)


def test_genes_of_something_else(store):
    with pytest.raises(GeneMismatchError):
        open_cells(store, GeneVocab.from_genes([f"other{i}" for i in range(30)]))
    few = GeneVocab.from_genes([*ALL[:30], *(f"other{i}" for i in range(90))])
    with pytest.warns(ScforgeWarning, match="has 30 of the 120 genes"):
        assert open_cells(store, few).overlap == 0.25
    vocab = GeneVocab.from_genes(ALL[20:60], release="Annotation 1")
    with pytest.warns(ScforgeWarning, match=r"of the counts are in genes outside the vocabulary \(Annotation 1\)"):
        open_cells(store, vocab)


def test_cells_without_genes_are_told(many_adata, tmp_path, twin, assert_same):
    adata = many_adata[:50].copy()
    counts = adata.X.toarray()
    counts[7, 10:] = 0
    adata.X = sparse.csr_matrix(counts)
    vocab = GeneVocab.from_genes(ALL[10:])
    with pytest.warns(ScforgeWarning, match="1 of 50 cells express no gene of the vocabulary"):
        convert(adata, tmp_path / "s.zarr", vocab=vocab, progress=False)
    with pytest.warns(ScforgeWarning, match="1 of 50 cells express no gene of the vocabulary"):
        cells = StoreCells.open(tmp_path / "s.zarr")
    with pytest.warns(ScforgeWarning, match="1 of 50"):
        memory = twin(cells, adata)
    assert_same(cells.block(np.arange(50)), memory.block(np.arange(50)))
    assert (np.diff(cells.block(np.arange(50)).indptr) == 0).sum() == 1


def test_a_sample(store, many_adata, twin, assert_same):
    cells = StoreCells.open(store)
    memory = twin(cells, many_adata)
    some = cells.sample(300, seed=1)
    position = pd.Index(cells.names()).get_indexer(memory.obs.index[some.obs.index])
    assert len(some) == len(set(position)) == 300
    assert (np.diff(position) > 0).all()
    assert_same(some.block(np.arange(300)), memory.block(position))
    assert some.obs["donor"].tolist() == memory.obs["donor"].iloc[position].tolist()
    assert (cells.sample(300, seed=1).obs.index == some.obs.index).all()
    rows = np.arange(0, 700, 2)
    within = cells.sample(100, rows=rows, seed=2)
    assert set(within.obs.index) <= set(rows)
    assert len(within) == 100
    whole = cells.sample(10_000, rows=rows)
    assert whole.obs.index.tolist() == rows.tolist()
    assert_same(whole.block(np.arange(350)), memory.block(rows))


def windows(seed: int) -> list[Window]:
    order = CellOrder(np.arange(700), 32, chunk_size=256, window_cells=128, seed=seed)
    return list(order.windows())


def test_streams_at_once(store, many_adata, twin, assert_same):
    cells = StoreCells.open(store)
    memory = twin(cells, many_adata)
    found: dict[int, list[CellBlock]] = {}

    def read(seed: int) -> None:
        found[seed] = [block for _ in range(3) for block in cells.stream(windows(seed))]

    with ThreadPoolExecutor(3) as workers:
        list(workers.map(read, range(3)))
    for seed in range(3):
        expected = [rows for _ in range(3) for window in windows(seed) for rows in window.batches()]
        assert len(found[seed]) == len(expected)
        for block, rows in zip(found[seed], expected, strict=True):
            assert block.rows.tolist() == rows.tolist()
            assert_same(block, memory.block(rows))
    # Two that take turns, with a block in between.
    for one, two in zip(cells.stream(windows(0)), cells.stream(windows(1)), strict=True):
        for block in (one, two, cells.block(one.rows[:3])):
            assert_same(block, memory.block(block.rows))


def test_a_stream_that_is_left_leaves_no_thread(store):
    cells = StoreCells.open(store)
    list(cells.stream(windows(0)))  # the libraries start threads of their own, which they keep
    before = set(threading.enumerate())
    for _ in range(3):
        stream = cells.stream(windows(0))
        next(stream)
        stream.close()
    assert set(threading.enumerate()) <= before
