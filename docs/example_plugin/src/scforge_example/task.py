"""How high a set of genes is in a cell, e.g. those of the cell cycle, learned so that no column of obs is needed.

Shapes: B cells, N cells, D dimensions, M genes of the set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from anndata import AnnData
from torch import nn

from scforge.data import Cells
from scforge.errors import OptionError
from scforge.finetuning import Evaluated, EvaluationContext, PredictionHead, Predictor, Task
from scforge.training import TrainingDefaults


class GeneSetScore(Task):
    """Predict the logarithm of the share of the counts that a set of genes has.

    Parameters
    ----------
    genes
        Names of the genes.
    """

    keys = ()  # no option of it is a column of obs
    defaults = TrainingDefaults(batch_size=64, lr=1e-3, weight_decay=0.01, schedule="cosine_warmup", max_epochs=5)
    monitor = "mae"

    def __init__(self, *, genes: Sequence[str]) -> None:
        self.genes = list(genes)
        self._scores: np.ndarray | None = None

    def scores_of(self, cells: Cells) -> np.ndarray:
        """Return the score of each cell, float32, shape (N,)."""
        known = [name for name in self.genes if name in cells.vocab.genes]
        if not known:
            raise OptionError(": the model knows none of them; name genes of its vocabulary.", genes=self.genes)
        wanted = np.array([cells.vocab.genes.index(name) for name in known])
        scores = np.empty(len(cells), dtype=np.float32)
        for begin in range(0, len(cells), 4096):
            rows = np.arange(begin, min(begin + 4096, len(cells)))
            block = cells.block(rows)
            inside = np.where(np.isin(block.genes, wanted), block.counts, 0)
            per_cell = np.add.reduceat(np.append(inside, 0), block.indptr[:-1]) * (np.diff(block.indptr) > 0)
            scores[rows] = np.log1p(1e4 * per_cell / np.maximum(block.totals, 1))
        return scores

    def make_head(self, n_latent: int, module: nn.Module) -> PredictionHead:
        """Make a head of one output."""
        return PredictionHead(n_latent, 1)

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Compute the score of each cell, once."""
        self._scores = self.scores_of(cells)

    def targets(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the scores."""
        return {"target": torch.from_numpy(self._scores[rows])}

    def loss_of(
        self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the squared error, and the absolute one to watch."""
        distance_b = outputs.float().squeeze(1) - batch["target"]
        return distance_b.square().mean(), {"mae": distance_b.detach().abs().mean()}

    def predict(
        self, predictor: Predictor, adata: AnnData | None, *, key_added: str | None = None, **options: Any
    ) -> pd.DataFrame:
        """Return the predicted score of each cell, and write it into obs."""
        index = pd.RangeIndex(len(predictor.cells)) if adata is None else adata.obs_names
        found = pd.DataFrame({"score": predictor.outputs()[:, 0]}, index=index)
        if adata is not None:
            adata.obs[key_added or "scforge_score"] = found["score"]
        return found

    def evaluate(self, context: EvaluationContext) -> Evaluated:
        """Return the mean absolute error, beside that of the mean of the training cells."""
        truth = self.scores_of(context.predictor.cells)[context.rows]
        found = {"scforge": context.predictor.outputs(context.rows)[:, 0]}
        if context.baselines:
            found["train_mean"] = self.scores_of(context.train.cells)[context.train_rows].mean()
        errors = {method: float(np.abs(values - truth).mean()) for method, values in found.items()}
        return Evaluated(pd.DataFrame({"mae": errors}).rename_axis("method"))
