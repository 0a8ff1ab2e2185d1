"""A look at a store: what is in it, where it comes from, and whether all of it is still as it was written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scforge.data.store_files import (
    AGAIN,
    CODECS,
    DATASET,
    StoreInfo,
    file_system,
    open_store_group,
    read_measured,
    read_vocab,
)
from scforge.data.store_hash import content_hash, dataset_hash
from scforge.data.stream_errors import reading, reading_errors
from scforge.errors import DataError, redacted

__all__ = ["StoreInspection", "inspect_store", "verify_store"]

_MOST_NAMED = 5
"""Damaged places that are named."""


@dataclass(frozen=True)
class StoreInspection:
    """What a store holds; ``print(inspection)`` shows it.

    Attributes
    ----------
    path
        Path or URL.
    info
        Its description.
    vocab
        Its vocabulary in short.
    columns
        Of each column of obs what it holds, e.g. ``"9 categories"``.
    n_bytes
        Size on disk.
    sources
        Of each source whether it is still as it was, see :func:`inspect_store`.
    verified
        Whether all of it was read and found as it was written.

    Examples
    --------
    >>> import tempfile, scforge
    >>> adata = scforge.datasets.pbmc3k()[:100]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     info = scforge.data.convert(adata, f"{folder}/store.zarr")
    ...     found = scforge.data.inspect_store(f"{folder}/store.zarr")
    >>> found.columns, found.verified, found.info == info
    ({'cell_type': '7 categories'}, False, True)
    """

    path: str
    info: StoreInfo
    vocab: str
    columns: dict[str, str]
    n_bytes: int
    sources: dict[str, str]
    verified: bool

    def __str__(self) -> str:
        info = self.info
        options = ", ".join(f"{name}={value!r}" for name, value in info.options.items() if value is not None)
        rows = {
            "store": f"{self.path} ({self.n_bytes / 1e9:,.3f} GB, {self.n_bytes / info.n_cells / 1e3:,.2f} kB a cell)",
            "cells x genes": f"{info.n_cells:,} x {info.n_genes:,}",
            "expressed genes a cell": f"{info.n_nonzeros / info.n_cells:,.1f}, counts as {info.counts_dtype}",
            "order": f"shuffled, seed {info.seed}" if info.shuffled else "that of the sources",
            "datasets": f"{len(info.datasets):,}, in pieces of {info.chunk_size} cells",
            "obs": ", ".join(f"{name} ({what})" for name, what in self.columns.items()),
            "vocabulary": self.vocab,
            "counts kept": f"{info.counts_kept:.1%}",
            "written": f"{info.created} by scforge {info.scforge_version}",
            "options": options,
            "content hash": f"{info.content_hash} ({'verified' if self.verified else '--verify checks it'})",
        }
        lines = [f"{name:<25}{value}" for name, value in rows.items()]
        for source in info.sources:
            lines.append(
                f"{'source':<25}{source['name']}: {source['n_cells']:,} cells, {source['overlap']:.1%} of the genes, "
                f"{source['counts_kept']:.1%} of its counts; {self.sources[source['name']]}"
            )
        return "\n".join(lines)


def inspect_store(
    path: str | os.PathLike[str], *, verify: bool = False, storage_options: Mapping[str, Any] | None = None
) -> StoreInspection:
    """Look at a store that :func:`scforge.data.convert` wrote.

    Parameters
    ----------
    path
        Path or URL of the store.
    verify
        Whether to read all of it and to compare it with the hashes from when it was written.
    storage_options
        Options of the file system of a URL, see fsspec.

    Returns
    -------
    What is in it. A source is ``"unchanged"`` if its size and its time of change are those of the conversion,
    ``"changed since"``, ``"not there any more"``, or ``"not checked"`` if it is no local file.

    Raises
    ------
    MissingFileError
        If there is nothing of that name.
    DataError
        If it is no store, one that a conversion has not finished, or, with `verify`, a damaged one.

    Examples
    --------
    >>> import scforge
    >>> info = scforge.data.convert(scforge.datasets.pbmc3k(), "store.zarr")
    >>> found = inspect_store("store.zarr", verify=True)
    >>> found.info == info, found.columns["cell_type"], found.verified
    (True, '9 categories', True)
    """
    name = os.fspath(path)
    group, info = open_store_group(path, storage_options)
    if verify:
        verify_store(path, storage_options=storage_options)
    with reading(f"the store {name!r}", fix=AGAIN):
        vocab = read_vocab(group)
        columns = {column: _column(group, column) for column in info.obs_columns}
        n_bytes = _size(name, storage_options)
    return StoreInspection(
        path=redacted(name),
        info=info,
        vocab=repr(vocab),
        columns=columns,
        n_bytes=n_bytes,
        sources={source["name"]: _state(source) for source in info.sources},
        verified=verify,
    )


def _column(group: Any, name: str) -> str:
    stored = group[DATASET.format(0)]["obs"][name]
    if hasattr(stored, "dtype"):
        return str(stored.dtype)
    return f"{stored['categories'].shape[0]} categories" if "categories" in stored else "text"


def _size(name: str, storage_options: Mapping[str, Any] | None) -> int:
    system, root = file_system(name, storage_options)
    return int(system.du(root))


def _state(source: Mapping[str, Any]) -> str:
    if "mtime_ns" not in source:
        return "not checked"
    try:
        found = Path(source["name"]).stat()
    except FileNotFoundError:
        return "not there any more"
    same = (found.st_size, found.st_mtime_ns) == (source.get("size"), source["mtime_ns"])
    return "unchanged" if same else "changed since"


def verify_store(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Read all of a store, some of it at a time, and compare it with the hashes from when it was written.

    Parameters
    ----------
    path
        Path or URL of the store.
    storage_options
        Options of the file system of a URL, see fsspec.

    Raises
    ------
    DataError
        If it is damaged; the message names the datasets and the cells.
    """
    import zarr

    name = os.fspath(path)
    group, info = open_store_group(path, storage_options)
    problems = []
    with zarr.config.set(CODECS), reading(f"the store {name!r}", fix=AGAIN):
        for number, dataset in enumerate(info.datasets):
            problems += _dataset_problems(group, DATASET.format(number), dataset)
        problems += _root_problems(group, info)
    hashes = [dataset["hash"] for dataset in info.datasets]
    if not problems and content_hash(info.vocab_hash, hashes) != info.content_hash:
        problems.append("its description does not fit its content hash")
    if problems:
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise DataError(f"the store {name!r} is damaged: {'; '.join(problems[:_MOST_NAMED])}{more}; {AGAIN}.")


