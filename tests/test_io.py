import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from scforge._io import (
    atomic_folder,
    atomic_path,
    atomic_write_bytes,
    atomic_write_text,
    check_writable,
    read_json,
    read_settled,
)
from scforge.errors import MissingFileError, ModelFileError, OptionError
from scforge.testing import raises


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def fill(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def content(folder):
    """Return all files of a folder but those that are being written, or were when a process was killed."""
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {str(name): (folder / name).read_text() for name in names if ".saving" not in name.parts[0]}


def test_write_and_replace(tmp_path):
    path = tmp_path / "deep" / "a.h5ad"
    atomic_write_text(path, "grün", overwrite=False)
    assert path.read_bytes() == "grün".encode()
    with atomic_path(path, overwrite=True) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_text() == "grün"
        assert (temporary.suffix, temporary.parent) == (".h5ad", path.parent)
    assert path.read_bytes() == b"new"
    atomic_write_bytes(path, b"newer", overwrite=True)
    assert path.read_bytes() == b"newer"
    assert listing(path.parent) == ["a.h5ad"]


@pytest.mark.parametrize("there", [True, False])
def test_an_error_leaves_what_was_there(tmp_path, there):
    before = {"a.txt": "old", "model/weights": "old"} if there else {}
    fill(tmp_path, before)

    def fail(path):
        path.write_text("half of it")
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"), atomic_path(tmp_path / "a.txt", overwrite=True) as temporary:
        fail(temporary)
    with pytest.raises(RuntimeError, match="disk"), atomic_folder(tmp_path / "model", overwrite=True) as temporary:
        fail(temporary / "weights")
    assert content(tmp_path) == before
    assert listing(tmp_path) == sorted({name.split("/")[0] for name in before})


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_permissions_are_those_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        atomic_write_text(tmp_path / "a.txt", "", overwrite=False)
        with atomic_folder(tmp_path / "folder") as temporary:
            (temporary / "weights").touch(0o600)  # as safetensors does
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "folder" / "weights").stat().st_mode) == 0o640


def test_folder(tmp_path):
    path = tmp_path / "deep" / "model"
    with atomic_folder(path) as temporary:
        (temporary / "weights").write_text("1")
        assert not path.exists()
    assert (path / "weights").read_text() == "1"
    assert listing(path.parent) == ["model"]
    (tmp_path / "file").touch()
    with raises(OptionError, "dir_path"), atomic_folder(tmp_path / "file"):
        pass


OLD = {"config.json": '{"scforge_version": "1", "sha256": {}}', "model.safetensors": "old", "split.safetensors": "old"}
NEW = {"config.json": '{"scforge_version": "2", "sha256": {}}', "model.safetensors": "new", "vocab.json": "new"}
MINE = {"thesis.txt": "mine", "sub/data.csv": "mine", "training/notes.txt": "mine"}


def test_overwrite_replaces_the_model_and_nothing_else(tmp_path):
    path = tmp_path / "model"
    fill(path, OLD | MINE)
    with pytest.raises(OptionError, match="not empty; pass overwrite=True"), atomic_folder(path):
        pass
    with atomic_folder(path, overwrite=True) as temporary:
        fill(temporary, NEW)
    assert content(path) == NEW | MINE
    assert listing(tmp_path) == ["model"]


def test_overwrite_replaces_the_state_of_training_and_tables_of_an_export(tmp_path):
    path = tmp_path / "model"
    fill(path, OLD)
    new = NEW | {"training/state.json": "new", "token_dictionary.pkl": "new"}
    with atomic_folder(path, overwrite=True) as temporary:
        fill(temporary, new)
    assert content(path) == new


def test_overwrite_leaves_files_of_others_that_have_our_names(tmp_path):
    path = tmp_path / "project"
    for mine in ({"README.md": "mine"}, {"config.json": '{"name": "mine"}'}, {"model.safetensors/a": "mine"}):
        fill(path, mine)
        with (
            pytest.raises(OptionError, match=r"contains '.*', which is not part of an scforge model"),
            atomic_folder(path, overwrite=True) as temporary,
        ):
            fill(temporary, NEW | {"README.md": "new"})
        assert content(path).items() >= mine.items()
        assert listing(path) == sorted(name.split("/")[0] for name in content(path))


def test_a_link_stays_a_link_and_the_working_directory_stays(tmp_path, monkeypatch):
    fill(tmp_path / "scratch", OLD | MINE)
    (tmp_path / "results").symlink_to("scratch")
    with atomic_folder(tmp_path / "results", overwrite=True) as temporary:
        fill(temporary, NEW)
    assert (tmp_path / "results").is_symlink()
    assert content(tmp_path / "scratch") == NEW | MINE
    monkeypatch.chdir(tmp_path / "results")
    with atomic_folder(".", overwrite=True) as temporary:
        fill(temporary, OLD)
    assert content(Path()) == OLD | MINE
    assert listing(tmp_path) == ["results", "scratch"]


