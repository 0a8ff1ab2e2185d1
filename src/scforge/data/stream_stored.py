"""An AnnData on disk, h5ad or zarr, of which nothing is in memory but what is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge.data.stream_errors import reading
from scforge.data.stream_matrix import Matrix, is_array
from scforge.data.stream_memory import check_stored
from scforge.errors import DataError, OptionError, did_you_mean, listing

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["StoredAdata", "check_modality", "missing_column", "shared_columns"]

_AGAIN = "write the file again"


_NO_TABLES = {
    "h5py": "cannot be read as an h5ad file: it has no tables obs and var of a current anndata; "
    "write it again with anndata.read_h5ad(path).write_h5ad(path).",
    "zarr": "cannot be read as an AnnData: it has no tables obs and var; name a folder that adata.write_zarr has made.",
}


@dataclass(frozen=True)
class StoredAdata:
    """An open AnnData on disk.

    Attributes
    ----------
    path
        Path or URL, for messages.
    file
        The open file, or a group in it (h5py or zarr).
    """

    path: str
    file: Any

    @classmethod
    def of(cls, path: str, file: Any, modality: str | None = None) -> StoredAdata:
        """Check that an open file holds an AnnData, or a MuData with the modality.

        Raises
        ------
        DataError
            If it does not.
        OptionError
            If a modality is needed or named in vain.
        """
        if "mod" in file and not is_array(file["mod"]):
            check_modality(modality, list(file["mod"]), path)
            opened: StoredAdata = StoredModality(path, file[f"mod/{modality}"], file, str(modality))
        elif modality is not None:
            raise OptionError(f"modality={modality!r} was given but {path!r} has no modalities; leave it out.")
        else:
            opened = cls(path, file)
        tables = [opened.file.get(name) for name in ("obs", "var")]
        if not all(table is not None and not is_array(table) and "_index" in table.attrs for table in tables):
            raise DataError(f"{path!r} {_NO_TABLES[type(file).__module__.split('.')[0]]}")
        return opened

    @cached_property
    def var(self) -> pd.DataFrame:
        """The table of genes."""
        return self._table("var", "table of genes")

    @cached_property
    def obs_names(self) -> pd.Index:
        """Names of the cells."""
        import pandas as pd

        what = f"the names of the cells (obs) of {self.path!r}"
        with reading(what, fix=_AGAIN):
            names = _read(self.file["obs"][self.file["obs"].attrs["_index"]], what)
            return pd.Index(np.asarray(names, dtype=object).astype(str))

    @property
    def n_obs(self) -> int:
        """Number of rows of the table of cells."""
        with reading(f"the names of the cells (obs) of {self.path!r}", fix=_AGAIN):
            names = self.file["obs"][self.file["obs"].attrs["_index"]]
            if not is_array(names) and "values" in names:  # text with a mask of what is missing
                names = names["values"]
            return int(names.shape[0]) if is_array(names) else len(self.obs_names)

    @property
    def obs_columns(self) -> list[str]:
        """Names of the columns of obs, in their order."""
        with reading(f"the table of cells (obs) of {self.path!r}", fix=_AGAIN):
            return [str(column) for column in self.file["obs"].attrs["column-order"]]

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the table of cells, or some columns of it.

        Raises
        ------
        DataError
            If there is no such column, or it cannot be read.
        """
        import pandas as pd

        if columns is None:
            return self._table("obs", "table of cells")
        if missing := [column for column in columns if column not in self.obs_columns]:
            raise missing_column(missing[0], self.path, self.obs_columns)
        group = self.file["obs"]
        if "__categories" in group:  # of an anndata before 0.8, which kept them apart
            return self._table("obs", "table of cells")[list(columns)]
        what = f"the table of cells (obs) of {self.path!r}"
        with reading(what, fix=_AGAIN):
            read = {column: _read(group[column], what) for column in columns}
            return pd.DataFrame(read, index=self.obs_names)

    def _table(self, name: str, what: str) -> pd.DataFrame:
        import pandas as pd

        with reading(f"the {what} ({name}) of {self.path!r}", fix=_AGAIN):
            table = _read(self.file[name], f"the {what} ({name}) of {self.path!r}")
        if not isinstance(table, pd.DataFrame):
            raise DataError(f"{name} of {self.path!r} is no {what}; write the file again with anndata.")
        return table

    @property
    def layers(self) -> list[str]:
        """Names of the layers."""
        group = self.file.get("layers")
        return [] if group is None or is_array(group) else list(group)

    def has(self, name: str) -> bool:
        """Whether the file has a part of that name, e.g. ``"X"`` or ``"raw/X"``."""
        # A matrix that is not there may be stored as an empty one.
        return name in self.file and not (is_array(self.file[name]) and self.file[name].shape in (None, ()))

    def matrix(self, layer: str | None = None) -> Matrix:
        """Return a layer, or X if `layer` is None.

        Raises
        ------
        DataError
            If it is not there, or no matrix of numbers.
        """
        if layer is not None and layer not in self.layers:
            raise DataError(
                f"layer={layer!r} is not in the layers of {self.path!r}{did_you_mean(layer, self.layers)} "
                f"(layers: {listing(self.layers)}; layer=None reads X)"
            )
        name = "X" if layer is None else f"layers/{layer}"
        if not self.has(name):
            raw = " or use raw, which adata.raw.to_adata() makes an AnnData of" if self.has("raw/X") else ""
            raise DataError(
                f"{self.path!r} has no {name}; name a layer with counts{raw} (layers: {listing(self.layers)})."
            )
        with reading(f"{name!r} of {self.path!r}"):
            matrix = Matrix.of(self.file[name], self.path)
        if matrix.shape[1] != len(self.var) or not min(matrix.shape):
            raise DataError(
                f"{name} of {self.path!r} has {matrix.shape[0]} cells x {matrix.shape[1]} genes, and the table of "
                f"genes {len(self.var)} rows; a matrix with cells and as many genes is needed."
            )
        return matrix


