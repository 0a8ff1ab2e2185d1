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
from scforge.data.remote import is_url
from scforge.data.store_files import AGAIN, DATASET, SOURCE, TOTAL, StoreInfo, read_measured, read_vocab
from scforge.data.store_hash import column_check
from scforge.data.stream_errors import reading
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, OptionError, did_you_mean, listing

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
    from scforge.data.zarr_groups import open_group

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
