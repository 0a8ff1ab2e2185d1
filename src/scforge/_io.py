"""File handling: atomic writes (a reader sees the old or the complete new file), and validated JSON."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scforge._opening import check_plain, check_regular
from scforge.errors import MissingFileError, ModelFileError, OptionError, first_line, listing

if TYPE_CHECKING:
    import h5py
    from pydantic import BaseModel


def check_folder(argument: str, path: str | os.PathLike[str]) -> None:
    """Raise an OptionError if `path`, where a folder is expected, or one of its parents is a file."""
    for place in (Path(path), *Path(path).parents):
        if place.is_file():
            raise OptionError(
                f"{argument}={str(path)!r} cannot be a folder, because {str(place)!r} is a file; choose another path."
            )


def check_writable(argument: str, path: str | os.PathLike[str]) -> None:
    """Raise an error if `path` is not writable; called before expensive computations."""
    place = Path(path).resolve()
    while not place.is_dir():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise OptionError(f"{argument}={str(path)!r} cannot be written ({error.strerror}).") from error


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which replaces `path` on success and is removed on error.

    The temporary name keeps the suffix of `path`, because some writers infer the format from it.
    """
    path = Path(path)
    with _named(path, path.parent / f".{path.stem}."):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary, mode = _new_file(path.parent, path.stem, path.suffix)
        try:
            yield temporary
            temporary.chmod(mode)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    atomic_write_bytes(path, text.encode())


