"""What tasks predict and evaluate with: a model over some cells, and what it is compared with.

Shapes: N cells, D dimensions, K outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from scforge.data.cells import Cells
from scforge.finetuning.base import Task
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives.base import Objective
from scforge.training.predict import embed, run_over

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Evaluated", "EvaluationContext", "Predictor"]


@dataclass
class Predictor:
    """A model over cells.

    Attributes
    ----------
    module
        A :class:`~scforge.finetuning.FineTunedModule`; of a base model, the architecture alone.
    tokenizer
        Its tokenizer.
    objective
        The task, or the objective of a base model.
    cells
        The cells, over the genes of the model.
    batch_size
        Cells a batch.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:60, :300].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("continuous_projection", cells.vocab)
    >>> sizes = {"hidden_dim": 8, "pooling": "weighted_sum", "latent_dim": 4}
    >>> module = scforge.models.GenePoolingModel(len(cells.vocab), **sizes)
    >>> Predictor(module, tokenizer, scforge.training.JointEmbedding(), cells).embedding().shape
    (60, 4)
    """

    module: nn.Module
    tokenizer: Tokenizer
    objective: Objective
    cells: Cells
    batch_size: int = 256

    @property
    def task(self) -> Task:
        """The task."""
        assert isinstance(self.objective, Task)
        return self.objective

    def outputs(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the outputs of the head of each cell (of `rows`), float32, shape (N, K)."""
        return run_over(
            self.module,
            self.cells,
            self.tokenizer,
            lambda batch: self.module(**batch).logits,
            objective=self.objective,
            batch_size=self.batch_size,
            rows=rows,
        )

    def embedding(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the embedding of each cell (of `rows`), float32, shape (N, D)."""
        return embed(
            self.module, self.cells, self.tokenizer, objective=self.objective, batch_size=self.batch_size, rows=rows
        )


@dataclass(frozen=True)
class EvaluationContext:
    """What a task evaluates.

    Attributes
    ----------
    predictor, rows
        The model over the scored cells, and which of these are scored, int64.
    train, train_rows
        The same model over the cells of the fine-tuning, and those it learned from; None if they are not at hand.
    base, base_train
        The model before fine-tuning over the scored cells, and over those of the fine-tuning; None if not at hand.
    cells, train_cells
        Scored cells and cells of the fine-tuning over all genes of the latter, for baselines.
    baselines
        Whether to compute baselines.
    seed
        Of what is random in them.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:60, :300].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("continuous_projection", cells.vocab)
    >>> sizes = {"hidden_dim": 8, "pooling": "weighted_sum", "latent_dim": 4}
    >>> module = scforge.models.GenePoolingModel(len(cells.vocab), **sizes)
    >>> predictor = Predictor(module, tokenizer, scforge.training.JointEmbedding(), cells)
    >>> rest = {"train": None, "train_rows": None, "base": None, "base_train": None, "train_cells": None}
    >>> context = EvaluationContext(predictor, rows=np.arange(10), cells=cells, **rest)
    >>> context.predictor.embedding(context.rows).shape
    (10, 4)
    """

    predictor: Predictor
    rows: np.ndarray
    train: Predictor | None
    train_rows: np.ndarray | None
    base: Predictor | None
    base_train: Predictor | None
    cells: Cells
    train_cells: Cells | None
    baselines: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found.

    Attributes
    ----------
    metrics
        One row a method, ``"scforge"`` first; one column a figure.
    tables
        Further tables by name, e.g. ``"per_class"``.

    Examples
    --------
    >>> import pandas as pd
    >>> from scforge.finetuning import Evaluated
    >>> Evaluated(pd.DataFrame({"macro_f1": [0.9, 0.8]}, index=["scforge", "pca"])).metrics["macro_f1"].idxmax()
    'scforge'
    """

    metrics: pd.DataFrame
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
