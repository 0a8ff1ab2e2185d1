"""The section ``data`` of a configuration: cells from everywhere, and each key changes what is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from scforge.cli import main
from scforge.config import load_config
from scforge.data import StoreCells
from scforge.estimators import Encoder, train_from_config
from scforge.training import CellDataModule

TEXT = """
data:
  paths: ["{path}"]
  preprocessing: {{hvg_selection: 40}}
model: {{hidden_dim: 8, ffn_dim: 8, latent_dim: 4}}
training: {{max_epochs: 1, accelerator: cpu, batch_size: 64}}
"""
MASKED = "objective.name=masked_gene_prediction"


@pytest.fixture
def run(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Encoder, CellDataModule]]:
    """Return a function that trains from a configuration, and returns the model and its data module."""
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
    """Two h5ad files."""
    many_adata[:400].write_h5ad(tmp_path / "a.h5ad")
    many_adata[400:].write_h5ad(tmp_path / "b.h5ad")
    return [str(tmp_path / "a.h5ad"), str(tmp_path / "b.h5ad")]


def test_a_store(run, store) -> None:
    model, data = run("output.embedding=out/cells.h5ad", "output.checkpoint_dir=ck")
    assert isinstance(data.cells, StoreCells)
    assert (model.adata, model.vocab.n_genes) == (None, 40)
    written = ad.read_h5ad("out/cells.h5ad")
    cells = StoreCells.open(store)
    assert written.obs_names.tolist() == cells.names().tolist()
    assert written.obs.columns.tolist() == cells.obs.columns.tolist()
    for key in cells.obs:
        assert written.obs[key].tolist() == cells.column(key).tolist()
    np.testing.assert_array_equal(written.obsm["X_scforge"], model.get_latent_representation())
    loaded = Encoder.load("ck/final")
    np.testing.assert_allclose(loaded.get_latent_representation(store), written.obsm["X_scforge"], atol=1e-6)


def test_a_pattern_and_a_cache(run, files, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "scforge")
    model, data = run("data.cache=cache.zarr", path=tmp_path / "*.h5ad")
    assert isinstance(data.cells, StoreCells)
    assert len(data.cells) == 700
    assert Path("cache.zarr").is_dir()
    assert "Converted" in caplog.text
    caplog.clear()
    run("data.cache=cache.zarr", path=tmp_path / "*.h5ad")
    assert "Converted" not in caplog.text
    memory, in_memory = run("output.embedding=out/out.h5ad", path=tmp_path / "*.h5ad")
    assert in_memory.cells.chunk_size == 1
    assert len(in_memory.cells) == 700
    written = ad.read_h5ad("out/out.h5ad")
    assert written.shape == (700, 0)
    np.testing.assert_array_equal(written.obsm["X_scforge"], memory.get_latent_representation())
    assert set(memory.vocab.genes) <= {f"gene{i}" for i in range(80)}


def test_an_h5ad_that_does_not_fit(run, files, monkeypatch, caplog) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setattr("scforge.estimators.config_data._LARGE", 0)
    monkeypatch.setattr("scforge.data.stream_memory.available_memory", lambda: 3000)
    text = "data: {paths: [a.h5ad], preprocessing: {hvg_selection: 40}}\ntraining: {max_epochs: 1, accelerator: cpu}\n"
    Path("large.yaml").write_text(text)
    told = []
    for _ in range(2):
        assert main(["train", "--config", "large.yaml", "--overwrite", "output.embedding=out.h5ad"]) == 0
        told.append(caplog.text.count("so they are converted once into cache/scforge/stores/"))
        caplog.clear()
    assert told == [1, 0]
    assert ad.read_h5ad("out.h5ad").n_obs == 400


def test_h5ad_as_before(run, files, many_adata) -> None:
    model, data = run("output.embedding=out.h5ad", "data.labels_key=group", path=files[0])
    assert model.adata.n_obs == 400
    written = ad.read_h5ad("out.h5ad")
    assert written.shape == (400, 80)
    np.testing.assert_array_equal(written.obsm["X_scforge"], model.get_latent_representation(key_added=None))
    assert (written.X != many_adata[:400].X).nnz == 0
    assert data.cells.chunk_size == 1


def test_keys_of_sampling_and_split(run, store) -> None:
    keys = ("balance_key=kind", "warmup_epochs=3", "start=0.25", "end=0.75")
    _, data = run(*(f"data.sampling.{key}" for key in keys), "data.split.by=donor", "training.validation_size=0.3")
    balance = data._balance
    assert (balance.warmup_epochs, balance.start, balance.end) == (3, 0.25, 0.75)
    donors = data.cells.column("donor").to_numpy(dtype=str)
    assert not set(donors[data.train_rows]) & set(donors[data.validation_rows])
    assert len(data.validation_rows) == pytest.approx(210, rel=0.2)
    assert sorted(np.unique(balance._codes)) == [0, 1]


KEYS = [
    ("data.num_threads=0", "num_threads", 0),
    ("data.num_workers=3", "num_threads", 3),
    ("data.pin_memory=false", "pin_memory", False),
    ("data.batch_key=donor", "batch_key", "donor"),
    ("data.labels_key=group", "labels_key", "group"),
    ("training.batch_size=20", "batch_size", 20),
    ("seed=4", "seed", 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("override", "name", "value"), KEYS, ids=[key for key, *_ in KEYS])
def test_keys_arrive(run, override: str, name: str, value) -> None:
    assert getattr(run(override)[1], name) == value


def test_tokens_of_a_batch(run) -> None:
    few = [MASKED, "tokenizer.strategy=rank_value", "training.batch_size=null"]
    _, data = run("data.max_tokens_per_batch=900", *few)
    assert data.max_tokens_per_batch == 900
    assert max(batch["input_ids"].numel() for batch in data.train_dataloader()) <= 900
    assert run("training.max_tokens_per_batch=800", *few)[1].max_tokens_per_batch == 800


def test_columns(run) -> None:
    _, data = run("data.obs_columns=[depth]", "data.split.by=donor", "output.embedding=out.h5ad")
    assert data.cells.obs.columns.tolist() == ["depth", "donor"]
    assert ad.read_h5ad("out.h5ad").obs.columns.tolist() == ["depth", "donor"]
    assert run()[1].cells.obs.columns.tolist() == ["group", "donor", "kind", "depth"]
    assert run("data.obs_columns=[]")[1].cells.obs.columns.tolist() == []


def test_keys_of_genes(run, files, tmp_path, many_adata) -> None:
    vocab = run("data.preprocessing.hvg_selection=30")[0].vocab
    assert vocab.n_genes == 30
    vocab.save("genes.json")
    few = ["data.gene_vocab=genes.json", "data.preprocessing.hvg_selection=0"]
    assert run(*few)[0].vocab.genes == vocab.genes
    assert run(*few, path=tmp_path / "*.h5ad")[0].vocab.genes == vocab.genes
    assert run("data.max_genes=12")[0].tokenizer.max_len == 12


# Each of these changes the weights that come out, so it is read to the very end.
WEIGHTS = [
    "data.max_genes=10",
    "data.preprocessing.hvg_selection=50",
    "data.batch_key=donor",
    "data.sampling.balance_key=kind",
    "data.split.by=donor",
]


@pytest.mark.slow
def test_keys_change_the_weights(run) -> None:
    before = run()[0].module.state_dict()
    again = run()[0].module.state_dict()
    assert all(value.equal(again[name]) for name, value in before.items())
    for override in WEIGHTS:
        after = run(override)[0].module.state_dict()
        assert any(
            value.shape != after[name].shape or not value.equal(after[name]) for name, value in before.items()
        ), override


def test_sources_with_keys_of_their_own(run, files, tmp_path, many_adata) -> None:
    adata = many_adata[:100].copy()
    adata.layers["counts"] = adata.X.copy()
    adata.X = adata.X * 0.5
    adata.var["other"] = [f"name{i}" for i in range(80)]
    adata.write_h5ad(tmp_path / "layer.h5ad")
    keys = ["data.layer=counts", "data.gene_key=other", "data.memory=4GB"]
    model, data = run(*keys, path=tmp_path / "layer.h5ad")
    assert data.cells.totals.sum() == adata.layers["counts"].sum()
    assert all(gene.startswith("name") for gene in model.vocab.genes)
    assert model.adata is None


@pytest.fixture
def told(store: Path, tmp_path: Path, monkeypatch, capsys) -> Callable[..., str]:
    """Return a function that trains with a mistake, and returns the one line that it tells."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scforge.estimators.training_run.fit", lambda *_, **__: pytest.fail("training began"))

    def told(*overrides: str, path: str | Path = store) -> str:
        Path("config.yaml").write_text(TEXT.format(path=path))
        code = main(["train", "--config", "config.yaml", "--quiet", "output.checkpoint_dir=ck", *overrides])
        error = capsys.readouterr().err
        assert code == 2
        assert error.count("\n") == 1
        return error

    return told


