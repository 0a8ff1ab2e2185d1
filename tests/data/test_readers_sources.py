import logging
import warnings

import anndata as ad
import fsspec
import h5py
import mudata as md
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import GeneVocab, open_cells
from scforge.data.readers import open_streams
from scforge.data.store import StoreCells
from scforge.errors import DataError, GeneMismatchError, MissingFileError, OptionError, ScforgeWarning
from scforge.testing import raises
from scforge.training import CellDataModule

FORMS = {"csr": sparse.csr_matrix, "csc": sparse.csc_matrix, "dense": lambda x: x.toarray()}


def write_zarr(adata: ad.AnnData, path, version: int = 3) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of formats to come
        with ad.settings.override(zarr_write_format=version):
            adata.write_zarr(path)
    return str(path)


def mudata(adata: ad.AnnData) -> md.MuData:
    """The cells with a second modality, of which they are not all."""
    generator = np.random.default_rng(3)
    protein = ad.AnnData(generator.poisson(5, (50, 4)).astype(np.float32), obs=pd.DataFrame(index=adata.obs_names[10:]))
    protein.var_names = [f"protein{i}" for i in range(4)]
    whole = md.MuData({"rna": adata, "protein": protein})
    whole.obs["donor"] = np.where(whole.obs_names < "cell3", "d1", "d2")
    return whole


def same(cells, expected) -> None:
    rows = np.array([3, 59, 0, 3])
    block, wanted = cells.block(rows), expected.block(rows)
    for name in ("indptr", "genes", "counts", "totals", "rows", "measured"):
        np.testing.assert_array_equal(getattr(block, name), getattr(wanted, name))
        assert getattr(block, name).dtype == getattr(wanted, name).dtype
    assert len(cells) == len(expected)
    assert (cells.vocab, cells.overlap) == (expected.vocab, expected.overlap)
    assert cells.counts_kept == pytest.approx(expected.counts_kept)
    assert cells.column("batch").tolist() == expected.column("batch").tolist()
    np.testing.assert_array_equal(cells.n_expressed, expected.n_expressed)


@pytest.fixture
def vocab(tiny_adata) -> GeneVocab:
    """Some of the genes in another order, and one that the data do not have."""
    return GeneVocab.from_genes([*tiny_adata.var_names[70:4:-1], "no such gene"])


@pytest.mark.slow
@pytest.mark.parametrize(("form", "layer"), [("csr", None), ("csc", "raw"), ("dense", None)])
def test_every_form(form, layer, tiny_adata, vocab, tmp_path):
    expected = open_cells(tiny_adata.copy(), vocab)
    counts = FORMS[form](tiny_adata.X)
    tiny_adata.X = counts if layer is None else np.log1p(tiny_adata.X.toarray())
    if layer is not None:
        tiny_adata.layers["raw"] = counts
    path = tmp_path / "a.h5ad"
    tiny_adata.write_h5ad(path)
    whole = mudata(tiny_adata)
    whole.write(tmp_path / "a.h5mu")
    remote = fsspec.filesystem("memory")
    remote.pipe("/cells/a.h5ad", path.read_bytes())
    zarr = write_zarr(tiny_adata, tmp_path / "a.zarr")
    remote.put(zarr, "/cells/a.zarr", recursive=True)
    sources = {
        "AnnData": tiny_adata,
        "h5ad": path,
        "file": f"file://{path}",
        "memory": "memory://cells/a.h5ad",
        "zarr 3": zarr,
        "zarr 2": write_zarr(tiny_adata, tmp_path / "b.zarr", 2),
        "remote zarr": "memory://cells/a.zarr",
    }
    for source in sources.values():
        same(open_cells(source, vocab, layer=layer), expected)
    for source in (whole, tmp_path / "a.h5mu"):
        cells = open_cells(source, vocab, layer=layer, modality="rna")
        same(cells, expected)
        assert cells.column("donor").tolist() == whole.obs["donor"].tolist()
    remote.rm("/cells", recursive=True)


