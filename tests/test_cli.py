"""The command line: a mistake is one line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pytest

from scforge import __version__
from scforge.cli import main
from scforge.data import GeneVocab
from scforge.estimators import Encoder

CONFIG = """
data: {paths: [cells.h5ad], preprocessing: {hvg_selection: 40}}
model: {hidden_dim: 8, ffn_dim: 8}
training: {max_epochs: 2, batch_size: 16, accelerator: cpu}
output: {checkpoint_dir: ck}
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    """A working directory with cells and a configuration."""
    Path("config.yaml").write_text(CONFIG)
    return folder


def test_train(folder: Path, capsys) -> None:
    line = "train output.checkpoint_dir=ck --config config.yaml output.log_dir=logs --quiet output.embedding=out.h5ad"
    assert main(line.split()) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    assert lines[-8].startswith("Encoder(gene_pooling")
    assert lines[-7].startswith("Best epoch:  ")
    assert " of 2 (validation_loss " in lines[-7]
    assert [line.split(maxsplit=1) for line in lines[-6:]] == [
        ["Model:", str(Path("ck/final"))],
        ["State:", str(Path("ck/step=00000008"))],
        ["Settings:", str(Path("ck/config.yaml"))],
        ["Log:", "logs"],
        ["Embedding:", "out.h5ad"],
        ["Next:", "scforge embed cells.h5ad -m ck/final -o embedded.zarr"],
    ]
    model = Encoder.load("ck/final")
    cells = ad.read_h5ad("out.h5ad")
    np.testing.assert_allclose(
        model.get_latent_representation(cells, key_added=None), cells.obsm["X_scforge"], atol=1e-6
    )


@pytest.mark.parametrize("command", ["train --config", "config check"])
@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--training.lr=0.1"], "write training.lr=0.1 without the dashes (see scforge {} --help)"),
        (["--training.lr", "0.1"], "write training.lr=VALUE without the dashes (see scforge {} --help)"),
        (["--frob"], "unrecognized argument: --frob (see scforge {} --help)"),
    ],
)
def test_what_is_no_override(told, command: str, argv: list[str], part: str) -> None:
    assert part.format(command.removesuffix(" --config")) in told(*command.split(), "config.yaml", *argv)


