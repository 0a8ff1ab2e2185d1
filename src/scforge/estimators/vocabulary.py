"""Which genes a model is built on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scforge.data.cells import CellSource
from scforge.data.mapping import gene_names, map_names
from scforge.data.named import open_vocab
from scforge.data.selection import gene_medians, select_genes, variable_genes
from scforge.data.vocab import FROM_DATA, GeneVocab
from scforge.errors import OptionError

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.data.cells import Cells
    from scforge.training.datamodule import CellDataModule

__all__ = ["SAMPLED_CELLS", "vocab_of_adata", "vocab_of_cells"]

SAMPLED_CELLS = 100_000
"""Training cells, drawn at random, that choices are made from where there are more: they fit into memory."""


def vocab_of_adata(
    adata: AnnData, setup: dict[str, Any], vocab: str | GeneVocab, n_top_genes: int | None, *, needs_medians: bool
) -> GeneVocab:
    """Choose the genes of a model of an AnnData, with their medians if the tokenizer needs them."""
    from scforge.data.sources import open_cells

    key, layer = setup["gene_key"], setup["layer"]
    within = None if vocab == FROM_DATA else open_vocab(vocab)
    if within is not None:
        map_names(gene_names(adata, key), within, var=adata.var, gene_key=key, whole=not within.chosen_from_data)
    made = within
    if made is None or n_top_genes is not None:
        made = select_genes(
            adata, layer=layer, gene_key=key, n_top_genes=n_top_genes, batch_key=setup["batch_key"], within=within
        )
    if needs_medians and made.medians is None:
        cells = open_cells(adata, made, layer=layer, gene_key=key)
        assert isinstance(cells, CellSource)
        made = made.with_medians(gene_medians(cells.counts, cells.totals))
    return made


def vocab_of_cells(
    data: CellDataModule, vocab: str | GeneVocab, n_top_genes: int | None, *, needs_medians: bool
) -> GeneVocab:
    """Choose the genes of a model of the cells of a data module: of all, or of a sample of the training cells."""
    cells: Cells = data.cells
    if vocab != FROM_DATA:
        cells = cells.with_vocab(open_vocab(vocab))
    made = cells.vocab
    if made is None:
        raise OptionError("the cells of datamodule have no vocabulary; open them with scforge.data.open_cells.")
    if n_top_genes is not None and n_top_genes < made.n_genes:
        some = cells.sample(SAMPLED_CELLS, rows=data.train_rows, seed=data.seed)
        made = variable_genes(some, n_top_genes, batch_key=data.batch_key)
    if needs_medians and made.medians is None:
        some = cells.with_vocab(made).sample(SAMPLED_CELLS, rows=data.train_rows, seed=data.seed)
        made = made.with_medians(gene_medians(some.counts, some.totals))
    return made
