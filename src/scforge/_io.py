"""Reading and writing files: this module alone decides what may be written, replaced and removed.

An existing file is replaced only if the user allows it, a folder only if in addition scforge wrote all of it, and
other files in it never. Names within a folder are constants of this module; names that a file contains are
never used as paths. Working files have random names next to their target, and links are not followed. Reading changes
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scforge._opening import check_plain, check_regular
from scforge.errors import MissingFileError, ModelFileError, OptionError, first_line, listing, spelled, warn

if TYPE_CHECKING:
    import h5py
    from pydantic import BaseModel


_PROTOCOL = re.compile(r"(file|local|memory|https?|ftp|s3|gs|gcs|az|abfss?|hf):/", re.IGNORECASE)

_MARK = "<!-- Written by scforge ({}). -->\n"
"""Last line of a model card, with a checksum of the text above, so that edited cards are not replaced."""

_DESCRIPTIONS = ("config.json", "adapter.json", "export.json")

_OWN = {
    "vocab.json",
    "model.safetensors",
    "adapter.safetensors",
    "split.safetensors",
    "origin.json",
    "training/state.json",
    "training/state.safetensors",
}
"""Files that belong to scforge in each folder with a description by scforge."""

_DATA = "adata.h5ad"

_LISTED = {
    _DATA,
    "reference.safetensors",
    "weights.safetensors",
    "model.onnx",
    "model.pt2",
    "token_dictionary.pkl",
    "gene_median_dictionary.pkl",
    "ensembl_mapping_dict.pkl",
}
"""Files that belong to scforge if a description lists them with a checksum; otherwise they are a user's."""

_CARD = "README.md"
"""The model card, which belongs to scforge until a user edits it."""

_MODEL_FILES = {*_DESCRIPTIONS, *_OWN, *_LISTED, _CARD}

_WORKING, _SAVED = ".saving", ".saved"
"""Suffix of working files and folders, and folder of the complete files of a save that are moved into their place."""

_GONE = ".replaced"

_ADDED = re.compile(r"dataset_\d+|added_\d+")
"""Names of the subfolders that an append adds to a store, in its root and in the folder of its checksums."""

_ADDED_NODES = ({"", "obs/scforge_total"}, {"", "checksums", "measured"})
"""Nodes in such a subfolder, some of which no other program writes."""


def check_local(argument: str, path: str | os.PathLike[str]) -> None:
    """Raise an OptionError if an output is a URL, which would become a folder with the name of its protocol."""
    if match := _PROTOCOL.match(os.fspath(path)):
        raise OptionError(
            f"begins with {match[1]}://, but scforge writes local files only; pass a path, and copy the result.",
            argument=argument,
        )


def check_folder(argument: str, path: str | os.PathLike[str]) -> None:
    """Raise an OptionError if `path`, where a folder is expected, or one of its parents is a file."""
    check_local(argument, path)
    for folder in (Path(path), *Path(path).parents):
        if folder.exists() and not folder.is_dir():
            raise OptionError(
                f"cannot be a folder, because {str(folder)!r} is a file; choose another path.",
                argument=argument,
                value=str(path),
            )


def check_writable(argument: str, path: str | os.PathLike[str]) -> None:
    """Raise an error if `path` is not writable; called before expensive computations."""
    folder = Path(path).resolve()
    while not folder.is_dir():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(f"cannot be written ({error.strerror}).", argument=argument, value=str(path)) from error


def check_output(
    argument: str, path: str | os.PathLike[str], *, overwrite: bool, inputs: Iterable[str | os.PathLike[str]] = ()
) -> Path:
    """Return the path of a file to write.

    Raises
    ------
    OptionError
        If it is an input file, a folder, a link or a device, if it exists and `overwrite` is False, or if it is not
        writable.
    """
    file = Path(path)
    if any(os.path.realpath(file) == os.path.realpath(source) for source in inputs):
        raise OptionError("is the input file; choose another name.", argument=argument, value=str(path))
    check_local(argument, path)
    check_folder(argument, file.parent)
    _check_replaceable(argument, file, overwrite=overwrite)
    check_writable(argument, file)
    return file


