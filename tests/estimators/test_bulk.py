"""Embedding into a file: the same numbers as in memory, whatever is killed and however many take part."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pytest

from scforge import _io
from scforge.cli import main
from scforge.data import open_cells
from scforge.errors import DataError, GeneMismatchError, MissingFileError, NotTrainedWarning, OptionError
from scforge.estimators import EmbeddingInfo, Encoder, bulk, embed_to
from scforge.estimators.bulk_files import EmbeddingFiles

BLOCK, N_BLOCKS = 100, 7  # of the 700 cells of `store`


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
    """Return a function that embeds the cells of `store` into ``out.zarr``."""

    def run(source=store, output=tmp_path / "out.zarr", *, model=model, **options) -> EmbeddingInfo:
        return embed_to(model, source, output, **({"block_size": BLOCK, "progress_bar": False} | options))

    return run


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that has the next embedding stopped when it has done so many blocks."""

    def stop(after: int) -> None:
        write = EmbeddingFiles.write

        def stopping(self, block, embedding):
            if len(self.done()) == after:
                monkeypatch.setattr(EmbeddingFiles, "write", write)
                raise KeyboardInterrupt
            write(self, block, embedding)

        monkeypatch.setattr(EmbeddingFiles, "write", stopping)

    return stop


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".*"))


def same_cells(found: ad.AnnData, store: Path, expected: np.ndarray) -> None:
    cells = open_cells(store)
    assert found.obs_names.tolist() == cells.names().tolist()
    assert found.obs.reset_index(drop=True).astype(str).equals(cells.obs.astype(str))
    assert found.obsm["X_scforge"].dtype == np.float32
    np.testing.assert_allclose(found.obsm["X_scforge"], expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["out.zarr", "out.h5ad"])
def test_the_output_is_the_embedding_with_what_is_known_of_the_cells(run, output, model, store, expected, tmp_path):
    info = run(output=tmp_path / output)
    read = ad.read_zarr if output.endswith("zarr") else ad.read_h5ad
    found = read(tmp_path / output)
    same_cells(found, store, expected)
    assert (info.n_cells, info.n_embedded, info.n_latent, info.complete) == (700, 700, 4, True)
    assert "is complete: 700 cells x 4 dimensions" in str(info)
    assert found.uns["scforge"]["X_scforge"] == model._provenance(model.cells(store), 4)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("kind", ["h5ad", "zarr", "adata", "cells", "list"])
def test_other_sources(run, kind, many_adata, tmp_path, model):
    adata = many_adata[:150].copy()
    source = {"adata": adata, "cells": open_cells(adata), "list": [tmp_path / "in.h5ad"]}.get(
        kind, tmp_path / f"in.{kind}"
    )
    if kind in ("h5ad", "list"):
        adata.write_h5ad(tmp_path / "in.h5ad")
    elif kind == "zarr":
        adata.write_zarr(source)
    assert run(source, key="X_new").n_embedded == 150
    found = ad.read_zarr(tmp_path / "out.zarr")
    np.testing.assert_allclose(found.obsm["X_new"], model.get_latent_representation(adata), atol=1e-6)
    assert found.obs_names.equals(adata.obs_names)
    assert found.obs.columns.equals(many_adata.obs.columns)
    assert run(source, key="X_new").n_embedded == 0


def test_memory_holds_one_block(run, monkeypatch):
    sizes = []
    embed = bulk.embed
    monkeypatch.setattr(
        bulk, "embed", lambda *args, rows, **options: sizes.append(len(rows)) or embed(*args, rows=rows, **options)
    )
    run(block_size=300)
    assert sizes == [1, 300, 300, 100]


def test_several_processes_take_turns(run, store, expected, tmp_path):
    second = run(rank=1, world_size=2)
    assert (second.n_embedded, second.complete) == (300, False)
    assert "appears when the other processes are done" in str(second)
    assert not (tmp_path / "out.zarr").exists()
    first = run(rank=0, world_size=2)
    assert (first.n_embedded, first.complete) == (400, True)
    same_cells(ad.read_zarr(tmp_path / "out.zarr"), store, expected)
    for overwrite in (False, True):
        late = run(rank=2, world_size=3, overwrite=overwrite)
        assert (late.n_embedded, late.complete) == (0, True)
    assert left_over(tmp_path) == []


def test_goes_on_where_it_was(run, stop, store, expected, tmp_path):
    stop(3)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not (tmp_path / "out.zarr").exists()
    assert run(rank=1, world_size=3).n_embedded == 100, "of its blocks 1 and 4 the first was done"
    assert run(device="cpu", batch_size=50).n_embedded == 300
    same_cells(ad.read_zarr(tmp_path / "out.zarr"), store, expected)


