"""Published dictionaries of the Geneformer tokenizers, and their treatment of duplicate genes.

Theodoris et al. 2023, https://doi.org/10.1038/s41586-023-06139-9
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, MissingFileError, OptionError, first_line, listing

if TYPE_CHECKING:
    import pandas as pd


MODEL_INPUT = {"V1": 2048, "V2": 4096}
"""Maximum number of tokens per cell, including special tokens."""

_BOTH = "the two dictionaries (gene to token, gene to median) as a tuple"
_IN_MEMORY = {"tokens_medians": _BOTH, "ensembl_map": "the dictionary from former to current ids"}

_SPECIAL = {"V1": ("<pad>", "<mask>"), "V2": ("<pad>", "<mask>", "<cls>", "<eos>")}


def geneformer_vocab(
    tokens_medians: pd.DataFrame | str | os.PathLike[str] | Sequence[Mapping[str, float]],
    version: str,
    ensembl_map: pd.DataFrame | str | os.PathLike[str] | Mapping[str, str] | None,
) -> GeneVocab:
    """Return the vocabulary of published dictionaries, with token ids, medians, and former ids as aliases.

    See :meth:`scforge.tokenizers.RankValueTokenizer.from_geneformer` for the parameters.
    """
    if isinstance(tokens_medians, tuple | list):
        if len(tokens_medians) != 2 or not all(isinstance(part, Mapping) for part in tokens_medians):
            raise OptionError(f"is not a pair of dictionaries; pass {_BOTH}.", argument="tokens_medians")
        tokens, medians = (dict(part) for part in tokens_medians)
    else:
        table = _table(tokens_medians, "tokens_medians", ("gene_id", "token", "median"))
        tokens, medians = (
            dict(zip(rows["gene_id"].astype(str), rows[name].tolist(), strict=True))
            for name in ("token", "median")
            for rows in [table[table[name].notna()]]
        )
    for what, of_genes in (("token", tokens), ("median", medians)):
        if odd := [value for value in of_genes.values() if not isinstance(value, numbers.Real)]:
            raise DataError(
                f"contains the {what} {odd[0]!r}, which is not a number; pass {_BOTH}.", argument="tokens_medians"
            )
    names = sorted(tokens, key=lambda name: tokens[name])
    special = _SPECIAL[version]
    if [tokens[name] for name in names] != list(range(len(names))):
        raise DataError(
            "the token ids in tokens_medians must be consecutive integers from 0; pass a token dictionary as published."
        )
    if tuple(names[: len(special)]) != special or any(name.startswith("<") for name in names[len(special) :]):
        raise DataError(
            f"starts with {listing(names[:4])}, but Geneformer {version} has the special tokens "
            f"{listing(special)}; pass the dictionaries of version {version}, or the version that matches the "
            "dictionaries (for dictionaries that scforge exported, load the saved scforge model instead).",
            argument="tokens_medians",
        )
    genes = tuple(names[len(special) :])
    if bad := [gene for gene in genes if not 0 < medians.get(gene, 0) < float("inf")]:
        raise DataError(
            f"has no positive median for {len(bad)} genes (first: {bad[0]!r}, {medians.get(bad[0])}); "
            "pass the two dictionaries of the same release.",
            argument="tokens_medians",
        )
    former, of_vocab = None, set(genes)
    if isinstance(ensembl_map, Mapping):
        former = list(ensembl_map.items())
    elif ensembl_map is not None:
        table = _table(ensembl_map, "ensembl_map", ("ensembl_id", "gene_id"))
        former = list(zip(table["ensembl_id"].astype(str), table["gene_id"].astype(str), strict=True))
    return GeneVocab(
        genes=genes,
        medians=np.array([medians[gene] for gene in genes]),
        release=f"Geneformer {version}",
        special_tokens=special,
        aliases=None if former is None else {old: new for old, new in former if new in of_vocab and old != new},
    )


def geneformer_columns(
    cells: sparse.csr_matrix, columns: np.ndarray, *, collapse: bool
) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Return the columns of vocabulary genes in the order in which Geneformer's code processes them.

    Parameters
    ----------
    cells
        Counts, shape (B, n_vars).
    columns
        Gene of each column, or -1 if unknown, shape (n_vars,).
    collapse
        Whether to sum the columns of the same gene, and put the sums after the genes with one column, in the order of
        their first column (V2). If false, keeps all columns (V1).

    Returns
    -------
    Canonical counts without zeros, shape (B, n), and the gene of each of the n columns.
    """
    used = np.flatnonzero(columns >= 0)
    genes = columns[used]
    if collapse:
        _, first, inverse, sizes = np.unique(genes, return_index=True, return_inverse=True, return_counts=True)
        repeated = sizes > 1
        order = np.lexsort((first, repeated))
        place_of = np.empty(len(order), dtype=np.int64)
        place_of[order] = np.arange(len(order))
        positions, genes = place_of[inverse], genes[first[order]]
    else:
        positions = np.arange(len(used))
    target = np.full(cells.shape[1], -1, dtype=np.int64)
    target[used] = positions
    entries = sparse.coo_matrix(cells)
    kept = target[entries.col] >= 0
    ordered = sparse.csr_matrix(
        (entries.data[kept].astype(np.float64), (entries.row[kept], target[entries.col[kept]])),
        shape=(cells.shape[0], len(genes)),
    )
    ordered.sum_duplicates()
    ordered.eliminate_zeros()
    return ordered, genes


def _table(source: pd.DataFrame | str | os.PathLike[str], argument: str, columns: tuple[str, ...]) -> pd.DataFrame:
    import pandas as pd

    if isinstance(source, str | os.PathLike):
        path, where = Path(source), f"{argument}={str(source)!r}"
        if path.suffix in (".pkl", ".pickle"):
            # Unpickling runs code that the file brings.
            raise OptionError(
                f"{where} is a pickle file, which can run code; if you trust it, read it with pickle.load and pass "
                f"{_IN_MEMORY[argument]}."
            )
        if not path.is_file():
            raise MissingFileError(f"{where} does not exist; pass a parquet or CSV file.")
        try:
            source = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{where} cannot be read as a table: {first_line(error)}.") from error
    if not isinstance(source, pd.DataFrame) or not set(columns) <= set(source.columns):
        has = listing(map(str, source)) if isinstance(source, pd.DataFrame | Mapping) else type(source).__name__
        raise DataError(
            f"is not a table with the columns {listing(columns)} (it has: {has}); pass such a table, a "
            f"file, or {_IN_MEMORY[argument]}.",
            argument=argument,
        )
    return source
