"""Genes of a model given by name, and results over genes in the columns of an AnnData."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData
from scipy import sparse

from scforge._checks import check_seed
from scforge.data.cells import Cells, cell_names
from scforge.data.checks import gene_names
from scforge.data.genes import GeneMap
from scforge.data.vocab import SPECIES, gene_table
from scforge.errors import GeneMismatchError, OptionError, did_you_mean, listing
from scforge.estimators.fitted import FittedModel
from scforge.estimators.setup import Model, Source, setup_of, source_of
from scforge.insilico.imputation import check_predicts
from scforge.training.objectives.base import Objective
from scforge.training.predict import embed

_MAX_NAMES = 5


def gene_numbers(
    model: Model, genes: Sequence[str] | str, *, source: Any = None, argument: str = "genes"
) -> np.ndarray:
    """Return the index of each gene in the model, int32; messages mention genes that are only in `source`."""
    names = [genes] if isinstance(genes, str) else list(genes)
    if not names or not all(isinstance(name, str) for name in names):
        raise OptionError("is not a list of gene names; pass at least one gene name.", argument=argument, value=names)
    vocab = model.fitted.spec.vocab
    numbers = GeneMap.of(names, vocab).columns
    if unknown := [name for name, number in zip(names, numbers, strict=True) if number < 0]:
        source, measured = model.adata if source is None else source, set()
        if isinstance(source, AnnData):
            measured = set(gene_names(source, _gene_key(model, source)))
        in_adata = [name for name in unknown if name in measured]
        tables = [names for species in SPECIES for names in (gene_table(species).ids, gene_table(species).symbols)]
        known = in_adata or [name for name in unknown if any(name in names for names in tables)]
        hint = did_you_mean(unknown[0], [*vocab.genes, *(vocab.symbols or ())]) or "; remove these names."
        if known:
            hint = f"; create the model with Encoder(adata, keep_genes={known[:_MAX_NAMES]!r})."
        where = f"{'in adata but ' if in_adata else ''}not among the {vocab.n_genes:,} genes of the model"
        shown = listing(known or unknown, most=_MAX_NAMES)
        raise GeneMismatchError(f"contains names that are {where}: {shown}{hint}", argument=argument)
    if twice := [names[i] for i in range(len(names)) if numbers[i] in numbers[:i]]:
        raise OptionError(
            f"contains the gene {twice[0]!r} more than once, possibly under different names; pass each gene once.",
            argument=argument,
        )
    return numbers


def _gene_key(model: Model, adata: AnnData) -> str | None:
    """Return the column of ``adata.var`` with gene names, as in its setup or that of the training cells."""
    key: str | None = (setup_of(type(model), adata) or model.fitted.setup)["gene_key"]
    return key


def column_genes(model: Model, adata: AnnData) -> np.ndarray:
    """Return the vocabulary index of each column of `adata`, or -1 if unknown, int32, shape (n_vars,)."""
    return GeneMap.of(gene_names(adata, _gene_key(model, adata)), model.fitted.spec.vocab).columns


def expression_table(
    model: Model, source: Any, cells: Cells, values: np.ndarray, numbers: np.ndarray, key_added: str | None
) -> pd.DataFrame:
    """Return the expression of the model's genes, and write it to ``adata.layers`` with NaN for all other genes."""
    vocab = model.fitted.spec.vocab
    if key_added is not None and isinstance(source, AnnData):
        place = np.full(vocab.n_genes + 1, -1)  # the last one: columns without a gene
        place[numbers] = np.arange(len(numbers))
        columns = place[column_genes(model, source)]
        source.layers[key_added] = np.where(columns >= 0, values[:, columns], np.float32(np.nan))
    return pd.DataFrame(values, index=cell_names(cells), columns=vocab.decode(numbers + vocab.n_special))


def over_columns(model: Model, adata: AnnData, matrix: sparse.csr_matrix, *, both: bool = False) -> sparse.csr_matrix:
    """Map a matrix over vocabulary genes to the columns of an AnnData.

    Columns of the same gene get the same values. With `both`, the rows are genes, too.
    """
    columns = column_genes(model, adata)
    known = np.flatnonzero(columns >= 0)
    shape = (matrix.shape[1], len(columns))
    spread = sparse.csr_matrix((np.ones(len(known), dtype=np.float32), (columns[known], known)), shape=shape)
    return sparse.csr_matrix(spread.T @ matrix @ spread if both else matrix @ spread)


def predicting(model: Model, adata: Source | None, seed: int) -> tuple[Source, Objective]:
    """Return the cells and the objective of a model. Raises an OptionError if it does not predict expression."""
    check_seed(seed)
    source, fitted = source_of(model, adata), model.fitted
    fitted.check_ready("its predictions are")
    check_predicts(fitted.pretraining)
    if fitted.backbone is not fitted.module:
        raise OptionError("the model was fine-tuned, but its decoder was not; use its base model.")
    return source, fitted.pretraining


def untrained_embedder(fitted: FittedModel, batch_size: int) -> Callable[[Cells], np.ndarray]:
    """Return an embedder with the architecture of a model and random weights."""
    module, tokenizer = fitted.spec.build_untrained()
    module.to(fitted.device)
    return partial(embed, module, tokenizer=tokenizer, objective=fitted.pretraining, batch_size=batch_size)
