"""Resolve genes and groups of cells given by name, and write results into adata.uns."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations as combinations_of
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData
from scipy import sparse

from scforge._checks import check_seed
from scforge._columns import texts_of
from scforge._constants import UNS_KEY
from scforge.data.cells import Cells, CellSource, cell_names
from scforge.data.checks import gene_names
from scforge.data.genes import GeneMap
from scforge.data.vocab import SPECIES, GeneVocab, gene_table
from scforge.errors import DataError, GeneMismatchError, OptionError, did_you_mean, listing, suggest, warn
from scforge.estimators.base import CellModel
from scforge.insilico.imputation import check_predicts
from scforge.insilico.screening import Perturbation
from scforge.training.objectives.base import Objective
from scforge.training.predict import embed

_MAX_GENES = 2000

_MIN_SHARE = 0.01

_MAX_NAMES = 5

USUAL_CELLS = 10_000
"""Maximum number of cells from which usual counts are computed."""

_HIGH_FDR = 0.1

_CONTROLS = 100

_MOST_CONTROLS = 0.5
"""Maximum fraction of model genes used as controls for a gene, because other genes are too dissimilar."""


type Source = AnnData | Cells | str | os.PathLike[str]
"""A source of cells."""

type State = Mapping[str, Any] | tuple[str, Any]
"""An obs column and the value, or the list of values, that selects cells."""


def gene_numbers(
    model: CellModel, genes: Sequence[str] | str, *, source: Any = None, argument: str = "genes"
) -> np.ndarray:
    """Return the index of each gene in the model, int32; messages mention genes that are only in `source`."""
    names = [genes] if isinstance(genes, str) else list(genes)
    if not names or not all(isinstance(name, str) for name in names):
        raise OptionError(f"{argument}={names!r} is not a list of gene names; pass at least one gene name.")
    numbers = GeneMap.of(names, model.vocab).columns
    if unknown := [name for name, number in zip(names, numbers, strict=True) if number < 0]:
        raise _unknown_genes(model, unknown, model.adata if source is None else source, argument)
    if twice := [names[i] for i in range(len(names)) if numbers[i] in numbers[:i]]:
        raise OptionError(
            f"{argument} contains the gene {twice[0]!r} more than once, possibly under different names; pass each gene "
            "once."
        )
    return numbers


def _unknown_genes(model: CellModel, unknown: list[str], source: Any, argument: str) -> GeneMismatchError:
    """Return the error for names that are not genes of a model, with a suggestion."""
    vocab, measured = model.vocab, set()
    if isinstance(source, AnnData):
        measured = set(gene_names(source, (model._setup_of(source) or model._setup)["gene_key"]))
    there = [name for name in unknown if name in measured]
    tables = [names for species in SPECIES for names in (gene_table(species).ids, gene_table(species).symbols)]
    known = there or [name for name in unknown if any(name in names for names in tables)]
    hint = did_you_mean(unknown[0], [*vocab.genes, *(vocab.symbols or ())]) or "; remove these names."
    if known:
        hint = f"; create the model with Encoder(adata, keep_genes={known[:_MAX_NAMES]!r})."
    names = f"names that are {'in adata but ' if there else ''}not among the {vocab.n_genes:,} genes of the model"
    return GeneMismatchError(f"{argument} contains {names}: {listing(known or unknown, most=_MAX_NAMES)}{hint}")


def widely_expressed(vocab: GeneVocab, cells: CellSource) -> np.ndarray:
    """Return the genes expressed by at least 1% of the cells, at most the 2,000 most widely expressed, int32."""
    n_cells = np.bincount(cells.counts.indices, minlength=vocab.n_genes)
    least = max(3, int(np.ceil(_MIN_SHARE * len(cells))))
    found = np.flatnonzero(n_cells >= least)
    if not len(found):
        raise DataError(f"no model gene is expressed in at least {least} of {len(cells)} cells; pass a list of genes.")
    chosen = np.sort(found[np.argsort(-n_cells[found], kind="stable")[:_MAX_GENES]])
    if len(chosen) < len(found):
        warn(
            f"genes=None selects the {len(chosen)} most widely expressed of {len(found)} expressed genes; pass a list "
            "to select other genes."
        )
    return chosen.astype(np.int32)


def gene_combinations(numbers: np.ndarray, size: bool | int) -> np.ndarray:
    """Return single genes if `size` is False, or all pairs of genes if it is 2, shape (C, 1 or 2)."""
    if size is False:
        return numbers[:, None]
    if size is True or size != 2 or len(numbers) < 2:
        raise OptionError(
            f"combinations={size!r} is invalid; pass combinations=False for single genes, or combinations=2 and at "
            "least two genes for pairs."
        )
    return np.array(list(combinations_of(numbers.tolist(), 2)), dtype=np.int32)


def cells_in_state(cells: Cells, argument: str, state: State | None) -> np.ndarray | None:
    """Return a mask of the cells in a state, bool, shape (N,), or None without a state."""
    if state is None:
        return None
    pairs = list(state.items()) if isinstance(state, Mapping) else [state]
    if len(pairs) != 1 or not isinstance(pairs[0], tuple) or len(pairs[0]) != 2 or not isinstance(pairs[0][0], str):
        raise OptionError(f'{argument}={state!r} is not a valid state; pass e.g. {argument}={{"cell_type": "B"}}.')
    key, value = pairs[0]
    wanted = list(value) if isinstance(value, (list, tuple, set, np.ndarray)) else [value]
    texts = texts_of(cells.column(key), key=key, argument=argument)
    names = list(texts_of(pd.Series(wanted, dtype=object), key=key, argument=argument))
    for name, one in zip(names, wanted, strict=True):
        if name not in texts.categories:
            raise DataError(
                f"{argument}: no cell has {one!r} in obs[{key!r}]{suggest(one, texts.categories, 'available')}"
            )
    return np.asarray(texts.isin(names))


def cell_groups(cells: Cells, key: str | None, chosen: np.ndarray) -> Iterator[tuple[str | None, np.ndarray]]:
    """Yield the name and the rows of each group of chosen cells; without `key`, yield one group named None.

    Cells without a group are left out.
    """
    if key is None:
        yield None, np.flatnonzero(chosen)
        return
    texts = texts_of(cells.column(key), key=key, argument="groups")
    for code, name in enumerate(texts.categories):
        rows = np.flatnonzero((texts.codes == code) & chosen)
        if len(rows):
            yield str(name), rows


def column_genes(model: CellModel, adata: AnnData) -> np.ndarray:
    """Return the vocabulary index of each column of `adata`, or -1 if unknown, int32, shape (n_vars,)."""
    setup = model._setup_of(adata) or model._setup
    return GeneMap.of(gene_names(adata, setup["gene_key"]), model.vocab).columns


def expression_table(
    model: CellModel, source: Any, cells: Cells, values: np.ndarray, numbers: np.ndarray, key_added: str | None
) -> pd.DataFrame:
    """Return the expression of the model's genes, and write it to ``adata.layers`` with NaN for all other genes."""
    if key_added is not None and isinstance(source, AnnData):
        place = np.full(model.vocab.n_genes + 1, -1)  # the last one: columns without a gene
        place[numbers] = np.arange(len(numbers))
        columns = place[column_genes(model, source)]
        source.layers[key_added] = np.where(columns >= 0, values[:, columns], np.float32(np.nan))
    return pd.DataFrame(values, index=cell_names(cells), columns=model.vocab.decode(numbers + model.vocab.n_special))


