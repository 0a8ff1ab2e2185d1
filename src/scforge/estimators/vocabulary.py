"""Which genes a model is built on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scforge.data.cells import CellSource
from scforge.data.genes import gene_names, map_names, names_place
from scforge.data.statistics import gene_entropies, gene_medians, kept_genes, select_genes, variable_genes
from scforge.data.vocab import FROM_DATA, GeneVocab, n_of_species, open_vocab
from scforge.errors import OptionError, warn
from scforge.tokenizers.base import TOKENIZERS

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.data.cells import Cells
    from scforge.training.datamodule import CellDataModule


SAMPLED_CELLS = 100_000
"""Training cells, drawn at random, that choices are made from where there are more: they fit into memory."""

_MIXED = 0.1
"""Share of the genes from which on both species are there; symbols of one in data of the other are below 0.02."""


def needed_statistics(tokenizer: str, options: dict[str, Any]) -> frozenset[str]:
    """Return what a tokenizer with these options has to know of each gene: names of fields of a vocabulary."""
    cls = TOKENIZERS.get(tokenizer)
    medians = cls.needs_medians and options.get("use_medians", True)
    return frozenset(name for name, needed in (("medians", medians), ("entropies", cls.needs_entropies)) if needed)


def n_top_genes_of(vocab: str | GeneVocab, n_default: int | None) -> int | None:
    """Return how many variable genes to choose where nobody says: of a list of genes none, as all were chosen."""
    if vocab != FROM_DATA and open_vocab(vocab).chosen_from_data:
        return None
    return n_default


def vocab_of_adata(
    adata: AnnData,
    setup: dict[str, Any],
    vocab: str | GeneVocab,
    n_top_genes: int | None,
    *,
    needed: frozenset[str],
    keep_genes: Sequence[str] = (),
) -> GeneVocab:
    """Choose the genes of a model of an AnnData, with what the tokenizer needs to know of each."""
    from scforge.data.sources import open_cells

    key, layer = setup["gene_key"], setup["layer"]
    within = None if vocab == FROM_DATA else open_vocab(vocab)
    if within is not None:
        map_names(gene_names(adata, key), within, var=adata.var, gene_key=key, whole=not within.chosen_from_data)
    else:
        _warn_of_species(adata, key)
    made = within
    if made is None or n_top_genes is not None:
        made = select_genes(
            adata,
            layer=layer,
            gene_key=key,
            n_top_genes=n_top_genes,
            batch_key=setup["batch_key"],
            within=within,
            keep_genes=keep_genes,
        )
    elif len(keep_genes):
        kept_genes(keep_genes, made, "the vocabulary")
    if missing := _missing(made, needed):
        cells = open_cells(adata, made, layer=layer, gene_key=key)
        assert isinstance(cells, CellSource)
        made = _with_statistics(made, cells, missing)
    return made


def _warn_of_species(adata: AnnData, gene_key: str | None) -> None:
    """Warn where genes of man and of mouse are among those to choose from, which would be different genes."""
    names = gene_names(adata, gene_key)
    found = n_of_species(names)
    if min(found.values()) > _MIXED * len(names):
        counted = " and ".join(f"{n:,} {species} genes" for species, n in found.items())
        warn(
            f"{names_place(gene_key)} holds {counted}, which count as different genes; join those of common descent "
            "with vocab='human_mouse'."
        )


def vocab_of_cells(
    data: CellDataModule,
    vocab: str | GeneVocab,
    n_top_genes: int | None,
    *,
    needed: frozenset[str],
    keep_genes: Sequence[str] = (),
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
        made = variable_genes(some, n_top_genes, batch_key=data.batch_key, keep_genes=keep_genes)
    elif len(keep_genes):
        kept_genes(keep_genes, made, "the cells")
    if missing := _missing(made, needed):
        some = cells.with_vocab(made).sample(SAMPLED_CELLS, rows=data.train_rows, seed=data.seed)
        made = _with_statistics(made, some, missing)
    return made


def _missing(vocab: GeneVocab, needed: frozenset[str]) -> list[str]:
    return [name for name in sorted(needed) if getattr(vocab, name) is None]


def _with_statistics(vocab: GeneVocab, cells: CellSource, missing: list[str]) -> GeneVocab:
    """Return the vocabulary with statistics of its genes, measured on cells."""
    if "medians" in missing:
        vocab = vocab.with_medians(gene_medians(cells.counts, cells.totals))
    if "entropies" in missing:
        vocab = vocab.with_entropies(gene_entropies(cells))
    return vocab
