"""What stands in a store beside the cells: its description, its vocabulary, and which genes each source measured.

A store is a zarr v3 folder that annbatch opens, too: ``dataset_0``, ``dataset_1``, ... with cells, and ``scforge``
with the rest. The attribute ``"scforge"`` of its root describes it (:class:`StoreInfo`).
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Required

import numpy as np
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from scforge._io import put_back
from scforge.data.remote import is_url, remote_file_system
from scforge.data.stream_errors import reading
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, MissingFileError, ModelFileError, first_line

if TYPE_CHECKING:
    import zarr

__all__ = [
    "AGAIN",
    "CHUNK_SIZE",
    "CODECS",
    "DATASET",
    "FORMAT",
    "SOURCE",
    "TOTAL",
    "StoreInfo",
    "file_system",
    "is_store",
    "may_be_replaced",
    "may_be_store",
    "open_store_group",
    "partial_path",
    "read_measured",
    "read_vocab",
    "write_root",
]

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
    from scforge.data.zarr_groups import open_group

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
