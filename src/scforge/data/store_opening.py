"""What a store tells before its cells are read.

Shapes: N cells of the store, S genes of the store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge.data.picking import CHECK
from scforge.data.remote import is_url, open_group
from scforge.data.store_files import SOURCE, TOTAL, StoreInfo, read_measured, read_vocab
from scforge.data.store_reading import AGAIN
from scforge.data.stream_errors import reading_errors
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, OptionError, did_you_mean, first_line, listing

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Opened", "open_collection", "read_names"]

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
    n_cells
        Number of cells that there should be; None if not known.
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
    n_cells: int | None
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
    datasets = _datasets(group)
    if not datasets:
        raise DataError(f"{place!r} is damaged: it has no data set; {AGAIN}.")
    genes = _index(datasets[0]["var"], place)
    shared: dict[str, Any] = {"place": place, "datasets": datasets, "genes": genes}
    if info is None:
        vocab = GeneVocab.from_genes(list(dict.fromkeys(genes.tolist())))
        return Opened(
            **shared,
            vocab=vocab,
            measured=np.ones(len(genes), dtype=bool),
            obs=_read_obs(datasets, obs, place),
            totals=None,
            checks=None,
            n_cells=None,
            counts_kept=1.0,
            chunk_size=_CHUNK_SIZE,
            shuffled=True,
        )
    return Opened(
        **shared,
        vocab=read_vocab(group),
        measured=read_measured(group).any(axis=0),
        obs=_read_obs(datasets, info.obs_columns if obs is None else obs, place),
        totals=_numbers(datasets, TOTAL, place),
        checks=_numbers(datasets, CHECK, place),
        n_cells=info.n_cells,
        counts_kept=info.counts_kept,
        chunk_size=info.chunk_size,
        shuffled=info.shuffled,
    )


def read_names(opened: Opened) -> np.ndarray:
    """Return the names of the cells of a store, array of str, shape (N,)."""
    return np.concatenate([_index(dataset["obs"], opened.place) for dataset in opened.datasets])


def _open_group(place: str, storage_options: Mapping[str, Any] | None) -> Any:
    import zarr

    if is_url(place):
        return open_group(place, storage_options)
    if not Path(place, "zarr.json").is_file():
        StoreInfo.read(place)  # says what is there instead
    return zarr.open_group(place, mode="r")


def _datasets(group: Any) -> list[Any]:
    numbers = sorted(int(found[1]) for key in group.group_keys() if (found := re.fullmatch(r"dataset_(\d+)", key)))
    return [group[f"dataset_{number}"] for number in numbers]


def _element(table: Any, name: str, place: str) -> Any:
    from anndata.io import read_elem

    try:
        return read_elem(table[name])
    except reading_errors() as error:
        raise DataError(f"{table.path}/{name} of {place!r} cannot be read: {first_line(error)}; {AGAIN}.") from error


def _index(table: Any, place: str) -> np.ndarray:
    return np.asarray(_element(table, str(table.attrs["_index"]), place), dtype=object).astype(str)


def _numbers(datasets: list[Any], column: str, place: str) -> np.ndarray | None:
    """Return a column of numbers of all data sets, None if they lack it; whole numbers in 32 bits where they fit."""
    if any(column not in dataset["obs"] for dataset in datasets):
        return None
    parts = []
    for dataset in datasets:
        values = np.asarray(_element(dataset["obs"], column, place))
        fit = values.dtype != np.uint32 and ((values == np.floor(values)) & (values < 2**32)).all()
        parts.append(values.astype(np.uint32) if fit else values)
    return np.concatenate(parts)


def _read_obs(datasets: list[Any], columns: Sequence[str] | None, place: str) -> pd.DataFrame:
    """Return columns of obs of all data sets; categories that differ are united."""
    import pandas as pd
    from pandas.api.types import union_categoricals

    stored = [str(column) for column in datasets[0]["obs"].attrs.get("column-order", [])]
    known = [column for column in stored if column not in (TOTAL, CHECK)]
    table: dict[str, Any] = {}
    for column in [column for column in known if column != SOURCE] if columns is None else columns:
        if column not in known:
            raise DataError(
                f"obs names {column!r}, which is not a column of {place!r}{did_you_mean(column, known) or ';'} "
                f"(there is: {listing(known)})"
            )
        parts = [_element(dataset["obs"], column, place) for dataset in datasets]
        if all(isinstance(part, pd.Categorical) for part in parts):
            table[column] = union_categoricals(parts, ignore_order=True) if len(parts) > 1 else parts[0]
        else:
            table[column] = pd.concat([pd.Series(part) for part in parts], ignore_index=True)
    n_cells = sum(int(dataset["X"].attrs["shape"][0]) for dataset in datasets)
    return pd.DataFrame(table, index=pd.RangeIndex(n_cells))