@pytest.mark.parametrize("part", ["chunk", "note"])
def test_a_damaged_block_is_made_again(run, stop, part, store, expected, tmp_path):
    stop(3)
    with pytest.raises(KeyboardInterrupt):
        run()
    staging = tmp_path / ".out.zarr.embedding"
    if part == "chunk":
        shutil.rmtree(staging / "result" / "obsm" / "X_scforge" / "c" / "1")
    else:
        (staging / "blocks" / "1").write_text("")
    assert run().n_embedded == 500
    same_cells(ad.read_zarr(tmp_path / "out.zarr"), store, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key": "X_other"}, r"has another key: it was begun with key='X_scforge', not 'X_other'; give the same"),
        ({"block_size": 50}, "was begun with block_size=100, not 50"),
        ({"source": "other"}, "has another source: it was begun of other cells, or they have changed since"),
        ({"model": "other"}, "has another model: it was begun with other weights, options or genes"),
    ],
)
def test_does_not_go_on_with_something_else(run, stop, options, said, model, many_adata, store, tmp_path):
    stop(2)
    with pytest.raises(KeyboardInterrupt):
        run()
    if "source" in options:
        options = {"source": many_adata[::-1].copy()}
    if "model" in options:
        model.save(tmp_path / "other")
        options = {"model": Encoder.load(tmp_path / "other")}
        next(iter(options["model"].module.parameters())).data[0] += 1e-3
    with pytest.raises(OptionError, match=said + r".*pass overwrite=True .--overwrite. to start again"):
        run(**options)
    assert run(**options, overwrite=True).n_embedded == 700
    with pytest.raises(OptionError, match="exists and was made of other cells or by another model"):
        run()
    assert run(overwrite=True).n_embedded == 700
    assert run(overwrite=True).n_embedded == 700, "one process makes it again if it is told to"
    assert left_over(tmp_path) == []


def test_the_same_model_from_its_folder_goes_on(run, stop, model, tmp_path):
    model.save(tmp_path / "model")
    stop(2)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert run(model=tmp_path / "model").n_embedded == 500


def test_killed_after_its_last_step(run, tmp_path, monkeypatch):
    remove = shutil.rmtree

    def stay(path, **options):
        if not (tmp_path / "out.zarr").exists():
            remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stay)
        run()
    assert left_over(tmp_path) != []
    assert run().complete
    assert left_over(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("name", ["out.zarr", "out.h5ad"])
def test_a_link_stays_a_link(run, name, many_adata, tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(_io, "_exchange", lambda one, other: False)
    (tmp_path / "disk").mkdir()
    # Stores of data versions name files by their checksum.
    link, place = tmp_path / f"link-{name}", tmp_path / "disk" / "ab12cd"
    link.symlink_to(place)
    run(output=link)
    assert run(many_adata[:50].copy(), link, overwrite=True).complete
    assert link.is_symlink()
    read = ad.read_zarr if name == "out.zarr" else ad.read_h5ad
    assert read(place).n_obs == 50
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["ab12cd"]
    assert left_over(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
@pytest.mark.parametrize("name", ["out.zarr", "out.h5ad"])
def test_an_embedding_into_a_pipe(run, name, tmp_path):
    """A pipe would be waited for."""
    output = tmp_path / name
    os.mkfifo(output)
    with pytest.raises(OptionError, match=r"^output='.*/out\..*' is a pipe or a device, not a file; give another"):
        run(output=output)
    assert output.is_fifo()


def test_a_disk_that_is_full(run, tmp_path, monkeypatch):
    run()
    before = ad.read_zarr(tmp_path / "out.zarr").obsm["X_scforge"]

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingFiles, "write", full)
        with pytest.raises(OSError, match="No space"):
            run(overwrite=True)
    assert (ad.read_zarr(tmp_path / "out.zarr").obsm["X_scforge"] == before).all()


MISTAKES = [
    ({"output": "out.csv"}, "ends with neither .zarr nor .h5ad"),
    ({"output": "file.zarr"}, "'[^']*file.zarr' is a file, but zarr makes a folder"),
    ({"output": "folder.h5ad"}, "'[^']*folder.h5ad' is a folder, but h5ad is a file"),
    ({"output": "adata.zarr", "overwrite": True}, "exists and is not an embedding that scforge wrote"),
    ({"output": "text.h5ad", "overwrite": True}, "exists and is not an embedding that scforge wrote"),
    ({"output": "file.zarr/out.zarr"}, "'[^']*file.zarr' is a file; give the name of a folder"),
    ({"key": "a/b"}, "key='a/b' is not a name in obsm"),
    ({"batch_size": 0}, "batch_size=0 is not a positive number of cells"),
    ({"block_size": 1.5}, "block_size=1.5 is not a whole number of cells"),
    ({"rank": 1}, "rank=1 and world_size=None belong together"),
    ({"rank": 2, "world_size": 2}, "rank=2 is not below world_size=2"),
    ({"rank": -1, "world_size": 2}, "rank=-1 is not at least 0"),
    ({"device": "gpu"}, "device='gpu' is not the name of a device"),
    ({"device": "cuda:77"}, "device='cuda:77' cannot be used"),
    ({"overwrite": "yes"}, "overwrite='yes' is neither True nor False"),
]


@pytest.mark.parametrize(("options", "said"), MISTAKES, ids=[str(list(case[0].items())[0]) for case in MISTAKES])
def test_mistakes(run, options, said, many_adata, tmp_path):
    (tmp_path / "file.zarr").write_text("x")
    (tmp_path / "text.h5ad").write_text("x")
    (tmp_path / "folder.h5ad").mkdir()
    many_adata[:3].copy().write_zarr(tmp_path / "adata.zarr")
    before = sorted(tmp_path.rglob("*"))
    if "output" in options:
        options = options | {"output": tmp_path / options["output"]}
    with pytest.raises(OptionError, match=said):
        run(**options)
    assert sorted(tmp_path.rglob("*")) == before


def test_urls_and_what_is_not_there(run, tmp_path, many_adata):
    with pytest.raises(OptionError, match="is a URL; give a path"):
        run(output="s3://bucket/out.zarr")
    with pytest.raises(MissingFileError, match="does not exist; give the folder of a model"):
        run(model=tmp_path / "none")
    with pytest.raises(MissingFileError, match="none.h5ad' does not exist"):
        run(tmp_path / "none.h5ad")
    with pytest.raises(DataError, match="empty"):
        run(many_adata[:0].copy())
    other = many_adata.copy()
    other.var_names = [f"other{i}" for i in range(other.n_vars)]
    with pytest.raises(GeneMismatchError, match="only 0 of the"):
        run(other)
    assert left_over(tmp_path) == []


def test_an_untrained_model_is_told(run, tiny_adata, tmp_path):
    Encoder.setup_anndata(tiny_adata)
    with pytest.warns(NotTrainedWarning):
        run(tiny_adata, model=Encoder(tiny_adata, n_top_genes=20, hidden_dim=8, ffn_dim=8, latent_dim=4))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),
        # The script of a job is one process, however many tasks srun may start in it.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (3, 4)),
    ],
)
def test_which_process_this_is(monkeypatch, environment, expected):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert bulk._which_process(None, None) == expected
    assert bulk._which_process(5, 6) == (5, 6)