class _KeepsError(io.FileIO):
    """A file that keeps the first write error and writes nothing afterwards; missing bytes are read as zeros."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        n_bytes = len(rest)
        try:
            while rest and self.error is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = error
        return n_bytes

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        n_bytes = super().readinto(view)
        view[n_bytes:] = bytes(len(view) - n_bytes)  # what was not written; HDF5 follows pointers in it
        return len(view)


@contextlib.contextmanager
def new_h5(path: str | os.PathLike[str]) -> Iterator[h5py.File]:
    """Yield a new HDF5 file, and raise an OSError if the disk is full.

    If HDF5 cannot write a file, it also cannot close it, and crashes the process at exit. Write errors are therefore
    hidden from HDF5 and raised afterwards.
    """
    import h5py

    with _KeepsError(path, "w+") as raw:
        try:
            with h5py.File(raw, "w") as file:
                yield file
        finally:
            if raw.error is not None:
                raise raw.error


_NEW, _SAVED, _STALE = ".saving", ".saved", ".stale.json"
"""Names for files that are being written, complete files that are moved into place, and a list of stale files."""

_DESCRIPTIONS = ("config.json", "adapter.json", "export.json")
_OWN = {
    *_DESCRIPTIONS,
    *("README.md", "vocab.json", "model.safetensors", "adapter.safetensors", "split.safetensors", "origin.json"),
    *("weights.safetensors", "model.onnx", "model.pt2", "training"),
    *("token_dictionary.pkl", "gene_median_dictionary.pkl"),
}
"""Files that scforge writes into model folders, in addition to files listed in a description."""

_KEPT = {"README.md", "origin.json", "export.json", "weights.safetensors", "model.onnx", "model.pt2"}
_KEPT |= {"token_dictionary.pkl", "gene_median_dictionary.pkl"}
"""Files that are kept when another model is saved, unless listed in a description, because users may own them."""


@contextlib.contextmanager
def atomic_folder(
    path: str | os.PathLike[str], *, overwrite: bool = False, argument: str = "dir_path"
) -> Iterator[Path]:
    """Yield an empty temporary folder, whose contents are moved to `path` on success and removed on error.

    A new folder appears only when it is complete. In an existing folder, which may be the working directory or the
    target of a link, only the files of the model are replaced. If a process is killed, the next process that reads or
    writes the folder restores the complete old or new model (see :func:`read_settled`). Files are flushed to disk
    before they are renamed, so they also survive a power failure. Concurrent writers wait for each other.

    Parameters
    ----------
    path
        The folder.
    overwrite
        Whether the folder may contain files.
    argument
        Name of `path` in messages.

    Raises
    ------
    OptionError
        If `path` is a file, if the folder is not empty and `overwrite` is False, or if a new file would replace a file
        that scforge did not write.
    """
    given, path = path, Path(path).resolve()
    check_folder(argument, path)
    done = False
    while not done:
        there = path.is_dir()
        if there and not overwrite and any(not part.name.startswith(_NEW) for part in path.iterdir()):
            raise OptionError(f"{argument}={str(given)!r} exists and is not empty; pass overwrite=True.")
        apart = path.with_name(f".{path.name}{_NEW}")
        new = path / _NEW if there else apart
        with _named(given, new, path / _SAVED):
            path.parent.mkdir(parents=True, exist_ok=True)
            with _alone(new):
                if path.is_dir() != there:
                    continue  # another process has made it meanwhile
                if there and apart.with_name(f"{apart.name}.lock").exists():
                    with contextlib.suppress(OSError), _alone(apart, blocking=False):
                        shutil.rmtree(apart, ignore_errors=True)
                shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
                new.mkdir()
                try:
                    yield new
                    probe, mode = _new_file(new)
                    probe.unlink()
                    for part in [*new.rglob("*"), new]:
                        if part.is_file():
                            part.chmod(mode)  # safetensors writes files that nobody else can read
                        _to_disk(part)
                    if there:
                        _put_in_place(path, f"{argument}={str(given)!r}")
                    else:
                        new.rename(path)
                    _to_disk(path.parent)
                finally:
                    shutil.rmtree(new, ignore_errors=True)
        done = True


def read_settled[T](folder: str | os.PathLike[str], read: Callable[[], T]) -> T:
    """Return the result of `read`, which reads several files in a folder, so that all files are from the same save.

    A save that was interrupted by a killed process is completed first. If another process saves meanwhile, reading is
    repeated.
    """
    folder = Path(folder)
    for _ in range(50):
        if (folder / _SAVED).is_dir():  # of a process that was killed
            with _alone(folder / _NEW):
                _move_in(folder)
        before = _seen(folder)
        try:
            found = read()
        except (OSError, ValueError):
            if _seen(folder) == before:
                raise
        else:
            if _SAVED not in before and _seen(folder) == before:
                return found
    raise ModelFileError(f"{str(folder)!r} changed while it was being read; load it when no process is saving to it.")


def _put_in_place(path: Path, prefix: str) -> None:
    """Replace the model in `path` by the files in its temporary folder."""
    _move_in(path)
    new = {part.name: part.is_dir() for part in (path / _NEW).iterdir()}
    there = {part.name: part.is_dir() for part in path.iterdir()}
    described = _described(path)
    sums = None if described is None else described.get("sha256")
    listed = set(sums if isinstance(sums, dict) else ())
    own = set() if described is None else _OWN | listed
    others = [
        name
        for name in new.keys() & there.keys()
        if name not in own or there[name] != new[name] or not _is_removable(path / name)
    ]
    if others:
        raise OptionError(
            f"{prefix} contains {listing(sorted(others))}, which is not part of an scforge model; choose another name."
        )
    stale = set()
    if described is not None and not new.keys().isdisjoint(_DESCRIPTIONS):
        stale = ((_OWN - _KEPT) | listed) & there.keys() - new.keys()
    (path / _NEW / _STALE).write_text(json.dumps(sorted(stale)), encoding="utf-8")
    _to_disk(path / _NEW / _STALE)
    _to_disk(path / _NEW)
    (path / _NEW).rename(path / _SAVED)  # from here on the new model is the one that counts
    _to_disk(path)
    _move_in(path)


def _move_in(path: Path) -> None:
    """Move saved files into place, which also completes the move of a killed process."""
    saved = path / _SAVED
    if not saved.is_dir():
        return
    if (saved / _STALE).exists():
        for name in read_json(saved / _STALE):
            _remove(path / name)
    for part in saved.iterdir():
        if part.name != _STALE:
            if part.is_dir():
                _remove(path / part.name)
            part.replace(path / part.name)
    _to_disk(path)
    shutil.rmtree(saved)


def _remove(path: Path) -> None:
    """Remove a file, a link, or a folder with the state of a training run."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
    elif _is_removable(path):
        shutil.rmtree(path)


def _is_removable(path: Path) -> bool:
    """Return whether a path is a file, a link, or a folder that contains only a training checkpoint."""
    if not path.is_dir() or path.is_symlink():
        return True
    return {part.name for part in path.iterdir()} <= {"state.json", "state.safetensors"}


def _described(path: Path) -> dict[str, Any] | None:
    """Return the description that scforge wrote into a folder, or None if there is no description."""
    for name in _DESCRIPTIONS:
        try:
            found = read_json(path / name)
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and "scforge_version" in found:
            return found
    return None


