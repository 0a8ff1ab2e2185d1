import contextlib
import logging
import warnings
from pathlib import Path

import annbatch
import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from scipy import sparse, stats

from scforge import _io
from scforge.data import GeneVocab, convert, open_cells
from scforge.data.matrix import Matrix
from scforge.data.statistics import measure_medians
from scforge.data.store import DATASET, StoreInfo, read_measured, read_vocab
from scforge.errors import DataError, GeneMismatchError, MissingFileError, OptionError, ScforgeWarning
from scforge.testing import raises

N_GENES = 60

pytestmark = pytest.mark.filterwarnings("ignore:.* genes that are not measured in all sources")


def make(seed: int, n_cells: int, genes: np.ndarray, *, types: int = 3) -> ad.AnnData:
    """Cells sorted by type; each has the gene of number 0."""
    generator = np.random.default_rng(seed)
    counts = generator.poisson(0.7, (n_cells, len(genes)))
    counts[:, np.flatnonzero(genes == "gene0")] += 1
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical(np.sort(generator.integers(types, size=n_cells)).astype(str)),
            "depth": generator.random(n_cells),
            "site": [f"site {seed}"] * n_cells,
        },
        index=[f"s{seed}-{i}" for i in range(n_cells)],
    )
    obs.loc[obs.index[3], "cell_type"] = None
    return ad.AnnData(sparse.csr_matrix(counts), obs=obs, var=pd.DataFrame(index=genes.astype(str)))


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, ad.AnnData]:
    """Three files with other genes in another order, stored in other ways."""
    names = np.array([f"gene{i}" for i in range(N_GENES)])
    shuffled = np.random.default_rng(0).permutation(N_GENES)
    files = {"a": make(1, 700, names[:50]), "b": make(2, 500, names[shuffled]), "c": make(3, 333, names[30:][::-1])}
    files["a"].X = files["a"].X.astype(np.float32)
    files["b"].X = sparse.csc_matrix(files["b"].X.astype(np.int32))
    files["c"].X = files["c"].X.toarray().astype(np.float64) + (names[30:][::-1] == "gene31")
    for name, adata in files.items():
        adata.write_h5ad(tmp_path / f"{name}.h5ad")
    return {str(tmp_path / f"{name}.h5ad"): adata for name, adata in files.items()}


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources come in small pieces, and datasets are small, too."""
    monkeypatch.setattr("scforge.data.conversion.dataset_size", lambda *_: 512)
    monkeypatch.setattr(Matrix.row_chunks, "__defaults__", (1500,))


def read_store(path: Path) -> ad.AnnData:
    datasets = [ad.read_zarr(path / DATASET.format(i)) for i in range(len(StoreInfo.read(path).datasets))]
    return ad.concat(datasets, merge="same")


def assert_same_cells(stored: ad.AnnData, source: ad.AnnData, name: str, genes: list[str]) -> None:
    cells = stored[stored.obs["scforge_source"] == name]
    assert sorted(cells.obs_names) == sorted(source.obs_names)
    expected = source[cells.obs_names].to_df().reindex(columns=genes, fill_value=0)
    np.testing.assert_array_equal(cells.to_df().to_numpy(), expected.to_numpy())
    totals = np.asarray(source[cells.obs_names].X.sum(axis=1)).ravel()
    np.testing.assert_array_equal(cells.obs["scforge_total"], totals)
    for column in ("cell_type", "depth", "site"):
        there, here = cells.obs[column], source.obs.loc[cells.obs_names, column]
        assert (there.isna() == here.isna()).all()
        assert (there[there.notna()].to_numpy() == here[here.notna()].to_numpy()).all()


def test_genes_that_some_sources_do_not_measure(sources, tmp_path):
    with pytest.warns(ScforgeWarning, match=r"^\d\d% of the counts are in genes that are not measured in all sources"):
        convert(list(sources), tmp_path / "s.zarr")
    known = [set(adata.var_names) for adata in sources.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScforgeWarning)
        convert(list(sources), tmp_path / "shared.zarr", vocab=GeneVocab.from_genes(sorted(set.intersection(*known))))


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_cell_is_there_as_it_was(sources, small_steps, tmp_path, shuffle, caplog):
    caplog.set_level(logging.INFO, "scforge")
    info = convert(list(sources), tmp_path / "s.zarr", shuffle=shuffle)
    stored = read_store(tmp_path / "s.zarr")
    assert info == StoreInfo.read(tmp_path / "s.zarr")
    assert (info.n_cells, len(info.datasets), info.counts_dtype) == (1533, 3, "uint16")
    assert stored.var_names.tolist()[:50] == [f"gene{i}" for i in range(50)]
    for name, adata in sources.items():
        assert_same_cells(stored, adata, name, list(stored.var_names))
        assert f"{name!r}: {adata.n_obs} cells" in caplog.text
    assert info.n_nonzeros == stored.X.nnz
    assert stored.X.has_canonical_format
    assert (stored.X.data > 0).all()
    in_order = [name for adata in sources.values() for name in adata.obs_names]
    assert (stored.obs_names.tolist() == in_order) == (not shuffle)
    measured = read_measured(zarr.open_group(tmp_path / "s.zarr", mode="r"))
    for row, adata in zip(measured, sources.values(), strict=True):
        assert (row == stored.var_names.isin(adata.var_names)).all()
    assert [source["overlap"] for source in info.sources] == pytest.approx([50 / 60, 1.0, 0.5])
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_the_order_depends_on_the_seed_and_not_on_memory(sources, small_steps, tmp_path, monkeypatch):
    one, two, other = (convert(list(sources), tmp_path / f"{i}.zarr", seed=seed) for i, seed in enumerate([0, 0, 1]))
    assert one.content_hash == two.content_hash != other.content_hash
    monkeypatch.undo()
    assert len(convert(list(sources), tmp_path / "large.zarr").datasets) == 1
    expected, stored = read_store(tmp_path / "0.zarr"), read_store(tmp_path / "large.zarr")
    assert stored.obs_names.equals(expected.obs_names)
    assert (stored.X != expected.X).nnz == 0


@pytest.mark.slow
def test_batches_are_as_mixed_as_random_ones(small_steps, tmp_path):
    adata = make(0, 2500, np.array([f"gene{i}" for i in range(20)]), types=8)
    del adata.obs["site"]
    adata.obs["cell_type"] = adata.obs["cell_type"].cat.add_categories("none").fillna("none")
    convert(adata, tmp_path / "s.zarr", obs=["cell_type"])

    def entropy(labels: np.ndarray) -> float:
        """Mean entropy of the labels in batches of 256."""
        batches = labels[: len(labels) // 256 * 256].reshape(-1, 256)
        return float(np.mean([stats.entropy(np.unique(batch, return_counts=True)[1]) for batch in batches]))

    for offset in (0, 128):  # the second set of batches lies across the datasets
        labels = np.asarray(read_store(tmp_path / "s.zarr").obs["cell_type"], dtype=str)[offset:]
        # The seed of the conversion, 0, is among these: it must not bring back the order of the source.
        random = [entropy(np.random.default_rng(i).permutation(labels)) for i in range(20)]
        assert min(random) > 0.95 * max(random)
        assert entropy(labels) == pytest.approx(np.mean(random), rel=0.02)
        assert entropy(np.sort(labels)) < 0.5 * np.mean(random)


def test_annbatch_opens_it(sources, small_steps, tmp_path):
    convert(list(sources), tmp_path / "s.zarr")
    collection = annbatch.DatasetCollection(tmp_path / "s.zarr", mode="r")
    loader = annbatch.Loader(chunk_size=64, preload_nchunks=4, batch_size=32, preload_to_gpu=False)
    batches = list(loader.use_collection(collection))
    assert sum(batch["X"].shape[0] for batch in batches) == 1533
    assert {"cell_type", "scforge_source"} <= set(batches[0]["obs"].columns)


@pytest.mark.slow
def test_counts_above_16_bits_make_the_store_wider(sources, small_steps, tmp_path):
    name = str(tmp_path / "b.h5ad")
    counts = sources[name].X.toarray().astype(np.float64)
    counts[400, 5], counts[401, 6] = 65_536, 2**32 - 1
    sources[name].X = sparse.csr_matrix(counts)
    sources[name].write_h5ad(name)
    assert convert(list(sources), tmp_path / "s.zarr").counts_dtype == "uint32"
    stored = read_store(tmp_path / "s.zarr")
    assert stored.X.dtype == np.uint32
    for source, adata in sources.items():
        assert_same_cells(stored, adata, source, list(stored.var_names))
    sources[name].X.data[sources[name].X.indptr[7]] = 2**32
    sources[name].write_h5ad(name)
    with pytest.raises(
        DataError, match=r"b\.h5ad' contains the count 4294967296, but .*; check that these are raw counts"
    ):
        convert(name, tmp_path / "t.zarr")
    assert not (tmp_path / "t.zarr").exists()


def test_columns_of_one_gene_are_summed_beyond_16_bits(tmp_path):
    counts = sparse.csr_matrix([[60_000, 60_000, 1], [1, 2, 3]], dtype=np.uint16)
    adata = ad.AnnData(counts, var=pd.DataFrame(index=["ENSG00000141510.1", "ENSG00000141510.2", "b"]))
    with pytest.warns(ScforgeWarning, match="adata.var_names: several columns refer to the same gene"):
        info = convert(adata, tmp_path / "s.zarr", shuffle=False)
    assert info.counts_dtype == "uint32"
    assert read_store(tmp_path / "s.zarr").X.toarray().tolist() == [[120_000, 1], [3, 3]]
    cells = open_cells(tmp_path / "s.zarr")
    block = cells.block(np.arange(2))
    assert block.counts.tolist() == [120_000, 1, 3, 3]
    assert block.totals.tolist() == [120_001, 6]


def test_a_vocabulary_is_kept_with_medians(tiny_adata, tmp_path):
    vocab = GeneVocab.from_genes([f"gene{i}" for i in range(70, 10, -1)])
    info = convert(tiny_adata, tmp_path / "s.zarr", vocab=vocab)
    stored = read_vocab(zarr.open_group(tmp_path / "s.zarr", mode="r"))
    assert (stored.genes, stored.hash) == (vocab.genes, info.vocab_hash)
    np.testing.assert_allclose(stored.medians, measure_medians(tiny_adata, vocab).medians, rtol=0.011)
    totals = read_store(tmp_path / "s.zarr")[tiny_adata.obs_names].obs["scforge_total"]
    np.testing.assert_array_equal(totals, np.asarray(tiny_adata.X.sum(axis=1)).ravel())
    inside = tiny_adata[:, list(vocab.genes)].X.sum() / tiny_adata.X.sum()
    assert info.counts_kept == pytest.approx(inside, rel=1e-6)
    vocab.save(tmp_path / "v.json")
    assert convert(tiny_adata, tmp_path / "f.zarr", vocab=str(tmp_path / "v.json")).content_hash == info.content_hash
    again = convert(tiny_adata, tmp_path / "t.zarr", vocab=stored.with_medians(np.full(60, 2.0)))
    assert (read_vocab(zarr.open_group(tmp_path / "t.zarr", mode="r")).medians == 2.0).all()
    assert again.content_hash != info.content_hash


def test_the_source_that_does_not_fit_is_named(sources, tmp_path):
    vocab = GeneVocab.from_genes([f"gene{i}" for i in range(30)])
    with pytest.raises(GeneMismatchError):
        convert(list(sources), tmp_path / "s.zarr", vocab=vocab)
    path = Path(next(iter(sources)))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match=r"a\.h5ad' cannot be read as an h5ad file"):
        convert(list(sources), tmp_path / "s.zarr")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"memory": "lots"}, "memory='lots' is not a valid size"),
        ({"memory": "100MB"}, r"memory of 0.10GB is not enough; pass at least 1\.\dGB"),
        ({"seed": -1}, "seed=-1"),
        ({"obs": "group"}, "obs='group' is not a list of columns"),
        ({"obs": 3}, "obs=3 is not a list of columns"),
        ({"min_overlap": "x"}, "min_overlap='x' is not a number from 0 to 1"),
        ({"obs": ["scforge_total"]}, "that scforge adds"),
        ({"path": "s3://bucket/s.zarr"}, "is a URL"),
        ({"path": "file"}, "is a file"),
        ({"path": "."}, "exists and is not a store"),
        ({"path": "out.h5ad"}, r"out\.h5ad' has a file extension, but a store is a folder; choose e.g."),
    ],
)
def test_options_that_cannot_be(tiny_adata, tmp_path, monkeypatch, options, match):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OptionError, match=match):
        convert(tiny_adata, **{"path": "s.zarr", **options})
    assert sorted(tmp_path.rglob("*")) == before


def test_only_a_store_or_an_empty_folder_is_replaced_and_only_when_asked(tiny_adata, tmp_path):
    old = convert(tiny_adata, tmp_path / "s.zarr")
    with raises(OptionError, "path"):
        convert(tiny_adata, tmp_path / "s.zarr")
    new = convert(tiny_adata[:50].copy(), tmp_path / "s.zarr", overwrite=True)
    assert (old.n_cells, StoreInfo.read(tmp_path / "s.zarr").n_cells, new.n_cells) == (60, 50, 50)
    assert [path.name for path in tmp_path.iterdir()] == ["s.zarr"]
    data, other = tmp_path / "data", tmp_path / "other"
    data.mkdir()
    assert convert(tiny_adata, data, overwrite=True).n_cells == 60
    other.mkdir()
    tiny_adata.write_h5ad(other / "a.h5ad")
    tiny_adata.write_zarr(tmp_path / "b.zarr")
    before = sorted(tmp_path.rglob("*"))
    for source, target in ((other / "a.h5ad", other), (tmp_path / "b.zarr", tmp_path / "b.zarr")):
        for overwrite in (False, True):
            with raises(OptionError, "path"):
                convert(source, target, overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_that_holds_a_source_is_not_replaced(tiny_adata, tmp_path):
    store = tmp_path / "s.zarr"
    convert(tiny_adata, store)
    tiny_adata.write_h5ad(store / "a.h5ad")
    (link := tmp_path / "link.zarr").symlink_to(store)
    tiny_adata.write_zarr(tmp_path / "b.zarr")
    within = (tmp_path / "b.zarr", tmp_path / "b.zarr/s.zarr")
    pairs = [(source, target) for source in (store / "a.h5ad", (store / "a.h5ad").as_uri()) for target in (store, link)]
    for source, target in [*pairs, within]:
        with raises(OptionError, "path"):
            convert(source, target, overwrite=True)
    assert (store / "a.h5ad").exists()


def test_a_store_is_replaced_in_one_step(tiny_adata, tmp_path, monkeypatch):
    """Wherever a conversion breaks off, there is a store under its name; a link to it stays a link."""
    path, link = tmp_path / "disk" / "s.zarr", tmp_path / "link.zarr"
    convert(tiny_adata, path, progress=False)
    link.symlink_to("disk/s.zarr")
    there = []

    def exchange(one, other):
        there.append(StoreInfo.read(other).n_cells)
        return whole(one, other)

    whole = _io._exchange
    for n_cells, how in [(30, exchange), (20, lambda one, other: False)]:
        monkeypatch.setattr(_io, "_exchange", how)
        convert(tiny_adata[:n_cells].copy(), link, overwrite=True, progress=False)
        assert link.is_symlink()
        assert StoreInfo.read(path).n_cells == n_cells
        assert [part.name for part in path.parent.iterdir()] == ["s.zarr"]
    assert there == [60]


@pytest.mark.slow
def test_a_store_whose_replacement_was_killed_is_there_again(tiny_adata, tmp_path, monkeypatch):
    """Where two folders cannot be exchanged, reading names the old store, and the next conversion replaces it."""

    class KilledError(BaseException):
        pass

    def killed(path, target):
        if path.is_dir():
            nonlocal steps
            steps -= 1
            if steps < 0:
                raise KilledError
        return whole[path.is_dir()](path, target)

    whole = [Path.replace, Path.rename]
    monkeypatch.setattr(_io, "_exchange", lambda one, other: False)
    found = []
    for number in range(4):
        path = tmp_path / str(number) / "s.zarr"
        convert(tiny_adata, path, progress=False)
        steps = number
        with monkeypatch.context() as patch, contextlib.suppress(KilledError):
            patch.setattr(Path, "rename", killed)
            patch.setattr(Path, "replace", killed)
            convert(tiny_adata[:20].copy(), path, overwrite=True, progress=False)
        if number == 1:
            with pytest.raises(
                MissingFileError, match=r"was killed while replacing it; rename '.*\.replaced' to restore"
            ):
                open_cells(path)
        found.append(StoreInfo.read(path).n_cells if path.exists() else None)
        convert(tiny_adata[:30].copy(), path, overwrite=True, progress=False)
        assert StoreInfo.read(path).n_cells == 30
        assert [part.name for part in path.parent.iterdir()] == ["s.zarr"]
    assert found == [60, None, 20, 20]
