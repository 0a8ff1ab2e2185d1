"""Input for byte-level language models: files, FASTA records and table rows, each a document with a name."""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from scforge._checks import check_choice
from scforge.errors import DataError, MissingFileError, OptionError, did_you_mean, first_line, listing

KINDS = ("auto", "bytes", "fasta", "table")
"""How files are read; ``"auto"`` decides by file suffix."""

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_KIND_OF = {
    **dict.fromkeys((".fa", ".faa", ".fas", ".fasta", ".ffn", ".fna"), "fasta"),
    **dict.fromkeys(_DELIMITERS, "table"),
}
_COLUMNS = {"gene_column": "gene", "text_column": "text"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

type Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Document(NamedTuple):
    """Bytes with a name."""

    name: str
    data: bytes


def read_documents(
    files: Files,
    *,
    kind: str = "auto",
    field: str | None = None,
    gene_column: str | None = None,
    text_column: str | None = None,
) -> list[Document]:
    r"""Read documents from files, in order; ``.gz`` files are unpacked.

    Parameters
    ----------
    files
        One or several files.
    kind
        ``"bytes"``: each file is one document, named after the file without its suffix. ``"fasta"``: each record is one
        document, which contains the letters of the sequence. ``"table"``: each row of a table (``.tsv``, otherwise
        comma-separated) is one document; quotes delimit cells in ``.csv`` and are ordinary characters in ``.tsv``.
        ``"auto"``: ``.fa``, ``.fasta`` and similar files are FASTA, ``.csv`` and ``.tsv`` are tables, and other files
        are bytes.
    field
        Field of FASTA headers that contains the names; see :func:`read_fasta`.
    gene_column, text_column
        Table columns with the names and the texts. If None, uses ``"gene"`` and ``"text"``.

    Returns
    -------
    The name and bytes of each document.

    Raises
    ------
    OptionError
        If an option is invalid, or has no effect on any of the files.
    MissingFileError
        If a file does not exist.
    DataError
        If a file is empty, does not match `kind`, or lacks a column.

    Examples
    --------
    >>> _ = Path("genes.tsv").write_text("gene\ttext\nTP53\tguards the genome\n")
    >>> read_documents("genes.tsv")
    [Document(name='TP53', data=b'guards the genome')]
    """
    [documents] = read_groups([files], kind=kind, field=field, gene_column=gene_column, text_column=text_column)
    return documents


def read_groups(
    groups: Iterable[Files],
    *,
    kind: str = "auto",
    field: str | None = None,
    gene_column: str | None = None,
    text_column: str | None = None,
) -> list[list[Document]]:
    """Read the documents of each group of files; see :func:`read_documents`."""
    check_choice("kind", kind, KINDS)
    kinds = [
        [(path, _KIND_OF.get(_suffix(path), "bytes") if kind == "auto" else kind) for path in _paths(files)]
        for files in groups
    ]
    there = {this for group in kinds for _, this in group}
    columns = {"gene_column": gene_column, "text_column": text_column}
    for option, value in {"field": field, **columns}.items():
        needed = "fasta" if option == "field" else "table"
        if value is not None and needed not in there:
            raise OptionError(
                f"has no effect, because no file is of kind {needed!r}; omit {option}.", argument=option, value=value
            )
    names = _COLUMNS | {option: column for option, column in columns.items() if column is not None}
    return [[document for path, this in group for document in _read(path, this, field, names)] for group in kinds]


def _paths(files: Files) -> list[Path]:
    try:
        paths = [Path(file) for file in ([files] if isinstance(files, str | os.PathLike) else files)]
    except TypeError as error:
        raise OptionError("must be a file name or a list of file names.", files=files) from error
    if not paths:
        raise OptionError("is empty; pass at least one file.", argument="files")
    return paths


def _read(path: Path, kind: str, field: str | None, columns: dict[str, str]) -> list[Document]:
    if kind == "fasta":
        return [Document(*record) for record in read_fasta(path, field=field)]
    if kind == "table":
        return _rows(path, _DELIMITERS.get(_suffix(path), ","), columns)
    data = _content(path)
    if not data:
        raise DataError(f"contains {str(path)!r}, which is empty; remove it from files.", argument="files")
    return [Document(_unpacked(path).stem, data)]


def _unpacked(path: Path) -> Path:
    """Return the path without the suffix ``.gz``."""
    return Path(path.stem) if path.suffix.lower() == ".gz" else path


def _suffix(path: Path) -> str:
    return _unpacked(path).suffix.lower()


def _rows(path: Path, delimiter: str, columns: dict[str, str]) -> list[Document]:
    """Read a table; csv files may contain quoted cells, while quotes are ordinary characters in tsv files."""
    where = f"files: {str(path)!r}"
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    try:
        # Without a header a row of too many cells is an error, and not an index.
        table = pd.read_csv(
            io.BytesIO(_content(path)),
            sep=delimiter,
            quoting=quoting,
            header=None,
            dtype=str,
            keep_default_na=False,
            encoding="utf-8-sig",
        )
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise DataError(f"{where} cannot be read as a UTF-8 table: {first_line(error)}.") from error
    header = table.iloc[0].tolist()
    if len(table) == 1:
        raise DataError(f"{where} has no rows; write a line with the column names and one line per gene.")
    for option, column in columns.items():
        if header.count(column) != 1:
            twice = f"more than once in {str(path)!r}"
            problem = twice if column in header else f"not in {str(path)!r}{did_you_mean(column, header)}"
            raise DataError(f"is {problem} (columns: {listing(header)}).", argument=option, value=column)
    table = (
        table.iloc[1:].set_axis(header, axis=1)[list(columns.values())].fillna("").apply(lambda col: col.str.strip())
    )
    if (empty := np.argwhere(table.to_numpy() == "")).size:
        row, column = empty[0]
        raise DataError(f"{where} has no {table.columns[column]} in row {row + 2}; fill it in, or remove the row.")
    return [Document(name, text.encode()) for name, text in table.itertuples(index=False)]


class FastaRecord(NamedTuple):
    """One record of a FASTA file.

    Attributes
    ----------
    name
        First word of the header, or value of the requested field.
    sequence
        Letters as in the file, without whitespace.
    """

    name: str
    sequence: bytes


def _content(path: Path) -> bytes:
    """Return the bytes of a file; ``.gz`` files are decompressed."""
    if not path.is_file():
        what = "is a folder; pass the files in the folder" if path.is_dir() else "does not exist; check the file name"
        raise MissingFileError(f": {str(path)!r} {what}.", argument="files")
    data = path.read_bytes()
    if _unpacked(path) == path:
        return data
    try:
        return gzip.decompress(data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f": {str(path)!r} cannot be decompressed: {first_line(error)}.", argument="files") from error


def read_fasta(path: str | os.PathLike[str], *, field: str | None = None) -> list[FastaRecord]:
    r"""Read the records of a FASTA file, plain or ``.gz``.

    Parameters
    ----------
    path
        The file.
    field
        Header field by which records are named, e.g. ``"gene_symbol"`` for ``gene_symbol:TP53`` (Ensembl) or ``"GN"``
        for ``GN=TP53`` (UniProt). If None, uses the first word of the header. The value is one word. The value of a
        UniProt field, whose name consists of two capital letters, continues until the next such field.

    Returns
    -------
    The name and sequence of each record, in the order of the file.

    Raises
    ------
    MissingFileError
        If there is no such file.
    DataError
        If the file contains no records, or a record without name, field or sequence.

    Examples
    --------
    >>> from pathlib import Path
    >>> _ = Path("two.fasta").write_text(">a first GN=TP53\nACGT\nAC\n>b GN=EGFR\nGG\n")
    >>> read_fasta("two.fasta")
    [FastaRecord(name='a', sequence=b'ACGTAC'), FastaRecord(name='b', sequence=b'GG')]
    >>> [record.name for record in read_fasta("two.fasta", field="GN")]
    ['TP53', 'EGFR']
    """
    where = f"files: {str(path)!r}"
    data = _content(Path(path)).removeprefix(_BYTE_ORDER_MARK).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    before, *parts = re.split(rb"^>", data, flags=re.MULTILINE)
    if not parts or before.strip():
        raise DataError(f"{where} does not begin with a FASTA record; start each record with a line such as '>name'.")
    records = []
    for number, part in enumerate(parts, 1):
        header, _, rest = part.partition(b"\n")
        name = _name(header.decode("utf-8", errors="replace").strip(), field, f"{where}, record {number}")
        sequence = b"".join(rest.split())
        if not sequence:
            raise DataError(f"{where} has no sequence for the record {name!r}; remove the record, or add its sequence.")
        records.append(FastaRecord(name, sequence))
    return records


def _name(header: str, field: str | None, where: str) -> str:
    if not header:
        raise DataError(f"{where} has no name; write the name after '>'.")
    if field is None:
        return header.split()[0]
    match = re.search(rf"(?:^|\s){re.escape(field)}[=:](\S+)", header)
    if match is not None and re.fullmatch("[A-Z]{2}", field):
        match = re.search(rf"(?:^|\s){field}=(\S.*?)(?=\s+[A-Z]{{2}}=|$)", header) or match
    if match is None:
        raise DataError(f"{where} ({header[:60]!r}) has no field {field!r}; choose a field that all headers have.")
    return match[1]
