"""The objective base class and registry."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from scforge._registry import Registry, check_kinds, check_options
from scforge.data.cells import CellBlock, Cells, CellSource
from scforge.errors import OptionError, TrainingError
from scforge.models.protocol import ModelOutput
from scforge.tokenizers.base import TokenBatch, Tokenizer

if TYPE_CHECKING:
    import pandas as pd

OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective",
    group="scforge.objectives",
    members=("defaults",),
    builtin={
        "joint_embedding": "scforge.training.objectives.joint_embedding",
        "masked_diffusion": "scforge.training.objectives.masked_diffusion",
        "masked_gene_prediction": "scforge.training.objectives.masked_gene_prediction",
        "masked_value_prediction": "scforge.training.objectives.masked_value_prediction",
        "neighbor_denoising": "scforge.training.objectives.neighbor_denoising",
        "next_gene_prediction": "scforge.training.objectives.next_gene_prediction",
        "variational": "scforge.training.objectives.variational",
    },
    base="scforge.training.Objective",
)


@dataclass(frozen=True)
class TrainingDefaults:
    """Default training options of an objective.

    Attributes
    ----------
    batch_size
        Number of cells per step.
    lr, weight_decay
        Learning rate and weight decay of AdamW.
    schedule
        Name of the learning-rate schedule.
    max_epochs
        Number of epochs for 2,500 cells. For other numbers of cells, it is adjusted to give about the same number of
        steps.
    most_epochs
        Maximum number of epochs for small data sets. If None, uses ten times `max_epochs`.

    Examples
    --------
    >>> from scforge.training import MaskedGenePrediction
    >>> MaskedGenePrediction.defaults.lr == TrainingDefaults(64, 1e-3, 0.01, "cosine", 20).lr
    True
    """

    batch_size: int
    lr: float
    weight_decay: float
    schedule: str
    max_epochs: int
    most_epochs: int | None = None


class Objective(ABC):
    """A loss and the preparation of its batches.

    :meth:`prepare` runs in the data loader, :meth:`loss` on the device. All options are keyword-only arguments of the
    constructor, and are stored as attributes with the same names.

    Examples
    --------
    >>> class MeanValue(Objective):
    ...     defaults = TrainingDefaults(batch_size=64, lr=1e-3, weight_decay=0.0, schedule="cosine", max_epochs=5)
    ...
    ...     def __init__(self, *, weight=1.0):
    ...         self.weight = weight
    ...
    ...     def prepare(self, block, tokenizer, *, epoch, seed):
    ...         return dict(tokenizer(block))
    ...
    ...     def loss(self, module, batch):
    ...         wanted = batch["values"].mean(1, keepdim=True)
    ...         return self.weight * (module.encode(**batch) - wanted).square().mean(), {}
    >>> MeanValue(weight=2.0)
    MeanValue(weight=2.0)
    """

    defaults: ClassVar[TrainingDefaults]

    generates: ClassVar[bool] = False
    """Whether a model trained with the objective can generate cells."""

    random_batches: ClassVar[bool] = False
    """Whether batches must be random samples, because the loss compares cells; otherwise cells are batched by
    length."""

    monitor: ClassVar[str] = "loss"
    """Validation metric that selects the best epoch and is used for early stopping."""

    monitor_mode: ClassVar[str] = "min"
    """``"min"`` or ``"max"``, depending on whether lower or higher is better."""

    predicts_values: ClassVar[bool] = False
    """Whether the loss concerns only expression, so that an architecture with an optional expression head needs that
    head."""

    denoises_values: ClassVar[bool] = False
    """Whether values are masked by ``masked_values``, separately from the genes masked by ``masked_positions``."""

    takes_batch_key: ClassVar[bool] = False
    """Whether `Encoder` passes the batches from its setup as `batch_key` by default."""

    maps_queries: ClassVar[bool] = False
    """Whether a trained encoder embeds cells of new batches without changes, so that only the decoder is trained."""

    @classmethod
    def option_names(cls) -> list[str]:
        """Return the names of the constructor options."""
        parameters = inspect.signature(cls).parameters.values()
        return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]

    @classmethod
    def needed_options(cls) -> list[str]:
        """Return the names of the constructor options that have no default."""
        parameters = inspect.signature(cls).parameters
        return [name for name in cls.option_names() if parameters[name].default is inspect.Parameter.empty]

    def config(self) -> dict[str, Any]:
        """Return the JSON-safe options that recreate this objective."""
        return {name: getattr(self, name) for name in self.option_names()}

    def initialize(self, module: nn.Module, cells: CellSource, tokenizer: Tokenizer) -> None:  # noqa: B027 -- optional
        """Adapt an untrained module to the training cells, before the first step."""

    def learn_from(self, module: nn.Module) -> None:  # noqa: B027 -- optional
        """Read properties of the module that :meth:`prepare` needs, before any batch is prepared."""

    def check(self, tokenizer: Tokenizer) -> None:  # noqa: B027 -- optional
        """Raise :class:`~scforge.errors.OptionError` if the objective does not work with a tokenizer."""

    def check_architecture(self, architecture: type[nn.Module] | nn.Module) -> None:  # noqa: B027 -- optional
        """Raise :class:`~scforge.errors.OptionError` if the objective does not work with an architecture."""

    def options_from(self, column: Callable[[str], pd.Series]) -> dict[str, Any]:
        """Return options that are derived from the cells when a model is created; `column` returns a column of obs."""
        return {}

    def model_options(self) -> dict[str, Any]:
        """Return options of the architecture that the objective sets."""
        return {}

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:  # noqa: B027 -- optional
        """Look up data that minibatches need in addition to counts, before any minibatch is prepared.

        Parameters
        ----------
        cells
            All cells, including held-out cells.
        train_rows
            Rows of the training cells, int64.
        """

    def arrange(
        self, tokens: TokenBatch, tokenizer: Tokenizer, rows: np.ndarray, *, epoch: int, seed: int
    ) -> TokenBatch:
        """Arrange the tokens of the cells at `rows` in the order that the module expects."""
        return tokens

    def max_tokens(self, tokenizer: Tokenizer) -> int:
        """Return the maximum number of tokens per cell in the batches of :meth:`prepare`."""
        return tokenizer.max_tokens()

    def n_cells(self, batch: dict[str, torch.Tensor]) -> int:
        """Return the number of cells in a batch from :meth:`prepare`."""
        return batch["input_ids"].shape[0]

    @abstractmethod
    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> dict[str, torch.Tensor]:
        """Return the tensor batch for :meth:`loss`; random choices depend only on the seed, the epoch and the cell."""

    @abstractmethod
    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss to minimize and additional metrics to log, averaged over the cells of the batch."""

    def summarize(self, means: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the metrics to log for an epoch, computed from the loss and metrics averaged over its cells."""
        return {name: float(value) for name, value in means.items()}

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.config().items())
        return f"{type(self).__name__}({options})"


def mismatch(objective: str, architecture: type[nn.Module] | nn.Module, why: str, choice: str) -> OptionError:
    """Return the error for an objective that does not work with an architecture, with a reason and alternatives."""
    name = architecture.__name__ if isinstance(architecture, type) else type(architecture).__name__
    return OptionError(f"{objective!r} does not work with {name}, which {why}; choose {choice}, or another objective.")


def refuse_zero_genes(objective: str, tokenizer: Tokenizer) -> None:
    """Raise :class:`~scforge.errors.OptionError` if all measured genes are tokens, so that none can be masked."""
    if tokenizer.lists_all_genes:
        raise OptionError(
            f"includes every measured gene, but {objective!r} learns to predict which genes a "
            "cell expresses; set include_zero_genes=False.",
            include_zero_genes=True,
        )


def output_of(module: nn.Module, batch: dict[str, torch.Tensor]) -> ModelOutput:
    """Return the output of an architecture's forward pass without logits.

    Raises
    ------
    TrainingError
        If the output is not a :class:`~scforge.models.ModelOutput`.
    """
    output = module(**batch, return_logits=False)
    if not hasattr(output, "loss"):
        raise TrainingError(
            f"{type(module).__qualname__}.forward returned a {type(output).__qualname__}; return "
            "scforge.models.ModelOutput(loss=..., embeddings=...)."
        )
    return cast(ModelOutput, output)


def loss_of(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the module's own loss for the labels of a batch, a scalar.

    Raises
    ------
    TrainingError
        If the module returns no loss.
    """
    loss = output_of(module, batch).loss
    if loss is None:
        raise TrainingError(
            f"{type(module).__name__}.forward returned no loss, although labels were passed; return "
            "ModelOutput(loss=...)."
        )
    return loss


register_objective, list_objectives = OBJECTIVES.register, OBJECTIVES.names


def get_objective(name: str, **options: Any) -> Objective:
    """Create the objective registered as `name`.

    Parameters
    ----------
    name
        Registry key, e.g. ``"joint_embedding"``.
    **options
        Options of the objective.

    Returns
    -------
    The objective, with these options.

    Raises
    ------
    OptionError
        If the name or an option is unknown.

    Examples
    --------
    >>> get_objective("masked_gene_prediction", mask_ratio=0.3).mask_ratio
    0.3
    """
    cls = OBJECTIVES.get(name)
    check_options("objective option", name, options, cls.option_names())
    check_kinds(cls, options)
    return cls(**options)