def _check_replaceable(argument: str, file: Path, *, overwrite: bool) -> None:
    if file.is_symlink():
        raise OptionError("is a link; pass the path of the file that it points to.", argument=argument, value=str(file))
    if file.is_dir():
        raise OptionError("is a folder; pass the path of a file.", argument=argument, value=str(file))
    if file.exists() and not file.is_file():
        raise OptionError("is not a regular file; choose another name.", argument=argument, value=str(file))
    if file.exists() and not overwrite:
        how = spelled("overwrite=True", "--overwrite")
        raise OptionError(
            f"exists; choose another name, or pass {how} to replace it.", argument=argument, value=str(file)
        )


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str], *, overwrite: bool, argument: str = "path") -> Iterator[Path]:
    """Yield a temporary path next to `path`, which replaces `path` on success and is removed on error.

    The temporary name keeps the suffix of `path`, because some writers infer the format from it. `argument` is the name
    of `path` in the errors of :func:`check_output`, which are also raised if a file has appeared there meanwhile.
    """
    path = Path(path)
    stem = path.stem[:60]  # names are limited to 255 bytes
    with _named(path, f"{path.parent / f'.{stem}'}."):
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_replaceable(argument, path, overwrite=overwrite)
        temporary, mode = _new_file(path.parent, stem, path.suffix)
        try:
            yield temporary
            temporary.chmod(mode)
            _check_replaceable(argument, path, overwrite=overwrite)
            try:
                put_file(temporary, path, overwrite=overwrite)
            except FileExistsError:
                _check_replaceable(argument, path, overwrite=overwrite)
                raise
        finally:
            temporary.unlink(missing_ok=True)


def put_file(temporary: Path, path: Path, *, overwrite: bool) -> None:
    """Move a file to `path`; what it replaces gives it its permissions. Without `overwrite`, nothing is replaced."""
    if overwrite:
        if path.is_file():
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        temporary.replace(path)
        return
    try:
        os.link(temporary, path)  # fails if another process has written there since the check
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        temporary.rename(path)
    else:
        temporary.unlink()


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes, *, overwrite: bool, argument: str = "path") -> None:
    """Write `data` to `path` atomically, see :func:`atomic_path`."""
    with atomic_path(path, overwrite=overwrite, argument=argument) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: str | os.PathLike[str], text: str, *, overwrite: bool, argument: str = "path") -> None:
    """Write `text` to `path` atomically as UTF-8, see :func:`atomic_path`."""
    atomic_write_bytes(path, text.encode(), overwrite=overwrite, argument=argument)


def check_files(argument: str, folder: Path, names: Iterable[str], *, described_by: str, overwrite: bool) -> None:
    """Raise an OptionError if files of a set that a command writes into a folder exist and may not be replaced.

    Parameters
    ----------
    argument
        Name of `folder` in messages.
    folder, names
        The folder, and the files.
    described_by
        The JSON file of the set in which scforge names its version; without it, the files are a user's.
    overwrite
        Whether to replace the files of scforge.
    """
    check_folder(argument, folder)
    check_writable(argument, folder)
    there = [name for name in names if os.path.lexists(folder / name)]
    if not there:
        return
    if not overwrite:
        raise OptionError(
            f"already contains {listing(there)}; choose another folder, or pass "
            f"{spelled('overwrite=True', '--overwrite')} to replace what scforge wrote.",
            argument=argument,
            value=str(folder),
        )
    for name in there:
        _check_replaceable(f"{argument}={str(folder / name)!r}", folder / name, overwrite=True)
    content = read_json(folder / described_by) if described_by in there else None
    is_own = isinstance(content, dict) and "scforge_version" in content
    listed = content.get("sha256") if isinstance(content, dict) else None
    sums = listed if isinstance(listed, dict) else {}
    others = [name for name in there if not is_own or (name in sums and sums[name] != sha256_of(folder / name))]
    if others:
        raise OptionError(
            f"contains {listing(others)}, which scforge did not write or which has been edited; choose another folder.",
            argument=argument,
            value=str(folder),
        )