MISTAKES = [
    ("data.split.by=donr", "did you mean 'donor'?"),
    ("data.sampling.balance_key=knd", "did you mean 'kind'?"),
    ("data.sampling.start=0.5", "balance_key"),
    ("data.obs_columns=[depht]", "did you mean 'depth'?"),
    ("data.batch_key=doner", "did you mean 'donor'?"),
    ("data.layer=counts", "layer='counts' was chosen when the store"),
    ("data.modality=rna", "modality='rna' was chosen when the store"),
    ("data.max_tokens_per_batch=100", "NeighborDenoising needs random ones"),
    ("data.max_tokens_per_batch=0", "max_tokens_per_batch"),
    ("data.num_threads=-1", "num_threads"),
    ("data.pin_memory=perhaps", "pin_memory"),
    ("data.filters={tissue: lung}", "filters"),
    ("data.gene_vocab=human_protein_coding", "20120 genes"),
    ("data.storage_options=secret", "storage_options"),
]


@pytest.mark.parametrize(("override", "part"), MISTAKES, ids=[key for key, _ in MISTAKES])
def test_mistakes_are_one_line(told, override: str, part: str) -> None:
    assert part in told(override)


def test_places_that_are_none(told, tmp_path, many_adata) -> None:
    assert "no.zarr" in told(path="no.zarr")
    assert "*.nothing" in told(path="*.nothing")
    (tmp_path / ".s.zarr.partial").mkdir()
    assert "s.zarr' is incomplete" in told(path="s.zarr")
    many_adata[:50].write_h5ad("a.h5ad")
    assert "cache='config.yaml' is no store" in told("data.cache=config.yaml", path="a.h5ad")
