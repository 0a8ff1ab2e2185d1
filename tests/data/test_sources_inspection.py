import anndata as ad
import h5py
import numpy as np
import pytest
from scipy import sparse

from scforge.cli import main
from scforge.data import GeneVocab, map_genes
from scforge.data.sources import inspect_h5ad
from scforge.errors import GeneMismatchError

STORED = {"csr": sparse.csr_matrix, "csc": sparse.csc_matrix, "dense": lambda x: x.toarray()}


@pytest.mark.parametrize("kind", STORED)
def test_figures_are_those_of_map_genes(tiny_adata, tiny_vocab, tmp_path, kind):
    vocab = tiny_vocab.subset(range(5, 80))
    counts = tiny_adata.X.toarray()
    counts[[3, 8]] = 0
    tiny_adata.X = STORED[kind](sparse.csr_matrix(counts))
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    found = inspect_h5ad(tmp_path / "a.h5ad", vocab)
    assert (found.n_cells, found.n_genes, found.stored, found.n_empty) == (60, 80, kind, 2)
    keep = np.delete(np.arange(60), [3, 8])
    expected = map_genes(tiny_adata[keep].copy(), vocab)
    assert found.overlap == expected
    assert found.counts == "X contains raw counts"


def test_the_best_vocabulary(pbmc, tmp_path):
    pbmc[:50].write_h5ad(tmp_path / "human.h5ad")
    found = inspect_h5ad(tmp_path / "human.h5ad", n_top=3)
    assert found.overlap.vocab.startswith("human_protein_coding,")
    assert found.overlap.n_matched == 12380
    assert found.obs_columns == {"cell_type": "7 values, 2 cells without a value"}
    assert found.other_names == {"adata.var['gene_ids']": "human Ensembl ids (13,236 in the vocabulary)"}
    assert len(found.overlap.top_missing) == 3
    mouse = ad.AnnData(np.ones((3, 500)))
    mouse.var_names = GeneVocab.named("mouse_protein_coding").symbols[:500]
    mouse.write_h5ad(tmp_path / "mouse.h5ad")
    assert inspect_h5ad(tmp_path / "mouse.h5ad").overlap.vocab.startswith("mouse_protein_coding,")
    assert inspect_h5ad(tmp_path / "mouse.h5ad", "human_mouse").overlap.vocab.startswith("human_mouse,")


def test_where_the_counts_are(tiny_adata, tiny_vocab, tmp_path):
    path, counts = tmp_path / "a.h5ad", tiny_adata.X.copy()
    vocab = tiny_vocab.subset(range(40))
    kept = map_genes(tiny_adata, vocab).counts_kept
    tiny_adata.X = counts.log1p()
    tiny_adata.layers["scaled"] = counts * 0.5

    def written() -> ad.AnnData:
        tiny_adata.write_h5ad(path)
        return inspect_h5ad(path, vocab)

    found = written()
    assert found.counts.endswith("so it does not contain raw counts")
    assert np.isnan(found.overlap.counts_kept)
    assert found.overlap.top_missing == ()
    assert found.n_empty is None
    assert found.overlap.n_matched == 40
    plain = tiny_adata.copy()
    plain.X = counts
    tiny_adata.raw = plain
    assert written().counts.endswith("raw contains them, see adata.raw.to_adata()")
    tiny_adata.layers["counts"] = counts
    found = written()
    assert found.counts.endswith("; layers['counts'] contains them")
    assert found.overlap.counts_kept == pytest.approx(kept)
    assert inspect_h5ad(path, vocab, layer="counts").counts == "layers['counts'] contains raw counts"
    assert "layers['scaled'] contains values" in inspect_h5ad(path, vocab, layer="scaled").counts
    tiny_adata.X = counts
    assert written().counts == "X contains raw counts"
    found = inspect_h5ad(path, vocab, layer="scaled")
    assert found.counts.endswith("; X contains them")
    tiny_adata.layers["counts"] = -counts
    assert "negative values" in (written() and inspect_h5ad(path, vocab, layer="counts").counts)


def test_layers_that_cannot_be_read_are_passed_over(tiny_adata, tiny_vocab, tmp_path):
    path, counts = tmp_path / "a.h5ad", tiny_adata.X.copy()
    tiny_adata.X = counts * 0.5
    tiny_adata.layers["counts"] = counts
    tiny_adata.raw = tiny_adata.copy()
    tiny_adata.write_h5ad(path)
    with h5py.File(path, "r+") as file:
        file["layers/a"] = np.ones(3)
        file["raw/X/indices"][0] = 10**6
    assert inspect_h5ad(path, tiny_vocab).counts.endswith("; layers['counts'] contains them")
    with h5py.File(path, "r+") as file:
        file["layers/counts/indptr"][5] = 10**7
    assert inspect_h5ad(path, tiny_vocab).counts.endswith("so it does not contain raw counts")


def test_a_vocabulary_that_does_not_fit(tmp_path, capsys):
    counts = np.random.default_rng(0).poisson(1.0, (5, 40)).astype(np.float32)
    mouse = [f"ENSMUSG{index:011d}" for index in range(40)]
    ad.AnnData(sparse.csr_matrix(counts), var={"names": mouse}).write_h5ad(tmp_path / "cells.h5ad")
    found = inspect_h5ad(tmp_path / "cells.h5ad", "human_protein_coding", gene_key="names")
    with pytest.raises(GeneMismatchError):
        found.check()
    inspect_h5ad(tmp_path / "cells.h5ad", gene_key="names").check()
    argv = ["inspect", str(tmp_path / "cells.h5ad"), "--gene-key", "names", "--vocab", "human_protein_coding"]
    assert main(argv) == 2
    told = capsys.readouterr()
    assert "genes of the data" in told.out
    assert len(told.err.strip().splitlines()) == 1
