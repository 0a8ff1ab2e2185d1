"""Nothing that scforge did not write is changed or removed, whatever is in the way of an output."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

import scforge
from scforge._io import is_model, swap_in
from scforge.cli import main
from scforge.config.editing import config_schema, init_config
from scforge.data import convert
from scforge.datasets import get_split, write_split
from scforge.errors import OptionError, ScforgeError
from scforge.models import Encoder
from scforge.soma.v1.torch import Model, ModelConfig
from scforge.workflows import embed_to

MINE = "mine"


def state_of(folder: Path) -> dict[str, object]:
    """Return the content of everything below a folder; links are not followed."""
    state: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        state[name] = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return state


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cells") / "cells.h5ad"
    adata = scforge.datasets.pbmc3k()
    adata = adata[adata.obs["cell_type"].isin(["Memory CD4 T", "B"])][:120, :400].copy()
    adata.obs["batch"] = np.where(np.arange(120) % 2, "a", "b")
    adata.write_h5ad(path)
    return path


@pytest.fixture(scope="module")
def model(cells: Path) -> Encoder:
    adata = ad.read_h5ad(cells)
    Encoder.setup_anndata(adata, labels_key="cell_type")
    model = Encoder(adata, hidden_dim=8)
    model.train(max_epochs=1, progress_bar=False)
    return model


@pytest.fixture(scope="module")
def folder(model: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model"
    model.save(path)
    return path


@pytest.fixture(scope="module")
def annotator(model: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("annotator") / "model"
    model.finetune("annotation", max_epochs=1, progress_bar=False).save(path)
    return path


RECIPE = """
data: {paths: CELLS, gene_vocab: from_data}
model: {architecture: gene_pooling, hidden_dim: 8}
tokenizer: {strategy: continuous_projection}
objective: {name: joint_embedding}
training: {max_epochs: 1}
output: {checkpoint_dir: run}
"""

TRAIN = "train --config recipe.yaml --quiet"
FINETUNE = "finetune --base-model MODEL --data CELLS --task annotation --output run --max-epochs 1 --eval --quiet"
SOMA = "soma train text.fasta -o run --max-steps 1 --embedding-dim 8 --num-layers 1 --num-heads 1 --seq-len 8 --quiet"
COMMANDS = {
    "train": ("run", TRAIN),
    "finetune": ("run", FINETUNE),
    "soma train": ("run", SOMA),
    "embed zarr": ("out.zarr", "embed CELLS -m MODEL -o out.zarr --quiet"),
    "embed h5ad": ("out.h5ad", "embed CELLS -m MODEL -o out.h5ad --quiet"),
    "predict": ("out.csv", "predict CELLS -m ANNOTATOR -o out.csv"),
    "evaluate table": ("out.csv", "evaluate CELLS -m ANNOTATOR -o out.csv --no-intervals --no-baselines"),
    "evaluate report": ("out", "evaluate CELLS -m MODEL -o out --labels-key cell_type --benchmarks geometry --seeds 1"),
    "convert": ("out.zarr", "convert CELLS -o out.zarr --quiet"),
    "config init": ("out.yaml", "config init light -o out.yaml"),
    "config schema": ("out.json", "config schema -o out.json"),
}
"""The output of each command that writes, and the command."""

PARTS = {
    "run": ["config.yaml", "final/thesis.docx", "step=1/mine", "evaluation.csv", "final/config.json", "epoch=01"],
    "train": ["config.yaml", "final/thesis.docx", "step=1/mine", "final/config.json", "epoch=01"],
    "soma train": ["final/thesis.docx", "step=1/mine", "final/config.json"],
    "out": ["report.md", "report.csv", "report.json"],
    "out.zarr": ["zarr.json", "notes.txt", "c/0"],
}
"""Files of a user in a folder that is the output."""


def run(command: str, places: dict[str, Path], *more: str) -> int:
    words = [str(places.get(word, word)) for word in command.split()]
    return main([*words, *more])


@pytest.fixture
def places(cells: Path, folder: Path, annotator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The inputs of the commands; the working directory is a user's, with a file in another folder of the user."""
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    (home / "thesis").mkdir()
    (home / "thesis" / "thesis.tex").write_text(MINE)
    monkeypatch.chdir(home / "work")
    Path("recipe.yaml").write_text(RECIPE.replace("CELLS", str(cells)))
    Path("text.fasta").write_text(">a\nACGTACGTACGTACGT\n>b\nTTGACGTTTTGACGTT\n>c\nACGTACGTACGTTCGT\n")
    return {"CELLS": cells, "MODEL": folder, "ANNOTATOR": annotator}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", COMMANDS)
