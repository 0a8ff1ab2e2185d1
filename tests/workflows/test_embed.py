import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import anndata as ad
import h5py
import numpy as np
import pytest

from scforge import _io
from scforge.cli import main
from scforge.data import open_cells
from scforge.errors import DataError, GeneMismatchError, MissingFileError, NotTrainedWarning, OptionError
from scforge.estimators import Encoder
from scforge.testing import raises
from scforge.workflows import embed as bulk
from scforge.workflows import embed_to
from scforge.workflows.embed import EmbeddingFiles, EmbeddingInfo

BLOCK = 100  # of the 700 cells of `store`


@pytest.fixture(scope="module")
def model(many_adata: ad.AnnData) -> Encoder:
    adata = many_adata.copy()
    Encoder.setup_anndata(adata)
    model = Encoder(adata, n_top_genes=40, hidden_dim=8, ffn_dim=8, latent_dim=4)
    model.train(1, batch_size=64, progress_bar=False, accelerator="cpu", early_stopping=False)
    return model


@pytest.fixture(scope="module")
def expected(model: Encoder, store: Path) -> np.ndarray:
    return model.get_latent_representation(store)


@pytest.fixture
def run(model: Encoder, store: Path, tmp_path: Path) -> Callable[..., EmbeddingInfo]:
    def run(source=store, output=tmp_path / "out.zarr", *, model=model, **options) -> EmbeddingInfo:
        return embed_to(model, source, output, **({"block_size": BLOCK, "progress_bar": False} | options))

    return run


@pytest.fixture
def begin(run, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def begin(blocks: int) -> None:
        write = EmbeddingFiles.write

        def stopping(self, block, embedding):
            if block == blocks:
                raise KeyboardInterrupt
            write(self, block, embedding)

        with monkeypatch.context() as patch:
            patch.setattr(EmbeddingFiles, "write", stopping)
            with pytest.raises(KeyboardInterrupt):
                run()

    return begin


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".*"))


def same_cells(found: ad.AnnData, store: Path, expected: np.ndarray) -> None:
    cells = open_cells(store)
    assert found.obs_names.tolist() == cells.names().tolist()
    assert found.obs.reset_index(drop=True).astype(str).equals(cells.obs.astype(str))
    assert found.obsm["X_scforge"].dtype == np.float32
    np.testing.assert_allclose(found.obsm["X_scforge"], expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("output", "read"), [("out.zarr", ad.read_zarr), ("out.h5ad", ad.read_h5ad)])
def test_the_output_holds_the_embedding_and_the_cells(run, output, read, model, store, expected, tmp_path):
    info = run(output=tmp_path / output)
    found = read(tmp_path / output)
    same_cells(found, store, expected)
    assert (info.n_cells, info.n_embedded, info.n_latent, info.complete) == (700, 700, 4, True)
    assert found.uns["scforge"]["X_scforge"] == model.fitted.provenance_of(model.open_cells(store), 4)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("kind", ["h5ad", "zarr", "adata", "cells", "list"])
def test_other_sources(run, kind, many_adata, tmp_path, model):
    adata = many_adata[:150].copy()
    adata.write_h5ad(tmp_path / "in.h5ad")
    adata.write_zarr(tmp_path / "in.zarr")
    sources = {"adata": adata, "cells": open_cells(adata), "list": [tmp_path / "in.h5ad"]}
    source = sources.get(kind, tmp_path / f"in.{kind}")
    assert run(source, key="X_new").n_embedded == 150
    found = ad.read_zarr(tmp_path / "out.zarr")
    np.testing.assert_allclose(found.obsm["X_new"], model.get_latent_representation(adata), atol=1e-6)
    assert found.obs_names.equals(adata.obs_names)
    assert found.obs.columns.equals(many_adata.obs.columns)
    assert run(source, key="X_new").n_embedded == 0


@pytest.fixture
def cells(many_adata: ad.AnnData) -> ad.AnnData:
    """Cells with more than the output takes along, and an older embedding."""
    adata = many_adata[:150].copy()
    adata.layers["counts"], adata.layers["other"] = adata.X.copy(), adata.X * 2
    adata.X = adata.X.astype(np.float32) * 0.5
    adata.obsm["X_pca"], adata.obsm["X_scforge"] = np.ones((150, 3)), np.ones((150, 7))
    return adata


