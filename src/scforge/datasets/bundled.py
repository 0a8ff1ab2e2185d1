"""Bundled data sets: raw counts and labels, read without network access."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from anndata import AnnData


def pbmc3k() -> AnnData:
    """Return the 10x PBMC 3k data: raw counts of 2,700 peripheral blood mononuclear cells of a healthy donor.

    The file is part of the package; nothing is downloaded. Each call returns a new object.

    Returns
    -------
    Annotated data with 2,700 cells and 16,634 genes, all of which have at least one count:

    ``X``
        Raw counts (UMIs), integers as float32, CSR with sorted indices.
    ``obs_names``, ``var_names``
        Cell barcodes; gene symbols, made unique.
    ``obs["cell_type"]``
        Categorical with nine cell types; missing for the 62 cells without an annotation.
    ``var["gene_ids"]``
        Ensembl gene ids.
    ``uns["scforge_dataset"]``
        Name, source, license, citation and origin of the annotation, as text.

    Notes
    -----
    Source: "3k PBMCs from a Healthy Donor", Universal 3' Gene Expression dataset analyzed using Cell Ranger 1.1.0,
    10x Genomics (2016), https://www.10xgenomics.com/datasets/3-k-pbm-cs-from-a-healthy-donor-1-standard-1-1-0.
    License: Creative Commons Attribution 4.0 (CC BY 4.0). Changes: genes without any count were left out, symbols were
    made unique, and cell types were added.

    The cell types come from the Seurat guided clustering tutorial (https://satijalab.org/seurat), in which clusters
    were named by their marker genes. The quality control of the tutorial removed the 62 cells without a cell type. The
    cell types are an expert annotation of clusters of the same counts, not an independent measurement.

    Examples
    --------
    >>> from scforge.datasets import pbmc3k
    >>> adata = pbmc3k()
    >>> adata.shape, adata.obs["cell_type"].cat.categories.tolist()[:3]
    ((2700, 16634), ['B', 'CD14+ Mono', 'CD8 T'])
    >>> int(adata.X.sum()), adata.var["gene_ids"]["CD3D"]
    (6390631, 'ENSG00000167286')
    """
    return read_bundled("pbmc3k")


def lung_cell_lines() -> AnnData:
    """Return five lung cancer cell lines in five batches from two protocols: raw counts of 1,021 cells.

    The data are a small example of batch effects: in principal components, about half of the nearest neighbors of a
    cell come from its own batch. The file is part of the package; nothing is downloaded. Each call returns a new
    object.

    Returns
    -------
    Annotated data with 1,021 cells and 11,504 genes, all of which have at least one count:

    ``X``
        Raw counts (UMIs), integers as float32, CSR with sorted indices.
    ``obs_names``, ``var_names``
        Cell names from the source; Ensembl gene ids.
    ``obs["cell_line"]``
        Categorical with the five cell lines, identified by their genotypes.
    ``obs["batch"]``
        Categorical with the five batches: four from CEL-seq2 and one, ``"sc_dropseq"``, from Drop-seq.
    ``uns["scforge_dataset"]``
        Name, source, license, citation and changes, as text.

    Notes
    -----
    Source: https://github.com/LuyiTian/sc_mixology, described by Tian et al. (2019), Nature Methods 16, 479-487.
    License: MIT, Copyright (c) 2018 Luyi Tian. ``uns["scforge_dataset"]["license"]`` contains the full text.

    Changes: only singlets of the CEL-seq2 and Drop-seq batches and genes with a count in each batch are included. The
    counts are downsampled to 3%, because at full depth every method separates the cell lines. The median cell has 708
    counts instead of 23,426. No cell was selected for its label. The dataset card contains the details.

    Examples
    --------
    >>> from scforge.datasets import lung_cell_lines
    >>> adata = lung_cell_lines()
    >>> adata.shape, adata.obs["cell_line"].cat.categories.tolist()
    ((1021, 11504), ['A549', 'H1975', 'H2228', 'H838', 'HCC827'])
    """
    return read_bundled("lung_cell_lines")


def read_bundled(name: str) -> AnnData:
    """Return a bundled data set with its counts as float32 in CSR."""
    import anndata

    with resources.as_file(resources.files("scforge.datasets").joinpath("data", f"{name}.h5ad")) as path:
        adata = anndata.read_h5ad(path)
    about = adata.uns["scforge_dataset"]
    if "licence" in about:
        about["license"] = about.pop("licence")
    # The file holds small integers by gene, which compress best; rows of float32 are what everything else works on.
    counts = adata.X.tocsr().astype(np.float32)
    counts.sort_indices()
    adata.X = counts
    return adata