def test_files_of_a_user_are_in_the_way(name: str, overwrite: bool, places: dict[str, Path], capsys) -> None:
    output, command = COMMANDS[name]
    more = ["--overwrite"] if overwrite else []
    obstacles: list[tuple[str, str]] = [("link", "../thesis/thesis.tex"), ("file in parent", "")]
    obstacles += [("file", "")] if not overwrite or output in PARTS else []
    parts = PARTS.get(name, PARTS.get(output, []))
    obstacles += [("folder", part) for part in parts or ["notes.txt"]]
    obstacles += [("link in folder", part.partition("/")[0]) for part in parts]
    for number, (kind, part) in enumerate(obstacles):
        place = Path(f"{number}") / output
        if kind == "link":
            place.parent.mkdir()
            place.symlink_to(Path("..") / part)
        elif kind == "file in parent":
            place.parent.write_text(MINE)
        elif kind == "file":
            place.parent.mkdir()
            place.write_text(MINE)
        elif kind == "folder":
            (place / part).parent.mkdir(parents=True)
            (place / part).write_text(MINE)
        else:
            place.mkdir(parents=True)
            (place / part).symlink_to("../../../thesis" + ("/thesis.tex" if "." in part else ""))
        before = state_of(Path("..").resolve())
        given = command.replace("recipe.yaml", f"recipe.yaml output.checkpoint_dir={place}")
        words = [str(place) if word == output else word for word in given.split()]
        code = run(" ".join(words), places, *more)
        told = capsys.readouterr().err
        after = state_of(Path("..").resolve())
        assert code == 2, (kind, part, told)
        assert told.startswith("scforge: error: "), (kind, part, told)
        assert {one: after.get(one) for one in before} == before, (kind, part)


PLANTED = [".saving", ".saved", ".partial", ".embedding", ".gone", ".removed", ".lock"]


@pytest.mark.parametrize("name", COMMANDS)
def test_planted_links_and_folders_are_left_alone(name: str, places: dict[str, Path], capsys) -> None:
    """Names that a command might use for its working files, as links to a user's folder and as folders of a user."""
    output, command = COMMANDS[name]
    for stem in {f".{output}", ".final", ".config", ".out", ".step=00000001"}:
        for ending in PLANTED:
            planted = Path(f"{stem}{ending}")
            if not os.path.lexists(planted) and not planted.name.endswith(".lock"):
                planted.symlink_to("../thesis")
        (Path(f"{stem}.0123abcd.saving")).symlink_to("../thesis")
        Path(f"{stem}.docx.swp").write_text(MINE)
    before = state_of(Path("..").resolve())
    code = run(command, places)
    told = capsys.readouterr().err
    after = state_of(Path("..").resolve())
    assert {one: after.get(one) for one in before} == before
    if name.startswith("embed"):
        assert "is not an unfinished embedding by scforge" in told
    else:
        assert code == 0, told


def test_a_model_folder_of_somebody_else_removes_nothing(folder: Path, cells: Path, tmp_path: Path, capsys) -> None:
    """The journal of an interrupted save used to name files to remove."""
    (tmp_path / "thesis.tex").write_text(MINE)
    (tmp_path / "empty").mkdir()
    with read_copy(folder, tmp_path / "model") as theirs:
        saved = theirs / ".saved"
        saved.mkdir()
        names = [str(tmp_path / "thesis.tex"), "../thesis.tex", "../empty", "training"]
        (saved / ".stale.json").write_text(json.dumps(names))
        (saved / "thesis.tex").write_text("theirs")
        before = state_of(tmp_path)
        Encoder.load(theirs)
        assert main(["embed", str(cells), "-m", str(theirs), "-o", str(tmp_path / "out.h5ad"), "--quiet"]) == 0
        after = state_of(tmp_path)
        assert {name: after.get(name) for name in before} == before
        # Writing there completes nothing that is not a file of a model, and removes nothing else.
        Encoder.load(theirs).save(theirs, overwrite=True)
        assert (tmp_path / "thesis.tex").read_text() == MINE
        assert (tmp_path / "empty").is_dir()
        assert not (theirs / "thesis.tex").exists()


def test_a_planted_link_to_a_folder_is_no_interrupted_save(folder: Path, model: Encoder, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "model.safetensors").write_text(MINE)
    with read_copy(folder, tmp_path / "model") as theirs:
        (theirs / ".saved").symlink_to("../work")
        before = state_of(tmp_path)
        Encoder.load(theirs)
        with pytest.raises(OptionError, match=r"contains '\.saved', which scforge did not write"):
            model.save(theirs, overwrite=True)
        assert state_of(tmp_path) == before


