"""Stores, i.e. zarr folders of shuffled cells that are read in chunks during training."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import anndata
import numpy as np
import pandas as pd
import zarr
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from scipy import sparse
from zarr.codecs import Crc32cCodec, ZstdCodec

from scforge.data.cells import CellBlock, CellSource, choose_chunks, column_of
from scforge.data.checks import (
    boundary_problem,
    canonical,
    index_problem,
    pick_genes,
    row_checksums,
    row_sums,
    unsound_row,
    value_problem,
)
from scforge.data.genes import MIN_OVERLAP, GeneMap, map_names, warn_counts_outside, warn_empty
from scforge.data.paths import STORE_KEY, check_exists, holds_store, is_unfinished, is_url
from scforge.data.remote import CHECKSUM, file_system, metadata_checksum, open_group, reading, root_attributes
from scforge.data.sampling import Window
from scforge.data.vocab import GeneVocab, open_vocab
from scforge.errors import DataError, MissingFileError, ModelFileError, redacted, suggest

CODECS = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}
"""Zarr setting: zarrs compresses and decompresses chunks in separate threads, three times as fast as zarr's Python
code. For data at a URL, which zarrs cannot read, zarr is used."""

CHUNK_SIZE = 256
"""Number of cells per chunk of a store, also assumed for collections that do not specify it."""

TOTAL = "scforge_total"
"""Column of ``obs`` with the total counts of each cell over all genes of the data."""

SOURCE = "scforge_source"
"""Column of ``obs`` with the source of a cell."""

OWN_COLUMNS = (TOTAL, SOURCE)
"""Columns of ``obs`` that scforge adds."""

DATASET = "dataset_{}"
"""Name pattern of the groups that contain cells."""

ADDED = "added_{}"
"""Name pattern of the groups in the group ``"scforge"`` with the arrays of appended cells; the number is that of the
first of their datasets."""

_CHECKSUMS = "checksums"
"""Array in the group ``"scforge"`` with a checksum of each cell, see :func:`scforge.data.checks.row_checksums`. Readers
unpack parts of a chunk without comparing the checksum of the chunk."""

CHECKED = (ZstdCodec(), Crc32cCodec())
"""Codecs of all arrays of a store, except those of the counts, that compress and add a checksum."""

_FORMAT, _GROWN_FORMAT = 1, 2
"""Format versions of the attribute ``"scforge"``. A store to which cells were appended has the second one, because
earlier versions of scforge do not look for the checksums of appended cells."""

_ENCODING = {"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"}
_AGAIN = "copy the store again, or convert the data again"

_STEP = 2**22
"""Number of entries in memory at a time."""

_SETTINGS: dict[str, Any] = {"threading.max_workers": max(1, (os.cpu_count() or 1) // 2)}
"""Zarr settings: half of the cores decompress, and the other cores are left for tokenization."""

_SAMPLED = 4096
"""Number of cells sampled to estimate the fraction of counts outside a vocabulary."""

_COMPLETE = "of each cell, each column and the metadata"

_INCOMPLETE = "lacking for cells, columns and the metadata; only --verify finds all damage, or convert the data again"


@checked_dataclass(frozen=True, config=ConfigDict(strict=True, extra="ignore"))
class StoreInfo:
    """Description of a store, as :func:`scforge.data.convert` writes it; ``print(info)`` shows it.

    Attributes
    ----------
    n_cells, n_nonzeros, n_genes
        Number of cells, of nonzero counts, and of vocabulary genes.
    vocab_hash
        Hash of the vocabulary, including its medians.
    counts_dtype
        ``"uint16"``, or ``"uint32"`` if a count is above 65,535.
    shuffled, seed
        Whether the cells are in random order, and the seed of this order.
    chunk_size
        Number of consecutive cells that are stored together.
    obs_columns
        Columns of the cell table, without the columns that scforge adds.
    content_hash
        Hexadecimal SHA-256 hash of `vocab_hash` and the hash of each dataset, see :func:`dataset_hash`.
    datasets
        For each dataset, ``n_cells``, ``n_nonzeros`` and ``hash``.
    sources
        For each source, ``name``, ``n_cells``, ``n_genes``, ``overlap`` (fraction of the vocabulary genes in the
        source), ``counts_kept``, and the fingerprint.
    counts_kept
        Fraction of all counts that are in vocabulary genes.
    options
        Arguments of the conversion; ``"appended"`` contains those of each append.
    created, scforge_version
        Time (UTC) at which the store was written or last appended to, and the version of scforge that did this.
    """

    n_cells: PositiveInt
    n_nonzeros: NonNegativeInt
    n_genes: PositiveInt
    vocab_hash: str
    counts_dtype: str
    shuffled: bool
    seed: int | None
    chunk_size: Annotated[int, Field(gt=0, lt=2**31)]
    obs_columns: list[str]
    content_hash: str
    datasets: list[dict[str, Any]]
    sources: list[dict[str, Any]]
    counts_kept: Annotated[float, Field(ge=0, le=1)]
    options: dict[str, Any]
    created: str
    scforge_version: str

    @classmethod
    def read(cls, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> StoreInfo:
        """Read the description of a store, given its path or URL.

        Raises
        ------
        MissingFileError
            If the path or URL does not exist.
        DataError
            If it is not a store, the conversion has not finished, or the store was written by a later version.
        """
        return cls._of(_attributes(path, storage_options), repr(os.fspath(path)))

    @classmethod
    def _of(cls, attributes: Mapping[str, Any], where: str) -> StoreInfo:
        content = attributes.get(STORE_KEY)
        if not isinstance(content, dict):
            problem = "is a folder but not a store; pass a folder that was written by scforge convert"
            kind = attributes.get("encoding-type")
            if kind == "anndata":
                problem = "is an AnnData, not a store; create a store with scforge convert SOURCE -o STORE"
            elif kind == _ENCODING["encoding-type"]:
                problem = "is an annbatch collection from another program; convert its data with scforge convert"
            raise DataError(f"{where} {problem}.")
        if content.get("format") not in (_FORMAT, _GROWN_FORMAT):
            raise DataError(f"{where} has format {content.get('format')!r} of a later scforge version; update scforge.")
        try:
            return cls(**content)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            raise DataError(
                f"{where} is a corrupted store: {'.'.join(map(str, wrong['loc']))!r} in its metadata is invalid "
                f"({wrong['msg']}); convert the data again."
            ) from error

    def __str__(self) -> str:
        seed = f"shuffled, seed {self.seed}" if self.shuffled else "in the order of the sources"
        rows = {
            "cells x genes": f"{self.n_cells:,} x {self.n_genes:,} ({seed})",
            "genes a cell": f"{self.n_nonzeros / self.n_cells:,.1f}, counts as {self.counts_dtype}",
            "datasets": f"{len(self.datasets):,}",
            "obs": ", ".join(self.obs_columns) or "no columns",
            "counts kept": f"{self.counts_kept:.1%}",
            "content": self.content_hash[:16],
            "written": f"{self.created} by scforge {self.scforge_version}",
        }
        return "\n".join(f"{name:<25}{value}" for name, value in rows.items())


def may_be_store(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a folder, a URL, or a store that is being written, i.e. anything but a file."""
    if is_url(path):
        return True
    return Path(path).is_dir() or is_unfinished(path)