PROCESS = """
import sys, time
import torch
from scforge.estimators import bulk_files, embed_to
torch.set_num_threads(1)
model, store, output, hang = sys.argv[1:]
write, calls = bulk_files.atomic_write_text, []

def hanging(path, text):
    if path.parent.name == "blocks":
        calls.append(path)
        if len(calls) > 2:
            print("hangs", flush=True)
            time.sleep(600)
    write(path, text)

if hang == "True":
    bulk_files.atomic_write_text = hanging
print(embed_to(model, store, output, block_size=100, progress_bar=False, device="cpu"))
"""


@pytest.mark.slow
def test_processes_that_are_killed_go_on(run, model, store, expected, tmp_path):
    model.save(tmp_path / "model")
    output = tmp_path / "out.zarr"

    def start(rank: int, *, hang: bool) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-W",
            "error::UserWarning",
            "-c",
            PROCESS,
            tmp_path / "model",
            store,
            output,
            str(hang),
        ]
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)

    first, second = start(0, hang=True), start(1, hang=False)
    try:
        # At the worst moment: its third block is written but not yet noted.
        assert first.stdout.readline() == "hangs\n"
        with pytest.raises(OptionError, match="process 0 of 2 is at work on .* and this is process 0 of 2"):
            run(rank=0, world_size=2)
        with pytest.raises(OptionError, match="process [01] of 2 is at work on .* and this is process 0 of 1"):
            run()
        with pytest.raises(OptionError, match="process [01] of 2 is at work on .*; wait until it is done, or stop it"):
            run(key="X_other", overwrite=True)
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
def test_command(model, store, expected, tmp_path, monkeypatch, capsys):
    model.save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    command = ["embed", str(store), "-m", "model", "-o", "out.h5ad", "--key", "X_new", "--batch-size", "64"]
    assert main([*command, "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert "700 of 700 cells embedded in this run" in shown.out
    assert (
        "obsm['X_new'] of out.h5ad is complete: 700 cells x 4 dimensions, with obs and without the genes" in shown.out
    )
    with h5py.File("out.h5ad") as file:
        np.testing.assert_allclose(file["obsm/X_new"][:], expected, atol=1e-6)
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["none.zarr", "-m", "model", "-o", "out.zarr"], "'none.zarr' does not exist"),
        (["cells.h5ad", "-m", "none", "-o", "out.zarr"], "model='none' (--model) does not exist"),
        (["cells.h5ad", "-m", "model", "-o", "cells.h5ad"], "is not an embedding that scforge wrote"),
        (["cells.h5ad", "-m", "model", "-o", "out.zarr", "--rank", "1"], "belong together"),
        (["cells.h5ad", "-m", "model"], "--output"),
    ],
)
def test_a_mistake_of_the_command_is_one_line(argv, said, model, many_adata, tmp_path, monkeypatch, capsys):
    model.save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    many_adata[:20].copy().write_h5ad("cells.h5ad")
    try:
        code = main(["embed", *argv])
    except SystemExit as stop:  # argparse leaves this way
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1
    assert said in error
    assert left_over(tmp_path) == []