KILLED = """
import json, os, shutil, sys
from pathlib import Path
from scforge import _io
folder, steps, files = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
def counted(function):
    def call(*args, **kwargs):
        global steps
        steps -= 1
        if steps < 0:
            os._exit(9)
        return function(*args, **kwargs)
    return call
paths, others = ("replace", "rename", "unlink"), ((shutil, "rmtree"), (os, "link"), (_io, "_to_disk"))
for owner, name in [*((Path, name) for name in paths), *others]:
    setattr(owner, name, counted(getattr(owner, name)))
with _io.atomic_folder(folder, overwrite=True) as place:
    for name, text in files.items():
        (place / name).write_text(text)
"""


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
def test_a_process_that_is_killed_leaves_the_old_or_the_new(tmp_path, there):
    found = []
    for steps in range(40):
        path = tmp_path / str(steps) / "model"
        fill(path if there else path.parent, (OLD | MINE) if there else {})
        path.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-c", KILLED, str(path), str(steps), json.dumps(NEW)]
        code = subprocess.run(command, check=False).returncode
        found.append(read_settled(path, content))
        with atomic_folder(path, overwrite=True) as temporary:
            fill(temporary, OLD)
        assert content(path) == (OLD | MINE if there else OLD)
        assert listing(path.parent) == ["model"]
        if code == 0:
            break
        assert code == 9
    old, mine = (OLD | MINE, MINE) if there else ({}, {})
    # A complete save in a folder of its own is without the files of the user.
    kinds = ["old" if files == old else "new" if files in (NEW, NEW | mine) else "half" for files in found]
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {"old", "new"}
    assert len(kinds) > (15 if there else 8)


def test_reading_while_others_save(tmp_path):
    """Two writers and a reader: what is read is always of one save."""
    path = tmp_path / "model"
    fill(path, OLD)
    script = (
        "import sys\nfrom scforge import _io\n"
        "for i in range(60):\n"
        "    with _io.atomic_folder(sys.argv[1], overwrite=True) as place:\n"
        "        for name in ('config.json', 'model.safetensors', 'vocab.json'):\n"
        '            (place / name).write_text(\'{"scforge_version": "%s %d", "sha256": {}}\' % (sys.argv[2], i))\n'
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(path), name]) for name in "ab"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        texts = read_settled(
            path, lambda place: [(place / name).read_text() for name in ("config.json", "model.safetensors")]
        )
        seen.add(tuple(texts))
    assert [writer.returncode for writer in writers] == [0, 0]
    assert all(one == two for one, two in seen - {(OLD["config.json"], "old")})
    assert listing(path) == ["config.json", "model.safetensors", "vocab.json"]


def test_a_place_that_cannot_be_written_is_named_as_the_user_named_it(tmp_path):
    for path in ("/proc/nothing/out.h5ad", "/proc/out.h5ad"):
        with raises(OptionError, "output"):
            check_writable("output", path)
        with pytest.raises(OSError, match=rf"\] [^/]*: '{path.removesuffix('/out.h5ad')}") as caught:
            atomic_write_text(path, "", overwrite=False)
        assert "/." not in str(caught.value)
    check_writable("output", tmp_path / "a" / "b" / "out.h5ad")
    assert listing(tmp_path) == []


def test_errors_name_the_place_of_the_user_and_keep_other_names(tmp_path):
    target = tmp_path / "model"
    with pytest.raises(OSError, match="No space") as told, atomic_folder(target) as folder:
        raise OSError(errno.ENOSPC, "No space left on device", "cache/config.json", None, str(folder / "config.json"))
    assert told.value.filename == str(target)
    assert ".saving" not in str(told.value)
    error = OSError(errno.ENOSPC, "No space left on device", "/other/.saving/a")
    for write, name in ((atomic_path, "out.csv"), (atomic_folder, "model")):
        with pytest.raises(OSError, match="/other/.saving/a") as caught, write(tmp_path / name, overwrite=True):
            raise error
        assert caught.value is error


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk of Linux")
def test_cells_on_a_full_disk(tmp_path):
    """HDF5 would crash the process."""
    script = (
        "import resource, signal, sys\nimport anndata, numpy as np\nfrom scforge._io import atomic_path\n"
        "from scforge.data.readers import write_h5ad\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "adata = anndata.AnnData(np.ones((300, 40)))\nadata.raw = adata.copy()\n"
        "for most in [0, 90, 3000, 9000, 50_000, 100_000]:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))\n"
        "    try:\n"
        "        with atomic_path(sys.argv[1], overwrite=True) as temporary:\n"
        "            write_h5ad(temporary, adata)\n"
        "    except OSError as error:\n"
        "        print(error)\n"
    )
    path = tmp_path / "cells.h5ad"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"[Errno 27] File too large: '{path}'"] * 6
    assert listing(tmp_path) == []


def test_json(tmp_path):
    content = {"a": [1, -2.5, 1e-7, None, True, "ä,[{"], "b": {"c": 18446744073709551615}}
    (tmp_path / "a.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    assert read_json(tmp_path / "a.json") == content
    for data in (b"{", b"", b"\xff[]", b"[" * 100_000):
        (tmp_path / "a.json").write_bytes(data)
        with pytest.raises(ModelFileError):
            read_json(tmp_path / "a.json")
    with pytest.raises(MissingFileError):
        read_json(tmp_path / "b.json")


def test_files_of_a_user_with_names_of_scforge_stay(tmp_path):
    """What the old description does not list is a user's: it is neither replaced nor removed."""
    folder = tmp_path / "model"
    described = {"config.json": json.dumps({"scforge_version": "1", "sha256": {}})}

    def save(files):
        with atomic_folder(folder, overwrite=True) as new:
            fill(new, files)

    save(described)
    mine = dict.fromkeys(["adata.h5ad", "model.onnx", "weights.safetensors", "export.json"], "mine")
    fill(folder, mine)
    save(described)
    assert content(folder) == mine | described
    with pytest.raises(OptionError, match=r"adata\.h5ad"):
        save(described | {"adata.h5ad": "new"})
    assert content(folder) == mine | described
