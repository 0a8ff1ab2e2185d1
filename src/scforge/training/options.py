"""Options of a training run, shared by ``Encoder.train``, configurations and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from scforge.config.aliases import option_error
from scforge.config.schema import Float, Int, Path, Positive, SharedTraining

OF_PLAN = ("optimizer", "lr", "weight_decay", "schedule", "warmup_steps", "layer_lr_decay")
"""Options that a :class:`TrainingPlan` takes."""

_DECISIVE = ("max_steps", "gradient_clip_val", "accumulate_grad_batches", "ema_decay", "gradual_unfreezing")
"""Options that affect the result, in addition to those of the plan, the epochs and the precision."""

_OF_TRAINER = ("accelerator", "devices", "num_nodes", "precision", "accumulate_grad_batches", "logger")
"""Options that :class:`lightning.Trainer` takes unchanged."""


class TrainOptions(SharedTraining):
    """Options of :meth:`scforge.models.Encoder.train` and their defaults.

    Those that configurations have as well are in :class:`scforge.config.schema.SharedTraining`.

    Parameters
    ----------
    max_epochs
        Maximum number of epochs. If None, it depends on the objective and the number of cells.
    max_steps
        Maximum number of optimizer steps; -1 for no limit.
    datamodule
        Cells to train on instead of the cells that the model was created with. It also determines the minibatches
        (`batch_size`, `max_tokens_per_batch`, `validation_size`, `num_threads`).
    max_tokens_per_batch
        Maximum number of tokens per batch, including padding. A batch then contains as many cells of similar length as
        fit.
    validation_size
        Fraction of cells in the validation set. The cells are sampled with the model's seed, so every call holds out
        the same cells. If None, holds out 0.1.
    num_threads
        Number of threads that prepare batches while the model computes; 0 uses no threads. If None, the number is
        chosen automatically.
    optimizer
        ``"adamw"``, ``"adam"``, ``"sgd"``, or ``"muon"`` for the matrices of the hidden layers (AdamW for the rest).
    lr, weight_decay, schedule
        Learning rate, weight decay and learning-rate schedule. If None, uses the objective's defaults. `schedule` is
        one of ``"cosine_warmup"``, ``"cosine"``, ``"linear_warmup"``, ``"linear"``, ``"one_cycle"``, ``"constant"``.
    warmup_steps
        Number of steps until the peak of the learning rate. If None, uses a fraction of all steps.
    early_stopping_patience
        Number of epochs without improvement of the validation loss before stopping.
    accelerator, devices
        As in :class:`lightning.Trainer`.
    strategy
        ``"ddp"`` (each process has a copy of the model), ``"fsdp"`` (the model is sharded over processes), or
        ``"auto"`` (DDP if there are several processes).
    precision
        As in :class:`lightning.Trainer`, or ``"auto"``: bfloat16 mixed precision if a short benchmark shows that it is
        faster. If None, computes in 32 bits. Query models need 32-bit weights, so ``"bf16-true"`` is not possible.
    progress_bar
        Whether to show a progress bar (in a log file, one line per epoch).
    logger
        Lightning loggers, e.g. from :func:`scforge.training.make_loggers`. If None, uses no loggers.
    checkpoint_dir
        Folder for checkpoints to resume from (``step=NNNNNNNN``) and for the best epochs (``epoch=NN``); all are model
        folders. Checkpoints are saved at the end of each epoch, and when the process receives SIGTERM.
    keep_last, save_top_k
        Number of checkpoints and of best epochs to keep; ``save_top_k=-1`` keeps all epochs.
    resume
        ``"auto"`` resumes from the last checkpoint in `checkpoint_dir`, if any; a path resumes from the checkpoint in
        that folder. Create the model as before; the result is then identical to that of an uninterrupted run.
    overwrite
        Whether to replace the outputs of another training run in `checkpoint_dir`.
    callbacks
        Additional Lightning callbacks, e.g. :class:`scforge.eval.BenchmarkCallback`.
    trainer_kwargs
        Additional options of :class:`lightning.Trainer`.

    Examples
    --------
    >>> options = TrainOptions(max_epochs=3, lr=1e-3)
    >>> options.early_stopping_patience
    10
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, strict=True)

    max_steps: Int = -1
    max_epochs: Int | None = None
    datamodule: Any = None
    max_tokens_per_batch: Int | None = None
    validation_size: Float | None = None
    num_threads: Int | None = None
    optimizer: str = "adamw"
    lr: Float | None = None
    weight_decay: Float | None = None
    schedule: str | None = None
    warmup_steps: Int | None = None
    early_stopping_patience: Positive = 10
    accelerator: Any = "auto"
    devices: Any = 1
    strategy: Any = "auto"
    precision: Any = None
    progress_bar: bool = True
    logger: Any = None
    checkpoint_dir: Path | None = None
    keep_last: Positive = 1
    save_top_k: Annotated[Int, Field(ge=-1)] = 1
    resume: Any = None
    overwrite: bool = False
    callbacks: Any = ()
    trainer_kwargs: dict[str, Any] = Field(default_factory=dict)

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise option_error(error, type(self)) from None

    @field_validator("max_steps", "max_epochs")
    @classmethod
    def _is_limited(cls, value: int | None, info: ValidationInfo) -> int | None:
        unlimited = value == -1 and (info.field_name == "max_steps" or info.data.get("max_steps", 1) > 0)
        if value is not None and value < 1 and not unlimited:
            raise ValueError("must be at least 1")
        return value

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options in `arguments`, of which those with other names are options of the Trainer."""
        own = {name: value for name, value in arguments.items() if name in cls.names()}
        return cls(**own, trainer_kwargs={name: arguments[name] for name in arguments.keys() - own.keys()})

    def of_plan(self) -> dict[str, Any]:
        """Return the options of the training plan."""
        return {name: getattr(self, name) for name in OF_PLAN}

    def of_trainer(self) -> dict[str, Any]:
        """Return the options of :class:`lightning.Trainer`."""
        own = {name: getattr(self, name) for name in _OF_TRAINER}
        return {**own, "gradient_clip_val": self.gradient_clip_val or None, **self.trainer_kwargs}

    def decisive(self) -> dict[str, Any]:
        """Return the options that affect the result of a training run, in addition to those of the plan."""
        return {name: getattr(self, name) for name in _DECISIVE}

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the options, without `trainer_kwargs`."""
        return [name for name in cls.model_fields if name != "trainer_kwargs"]
