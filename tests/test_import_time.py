"""The command line answers at once: what is imported is counted, because seconds depend on the machine."""

import subprocess
import sys

import pytest

HEAVY = {"anndata", "jax", "lightning", "matplotlib", "numba", "pandas", "pydantic", "scanpy", "scipy", "scvi", "torch"}


def imported(*arguments: str) -> set[str]:
    """Return the top-level packages that a new process of Python imports."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = [line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["train", "--help"], ["evaluate", "--help"]])
def test_help_and_version_need_no_heavy_package(arguments):
    loaded = imported("-m", "scforge", *arguments)
    assert "scforge" in loaded
    assert not loaded & HEAVY


def test_the_version_is_looked_up_when_asked_for():
    assert "email" not in imported("-c", "import scforge") | imported("-m", "scforge", "--help")
    assert "email" in imported("-c", "import scforge; scforge.__version__")  # the metadata of packages are mails


def test_import_loads_a_handful_of_modules():
    code = "import sys; before = set(sys.modules); import scforge; print(len(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("embed nope.h5ad -m model -o out.zarr", "the file 'nope.h5ad' does not exist"),
        ("embed pbmc3k.zarr -m model -o out.csv", "output='out.csv' (-o) does not end in one of '.zarr', '.h5ad'"),
        ("predict nope.h5ad -m model -o out.csv", "the file 'nope.h5ad' does not exist"),
        ("evaluate nope.h5ad -m model", "the file 'nope.h5ad' does not exist"),
        ("train --config light.yaml", "light.yaml, line 1: the file 'nope.h5ad' does not exist"),
    ],
)
def test_a_wrong_path_is_said_before_heavy_imports(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "light.yaml").write_text("data: {paths: [nope.h5ad]}")
    code = "import sys; from scforge.cli import main; print(main(sys.argv[1:]), *{'torch', 'scvi'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"]
    assert message in done.stderr