def _seen(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return an identifier of the files in a folder, which changes with each save."""
    found: dict[str, tuple[int, ...]] = {}
    for name in (*_OWN, "adata.h5ad", _SAVED):
        with contextlib.suppress(OSError):
            one = (folder / name).lstat()
            found[name] = (one.st_ino, one.st_mtime_ns, one.st_size)
    return found


@contextlib.contextmanager
def _alone(new: Path, *, blocking: bool = True) -> Iterator[None]:
    """Hold a lock for a folder that is being written."""
    from filelock import FileLock

    lock = new.with_name(f"{new.name}.lock")
    lock.touch()  # raises where no file can be made; there filelock waits without end
    with FileLock(lock, blocking=blocking):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextlib.contextmanager
def _named(path: str | os.PathLike[str], *hidden: Path) -> Iterator[None]:
    """Name the path given by the user in write errors, instead of a file whose name begins with one of `hidden`."""
    try:
        yield
    except OSError as error:
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        ours = any(name.startswith(str(one)) for name in names for one in hidden)
        # What writes to an open file is not told its name.
        if ours or (not names and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise
    except Exception as error:
        from safetensors import SafetensorError

        if not isinstance(error, SafetensorError):
            raise
        # What the system said stands in its text only.
        raise OSError(f"{os.fspath(path)!r} cannot be written: {first_line(error)}.") from error


def _new_file(folder: Path, stem: str = "", suffix: str = "") -> tuple[Path, int]:
    """Create an empty hidden file with default permissions, and return its path and permissions."""
    while True:
        path = folder / f".{stem}.{secrets.token_hex(4)}{suffix}"
        with contextlib.suppress(FileExistsError):
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            try:
                return path, stat.S_IMODE(os.fstat(handle).st_mode)
            finally:
                os.close(handle)


def _to_disk(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return  # Windows opens no folders, and one may be written to that may not be read
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def swap_in(new: Path, path: Path) -> None:
    """Swap `new` and `path`, atomically if the system supports it.

    Otherwise, :func:`put_back` undoes an incomplete swap of a killed process. Links are preserved.
    """
    path = path.resolve()
    put_back(path)
    if not path.is_dir():
        new.replace(path)
    elif not _exchange(new, path):
        gone = _gone(path)
        with _alone(gone):
            shutil.rmtree(gone, ignore_errors=True)  # of a process that was killed when `path` was new
            path.rename(gone)
            try:
                new.replace(path)
            except OSError:
                gone.rename(path)
                raise
            gone.rename(new)


def put_back(path: str | os.PathLike[str]) -> None:
    """Restore the name of a folder if a process was killed while replacing it."""
    path = Path(path).resolve()
    gone = _gone(path)
    if not path.name or not gone.is_dir():
        return
    if path.exists():  # killed between the two steps: the old one must not come back when the new one is deleted
        with contextlib.suppress(OSError), _alone(gone, blocking=False):
            shutil.rmtree(gone, ignore_errors=True)
        return
    with _alone(gone):
        if not path.exists() and gone.is_dir():
            gone.rename(path)


def _gone(path: Path) -> Path:
    return path.with_name(f".{path.name}.gone")


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders, and return whether the system supports it, like Linux on most local disks."""
    import ctypes

    if os.name != "posix" or not hasattr(libc := ctypes.CDLL(None), "renameat2"):
        return False
    here, exchange = -100, 2
    return libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder and its content, after renaming it so that no process sees a partial folder."""
    path = Path(path)
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)  # of a process that was killed
    path.rename(hidden)
    shutil.rmtree(hidden)


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 hash of a file as hexadecimal text."""
    check_regular(path, ModelFileError)
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_of_json(content: Any, *, sort_keys: bool = False) -> str:
    """Return the SHA-256 hash of an object's JSON text as hexadecimal text."""
    return hashlib.sha256(json.dumps(content, sort_keys=sort_keys).encode()).hexdigest()


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file.

    Raises
    ------
    MissingFileError
        If the file does not exist.
    ModelFileError
        If the file is not JSON.
    """
    check_regular(path, ModelFileError)
    try:
        content = json.loads(Path(path).read_bytes())
        check_plain(content, bits=128)  # states of random numbers
    except FileNotFoundError as error:
        raise MissingFileError(f"the file {os.fspath(path)!r} does not exist.") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{os.fspath(path)!r} is not a JSON file: {first_line(error)}.") from error
    return content


def parsed[T: BaseModel](schema: type[T], content: Any, prefix: str) -> T:
    """Return the content of a JSON file, validated by `schema`; `prefix` is the prefix of error messages."""
    from pydantic import ValidationError

    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        found = "" if first["type"] == "missing" else f", got {first['input']!r:.60}"
        raise ModelFileError(f"{prefix} ({where or 'content'}: {first['msg']}{found}); copy it again.") from error
