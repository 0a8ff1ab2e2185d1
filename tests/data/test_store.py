"""Cells of a store are those that were converted; damage is told, never read."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from pathlib import Path

import annbatch
import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from scipy import sparse

from scforge.data import CellBlock, CellOrder, CellSource, GeneVocab, StoreCells, Window, convert, open_cells
from scforge.data.convert_plan import Layout
from scforge.data.store_files import partial_path
from scforge.errors import DataError, GeneMismatchError, MissingFileError, ScforgeWarning

ALL = [f"gene{i}" for i in range(80)]


def twin(cells: StoreCells, adata: ad.AnnData, vocab: GeneVocab | None = None) -> CellSource:
    """The same cells in memory, in the order of the store."""
    return open_cells(adata[cells.names()].copy(), vocab or cells.vocab)


def assert_same(one: CellBlock, two: CellBlock) -> None:
    assert len(one) == len(two)
    for name in ("indptr", "genes", "counts", "totals", "measured"):
        here, there = getattr(one, name), getattr(two, name)
        np.testing.assert_array_equal(here, there, err_msg=name)
        assert here.dtype == there.dtype, name


@pytest.fixture(scope="module")
def ordered(many_adata: ad.AnnData, tmp_path_factory) -> Path:
    """A store that is not shuffled, of two sources, one of which lacks genes."""
    folder = tmp_path_factory.mktemp("ordered")
    many_adata[:400].write_h5ad(folder / "a.h5ad")
    many_adata[400:, :60].write_h5ad(folder / "b.h5ad")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layout, "n_parts", lambda *_, **__: 2)
        convert([folder / "a.h5ad", folder / "b.h5ad"], folder / "s.zarr", shuffle=False, progress=False)
    return folder / "s.zarr"


@pytest.fixture
def damaged(store: Path, tmp_path: Path) -> Path:
    """A copy of the store, to be damaged."""
    return Path(shutil.copytree(store, tmp_path / "copy.zarr"))


@pytest.mark.parametrize(
    "rows",
    [[5, 699, 0, 0, 234, 232, 233, 466, 467, 5], range(700), range(699, -1, -1), [466], [7] * 40],
    ids=["any", "all", "back", "one", "again"],
)
def test_a_block_is_that_of_the_cells_in_memory(store, many_adata, rows):
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


def test_no_rows(store):
    block = StoreCells.open(store).block(np.array([], dtype=int))
    assert (len(block), block.indptr.tolist(), block.totals.shape) == (0, [0], (0,))
    assert list(StoreCells.open(store).stream([])) == []


@pytest.mark.parametrize("rows", [[700], [0, -1]])
def test_rows_that_are_not_there(store, rows):
    with pytest.raises(ValueError, match=r"has the cell (700|-1), but"):
        StoreCells.open(store).block(np.array(rows))


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
    with pytest.raises(DataError, match="'group' is not a column of obs of these cells"):
        cells.column("group")
    assert StoreCells.open(store, obs=[]).obs.shape == (700, 0)
    with pytest.raises(DataError, match=r"obs names 'donr', .*did you mean 'donor'\?") as told:
        StoreCells.open(store, obs=["donr"])
    assert "\n" not in str(told.value)
    with pytest.raises(DataError, match=r"did you mean 'donor'\?"):
        StoreCells.open(store).column("donr")
    with pytest.raises(ValueError, match=r"give a list of columns, \['donor'\]"):
        StoreCells.open(store, obs="donor")


VOCABS = {
    "in the order of the store": ALL[3:70:2],
    "permuted": [ALL[i] for i in np.random.default_rng(1).permutation(80)],
    "partly absent": [*ALL[:40], *(f"other{i}" for i in range(30)), *ALL[50:60]],
    "partly absent and permuted": [ALL[7], "other", ALL[3], *ALL[60:20:-1]],
}


@pytest.mark.parametrize("genes", VOCABS.values(), ids=VOCABS)
def test_another_vocabulary(store, many_adata, genes):
    vocab = GeneVocab.from_genes(genes)
    cells = open_cells(store, vocab)
    memory = twin(cells, many_adata, vocab)
    rows = np.random.default_rng(0).integers(700, size=300)
    assert_same(cells.block(rows), memory.block(rows))
    for name in ("overlap", "counts_kept"):
        assert getattr(cells, name) == pytest.approx(getattr(memory, name), rel=1e-6)
    assert (cells.n_expressed >= memory.n_expressed).all()
    # And back to all genes, for a model of more of them.
    assert_same(cells.with_vocab(StoreCells.open(store).vocab).block(rows), StoreCells.open(store).block(rows))


def test_genes_that_only_one_source_lacks_are_measured(ordered):
    assert open_cells(ordered, GeneVocab.from_genes(ALL[50:70])).measured.all()
    cells = open_cells(ordered, GeneVocab.from_genes([*ALL[70:], "other"]))
    assert cells.measured.tolist() == [True] * 10 + [False]
    assert cells.overlap == pytest.approx(10 / 11)


def test_other_special_tokens_change_no_gene(store):
    plain = StoreCells.open(store)
    vocab = plain.vocab.with_special_tokens("[MORE]")
    cells = plain.with_vocab(vocab)
    assert cells.vocab.n_special == plain.vocab.n_special + 1
    assert (cells.overlap, cells.counts_kept) == (1.0, 1.0)
    assert_same(cells.block(np.arange(50)), plain.block(np.arange(50)))


def test_genes_of_something_else(store):
    with pytest.raises(GeneMismatchError, match="has only 0 of the 30 genes"):
        open_cells(store, GeneVocab.from_genes([f"other{i}" for i in range(30)]))
    few = GeneVocab.from_genes([*ALL[:30], *(f"other{i}" for i in range(90))])
    with pytest.warns(ScforgeWarning, match="has 30 of the 120 genes"):
        assert open_cells(store, few).overlap == 0.25
    with pytest.raises(GeneMismatchError):
        open_cells(store, few, min_overlap=0.3)


def test_counts_outside_of_an_annotation_are_told(store):
    vocab = GeneVocab.from_genes(ALL[20:60], release="Annotation 1")
    with pytest.warns(ScforgeWarning, match=r"of the counts lie in genes outside of the vocabulary \(Annotation 1\)"):
        open_cells(store, vocab)


def test_cells_without_genes_are_told(many_adata, tmp_path):
    adata = many_adata[:50].copy()
    counts = adata.X.toarray()
    counts[7, 10:] = 0
    adata.X = sparse.csr_matrix(counts)
    vocab = GeneVocab.from_genes(ALL[10:])
    with pytest.warns(ScforgeWarning, match="1 cells express no gene of the vocabulary"):
        convert(adata, tmp_path / "s.zarr", vocab=vocab, progress=False)
    with pytest.warns(ScforgeWarning, match="1 of 50 cells express no gene of the vocabulary"):
        cells = StoreCells.open(tmp_path / "s.zarr")
    with pytest.warns(ScforgeWarning, match="1 of 50"):
        memory = twin(cells, adata)
    assert_same(cells.block(np.arange(50)), memory.block(np.arange(50)))
    assert (np.diff(cells.block(np.arange(50)).indptr) == 0).sum() == 1


def test_a_sample(store, many_adata):
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


def test_wide_counts(many_adata, tmp_path):
    adata = many_adata[:300].copy()
    adata.X.data[1234] = 100_000
    assert convert(adata, tmp_path / "s.zarr", progress=False).counts_dtype == "uint32"
    cells = StoreCells.open(tmp_path / "s.zarr")
    rows = np.arange(300)
    assert_same(cells.block(rows), twin(cells, adata).block(rows))
    assert cells.block(rows).counts.max() == 100_000


def windows(seed: int) -> list[Window]:
    order = CellOrder(np.arange(700), 32, chunk_size=256, window_cells=128, seed=seed)
    return list(order.windows())


def test_two_threads_read_one_store_at_once(store, many_adata):
    cells = StoreCells.open(store)
    memory = twin(cells, many_adata)
    found: dict[int, list[CellBlock]] = {}
    begin = threading.Barrier(3)

    def read(seed: int) -> None:
        begin.wait()
        found[seed] = [block for _ in range(3) for block in cells.stream(windows(seed))]

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for seed in range(3):
        expected = [rows for _ in range(3) for window in windows(seed) for rows in window.batches()]
        assert len(found[seed]) == len(expected)
        for block, rows in zip(found[seed], expected, strict=True):
            assert block.rows.tolist() == rows.tolist()
            assert_same(block, memory.block(rows))


def test_streams_that_take_turns(store, many_adata):
    cells = StoreCells.open(store)
    memory = twin(cells, many_adata)
    for one, two in zip(cells.stream(windows(0)), cells.stream(windows(1)), strict=True):
        assert_same(one, memory.block(one.rows))
        assert_same(two, memory.block(two.rows))
        assert_same(cells.block(one.rows[:3]), memory.block(one.rows[:3]))


def test_a_stream_that_is_left_leaves_no_thread(store):
    cells = StoreCells.open(store)
    list(cells.stream(windows(0)))  # the libraries start threads of their own, which they keep
    before = set(threading.enumerate())
    for _ in range(3):
        stream = cells.stream(windows(0))
        next(stream)
        stream.close()
    assert set(threading.enumerate()) <= before


def test_an_error_of_the_windows_is_not_taken_for_damage(store):
    def failing():
        yield windows(0)[0]
        raise ValueError("no more windows")

    with pytest.raises(ValueError, match="^no more windows$"):
        list(StoreCells.open(store).stream(failing()))


# What else can be opened.


def write_foreign(path: Path, adatas: list[ad.AnnData], *, collection: bool = True) -> None:
    group = zarr.open_group(path, mode="w", zarr_format=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Consolidated metadata")
        for number, adata in enumerate(adatas):
            annbatch.write_sharded(group, adata, n_obs_per_chunk=16, key=f"dataset_{number}")
        if collection:
            group.attrs.update({"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"})
            zarr.consolidate_metadata(group.store)


def test_a_collection_of_annbatch(many_adata, tmp_path):
    parts = [many_adata[:300].copy(), many_adata[300:].copy()]
    parts[1].obs["donor"] = parts[1].obs["donor"].cat.rename_categories(lambda name: name.upper())
    for part in parts:
        part.X = part.X.astype(np.int32)
    write_foreign(tmp_path / "s.zarr", parts)
    cells = open_cells(tmp_path / "s.zarr")
    memory = open_cells(many_adata)
    rows = np.random.default_rng(0).integers(700, size=500)
    assert cells.vocab.genes == tuple(ALL)
    assert cells.names().tolist() == many_adata.obs_names.tolist()
    assert_same(cells.block(rows), memory.block(rows))
    assert cells.column("donor").tolist() == [*parts[0].obs["donor"], *parts[1].obs["donor"]]
    vocab = GeneVocab.from_genes(ALL[60:20:-1])
    cells, memory = open_cells(tmp_path / "s.zarr", vocab), open_cells(many_adata, vocab)
    assert_same(cells.block(rows), memory.block(rows))
    assert cells.counts_kept == pytest.approx(memory.counts_kept)


def test_a_collection_that_annbatch_shuffled(many_adata, tmp_path):
    many_adata[:400].write_h5ad(tmp_path / "a.h5ad")
    many_adata[400:].write_h5ad(tmp_path / "b.h5ad")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        annbatch.DatasetCollection(tmp_path / "s.zarr").add_adatas([tmp_path / "a.h5ad", tmp_path / "b.h5ad"])
    cells = open_cells(tmp_path / "s.zarr")
    assert sorted(cells.names()) == sorted(many_adata.obs_names)
    assert_same(cells.block(np.arange(700)), twin(cells, many_adata).block(np.arange(700)))


def test_stored_zeros_unsorted_rows_and_repeated_genes(tmp_path):
    counts = sparse.csr_matrix(
        (np.array([5, 0, 2, 200, 100, 1], dtype=np.uint8), np.array([3, 0, 1, 2, 2, 0]), [0, 3, 6]), shape=(2, 4)
    )
    adata = ad.AnnData(counts, obs=pd.DataFrame(index=["x", "y"]), var=pd.DataFrame(index=["a", "b", "c", "a2"]))
    write_foreign(tmp_path / "s.zarr", [adata])
    block = open_cells(tmp_path / "s.zarr").block(np.array([0, 1]))
    assert block.indptr.tolist() == [0, 2, 4]
    assert block.genes.tolist() == [1, 3, 0, 2]
    assert block.counts.tolist() == [2, 5, 1, 300]
    assert block.totals.tolist() == [7, 301]


def test_a_collection_with_columns_of_one_gene(many_adata, tmp_path):
    adata = many_adata[:40].copy()
    adata.var_names = ["gene0", *ALL[:79]]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Variable names are not unique")
        write_foreign(tmp_path / "s.zarr", [adata])
    with pytest.warns(ScforgeWarning, match="summed"):
        cells = open_cells(tmp_path / "s.zarr")
    block = cells.block(np.arange(40))
    dense = sparse.csr_matrix((block.counts, block.genes, block.indptr), shape=(40, 79)).toarray()
    counts = adata.X.toarray()
    np.testing.assert_array_equal(dense[:, 0], counts[:, 0] + counts[:, 1])
    np.testing.assert_array_equal(dense[:, 1:], counts[:, 2:])


@pytest.mark.parametrize(("value", "match"), [(0.5, "not whole numbers"), (-1, "negative"), (np.nan, "missing or inf")])
def test_a_collection_without_counts(many_adata, tmp_path, value, match):
    adata = many_adata[:40].copy()
    adata.X.data[123] = value
    write_foreign(tmp_path / "s.zarr", [many_adata[40:80].copy(), adata])
    cells = open_cells(tmp_path / "s.zarr")
    cells.block(np.arange(40))
    with pytest.raises(
        DataError, match=rf"X of dataset_1 of .*s\.zarr' holds .*{match}.*raw counts are needed"
    ) as told:
        cells.block(np.arange(40, 80))
    assert "\n" not in str(told.value)


def test_collections_that_cannot_be_used(many_adata, tmp_path):
    small = many_adata[:40].copy()
    write_foreign(tmp_path / "genes.zarr", [small, small[:, ::-1].copy()])
    with pytest.raises(DataError, match="dataset_1 of .* has other genes, or in another order, than dataset_0"):
        open_cells(tmp_path / "genes.zarr")
    dense = small.copy()
    dense.X = dense.X.toarray()
    write_foreign(tmp_path / "dense.zarr", [dense])
    with pytest.raises(DataError, match="X of dataset_0 of .* is array, not csr_matrix"):
        open_cells(tmp_path / "dense.zarr")
    write_foreign(tmp_path / "none.zarr", [])
    with pytest.raises(DataError, match="has no dataset"):
        open_cells(tmp_path / "none.zarr")


def test_a_collection_with_a_missing_file(many_adata, tmp_path):
    write_foreign(tmp_path / "s.zarr", [many_adata[:40].copy(), many_adata[40:80].copy()])
    shutil.rmtree(tmp_path / "s.zarr" / "dataset_1" / "X" / "data" / "c")
    cells = open_cells(tmp_path / "s.zarr")
    with pytest.raises(DataError, match="dataset_1 of .* is damaged at cell 0: it has no counts"):
        cells.block(np.arange(80))


# Damage.


def read_all(path: Path) -> tuple:
    cells = StoreCells.open(path)
    block = cells.block(np.arange(len(cells)))
    obs = tuple(tuple(cells.column(key)) for key in cells.obs)
    parts = (block.indptr, block.genes, block.counts, block.totals, block.measured, cells.names())
    return (*(part.tobytes() for part in parts), obs, cells.vocab.hash)


# pandas 3 has text that may be missing, which is stored as values and a mask.
NAMES = "obs/_index/values/c/0" if pd.__version__ >= "3" else "obs/_index/c/0"
PARTS = {
    "X/data/c/0": r"dataset_1 of .*, cells 0 to 232, cannot be read",
    "X/indices/c/0": r"dataset_1 of .*, cells 0 to 232, cannot be read",
    "X/indptr/c/0": "dataset_1 of .* (cannot be read|is damaged)",
    "obs/scforge_total/c/0": "dataset_1/obs/scforge_total of .* (cannot be read|is damaged)",
    "obs/scforge_check/c/0": "dataset_1/obs/scforge_check of .* (cannot be read|is damaged)",
    "obs/donor/codes/c/0": "dataset_1/obs/donor of .* (cannot be read|is damaged)",
    "obs/depth/c/0": "dataset_1/obs/depth of .* (cannot be read|is damaged)",
    NAMES: "dataset_1/obs/_index of .* (cannot be read|is damaged)",
}


def damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 0x10
        file.write_bytes(content)


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
@pytest.mark.parametrize(("part", "match"), PARTS.items(), ids=PARTS)
def test_damage_is_told(damaged, part, match, how):
    damage(damaged / "dataset_1" / part, how)
    if how == "missing" and part in ("X/data/c/0", "X/indices/c/0"):
        match = "dataset_1 of .* is damaged at cell 0: its counts are not those that were written"
    with pytest.raises(DataError, match=match) as told:
        read_all(damaged)
    assert "copy.zarr" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
@pytest.mark.parametrize("part", ["scforge/vocab/c/0", "scforge/measured/c/0/0", "zarr.json"])
def test_damage_beside_the_cells_is_told(damaged, part, how):
    damage(damaged / part, how)
    with pytest.raises(DataError, match=r"copy\.zarr") as told:
        read_all(damaged)
    assert "\n" not in str(told.value)


def test_only_who_reads_damaged_cells_is_told(damaged, store):
    damage(damaged / "dataset_1" / "X/data/c/0", "flipped")
    cells, whole = StoreCells.open(damaged), StoreCells.open(store)
    rows = np.r_[0:233, 466:700]
    assert_same(cells.block(rows), whole.block(rows))
    order = CellOrder(np.arange(700), 50, chunk_size=1, shuffle=False, window_cells=50)
    stream = cells.stream(order.windows())
    for number in range(4):
        assert_same(next(stream), whole.block(np.arange(50 * number, 50 * number + 50)))
    number = 4
    with pytest.raises(DataError, match=r"dataset_1 of .*(cells? \d+)"):  # noqa: PT012 -- whoever is not damaged is read
        for block in stream:
            assert_same(block, whole.block(np.arange(50 * number, 50 * number + 50)))
            number += 1
    assert number < 10  # the flipped byte is in the middle of dataset_1, which has the cells 233 to 465


def test_flips_anywhere_are_told_or_do_not_matter(damaged, store):
    """Of the files that are read, and of the metadata: the same cells, or an error that says so."""
    expected = read_all(store)
    generator = np.random.default_rng(0)
    files = ["zarr.json"] * 30
    files += [f"dataset_{generator.integers(3)}/{part}" for part in generator.permutation([*PARTS] * 2)]
    told = 0
    for name in files:
        content = (store / name).read_bytes()
        changed = bytearray(content)
        changed[generator.integers(len(content))] ^= 1 << generator.integers(8)
        (damaged / name).write_bytes(changed)
        try:
            assert read_all(damaged) == expected
        except (DataError, MissingFileError):
            told += 1
        (damaged / name).write_bytes(content)
    assert told > len(files) / 2


def change(path: Path, edit) -> None:
    """Change the metadata of a store."""
    file = path / "zarr.json"
    content = json.loads(file.read_text())
    edit(content["attributes"]["scforge"], content["consolidated_metadata"]["metadata"])
    file.write_text(json.dumps(content))


def _without(name: str):
    def edit(info, metadata) -> None:
        for key in [key for key in metadata if key == name or key.startswith(f"{name}/")]:
            del metadata[key]

    return edit


def _set(*keys, value):
    def edit(info, metadata) -> None:
        *first, last = keys
        place = metadata if keys[0] in metadata else info
        for key in first:
            place = place[key]
        place[last] = value

    return edit


EDITS = {
    "no dataset": (_without("dataset_1"), "dataset_1 is missing"),
    "no last dataset": (_without("dataset_2"), "dataset_2 is missing"),
    "not listed": (lambda info, _: info["datasets"].pop(), "its description lacks dataset_2"),
    "fewer cells": (_set("datasets", 1, "n_cells", value=200), "dataset_1 of .* it has 233 cells x 80 genes, not 200"),
    "fewer genes": (_set("n_genes", value=79), "dataset_0 of .* it has 233 cells x 80 genes"),
    "shape": (
        _set("dataset_1/X", "attributes", "shape", value=[233, 81]), "dataset_1 of .* it has 233 cells x 81 genes"
    ),
    "entries": (_set("dataset_1/X/data", "shape", value=[9]), "dataset_1 of .*boundaries"),
    "type": (_set("dataset_1/X/data", "data_type", value="uint8"), "dataset_1 of .* (cannot be read|is damaged)"),
    "vocabulary": (_set("vocab_hash", value="0"), "its vocabulary is another one"),
    "overlap": (lambda info, _: info["sources"][0].update(overlap=0.5), "the genes of its sources"),
    "check numbers": (lambda info, _: info["datasets"][2]["columns"].update(donor=1), "dataset_2/obs/donor of .*"),
    "format": (_set("format", value=99), "of a later scforge"),
    "description": (lambda info, _: info.pop("chunk_size"), "lacks 'chunk_size'"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Adding dataset with dtype")
@pytest.mark.parametrize(("edit", "match"), EDITS.values(), ids=EDITS)
def test_changed_metadata_are_told(damaged, edit, match):
    change(damaged, edit)
    with pytest.raises(DataError, match=match) as told:
        read_all(damaged)
    assert "copy.zarr" in str(told.value)


def test_a_dataset_whose_files_are_gone(damaged):
    shutil.rmtree(damaged / "dataset_1")
    with pytest.raises(DataError, match="dataset_1"):
        read_all(damaged)


@pytest.mark.parametrize("opener", [StoreCells.open, open_cells])
def test_what_is_no_store(opener, tmp_path, many_adata):
    with pytest.raises(MissingFileError, match=r"no\.zarr"):
        opener(tmp_path / "no.zarr")
    partial_path(tmp_path / "s.zarr").mkdir()
    with pytest.raises(DataError, match=r"s\.zarr' is incomplete: run the same scforge convert again to continue"):
        opener(tmp_path / "s.zarr")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="folder' is a folder without"):
        opener(tmp_path / "folder")
