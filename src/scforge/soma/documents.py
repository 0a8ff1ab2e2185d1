"""What models of bytes read: files, records of FASTA files, rows of tables. Each is a document with a name."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scforge.errors import DataError, OptionError, did_you_mean, listing
from scforge.soma.fasta import read_fasta, read_whole

__all__ = ["KINDS", "Document", "check_names", "read_documents"]

KINDS = ("auto", "bytes", "fasta", "table")
"""How files are read; ``"auto"`` decides by their suffixes."""

_FASTA = {".fa", ".faa", ".fas", ".fasta", ".ffn", ".fna"}
_DELIMITERS = {".csv": ",", ".tsv": "\t"}

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
    gene_column: str = "gene",
    text_column: str = "text",
) -> list[Document]:
    r"""Read documents from files, in order; ``.gz`` files are unpacked.

    Parameters
    ----------
    files
        One file or several.
    kind
        ``"bytes"``: each file is one document, named as the file without its suffix. ``"fasta"``: each record is
        one, of the letters of its sequence. ``"table"``: each row of a table (``.tsv``, else separated by commas) is
        one. ``"auto"``: ``.fa``, ``.fasta`` and the like are FASTA, ``.csv`` and ``.tsv`` are tables, others bytes.
    field
        Field of FASTA headers with the names, see :func:`scforge.soma.fasta.read_fasta`.
    gene_column, text_column
        Columns of tables with the names and the texts.

    Raises
    ------
    OptionError
        If an option cannot be used.
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
    if kind not in KINDS:
        raise OptionError(f"kind={kind!r} is not known{did_you_mean(kind, KINDS) or ';'} (known: {listing(KINDS)})")
    paths = [Path(file) for file in ([files] if isinstance(files, str | os.PathLike) else files)]
    if not paths:
        raise OptionError("files names no file; give at least one.")
    documents: list[Document] = []
    for path in paths:
        suffix = _suffix(path)
        this = kind
        if kind == "auto":
            this = "fasta" if suffix in _FASTA else "table" if suffix in _DELIMITERS else "bytes"
        if this == "fasta":
            documents += [Document(*record) for record in read_fasta(path, field=field)]
        elif this == "table":
            documents += _rows(path, _DELIMITERS.get(suffix, ","), gene_column, text_column)
        else:
            whole = path.with_suffix("") if path.suffix == ".gz" else path
            documents.append(Document(whole.stem, read_whole(path)))
            if not documents[-1].data:
                raise DataError(f"files: {str(path)!r} is empty; leave it out.")
    return documents


def check_names(documents: Sequence[Document]) -> None:
    """Raise if two documents have one name."""
    if twice := [name for name, count in Counter(one.name for one in documents).items() if count > 1]:
        raise DataError(
            f"files have several documents of the name {twice[0]!r} ({len(twice)} names stand more than once); name "
            "them apart, or pass duplicates='mean' (--duplicates mean) for the mean of their vectors."
        )


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def _rows(path: Path, delimiter: str, gene_column: str, text_column: str) -> list[Document]:
    where = f"files: {str(path)!r}"
    try:
        text = read_whole(path).decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{where} cannot be read as a table in UTF-8: {error}.") from error
    if len(rows) < 2:
        raise DataError(f"{where} has no rows; give a line of column names and one for each gene.")
    header = rows[0]
    places = []
    for option, column in (("gene_column", gene_column), ("text_column", text_column)):
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
            raise DataError(f"{where} has no {text_column if name else gene_column} in row {number}; leave it out.")
        documents.append(Document(name, words.encode()))
    return documents
