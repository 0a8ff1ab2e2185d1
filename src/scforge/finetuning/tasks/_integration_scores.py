"""An integrated embedding beside those of other methods.

Shapes: N cells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import sparse

from scforge.errors import OptionError, warn
from scforge.eval.without_batches import integration_baselines, integration_scores
from scforge.finetuning.baselines import FROZEN
from scforge.finetuning.context import Evaluated

if TYPE_CHECKING:
    from scforge.data.cells import Cells
    from scforge.finetuning.context import EvaluationContext
    from scforge.finetuning.tasks.integration import Integration

__all__ = ["evaluate_integration"]


def evaluate_integration(task: Integration, context: EvaluationContext) -> Evaluated:
    """Score how batches mix and cell types stay apart, beside PCA, Harmony, scVI and the embedding before fine-tuning.

    All methods are scored on the same cells. PCA, Harmony and scVI are fitted on the training cells and the scored ones
    together, which favors them: PCA and scVI could embed new cells, and Symphony does so for Harmony, but that is not
    done here. Without labels, scores of biology are missing.

    Figures: ``bio``, ``batch``, ``total`` and what they are means of, see
    :func:`scforge.eval.without_batches.integration_scores`.

    Raises
    ------
    OptionError
        If no column with cell types is known.
    DataError
        If the scored cells are of one batch or one cell type.

    Warns
    -----
    ScforgeWarning
        If a baseline is missing.
    """
    if task.labels_key is None:
        raise OptionError(
            'labels_key=None, but integration is scored by cell types; pass finetune("integration", labels_key=...), '
            "which trains without them all the same."
        )
    rows = context.rows
    methods = {"scforge": context.predictor.embedding(rows)}
    if context.base is not None:
        methods[FROZEN] = context.base.embedding(rows)
    if context.baselines:
        if context.base is None:
            warn(
                "the model before fine-tuning is not at hand, so its embedding is missing; pass base=, the model or "
                "its folder."
            )
        methods |= _baselines(task, context)
    obs = pd.DataFrame({key: context.cells.column(key).iloc[rows] for key in (task.labels_key, task.batch_key)})
    scores = {
        name: integration_scores(embedding, obs, labels_key=task.labels_key, batch_key=task.batch_key)
        for name, embedding in methods.items()
    }
    return Evaluated(pd.DataFrame.from_dict(scores, orient="index").rename_axis("method"))


def _baselines(task: Integration, context: EvaluationContext) -> dict[str, np.ndarray]:
    """Embed the scored cells by methods that were fitted on them and on the training cells."""
    import anndata

    scored, parts = context.rows, [(context.cells, context.rows)]
    if context.train_cells is not None and context.train_rows is not None:
        parts.append((context.train_cells, context.train_rows))
    counts = sparse.vstack([_counts(cells, rows) for cells, rows in parts], format="csr")
    batches = pd.concat([cells.column(task.batch_key).iloc[rows].astype(str) for cells, rows in parts])
    names = pd.RangeIndex(len(batches)).astype(str)  # scored and training cells may have the same
    adata = anndata.AnnData(counts, obs=pd.DataFrame({task.batch_key: batches.to_numpy()}, index=names))
    found = integration_baselines(adata, task.batch_key, seed=context.seed)
    return {name: embedding[: len(scored)] for name, embedding in found.items()}


def _counts(cells: Cells, rows: np.ndarray) -> sparse.csr_matrix:
    block = cells.block(np.asarray(rows))
    assert cells.vocab is not None
    return sparse.csr_matrix((block.counts, block.genes, block.indptr), shape=(len(block), cells.vocab.n_genes))