def is_store(path: str | os.PathLike[str]) -> bool:
    """Return whether a path or URL is a complete scforge store; False if it does not exist."""
    if not is_url(path):
        return holds_store(Path(path))
    try:
        return isinstance(_attributes(path).get(STORE_KEY), dict)
    except (DataError, MissingFileError):
        return False


def _attributes(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the root attributes of a zarr folder, or an empty dict if the folder is not a zarr v3 group."""
    name = os.fspath(path)
    attributes = root_attributes(name, storage_options)
    if attributes is not None:
        return attributes
    system, root = file_system(name, storage_options)
    if system.isdir(root):
        return {"encoding-type": "anndata"} if system.exists(f"{root}/.zattrs") else {}
    if system.exists(root):
        raise DataError(f"{name!r} is a file, but a store is a folder; create one with scforge convert FILE -o STORE.")
    if not is_url(name) and is_unfinished(name):
        raise DataError(f"{name!r} is incomplete; run the same scforge convert command again.")
    if not is_url(name):
        check_exists(name)
    raise MissingFileError(f"the store {name!r} does not exist.")


def read_vocab(group: Any) -> GeneVocab:
    """Return the vocabulary of an open store, with the medians of its genes."""
    content = bytes(_part(group, "vocab").astype(np.uint8))
    try:
        return GeneVocab.from_json(content)
    except ModelFileError as error:
        raise DataError(f"the vocabulary of the store {str(group.store_path)!r} is corrupted; {_AGAIN}.") from error


def _opened(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> tuple[Any, bool]:
    """Open the root group of a store, and return whether it has a checksum of each cell; those of 0.1.0 have none."""
    group: Any = open_group(path, storage_options)
    with reading(repr(os.fspath(path)), how="as a store", fix=_AGAIN):
        group.store.is_complete = has_checksums(group)
    return group, group.store.is_complete


def has_checksums(group: Any) -> bool:
    """Return whether an open store has a checksum of each cell."""
    return f"{STORE_KEY}/{_CHECKSUMS}" in group


def read_measured(group: Any) -> np.ndarray:
    """Return a mask of the vocabulary genes in each source, bool, shape (n_sources, n_genes)."""
    return _parts(group, "measured").astype(bool)


def _parts(group: Any, name: str) -> np.ndarray:
    """Return an array of the group ``"scforge"``, followed by the same array of all appended cells."""
    with reading(f"the store {str(group.store_path)!r}", fix=_AGAIN):
        matches = [re.fullmatch(ADDED.format(r"(\d+)"), key) for key in group[STORE_KEY].group_keys()]
    added = [ADDED.format(number) for number in sorted(int(match[1]) for match in matches if match)]
    return np.concatenate([_part(group, name), *(_part(group, f"{key}/{name}") for key in added)])


def _part(group: Any, name: str) -> np.ndarray:
    key = f"{STORE_KEY}/{name}"
    with reading(f"{key!r} of the store {str(group.store_path)!r}", fix=_AGAIN):
        return np.asarray(group[key][...])


def write_root(
    folder: Path, info: StoreInfo, vocab: GeneVocab, measured: np.ndarray, checksums: Sequence[np.ndarray]
) -> None:
    """Write the metadata of a store and the checksums of the cells of each dataset, and consolidate the metadata."""
    root = zarr.open_group(folder, mode="a", zarr_format=3)
    vocab_json = np.frombuffer(vocab.to_json().encode(), dtype=np.uint8)
    _write_arrays(root, STORE_KEY, {"vocab": vocab_json, "measured": measured, _CHECKSUMS: np.concatenate(checksums)})
    # A collection of annbatch as well.
    root.attrs.put({**_ENCODING, STORE_KEY: {"format": _FORMAT, **asdict(info)}})
    _consolidate(root)
    _write_signed(folder, json.loads((folder / "zarr.json").read_text(encoding="utf-8")))


def write_added(
    folder: Path, store: Path, info: StoreInfo, measured: np.ndarray, checksums: Sequence[np.ndarray], first: int
) -> list[str]:
    """Write the arrays of appended cells, and the zarr.json that `store` will have; return the names of the new groups.

    `folder` contains the new datasets, the first of which has the number `first`. `measured` and `checksums` are those
    of the new sources and cells.
    """
    root = zarr.open_group(folder, mode="a", zarr_format=3)
    added = f"{STORE_KEY}/{ADDED.format(first)}"
    _write_arrays(root, added, {"measured": measured, _CHECKSUMS: np.concatenate(checksums)})
    _consolidate(root[added])  # by which a later append recognizes what a killed one has left
    _consolidate(root)
    document, new = (json.loads((place / "zarr.json").read_text(encoding="utf-8")) for place in (store, folder))
    nodes = new["consolidated_metadata"]["metadata"]
    del nodes[STORE_KEY]  # the group of the store, not that of its new part
    document["consolidated_metadata"]["metadata"] |= nodes
    document["attributes"][STORE_KEY] = {"format": _GROWN_FORMAT, **asdict(info)}
    _write_signed(folder, document)
    return [*(DATASET.format(number) for number in range(first, len(info.datasets))), added]


def _write_arrays(root: Any, group: str, arrays: Mapping[str, np.ndarray]) -> None:
    part = root.create_group(group, overwrite=True)
    with zarr.config.set({"array.write_empty_chunks": True}):
        for name, values in arrays.items():
            part.create_array(name, data=values, compressors=CHECKED)


def _consolidate(group: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        zarr.consolidate_metadata(group.store, path=group.path)


def _write_signed(folder: Path, document: dict[str, Any]) -> None:
    """Write the zarr.json of a store with a checksum of its content."""
    document["attributes"][CHECKSUM] = metadata_checksum(document)
    (folder / "zarr.json").write_text(json.dumps(document, indent=2), encoding="utf-8")


def dataset_hash(indptr: Any, indices: Any, data: Any, obs: pd.DataFrame) -> str:
    """Return the SHA-256 hash of a dataset, which does not depend on how its arrays are compressed.

    The hash covers the raw little-endian bytes of ``indptr`` (int64), ``indices`` (uint32) and ``data`` (uint32), of
    each column of ``obs`` (the int32 codes of a categorical column, and the values of any other column), and of the
    cell names (UTF-8, each followed by a zero byte). Arrays may be NumPy or zarr arrays.
    """
    digest = hashlib.sha256()
    for part, dtype in ((indptr, "<i8"), (indices, "<u4"), (data, "<u4")):
        for start in range(0, part.shape[0], _STEP):
            digest.update(np.ascontiguousarray(part[start : start + _STEP], dtype=dtype))
    for column in obs.columns:
        values = obs[column]
        codes = values.cat.codes.to_numpy("<i4") if hasattr(values, "cat") else values.to_numpy()
        digest.update(np.ascontiguousarray(codes, dtype=codes.dtype.newbyteorder("<")))
    digest.update("".join(f"{name}\0" for name in obs.index).encode())
    return digest.hexdigest()


def content_hash(vocab_hash: str, datasets: Iterable[str]) -> str:
    """Return the SHA-256 hash of a store, given the hashes of its vocabulary and its datasets."""
    return hashlib.sha256("".join([vocab_hash, *datasets]).encode()).hexdigest()


def joined_categories(parts: Sequence[pd.Categorical]) -> pd.Categorical:
    """Concatenate categorical columns, with all categories in the order of their first appearance."""
    first = parts[0].categories
    if all(part.categories.equals(first) and part.ordered == parts[0].ordered for part in parts):
        codes = np.concatenate([part.codes for part in parts])
        return pd.Categorical.from_codes(codes, first, ordered=parts[0].ordered)
    categories = pd.Index(list(dict.fromkeys(category for part in parts for category in part.categories)))
    # The code -1, of a missing value, takes the last.
    joined = [np.append(categories.get_indexer(part.categories), -1)[part.codes] for part in parts]
    return pd.Categorical.from_codes(np.concatenate(joined), categories)


class _Store:
    """A store, or another annbatch collection, read by rows.

    Attributes
    ----------
    place
        Path or URL.
    vocab
        The vocabulary of the store, or a vocabulary of the genes of the collection.
    genes, measured
        Names of the columns, and whether any source measures them, shape (S,).
    lengths
        Number of entries of each row, unsigned, shape (N,).
    obs
        The selected columns of obs, N numbered rows.
    totals
        Total counts of each cell over all genes of the data, as integers if possible, shape (N,); None if not stored.
    checksums
        Checksum of each cell, uint32, shape (N,); None if not stored.
    content_hash
        Hash of the content, see :class:`StoreInfo`; None if not stored.
    is_own
        Whether scforge has written the store.
    """

    def __init__(
        self, path: str | os.PathLike[str], obs: Sequence[str] | None, storage_options: Mapping[str, Any] | None
    ) -> None:
        self.place = os.fspath(path)
        if not is_url(path) and not Path(path, "zarr.json").is_file():
            StoreInfo.read(path)  # raises an error that describes the folder
        group, is_checked = _opened(path, storage_options)
        self.is_own = STORE_KEY in group.attrs or group.attrs.get("encoding-type") != _ENCODING["encoding-type"]
        info = StoreInfo._of(group.attrs, repr(self.place)) if self.is_own else None
        self.checksums = _parts(group, _CHECKSUMS) if is_checked and info is not None else None
        self._datasets = self._found_datasets(group)
        self._matrices, lengths = zip(*map(self._matrix, self._datasets), strict=True)
        self.lengths = np.concatenate(lengths)
        self.totals: np.ndarray | None = None
        self.n_sources = 1 if info is None else len(info.sources)
        self.content_hash: str | None = None
        if info is not None:
            expected = {DATASET.format(i): (part["n_cells"], info.n_genes) for i, part in enumerate(info.datasets)}
            pairs = zip(self._datasets, self._matrices, strict=True)
            stored = {dataset.basename: tuple(matrix.shape) for dataset, matrix in pairs}
            for name in expected | stored:
                if stored.get(name) != expected.get(name):
                    shape, wanted = stored.get(name, "(missing)"), expected.get(name, "no such dataset")
                    raise self._damaged(f"the counts of {name} have shape {shape}, expected {wanted}")
            self.vocab, measured = read_vocab(group), read_measured(group)
            shares = [source["overlap"] for source in info.sources]
            if self.vocab.hash != info.vocab_hash or not np.allclose(measured.mean(axis=1), shares):
                raise self._damaged("its vocabulary or the genes of its sources do not match its metadata")
            self.genes = np.array(self.vocab.genes, dtype=object).astype(str)
            self.measured = measured.any(axis=0)
            self._has_all_counts, self.content_hash = info.counts_kept == 1.0, info.content_hash
            self.totals = np.concatenate([self._read_totals(dataset) for dataset in self._datasets])
            if not self.totals.all():  # in a store of an earlier version, missing chunks come as zeros
                raise self._damaged(f"the column {TOTAL} of its cells contains zeros")
            for name, values in {TOTAL: self.totals, _CHECKSUMS: self.checksums}.items():
                if values is not None and values.shape != (len(self),):
                    raise self._damaged(f"{name} has the wrong length")
            self.counts_kept, self.chunk_size, self.shuffled = info.counts_kept, info.chunk_size, info.shuffled
        else:
            self._set_foreign_genes()
            self.counts_kept, self.chunk_size, self.shuffled = 1.0, CHUNK_SIZE, True
        self.obs = self._table(info.obs_columns if info is not None and obs is None else obs)
        self._windows: Any = None
        self._begins = threading.Lock()

    def _damaged(self, problem: str) -> DataError:
        return DataError(f"{self.place!r} is corrupted: {problem}; {_AGAIN}.")

    def _found_datasets(self, group: Any) -> list[Any]:
        with reading(f"{self.place!r}", how="as a store", fix=_AGAIN):
            matches = [re.fullmatch(r"dataset_(\d+)", key) for key in group.group_keys()]
            datasets = [group[DATASET.format(number)] for number in sorted(int(match[1]) for match in matches if match)]
            for dataset in datasets:
                kind = dataset["X"].attrs.get("encoding-type") if "X" in dataset else "missing"
                if kind != "csr_matrix":
                    raise DataError(
                        f"X of {dataset.basename} of {self.place!r} is {kind}, not csr_matrix; convert the data with "
                        "scforge convert."
                    )
        if not datasets:
            raise self._damaged("it contains no dataset")
        return datasets

    def _matrix(self, dataset: Any) -> tuple[Any, np.ndarray]:
        """Return the matrix of a dataset, and the number of entries in each row."""
        with reading(f"{dataset.basename} of {self.place!r}", fix=_AGAIN):
            matrix = anndata.io.sparse_dataset(dataset["X"])
            indptr = np.asarray(dataset["X/indptr"][...])
            n_entries = dataset["X/data"].shape[0]
        problem = boundary_problem(indptr, n_entries)
        if problem is not None or len(indptr) != matrix.shape[0] + 1 or indptr[-1] != n_entries:
            problem = problem or "indptr does not match the number of cells and entries"
            raise DataError(f"{dataset.basename} of {self.place!r} is corrupted: {problem}; {_AGAIN}.")
        lengths = np.diff(indptr)
        return matrix, lengths.astype(np.min_scalar_type(int(lengths.max(initial=0))))

    def _read_totals(self, dataset: Any) -> np.ndarray:
        """Return the total of each cell, as 32-bit integers if they fit."""
        totals = self._read(dataset, "obs", TOTAL)
        fit = ((totals == np.floor(totals)) & (totals < 2**32)).all()
        return totals.astype(np.uint32) if fit else totals

    def _set_foreign_genes(self) -> None:
        """Set the genes from the columns of a collection that was not written by scforge."""
        self.genes = self._index(self._datasets[0], "var")
        for dataset in self._datasets[1:]:
            if not np.array_equal(self._index(dataset, "var"), self.genes):
                raise DataError(
                    f"{dataset.basename} of {self.place!r} has different genes than the first dataset, or a different "
                    "gene order; convert the data with scforge convert."
                )
        self.vocab = GeneVocab.from_genes(list(dict.fromkeys(self.genes.tolist())))
        self.measured = np.ones(len(self.genes), dtype=bool)

    def _read(self, dataset: Any, table: str, name: str) -> Any:
        with reading(f"{dataset.basename}/{table}/{name} of {self.place!r}", fix=_AGAIN):
            return anndata.io.read_elem(dataset[table][name])

    def _index(self, dataset: Any, table: str) -> np.ndarray:
        with reading(f"{dataset.basename}/{table} of {self.place!r}", fix=_AGAIN):
            name = str(dataset[table].attrs["_index"])
        return np.asarray(self._read(dataset, table, name), dtype=object).astype(str)

    def _table(self, columns: Sequence[str] | None) -> pd.DataFrame:
        """Return obs columns of all datasets with numbered rows; differing categories are merged."""
        stored = [str(column) for column in self._datasets[0]["obs"].attrs.get("column-order", [])]
        available = [column for column in stored if column == SOURCE or column not in OWN_COLUMNS]
        table: dict[str, Any] = {}
        for column in [column for column in available if column != SOURCE] if columns is None else columns:
            if column not in available:
                raise DataError(
                    f"contains {column!r}, which is not a column of {self.place!r}"
                    f"{suggest(column, available, 'available')}",
                    argument="obs",
                )
            parts = [self._read(dataset, "obs", column) for dataset in self._datasets]
            if all(isinstance(part, pd.Categorical) for part in parts):
                table[column] = joined_categories(parts)
            else:
                table[column] = pd.concat([pd.Series(part) for part in parts], ignore_index=True)
        return pd.DataFrame(table, index=pd.RangeIndex(len(self)))

    def __len__(self) -> int:
        return len(self.lengths)

    def names(self) -> np.ndarray:
        """Return the cell names, str, shape (N,)."""
        return np.concatenate([self._index(dataset, "obs") for dataset in self._datasets])

    def sources(self) -> pd.Series | None:
        """Return the source of each cell, length N; None if there is a single source."""
        return self._table([SOURCE])[SOURCE] if self.n_sources > 1 else None

    def batches(self, windows: Iterable[Window]) -> Iterator[tuple[np.ndarray, int, sparse.csr_matrix]]:
        """Yield the rows, the draw number, and the counts (sorted, without zeros) of each batch in each window."""
        requested: deque[tuple[np.ndarray, int]] = deque()

        def watched() -> Iterator[Window]:
            for window in windows:
                requested.extend((rows, window.draw) for rows in window.batches())
                yield window

        with reading(f"a cell of {self.place!r}", fix=_AGAIN):
            for counts in self._loaded(watched()):
                rows, draw = requested.popleft()
                yield rows, draw, self._cleaned(rows, counts)

    def _loaded(self, windows: Iterator[Window]) -> Iterator[sparse.csr_matrix]:
        # Only here, because annbatch imports torch, which an inspection does without.
        from scforge.data.windows import PIPELINE, window_loader

        # The first step of a pass takes the windows, and opens the arrays.
        with self._begins, zarr.config.set({**_SETTINGS, "codec_pipeline.path": PIPELINE}):
            self._windows = self._windows or window_loader(self._matrices)
            sampler, loader = self._windows
            sampler.windows = windows
            passing = iter(loader)
            first = next(passing, None)
        if first is not None:
            yield first["X"]
            del first
            for batch in passing:
                yield batch["X"]

    def _cleaned(self, rows: np.ndarray, counts: sparse.csr_matrix) -> sparse.csr_matrix:
        """Return sorted counts without zeros. Raises a DataError if counts have changed, as far as this is known."""
        if self.checksums is not None:
            assert self.totals is not None
            checksums = row_checksums(counts.indptr, counts.indices, counts.data, self.totals[rows])
            if (wrong := checksums != self.checksums[rows]).any():
                raise self._changed(rows[wrong.argmax()])
            return counts
        if counts.dtype.kind != "u" and (problem := value_problem(counts.data)):
            raise DataError(f"{self.place!r} {problem}, but raw counts are needed; convert raw counts.")
        if (wrong := np.diff(counts.indptr) != self.lengths[rows]).any():
            raise self._changed(rows[wrong.argmax()])
        row = unsound_row(counts.indptr, counts.indices, counts.data, counts.shape[1])
        if row >= 0:
            if problem := index_problem(counts.indices, len(self.genes)):
                raise self._damaged(f"cell {rows[row]}: {problem}")
            if self.is_own:
                raise self._changed(rows[row])
            return canonical(counts)
        if self.totals is not None:
            sums, totals = row_sums(counts), self.totals[rows]
            if (wrong := (sums != totals) if self._has_all_counts else (sums > totals)).any():
                raise self._changed(rows[wrong.argmax()])
        return counts

    def _changed(self, row: int) -> DataError:
        return self._damaged(f"cell {row}: its counts have changed since they were written")


@dataclass(frozen=True, eq=False)
class StoreCells:
    """Cells of a store written by :func:`scforge.data.convert`, or of another annbatch collection of counts.

    Open a store with :meth:`open` or :func:`scforge.data.open_cells`. It requires a few bytes of memory per cell (row
    boundaries, number of genes, library size, and the selected columns of obs), regardless of the number of counts.

    Attributes
    ----------
    vocab
        The vocabulary of the counts.
    overlap, counts_kept, measured
        See :class:`~scforge.data.Cells`. In a store of several files, a gene is measured if any file contains it.
    obs
        The selected columns of obs, with numbered rows.
    chunk_size
        Number of consecutive cells that are stored together.
    place
        Path or URL.
    shuffled
        Whether the cells are in random order.

    Examples
    --------
    >>> import tempfile, numpy as np, scforge
    >>> adata = scforge.datasets.pbmc3k()[:200]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     info = scforge.data.convert(adata, f"{folder}/store.zarr")
    ...     cells = StoreCells.open(f"{folder}/store.zarr", obs=["cell_type"])
    ...     block = cells.block(np.arange(10))
    >>> len(cells), cells.vocab.n_genes, len(block), list(cells.obs)
    (200, 16634, 10, ['cell_type'])
    """

    vocab: GeneVocab
    overlap: float
    counts_kept: float
    measured: np.ndarray | None
    obs: pd.DataFrame = field(repr=False)
    chunk_size: int
    place: str = field(repr=False)  # a URL may hold credentials
    shuffled: bool
    _store: _Store = field(repr=False)
    _gene_map: GeneMap | None = field(repr=False)
    _own_totals: bool = field(default=False, repr=False)
    """Whether library sizes are the counts in vocabulary genes."""

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        vocab: str | os.PathLike[str] | GeneVocab | None = None,
        *,
        obs: Sequence[str] | None = None,
        min_overlap: float = MIN_OVERLAP,
        storage_options: Mapping[str, Any] | None = None,
    ) -> StoreCells:
        """Open a store.

        Parameters
        ----------
        path
            Folder, or a URL that fsspec supports, e.g. ``"s3://bucket/store.zarr"``.
        vocab
            Vocabulary to map the genes to by name. If None, uses the vocabulary of the store.
        obs
            Columns of ``obs`` to load. If None, loads all columns.
        min_overlap
            Minimum fraction of the genes of `vocab` in the store.
        storage_options
            Options for the file system of a URL, see fsspec.

        Raises
        ------
        MissingFileError
            If `path` does not exist.
        DataError
            If `path` is not a store, is incomplete or corrupted, or a column is missing.
        GeneMismatchError
            If too few genes of `vocab` are in the store.

        Warns
        -----
        ScforgeWarning
            If cells express no vocabulary gene, and for genes as in :func:`scforge.data.open_cells`.
        """
        with reading(repr(os.fspath(path)), how="as a store", fix=_AGAIN):
            store = _Store(path, obs, storage_options)
        cells = cls(
            vocab=store.vocab,
            overlap=1.0,
            counts_kept=store.counts_kept,
            measured=None,
            obs=store.obs,
            chunk_size=store.chunk_size,
            place=store.place,
            shuffled=store.shuffled,
            _store=store,
            _gene_map=None,
        )
        return cells.with_vocab(store.vocab if vocab is None else open_vocab(vocab), min_overlap=min_overlap)

    def with_vocab(self, vocab: GeneVocab, *, min_overlap: float = MIN_OVERLAP) -> StoreCells:
        """Return the same cells over the genes of another vocabulary, mapped by name.

        Parameters
        ----------
        vocab
            The other vocabulary.
        min_overlap
            Minimum fraction of the genes of `vocab` in the store.

        Raises
        ------
        GeneMismatchError
            If too few genes of `vocab` are in the store.
        """
        store = self._store
        if len(store.genes) == vocab.n_genes and np.array_equal(store.genes, np.array(vocab.genes)):
            measured = store.measured
            cells = replace(self, vocab=vocab, counts_kept=store.counts_kept, measured=measured, _gene_map=None)
            warn_empty(store.lengths)
        else:
            gene_map = map_names(store.genes, vocab, min_overlap=min_overlap)
            measured = np.isin(np.arange(vocab.n_genes), gene_map.columns[store.measured])
            cells = replace(self, vocab=vocab, measured=measured, _gene_map=gene_map)
            sample = cells.block(choose_chunks(len(cells), _SAMPLED, cells.chunk_size))
            cells = replace(
                cells, counts_kept=float(sample.counts.sum(dtype=np.float64) / max(sample.totals.sum(), 1.0))
            )
            warn_counts_outside(cells.counts_kept, vocab)
        return replace(cells, overlap=float(measured.mean()))

    def over_vocabulary(self) -> StoreCells:
        """Return the same cells, whose library sizes are the counts in vocabulary genes."""
        return replace(self, _own_totals=True)

    def sources(self) -> pd.Series | None:
        """Read the source (file) of each cell from the store, length N; None if the store has a single source."""
        return self._store.sources()

    def __len__(self) -> int:
        return len(self._store)

    @property
    def n_expressed(self) -> np.ndarray:
        """Number of expressed genes of each cell in the store, unsigned, shape (N,).

        If the vocabulary is a subset of the store's vocabulary, a cell may express fewer vocabulary genes.
        """
        return self._store.lengths

    def column(self, key: str) -> pd.Series:
        """Return the column `key` of obs, length N.

        Raises
        ------
        DataError
            If the column does not exist, or was not selected when the store was opened.
        """
        return column_of(self.obs, key)

    def counts_digest(self) -> str | None:
        """Return a hash of the counts and totals of all cells, in their order; None for collections of others.

        No counts are read: the checksums of the cells are hashed, which are compared whenever a cell is read, or, for
        a store of scforge 0.1.0, the hash in its description is returned.
        """
        sums = self._store.checksums
        return self._store.content_hash if sums is None else hashlib.blake2b(sums.data, digest_size=16).hexdigest()

    def names(self) -> np.ndarray:
        """Read the cell names from the store, str, shape (N,)."""
        return self._store.names()

    def block(self, rows: np.ndarray, *, draw: int = 0) -> CellBlock:
        """Return the cells at `rows`, in that order, with repeats; `draw` is part of the key for random numbers."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            empty = sparse.csr_matrix((0, self.vocab.n_genes), dtype=np.uint16)
            return CellBlock.from_csr(empty, measured=self.measured)
        (block,) = self.stream([Window(rows=rows, ends=np.array([len(rows)]), draw=draw)])
        return block

    def stream(self, windows: Iterable[Window]) -> Iterator[CellBlock]:
        """Yield the cells of each batch in each of `windows`, in order, reading window by window.

        Raises
        ------
        DataError
            If the data are corrupted; the message names the dataset and the cell.
        """
        totals = self._store.totals
        for rows, draw, counts in self._store.batches(windows):
            sums = row_sums(counts) if totals is None else totals[rows].astype(np.float64)
            indptr, genes, values = self._mapped(counts)
            if self._own_totals:
                sums = np.diff(np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])[indptr])
            yield CellBlock(indptr, genes, values, sums, rows, draw=draw, measured=self.measured)

    def sample(self, n: int, *, rows: np.ndarray | None = None, seed: int = 0) -> CellSource:
        """Load at most `n` random cells (from those at `rows`) into memory, in the order of the store.

        If there are more than `n` cells, entire chunks are sampled, because a chunk is read at once.
        """
        chosen = choose_chunks(len(self), n, self.chunk_size, rows=rows, seed=seed)
        block = self.block(chosen)
        return CellSource(
            sparse.csr_matrix((block.counts, block.genes, block.indptr), shape=(len(block), self.vocab.n_genes)),
            block.totals,
            overlap=self.overlap,
            counts_kept=self.counts_kept,
            measured=self.measured,
            vocab=self.vocab,
            obs=self.obs.iloc[chosen],
        )

    def _mapped(self, counts: sparse.csr_matrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self._gene_map is not None:
            if self._gene_map.ascends:
                return pick_genes(counts, self._gene_map.columns)
            counts = self._gene_map.apply(counts)
        return (
            counts.indptr.astype(np.int64),
            counts.indices.astype(np.int32, copy=False),
            counts.data.astype(np.float32, copy=False),
        )


@dataclass(frozen=True)
class StoreInspection:
    """Content of a store; ``print(inspection)`` shows it.

    Attributes
    ----------
    path
        Path or URL.
    info
        Description of the store, see :class:`StoreInfo`.
    vocab
        Short description of the vocabulary.
    columns
        Content of each column of obs, e.g. ``"9 categories"``.
    n_bytes
        Size on disk.
    sources
        Whether each source is unchanged, see :func:`inspect_store`.
    verified
        Whether the entire store was read and has not changed since it was written.
    checksums
        Whether each cell, each column and the metadata have checksums, which are compared whenever they are read. A
        store of scforge 0.1.0 has checksums of the counts only, which are not compared for parts of a chunk.
    """

    path: str
    info: StoreInfo
    vocab: str
    columns: dict[str, str]
    n_bytes: int
    sources: dict[str, str]
    verified: bool
    checksums: bool = True

    def __str__(self) -> str:
        info = self.info
        appended = info.options.get("appended", [])
        options = [
            _options(info.options),
            *(f"appended {part['n_cells']:,} cells: {_options(part)}" for part in appended),
        ]
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
            "options": "; ".join(options),
            "content hash": f"{info.content_hash} ({'verified' if self.verified else '--verify checks it'})",
            "checksums": _COMPLETE if self.checksums else _INCOMPLETE,
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
    """Inspect a store written by :func:`scforge.data.convert`.

    Parameters
    ----------
    path
        Path or URL of the store.
    verify
        Whether to read the entire store and compare its content with the hash stored when it was written.
    storage_options
        Options for the file system of a URL, see fsspec.

    Returns
    -------
    The content of the store, with ``info``, ``columns``, ``n_bytes``, ``sources`` and ``verified``; ``print`` shows it.
    A source is ``"unchanged"`` if its size and modification time have not changed since the conversion,
    ``"changed since"``, ``"missing"``, or ``"not checked"`` if it is not a local file.

    Raises
    ------
    MissingFileError
        If `path` does not exist.
    DataError
        If `path` is not a store, the conversion has not finished, or, with `verify`, the store is corrupted.

    Examples
    --------
    >>> import scforge
    >>> info = scforge.data.convert(scforge.datasets.pbmc3k(), "store.zarr")
    >>> found = inspect_store("store.zarr", verify=True)
    >>> found.info == info, found.columns["cell_type"], found.verified
    (True, '9 categories', True)
    """
    name = os.fspath(path)
    info = StoreInfo.read(path, storage_options)
    group, is_checked = _opened(path, storage_options)
    with reading(f"the store {name!r}", fix=_AGAIN):
        if verify:
            _verify(group, info, name)
        system, root = file_system(name, storage_options)
        last = DATASET.format(len(info.datasets) - 1)
        return StoreInspection(
            path=redacted(name),
            info=info,
            vocab=repr(read_vocab(group)),
            # Of appended cells, the last dataset has all categories.
            columns={column: _described(group[last]["obs"][column]) for column in info.obs_columns},
            n_bytes=int(system.du(root)),
            sources={source["name"]: _state(source) for source in info.sources},
            verified=verify,
            checksums=is_checked and CHECKSUM in group.attrs,
        )


def _options(options: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in options.items() if name not in ("appended", "n_cells")}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value is not None)


