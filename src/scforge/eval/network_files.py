"""Files of known edges between transcription factors and genes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scforge._checks import check_positive
from scforge.errors import DataError, MissingFileError, OptionError, did_you_mean, first_line, listing

__all__ = ["read_network"]

_MODES = {"activation": 1.0, "repression": -1.0, "unknown": np.nan}
_SOURCES = ("source", "tf", "regulator", "gene1", "transcription_factor")
_TARGETS = ("target", "gene", "gene2", "target_gene")
_CHIP_ATLAS = re.compile(r"(?P<tf>.+)\|Average", re.IGNORECASE)


def read_network(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    kind: str = "auto",
    source: str | int | None = None,
    target: str | int | None = None,
    confidence: str | None = None,
    min_score: float = 0.0,
) -> pd.DataFrame:
    r"""Read the known targets of transcription factors.

    Parameters
    ----------
    path
        Text, tab- or comma-separated and maybe compressed, or Parquet. Or a list of such files, whose edges are put
        together; ChIP-Atlas has one for each factor.
    kind
        What the file is; ``"auto"`` tells by its columns:

        ``"trrust"``
            ``trrust_rawdata.*.tsv``, without a header: factor, target, mode, PubMed ids; or with one.
        ``"collectri"``
            ``source``, ``target``, ``weight`` of 1 or -1, as from decoupler.
        ``"dorothea"``
            ``source`` (or ``tf``), ``confidence``, ``target``, and ``weight`` (or ``mor``).
        ``"omnipath"``
            CollecTRI or DoRothEA from OmniPath: ``source_genesymbol``, ``target_genesymbol``, ``is_stimulation`` ...
        ``"encode"``
            ``gene_attribute_edges.txt.gz`` of Harmonizome. Genes stand in ``source`` there, and the factors that bind
            near them in ``target``; both change places.
        ``"chip_atlas"``
            Target genes of ChIP-Atlas: one row a gene, ``FACTOR|Average`` and a column for each experiment.
        ``"edges"``
            Any table with a column of sources and one of targets, and maybe ``weight``.
    source, target
        Columns of transcription factors and of targets, for tables whose names are none of the usual ones; numbers from
        0 for a file without a header. They make it ``"edges"``.
    confidence
        Levels of DoRothEA to keep, e.g. ``"AB"``; None keeps all.
    min_score
        ChIP-Atlas only: targets whose average binding score (of MACS2, -10 log10 q) is larger than this.

    Returns
    -------
    ``source`` and ``target``, one row an edge, in the order of the file; and where the kind tells, ``sign`` (1
    activation, -1 repression, NaN unknown, or said both ways), ``weight`` (the largest, where an edge stands there more
    than once) and ``confidence`` (the best).

    Raises
    ------
    MissingFileError
        If there is no such file.
    DataError
        If it cannot be read, is not of this kind, or lacks names.
    OptionError
        If an argument cannot be used.

    Examples
    --------
    >>> with open("trrust_rawdata.human.tsv", "w") as file:
    ...     _ = file.write("AATF\tBAX\tRepression\t22909821\nAATF\tMYC\tActivation\t20549547\n")
    >>> read_network("trrust_rawdata.human.tsv").values.tolist()
    [['AATF', 'BAX', -1.0], ['AATF', 'MYC', 1.0]]
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    if not paths:
        raise OptionError("path=[] names no file; name at least one.")
    if (source is None) != (target is None):
        raise OptionError(f"source={source!r} and target={target!r} name one column; name both, or none.")
    if kind not in ("auto", *_READERS):
        raise OptionError(
            f"kind={kind!r} is not known{did_you_mean(kind, _READERS)} (known: {listing(['auto', *_READERS])})"
        )
    if source is not None and kind not in ("auto", "edges"):
        raise OptionError(f"source={source!r} has no use with kind={kind!r}; leave it out, or say kind='edges'.")
    check_positive("min_score", min_score, or_zero=True)
    found = []
    for one in paths:
        place = Path(one)
        table = _read(place, isinstance(source, int))
        if source is not None:
            made, of_kind = _of_columns(table, place, source, target), "edges"
        else:
            of_kind = _kind_of(table, place) if kind == "auto" else kind
            made = _READERS[of_kind](table, place)
        if min_score > 0:
            _only_for("min_score", min_score, "chip_atlas", of_kind, place)
        if confidence is not None:
            _only_for("confidence", confidence, "dorothea", of_kind, place)
            made = made[made["confidence"].isin(list(confidence))]
        if of_kind == "chip_atlas":
            made = made[made["weight"] > min_score]
        found.append(_checked(made, place))
    edges = _merged(pd.concat(found, ignore_index=True))
    if edges.empty:
        raise DataError(f"no edge is left of {listing(paths, most=3)}; ask for less with min_score or confidence.")
    return edges


