"""What models of bytes read: files, records of FASTA files, rows of tables. Each is a document with a name."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from scforge.errors import DataError, OptionError, did_you_mean, listing
from scforge.soma.fasta import is_packed, read_fasta, read_whole

KINDS = ("auto", "bytes", "fasta", "table")
"""How files are read; ``"auto"`` decides by their suffixes."""

_FASTA = {".fa", ".faa", ".fas", ".fasta", ".ffn", ".fna"}
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_COLUMNS = {"gene_column": "gene", "text_column": "text"}
_MOST_LETTERS = 2**31 - 1
"""Of a cell of a table."""

type Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Document(NamedTuple):
    """Some bytes with a name."""

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
        One file or several.
    kind
        ``"bytes"``: each file is one document, named as the file without its suffix. ``"fasta"``: each record is
        one, of the letters of its sequence. ``"table"``: each row of a table (``.tsv``, else separated by commas) is
        one; quotes hold a cell of ``.csv`` together, in ``.tsv`` they are letters. ``"auto"``: ``.fa``, ``.fasta`` and
        the like are FASTA, ``.csv`` and ``.tsv`` are tables, others bytes.
    field
        Field of FASTA headers with the names, see :func:`scforge.soma.fasta.read_fasta`.
    gene_column, text_column
        Columns of tables with the names and the texts; None for ``"gene"`` and ``"text"``.

    Returns
    -------
    Name and bytes of each document.

    Raises
    ------
    OptionError
        If an option cannot be used, or is of use to none of the files.
    MissingFileError
        If a file does not exist.
    DataError
        If a file is empty, is not what `kind` says, or lacks a column.

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
    """Read the documents of each group of files, see :func:`read_documents`."""
    if kind not in KINDS:
        raise OptionError(f"kind={kind!r} is not known{did_you_mean(kind, KINDS)} (known: {listing(KINDS)})")
    columns = {"gene_column": gene_column, "text_column": text_column}
    kinds = [[(path, _kind_of(path, kind)) for path in _paths(files)] for files in groups]
    there = {this for group in kinds for _, this in group}
    needs = {"field": (field, "fasta", "FASTA file"), **{name: (columns[name], "table", "table") for name in columns}}
    for option, (value, needed, words) in needs.items():
        if value is not None and not isinstance(value, str):
            raise OptionError(f"{option}={value!r} is no text; give a name.")
        if value is not None and needed not in there:
            raise OptionError(f"{option}={value!r} has no use, as none of files is a {words}; leave it out.")
    names = _COLUMNS | {option: column for option, column in columns.items() if column is not None}
    return [[one for path, this in group for one in _read(path, this, field, names)] for group in kinds]


def _paths(files: Files) -> list[Path]:
    given = [files] if isinstance(files, str | os.PathLike) else files
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise OptionError(f"files={files!r} is neither the name of a file nor a list of names.")
    paths = []
    for file in given:
        if not isinstance(file, str | os.PathLike):
            raise OptionError(f"files holds {file!r}, which is not the name of a file.")
        paths.append(Path(file))
    if not paths:
        raise OptionError("files names no file; give at least one.")
    return paths


def _kind_of(path: Path, kind: str) -> str:
    if kind != "auto":
        return kind
    return "fasta" if _suffix(path) in _FASTA else "table" if _suffix(path) in _DELIMITERS else "bytes"


def _read(path: Path, kind: str, field: str | None, columns: dict[str, str]) -> list[Document]:
    if kind == "fasta":
        return [Document(*record) for record in read_fasta(path, field=field)]
    if kind == "table":
        return _rows(path, _DELIMITERS.get(_suffix(path), ","), columns)
    data = read_whole(path)
    if not data:
        raise DataError(f"files: {str(path)!r} is empty; leave it out.")
    return [Document(Path(path.stem).stem if is_packed(path) else path.stem, data)]


def check_names(documents: Sequence[Document]) -> None:
    """Raise if two documents have one name."""
    if twice := [name for name, count in Counter(one.name for one in documents).items() if count > 1]:
        raise DataError(
            f"files have several documents of the name {twice[0]!r} ({len(twice)} names stand more than once); name "
            "them apart, or pass duplicates='mean' (--duplicates mean) for the mean of their vectors."
        )


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if is_packed(path) else path.suffix.lower()


def _rows(path: Path, delimiter: str, columns: dict[str, str]) -> list[Document]:
    where = f"files: {str(path)!r}"
    quoting: Literal[0, 3] = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    try:
        lines = io.StringIO(read_whole(path).decode("utf-8-sig"), newline="")
        with _cells_of_any_length():
            rows = list(csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{where} cannot be read as a table in UTF-8: {error}.") from error
    if not any(rows[1:]):
        raise DataError(f"{where} has no rows; give a line of column names and one for each gene.")
    header = rows[0]
    places = []
    for option, column in columns.items():
        if header.count(column) != 1:
            why = "twice" if column in header else f"not{did_you_mean(column, header)}"
            raise DataError(f"{option}={column!r} is {why} in {str(path)!r} (it has: {listing(header)}).")
        places.append(header.index(column))
    documents = []
    for number, row in enumerate(rows[1:], 2):
        if not row:
            continue  # an empty line
        if len(row) != len(header):
            raise DataError(f"{where} has {len(row)} cells in row {number}, but {len(header)} columns.")
        name, words = (row[place].strip() for place in places)
        if not name or not words:
            lacks = columns["text_column" if name else "gene_column"]
            raise DataError(f"{where} has no {lacks} in row {number}; leave it out.")
        documents.append(Document(name, words.encode()))
    return documents


@contextmanager
def _cells_of_any_length() -> Iterator[None]:
    before = csv.field_size_limit(_MOST_LETTERS)
    try:
        yield
    finally:
        csv.field_size_limit(before)
