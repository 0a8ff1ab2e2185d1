"""Make the gene tables of ``scforge.data`` from the gene annotations of man and mouse and a table of their orthologs.

Usage: ``python tools/make_gene_tables.py --human homo_sapiens.parquet --mouse mus_musculus.parquet
--orthologs human_mouse_orthologs.parquet``

The annotations need the columns ``gene_id``, ``symbol`` and ``biotype``; the orthologs are a BioMart export. The same
sources give the same bytes. The numbers that are printed stand in the README of the tables.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
from collections import defaultdict
from pathlib import Path

import pandas as pd

from scforge._io import atomic_write_bytes

FOLDER = Path(__file__).parents[1] / "src" / "scforge" / "data" / "tables"

BIOMART = {
    "Gene stable ID": "human",
    "Mouse gene stable ID": "mouse",
    "Mouse homology type": "type",
    "Mouse orthology confidence [0 low, 1 high]": "confidence",
}


def protein_coding(genes: pd.DataFrame) -> pd.DataFrame:
    """Return id and symbol of the protein-coding genes, each id once, ordered by id.

    Pseudoautosomal copies on Y (``_PAR_Y``) share their id with the gene on X once the suffix is gone, so they are
    dropped. Ordering by id also means that the oldest gene comes first among those that share a symbol.
    """
    table = genes.loc[genes["biotype"] == "protein_coding", ["gene_id", "symbol"]]
    table = table[~table["gene_id"].str.endswith("_PAR_Y")]
    return table.sort_values(["gene_id", "symbol"]).drop_duplicates("gene_id").reset_index(drop=True)


def all_genes(genes: pd.DataFrame) -> pd.DataFrame:
    """Return id and symbol of all genes, ordered by id; the symbol is empty where a gene has none but its id."""
    table = genes[["gene_id", "symbol"]].sort_values("gene_id").drop_duplicates("gene_id").reset_index(drop=True)
    return table.assign(symbol=table["symbol"].where(table["symbol"] != table["gene_id"], ""))


def families(orthologs: pd.DataFrame, known: set[str]) -> pd.DataFrame:
    """Return the families of orthologs with one gene on one side at least, one row each.

    Columns: ``humans`` and ``mice`` (sorted ids), ``one`` (one gene on either side), ``high`` (it has a pair of high
    confidence) and ``known`` (all genes are in the annotations). Many-to-many families are left out.

    One supported pair is enough for a family: its other members are copies within a species, whose places in the
    genome cannot all be conserved, so that most of them count as of low confidence.
    """
    pairs = orthologs.rename(columns=BIOMART)[list(BIOMART.values())].dropna(subset=["type"])
    one, many = pairs[pairs["type"] == "ortholog_one2one"], pairs[pairs["type"] == "ortholog_one2many"]
    alone = many["human"].map(many["human"].value_counts()) > 1
    groups = [*one.groupby("human"), *many[alone].groupby("human"), *many[~alone].groupby("mouse")]
    rows = []
    for _, group in groups:
        humans, mice = sorted(set(group["human"])), sorted(set(group["mouse"]))
        if len(humans) > 1 and len(mice) > 1:
            raise ValueError(f"{humans} and {mice} are called one-to-many but are not")
        is_one = group["type"].iloc[0] == "ortholog_one2one"
        rows.append((humans, mice, is_one, bool((group["confidence"] == 1).any()), known.issuperset([*humans, *mice])))
    members = [gene for row in rows for gene in (*row[0], *row[1])]
    if len(set(members)) < len(members):
        raise ValueError("a gene is in two families")
    return pd.DataFrame(rows, columns=["humans", "mice", "one", "high", "known"])


def human_mouse(found: pd.DataFrame, annotations: list[pd.DataFrame]) -> pd.DataFrame:
    """Return one row a token: pairs before families, each ordered by human id.

    The symbol of a gene and its further names are left out where they also name a gene outside of the token, in
    either species: such a name must not bring the counts of another gene.
    """
    symbol_of: dict[str, str] = {}
    bearers = defaultdict(set)
    for gene, symbol in pd.concat(annotations)[["gene_id", "symbol"]].itertuples(index=False):
        symbol_of[gene] = symbol
        bearers[symbol].add(gene)
    rows = []
    for family in found[found["high"] & found["known"]].itertuples():
        members = [*family.humans, *family.mice]
        safe = {gene: symbol_of[gene] for gene in members if bearers[symbol_of[gene]] <= set(members)}
        first, *others = members
        symbol = safe.pop(first, "")
        names = [*others, *dict.fromkeys(s for g, s in safe.items() if s not in {g, symbol})]
        rows.append((first, "" if symbol == first else symbol, " ".join(names), int(not family.one)))
    table = pd.DataFrame(rows, columns=["gene_id", "symbol", "aliases", "family"])
    return table.sort_values(["family", "gene_id"]).reset_index(drop=True)


def packed(table: pd.DataFrame) -> bytes:
    """Return `table` as gzipped CSV without a time stamp."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.itertuples(index=False))
    return gzip.compress(text.getvalue().encode(), compresslevel=9, mtime=0)


def write(name: str, table: pd.DataFrame) -> None:
    """Write a table, then read it back and compare."""
    target = FOLDER / f"{name}.csv.gz"
    atomic_write_bytes(target, packed(table))
    found = pd.read_csv(target, keep_default_na=False, dtype=str)
    if found.to_numpy().tolist() != table.astype(str).to_numpy().tolist():
        raise ValueError(f"the written table {name} differs from the source")
    print(f"{target.name}: {len(table)} rows, {target.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    """Write all tables and print how many orthologs each choice keeps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for argument in ("human", "mouse", "orthologs"):
        parser.add_argument(f"--{argument}", type=Path, required=True, help="parquet")
    paths = parser.parse_args()
    human, mouse = pd.read_parquet(paths.human), pd.read_parquet(paths.mouse)
    found = families(pd.read_parquet(paths.orthologs), known={*human["gene_id"], *mouse["gene_id"]})
    names = {True: "one-to-one pairs", False: "one-to-many families"}
    for is_one, group in found.groupby("one"):
        kept = int((group["high"] & group["known"]).sum())
        print(f"{names[bool(is_one)]}: {len(group)}, of high confidence {group['high'].sum()}, kept {kept}")
    write("human_genes", all_genes(human))
    write("mouse_genes", all_genes(mouse))
    write("human_protein_coding", protein_coding(human))
    write("mouse_protein_coding", protein_coding(mouse))
    table = human_mouse(found, [human, mouse])
    write("human_mouse", table)
    print(f"tokens without a symbol: {(table['symbol'] == '').groupby(table['family']).sum().to_dict()}")


if __name__ == "__main__":
    main()