def test_a_folder_for_the_model_and_a_bar(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    Path("light.yaml").write_text(CONFIG.replace("output: {checkpoint_dir: ck}", ""))
    assert main(["train", "--config", "light.yaml"]) == 0
    shown = capsys.readouterr()
    assert f"Model:       {Path('checkpoints/light/final')}\n" in shown.out
    assert "Epoch 2/2" in shown.err
    Encoder.load("checkpoints/light/final")


@pytest.mark.parametrize("argv", [[], ["trian"], ["train"], ["train", "--confg", "x"], ["quickstart", "--outptu", "x"]])
def test_usage(told, argv: list[str]) -> None:
    assert "--help)" in told(*argv)


def test_version_and_help(capsys) -> None:
    for argv, text in [(["--version"], __version__), (["--help"], "quickstart"), (["train", "--help"], "KEY=VALUE")]:
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 0
        assert text in capsys.readouterr().out


def test_files_that_are_no_h5ad(told) -> None:
    Path("text.h5ad").write_text("cells")
    whole = Path("cells.h5ad").read_bytes()
    Path("half.h5ad").write_bytes(whole[: len(whole) // 2])
    Path("nothing.h5ad").write_bytes(b"")
    with h5py.File("other.h5ad", "w") as file:
        file["table"] = [1, 2]
    for name in ("text", "half", "nothing", "other"):
        line = told("train", "--config", "config.yaml", f"data.paths={name}.h5ad")
        assert line.startswith(f"scforge: error: '{name}.h5ad' cannot be read as an h5ad file: ")
    Path("folder.h5ad").mkdir()
    line = told("train", "--config", "config.yaml", "data.paths=folder.h5ad")
    assert "'folder.h5ad' is a folder without zarr metadata" in line


def test_cells_that_cannot_be_used(told, tiny_adata: ad.AnnData) -> None:
    scaled = tiny_adata.copy()
    scaled.X = scaled.X * 0.5
    scaled.layers["counts"] = tiny_adata.X
    for adata, part in (
        (tiny_adata[:0].copy(), "'bad.h5ad' is empty (0 cells x 80 genes)"),
        (tiny_adata[:, :0].copy(), "'bad.h5ad' is empty (60 cells x 0 genes)"),
        (scaled, "layer='counts' holds counts"),
    ):
        adata.write_h5ad("bad.h5ad")
        assert part in told("train", "--config", "config.yaml", "data.paths=bad.h5ad")


MISTAKES = [
    ("data.paths=none.h5ad", "the file 'none.h5ad' does not exist"),
    ("data.batch_key=batches", "batch_key='batches' is not a column of adata.obs; did you mean 'batch'?"),
    ("data.gene_vocab=human_protein_coding", "adata.var_names has only 0 of the 20120 genes of the vocabulary"),
    ("model.architecture=transfomer_encoder", "did you mean 'transformer_encoder'? (known: 'autoreg"),
    ("training.num_gpus=1", "this machine has 0 GPUs"),
    ("training.num_gpus=1", "set training.num_gpus=0 or training.accelerator=cpu training.devices=1."),
    ("training.num_gpus=2", "override 'training.num_gpus=2': training.num_gpus=2 cannot be had"),
    ("training.accelerator=gpu", "training.accelerator='gpu' cannot be had"),
    ("output.embedding=cells.csv", "let it end in '.h5ad'"),
    ("output.checkpoint_dir=cells.h5ad", "'cells.h5ad' is a file; give the name of a folder."),
    ("output.checkpoint_dir=null", "so the trained model would be lost; leave it out"),
    ("training={lr: 1e30, gradient_clip_val: 0}", "the loss is nan in batch 1 of epoch 0 (step 1); lower the learning"),
    ("lr", "override='lr' is not an option; write it as section.option=value."),
]


@pytest.mark.parametrize(("override", "part"), MISTAKES, ids=[override[:40] for override, _ in MISTAKES])
def test_mistakes_in_options(told, monkeypatch, override: str, part: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    if "gpu" in override:
        monkeypatch.setattr("scforge.workflows.train.open_source", lambda data: pytest.fail("cells were read"))
    assert part in told("train", "--quiet", "--config", "config.yaml", override)


def test_a_full_disk_is_one_line(told, monkeypatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scforge.estimators.serialize.save_file", full)
    assert "No space left" in told("train", "--quiet", "--config", "config.yaml", "output.checkpoint_dir=ck")
    assert not [path for path in Path("ck").iterdir() if path.name not in (".lock", "config.yaml")]


def test_a_warning_is_one_line(folder: Path, capsys) -> None:
    GeneVocab.from_genes([f"gene{i}" for i in range(60, 140)]).save("genes.json")
    options = ["data.gene_vocab=genes.json", "data.preprocessing=null", "output.embedding=out.h5ad"]
    assert main(["train", "--quiet", "--config", "config.yaml", *options]) == 0
    line = "scforge: warning: adata.var_names has 20 of the 80 genes of the vocabulary (25%); the others count as not"
    error = capsys.readouterr().err
    assert error.startswith(line)
    assert error.count("\n") == 1


def test_interrupted(folder: Path, capsys, monkeypatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Encoder, "train", interrupt)
    assert main(["train", "--config", "config.yaml"]) == 130
    assert capsys.readouterr().err == "scforge: interrupted\n"


def test_a_mistake_as_a_process(folder: Path) -> None:
    command = [sys.executable, "-m", "scforge", "train", "--config", "none.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "scforge: error: config='none.yaml' does not exist; check the path.\n"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send")
def test_ctrl_c_as_a_process(folder: Path, tiny_adata: ad.AnnData) -> None:
    command = [sys.executable, "-m", "scforge", "train", "--quiet", "--config", "config.yaml"]
    options = ["training.max_epochs=1000000", "training.early_stopping=false", "output.checkpoint_dir=ck"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not list(Path("ck").glob("epoch=*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err == ""
    assert out.startswith("Reading cells.h5ad into memory.\nTraining was stopped by Ctrl-C in epoch ")
    model = Encoder.load("ck/final", tiny_adata)
    assert model.is_trained_
    assert np.isfinite(model.get_latent_representation()).all()


@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_repeated_genes_are_summed_and_told(folder: Path, tiny_adata: ad.AnnData, capsys) -> None:
    tiny_adata.var_names = [*tiny_adata.var_names[:78], "gene0", "gene1"]
    tiny_adata.write_h5ad("cells.h5ad")
    assert main(["train", "--config", "config.yaml", "--quiet"]) == 0
    first, *others = capsys.readouterr().err.splitlines()
    told = "scforge: warning: adata.var_names names genes that other columns name as well: the counts of "
    assert first.startswith(f"{told}2 columns (first: 'gene0')")
    assert all(line.startswith(told) for line in others)  # of the genes that were chosen
    assert len(others) < 2


def test_inspect(folder: Path, tiny_adata: ad.AnnData, capsys) -> None:
    GeneVocab.from_genes(tiny_adata.var_names[:50]).save("vocab.json")
    assert main(["inspect", "cells.h5ad", "--vocab", "vocab.json", "--top", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = dict(line.split("  ", 1) for line in shown.out.splitlines())
    assert lines["cells x genes"].strip() == "60 x 80 (csr)"
    assert lines["counts"].strip() == "X holds raw counts"
    assert lines["genes of the vocabulary"[:23]].strip() == "50 of 50 (100.0%) are in the data"
    assert lines["most counts outside"].count("gene") == 2
    assert main(["inspect", "cells.h5ad", "--gene-key", "ensembl"]) == 0
    assert "human Ensembl ids in adata.var['ensembl']" in capsys.readouterr().out


def test_inspect_mistakes(told) -> None:
    Path("text.h5ad").write_text("cells")
    for argv, part in [
        (["none.h5ad"], "'none.h5ad' does not exist"),
        (["text.h5ad"], "'text.h5ad' cannot be read as an h5ad file"),
        (["cells.h5ad", "--vocab", "config.yaml"], "'config.yaml' is not an scforge vocabulary file"),
        (["cells.h5ad", "--gene-key", "ensemble"], "gene_key='ensemble' is not a column of adata.var; did you mean"),
        (["cells.h5ad", "--layer", "counts"], "layer='counts' is not in the layers of 'cells.h5ad'"),
        (["cells.h5ad", "--top", "-1"], "n_top=-1 is not at least 0"),
    ]:
        assert part in told("inspect", *argv)
