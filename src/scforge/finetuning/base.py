"""The base class of fine-tuning tasks, with their inputs, results and registry."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from anndata import AnnData
from torch import nn

from scforge._registry import Registry, check_kinds, check_options
from scforge.data.cells import CellBlock, Cells
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError, spelled, warn
from scforge.finetuning.new_cells import NewCells
from scforge.finetuning.splits import Split
from scforge.tokenizers.base import TokenBatch, Tokenizer
from scforge.training.objectives.base import Objective, TrainingDefaults
from scforge.training.predict import run_over

FROZEN = "frozen_embedding"
"""Name of the baseline that is trained on the embedding of the model before fine-tuning."""

TASKS: Registry[type[Task]] = Registry(
    "task",
    group="scforge.tasks",
    base="scforge.finetuning.Task",
    members=("defaults",),
    builtin={
        "adaptation": "scforge.finetuning.tasks.adaptation",
        "annotation": "scforge.finetuning.tasks.annotation",
        "integration": "scforge.finetuning.tasks.integration",
        "multi_label": "scforge.finetuning.tasks.multi_label",
        "perturbation": "scforge.finetuning.tasks.perturbation",
        "regression": "scforge.finetuning.tasks.regression",
    },
)


@dataclass
class Predictor:
    """A model applied to cells.

    Attributes
    ----------
    module
        A :class:`~scforge.finetuning.mapping.FineTunedModule`, or only the architecture for a base model.
    tokenizer
        Tokenizer of the model.
    objective
        The task, or the objective for a base model.
    cells
        The cells over the genes of the model.
    batch_size
        Number of cells per batch.
    new
        Cells that the model was not fine-tuned on, if they are predicted differently.
    correct
        Function that corrects embeddings, shape (N, D), of the cells in some rows for batches by a share of the way;
        None if the model has no correction.

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
    new: NewCells | None = None
    correct: Callable[[np.ndarray, np.ndarray, float], np.ndarray] | None = None

    @property
    def task(self) -> Task:
        """The fine-tuning task."""
        assert isinstance(self.objective, Task)
        return self.objective

    def outputs(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the head outputs for each cell (in `rows`), float32, shape (N, K)."""
        return self._over(lambda module, batch: module(**batch).logits, rows)

    def embedding(self, rows: np.ndarray | None = None, *, correction: float = 0.0) -> np.ndarray:
        """Return the embedding of each cell (in `rows`), float32, shape (N, D), corrected for batches by a share."""
        embeddings = self._over(lambda module, batch: module.encode(**batch), rows)
        if self.correct is None or not correction:
            return embeddings
        return self.correct(embeddings, np.arange(len(self.cells)) if rows is None else rows, correction)

    def _over(self, compute: Callable[[nn.Module, Batch], torch.Tensor], rows: np.ndarray | None) -> np.ndarray:
        """Return the output of `compute` for each cell (in `rows`), using the module for new cells for these."""
        how = {"objective": self.objective, "batch_size": self.batch_size}

        def run(module: nn.Module, rows: np.ndarray | None) -> np.ndarray:
            return run_over(module, self.cells, self.tokenizer, partial(compute, module), rows=rows, **how)

        if self.new is None:
            return run(self.module, rows)
        rows = np.arange(len(self.cells)) if rows is None else rows
        is_new = self.new.is_new[rows]
        if is_new.all() or not is_new.any():
            return run(self.new.module if is_new.any() else self.module, rows)
        parts = [(~is_new, run(self.module, rows[~is_new])), (is_new, run(self.new.module, rows[is_new]))]
        output = np.empty((len(rows), parts[0][1].shape[1]), dtype=np.float32)
        for chosen, values in parts:
            output[chosen] = values
        return output


@dataclass(frozen=True)
class EvaluationContext:
    """Input for the evaluation of a task.

    Attributes
    ----------
    predictor, rows
        The model applied to the evaluation cells, and the rows of these cells to score, int64.
    train, train_rows
        The same model applied to the cells used for fine-tuning, and the rows of the training cells; None if not
        available.
    base, base_train
        The model before fine-tuning, applied to the evaluation cells and to the cells used for fine-tuning; None if not
        available.
    cells, train_cells
        Evaluation cells and cells used for fine-tuning, over all genes of the latter, for baselines.
    baselines
        Whether to compute baselines.
    seed
        Random seed for the baselines and for resampling.
    intervals
        Whether to compare the scores with those of the baselines on resampled cells.
    groups_key
        Column of the evaluation cells whose groups are resampled as a whole.

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
    intervals: bool = False
    groups_key: str | None = None


@dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation.

    Attributes
    ----------
    metrics
        One row per method, ``"scforge"`` first, and one column per score.
    tables
        A mapping from name to additional tables, e.g. ``"per_class"``.

    Examples
    --------
    >>> import pandas as pd
    >>> from scforge.finetuning import Evaluated
    >>> Evaluated(pd.DataFrame({"macro_f1": [0.9, 0.8]}, index=["scforge", "pca"])).metrics["macro_f1"].idxmax()
    'scforge'
    """

    metrics: pd.DataFrame
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)


def warn_of_missing_base() -> None:
    """Warn that the baseline of the frozen embedding is missing."""
    warn(
        "the model before fine-tuning is not available, so scores for its frozen embedding are missing; pass it as "
        f"{spelled('base', '--base-model')}."
    )


type Batch = dict[str, torch.Tensor]
"""Mapping from name to tensor."""

type Loss = tuple[torch.Tensor, Batch]
"""The loss of a batch, a scalar, and scores averaged over its cells."""

type Column = Callable[[str], pd.Series]
"""Function that returns a column of obs."""


def with_adapters(defaults: TrainingDefaults) -> TrainingDefaults:
    """Return defaults with the learning rate for low-rank adapters, ten times the rate for full fine-tuning.

    The factor was benchmarked in ``benchmarks/finetuning.py``.
    """
    return replace(defaults, lr=10.0 * defaults.lr)


class Task(Objective):
    """A fine-tuning task: a head, targets, a loss, scores, and the results to write.

    A task is an objective, so models are fine-tuned by the same engine that trains them. All options are keyword-only
    arguments of the constructor, and are stored as attributes with the same names.

    Attributes
    ----------
    keys
        Options that refer to a column of obs. ``"labels_key"`` and ``"batch_key"`` are filled in from
        ``setup_anndata``.
    makes_cells
        Whether :meth:`predict` returns an AnnData instead of a table with one row per cell.
    maps_new_cells
        Whether cells that the model was not fine-tuned on are mapped onto the training cells before prediction.
    learns_labels
        Whether training uses the labels of cells, which must then not be scored later. False if labels are only used in
        :meth:`evaluate`.
    pretraining
        The objective that the base model was trained with, which may reorder the tokens of a cell.
    vocab
        Genes of the model, set before cells are split.

    Examples
    --------
    >>> class Depth(Task):
    ...     defaults = TrainingDefaults(batch_size=64, lr=1e-3, weight_decay=0.0, schedule="cosine", max_epochs=5)
    ...     keys = ("depth_key",)
    ...
    ...     def __init__(self, *, depth_key):
    ...         self.depth_key = depth_key
    ...
    ...     def make_head(self, n_latent, module):
    ...         return PredictionHead(n_latent, 1)
    ...
    ...     def loss_of(self, outputs, batch):
    ...         return (outputs[:, 0] - batch["depth"]).square().mean(), {}
    ...
    ...     def predict(self, predictor, adata, *, key_added=None):
    ...         return predictor.outputs()
    ...
    ...     def evaluate(self, context):
    ...         return Evaluated(...)
    >>> Depth(depth_key="n_counts")
    Depth(depth_key='n_counts')
    """

    keys: ClassVar[tuple[str, ...]] = ("labels_key",)
    makes_cells: ClassVar[bool] = False
    maps_new_cells: ClassVar[bool] = False
    learns_labels: ClassVar[bool] = True
    pretraining: Objective | None = None
    vocab: GeneVocab | None = None

    def for_adapters(self) -> None:
        """Use the learning rate for low-rank adapters, ten times the rate for full fine-tuning."""
        self.defaults = with_adapters(self.defaults)  # type: ignore[misc]  # its own from here on

    def usable(self, column: Column) -> np.ndarray | None:
        """Return which cells have a target, bool, shape (N,), or None for all; `column` returns values of all cells."""
        return None

    def strata(self, column: Column) -> pd.Series | None:
        """Return the classes by which a split is stratified, length N, or None for no stratification."""
        return None

    def split(
        self, column: Column, *, validation_size: float, test_size: float, split_by: str | None, seed: int
    ) -> Split | None:
        """Return a split specific to the task, or None to use :func:`scforge.finetuning.splits.split_for`."""
        return None

    def check_split(self, column: Column, split: Split) -> None:
        """Report values of held-out cells that training cells lack; `column` returns a column for all cells."""

    @abstractmethod
    def make_head(self, n_latent: int, module: nn.Module) -> nn.Module:
        """Create the head, whose ``forward(embeddings, batch)`` takes shape (B, D) and returns shape (B, K).

        Parameters
        ----------
        n_latent
            Width D of the embeddings.
        module
            The architecture.
        """

    def targets(self, rows: np.ndarray) -> Batch:
        """Return the inputs of :meth:`loss_of` for the cells `rows`, in addition to their tokens."""
        return {}

    def arrange(
        self, tokens: TokenBatch, tokenizer: Tokenizer, rows: np.ndarray, *, epoch: int, seed: int
    ) -> TokenBatch:
        """Arrange tokens in the order that the base model was trained on."""
        if self.pretraining is None:
            return tokens
        return self.pretraining.arrange(tokens, tokenizer, rows, epoch=epoch, seed=seed)

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> Batch:
        """Return the tokens and the targets of the cells."""
        tokens = self.arrange(tokenizer(block), tokenizer, block.rows, epoch=epoch, seed=seed)
        return {**tokens, **self.targets(block.rows)}

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """Return the loss of a batch, and its scores."""
        return self.loss_of(module(**batch).logits, batch)

    @abstractmethod
    def loss_of(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Return the loss of the head outputs, shape (B, K), and the scores.

        A score is a tensor of any shape, averaged over the cells of the batch; :meth:`summarize` receives the score
        averaged over the cells of the epoch.
        """

    def calibrate(self, predictor: Predictor, rows: np.ndarray) -> None:
        """Calibrate the head on validation cells after training; store the result in buffers of the head."""

    @abstractmethod
    def predict(self, predictor: Predictor, adata: AnnData | None, *, key_added: str | None, **options: Any) -> Any:
        """Predict the cells of `predictor`, write the result into `adata` if given, and return the result.

        Parameters
        ----------
        predictor
            The model applied to the cells.
        adata
            The same cells, or None if they are on disk.
        key_added
            Key to write instead of the default.
        **options
            Options of the task.
        """

    def check_evaluate(self) -> None:
        """Raise :class:`~scforge.errors.OptionError` if the task cannot score predictions."""

    @abstractmethod
    def evaluate(self, context: EvaluationContext) -> Evaluated:
        """Score the predictions of cells, with baselines trained on the same cells."""


register_task, list_tasks = TASKS.register, TASKS.names


def get_task(name: str, **options: Any) -> Task:
    """Create the task registered as `name`.

    Parameters
    ----------
    name
        Registry key, e.g. ``"annotation"``.
    **options
        Options for its constructor.

    Returns
    -------
    The task, as accepted by ``Encoder.finetune``.

    Raises
    ------
    OptionError
        If the name or an option is unknown, or a required option is missing.

    Examples
    --------
    >>> get_task("annotation", labels_key="cell_type").labels_key
    'cell_type'
    """
    cls = TASKS.get(name)
    check_options("task option", name, options, cls.option_names())
    check_kinds(cls, options)
    for option in cls.needed_options():
        if options.get(option) is None:
            raise OptionError(
                f"the task {name!r} requires {option}; pass {option}=..., or set finetune.{option} in a "
                "configuration file."
            )
    return cls(**options)