def signed(text: str) -> str:
    """Return a text of comments and content with a first line that contains its checksum."""
    return f"# Written by scforge, sha256 {hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def is_unedited(path: Path) -> bool:
    """Return whether a file contains a :func:`signed` text as it was written."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        text = path.read_bytes().decode()
    except (OSError, ValueError):
        return False
    return text == signed(text.partition("\n")[2])


def marked(card: str) -> str:
    """Return the text of a model card with the last line by which :func:`is_own_card` recognizes it."""
    return card + _MARK.format(hashlib.sha256(card.encode()).hexdigest()[:16])


def is_own_card(card: str) -> bool:
    """Return whether a model card was written by scforge and has not been edited since."""
    *above, _ = card.splitlines(keepends=True) or [""]
    return card == marked("".join(above))


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


@contextlib.contextmanager
def atomic_folder(
    path: str | os.PathLike[str], *, overwrite: bool = False, argument: str = "dir_path"
) -> Iterator[Path]:
    """Yield an empty temporary folder, whose files are moved to `path` on success and removed on error.

    A new folder appears only when it is complete. In an existing folder, which may be the working directory or the
    target of a link, only the files of the model are replaced. If a process is killed meanwhile, :func:`read_settled`
    reads the complete old or new model, and the next save removes its temporary files. Files are flushed to disk before
    they are renamed, so they also survive a power failure. Concurrent writers wait for each other.

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
    check_local(argument, path)
    given, path = path, Path(os.path.realpath(path))
    if path.is_symlink():
        raise OptionError("is a link to itself; choose another path.", argument=argument, value=str(given))
    check_folder(argument, path)
    done = False
    while not done:
        there = path.is_dir()
        if there and not overwrite and any(not _is_working(path, part.name) for part in path.iterdir()):
            problem = f"exists and is not empty; pass {spelled('overwrite=True', '--overwrite')}."
            raise OptionError(problem, argument=argument, value=str(given))
        home, stem = (path, "") if there else (path.parent, f".{path.name}")
        with _named(given, f"{home}{os.sep}{stem}.", str(path / _SAVED)):
            home.mkdir(parents=True, exist_ok=True)
            with locked(home / f"{stem}{_WORKING}.lock"):
                if path.is_dir() != there:
                    continue  # another process has made it meanwhile
                beside = path.with_name(f".{path.name}{_WORKING}.lock")
                if there and beside.exists():  # of a process that was killed before the folder existed
                    with contextlib.suppress(OSError), locked(beside, blocking=False):
                        remove_working(path.parent, f".{path.name}")
                remove_working(home, stem)
                new = new_folder(home, stem)
                try:
                    yield new
                    probe, mode = _new_file(new)
                    probe.unlink()
                    for part in [*new.rglob("*"), new]:
                        if part.is_file():
                            part.chmod(mode)  # safetensors writes files that nobody else can read
                        _to_disk(part)
                    if there:
                        for name in _names(new):
                            if _is_plain(path, name):
                                (new / name).chmod(stat.S_IMODE((path / name).stat().st_mode))
                        _put_in_place(new, path, argument, str(given))
                    else:
                        new.rename(path)
                    _to_disk(path.parent)
                finally:
                    shutil.rmtree(new, ignore_errors=True)
        done = True


def new_folder(home: Path, stem: str) -> Path:
    """Create a working folder with a random name, and return its path."""
    while True:
        path = home / f"{stem}.{secrets.token_hex(4)}{_WORKING}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path


def working_folders(home: Path, stem: str) -> list[Path]:
    """Return the folders of :func:`new_folder` that exist: one of a running process, and those of killed processes."""
    name = re.compile(rf"{re.escape(stem)}\.[0-9a-f]{{8}}{re.escape(_WORKING)}")
    try:
        return [part for part in home.iterdir() if name.fullmatch(part.name) and _is_folder(part)]
    except OSError:
        return []


def remove_working(home: Path, stem: str) -> None:
    """Remove the working folders of killed processes; the caller holds the lock."""
    for part in working_folders(home, stem):
        shutil.rmtree(part, ignore_errors=True)


