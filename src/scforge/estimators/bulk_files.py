"""An embedding while it is being made, by one process or several: a hidden folder beside what it becomes.

The folder ``.NAME.embedding`` beside the output holds ``plan.json`` (what is embedded with what), ``result`` (the
AnnData, of which only the embedding still grows), ``blocks`` (the journal: a small file for each block of cells that is
done, with its checksum), and ``worker-RANK-of-N.lock`` of each process at work.

Shapes: N cells, D dimensions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from filelock import FileLock, Timeout

from scforge._io import atomic_write_text, check_folder, check_writable, new_h5, put_back, read_json, swap_in
from scforge.errors import DataError, OptionError, first_line

if TYPE_CHECKING:
    from anndata import AnnData


_MARK = "scforge_embedding"
"""Attribute of the root of an output: the hash of its plan. Nothing else may be replaced."""

_ENCODING = {"encoding-type": "array", "encoding-version": "0.2.0"}
_AGAIN = "pass overwrite=True (--overwrite) to start again"


class EmbeddingFiles:
    """The output of an embedding, and the folder in which it grows.

    Parameters
    ----------
    output
        Path that ends with ``.zarr`` or ``.h5ad``.
    overwrite
        Replace another embedding at `output`, or an unfinished one that differs.

    Raises
    ------
    OptionError
        If `output` is no such path, or something else is there.
    """

    def __init__(self, output: Path, *, overwrite: bool) -> None:
        if output.suffix not in (".zarr", ".h5ad"):
            raise OptionError(f"output={str(output)!r} ends with neither .zarr nor .h5ad; name the kind of file so.")
        self._is_zarr, self._said = output.suffix == ".zarr", f"output={str(output)!r}"
        output = output.resolve() if output.is_symlink() else output  # the link stays
        self.output, self.overwrite = output, overwrite
        check_folder("output", output.parent)
        self.folder = output.with_name(f".{output.name}.embedding")
        self._lock = self.folder.with_name(f"{self.folder.name}.lock")
        self._result, self._blocks = self.folder / "result", self.folder / "blocks"
        self._array: Any = None
        self._noted: set[int] = set()
        check_writable("output", output)
        self.mark()

    def mark(self) -> str | None:
        """Return the hash of the plan of what is at the output; None if nothing is, or an empty folder.

        Raises
        ------
        OptionError
            If something else is there, which no embedding may replace.
        """
        output = self.output
        put_back(output)
        if not output.exists():
            return None
        if output.is_dir() != self._is_zarr:
            what = "a file, but zarr makes a folder" if self._is_zarr else "a folder, but h5ad is a file"
            raise OptionError(f"{self._said} is {what}; choose another name.")
        if self._is_zarr and not any(output.iterdir()):
            return None
        found = _zarr_mark(output) if self._is_zarr else _h5ad_mark(output)
        if found is None:
            raise OptionError(f"{self._said} exists and is not an embedding that scforge wrote; choose another name.")
        return found

    @contextlib.contextmanager
    def at_work(self, plan: dict[str, Any], rank: int, world_size: int, make: Callable[[], AnnData]) -> Iterator[bool]:
        """Take part in an embedding, and begin it if nobody has; yield False if it is finished already.

        Parameters
        ----------
        plan
            What is embedded with what, JSON-safe; has ``key``, ``n_cells``, ``n_latent`` and ``block_size``.
        rank, world_size
            Which process this is, and of how many.
        make
            Makes the AnnData that the embedding becomes a part of.

        Raises
        ------
        OptionError
            If another embedding is at the output or was begun there, or another process does the same work.
        """
        with contextlib.ExitStack() as held:
            with self._locked():
                # Of several processes the last may come when the others have finished: it must not begin again.
                if self.is_complete(plan) and not (self.overwrite and world_size == 1):
                    if not any(self._workers()):
                        shutil.rmtree(self.folder, ignore_errors=True)  # of a process killed after its last step
                    yield False
                    return
                self._check_taken(plan)
                self._begin(plan, make)
                held.enter_context(self._worker(rank, world_size))
            yield True

    def done(self) -> set[int]:
        """Return the numbers of the blocks that are done."""
        return {int(path.name) for path in self._blocks.iterdir() if path.name.isdecimal()}

    def write(self, block: int, embedding: np.ndarray) -> None:
        """Write the embedding of a block of cells, float32, shape (cells of the block, D), and note that it is done."""
        start = block * self._array.chunks[0]
        self._array[start : start + len(embedding)] = embedding
        atomic_write_text(self._blocks / str(block), json.dumps({"crc32": zlib.crc32(np.ascontiguousarray(embedding))}))
        self._noted.add(block)

    def finish(self, plan: dict[str, Any], n_blocks: int) -> list[int]:
        """Put the output in its place if all blocks are done; return the blocks that have to be done again.

        Blocks that this process has not written are read and compared with their checksums; those that are damaged are
        taken out of the journal.
        """
        with self._locked():
            if not self._result.exists() or len(self.done()) < n_blocks:
                return []  # another process has finished, or will
            if damaged := self._damaged(n_blocks):
                return damaged
            made = self._result if self._is_zarr else self._write_h5ad(plan)
            self._check_taken(plan)
            swap_in(made, self.output)
            shutil.rmtree(self.folder, ignore_errors=True)
        return []

    def is_complete(self, plan: dict[str, Any]) -> bool:
        """Whether the output is there, made as `plan` says."""
        return self.mark() == _hash(plan)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Wait for the lock of the output, and hold it."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._lock):
            try:
                yield
            finally:
                if not self.folder.exists():
                    # Whoever waits for it looks at the output next.
                    self._lock.unlink(missing_ok=True)

    def _check_taken(self, plan: dict[str, Any]) -> None:
        if not self.overwrite and self.mark() not in (None, _hash(plan)):
            raise OptionError(
                f"{self._said} exists and was made of other cells or by another model; choose another "
                "name, or pass overwrite=True (--overwrite)."
            )

    def _begin(self, plan: dict[str, Any], make: Callable[[], AnnData]) -> None:
        """Make the folder, unless it is there already with the same plan."""
        from scforge.data.readers import open_group

        begun = self._begun()
        if begun is not None and begun != plan:
            if not self.overwrite:
                names = [name for name in plan if begun.get(name) != plan[name]]
                raise OptionError(
                    f"an unfinished embedding in {str(self.folder)!r} has another {names[0]}: it was begun "
                    f"{_difference(names[0], begun, plan)}; give the same to go on with it, or {_AGAIN}."
                )
            self._check_alone()
            begun = None
        if begun is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._blocks.mkdir(parents=True)
            _write_frame(self._result, make(), plan)
            atomic_write_text(self.folder / "plan.json", json.dumps(plan))
        for path in self._blocks.glob(".*"):
            path.unlink(missing_ok=True)  # of a process that was killed while it noted a block
        self._array = open_group(self._result, mode="r+")[f"obsm/{plan['key']}"]

    def _begun(self) -> dict[str, Any] | None:
        try:
            return json.loads((self.folder / "plan.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            if self.overwrite:
                return {}
            raise DataError(
                f"{str(self.folder / 'plan.json')!r} is damaged ({first_line(error)}); {_AGAIN}."
            ) from error

    def _workers(self) -> Iterator[tuple[int, int]]:
        """Yield rank and number of processes of each process at work."""
        for path in self.folder.glob("worker-*.lock"):
            if numbers := re.fullmatch(r"worker-(\d+)-of-(\d+)\.lock", path.name):
                try:
                    with FileLock(path, blocking=False):
                        path.unlink()  # of a process that has ended
                except Timeout:
                    yield int(numbers[1]), int(numbers[2])

    def _check_alone(self) -> None:
        for rank, world_size in self._workers():
            raise OptionError(
                f"process {rank} of {world_size} is at work on {str(self.output)!r}; wait until it is done, or stop it."
            )

    def _worker(self, rank: int, world_size: int) -> FileLock:
        """Return the lock of this process, after a look at the others."""
        for other, others in self._workers():
            if others != world_size or other == rank:
                raise OptionError(
                    f"process {other} of {others} is at work on {str(self.output)!r}, and this is process {rank} of "
                    f"{world_size}; give each process a rank of its own and all the same world_size."
                )
        return FileLock(self.folder / f"worker-{rank}-of-{world_size}.lock", blocking=False)

    def _damaged(self, n_blocks: int) -> list[int]:
        """Return the blocks, of other processes or earlier ones, that are not what was written, and forget them."""
        size = self._array.chunks[0]
        damaged = []
        for block in sorted(set(range(n_blocks)) - self._noted):
            note = self._blocks / str(block)
            found = zlib.crc32(np.ascontiguousarray(self._array[block * size : (block + 1) * size]))
            try:
                expected = json.loads(note.read_text(encoding="utf-8"))["crc32"]
            except (ValueError, KeyError, TypeError):
                expected = None
            if found == expected:
                self._noted.add(block)
            else:
                note.unlink()
                damaged.append(block)
        return damaged

    def _write_h5ad(self, plan: dict[str, Any]) -> Path:
        """Write the result as h5ad, block by block."""
        from anndata import AnnData
        from anndata.io import read_elem, write_elem

        from scforge.data.readers import open_group

        path = self.folder / "result.h5ad"
        group = open_group(self._result)
        size = self._array.chunks[0]
        with new_h5(path) as file:
            write_elem(file, "/", AnnData(obs=read_elem(group["obs"]), uns=read_elem(group["uns"])))
            written = file["obsm"].create_dataset(plan["key"], shape=self._array.shape, dtype=np.float32)
            written.attrs.update(_ENCODING)
            for start in range(0, len(written), size):
                written[start : start + size] = self._array[start : start + size]
            file.attrs[_MARK] = _hash(plan)
        return path


def _write_frame(path: Path, adata: AnnData, plan: dict[str, Any]) -> None:
    """Write an AnnData-zarr whose embedding has no values yet."""
    import zarr
    from anndata.io import write_elem

    root = zarr.open_group(path, mode="w", zarr_format=3)
    write_elem(root, "/", adata)
    shape, chunks = (plan["n_cells"], plan["n_latent"]), (plan["block_size"], plan["n_latent"])
    obsm: Any = root["obsm"]
    array = obsm.create_array(plan["key"], shape=shape, chunks=chunks, dtype=np.float32)
    array.attrs.update(_ENCODING)
    root.attrs[_MARK] = _hash(plan)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        zarr.consolidate_metadata(root.store)


def _zarr_mark(path: Path) -> str | None:
    try:
        found = read_json(path / "zarr.json", finite=False)["attributes"][_MARK]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return str(found)


def _h5ad_mark(path: Path) -> str | None:
    try:
        with h5py.File(path, "r") as file:
            found = file.attrs.get(_MARK)
    except OSError:
        return None
    return None if found is None else str(found)


def _hash(plan: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def _difference(name: str, begun: dict[str, Any], plan: dict[str, Any]) -> str:
    if name == "model":
        return "with other weights, options or genes"
    if name == "source":
        return "of other cells, or they have changed since"
    return f"with {name}={begun.get(name)!r}, not {plan[name]!r}"
