"""Nothing that scforge did not write is changed or removed, whatever is in the way of an output."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import zarr

import scforge
import scforge.workflows.embed as embedding
from scforge._io import atomic_write_text, is_model, locked, swap_in
from scforge._quickstart import run as quickstart
from scforge.cli import main
from scforge.config.editing import config_schema, init_config
from scforge.data import convert
from scforge.datasets import get_split, write_split
from scforge.errors import OptionError, ScforgeError
from scforge.models import Encoder
from scforge.soma.v1.torch import Model, ModelConfig
from scforge.testing import raises
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
    "annotate": ("out.h5ad", "annotate CELLS --reference MODEL -o out.h5ad --quiet"),
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
        with pytest.raises(OptionError, match=r"contains '\.saved', which scforge did not write"):
            Encoder.load(theirs).save(theirs, overwrite=True)
        assert state_of(tmp_path) == after


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
    with raises(OptionError, "path"):
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
    swap_in(tmp_path / "new", tmp_path / "out", overwrite=True)
    assert state_of(tmp_path) == {"new": None, "new/out": b"", "out": None, "out/new": b""}
    (tmp_path / "out").rename(tmp_path / ".out.0123abcd.replaced")  # as after a kill
    swap_in(tmp_path / "new", tmp_path / "out", overwrite=True)
    assert state_of(tmp_path) == {"new": None, "new/new": b"", "out": None, "out/out": b""}


def test_devices_are_no_outputs() -> None:
    for path in ("/dev/null", "/dev/stdout"):
        with pytest.raises(OptionError, match=r"is not a regular file|is a link"):
            config_schema(path, overwrite=True)
    assert Path("/dev/null").is_char_device()


def test_a_folder_of_a_user_is_no_interrupted_save(model: Encoder, tmp_path: Path) -> None:
    (tmp_path / ".saved" / "thesis").mkdir(parents=True)
    (tmp_path / ".saved" / "thesis" / "mine.txt").write_text(MINE)
    before = state_of(tmp_path)
    with pytest.raises(OptionError, match="is not empty"):
        model.save(tmp_path)
    with pytest.raises(OptionError, match=r"contains '\.saved', which scforge did not write"):
        model.save(tmp_path, overwrite=True)
    assert state_of(tmp_path) == before


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_systems_without_locks(model: Encoder, cells: Path, tmp_path: Path, monkeypatch, number: int) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    for write in (
        lambda: model.save(tmp_path / "model"),
        lambda: convert(cells, tmp_path / "store.zarr", progress=False),
        lambda: embed_to(model, cells, tmp_path / "out.h5ad", progress_bar=False),
    ):
        with pytest.warns(scforge.errors.ScforgeWarning, match="has no locks; let only one process write there"):
            write()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out.h5ad", "store.zarr"}


def test_a_file_with_content_is_no_lock(model: Encoder, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(MINE)
    with pytest.raises(OptionError, match=r"\.lock' is not a lock file by scforge"), locked(tmp_path / ".lock"):
        pass
    adata = model.adata.copy()
    Encoder.setup_anndata(adata)
    with pytest.raises(OptionError, match=r"\.lock' is not a lock file by scforge"):
        Encoder(adata, hidden_dim=8).train(1, checkpoint_dir=tmp_path, progress_bar=False)
    assert (tmp_path / ".lock").read_text() == MINE


@pytest.mark.parametrize("name", ["out.zarr", "out.h5ad"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_appears_during_an_embedding_is_kept(folder, cells, tmp_path, monkeypatch, name, overwrite) -> None:
    target = tmp_path / name
    write = embedding.EmbeddingFiles.write

    def others_write(files: object, block: int, values: np.ndarray) -> None:
        write(files, block, values)
        target.mkdir() if name == "out.zarr" else None
        (target / "thesis.txt" if name == "out.zarr" else target).write_text(MINE)

    monkeypatch.setattr(embedding.EmbeddingFiles, "write", others_write)
    with pytest.raises(OptionError, match="is not an embedding written by scforge"):
        embed_to(folder, cells, target, overwrite=overwrite, progress_bar=False)
    assert (target / "thesis.txt" if name == "out.zarr" else target).read_text() == MINE


@pytest.mark.parametrize("name", ["result.h5ad", "0.npy", "plan.json"])
def test_links_in_an_unfinished_embedding_are_refused(folder, cells, tmp_path, name) -> None:
    (tmp_path / "mine.txt").write_text(MINE)
    (tmp_path / ".out.h5ad.embedding").mkdir()
    (tmp_path / ".out.h5ad.embedding" / name).symlink_to(tmp_path / "mine.txt")
    (tmp_path / "link.h5ad").symlink_to(tmp_path / "new.h5ad")
    before = state_of(tmp_path)
    for output, message in {"out.h5ad": "is not an unfinished embedding by scforge", "link.h5ad": "is a link"}.items():
        with pytest.raises(OptionError, match=message):
            embed_to(folder, cells, tmp_path / output, overwrite=True, progress_bar=False)
    assert state_of(tmp_path) == before


def test_what_a_user_adds_to_a_store_or_an_embedding_is_kept(folder: Path, cells: Path, tmp_path: Path) -> None:
    for name, write in {
        "s.zarr": lambda: convert(cells, tmp_path / "s.zarr", overwrite=True, progress=False),
        "e.zarr": lambda: embed_to(folder, cells, tmp_path / "e.zarr", overwrite=True, progress_bar=False),
    }.items():
        write()
        write()  # nobody added anything
        for add in (
            lambda name=name: zarr.open_group(tmp_path / name, mode="a").create_array("obsm/mine", data=np.arange(3)),
            lambda name=name: (tmp_path / name / "2024").write_text(MINE),
        ):
            add()
            before = state_of(tmp_path)
            with pytest.raises(OptionError, match="which scforge did not write"):
                write()
            assert state_of(tmp_path) == before


def test_a_run_replaces_only_its_own_names(model: Encoder, tmp_path: Path) -> None:
    adata = model.adata.copy()
    Encoder.setup_anndata(adata)
    model = Encoder(adata, hidden_dim=8)
    options = {"checkpoint_dir": tmp_path, "save_top_k": 1, "progress_bar": False}
    model.train(1, **options)
    for name in ("epoch=best_for_paper", "step=keep this"):
        shutil.copytree(next(tmp_path.glob("epoch=*")), tmp_path / name)
    before = {name: value for name, value in state_of(tmp_path).items() if "best" in name or "keep" in name}
    Encoder(adata, hidden_dim=8).train(1, overwrite=True, **options)
    after = state_of(tmp_path)
    assert {name: after.get(name) for name in before} == before


def test_cells_that_a_user_has_edited_are_kept(model: Encoder, tmp_path: Path) -> None:
    path = tmp_path / "model"
    model.save(path, save_anndata=True)
    model.save(path, overwrite=True, save_anndata=True)  # nobody edited them
    edited = ad.read_h5ad(path / "adata.h5ad")
    edited.obs["mine"] = MINE
    edited.write_h5ad(path / "adata.h5ad")
    with pytest.raises(OptionError, match=r"contains 'adata\.h5ad'"):
        model.save(path, overwrite=True, save_anndata=True)
    model.save(path, overwrite=True)
    assert "mine" in ad.read_h5ad(path / "adata.h5ad").obs


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_what_is_replaced_keeps_its_permissions(model: Encoder, cells: Path, tmp_path: Path) -> None:
    writes = {
        "a.txt": lambda: atomic_write_text(tmp_path / "a.txt", "", overwrite=True),
        "out.h5ad": lambda: embed_to(model, cells, tmp_path / "out.h5ad", overwrite=True, progress_bar=False),
        "store.zarr": lambda: convert(cells, tmp_path / "store.zarr", overwrite=True, progress=False),
        "model/model.safetensors": lambda: model.save(tmp_path / "model", overwrite=True),
    }
    for name, write in writes.items():
        write()
        mode = 0o700 if (tmp_path / name).is_dir() else 0o600
        (tmp_path / name).chmod(mode)
        write()
        assert (tmp_path / name).stat().st_mode & 0o777 == mode


def test_a_description_without_checksums_is_of_others(model: Encoder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"scforge_version": "0.1.0", "lr": 1}')
    (tmp_path / "vocab.json").write_text(MINE)
    with pytest.raises(OptionError, match="which is not part of an scforge model"):
        model.save(tmp_path, overwrite=True)
    assert (tmp_path / "vocab.json").read_text() == MINE


def test_outputs_are_local(model: Encoder, folder: Path, cells: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for write in (
        lambda: model.save("file:///x/model"),
        lambda: embed_to(folder, cells, "s3://bucket/out.h5ad"),
        lambda: config_schema("memory://out.json"),
        lambda: model.train(1, checkpoint_dir="gs://bucket/run"),
    ):
        with pytest.raises(OptionError, match="scforge writes local files only|pass a local path"):
            write()
    assert not state_of(tmp_path)


def test_long_names(tmp_path: Path) -> None:
    for name in ("n" * 240 + ".txt", "ü" * 120 + ".txt"):
        atomic_write_text(tmp_path / name, MINE, overwrite=False)
    assert len(state_of(tmp_path)) == 2


def test_the_quickstart_replaces_only_its_own_picture(tmp_path: Path) -> None:
    scforge.eval.Report("x").write(tmp_path)
    (tmp_path / "umap.png").write_text(MINE)
    with raises(OptionError, "output"):
        quickstart(tmp_path, overwrite=True)