@pytest.fixture(scope="module")
def layered(model: Encoder, many_adata: ad.AnnData) -> Encoder:
    """The model, set up with a layer."""
    adata = many_adata.copy()
    adata.layers["counts"] = adata.X.copy()
    Encoder.setup_anndata(adata, layer="counts")
    other = Encoder(adata, n_top_genes=40, hidden_dim=8, ffn_dim=8, latent_dim=4)
    other.module.load_state_dict(model.module.state_dict())
    other.is_trained_ = True
    return other


@pytest.mark.parametrize("kind", ["h5ad", "adata", "backed", "old"])
@pytest.mark.parametrize("output", ["out.zarr", "out.h5ad"])
def test_genes_and_counts_of_one_file(run, layered, cells, kind, output, tmp_path, monkeypatch):
    """A gene can color a UMAP of the output; parts of an h5ad file are copied within HDF5, not through memory."""
    path, output = tmp_path / "in.h5ad", tmp_path / output
    cells.write_h5ad(path)
    if kind == "old":
        with h5py.File(path, "r+") as file:
            file.attrs.clear()
    source = {"adata": cells, "backed": ad.read_h5ad(path, backed="r") if kind == "backed" else None}.get(kind, path)
    if kind == "h5ad" and output.suffix == ".h5ad":
        monkeypatch.setattr(bulk, "read_h5ad", mock.Mock(side_effect=MemoryError))
    info = run(source, output, model=layered)
    found = (ad.read_zarr if output.suffix == ".zarr" else ad.read_h5ad)(output)
    assert info.counts
    assert "with obs, genes and counts" in str(info)
    assert found.var.equals(cells.var)
    assert found.obs_names.equals(cells.obs_names)
    assert ({*found.layers} - {None}, {*found.obsm}) == ({"counts"}, {"X_pca", "X_scforge"})
    assert (abs(found.X - cells.X).sum(), abs(found.layers["counts"] - cells.layers["counts"]).sum()) == (0, 0)
    assert found.X.dtype == cells.X.dtype
    expected = layered.get_latent_representation(cells, key_added=None)
    np.testing.assert_allclose(found.obsm["X_scforge"], expected, atol=1e-6)
    assert found.uns["scforge"]["X_scforge"]["n_latent"] == 4
    assert run(source, output, model=layered).n_embedded == 0
    with pytest.raises(OptionError, match="or with other options; choose another name, or pass overwrite=True"):
        run(source, output, model=layered, counts=False)
    assert not run(source, output, model=layered, counts=False, overwrite=True).counts
    small = (ad.read_zarr if output.suffix == ".zarr" else ad.read_h5ad)(output)
    assert (small.shape, list(small.obsm)) == ((150, 0), ["X_scforge"])
    assert left_over(tmp_path) == []


def test_a_file_that_changes_while_it_is_embedded(run, model, many_adata, tmp_path, monkeypatch):
    many_adata[:150].copy().write_h5ad(tmp_path / "in.h5ad")
    write = EmbeddingFiles.write

    def changing(self, block, embedding):
        write(self, block, embedding)
        many_adata[150:300].copy().write_h5ad(tmp_path / "in.h5ad")

    monkeypatch.setattr(EmbeddingFiles, "write", changing)
    with raises(DataError, "source"):
        run(tmp_path / "in.h5ad")
    assert not (tmp_path / "out.zarr").exists()


def test_memory_holds_one_block(run, monkeypatch):
    sizes, embed = [], bulk.embed

    def spy(*args, rows, **options):
        sizes.append(len(rows))
        return embed(*args, rows=rows, **options)

    monkeypatch.setattr(bulk, "embed", spy)
    run(block_size=300)
    assert sizes == [1, 300, 300, 100]


def test_several_processes_take_turns(run, store, expected, tmp_path):
    second = run(rank=1, world_size=2)
    assert (second.n_embedded, second.complete) == (300, False)
    assert not (tmp_path / "out.zarr").exists()
    first = run(rank=0, world_size=2)
    assert (first.n_embedded, first.complete) == (400, True)
    same_cells(ad.read_zarr(tmp_path / "out.zarr"), store, expected)
    for overwrite in (False, True):
        late = run(rank=2, world_size=3, overwrite=overwrite)
        assert (late.n_embedded, late.complete) == (0, True)
    assert left_over(tmp_path) == []