def _read(path: Path, headless: bool) -> pd.DataFrame:
    """Return the table of a file as text (of Parquet, as it is); columns are numbers where the file names none."""
    if not path.is_file():
        raise MissingFileError(f"path={str(path)!r} is not a file; say where the network is.")
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        # No text has this character: the first line as a whole, whatever the compression.
        first = pd.read_csv(path, sep="\0", header=None, nrows=1, dtype=str, encoding="utf-8-sig", engine="python")
        line = str(first.iloc[0, 0])
        separator = "\t" if "\t" in line else ","
        table = pd.read_csv(
            path, sep=separator, header=None, dtype=str, keep_default_na=False, encoding="utf-8-sig", quotechar='"'
        )
    except (ValueError, OSError) as error:
        raise DataError(f"path={str(path)!r} cannot be read as a table: {first_line(error)}.") from error
    table = table.apply(lambda column: column.str.strip())
    if headless or _is_trrust(table):
        return table
    names = table.iloc[0].str.lstrip("#").str.strip()
    return table.iloc[1:].set_axis(names.to_numpy(), axis=1).reset_index(drop=True)


def _is_trrust(table: pd.DataFrame) -> bool:
    """Return whether this is TRRUST's file without a header: its third column is the mode."""
    return table.shape[1] >= 3 and bool(table.iloc[:, 2].str.lower().isin(_MODES).all())


def _kind_of(table: pd.DataFrame, path: Path) -> str:
    """Return what a table is, by its columns."""
    if table.columns.dtype.kind == "i":
        return "trrust"
    names = {str(name).lower() for name in table.columns}
    if any(_CHIP_ATLAS.fullmatch(str(name)) for name in table.columns):
        return "chip_atlas"
    if {"source", "source_desc", "target", "target_desc"} <= names:
        return "encode"
    if {"source_genesymbol", "target_genesymbol"} <= names:
        return "omnipath"
    if "confidence" in names and "target" in names:
        return "dorothea"
    if {"source", "target", "mode"} <= names:
        return "trrust"
    if {"source", "target", "weight"} <= names and _are_signs(_column(table, path, "weight")):
        return "collectri"
    if names & set(_SOURCES) and names & set(_TARGETS):
        return "edges"
    raise DataError(
        f"path={str(path)!r} has no columns of a known kind (it has: {listing(table.columns)}); name those of the "
        "factors and of the targets with source=..., target=..., by numbers if there is no header."
    )


def _are_signs(weights: pd.Series) -> bool:
    """Return whether weights are 1 and -1, and both: a list of edges may have the weight 1 throughout."""
    numbers = set(pd.to_numeric(weights, errors="coerce").unique())
    return numbers == {1.0, -1.0}


def _column(table: pd.DataFrame, path: Path, *names: str) -> pd.Series:
    """Return the first column with one of these names, whatever the case."""
    by_name = {str(name).lower(): place for place, name in reversed(list(enumerate(table.columns)))}
    for name in names:
        if name in by_name:
            return table.iloc[:, by_name[name]]
    raise DataError(f"path={str(path)!r} has no column {' or '.join(names)} (it has: {listing(table.columns)}).")


def _numbers(values: pd.Series, path: Path) -> pd.Series:
    try:
        return pd.to_numeric(values).astype(np.float64)
    except (ValueError, TypeError) as error:
        raise DataError(f"path={str(path)!r} has text where numbers are needed: {first_line(error)}.") from error


def _signs(values: pd.Series, path: Path) -> pd.Series:
    numbers = _numbers(values, path)
    return pd.Series(np.sign(numbers), index=values.index).replace(0.0, np.nan)


