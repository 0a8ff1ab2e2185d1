import importlib
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest

import scforge

HEAVY = {"anndata", "jax", "lightning", "matplotlib", "numba", "pandas", "pydantic", "scanpy", "scipy", "scvi", "torch"}
ROOMS = [name for name in scforge.__all__ if isinstance(getattr(scforge, name), types.ModuleType)]
LAZY = ["scforge"]
for room in [*ROOMS, "training.objectives"]:
    path = Path(scforge.__file__).parent.joinpath(*room.split("."), "__init__.py")
    if path.is_file() and "lazy_names" in path.read_text():
        LAZY.append(f"scforge.{room}")


def imported(*arguments: str) -> set[str]:
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
    assert "email" not in imported("-m", "scforge", "--help")  # the metadata of packages are mails
    assert scforge.__version__ == version("scforge")


def test_import_is_cheap():
    assert not imported("-c", "\n".join(f"import {name}" for name in LAZY)) & (HEAVY | {"numpy"})
    code = "import sys; before = set(sys.modules); import scforge; print(len(set(sys.modules) - before))"
    assert int(subprocess.check_output([sys.executable, "-c", code])) < 50


@pytest.mark.slow
def test_models_run_on_a_bare_torch_machine():
    loaded = imported(
        "-c",
        "from scforge.models import TransformerEncoder, GenePoolingModel, get_model, list_models, components\n"
        "[get_model.__globals__['MODELS'].get(name) for name in list_models()]",
    )
    assert "torch" in loaded
    assert not loaded & {"anndata", "lightning", "numba", "pandas", "scanpy", "scvi"}


def test_configurations_and_data_need_no_torch():
    names = "GeneVocab, open_cells, read_h5ad, map_genes, select_genes"
    loaded = imported("-c", f"import scforge.config.schema, scforge.config.load\nfrom scforge.data import {names}")
    assert not loaded & {"torch", "lightning", "scanpy", "scvi"}


REPORT = "import sys; from scforge.cli import main; print(main(sys.argv[1:]), *sys.modules, sep='\\n')"
MODEL = "-m scforge://pbmc3k-light"
REFUSED = [
    ("train --config none.yaml", "config='none.yaml' cannot be read"),
    ("train --config light.yaml", "light.yaml, line 1: the file 'nope.h5ad' does not exist"),
    ("train --config light.yaml data.paths=a.csv training.epoch=1", "training.epoch=1 is not a known option"),
    ("train --config light.yaml data.paths=a.csv output.checkpoint_dir=run", "already contains a training run (final)"),
    ("train --config light.yaml data.paths=b.h5ad output.embedding=b.h5ad", "is an input file"),
    ("train --config light.yaml data.paths=a.csv --resume nope", "--resume='nope' does not exist"),
    ("train --config tuned.yaml", "the configuration has a finetune section"),
    ("finetune --config tuned.yaml", "finetune.base_model='nope' (--base-model) does not exist"),
    ("finetune --data a.csv", "scforge finetune requires --base-model and --task"),
    ("embed nope.h5ad -m model -o out.zarr", "the file 'nope.h5ad' does not exist"),
    ("embed a.csv -m nope -o out.zarr", "model='nope' (--model) does not exist"),
    ("embed a.csv -m model -o out.csv", "output='out.csv' must end with .zarr or .h5ad"),
    ("predict a.csv -m run -o out.csv", "(--model) is the folder of a training run; did you mean 'run/final'?"),
    (f"predict b.h5ad {MODEL} -o a.csv", "output='a.csv' exists"),
    ("evaluate nope.h5ad -m run", "the file 'nope.h5ad' does not exist"),
    ("evaluate pbmc3k -m nope", "model='nope' (--model) does not exist"),
    (f"evaluate pbmc3k {MODEL} -o a.csv", "output='a.csv' exists"),
    ("convert nope.h5ad -o out.zarr", "the file 'nope.h5ad' does not exist"),
    ("convert a.csv -o run", "exists and is not a store"),
    ("inspect nope.h5ad", "the file 'nope.h5ad' does not exist"),
    ("config check none.yaml", "config='none.yaml' cannot be read"),
    ("config check light.yaml", "light.yaml, line 1: the file 'nope.h5ad' does not exist"),
]


@pytest.mark.parametrize(("command", "message"), REFUSED, ids=[command for command, _ in REFUSED])
def test_a_wrong_path_or_option_is_said_before_heavy_imports(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("light.yaml").write_text("data: {paths: [nope.h5ad]}")
    Path("tuned.yaml").write_text("data: {paths: [a.csv]}\nfinetune: {base_model: nope, task: annotation}\n")
    Path("a.csv").touch()
    Path("b.h5ad").touch()
    Path("run/final").mkdir(parents=True)
    Path("run/final/config.json").touch()
    done = subprocess.run([sys.executable, "-c", REPORT, *command.split()], capture_output=True, text=True, check=True)
    code, *loaded = done.stdout.split()
    assert code == "2"
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not {"anndata", "lightning", "numba", "pandas", "scvi", "torch", "zarr"} & set(loaded)


TRAINING = {"lightning", "scvi", "torchmetrics", "transformers"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "spared"),
    [
        ("config check light.yaml", {"torch._dynamo"}),
        ("config check tuned.yaml", {"torch._dynamo"}),
        ("inspect cells.h5ad", {"torch", "annbatch"}),
        ("inspect store.zarr", {"torch", "annbatch"}),
        ("convert cells.h5ad -o new.zarr", set()),
    ],
)
def test_checks_and_conversion_import_nothing_that_only_training_needs(command, spared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scforge.datasets.pbmc3k()[:300].copy().write_h5ad("cells.h5ad")
    Path("light.yaml").write_text("data: {paths: [cells.h5ad]}\neval: {benchmarks: [geometry]}\n")
    section = "{base_model: 'scforge://pbmc3k-light', task: annotation, labels_key: cell_type}"
    Path("tuned.yaml").write_text(f"data: {{paths: [cells.h5ad]}}\nfinetune: {section}\n")
    if "store" in command:
        scforge.data.convert("cells.h5ad", "store.zarr", progress=False)
    done = subprocess.run([sys.executable, "-c", REPORT, *command.split()], capture_output=True, text=True, check=True)
    assert "0" in done.stdout.split()
    assert not (TRAINING | spared) & set(done.stdout.split())


@pytest.mark.slow
def test_data_sets_need_no_torch():
    code = "import sys, scforge.datasets as data; data.pbmc3k(); data.load('pbmc3k'); print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "anndata" in loaded
    assert not (TRAINING | {"torch"}) & set(loaded)


def test_every_subpackage_is_an_attribute():
    code = "import scforge, sys; print(*[getattr(scforge, name).__name__ for name in sys.argv[1:]])"
    names = sorted(path.parent.name for path in Path(scforge.__file__).parent.glob("*/__init__.py"))
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"scforge.{name}" for name in names]


@pytest.mark.parametrize("room", LAZY)
def test_public_names(room):
    package = importlib.import_module(room)
    assert len(set(package.__all__)) == len(package.__all__)
    assert set(package._NAMES) == set(package.__all__) - {"__version__"}
    for name in package.__all__:
        value = getattr(package, name)
        assert value is getattr(package, name)
        assert name in dir(package)
    with pytest.raises(AttributeError, match=f"module '{room}' has no attribute 'nothing'"):
        _ = package.nothing
    names: dict[str, object] = {}
    exec(f"from {room} import *", names)
    assert set(package.__all__) <= set(names)