def read_settled[T](folder: str | os.PathLike[str], read: Callable[[Path], T]) -> T:
    """Return the result of `read`, which reads several files in a folder, so that all files are from the same save.

    `read` gets the folder, or its subfolder with a complete save, if a process was killed while moving the files of
    the save into the folder. If another process saves meanwhile, reading is repeated.
    """
    folder = Path(folder)
    saved = folder / _SAVED
    for _ in range(50):
        before = _seen(folder)
        source = saved if _is_save(saved) else folder
        try:
            content = read(source)
        except (OSError, ValueError):
            if _seen(folder) == before:
                raise
        else:
            if _seen(folder) == before:
                return content
    raise ModelFileError(f"{str(folder)!r} changed while it was being read; load it when no process is saving to it.")


def others_in(folder: Path) -> list[str]:
    """Return the files in a folder that are not part of an scforge model, including links and edited model cards."""
    own = _own_names(folder)
    return [name for name in _names(folder) if name not in own and not _is_working(folder, name.partition("/")[0])]


def others_in_store(folder: Path) -> list[str]:
    """Return the files in a zarr folder that its consolidated metadata do not list, and links.

    Subfolders of an append that was killed before it could list them are those of scforge.
    """
    nodes = _nodes(folder)
    for added in added_in_vain(folder):
        prefix = added.relative_to(folder).as_posix()
        nodes |= {f"{prefix}/{node}".removesuffix("/") for node in _nodes(added)}
    part = re.compile(r"(?:(?P<node>.*)/)?(?:zarr\.json|c(?:/\d+)*)")
    return [
        name
        for name in _names(folder)
        if (match := part.fullmatch(name)) is None
        or (match["node"] or "") not in nodes
        or not _is_plain((folder / name).parent, (folder / name).name)
    ]


def added_in_vain(store: Path) -> list[Path]:
    """Return the subfolders that an append moved into a store before it was killed, which readers do not see."""
    listed, homes = _nodes(store), [store, store / "scforge"]
    subfolders = [part for home in homes if _is_folder(home) for part in home.iterdir() if _ADDED.fullmatch(part.name)]
    return [
        part
        for part in subfolders
        if _is_folder(part)
        and part.relative_to(store).as_posix() not in listed
        and any(own <= _nodes(part) for own in _ADDED_NODES)
    ]


def _nodes(folder: Path) -> set[str]:
    """Return the names of the groups and arrays that the consolidated metadata of a zarr folder list."""
    try:
        return {"", *read_json(folder / "zarr.json")["consolidated_metadata"]["metadata"]}
    except (OSError, MissingFileError, ModelFileError, LookupError, TypeError):
        return set()


def is_model(folder: Path) -> bool:
    """Return whether scforge wrote a folder and all files in it, so that it may be removed."""
    return _is_folder(folder) and bool(_descriptions(folder)) and not others_in(folder)


def remove_model(folder: Path) -> None:
    """Remove a model folder, after renaming it so that no process sees a part; others are kept, with a warning."""
    if not is_model(folder):
        warn(f"{str(folder)!r} contains files that scforge did not write, and is therefore not removed.")
        return
    hidden = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{_WORKING}")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_working(folder: Path, name: str) -> bool:
    """Return whether a name in a folder is of the working files of a save."""
    if name == _SAVED:
        return _is_save(folder / name)
    return name.startswith(".") and name.endswith((_WORKING, f"{_WORKING}.lock"))


def _is_save(folder: Path) -> bool:
    """Return whether a folder contains the complete files of a save, and nothing else."""
    return _is_folder(folder) and bool(_descriptions(folder)) and set(_names(folder)) <= _MODEL_FILES


def _names(folder: Path) -> list[str]:
    """Return the names of all files and links below a folder, relative to it."""
    names: list[str] = []
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if Path(root, name).is_symlink()]
        names += [Path(root, name).relative_to(folder).as_posix() for name in [*files, *links]]
    return names