@dataclass(frozen=True)
class StoredModality(StoredAdata):
    """A modality of a MuData on disk, whose table of cells has the columns of the whole MuData behind its own.

    Attributes
    ----------
    whole
        The open file.
    modality
        Name of the modality.
    """

    whole: Any
    modality: str

    @cached_property
    def _shared(self) -> pd.DataFrame:
        """Columns of the MuData's obs for the cells of this modality."""
        whole = StoredAdata(self.path, self.whole)
        own = super().obs_columns
        return shared_columns(whole.obs(), self.modality, self.obs_names, own)

    @property
    def obs_columns(self) -> list[str]:
        """Names of the columns of obs: those of the modality, then those of the MuData."""
        return [*super().obs_columns, *self._shared.columns]

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the table of cells, or some columns of it."""
        own = super().obs_columns
        if columns is None:
            columns = self.obs_columns
        if missing := [column for column in columns if column not in self.obs_columns]:
            raise missing_column(missing[0], self.path, self.obs_columns)
        table = StoredAdata(self.path, self.file).obs([column for column in columns if column in own])
        return table.join(self._shared[[column for column in columns if column not in own]])[list(columns)]


def _read(stored: Any, what: str) -> Any:
    from anndata.io import read_elem

    check_stored(stored, what)
    return read_elem(stored)


def check_modality(modality: str | None, modalities: Sequence[str], source: str) -> None:
    """Raise unless `modality` is one of those of a MuData."""
    if modality is None:
        raise OptionError(f"{source!r} is a MuData; name a modality with modality= (it has: {listing(modalities)}).")
    if modality not in modalities:
        raise OptionError(
            f"modality={modality!r} is not in {source!r}{did_you_mean(modality, modalities)} "
            f"(it has: {listing(modalities)})"
        )


def shared_columns(obs: pd.DataFrame, modality: str, names: pd.Index, own: Sequence[str]) -> pd.DataFrame:
    """Return the columns of a MuData's obs for the cells `names` of a modality.

    A column that MuData has copied from a modality is named ``"modality:column"``. Those of other modalities are left
    out, as are those of columns that the modality has itself.
    """
    prefix = f"{modality}:"
    taken = {column: str(column).removeprefix(prefix) for column in obs.columns}
    keep = {column: name for column, name in taken.items() if ":" not in name and name not in own}
    return obs.loc[~obs.index.duplicated(), list(keep)].rename(columns=keep).reindex(names)


def missing_column(column: str, source: str, columns: Sequence[str]) -> DataError:
    """Return the error of a column of obs that is not there."""
    shown = [name for name in columns if not str(name).startswith("_scvi_")]
    return DataError(
        f"obs of {source!r} has no column {column!r}{did_you_mean(column, shown)} (it has: {listing(shown)})"
    )
