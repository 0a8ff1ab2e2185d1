"""Files and batches that measure different genes."""

import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from scforge.config import Config
from scforge.data import convert, open_cells, read_h5ad
from scforge.data.gene_sets import lacking_genes
from scforge.errors import ScforgeWarning
from scforge.models import Encoder
from scforge.training import CellDataModule
from scforge.workflows import train_from_config

N_GENES, N_LACKING = 60, 24


@pytest.fixture
def halves() -> tuple[ad.AnnData, ad.AnnData]:
    """One population in two halves, the second of which lacks the last genes."""
    generator = np.random.default_rng(0)
    counts = generator.poisson(generator.gamma(2.0, 1.0, size=N_GENES), size=(400, N_GENES))
    cells = ad.AnnData(sp.csr_matrix(counts.astype(np.float32)))
    cells.var_names = [f"G{i}" for i in range(N_GENES)]
    cells.obs_names = [f"cell{i}" for i in range(400)]
    cells.obs["donor"] = np.where(np.arange(400) < 200, "a", "b")
    return cells[:200].copy(), cells[200:, : N_GENES - N_LACKING].copy()


@pytest.fixture
def files(halves: tuple[ad.AnnData, ad.AnnData], tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / name) for name in ("a.h5ad", "b.h5ad")]
    for part, path in zip(halves, paths, strict=True):
        part.write_h5ad(path)
    return paths


def outer(halves: tuple[ad.AnnData, ad.AnnData]) -> ad.AnnData:
    return ad.concat(halves, join="outer", fill_value=0)


DIFFER = r"\d\d% of the counts are in genes that are not measured in all sources \(24 of 60 genes\), and the zeros"
LEFT_OUT = r"do not measure genes that others measure \('.*' lacks 24 of 60 genes\).*the model leaves these genes out"


def test_reading_and_opening_files_reports_it(files: list[str], halves, tmp_path: Path) -> None:
    with pytest.warns(ScforgeWarning, match=DIFFER):
        read_h5ad(files)
    with pytest.warns(ScforgeWarning, match=DIFFER):
        open_cells(files)
    with pytest.warns(ScforgeWarning, match=DIFFER):
        open_cells(list(halves))
    with pytest.warns(ScforgeWarning, match=DIFFER):
        convert(files, tmp_path / "store.zarr", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScforgeWarning)
        read_h5ad([files[0]])
        shared = open_cells(files[1]).vocab
        open_cells(files, shared)


@pytest.mark.parametrize("route", ["joined", "read_h5ad", "in memory", "store"])
def test_the_model_leaves_out_genes_that_some_do_not_measure(route: str, files: list[str], halves, tmp_path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if route == "store":
            convert(files, tmp_path / "store.zarr", progress=False)
        sources = {
            "joined": lambda: outer(halves),
            "read_h5ad": lambda: read_h5ad(files),
            "in memory": lambda: open_cells(files),
            "store": lambda: open_cells(tmp_path / "store.zarr"),
        }
        source = sources[route]()
    if isinstance(source, ad.AnnData):
        Encoder.setup_anndata(source, batch_key="donor" if route == "joined" else None)
        given = {"adata": source}
    else:
        given = {"datamodule": CellDataModule(source)}
    with pytest.warns(ScforgeWarning, match=LEFT_OUT):
        model = Encoder(**given, hidden_dim=8)
    assert set(model.vocab.genes) == {f"G{i}" for i in range(N_GENES - N_LACKING)}
    assert model.tokenizer.library_size == "vocabulary"
    block = model.open_cells().block(np.array([0, 300]))
    assert block.totals.tolist() == [block.counts[: block.indptr[1]].sum(), block.counts[block.indptr[1] :].sum()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScforgeWarning)
        model.train(1, progress_bar=False)
        model.save(tmp_path / "model")
        again = Encoder.load(tmp_path / "model")
        there = files[0]
        assert (again.get_latent_representation(there) == model.get_latent_representation(there)).all()


def test_a_configuration_of_two_files_reports_it(files: list[str]) -> None:
    config = Config.model_validate(
        {"data": {"paths": files}, "model": {"hidden_dim": 8}, "training": {"max_epochs": 1, "accelerator": "cpu"}}
    )
    with pytest.warns(ScforgeWarning) as warned:
        model = train_from_config(config, progress_bar=False)
    told = " ".join(str(one.message) for one in warned)
    assert "not measured in all sources (24 of 60 genes)" in told
    assert "'" + files[1] + "' lacks 24 of 60 genes" in told
    assert model.vocab.n_genes == N_GENES - N_LACKING


def test_given_genes_are_kept_and_reported(halves) -> None:
    cells = outer(halves)
    vocab = open_cells(cells).vocab
    Encoder.setup_anndata(cells, batch_key="donor")
    with pytest.warns(ScforgeWarning, match="'b' lacks 24 of 60 genes.*pass a vocab without these genes"):
        model = Encoder(cells, vocab=vocab, hidden_dim=8)
    assert (model.vocab.n_genes, model.tokenizer.library_size) == (N_GENES, "data")
    with pytest.warns(ScforgeWarning, match="leaves these genes out"):
        model = Encoder(cells, keep_genes=["G59"], hidden_dim=8)
    assert "G59" in model.vocab.genes
    assert "G58" not in model.vocab.genes


def test_too_few_shared_genes_are_no_reason_to_leave_out_the_others(halves) -> None:
    first, second = halves
    cells = ad.concat([first, second[:, :10]], join="outer", fill_value=0)
    Encoder.setup_anndata(cells, batch_key="donor")
    with pytest.warns(ScforgeWarning, match="too few genes are shared"):
        model = Encoder(cells, hidden_dim=8)
    assert model.vocab.n_genes == N_GENES


def test_genes_of_few_cells_and_of_small_batches_are_no_evidence() -> None:
    generator = np.random.default_rng(0)
    rates = np.concatenate([np.full(50, 2.0), np.full(50, 0.02)])
    counts = generator.poisson(rates, size=(600, 100))
    groups = np.repeat([0, 1], 300)
    assert not lacking_genes(sp.csr_matrix(counts), groups).any()
    of_a_type = counts.copy()
    of_a_type[:60, 50:] += generator.poisson(5.0, size=(60, 50))  # a type that the second batch does not have
    of_a_type[300:, 50:] = 0
    assert not lacking_genes(sp.csr_matrix(of_a_type), groups).any()
    few = counts.copy()
    few[300:, :2] = 0  # e.g. of the Y chromosome
    assert not lacking_genes(sp.csr_matrix(few), groups).any()
    few[300:, :20] = 0
    found = lacking_genes(sp.csr_matrix(few), groups)
    assert found[1, :20].all()
    assert not found[1, 20:50].any()
    assert not found[0].any()
    groups = np.where(np.arange(600) < 585, 0, 1)
    assert not lacking_genes(sp.csr_matrix(np.where(groups[:, None] & (np.arange(100) < 20), 0, counts)), groups).any()
    assert not lacking_genes(sp.csr_matrix(counts), np.full(600, -1)).any()
