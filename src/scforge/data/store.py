"""Stores: zarr folders of shuffled cells that training reads in chunks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import warnings
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Required

import numpy as np
import zarr
from annbatch import Loader
from annbatch.abc import Sampler
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from scipy import sparse
from typing_extensions import TypedDict

from scforge._checks import check_bool, check_count
from scforge._io import put_back
from scforge.data.cells import CellBlock, CellSource, choose_chunks, column_of, sample_chunks
from scforge.data.checks import (
    CHECK,
    boundary_problem,
    first_damaged,
    index_problem,
    pick_genes,
    row_sums,
    value_problem,
)
from scforge.data.genes import MIN_OVERLAP, GeneMap, map_names, warn_counts_outside
from scforge.data.readers import is_url, reading, reading_errors, remote_file_system
from scforge.data.sampling import CellOrder, Window
from scforge.data.vocab import GeneVocab, open_vocab
from scforge.errors import (
    DataError,
    MissingFileError,
    ModelFileError,
    OptionError,
    ScforgeError,
    did_you_mean,
    first_line,
    listing,
    redacted,
    warn,
)

if TYPE_CHECKING:
    import pandas as pd
    from annbatch.types import LoadRequest


CODECS = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}
"""Setting of zarr: chunks are packed and unpacked by zarrs, in threads of its own, three times as fast as by zarr's
Python. Where zarrs cannot read (behind a URL) zarr does."""

AGAIN = "copy the store again, or convert the data again"
"""What to do about a damaged store."""

FORMAT = 1
"""Version of what the attribute ``"scforge"`` holds."""

CHUNK_SIZE = 256
"""Cells that stand together in a store, and are read together."""

TOTAL = "scforge_total"
"""Column of obs with the counts of each cell over all genes of the data."""

SOURCE = "scforge_source"
"""Column of obs that says which source a cell comes from."""

_ATTRIBUTE = "scforge"
_GROUP = "scforge"
_ENCODING = {"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"}


DATASET = "dataset_{}"
"""Names of the groups with cells."""


class _Dataset(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    n_cells: Required[NonNegativeInt]
    n_nonzeros: Required[NonNegativeInt]
    hash: Required[str]
    columns: dict[str, int]


class _Source(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    name: str
    n_cells: NonNegativeInt
    overlap: float
    counts_kept: float


@dataclass(frozen=True)
class StoreInfo:
    """Description of a store, as :func:`scforge.data.convert` writes it; ``print(info)`` shows it.

    Attributes
    ----------
    n_cells, n_nonzeros, n_genes
        Number of cells, of counts above zero, and of genes of the vocabulary.
    vocab_hash
        Hash of the vocabulary with its medians.
    counts_dtype
        ``"uint16"``, or ``"uint32"`` if a count is above 65,535.
    shuffled, seed
        Whether the cells stand in random order, and the seed of that order.
    chunk_size
        Number of cells that stand together.
    obs_columns
        Columns of the table of cells, without those of scforge.
    content_hash
        SHA-256, hexadecimal, over `vocab_hash` and the hash of each dataset, as ASCII text. That of a dataset is the
        SHA-256 over the raw bytes (little-endian) of its ``indptr`` (int64), ``indices`` (uint32) and ``data``
        (uint32), of each column of ``obs`` (the codes, int32, of a categorical one; the values of any other), and of
        the names of the cells (UTF-8, each with a zero byte behind it). How the arrays are compressed does not matter.
    datasets
        Of each dataset: ``n_cells``, ``n_nonzeros``, ``hash``, and ``columns``: the CRC-32 of each column of its table
        of cells, and of the names of the cells as ``"_index"``.
    sources
        Of each source: ``name``, ``n_cells``, ``n_genes``, ``overlap`` (share of the vocabulary's genes that it has),
        ``counts_kept``, and its fingerprint.
    counts_kept
        Share of all counts that lie in genes of the vocabulary.
    options
        Arguments of the conversion.
    created, scforge_version
        When (UTC) and by which scforge the store was written.

    Examples
    --------
    >>> import tempfile, scforge
    >>> adata = scforge.datasets.pbmc3k()[:100]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     info = scforge.data.convert(adata, f"{folder}/store.zarr")
    >>> info.n_cells, info.n_genes, info.counts_dtype, info.obs_columns
    (100, 16634, 'uint16', ['cell_type'])
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
    datasets: list[_Dataset]
    sources: list[_Source]
    counts_kept: Annotated[float, Field(ge=0, le=1)]
    options: dict[str, Any]
    created: str
    scforge_version: str

    @classmethod
    def read(
        cls, store: zarr.Group | str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> StoreInfo:
        """Read the description of a store.

        Parameters
        ----------
        store
            An open store, or its path or URL.
        storage_options
            Options for the file system of a URL, as for fsspec.

        Raises
        ------
        MissingFileError
            If there is nothing of that name.
        DataError
            If it is no store, or one that a conversion has not finished, or of a later scforge.
        """
        if isinstance(store, str | os.PathLike):
            place, attributes = repr(os.fspath(store)), _attributes(store, storage_options)
        else:
            place, attributes = repr(str(store.store_path)), dict(store.attrs)
        content = attributes.get(_ATTRIBUTE)
        if not isinstance(content, dict):
            raise DataError(f"{place} {_other_kind(attributes)}.")
        version = content.get("format")
        if type(version) is not int or version > FORMAT:
            raise DataError(f"{place} has the format {version!r} of a later scforge; update scforge.")
        known = {field.name for field in fields(cls)}
        if missing := sorted(known - set(content)):
            raise DataError(
                f"{place} is a damaged store: its description lacks {missing[0]!r}; convert the data again."
            )
        try:
            return _described().validate_json(
                json.dumps({name: value for name, value in content.items() if name in known}), strict=True
            )
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            raise DataError(
                f"{place} is a damaged store: its description holds no usable {'.'.join(map(str, wrong['loc']))!r} "
                f"({wrong['msg']}); convert the data again."
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return the description as the attribute ``"scforge"`` of the store holds it."""
        return {"format": FORMAT, **asdict(self)}

    def attributes(self) -> dict[str, Any]:
        """Return all attributes of the root of the store, which make it a collection of annbatch as well."""
        return {**_ENCODING, _ATTRIBUTE: self.to_json()}

    def __len__(self) -> int:
        return self.n_cells

    def __str__(self) -> str:
        seed = f"shuffled, seed {self.seed}" if self.shuffled else "in the order of the sources"
        rows = {
            "cells x genes": f"{self.n_cells:,} x {self.n_genes:,} ({seed})",
            "genes a cell": f"{self.n_nonzeros / max(self.n_cells, 1):,.1f}, counts as {self.counts_dtype}",
            "datasets": f"{len(self.datasets):,}",
            "obs": ", ".join(self.obs_columns) or "no columns",
            "counts kept": f"{self.counts_kept:.1%}",
            "content": self.content_hash[:16],
            "written": f"{self.created} by scforge {self.scforge_version}",
        }
        return "\n".join(f"{name:<25}{value}" for name, value in rows.items())


@cache
def _described() -> TypeAdapter[StoreInfo]:
    return TypeAdapter(StoreInfo)


def partial_path(path: str | os.PathLike[str]) -> Path:
    """Return the folder beside `path` that holds a store while it is being written."""
    path = Path(path)
    return path.with_name(f".{path.name}.partial")


def may_be_store(path: str | os.PathLike[str]) -> bool:
    """Whether `path` names a folder, a URL, or a store that is being written: anything but a file."""
    if is_url(path):
        return True
    put_back(path)
    return Path(path).is_dir() or (not Path(path).exists() and partial_path(path).exists())


def is_store(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether `path` (or a URL) is a whole store of scforge; False where there is nothing."""
    try:
        attributes = _attributes(path, storage_options)
    except (DataError, MissingFileError):
        return False
    return isinstance(attributes.get(_ATTRIBUTE), dict)


def may_be_replaced(path: Path) -> bool:
    """Whether a folder that exists may be replaced by a store: it is a store itself, or empty."""
    return is_store(path) or not any(path.iterdir())


def open_store_group(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> tuple[zarr.Group, StoreInfo]:
    """Open a store for reading, with its description.

    Raises
    ------
    MissingFileError
        If there is nothing of that name.
    DataError
        If it is no store, or one that a conversion has not finished.
    """
    from scforge.data.readers import open_group

    info = StoreInfo.read(path, storage_options)
    return open_group(path, storage_options), info


def read_vocab(group: zarr.Group) -> GeneVocab:
    """Return the vocabulary of an open store, with the medians of its genes.

    Raises
    ------
    DataError
        If it is damaged.
    """
    content = bytes(np.asarray(_part(group, "vocab")).astype(np.uint8))
    with tempfile.TemporaryDirectory() as folder:
        # The checks of a file of a vocabulary, its checksum among them, are needed here, too.
        file = Path(folder) / "vocab.json"
        file.write_bytes(content)
        try:
            return GeneVocab.from_file(file)
        except ModelFileError as error:
            raise DataError(
                f"the store {str(group.store_path)!r} is damaged: its vocabulary is not what was written; "
                "convert the data again."
            ) from error


def read_measured(group: zarr.Group) -> np.ndarray:
    """Return which genes of the vocabulary each source has, bool, shape (n_sources, n_genes)."""
    return np.asarray(_part(group, "measured")).astype(bool)


def write_root(folder: Path, info: StoreInfo, vocab: GeneVocab, measured: np.ndarray) -> None:
    """Write what stands beside the datasets of a store, and one list of all that is in it."""
    import zarr

    root = zarr.open_group(folder, mode="a", zarr_format=3)
    part = root.create_group(_GROUP, overwrite=True)
    part.create_array("vocab", data=_vocab_bytes(vocab))
    part.create_array("measured", data=measured)
    root.attrs.put(info.attributes())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        zarr.consolidate_metadata(root.store)


def _vocab_bytes(vocab: GeneVocab) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        vocab.save(Path(folder) / "vocab.json")
        return np.frombuffer((Path(folder) / "vocab.json").read_bytes(), dtype=np.uint8)


def _part(group: zarr.Group, name: str) -> Any:
    key = f"{_GROUP}/{name}"
    if key not in group:
        raise DataError(f"the store {str(group.store_path)!r} is damaged: it has no {key!r}; convert the data again.")
    with reading(f"{key!r} of the store {str(group.store_path)!r}", fix="convert the data again"):
        stored: Any = group[key]
        return stored[...]


def file_system(name: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path on it without a slash at its end."""
    from fsspec.implementations.local import LocalFileSystem

    if is_url(name):
        system, root = remote_file_system(name, storage_options)
        return system, root.rstrip("/")
    return LocalFileSystem(), str(Path(name).absolute())


def _attributes(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the attributes of the root of a zarr folder; an empty dict where a folder is no zarr v3 group."""
    name = os.fspath(path)
    system, root = file_system(name, storage_options)
    if not is_url(name):
        put_back(name)
        if (described := Path(name, "zarr.json")).exists() and not described.is_file():
            # A pipe would be waited for.
            raise DataError(f"{str(described)!r} is not a regular file; copy the data again.")
    with reading(repr(name)):
        try:
            text = system.cat_file(f"{root}/zarr.json")
        except (FileNotFoundError, NotADirectoryError):
            return _without_metadata(system, root, name)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"{name!r} is no zarr folder: its zarr.json cannot be read ({first_line(error)}).") from error
    attributes = content.get("attributes") if isinstance(content, dict) else None
    return attributes if isinstance(attributes, dict) else {}


def _without_metadata(system: Any, root: str, name: str) -> dict[str, Any]:
    if system.isdir(root):
        return {"encoding-type": "anndata"} if system.exists(f"{root}/.zattrs") else {}
    if system.exists(root):
        raise DataError(f"{name!r} is a file, but a store is a folder; scforge convert FILE -o STORE makes one of it.")
    folder, _, last = root.rpartition("/")
    if system.exists(f"{folder}/.{last}.partial"):
        raise DataError(f"{name!r} is incomplete: run the same scforge convert again to continue.")
    raise MissingFileError(f"the store {name!r} does not exist.")


def _other_kind(attributes: Mapping[str, Any]) -> str:
    """Say what a folder that is no store is."""
    kind = attributes.get("encoding-type")
    if kind == "anndata":
        return "is an AnnData, not a store; scforge convert SOURCE -o STORE makes one of it"
    if kind == _ENCODING["encoding-type"]:
        return "is a collection of annbatch that scforge has not written; convert its data with scforge convert"
    return "is a folder without a store; name one that scforge convert has written"


_STEP = 2**22
"""Entries that are in memory at a time."""


def dataset_hash(indptr: Any, indices: Any, data: Any, obs: pd.DataFrame) -> str:
    """Return the SHA-256 of a dataset, see :class:`scforge.data.StoreInfo`.

    Parameters
    ----------
    indptr, indices, data
        Parts of the CSR matrix, arrays of NumPy or zarr.
    obs
        The table of cells, with the columns of scforge at its end.
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


def column_check(values: Any) -> int:
    """Return the CRC-32 of a column of a table of cells, or of the names of cells, as text or NumPy array.

    zarr takes a chunk that is missing for zeros, and looks at no checksum in a table.
    """
    if hasattr(values, "codes"):
        # What stands in the same category has the same code, in however many bits.
        found = zlib.crc32(np.ascontiguousarray(values.codes, dtype="<i4"))
        return zlib.crc32("\0".join(map(str, values.categories)).encode(), found)
    values = np.asarray(values)
    if values.dtype.kind in "OUT":
        return zlib.crc32("\0".join(values.tolist()).encode())
    return zlib.crc32(np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")))


def content_hash(vocab_hash: str, datasets: Iterable[str] | Sequence[str]) -> str:
    """Return the SHA-256 of a store, given the hashes of its vocabulary and its datasets."""
    return hashlib.sha256("".join([vocab_hash, *datasets]).encode()).hexdigest()


_CHUNK_SIZE = 256
"""Cells to read together from a collection that does not say how they are stored."""


@dataclass(frozen=True)
class Opened:
    """A store without its counts.

    Attributes
    ----------
    place
        Path or URL.
    datasets
        Groups that hold cells.
    genes
        Names of the columns, array of str, shape (S,).
    vocab
        The vocabulary of the store, or one of its genes.
    measured
        True for the columns that any source has, bool, shape (S,).
    obs
        The wanted columns of obs, N rows, numbered.
    totals
        Counts of each cell over all genes of the data, integers where they fit, shape (N,); None if not stored.
    checks
        Check number of each cell, uint32, shape (N,); None if not stored.
    columns
        Of each dataset the check number of each column of obs, see :class:`~scforge.data.StoreInfo`; empty if not
        stored.
    counts_kept
        Share of all counts that lie in the columns.
    chunk_size
        Cells that stand together.
    shuffled
        Whether the cells stand in random order.
    """

    place: str
    datasets: list[Any]
    genes: np.ndarray
    vocab: GeneVocab
    measured: np.ndarray
    obs: pd.DataFrame
    totals: np.ndarray | None
    checks: np.ndarray | None
    columns: list[dict[str, int]]
    counts_kept: float
    chunk_size: int
    shuffled: bool


def open_collection(
    path: str | os.PathLike[str],
    *,
    obs: Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Opened:
    """Open a store of scforge, or another annbatch collection, whose columns are its vocabulary then.

    Raises
    ------
    MissingFileError
        If there is nothing of that name.
    DataError
        If it is neither, is incomplete or damaged, or has no such column.
    """
    if isinstance(obs, str):
        raise OptionError(f"obs={obs!r} is text; give a list of columns, [{obs!r}].")
    place = os.fspath(path)
    group = _open_group(place, storage_options)
    foreign = "scforge" not in group.attrs and group.attrs.get("encoding-type") == "annbatch-preshuffled"
    info = None if foreign else StoreInfo.read(group)
    datasets = _datasets(group, place)
    if info is None:
        return _foreign(place, datasets, obs)
    _check_datasets(place, datasets, info)
    vocab, measured = _checked_genes(place, group, info)
    tables = _Tables(place, datasets, [dataset.get("columns", {}) for dataset in info.datasets])
    return Opened(
        place=place,
        datasets=datasets,
        genes=np.array(vocab.genes, dtype=object).astype(str),
        vocab=vocab,
        measured=measured.any(axis=0),
        obs=tables.obs(info.obs_columns if obs is None else obs),
        totals=tables.numbers(TOTAL),
        checks=tables.numbers(CHECK),
        columns=tables.checks,
        counts_kept=info.counts_kept,
        chunk_size=info.chunk_size,
        shuffled=info.shuffled,
    )


def _foreign(place: str, datasets: list[Any], obs: Sequence[str] | None) -> Opened:
    """Open a collection that scforge has not written."""
    if not datasets:
        raise DataError(f"{place!r} is damaged: it has no dataset; {AGAIN}.")
    tables = _Tables(place, datasets, [{}] * len(datasets))
    genes = tables.index(0, "var")
    for number in range(1, len(datasets)):
        if not np.array_equal(tables.index(number, "var"), genes):
            raise DataError(
                f"{datasets[number].basename} of {place!r} has other genes, or in another order, than "
                f"{datasets[0].basename}; convert the data with scforge convert."
            )
    return Opened(
        place=place,
        datasets=datasets,
        genes=genes,
        vocab=GeneVocab.from_genes(list(dict.fromkeys(genes.tolist()))),
        measured=np.ones(len(genes), dtype=bool),
        obs=tables.obs(obs),
        totals=None,
        checks=None,
        columns=tables.checks,
        counts_kept=1.0,
        chunk_size=_CHUNK_SIZE,
        shuffled=True,
    )


def _check_datasets(place: str, datasets: list[Any], info: StoreInfo) -> None:
    """Raise unless the datasets are there, with as many cells as were written."""
    found = {dataset.basename: dataset for dataset in datasets}
    for number, expected in enumerate(info.datasets):
        name = DATASET.format(number)
        if name not in found:
            raise DataError(f"{place!r} is damaged: {name} is missing; {AGAIN}.")
        shape = tuple(found.pop(name)["X"].attrs["shape"])
        if shape != (expected["n_cells"], info.n_genes):
            raise DataError(
                f"{name} of {place!r} is damaged: it has {shape[0]} cells x {shape[1]} genes, not "
                f"{expected['n_cells']} x {info.n_genes}; {AGAIN}."
            )
    if found:
        raise DataError(f"{place!r} is damaged: its description lacks {next(iter(found))}; {AGAIN}.")
    if sum(dataset["n_cells"] for dataset in info.datasets) != info.n_cells:
        raise DataError(f"{place!r} is damaged: its datasets do not have {info.n_cells} cells in all; {AGAIN}.")


def _checked_genes(place: str, group: Any, info: StoreInfo) -> tuple[GeneVocab, np.ndarray]:
    """Return the vocabulary, and which of its genes each source has, bool, shape (n_sources, S)."""
    vocab, measured = read_vocab(group), read_measured(group)
    if vocab.hash != info.vocab_hash:
        raise DataError(f"{place!r} is damaged: its vocabulary is another one than was written; {AGAIN}.")
    shares = [source["overlap"] for source in info.sources]
    if measured.shape != (len(shares), vocab.n_genes) or not np.allclose(measured.mean(axis=1), shares):
        raise DataError(f"{place!r} is damaged: the genes of its sources are not those that were written; {AGAIN}.")
    return vocab, measured


def read_names(opened: Opened) -> np.ndarray:
    """Return the names of the cells of a store, array of str, shape (N,)."""
    tables = _Tables(opened.place, opened.datasets, opened.columns)
    return np.concatenate([tables.index(number) for number in range(len(opened.datasets))])


def _open_group(place: str, storage_options: Mapping[str, Any] | None) -> Any:
    from scforge.data.readers import open_group

    if not is_url(place) and not Path(place, "zarr.json").is_file():
        StoreInfo.read(place)  # says what is there instead
    return open_group(place, storage_options)


def _datasets(group: Any, place: str) -> list[Any]:
    with reading(f"{place!r}", how="as a store", fix=AGAIN):
        numbers = sorted(int(found[1]) for key in group.group_keys() if (found := re.fullmatch(r"dataset_(\d+)", key)))
        datasets = [group[DATASET.format(number)] for number in numbers]
        kinds = [dataset["X"].attrs.get("encoding-type") if "X" in dataset else None for dataset in datasets]
    for dataset, kind in zip(datasets, kinds, strict=True):
        if kind != "csr_matrix":
            raise DataError(
                f"X of {dataset.basename} of {place!r} is {kind or 'missing'}, not csr_matrix; "
                "convert the data with scforge convert."
            )
    return datasets


class _Tables:
    """The tables of cells and genes of the datasets; what is read of cells is compared with its check number."""

    def __init__(self, place: str, datasets: list[Any], checks: list[dict[str, int]]) -> None:
        self.place = place
        self.datasets = datasets
        self.checks = checks

    def _read(self, number: int, name: str, table: str = "obs") -> Any:
        from anndata.io import read_elem

        dataset = self.datasets[number]
        what = f"{dataset.basename}/{table}/{name} of {self.place!r}"
        with reading(what, fix=AGAIN):
            values = read_elem(dataset[table][name])
        expected = self.checks[number].get(name) if table == "obs" else None
        if expected is not None and column_check(values) != expected:
            raise DataError(f"{what} is damaged: its values are not those that were written; {AGAIN}.")
        return values

    def index(self, number: int, table: str = "obs") -> np.ndarray:
        """Return the names of the cells, or of the genes, of a dataset, array of str."""
        with reading(f"{self.datasets[number].basename}/{table} of {self.place!r}", fix=AGAIN):
            name = str(self.datasets[number][table].attrs["_index"])
        return np.asarray(self._read(number, name, table), dtype=object).astype(str)

    def numbers(self, column: str) -> np.ndarray | None:
        """Return a column of numbers, None if a dataset lacks it; whole numbers in 32 bits where they fit."""
        if any(column not in dataset["obs"] for dataset in self.datasets):
            return None
        parts = []
        for number in range(len(self.datasets)):
            values = np.asarray(self._read(number, column))
            fit = values.dtype != np.uint32 and ((values == np.floor(values)) & (values < 2**32)).all()
            parts.append(values.astype(np.uint32) if fit else values)
        return np.concatenate(parts)

    def obs(self, columns: Sequence[str] | None) -> pd.DataFrame:
        """Return columns of obs of all datasets, rows numbered; categories that differ are united."""
        import pandas as pd
        from pandas.api.types import union_categoricals

        stored = [str(column) for column in self.datasets[0]["obs"].attrs.get("column-order", [])]
        known = [column for column in stored if column not in (TOTAL, CHECK)]
        table: dict[str, Any] = {}
        for column in [column for column in known if column != SOURCE] if columns is None else columns:
            if column not in known:
                raise DataError(
                    f"obs names {column!r}, which is not a column of {self.place!r}"
                    f"{did_you_mean(column, known)} (there is: {listing(known)})"
                )
            parts = [self._read(number, column) for number in range(len(self.datasets))]
            if all(isinstance(part, pd.Categorical) for part in parts):
                table[column] = union_categoricals(parts, ignore_order=True) if len(parts) > 1 else parts[0]
            else:
                table[column] = pd.concat([pd.Series(part) for part in parts], ignore_index=True)
        n_cells = sum(int(dataset["X"].attrs["shape"][0]) for dataset in self.datasets)
        return pd.DataFrame(table, index=pd.RangeIndex(n_cells))


class AnnbatchSampler(Sampler):
    """Lets :class:`annbatch.Loader` read the windows of an order, one request a window.

    Parameters
    ----------
    windows
        A :class:`~scforge.data.CellOrder`, or windows themselves. Cells are numbered through the loader's data sets.
    whole_windows
        Yield each window as one batch; the caller cuts it.
    gap
        Up to this many cells that nobody asked for are read along, instead of reading what lies before and after them
        separately.

    Raises
    ------
    OptionError
        If an argument cannot be used; in a pass: if a window has cells that the loader does not have, if several
        workers of a DataLoader iterate (each would yield every batch), or if a part of the cells is masked.

    Notes
    -----
    Loaders do not say when a batch is handed out. To save the state amid an epoch, call :meth:`advance` after each
    batch that is taken from the loader.

    Examples
    --------
    >>> import numpy as np
    >>> from scforge.data import CellOrder
    >>> order = CellOrder(np.array([0, 1, 2, 100]), batch_size=2, shuffle=False, window_cells=4)
    >>> request = next(AnnbatchSampler(order).sample(n_obs=200))
    >>> request["requests"], [split.tolist() for split in request["splits"]]
    ([slice(0, 3, None), slice(100, 101, None)], [[0, 1], [2, 3]])
    """

    def __init__(self, windows: CellOrder | Iterable[Window], *, whole_windows: bool = False, gap: int = 32) -> None:
        check_count("gap", gap, "cells", least=0)
        self._windows = windows
        self._whole_windows = check_bool("whole_windows", whole_windows)
        self._gap = int(gap)

    @property
    def batch_size(self) -> int | None:
        """Cells of a batch; every request says itself where its batches end."""
        return self._windows.batch_size if isinstance(self._windows, CellOrder) else None

    @property
    def shuffle(self) -> bool:
        """Whether the order is random; the loader never shuffles by itself."""
        return isinstance(self._windows, CellOrder) and self._windows.shuffle

    def n_batches(self, n_obs: int) -> int:
        """Return the number of batches of a whole pass, whatever the number of cells of the loader.

        Parameters
        ----------
        n_obs
            Number of cells of the loader, which does not matter.

        Returns
        -------
        Batches of this rank, or windows with `whole_windows`.

        Raises
        ------
        OptionError
            If the windows are an iterator, which does not know its length.
        """
        if isinstance(self._windows, CellOrder):
            order = self._windows
            return order.layout.n_windows if self._whole_windows else len(order)
        if not isinstance(self._windows, Sized):
            raise OptionError("windows is an iterator, which does not know its number of batches; give a list.")
        return sum(1 if self._whole_windows else len(window.ends) for window in self._windows)

    def validate(self, n_obs: int) -> None:
        """Check that this pass would yield each batch once.

        Parameters
        ----------
        n_obs
            Number of cells of the loader.

        Raises
        ------
        OptionError
            If it would not, see the class.
        """
        if self.mask != slice(0, None):
            raise OptionError(f"mask={self.mask} is not for this sampler; give rank and world_size to CellOrder.")
        # Whoever has not imported torch is in no worker of its DataLoader.
        torch = sys.modules.get("torch")
        worker = None if torch is None else torch.utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise OptionError(f"num_workers={worker.num_workers} would each yield every batch; use 0 or 1.")

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        windows = self._windows.windows() if isinstance(self._windows, CellOrder) else self._windows
        for window in windows:
            yield self._request(window, n_obs)

    def _request(self, window: Window, n_obs: int) -> LoadRequest:
        ordered = np.sort(window.rows)
        if ordered[0] < 0 or ordered[-1] >= n_obs:
            wrong = ordered[0] if ordered[0] < 0 else ordered[-1]
            raise OptionError(f"windows has the cell {wrong}, but the loader has the cells 0 to {n_obs - 1}.")
        cuts = np.flatnonzero(np.diff(ordered) > self._gap + 1)
        starts = ordered[np.concatenate([[0], cuts + 1])]
        stops = ordered[np.concatenate([cuts, [-1]])] + 1
        sizes = stops - starts
        # Where the first cell of each slice would be if its slice began at cell 0 of what is read.
        shifts = np.cumsum(sizes) - sizes - starts
        places = window.rows + shifts[np.searchsorted(starts, window.rows, side="right") - 1]
        return {
            "requests": [slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)],
            "splits": [places] if self._whole_windows else np.split(places, window.ends[:-1]),
        }

    def _order(self) -> CellOrder:
        if not isinstance(self._windows, CellOrder):
            raise OptionError("windows has no epochs and no state; give a CellOrder.")
        return self._windows

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the order whose batches come next.

        Parameters
        ----------
        epoch
            Number of the epoch, from 0.

        Raises
        ------
        OptionError
            If there is no :class:`~scforge.data.CellOrder`, but windows.
        """
        self._order().set_epoch(epoch)

    def advance(self, n_batches: int = 1) -> None:
        """Count batches of the order as handed out.

        Parameters
        ----------
        n_batches
            How many.

        Raises
        ------
        OptionError
            If there is no :class:`~scforge.data.CellOrder`, but windows.
        """
        self._order().advance(n_batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the order."""
        return self._order().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the order that `state` is of was.

        Parameters
        ----------
        state
            Of :meth:`state_dict`.

        Raises
        ------
        OptionError
            If there is no :class:`~scforge.data.CellOrder`, but windows.
        """
        self._order().load_state_dict(state)


_SETTINGS: dict[str, Any] = {**CODECS, "threading.max_workers": max(1, (os.cpu_count() or 1) // 2)}
"""Settings of zarr: half of the cores unpack, the others are left to tokenising."""

_PIECE = 256
"""Cells that are read at a time to find which are damaged."""


def _smallest(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


class _Current(Sampler):
    """Hands on to the sampler of the pass that begins: a loader keeps its row boundaries, passes come and go."""

    sampler: AnnbatchSampler
    batch_size = None
    shuffle = False

    def n_batches(self, n_obs: int) -> int:
        """Return what the present sampler says."""
        return self.sampler.n_batches(n_obs)

    def validate(self, n_obs: int) -> None:
        """Check what the present sampler checks."""
        self.sampler.validate(n_obs)

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        return self.sampler.sample(n_obs)


class StoreReader:
    """The matrices of a store as one, read by rows.

    Parameters
    ----------
    datasets
        The groups of the store that hold cells, in their order.
    place
        Path or URL, for messages.

    Attributes
    ----------
    lengths
        Number of entries of each row, unsigned, shape (N,).
    """

    def __init__(self, datasets: list[Any], place: str) -> None:
        self.place = place
        self.names = [dataset.basename for dataset in datasets]
        lengths: list[np.ndarray] = []
        matrices = []
        for name, dataset in zip(self.names, datasets, strict=True):
            matrix, indptr = self._open(name, dataset)
            matrices.append(matrix)
            lengths.append(_smallest(np.diff(indptr)))
            del indptr  # annbatch holds the boundaries as well
        self.lengths = np.concatenate(lengths)
        self.sizes = np.array([matrix.shape[0] for matrix in matrices])
        self.ends = np.cumsum(self.sizes)
        self._sampler = _Current()
        self._loader: Any = Loader(batch_sampler=self._sampler, preload_to_gpu=False)
        self._loader.add_datasets(matrices)
        self._begins = threading.Lock()

    def _open(self, name: str, dataset: Any) -> tuple[Any, np.ndarray]:
        import anndata

        try:
            matrix = anndata.io.sparse_dataset(dataset["X"])
            indptr = np.asarray(dataset["X/indptr"][...])
            n_entries = dataset["X/data"].shape[0]
        except reading_errors() as error:
            raise DataError(f"{name} of {self.place!r} cannot be read: {first_line(error)}; {AGAIN}.") from error
        problem = boundary_problem(indptr, n_entries)
        if problem is None and len(indptr) != matrix.shape[0] + 1:
            problem = f"it has {len(indptr)} boundaries (indptr) and needs {matrix.shape[0] + 1}"
        if problem is None and int(indptr[-1]) != n_entries:
            problem = f"its boundaries (indptr) end at {indptr[-1]}, but there are {n_entries} entries"
        if problem is not None:
            raise DataError(f"{name} of {self.place!r} is damaged: {problem}; {AGAIN}.")
        return matrix, indptr

    def __len__(self) -> int:
        return int(self.ends[-1])

    def batches(self, windows: Iterable[Window]) -> Iterator[tuple[np.ndarray, int, sparse.csr_matrix]]:
        """Yield rows, number of the draw, and counts of each batch of each window.

        Raises
        ------
        DataError
            If what is read is damaged; the message names the data set and the cells.
        """
        told: deque[tuple[np.ndarray, int]] = deque()
        others: list[Exception] = []

        def watched() -> Iterator[Window]:
            try:
                for window in windows:
                    told.extend((rows, window.draw) for rows in window.batches())
                    yield window
            except reading_errors() as error:
                others.append(error)  # of whoever makes the windows: no damage
                raise

        read = self._read(watched())
        while True:
            try:
                counts = next(read, None)
            except ScforgeError:
                raise
            except reading_errors() as error:
                if error in others:
                    raise
                rows = np.concatenate([np.empty(0, dtype=np.int64), *(rows for rows, _ in told)])
                raise DataError(f"{self._damaged_cells(rows)} cannot be read: {first_line(error)}; {AGAIN}.") from error
            if counts is None:
                return
            rows, draw = told.popleft()
            yield rows, draw, counts

    def _read(self, windows: Iterator[Window]) -> Iterator[sparse.csr_matrix]:
        # The first step of a pass takes the sampler, and opens the arrays.
        with self._begins, zarr.config.set(_SETTINGS):
            self._sampler.sampler = AnnbatchSampler(windows)
            passing = iter(self._loader)
            first = next(passing, None)
        if first is not None:
            yield first["X"]
            del first
            for batch in passing:
                yield batch["X"]

    def where(self, row: int) -> tuple[str, int]:
        """Return the name of the data set that holds a row of the store, and its row there."""
        place = int(np.searchsorted(self.ends, row, side="right"))
        return self.names[place], row - int(self.ends[place - 1] if place else 0)

    def _damaged_cells(self, rows: np.ndarray) -> str:
        """Find the first cells among `rows` that cannot be read."""
        rows = np.unique(rows)
        # No piece goes beyond a dataset.
        part = np.searchsorted(self.ends, rows, side="right")
        within = rows - (self.ends - self.sizes)[part]
        cuts = np.flatnonzero(np.diff(within // _PIECE) | np.diff(part)) + 1
        for piece in np.split(rows, cuts) if len(rows) else ():
            window = Window(rows=piece, ends=np.array([len(piece)]), draw=0)
            try:
                for _ in self._read(iter([window])):
                    pass
            except reading_errors():
                name, first = self.where(int(piece[0]))
                return f"{name} of {self.place!r}, cells {first} to {first + int(piece[-1] - piece[0])},"
        return f"{self.place!r}"


_SAMPLED = 4096
"""Cells that are looked at to tell how many counts lie outside of a vocabulary."""


@dataclass(frozen=True, eq=False)
class StoreCells:
    """Cells of a store that :func:`scforge.data.convert` wrote, or of another annbatch collection of counts.

    Open one with :meth:`open` or :func:`scforge.data.open_cells`. In memory are a few bytes a cell (row boundaries,
    number of genes, library size, check number, and the wanted columns of obs), however many counts there are.

    Attributes
    ----------
    vocab
        The genes that the counts are over.
    overlap, counts_kept, measured
        As of :class:`~scforge.data.CellSource`. In a store made of several files, a gene counts as measured if any of
        them has it.
    obs
        The wanted columns of obs; cells are numbered.
    chunk_size
        Cells that stand together.
    place
        Path or URL.
    shuffled
        Whether the cells stand in random order.

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
    _opened: Opened = field(repr=False)
    _reader: StoreReader = field(repr=False)
    _lengths: np.ndarray = field(repr=False)
    _gene_map: GeneMap | None = field(repr=False)

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
            Folder, or a URL that fsspec knows, e.g. ``"s3://bucket/store.zarr"``.
        vocab
            Vocabulary to map the genes to, by name; None takes that of the store.
        obs
            Columns of obs to have at hand; None takes all.
        min_overlap
            Smallest share of genes of `vocab` to accept.
        storage_options
            Options for the file system of a URL, as for fsspec.

        Raises
        ------
        MissingFileError
            If there is nothing of that name.
        DataError
            If it is no store, is incomplete or damaged, or has no such column.
        GeneMismatchError
            If too few genes of `vocab` are in the store.

        Warns
        -----
        ScforgeWarning
            If cells express no gene of the vocabulary, or as :func:`scforge.data.open_cells` does for genes.
        """
        with reading(repr(os.fspath(path)), how="as a store", fix=AGAIN):
            opened = open_collection(path, obs=obs, storage_options=storage_options)
            reader = StoreReader(opened.datasets, opened.place)
        cells = cls(
            vocab=opened.vocab,
            overlap=1.0,
            counts_kept=opened.counts_kept,
            measured=None,
            obs=opened.obs,
            chunk_size=opened.chunk_size,
            place=opened.place,
            shuffled=opened.shuffled,
            _opened=opened,
            _reader=reader,
            _lengths=reader.lengths,
            _gene_map=None,
        )
        return cells.with_vocab(opened.vocab if vocab is None else open_vocab(vocab), min_overlap=min_overlap)

    def with_vocab(self, vocab: GeneVocab, *, min_overlap: float = MIN_OVERLAP) -> StoreCells:
        """Return the same cells over the genes of another vocabulary, mapped by name.

        Parameters
        ----------
        vocab
            The other vocabulary.
        min_overlap
            Smallest share of its genes to accept.

        Returns
        -------
        The cells, on the same store.

        Raises
        ------
        GeneMismatchError
            If too few genes of `vocab` are in the store.
        """
        opened = self._opened
        if len(opened.genes) == vocab.n_genes and np.array_equal(opened.genes, np.array(vocab.genes)):
            measured = opened.measured
            cells = replace(self, vocab=vocab, counts_kept=opened.counts_kept, measured=measured, _gene_map=None)
            if empty := int((self._lengths == 0).sum()):
                warn(f"{empty} of {len(self)} cells express no gene of the vocabulary; their embedding tells nothing.")
        else:
            gene_map = map_names(opened.genes, vocab, min_overlap=min_overlap, whole=not vocab.chosen_from_data)
            measured = gene_map.measured_of(opened.measured)
            cells = replace(self, vocab=vocab, measured=measured, _gene_map=gene_map)
            some = cells.block(choose_chunks(len(cells), _SAMPLED, cells.chunk_size))
            cells = replace(cells, counts_kept=float(some.counts.sum(dtype=np.float64) / max(some.totals.sum(), 1.0)))
            warn_counts_outside(cells.counts_kept, vocab)
        return replace(cells, overlap=float(measured.mean()))

    def __len__(self) -> int:
        return len(self._reader)

    @property
    def n_expressed(self) -> np.ndarray:
        """Number of expressed genes of each cell in the store, unsigned, shape (N,).

        Where the vocabulary is a part of that of the store, a cell may have fewer.
        """
        return self._lengths

    def column(self, key: str) -> pd.Series:
        """Return the column `key` of obs, length N.

        Raises
        ------
        DataError
            If there is no such column, or it was not wanted when the store was opened.
        """
        return column_of(self.obs, key)

    def names(self) -> np.ndarray:
        """Return the names of the cells, read when asked for, array of str, shape (N,)."""
        return read_names(self._opened)

    def block(self, rows: np.ndarray, *, draw: int = 0) -> CellBlock:
        """Return the cells at `rows`, in that order; a row may come several times. `draw` keys random choices."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            empty = sparse.csr_matrix((0, self.vocab.n_genes), dtype=np.uint16)
            return CellBlock.from_csr(empty, measured=self.measured)
        (block,) = self.stream([Window(rows=rows, ends=np.array([len(rows)]), draw=draw)])
        return block

    def stream(self, windows: Iterable[Window]) -> Iterator[CellBlock]:
        """Yield the cells of each batch of each of `windows`, in order, read window by window.

        Raises
        ------
        DataError
            If what is read is damaged; the message names the data set and the cell.
        """
        for rows, draw, counts in self._reader.batches(windows):
            counts = self._checked(rows, counts)
            totals = self._opened.totals
            sums = row_sums(counts) if totals is None else totals[rows].astype(np.float64)
            indptr, genes, values = self._mapped(counts)
            yield CellBlock(indptr, genes, values, sums, rows, draw=draw, measured=self.measured)

    def sample(self, n: int, *, rows: np.ndarray | None = None, seed: int = 0) -> CellSource:
        """Return at most `n` cells (of those at `rows`), drawn by `seed`, in memory, in the order of the store.

        Of more cells whole chunks are drawn, because they are read in one go.
        """
        return sample_chunks(self, n, rows=rows, seed=seed)

    def _checked(self, rows: np.ndarray, counts: sparse.csr_matrix) -> sparse.csr_matrix:
        """Return counts that are as they were written, sorted and without zeros."""
        checks = self._opened.checks
        if checks is not None:
            if (damaged := first_damaged(counts, checks[rows])) >= 0:
                raise DataError(self._damage(rows[damaged], "its counts are not those that were written"))
            return counts
        # Missing chunks come as zeros.
        empty = np.flatnonzero((np.diff(counts.indptr) > 0) & (row_sums(counts) == 0))
        if len(empty):
            raise DataError(self._damage(rows[empty[0]], "it has no counts"))
        if problem := index_problem(counts.indices, len(self._opened.genes)):
            raise DataError(self._damage(rows[0], problem))
        if counts.dtype.kind != "u" and (problem := value_problem(counts.data)):
            name, _ = self._reader.where(int(rows[0]))
            raise DataError(f"X of {name} of {self.place!r} {problem}, but raw counts are needed.")
        if not counts.has_canonical_format or (counts.data == 0).any():
            # Repeated entries are summed, which may not fit into e.g. uint8.
            counts = counts.astype(np.int64 if counts.dtype.kind in "iu" else counts.dtype, copy=True)
            counts.sum_duplicates()
            counts.eliminate_zeros()
        return counts

    def _damage(self, row: int, problem: str) -> str:
        name, cell = self._reader.where(int(row))
        return f"{name} of {self.place!r} is damaged at cell {cell}: {problem}; {AGAIN}."

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