def _described(column: Any) -> str:
    """Describe the content of a stored column of obs."""
    if hasattr(column, "dtype"):
        return str(column.dtype)
    return f"{column['categories'].shape[0]} categories" if "categories" in column else "text"


def _state(source: Mapping[str, Any]) -> str:
    if "mtime_ns" not in source:
        return "not checked"
    try:
        status = Path(source["name"]).stat()
    except FileNotFoundError:
        return "missing"
    same = (status.st_size, status.st_mtime_ns) == (source.get("size"), source["mtime_ns"])
    return "unchanged" if same else "changed since"


def _verify(group: Any, info: StoreInfo, name: str) -> None:
    """Read the entire store piece by piece. Raises a DataError if it does not match its stored hashes."""
    hashes = []
    with zarr.config.set(CODECS):
        for number in range(len(info.datasets)):
            dataset = DATASET.format(number)
            with reading(f"{dataset} of the store {name!r}", fix=_AGAIN):
                matrix, obs = group[f"{dataset}/X"], anndata.io.read_elem(group[f"{dataset}/obs"])
                hashes.append(dataset_hash(matrix["indptr"], matrix["indices"], matrix["data"], obs))
        vocab_hash, measured = read_vocab(group).hash, read_measured(group)
    problems = [
        f"{DATASET.format(number)} has changed since it was written"
        for number, expected in enumerate(info.datasets)
        if hashes[number] != expected["hash"]
    ]
    if vocab_hash != info.vocab_hash:
        problems.append("its vocabulary has changed since it was written")
    if measured.shape != (len(info.sources), info.n_genes):
        problems.append("its table of source genes has the wrong size")
    if not problems and content_hash(vocab_hash, hashes) != info.content_hash:
        problems.append("its metadata does not match its content hash")
    if problems:
        raise DataError(f"the store {name!r} is corrupted: {'; '.join(problems)}; {_AGAIN}.")