@pytest.mark.filterwarnings("ignore:.* genes that are not measured in all sources")
def test_several_sources(tiny_adata, tmp_path):
    first, second = tiny_adata[:20, :50].copy(), tiny_adata[20:, 30:].copy()
    first.obs["batch"] = pd.Categorical(["z"] * 20)
    first.obs["only here"] = 1
    first.write_h5ad(tmp_path / "a.h5ad")
    place = write_zarr(second, tmp_path / "b.zarr")
    cells = open_cells([tmp_path / "a.h5ad", place])
    assert cells.vocab.genes == tuple(tiny_adata.var_names)
    expected = tiny_adata.X.toarray()
    expected[:20, 50:] = 0
    expected[20:, :30] = 0
    np.testing.assert_array_equal(cells.counts.toarray(), expected)
    np.testing.assert_array_equal(cells.totals, expected.sum(axis=1))
    assert cells.obs.index.tolist() == tiny_adata.obs_names.tolist()
    assert cells.column("batch").cat.categories.tolist() == ["z", "x", "y"]
    assert cells.column("scforge_source").tolist() == [str(tmp_path / "a.h5ad")] * 20 + [place] * 40
    assert "only here" not in cells.obs
    memory = open_cells([first, second])
    np.testing.assert_array_equal(memory.counts.toarray(), expected)
    assert memory.column("scforge_source").tolist() == ["adata"] * 20 + ["adata-1"] * 40
    with raises(OptionError, "source"):
        open_cells([first, first])
    assert open_cells([first, place], obs=["group"]).obs.columns.tolist() == ["group"]
    with raises(DataError, "obs"):
        open_cells([tmp_path / "a.h5ad", place], obs=["only here"])


def test_what_is_wrong_in_a_file_is_told_with_its_name(tiny_adata, tmp_path):
    tiny_adata.X = tiny_adata.X.toarray() + 1  # no cell is without the one gene below
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    assert open_cells(tmp_path / "a.h5ad").counts.dtype == np.uint8
    other = tiny_adata.copy()
    other.var_names = other.var["ensembl"]
    other.X[0, 0] = 70_000
    other.write_h5ad(tmp_path / "b.h5ad")
    assert open_cells(tmp_path / "b.h5ad").counts.dtype == np.uint32
    assert open_cells(tmp_path / "b.h5ad").counts[0, 0] == 70_000
    with pytest.raises(GeneMismatchError):
        open_cells(tmp_path.as_posix() + "/*.h5ad")
    with pytest.raises(GeneMismatchError):
        open_cells(tmp_path.as_posix() + "/*.h5ad", GeneVocab.from_genes(tiny_adata.var_names))
    with pytest.warns(ScforgeWarning, match=r"a\.h5ad': adata.var_names has 1 of the 3") as told:
        open_cells(tmp_path / "a.h5ad", GeneVocab.from_genes(["gene20", "x", "y"]))
    assert told[0].filename == __file__
    for value, message in [(-1, "negative values"), (0, "without counts.*row 7")]:
        tiny_adata.X[7] = value
        tiny_adata.write_h5ad(tmp_path / "a.h5ad")
        for source in (tmp_path / "a.h5ad", write_zarr(tiny_adata, tmp_path / f"{value}.zarr")):
            with pytest.raises(DataError, match=rf"'X' of '.*\.(h5ad|zarr)'.*{message}"):
                open_cells(source)
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        del file["obs"]
        ad.io.write_elem(file, "obs", tiny_adata.obs[:50])
    with pytest.raises(DataError, match="has 60 cells, but obs has 50 rows; write the file again"):
        open_cells(tmp_path / "a.h5ad")


def test_damaged_pieces_are_told(tiny_adata, tmp_path):
    place = write_zarr(tiny_adata, tmp_path / "a.zarr")
    (chunk,) = (path for path in (tmp_path / "a.zarr/X/indices/c").iterdir() if path.is_file())
    content = chunk.read_bytes()
    chunk.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"indices in 'X' of '.*a\.zarr' cannot be read"):
        open_cells(place)
    path = tmp_path / "a.h5ad"
    tiny_adata.write_h5ad(path, compression="gzip")
    with h5py.File(path) as file:
        block = file["X/data"].id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    content[block.byte_offset : block.byte_offset + block.size] = bytes(block.size)
    for damaged, message in [(content, r"data in 'X' of '.*a\.h5ad' cannot be read"), (content[:5000], "be read")]:
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            open_cells(path)


def test_more_than_fits_into_memory(tiny_adata, tmp_path, monkeypatch):
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    message = r"60 cells with [\d,]+ counts need about 0\.\d MB of memory, but the limit set by memory is 0\.0 MB; "
    message += ".*scforge convert.*cache="
    with pytest.raises(DataError, match=message):
        open_cells(tmp_path / "a.h5ad", memory=1000)
    monkeypatch.setattr("scforge.data.readers.available_memory", lambda: 3000)
    with pytest.raises(DataError, match="at most half of the available"):
        open_cells(tmp_path / "a.h5ad")
    assert len(open_cells(tmp_path / "a.h5ad", memory="1GB")) == 60


