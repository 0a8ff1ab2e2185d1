"""Make the gene table behind ``gene_vocab="human_protein_coding"`` from a table of all human genes.

Usage: ``python tools/make_gene_tables.py --source path/to/homo_sapiens.parquet``

The source needs the columns ``gene_id``, ``symbol`` and ``biotype``. The same source gives the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
from pathlib import Path

import pandas as pd

from scforge._io import atomic_write_bytes

TARGET = Path(__file__).parents[1] / "src" / "scforge" / "data" / "tables" / "human_protein_coding.csv.gz"


def protein_coding(genes: pd.DataFrame) -> pd.DataFrame:
    """Return id and symbol of the protein-coding genes, each id once, ordered by id.

    Pseudoautosomal copies on Y (``_PAR_Y``) share their id with the gene on X once the suffix is gone, so they are
    dropped. Ordering by id also means that the oldest gene comes first among those that share a symbol.
    """
    table = genes.loc[genes["biotype"] == "protein_coding", ["gene_id", "symbol"]]
    table = table[~table["gene_id"].str.endswith("_PAR_Y")]
    return table.sort_values(["gene_id", "symbol"]).drop_duplicates("gene_id").reset_index(drop=True)


def packed(table: pd.DataFrame) -> bytes:
    """Return `table` as gzipped CSV without a time stamp."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.itertuples(index=False))
    return gzip.compress(text.getvalue().encode(), compresslevel=9, mtime=0)


def main() -> None:
    """Write the table, then read it back and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="parquet with gene_id, symbol and biotype")
    table = protein_coding(pd.read_parquet(parser.parse_args().source))
    atomic_write_bytes(TARGET, packed(table))
    found = pd.read_csv(TARGET, keep_default_na=False)
    if found.to_numpy().tolist() != table.to_numpy().tolist():
        raise ValueError("the written table differs from the source")
    print(f"{TARGET.name}: {len(table)} genes, {TARGET.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
