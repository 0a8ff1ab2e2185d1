"""Make the data file behind ``scforge.datasets.pbmc3k`` from an h5ad of the whole 10x PBMC 3k matrix.

Usage: ``python tools/make_pbmc3k.py --source path/to/pbmc3k.h5ad``

The source needs raw counts in ``X``, symbols as ``var_names``, ``var["gene_ids"]`` and ``obs["cell_type"]``. The same
source and the same library versions give the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pandas as pd
from scipy import sparse

from scforge._io import atomic_path
from scforge.datasets import pbmc3k

TARGET = Path(__file__).parents[1] / "src" / "scforge" / "datasets" / "data" / "pbmc3k.h5ad"

ABOUT = {
    "name": "pbmc3k",
    "title": "3k PBMCs from a Healthy Donor",
    "source": "https://www.10xgenomics.com/datasets/3-k-pbm-cs-from-a-healthy-donor-1-standard-1-1-0",
    "license": "CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/), 10x Genomics",
    "citation": (
        "3k PBMCs from a Healthy Donor, Universal 3' Gene Expression dataset analyzed using Cell Ranger 1.1.0, "
        "10x Genomics (2016)"
    ),
    "annotation": (
        "cell types of the Seurat guided clustering tutorial (https://satijalab.org/seurat): clusters named by marker "
        "genes; the 62 cells removed by its quality control have none"
    ),
    "changes": "genes without a count left out; gene symbols made unique; cell types added",
}


def detected_genes(source: ad.AnnData) -> ad.AnnData:
    """Return the genes of `source` with at least one count, and only the columns that the package documents."""
    counts = sparse.csc_matrix(source.X)
    counts.eliminate_zeros()
    counts.sort_indices()
    if counts.data.min() < 0 or (counts.data % 1).any() or counts.data.max() > np.iinfo(np.uint16).max:
        raise ValueError("the counts of the source are not whole numbers between 0 and 65,535")
    detected = np.diff(counts.indptr) > 0
    labels = source.obs["cell_type"]
    # Plain object columns are written as plain string arrays, which every reader of h5ad understands.
    names = source.var_names[detected].astype(object)
    gene_ids = source.var["gene_ids"].to_numpy(dtype=object)[detected]
    cell_type = pd.Categorical.from_codes(labels.cat.codes, labels.cat.categories.astype(object))
    return ad.AnnData(
        X=counts[:, detected].astype(np.uint16),
        obs=pd.DataFrame({"cell_type": cell_type}, index=source.obs_names.astype(object)),
        var=pd.DataFrame({"gene_ids": pd.Series(gene_ids, index=names, dtype=object)}, index=names),
        uns={"scforge_dataset": ABOUT},
    )


def verify(source: ad.AnnData) -> None:
    """Compare what the package now loads with `source`, value by value."""
    loaded = pbmc3k()
    whole = sparse.csr_matrix(source.X)
    detected = np.asarray(whole.astype(bool).sum(axis=0)).ravel() > 0
    difference = whole[:, detected] != loaded.X
    if difference.nnz or loaded.X.sum(dtype=np.float64) != whole.sum(dtype=np.float64):
        raise ValueError("the written counts differ from the source")
    pairs = {
        "barcodes": (source.obs_names, loaded.obs_names),
        "symbols": (source.var_names[detected], loaded.var_names),
        "gene ids": (source.var["gene_ids"][detected], loaded.var["gene_ids"]),
        "categories": (source.obs["cell_type"].cat.categories, loaded.obs["cell_type"].cat.categories),
        "cell types": (source.obs["cell_type"].cat.codes, loaded.obs["cell_type"].cat.codes),
    }
    for what, (expected, found) in pairs.items():
        if list(expected) != list(found):
            raise ValueError(f"the written {what} differ from the source")


def main() -> None:
    """Write the data file, then load it and compare it with the source."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="h5ad with the whole PBMC 3k matrix")
    source = ad.read_h5ad(parser.parse_args().source)
    with atomic_path(TARGET) as path, h5py.File(path, "w") as file:
        adata = detected_genes(source)
        counts = adata.X
        adata.X = None
        smallest = {"compression": "gzip", "compression_opts": 9}
        ad.io.write_elem(file, "/", adata, dataset_kwargs=smallest)
        # Shuffled bytes halve the matrix, but the text beside it cannot be shuffled, hence the two steps.
        ad.io.write_elem(file, "X", counts, dataset_kwargs={**smallest, "shuffle": True})
        file.pop("raw", None)  # newer anndata writes a null here that older versions cannot read
    verify(source)
    print(f"{TARGET.name}: {TARGET.stat().st_size / 1e6:.2f} MB, equal to the source")


if __name__ == "__main__":
    main()