def test_resumes_where_it_was(run, begin, model, store, expected, tmp_path):
    begin(3)
    assert not (tmp_path / "out.zarr").exists()
    model.save(tmp_path / "model")
    assert run(rank=1, world_size=3).n_embedded == 100, "of its blocks 1 and 4 the first was done"
    assert run(model=tmp_path / "model", device="cpu", batch_size=50).n_embedded == 300
    same_cells(ad.read_zarr(tmp_path / "out.zarr"), store, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key": "X_other"}, r"was started with key='X_scforge', not key='X_other'; use the same settings"),
        ({"block_size": 50}, "was started with block_size=100, not block_size=50"),
        ({"source": "other"}, "was started with another source .other cells, or cells that have changed since."),
        ({"model": "other"}, "was started with another model .other weights, options or genes."),
    ],
)
def test_does_not_go_on_with_something_else(run, begin, options, said, model, many_adata, tmp_path):
    begin(2)
    if "source" in options:
        options = {"source": many_adata[::-1].copy()}
    if "model" in options:
        options = {"model": copy.deepcopy(model)}
        next(iter(options["model"].module.parameters())).data[0] += 1e-3
    with pytest.raises(OptionError, match=said + r".*pass overwrite=True .--overwrite. to start again"):
        run(**options)
    assert run(**options, overwrite=True).n_embedded == 700
    with pytest.raises(OptionError, match="exists and contains an embedding of other cells or from another model"):
        run()
    for _ in range(2):
        assert run(overwrite=True).n_embedded == 700, "one process makes it again if it is told to"
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_a_link_to_a_folder_stays_a_link(run, many_adata, tmp_path, monkeypatch):
    monkeypatch.setattr(_io, "_exchange", lambda one, other: False)  # as on file systems that know no exchange
    (tmp_path / "disk").mkdir()
    # Stores of data versions name files by their checksum.
    link, place = tmp_path / "link.zarr", tmp_path / "disk" / "ab12cd"
    link.symlink_to(place)
    run(output=link)
    assert run(many_adata[:50].copy(), link, overwrite=True).complete
    assert link.is_symlink()
    assert ad.read_zarr(place).n_obs == 50
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["ab12cd"]
    assert left_over(tmp_path) == []


def test_killed_after_its_last_step(run, tmp_path, monkeypatch):
    remove, output = shutil.rmtree, tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **options: output.exists() or remove(path, **options))
        run()
    assert left_over(tmp_path) != []
    assert run().complete
    assert left_over(tmp_path) == []


def test_a_disk_that_is_full(run, tmp_path, monkeypatch):
    run()
    before = ad.read_zarr(tmp_path / "out.zarr").obsm["X_scforge"]
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingFiles, "write", mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            run(overwrite=True)
    assert (ad.read_zarr(tmp_path / "out.zarr").obsm["X_scforge"] == before).all()


MISTAKES = [
    ({"output": "out.csv"}, "must end with .zarr or .h5ad"),
    ({"output": "file.zarr"}, "'[^']*file.zarr' is a file, but .zarr output is a folder"),
    ({"output": "adata.zarr", "overwrite": True}, "exists and is not an embedding written by scforge"),
    ({"output": "text.h5ad", "overwrite": True}, "exists and is not an embedding written by scforge"),
    ({"output": "file.zarr/out.zarr"}, "'[^']*file.zarr' is a file; choose another path"),
    ({"output": "s3://bucket/out.zarr"}, "is a URL; pass a local path"),
    ({"key": "a/b"}, "key='a/b' is not a valid obsm key"),
    ({"rank": 1}, "rank=1 and world_size=None must be given together"),
    ({"rank": 2, "world_size": 2}, "rank=2 must be less than world_size=2"),
    ({"device": "cuda:77"}, "device='cuda:77' cannot be used"),
    ({"device": 3.5}, "device='3.5' cannot be used"),
    ({"model": "ck"}, r"model='ck' \(--model\) is the folder of a training run; did you mean 'ck/epoch=01'\?"),
]