@contextlib.contextmanager
def read_copy(folder: Path, target: Path):
    shutil.copytree(folder, target)
    yield target


def test_an_edited_model_card_is_kept(model: Encoder, tmp_path: Path) -> None:
    path = tmp_path / "model"
    model.save(path)
    model.save(path, overwrite=True)  # nobody edited it
    (path / "README.md").write_text(MINE)
    with pytest.warns(scforge.errors.ScforgeWarning, match=r"README\.md' may have been edited and is kept"):
        model.save(path, overwrite=True)
    assert (path / "README.md").read_text() == MINE
    assert not is_model(path)  # so that a training run does not remove it, either


def test_a_file_of_a_user_in_a_store_or_embedding_is_kept(cells: Path, folder: Path, tmp_path: Path) -> None:
    store, embedding = tmp_path / "s.zarr", tmp_path / "e.zarr"
    convert(cells, store)
    embed_to(folder, store, embedding)
    for place in (store, embedding):
        (place / "obs" / "notes.txt").parent.mkdir(exist_ok=True)
        (place / "obs" / "notes.txt").write_text(MINE)
    with pytest.raises(OptionError, match=r"contains 'obs/notes\.txt', which scforge did not write"):
        convert(cells, store, overwrite=True)
    with pytest.raises(OptionError, match=r"contains 'obs/notes\.txt', which scforge did not write"):
        embed_to(folder, store, embedding, overwrite=True)
    assert (store / "obs" / "notes.txt").read_text() == (embedding / "obs" / "notes.txt").read_text() == MINE


def test_the_folder_of_an_unfinished_embedding(cells: Path, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "e.zarr"
    work = tmp_path / ".e.zarr.embedding"
    work.mkdir()
    (work / "thesis.tex").write_text(MINE)
    for overwrite in (False, True):
        with pytest.raises(OptionError, match="which is not an unfinished embedding by scforge; move it"):
            embed_to(folder, cells, output, overwrite=overwrite)
    assert state_of(work) == {"thesis.tex": MINE.encode()}
    (work / "thesis.tex").unlink()
    (work / "plan.json").write_text("")  # of a full disk
    with pytest.raises(OptionError, match=r"unfinished embedding in .* has no intact plan"):
        embed_to(folder, cells, output)
    assert embed_to(folder, cells, output, overwrite=True).complete


FUNCTIONS: dict[str, Callable[[Path, Encoder], object]] = {
    "vocab": lambda path, model: model.vocab.save(path),
    "split": lambda path, model: write_split(get_split("pbmc3k"), path),
    "schema": lambda path, model: config_schema(path),
    "recipe": lambda path, model: init_config("light", path),
    "soma": lambda path, model: Model(ModelConfig(8, 16, 1, 1, 0.0)).save(path),
    "model": lambda path, model: model.save(path),
    "export": lambda path, model: model.export(path, format="torch"),
    "report": lambda path, model: scforge.eval.Report("empty").write(path),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_replace_no_file(name: str, model: Encoder, tmp_path: Path) -> None:
    path = tmp_path / ("out.yaml" if name == "recipe" else "out")
    path.write_text(MINE)
    (link := tmp_path / ("link.yaml" if name == "recipe" else "link")).symlink_to(path)
    for place in (path, link):
        with pytest.raises(ScforgeError):
            FUNCTIONS[name](place, model)
    assert path.read_text() == MINE


def test_a_folder_is_swapped_without_an_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system cannot exchange two names, a killed process leaves the old folder under a random name."""
    monkeypatch.setattr("scforge._io._exchange", lambda one, other: False)
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    swap_in(tmp_path / "new", tmp_path / "out")
    assert state_of(tmp_path) == {"new": None, "new/out": b"", "out": None, "out/new": b""}
    (tmp_path / "out").rename(tmp_path / ".out.0123abcd.replaced")  # as after a kill
    swap_in(tmp_path / "new", tmp_path / "out")
    assert state_of(tmp_path) == {"new": None, "new/new": b"", "out": None, "out/out": b""}


def test_devices_are_no_outputs() -> None:
    for path in ("/dev/null", "/dev/stdout"):
        with pytest.raises(OptionError, match=r"is not a regular file|is a link"):
            config_schema(path, overwrite=True)
    assert Path("/dev/null").is_char_device()