def note(model: CellModel, source: Any, key: str | None, asked: Mapping[str, Any], **tables: pd.DataFrame) -> None:
    """Write tables and their settings into ``adata.uns["scforge"][key]``."""
    if key is None or not isinstance(source, AnnData):
        return
    # h5ad cannot store None.
    facts = {name: value for name, value in {**model._made_with(), **asked}.items() if value is not None}
    source.uns[UNS_KEY] = {**source.uns.get(UNS_KEY, {}), key: {**facts, **tables}}


def over_columns(
    model: CellModel, adata: AnnData, matrix: sparse.csr_matrix, *, both: bool = False
) -> sparse.csr_matrix:
    """Map a matrix over vocabulary genes to the columns of an AnnData.

    Columns of the same gene get the same values. With `both`, the rows are genes, too.
    """
    columns = column_genes(model, adata)
    known = np.flatnonzero(columns >= 0)
    shape = (matrix.shape[1], len(columns))
    spread = sparse.csr_matrix((np.ones(len(known), dtype=np.float32), (columns[known], known)), shape=shape)
    return sparse.csr_matrix(spread.T @ matrix @ spread if both else matrix @ spread)


def predicting(model: CellModel, adata: Source | None, seed: int) -> tuple[Source, Objective]:
    """Return the cells and the objective of a model. Raises an OptionError if it does not predict expression."""
    check_seed(seed)
    source, objective = model._ready(adata, "its predictions are"), model._pretraining
    check_predicts(objective)
    if model._backbone is not model.module:
        raise OptionError("the model was fine-tuned, but its decoder was not; use its base model.")
    return source, objective


def untrained_embedder(model: CellModel, batch_size: int) -> Callable[[Cells], np.ndarray]:
    """Return an embedder with the architecture of a model and random weights."""
    module, tokenizer = model.spec.build_untrained()
    module.to(next(model.module.parameters()).device)
    return partial(embed, module, tokenizer=tokenizer, objective=model._pretraining, batch_size=batch_size)


def enough_controls(model: CellModel, n_tests: int, sides: int) -> int:
    """Return the number of controls per gene: enough for an fdr of 0.1, or the default if that is too many."""
    wanted = math.ceil(sides * n_tests / _HIGH_FDR)
    return max(_CONTROLS, wanted) if wanted <= _MOST_CONTROLS * model.vocab.n_genes else _CONTROLS


def lowest_fdr(results: pd.DataFrame, sides: int) -> float:
    """Return the false discovery rate if only one test has the lowest possible p-value, and warn if it is high."""
    n_controls = results.loc[results["p_value"].notna(), "n_controls"]
    lowest = min(1.0, sides * len(n_controls) / (n_controls.max() + 1)) if len(n_controls) else float("nan")
    if lowest > _HIGH_FDR:
        enough = math.ceil(sides * len(n_controls) / _HIGH_FDR)
        warn(
            f"The fdr of a single significant gene is at least {lowest:.2g}, above {_HIGH_FDR:g}; test fewer genes, "
            f"or pass n_permutations={enough} if the model has that many other genes."
        )
    return lowest


def starting(chosen: np.ndarray | None, there: np.ndarray | None, n_cells: int) -> np.ndarray:
    """Return the cells to perturb, bool, shape (N,)."""
    if chosen is None:
        chosen = np.ones(n_cells, dtype=np.bool_) if there is None else ~there
    if not chosen.any() or (there is not None and (chosen & there).any()):
        raise DataError("start selects no cells, or cells that are already in the goal state; choose other cells.")
    return chosen


def check_activated(perturbation: Perturbation, numbers: np.ndarray, genes: Sequence[str]) -> None:
    """Raise a DataError if no cell expresses a gene to activate, because its usual count is then unknown."""
    shares = perturbation.shares
    if shares is not None and (silent := [genes[number] for number in numbers if np.isnan(shares[number])]):
        raise DataError(
            f"mode='activate' requires expressed genes, but no cell expresses {listing(silent, most=5)}; remove these "
            "genes."
        )