def test_files_that_do_not_fit_are_converted_for_training(tiny_adata, tmp_path, monkeypatch, caplog):
    def trained_from(place):
        caplog.clear()
        return CellDataModule(place).cells

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "scforge")
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    assert trained_from(tmp_path / "a.h5ad").chunk_size == 1
    with monkeypatch.context() as patch:
        patch.setattr("scforge.data.readers.available_memory", lambda: 3000)
        assert len(trained_from(tmp_path / "a.h5ad")) == 60
    (store,) = (tmp_path / "cache" / "scforge" / "stores").glob("*.zarr")
    assert f"so they are converted once into {store}; set cache to use another folder." in caplog.text
    monkeypatch.chdir(tmp_path)
    assert isinstance(trained_from("a.h5ad"), StoreCells)
    assert "onverted" not in caplog.text
    assert isinstance(open_cells("a.h5ad", cache="auto"), StoreCells)
    assert not isinstance(open_cells("a.h5ad", cache="auto", gene_key="ensembl"), StoreCells)
    tiny_adata[:30].write_h5ad(tmp_path / "a.h5ad")
    assert len(trained_from("a.h5ad")) == 30
    assert "have changed" in caplog.text
    assert len(open_cells(tiny_adata, cache="auto")) == 60


def test_a_store_in_between(tiny_adata, vocab, tmp_path, caplog):
    def opened(**options):
        with caplog.at_level(logging.INFO, "scforge"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            caplog.clear()
            return open_cells(tmp_path / "a.h5ad", cache=tmp_path / "store.zarr", **options)

    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    assert len(opened()) == 60
    cells = opened(vocab=vocab, obs=["batch"])
    assert "Converted" not in caplog.text
    assert cells.vocab == vocab
    assert cells.n_expressed.sum() > 0
    tiny_adata[:30].write_h5ad(tmp_path / "a.h5ad")
    assert len(opened()) == 30
    assert "have changed" in caplog.text
    with raises(OptionError, "cache"):
        opened(gene_key="ensembl")
    with raises(OptionError, "cache"):
        open_cells(tiny_adata, cache=tmp_path / "store.zarr")
    with pytest.raises(DataError, match="is a folder but not a store"):
        open_cells(tiny_adata, cache=tmp_path)
    with raises(OptionError, "layer"):
        open_cells(tmp_path / "store.zarr", layer="raw")


def test_modalities(tiny_adata, tmp_path):
    whole = mudata(tiny_adata)
    whole.write(tmp_path / "a.h5mu")
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of formats to come
        whole.write_zarr(tmp_path / "mu.zarr")
    for source in (whole, tmp_path / "a.h5mu", tmp_path / "mu.zarr"):
        with pytest.raises(OptionError, match="MuData; set modality to one .*'rna', 'protein'|'protein', 'rna'"):
            open_cells(source)
        with raises(OptionError, "modality"):
            open_cells(source, modality="rnaa")
        assert open_cells(source, modality="protein").column("donor").tolist() == whole.obs["donor"].tolist()[10:]
    for source in (tiny_adata, tmp_path / "a.h5ad"):
        with raises(OptionError, "modality"):
            open_cells(source, modality="rna")


def test_what_is_no_source(tiny_adata, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_adata.write_h5ad("cells.h5ad")
    (tmp_path / "cells.csv").write_text("a,b")
    (tmp_path / "folder").mkdir()
    for source, error, message in [
        ("cell.h5ad", MissingFileError, r"'cell\.h5ad' does not exist; did you mean 'cells\.h5ad'"),
        ("cells.csv", DataError, r"is not an h5ad .* scanpy\.read_csv and write h5ad"),
        ("folder", DataError, "a folder without zarr metadata"),
        ([], OptionError, "is empty; pass at least one"),
        (["cells.h5ad", f"{tmp_path}/cells.h5ad"], OptionError, "twice"),
    ]:
        with pytest.raises(error, match=message):
            open_cells(source)
    with raises(OptionError, "obs"):
        open_cells("cells.h5ad", obs="batch")


def test_a_query_opens_itself(tiny_adata, tiny_vocab):
    class Query:
        def streams(self, vocab=None):
            return open_streams(tiny_adata)

    assert len(open_cells(Query(), tiny_vocab)) == 60
    assert [stream.n_cells for stream in open_streams([Query(), tiny_adata[:10].copy()])] == [60, 10]
    with raises(OptionError, "obs"):
        open_cells(Query(), obs=["batch"])
