import logging
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from scforge.cli import main
from scforge.config import load_config
from scforge.data.store import StoreCells
from scforge.estimators import Encoder
from scforge.training import CellDataModule
from scforge.workflows import train_from_config

TEXT = """
data:
  paths: ["{path}"]
  preprocessing: {{hvg_selection: 40}}
model: {{hidden_dim: 8, ffn_dim: 8, latent_dim: 4}}
training: {{max_epochs: 1, accelerator: cpu, batch_size: 64}}
"""


@pytest.fixture
def run(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Encoder, CellDataModule]]:
    monkeypatch.chdir(tmp_path)
    train = Encoder.train
    seen: list[CellDataModule] = []

    def spy(self: Encoder, *args, **kwargs) -> None:
        seen.append(kwargs["datamodule"])
        train(self, *args, **kwargs)

    monkeypatch.setattr(Encoder, "train", spy)

    def run(*overrides: str, path: str | Path = store) -> tuple[Encoder, CellDataModule]:
        Path("config.yaml").write_text(TEXT.format(path=path))
        model = train_from_config(load_config("config.yaml", overrides), progress_bar=False)
        return model, seen[-1]

    return run


@pytest.fixture
def files(many_adata: ad.AnnData, tmp_path: Path) -> list[str]:
    many_adata[:400].write_h5ad(tmp_path / "a.h5ad")
    many_adata[400:].write_h5ad(tmp_path / "b.h5ad")
    return [str(tmp_path / "a.h5ad"), str(tmp_path / "b.h5ad")]


def test_a_store(run, store) -> None:
    keys = ["data.obs_columns=[depth]", "data.split.by=donor", "output.embedding=out/cells.h5ad"]
    model, data = run(*keys, "output.checkpoint_dir=ck")
    assert isinstance(data.cells, StoreCells)
    assert (model.adata, model.vocab.n_genes) == (None, 40)
    written, cells = ad.read_h5ad("out/cells.h5ad"), StoreCells.open(store)
    assert written.obs_names.tolist() == cells.names().tolist()
    assert written.obs.columns.tolist() == data.cells.obs.columns.tolist() == ["depth", "donor"]
    for key in written.obs:
        assert written.obs[key].tolist() == cells.column(key).tolist()
    np.testing.assert_array_equal(written.obsm["X_scforge"], model.get_latent_representation())
    loaded = Encoder.load("ck/final")
    np.testing.assert_allclose(loaded.get_latent_representation(store), written.obsm["X_scforge"], atol=1e-6)
    assert run()[1].cells.obs.columns.tolist() == ["group", "donor", "kind", "depth"]
    assert run("data.obs_columns=[]")[1].cells.obs.columns.tolist() == []


def test_a_pattern_and_a_cache(run, files, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "scforge")
    for converted in (True, False):
        _, data = run("data.cache=cache.zarr", path=tmp_path / "*.h5ad")
        assert isinstance(data.cells, StoreCells)
        assert len(data.cells) == 700
        assert ("Converted" in caplog.text) == converted
        caplog.clear()
    memory, in_memory = run("output.embedding=out/out.h5ad", path=tmp_path / "*.h5ad")
    assert (in_memory.cells.chunk_size, len(in_memory.cells)) == (1, 700)
    written = ad.read_h5ad("out/out.h5ad")
    assert written.shape == (700, 0)
    np.testing.assert_array_equal(written.obsm["X_scforge"], memory.get_latent_representation())


def test_one_h5ad_file(run, files, tmp_path, many_adata) -> None:
    model, data = run("output.embedding=out.h5ad", "data.labels_key=group", path=files[0])
    assert (model.adata.n_obs, data.cells.chunk_size) == (400, 1)
    written = ad.read_h5ad("out.h5ad")
    assert written.shape == (400, 80)
    np.testing.assert_array_equal(written.obsm["X_scforge"], model.get_latent_representation(key_added=None))
    assert (written.X != many_adata[:400].X).nnz == 0
    adata = many_adata[:100].copy()
    adata.layers["counts"] = adata.X.copy()
    adata.X = adata.X * 0.5
    adata.var["other"] = [f"name{i}" for i in range(80)]
    adata.write_h5ad(tmp_path / "layer.h5ad")
    model, data = run("data.layer=counts", "data.gene_key=other", "data.memory=4GB", path=tmp_path / "layer.h5ad")
    assert data.cells.totals.sum() == adata.layers["counts"].sum()
    assert all(gene.startswith("name") for gene in model.vocab.genes)
    assert model.adata is None


def test_an_h5ad_that_does_not_fit(run, files, monkeypatch, caplog) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setattr("scforge.workflows.train._LARGE", 0)
    monkeypatch.setattr("scforge.data.readers.available_memory", lambda: 3000)
    text = "data: {paths: [a.h5ad], preprocessing: {hvg_selection: 40}}\ntraining: {max_epochs: 1, accelerator: cpu}\n"
    Path("large.yaml").write_text(text)
    told = []
    for _ in range(2):
        assert main(["train", "--config", "large.yaml", "--overwrite", "output.embedding=out.h5ad"]) == 0
        told.append(caplog.text.count("so they are converted once into cache/scforge/stores/"))
        caplog.clear()
    assert told == [1, 0]
    assert ad.read_h5ad("out.h5ad").n_obs == 400


MISTAKES = [
    ("data.split.by=donr", "did you mean 'donor'?"),
    ("data.sampling.balance_key=knd", "did you mean 'kind'?"),
    ("data.sampling.start=0.5", "balance_key"),
    ("data.modality=rna", "modality='rna' has no effect, because modality is set when the store"),
    ("data.max_tokens_per_batch=100", "NeighborDenoising requires random batches"),
    ("data.paths='*.nothing'", "*.nothing"),
    ("data.paths=s.zarr", "s.zarr' is incomplete"),
    (
        "data={paths: a.h5ad, cache: config.yaml}",
        "data.cache='config.yaml' cannot be a folder, because 'config.yaml' is a file; choose another path",
    ),
]


@pytest.mark.parametrize(("override", "part"), MISTAKES, ids=[key for key, _ in MISTAKES])
def test_mistakes_are_one_line(told, store, many_adata, monkeypatch, override: str, part: str) -> None:
    monkeypatch.setattr("scforge.estimators.training.fit", lambda *_, **__: pytest.fail("training began"))
    Path(".s.zarr.0123abcd.saving").mkdir()
    many_adata[:50].write_h5ad("a.h5ad")
    Path("config.yaml").write_text(TEXT.format(path=store))
    assert part in told("train", "--config", "config.yaml", "--quiet", "output.checkpoint_dir=ck", override)
