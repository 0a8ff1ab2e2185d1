"""FASTA files: a header line that begins with ``>``, then the sequence, over any number of lines."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from pathlib import Path
from typing import NamedTuple

from scforge.errors import DataError, MissingFileError, first_line

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class FastaRecord(NamedTuple):
    """One record of a FASTA file.

    Attributes
    ----------
    name
        The first word of its header, or the value of the field that was asked for.
    sequence
        Its letters as they stand in the file, without white space.
    """

    name: str
    sequence: bytes


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Return whether the name of a file says that gzip packed it.

    Examples
    --------
    >>> is_packed("proteins.fa.gz"), is_packed("PROTEINS.FA.GZ"), is_packed("proteins.fa")
    (True, True, False)
    """
    return Path(path).suffix.lower() == ".gz"


def read_whole(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a file, those of a ``.gz`` file unpacked.

    Raises
    ------
    MissingFileError
        If there is no such file.
    DataError
        If a ``.gz`` file is damaged.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder; name the files in it" if path.is_dir() else "does not exist; check its name"
        raise MissingFileError(f"files: {str(path)!r} {what}.")
    if not is_packed(path):
        return path.read_bytes()
    try:
        with gzip.open(path) as handle:
            return handle.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"files: {str(path)!r} cannot be unpacked: {first_line(error)}.") from error


def read_fasta(path: str | os.PathLike[str], *, field: str | None = None) -> list[FastaRecord]:
    r"""Read the records of a FASTA file, plain or ``.gz``.

    Parameters
    ----------
    path
        The file.
    field
        Name records by a field of their header, e.g. ``"gene_symbol"`` for ``gene_symbol:TP53`` (Ensembl) or ``"GN"``
        for ``GN=TP53`` (UniProt); None takes the first word of the header. The value is a word; that of a UniProt
        field, which has a name of two capitals, goes on until the next such field.

    Returns
    -------
    Name and sequence of each record, in the order of the file.

    Raises
    ------
    MissingFileError
        If there is no such file.
    DataError
        If it has no records, or one without name, field or sequence.

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
    data = read_whole(path).removeprefix(_BYTE_ORDER_MARK)
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    before, *parts = re.split(rb"^>", data, flags=re.MULTILINE)
    if not parts:
        raise DataError(f"{where} has no FASTA records; each begins with a line such as '>name'.")
    if before.strip():
        raise DataError(f"{where} has text before its first FASTA record; each begins with a line such as '>name'.")
    records = []
    for number, part in enumerate(parts, 1):
        header, _, rest = part.partition(b"\n")
        name = _name(header.decode("utf-8", errors="replace").strip(), field, f"{where}, record {number}")
        sequence = b"".join(rest.split())
        if not sequence:
            raise DataError(f"{where} has no sequence for the record {name!r}; remove it, or give it one.")
        records.append(FastaRecord(name, sequence))
    return records


def _name(header: str, field: str | None, where: str) -> str:
    if not header:
        raise DataError(f"{where} has no name; write it behind '>'.")
    if field is None:
        return header.split()[0]
    found = re.search(rf"(?:^|\s){re.escape(field)}[=:](\S+)", header)
    if found is not None and re.fullmatch("[A-Z]{2}", field):
        found = re.search(rf"(?:^|\s){field}=(\S.*?)(?=\s+[A-Z]{{2}}=|$)", header) or found
    if found is None:
        raise DataError(f"{where} ({header[:60]!r}) has no field {field!r}; name one that all headers have.")
    return found[1]