@pytest.mark.parametrize(("options", "said"), MISTAKES, ids=[str(list(case[0].items())[0]) for case in MISTAKES])
def test_mistakes(run, options, said, many_adata, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("ck/step=00000009", "ck/epoch=01"):
        Path(name).mkdir(parents=True)
    for name in ("file.zarr", "text.h5ad", "ck/step=00000009/config.json", "ck/epoch=01/config.json"):
        Path(name).write_text("x")
    many_adata[:3].copy().write_zarr("adata.zarr")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((OptionError, MissingFileError), match=said):
        run(**options)
    assert sorted(tmp_path.rglob("*")) == before


def test_cells_that_do_not_fit(run, many_adata, tmp_path):
    with raises(DataError, "adata"):
        run(many_adata[:0].copy())
    human, mouse = many_adata[:40].copy(), many_adata[:20].copy()
    human.var_names = [f"ENSG{number:011d}" for number in range(human.n_vars)]
    mouse.var_names = [f"ENSMUSG{number:011d}" for number in range(mouse.n_vars)]
    with pytest.raises(GeneMismatchError):
        run(human)
    Encoder.setup_anndata(human)
    other = Encoder(human, hidden_dim=4, ffn_dim=4)
    other.is_trained_ = True
    with pytest.raises(GeneMismatchError, match=r"use cells of that species, or a model that was") as caught:
        run(mouse, model=other)
    assert "gene_vocab=" not in str(caught.value), "a vocabulary would not help"
    assert left_over(tmp_path) == []
    other.is_trained_ = False
    with pytest.warns(NotTrainedWarning):
        run(human, model=other)


def test_which_process_this_is():
    for environment, expected in (
        ({}, (0, 1)),
        # The script of a job is one process, however many tasks srun may start in it.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (3, 4)),
    ):
        with mock.patch.dict(os.environ, environment, clear=True):
            assert bulk._which_process(None, None) == expected
            assert bulk._which_process(5, 6) == (5, 6)


PROCESS = """
import sys, time
import torch
from scforge.workflows import embed, embed_to
torch.set_num_threads(1)
model, store, output, hang = sys.argv[1:]
write, calls = embed.EmbeddingFiles.write, []

def hanging(self, block, embedding):
    calls.append(block)
    if len(calls) > 2 and hang == "True":
        print("hangs", flush=True)
        time.sleep(600)
    write(self, block, embedding)

embed.EmbeddingFiles.write = hanging
print(embed_to(model, store, output, block_size=100, progress_bar=False, device="cpu"))
"""


@pytest.mark.slow
def test_processes_that_are_killed_go_on(run, model, store, expected, tmp_path):
    model.save(tmp_path / "model")
    output = tmp_path / "out.zarr"

    def start(rank: int, *, hang: bool) -> subprocess.Popen[str]:
        script = [sys.executable, "-W", "error::UserWarning", "-c", PROCESS]
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        command = [*script, tmp_path / "model", store, output, str(hang)]
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)

    first, second = start(0, hang=True), start(1, hang=False)
    try:
        assert first.stdout.readline() == "hangs\n"
        said = second.communicate(timeout=120)[0]
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert second.returncode == 0
    assert said.startswith("300 of 700 cells embedded in this run")
    assert not output.exists()
    info = run(rank=0, world_size=2)
    assert (info.n_embedded, info.complete) == (200, True)
    same_cells(ad.read_zarr(output), store, expected)


@pytest.mark.slow
def test_command(model, store, expected, folder, told, capsys):
    model.save("model")
    command = ["embed", str(store), "-m", "model", "-o", "out.h5ad", "--key", "X_new", "--batch-size", "64"]
    assert main([*command, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "700 of 700 cells embedded in this run" in shown
    assert "obsm['X_new'] of out.h5ad is complete: 700 cells x 4 dimensions, with obs and without the genes" in shown
    with h5py.File("out.h5ad") as file:
        np.testing.assert_allclose(file["obsm/X_new"][:], expected, atol=1e-6)
    assert "is not an embedding written by scforge" in told("embed", "cells.h5ad", "-m", "model", "-o", "cells.h5ad")
    assert "--output" in told("embed", "cells.h5ad", "-m", "model")
    assert left_over(folder) == []