def _trrust(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    if table.columns.dtype.kind == "i":
        table = table.set_axis(["source", "target", "mode", *table.columns[3:].astype(str)], axis=1)
    modes = _column(table, path, "mode").str.lower()
    if not modes.isin(_MODES).all():
        odd = modes[~modes.isin(_MODES)].unique()
        raise DataError(f"path={str(path)!r} has the modes {listing(odd, most=3)}, none of {listing(_MODES)}.")
    return _named(table, path).assign(sign=modes.map(_MODES))


def _collectri(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    return _named(table, path).assign(sign=_signs(_column(table, path, "weight"), path))


def _dorothea(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    levels = _column(table, path, "confidence")
    made = _named(table, path).assign(confidence=levels)
    names = {str(name).lower() for name in table.columns}
    if names & {"weight", "mor"}:
        made.insert(2, "sign", _signs(_column(table, path, "weight", "mor"), path))
    return made


def _omnipath(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    made = pd.DataFrame(
        {
            "source": _column(table, path, "source_genesymbol"),
            "target": _column(table, path, "target_genesymbol"),
        }
    )
    flags = [
        _column(table, path, name).astype(str).str.lower().isin(["1", "true"])
        for name in ("is_stimulation", "is_inhibition")
    ]
    up, down = flags
    return made.assign(sign=np.select([up & ~down, down & ~up], [1.0, -1.0], np.nan))


def _encode(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    # The line below the header says what the columns are; it is no edge.
    if len(table) and str(_column(table, path, "source").iloc[0]).lower() in ("genesym", "gene symbol", "na", "n/a"):
        table = table.iloc[1:]
    made = pd.DataFrame({"source": _column(table, path, "target"), "target": _column(table, path, "source")})
    n_factors, n_genes = made["source"].nunique(), made["target"].nunique()
    if n_factors > n_genes:
        raise DataError(
            f"path={str(path)!r} would have {n_factors} factors but {n_genes} targets, as if its columns were the "
            "other way round; name them with source=..., target=..."
        )
    return made


def _chip_atlas(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    matches = [match for name in table.columns if (match := _CHIP_ATLAS.fullmatch(str(name)))]
    if len(matches) != 1:
        raise DataError(
            f"path={str(path)!r} has {len(matches)} columns that end in '|Average' (it has: {listing(table.columns)}); "
            "take a file of target genes of ChIP-Atlas."
        )
    return pd.DataFrame(
        {
            "source": matches[0]["tf"],
            "target": table.iloc[:, 0],
            "weight": _numbers(table[matches[0].string], path),
        }
    )


def _edges(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    made = _named(table, path)
    if any(str(name).lower() == "weight" for name in table.columns):
        made["weight"] = _numbers(_column(table, path, "weight"), path)
    return made


def _named(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    return pd.DataFrame({"source": _column(table, path, *_SOURCES), "target": _column(table, path, *_TARGETS)})


def _of_columns(table: pd.DataFrame, path: Path, *columns: Any) -> pd.DataFrame:
    """Return the columns that the user named."""
    found = {}
    for argument, column in zip(("source", "target"), columns, strict=True):
        if column not in table.columns:
            raise DataError(
                f"{argument}={column!r} is not a column of {str(path)!r}{did_you_mean(column, table.columns)} "
                f"(it has: {listing(table.columns)})"
            )
        found[argument] = table[column]
    return pd.DataFrame(found)


def _only_for(argument: str, value: Any, wanted: str, kind: str, path: Path) -> None:
    if kind != wanted:
        raise OptionError(f"{argument}={value!r} is for kind={wanted!r}, but {str(path)!r} is {kind!r}; leave it out.")


def _checked(edges: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Return edges whose names are all there."""
    for column in ("source", "target"):
        names = edges[column]
        missing = np.asarray(names.isna() | (names.astype(str) == ""))
        if missing.any():
            raise DataError(
                f"path={str(path)!r} has {int(missing.sum())} edges without a {column} (first: row "
                f"{int(edges.index[missing][0]) + 1}); fill or remove them."
            )
    return edges.astype({"source": str, "target": str})


def _merged(edges: pd.DataFrame) -> pd.DataFrame:
    """Return one row an edge."""
    grouped = edges.groupby(["source", "target"], sort=False)
    best = {name: how for name, how in {"weight": "max", "confidence": "min"}.items() if name in edges}
    merged = grouped.agg(best).reset_index() if best else edges[["source", "target"]].drop_duplicates()
    merged = merged.reset_index(drop=True)
    if "sign" in edges:
        spread = grouped["sign"].agg(["min", "max"])
        sign = np.where(spread["min"] == spread["max"], spread["min"], np.nan)
        merged.insert(2, "sign", sign)
    return merged


_READERS: dict[str, Callable[[pd.DataFrame, Path], pd.DataFrame]] = {
    "trrust": _trrust,
    "collectri": _collectri,
    "dorothea": _dorothea,
    "omnipath": _omnipath,
    "encode": _encode,
    "chip_atlas": _chip_atlas,
    "edges": _edges,
}