def _descriptions(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the descriptions that scforge wrote into a folder, by their file names."""
    descriptions: dict[str, dict[str, Any]] = {}
    for name in _DESCRIPTIONS:
        if not _is_plain(folder, name):
            continue
        try:
            content = read_json(folder / name)
        except MissingFileError:  # another process saves meanwhile
            continue
        except ModelFileError:  # damaged, but if it names its version, still by scforge
            content = {"scforge_version": None, "sha256": None}
            if b'"scforge_version"' not in (folder / name).read_bytes():
                continue
        if isinstance(content, dict) and "scforge_version" in content and "sha256" in content:
            descriptions[name] = content
    return descriptions


def _own_names(folder: Path) -> set[str]:
    """Return the names of the files in a folder that belong to scforge."""
    descriptions = _descriptions(folder)
    own = {*descriptions, *_OWN} if descriptions else set()
    for content in descriptions.values():
        sums = content.get("sha256")
        if isinstance(sums, dict):
            own |= _LISTED & sums.keys()
            if _DATA in own and _is_plain(folder, _DATA) and sha256_of(folder / _DATA) != sums.get(_DATA):
                own.remove(_DATA)
    if (
        descriptions
        and _is_plain(folder, _CARD)
        and is_own_card((folder / _CARD).read_bytes().decode(errors="replace"))
    ):
        own.add(_CARD)
    return {name for name in own if not os.path.lexists(folder / name) or _is_plain(folder, name)}


def _is_plain(folder: Path, name: str) -> bool:
    """Return whether a name in a folder is a regular file, reached without a link."""
    path = folder / name
    return path.is_file() and not path.is_symlink() and (path.parent == folder or not path.parent.is_symlink())


def _put_in_place(new: Path, path: Path, argument: str, given: str) -> None:
    """Replace the model in `path` by the files in the working folder `new`."""
    if os.path.lexists(path / _SAVED) and not _is_save(path / _SAVED):
        problem = f"contains {_SAVED!r}, which scforge did not write; choose another name."
        raise OptionError(problem, argument=argument, value=given)
    _move_in(path)
    own = _own_names(path)
    others = {name for name in _names(new) if os.path.lexists(path / name) and name not in own}
    parts = {part.name for part in new.iterdir() if part.is_dir()}
    others |= {name for name in parts if os.path.lexists(path / name) and not _is_folder(path / name)}
    if _CARD in others and own and _is_plain(path, _CARD):
        if sha256_of(path / _CARD) != sha256_of(new / _CARD):
            warn(f"{str(path / _CARD)!r} may have been edited and is kept; it describes the earlier model.")
        (new / _CARD).unlink()
        others.remove(_CARD)
    if others:
        problem = f"contains {listing(sorted(others))}, which is not part of an scforge model; choose another name."
        raise OptionError(problem, argument=argument, value=given)
    _to_disk(new)
    new.rename(path / _SAVED)  # from here on the new model is the one that counts
    _to_disk(path)
    _move_in(path)


def _move_in(path: Path) -> None:
    """Move the files of a complete save into their folder, which also completes the move of a killed process.

    The complete save stays readable until all files are in place.
    """
    saved = path / _SAVED
    if not _is_save(saved):
        return
    names = [name for name in _names(saved) if _is_plain(saved, name)]
    stale = {name for name in _own_names(path) - set(names) if os.path.lexists(path / name)}
    # The old descriptions tell what is stale, so they go last.
    for name in sorted(names, key=lambda name: name in _DESCRIPTIONS):
        if not os.path.lexists(path / name) or _is_plain(path, name):
            _copy(saved / name, path / name)
    for name in sorted(stale, key=lambda name: name in _DESCRIPTIONS):
        (path / name).unlink()
    with contextlib.suppress(OSError):
        (path / "training").rmdir()  # if empty
    _to_disk(path)
    saved.rename(done := path / f".{secrets.token_hex(4)}{_WORKING}")
    shutil.rmtree(done)


def _copy(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, atomically, or a copy where the file system has no hard links."""
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{_WORKING}")
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
            shutil.copymode(source, temporary)
            _to_disk(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _seen(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return an identifier of the files in a folder, which changes with each save."""
    identifiers: dict[str, tuple[int, ...]] = {}
    for name in (*_MODEL_FILES, _SAVED):
        with contextlib.suppress(OSError):
            status = (folder / name).lstat()
            identifiers[name] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return identifiers


@contextlib.contextmanager
def locked(lock: Path, *, blocking: bool = True) -> Iterator[None]:
    """Hold a lock file, which is removed afterwards. If not `blocking`, raises filelock's Timeout."""
    from filelock import FileLock

    if os.path.lexists(lock) and (not _is_plain(lock.parent, lock.name) or lock.stat().st_size):
        raise OptionError(f"{str(lock)!r} is not a lock file by scforge; move it.")
    if lock.exists() and not os.access(lock, os.W_OK):
        raise OptionError(f"{str(lock)!r} belongs to another user; if nobody is writing there, let them remove it.")
    lock.touch()  # raises where no file can be made; there filelock waits without end
    has_locks = True
    with contextlib.suppress(ImportError):  # Windows has other locks
        import fcntl

        # Without locks in the file system, filelock fails or waits without end.
        with tempfile.TemporaryFile(dir=lock.parent) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                has_locks = error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
    if not has_locks:
        warn(f"The file system of {str(lock.parent)!r} has no locks; let only one process write there at a time.")
    with FileLock(lock, blocking=blocking) if has_locks else contextlib.nullcontext():
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextlib.contextmanager
def _named(path: str | os.PathLike[str], *hidden: str) -> Iterator[None]:
    """Name the path given by the user in write errors, instead of a file whose name begins with one of `hidden`."""
    try:
        yield
    except OSError as error:
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        ours = any(name.startswith(prefix) for name in names for prefix in hidden)
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


def swap_in(new: Path, path: Path, *, overwrite: bool) -> None:
    """Swap the folder `new` with `path`, atomically if the system supports it; the caller holds a lock for `path`.

    Otherwise, a process that is killed meanwhile leaves the old folder next to it, and the next call puts it back.
    Without `overwrite`, a folder with content that has appeared there raises an OSError.
    """
    if path.is_dir():
        new.chmod(stat.S_IMODE(path.stat().st_mode))
    if not overwrite:
        new.rename(path)  # replaces an empty folder at most
        return
    left = left_by_swap(path)
    if len(left) == 1 and not os.path.lexists(path):
        left.pop().rename(path)
    for old in left if path.is_dir() else []:  # its replacement was complete
        shutil.rmtree(old)
    if not path.is_dir():
        new.replace(path)
    elif not _exchange(new, path):
        gone = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_GONE}")
        path.rename(gone)
        try:
            new.replace(path)
        except OSError:
            gone.rename(path)
            raise
        gone.rename(new)


def add_to_store(new: Path, store: Path, names: Iterable[str]) -> None:
    """Move the subfolders `names` from the zarr folder `new` to `store`, and then the zarr.json that lists them.

    Until this last step, which is atomic, the store is what it was, because readers open only what its zarr.json lists.
    The caller holds a lock. What an append that was killed has moved there is moved to `new`.
    """
    for part in new.rglob("*"):
        _to_disk(part)
    for left in added_in_vain(store):
        left.rename(new / f"{left.name}{_GONE}")
    for name in names:
        if os.path.lexists(store / name):
            raise OptionError(f"contains {name!r}, which scforge did not write; move it.", path=str(store))
        (new / name).rename(store / name)
        _to_disk((store / name).parent)
    (new / "zarr.json").replace(store / "zarr.json")
    _to_disk(store)


def left_by_swap(path: Path) -> list[Path]:
    """Return the folders that killed processes renamed when they replaced `path`."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(_GONE)}")
    try:
        return [part for part in path.parent.iterdir() if name.fullmatch(part.name) and _is_folder(part)]
    except OSError:
        return []


def _exchange(first: Path, other: Path) -> bool:
    """Exchange the names of two folders, and return whether the system supports it, like Linux on most local disks."""
    import ctypes

    if os.name != "posix" or not hasattr(libc := ctypes.CDLL(None), "renameat2"):
        return False
    here, exchange = -100, 2
    return libc.renameat2(here, os.fsencode(first), here, os.fsencode(other), exchange) == 0


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
        got = "" if first["type"] == "missing" else f", got {first['input']!r:.60}"
        raise ModelFileError(f"{prefix} ({where or 'content'}: {first['msg']}{got}); copy it again.") from error
