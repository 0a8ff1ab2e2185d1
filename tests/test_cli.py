import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from scforge.cli import main
from scforge.data import GeneVocab, convert, open_cells
from scforge.errors import OptionError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.finetuning.base import warn_of_missing_base
from scforge.testing import raises

CONFIG = """
data: {paths: [cells.h5ad], preprocessing: {hvg_selection: 40}}
model: {hidden_dim: 8, ffn_dim: 8}
training: {max_epochs: 2, batch_size: 16, accelerator: cpu}
output: {checkpoint_dir: ck}
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    Path("config.yaml").write_text(CONFIG)
    return folder


def test_train(folder: Path, capsys, monkeypatch) -> None:
    line = "train output.checkpoint_dir=ck --config config.yaml output.log_dir=logs --quiet output.embedding=out.h5ad"
    assert main(line.split()) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    assert " of 2 (validation_loss " in lines[-7]
    assert [line.split(maxsplit=1)[1] for line in lines[-6:]] == [
        *("ck/final", "ck/step=00000008", "ck/config.yaml", "logs", "out.h5ad"),
        "scforge embed cells.h5ad -m ck/final -o embedded.zarr",
    ]
    model = Encoder.load("ck/final")
    cells = ad.read_h5ad("out.h5ad")
    found = model.get_latent_representation(cells, key_added=None)
    np.testing.assert_allclose(found, cells.obsm["X_scforge"], atol=1e-6)
    # The folder has the name of the configuration if none is given; a terminal shows a bar.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    Path("light.yaml").write_text(CONFIG.replace("output: {checkpoint_dir: ck}", ""))
    assert main(["train", "--config", "light.yaml"]) == 0
    shown = capsys.readouterr()
    assert f"Model:       {Path('checkpoints/light/final')}\n" in shown.out
    assert "Epoch 2/2" in shown.err


@pytest.mark.parametrize("command", ["train --config", "config check"])
def test_what_is_no_override(told, command: str) -> None:
    for argv, part in [
        (["--training.lr=0.1"], "write training.lr=0.1 without the dashes"),
        (["--training.lr", "0.1"], "write training.lr=VALUE without the dashes"),
        (["--frob"], f"unrecognized argument: --frob (see scforge {command.removesuffix(' --config')} --help)"),
    ]:
        assert part in told(*command.split(), "config.yaml", *argv)


@pytest.mark.parametrize("argv", [[], ["trian"], ["train"], ["train", "--confg", "x"], ["quickstart", "--outptu", "x"]])
def test_usage(told, argv: list[str]) -> None:
    assert "--help)" in told(*argv)


def test_inputs_that_cannot_be_used(told, tiny_adata: ad.AnnData) -> None:
    Path("text.h5ad").write_text("cells")
    Path("folder.h5ad").mkdir()
    tiny_adata[:0].copy().write_h5ad("empty.h5ad")
    for argv, part in [
        ("train --config none.yaml", "scforge: error: config='none.yaml' cannot be read: No such file or directory; "),
        ("train --config config.yaml data.paths=text.h5ad", "'text.h5ad' cannot be read as an h5ad file: "),
        ("train --config config.yaml data.paths=folder.h5ad", "'folder.h5ad' is a folder without zarr metadata"),
        ("train --config config.yaml data.paths=empty.h5ad", "'empty.h5ad' is empty (0 cells x 80 genes)"),
        ("inspect none.h5ad", "'none.h5ad' does not exist"),
        ("inspect cells.h5ad --vocab config.yaml", "'config.yaml' is not an scforge vocabulary file"),
    ]:
        assert part in told(*argv.split())


MISTAKES = [
    ("data.paths=none.h5ad", "the file 'none.h5ad' does not exist"),
    (
        "training.num_gpus=2",
        "override 'training.num_gpus=2': devices=2 with accelerator='gpu' requires more GPUs than this machine has (0",
    ),
    (
        "training.accelerator=gpu",
        "accelerator='gpu' requires more GPUs than this machine has (0); pass accelerator='cpu'.",
    ),
    ("output.checkpoint_dir=cells.h5ad", "'cells.h5ad' is a file; choose another path."),
    ("output.checkpoint_dir=null", "so the trained model would be lost; set output.checkpoint_dir, or remove it to"),
    ("training={lr: 1e30, gradient_clip_val: 0}", "the loss is nan in batch 1 of epoch 0 (step 1); lower the learning"),
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

    monkeypatch.setattr("scforge.estimators.fitted.save_file", full)
    assert "No space left" in told("train", "--quiet", "--config", "config.yaml", "output.checkpoint_dir=ck")
    assert not [path for path in Path("ck").iterdir() if path.name not in (".lock", "config.yaml")]


def test_a_warning_is_one_line(folder: Path, capsys) -> None:
    GeneVocab.from_genes([f"gene{i}" for i in range(60, 140)]).save("genes.json")
    options = ["data.gene_vocab=genes.json", "data.preprocessing=null", "output.embedding=out.h5ad"]
    assert main(["train", "--quiet", "--config", "config.yaml", *options]) == 0
    line = "scforge: warning: adata.var_names has 20 of the 80 genes of the vocabulary (25%); the others are treated as"
    error = capsys.readouterr().err
    assert error.startswith(line)
    assert error.count("\n") == 1


def test_interrupted(folder: Path, capsys, monkeypatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Encoder, "train", interrupt)
    assert main(["train", "--config", "config.yaml"]) == 130
    assert capsys.readouterr().err == "scforge: interrupted\n"


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
    assert out.startswith("Training was stopped by Ctrl-C in epoch ")
    model = Encoder.load("ck/final", tiny_adata)
    assert model.is_trained_
    assert np.isfinite(model.get_latent_representation()).all()


def test_inspect(folder: Path, tiny_adata: ad.AnnData, capsys) -> None:
    GeneVocab.from_genes(tiny_adata.var_names[:50]).save("vocab.json")
    assert main(["inspect", "cells.h5ad", "--vocab", "vocab.json", "--top", "2"]) == 0
    shown = capsys.readouterr()
    lines = dict(line.split("  ", 1) for line in shown.out.splitlines())
    assert lines["genes of the vocabulary"[:23]].strip() == "50 of 50 (100.0%) are in the data"
    assert main(["inspect", "cells.h5ad", "--gene-key", "ensembl"]) == 0
    assert "human Ensembl ids in adata.var['ensembl']" in capsys.readouterr().out


def test_a_folder_for_the_model_and_a_bar(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    Path("light.yaml").write_text(CONFIG.replace("output: {checkpoint_dir: ck}", ""))
    assert main(["train", "--config", "light.yaml"]) == 0
    shown = capsys.readouterr()
    assert f"Model:       {Path('checkpoints/light/final')}\n" in shown.out
    assert "Epoch 2/2" in shown.err
    Encoder.load("checkpoints/light/final")


def test_options_are_spelled_as_the_reader_writes_them(told, capsys) -> None:
    """As flags on the command line, and as arguments in Python, also after a command has run."""
    assert main(["convert", "cells.h5ad", "-o", "store.zarr", "--quiet"]) == 0
    capsys.readouterr()
    assert "store.zarr' exists; pass --overwrite or choose" in told("convert", "cells.h5ad", "-o", "store.zarr")
    with raises(OptionError, "path"):
        convert("cells.h5ad", "store.zarr", progress=False)
    with pytest.warns(ScforgeWarning, match=r"frozen embedding are missing; pass it as base\.$"):
        warn_of_missing_base()


def test_a_csv_file_is_refused_with_the_function_that_reads_it(told, folder: Path) -> None:
    (folder / "x.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    assert "'x.csv' is not an h5ad or zarr file; read it with scanpy.read_csv" in told("inspect", "x.csv")


def test_a_column_with_a_comma_is_quoted_and_quiet_commands_print_nothing(folder: Path, tiny_adata, capfd) -> None:
    tiny_adata.obs["dose, uM"] = np.arange(60)
    tiny_adata.write_h5ad("cells.h5ad")
    process = [sys.executable, "-m", "scforge", "convert", "cells.h5ad", "-o", "store.zarr", "--quiet"]
    done = subprocess.run([*process, "--obs", 'group, "dose, uM"'], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert list(open_cells("store.zarr").obs) == ["group", "dose, uM"]
