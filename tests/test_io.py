"""Writes are whole or did not happen."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat

import pytest

from scforge._io import (
    atomic_folder,
    atomic_path,
    atomic_write_bytes,
    atomic_write_text,
    parse_json,
    read_json,
    sha256_of,
)
from scforge.errors import OptionError


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_write_and_replace(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    atomic_write_text(path, "grün")
    assert path.read_bytes() == "grün".encode()
    atomic_write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert listing(path.parent) == ["a.txt"]


def test_an_error_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write():
        with atomic_path(path) as temporary:
            temporary.write_text("half of it")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write()
    assert path.read_text() == "old"
    assert listing(tmp_path) == ["a.txt"]


def test_an_error_leaves_no_new_file(tmp_path):
    with pytest.raises(RuntimeError, match="disk"), atomic_path(tmp_path / "a.txt"):
        raise RuntimeError("disk")
    assert listing(tmp_path) == []


def test_the_old_file_is_there_until_the_end(tmp_path):
    path = tmp_path / "a.h5ad"
    path.write_text("old")
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.suffix == ".h5ad"
        assert temporary.parent == path.parent
    assert path.read_text() == "new"


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_permissions_are_those_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        atomic_write_text(tmp_path / "a.txt", "")
        with atomic_folder(tmp_path / "folder"):
            pass
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o750


def test_folder(tmp_path):
    path = tmp_path / "deep" / "model"
    with atomic_folder(path) as temporary:
        (temporary / "weights").write_text("1")
        assert not path.exists()
    assert (path / "weights").read_text() == "1"
    assert listing(path.parent) == ["model"]


def test_an_error_leaves_the_old_folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "weights").write_text("old")

    def write():
        with atomic_folder(path, overwrite=True) as temporary:
            (temporary / "weights").write_text("new")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write()
    assert (path / "weights").read_text() == "old"
    assert listing(tmp_path) == ["model"]


def test_a_folder_that_cannot_be_moved_in_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "model"
    path.mkdir()
    (path / "weights").write_text("old")
    rename = type(path).rename

    def fail(self, target):
        if target == path and self.name.startswith(".model.") and not self.name.endswith(".old"):
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(type(path), "rename", fail)
    with pytest.raises(OSError, match="no"), atomic_folder(path, overwrite=True) as temporary:
        (temporary / "weights").write_text("new")
    assert (path / "weights").read_text() == "old"
    assert listing(tmp_path) == ["model"]


def test_overwrite_takes_the_whole_place(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "stale").write_text("old")
    with pytest.raises(OptionError, match="not empty; pass overwrite=True"), atomic_folder(path):
        pass
    assert listing(path) == ["stale"]
    with atomic_folder(path, overwrite=True) as temporary:
        (temporary / "weights").write_text("new")
    assert listing(path) == ["weights"]
    assert listing(tmp_path) == ["model"]


def test_an_empty_folder_may_be_filled_and_a_file_may_not(tmp_path):
    (tmp_path / "empty").mkdir()
    with atomic_folder(tmp_path / "empty") as temporary:
        (temporary / "a").touch()
    assert listing(tmp_path / "empty") == ["a"]
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="is a file; give the name of a folder"), atomic_folder(tmp_path / "file"):
        pass


def test_sha256(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_of(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2", "Expecting"),
        ('{"a": 1, "b": 2, "a": 3}', "holds the key 'a' twice"),
        ("[NaN]", "holds NaN, which is no finite number"),
        ("[1, -Infinity]", "holds -Infinity"),
        ("[1e999]", "holds 1e999"),
        ("[" + 21 * "9" + "]", "a whole number of 21 digits"),
        ("[" * 100_000, "nested too deeply"),
        ("[" + "1," * 1_000_000 + "1]", "about 1,000,001 values, where 1,000,000 are the most"),
        (b"\xff[]", "can't decode"),
    ],
)
def test_json_that_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text if isinstance(text, bytes) else text.encode())


def test_json_that_is_read(tmp_path):
    content = {"a": [1, -2.5, 1e-7, None, True, "ä,[{"], "b": {"c": 18446744073709551615}}
    (tmp_path / "a.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    assert read_json(tmp_path / "a.json") == content
    assert parse_json(b"[Infinity, 1e999]", finite=False) == [math.inf, math.inf]
    (tmp_path / "b.json").write_text(" " * 63)
    with pytest.raises(ValueError, match="it has 63 bytes, where 62 are the most that is read"):
        read_json(tmp_path / "b.json", most_bytes=62)