def _root_problems(group: Any, info: StoreInfo) -> Iterator[str]:
    try:
        with reading("the vocabulary"):
            vocab, measured = read_vocab(group), read_measured(group)
        if vocab.hash != info.vocab_hash:
            yield "its vocabulary is another one than was written"
        if measured.shape != (len(info.sources), info.n_genes):
            yield "the table of the genes that each source has is of another size"
    except DataError:
        yield "its vocabulary cannot be read"


def _dataset_problems(group: Any, name: str, expected: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a dataset, each as part of a sentence."""
    from anndata.io import read_elem

    if name not in group:
        return [f"{name} is missing"]
    try:
        indptr = group[f"{name}/X/indptr"][...].astype(np.int64)
        indices, data = group[f"{name}/X/indices"], group[f"{name}/X/data"]
    except reading_errors():
        return [f"the row boundaries of {name} cannot be read"]
    if len(indptr) != expected["n_cells"] + 1 or (np.diff(indptr) < 0).any() or indptr[-1] != data.shape[0]:
        return [f"the row boundaries of {name} are not those that were written"]
    try:
        obs = read_elem(group[f"{name}/obs"])
    except reading_errors():
        return [f"the table of cells of {name} cannot be read"]
    try:
        if dataset_hash(indptr, indices, data, obs) == expected["hash"]:
            return []
    except reading_errors():
        pass  # which of the pieces it is comes next
    broken = [f"cells {first} to {last} of {name}" for first, last in _broken_cells(indptr, indices, data)]
    return broken or [f"{name} has other content than was written"]


def _broken_cells(indptr: np.ndarray, indices: Any, data: Any) -> list[tuple[int, int]]:
    """Return first and last cell of what cannot be read, or holds a zero, as does what is missing."""
    found: list[tuple[int, int]] = []
    for part, no_zeros in ((indices, False), (data, True)):
        for start in range(0, part.shape[0], part.chunks[0]):
            stop = min(start + part.chunks[0], part.shape[0])
            try:
                piece = part[start:stop]
                sound = not (no_zeros and (piece == 0).any())
            except reading_errors():
                sound = False
            if not sound:
                first, last = np.searchsorted(indptr, [start, stop - 1], side="right") - 1
                found.append((int(first), int(last)))
    joined: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined
