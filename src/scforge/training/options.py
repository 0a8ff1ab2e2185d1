"""Options of a training run, shared by ``Encoder.train``, configurations and the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from scforge._checks import check_bool, check_count, check_positive

if TYPE_CHECKING:
    from scforge.training.datamodule import CellDataModule

OF_PLAN = ("optimizer", "lr", "weight_decay", "schedule", "warmup_steps", "layer_lr_decay")
"""Options that a :class:`TrainingPlan` takes."""

_DECISIVE = ("max_steps", "gradient_clip_val", "accumulate_grad_batches", "ema_decay", "gradual_unfreezing")
"""Options that affect the result, in addition to those of the plan, the epochs and the precision."""

_OF_TRAINER = ("accelerator", "devices", "num_nodes", "precision", "accumulate_grad_batches", "logger")
"""Options that :class:`lightning.Trainer` takes unchanged."""


@dataclass(kw_only=True)
class TrainOptions:
    """Options of :meth:`scforge.models.Encoder.train` and their defaults.

    Parameters
    ----------
    max_epochs
        Maximum number of epochs. If None, it depends on the objective and the number of cells.
    max_steps
        Maximum number of optimizer steps; -1 for no limit.
    datamodule
        Cells to train on instead of the cells that the model was created with. It also determines the minibatches
        (`batch_size`, `max_tokens_per_batch`, `validation_size`, `num_threads`).
    batch_size
        Number of cells per step and process; ``"auto"`` uses the largest batch that fits into memory. If None, uses the
        objective's default.
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
    layer_lr_decay
        Ratio of the learning rate of each layer to the learning rate of the layer above it, e.g. 0.8. If None, uses the
        same learning rate for all layers.
    gradual_unfreezing
        Number of epochs after which another layer is trained, from the top layer down. If None, trains all layers from
        the start.
    early_stopping, early_stopping_patience
        Whether to stop if the validation loss has not improved for this many epochs after the learning-rate warm-up.
    accelerator, devices, num_nodes
        As in :class:`lightning.Trainer`.
    strategy
        ``"ddp"`` (each process has a copy of the model), ``"fsdp"`` (the model is sharded over processes), or
        ``"auto"`` (DDP if there are several processes).
    precision
        As in :class:`lightning.Trainer`, or ``"auto"``: bfloat16 mixed precision if a short benchmark shows that it is
        faster. If None, computes in 32 bits. Query models need 32-bit weights, so ``"bf16-true"`` is not possible.
    gradient_clip_val
        Maximum gradient norm; 0 disables clipping.
    accumulate_grad_batches
        Number of batches whose gradients are averaged for one step.
    gradient_checkpointing
        Whether to recompute activations in the backward pass, which takes less memory and more time. If None, uses the
        setting of the model.
    compile
        Whether to compile the layers with torch.compile.
    ema_decay
        Decay of an exponential moving average of the weights, e.g. 0.999, which is validated and kept. If None, uses
        the weights themselves.
    progress_bar
        Whether to show a progress bar (in a log file, one line per epoch).
    logger
        Lightning loggers, e.g. from :func:`scforge.training.make_loggers`. If None, uses no loggers.
    log_every_n_steps
        Number of optimizer steps between two logged rows.
    checkpoint_dir
        Folder for checkpoints to resume from (``step=NNNNNNNN``) and for the best epochs (``epoch=NN``); all are model
        folders. Checkpoints are saved at the end of each epoch, and when the process receives SIGTERM.
    checkpoint_every_n_steps
        Number of steps after which an additional checkpoint is saved.
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

    max_epochs: int | None = None
    max_steps: int = -1
    datamodule: CellDataModule | None = None
    batch_size: int | str | None = None
    max_tokens_per_batch: int | None = None
    validation_size: float | None = None
    num_threads: int | None = None
    optimizer: str = "adamw"
    lr: float | None = None
    weight_decay: float | None = None
    schedule: str | None = None
    warmup_steps: int | None = None
    layer_lr_decay: float | None = None
    gradual_unfreezing: int | None = None
    early_stopping: bool = True
    early_stopping_patience: int = 10
    accelerator: str = "auto"
    devices: int | str | list[int] = 1
    num_nodes: int = 1
    strategy: str = "auto"
    precision: str | None = None
    gradient_clip_val: float = 1.0
    accumulate_grad_batches: int = 1
    gradient_checkpointing: bool | None = None
    compile: bool = False
    ema_decay: float | None = None
    progress_bar: bool = True
    logger: Any = None
    log_every_n_steps: int = 10
    checkpoint_dir: str | os.PathLike[str] | None = None
    checkpoint_every_n_steps: int | None = None
    keep_last: int = 1
    save_top_k: int = 1
    resume: str | os.PathLike[str] | None = None
    overwrite: bool = False
    callbacks: Sequence[Any] = ()
    trainer_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_epochs is not None and not (self.max_epochs == -1 and self.max_steps > 0):
            check_count("max_epochs", self.max_epochs, "epochs")
        if self.max_steps != -1:
            check_count("max_steps", self.max_steps, "steps")
        check_bool("early_stopping", self.early_stopping)
        check_bool("progress_bar", self.progress_bar)
        check_count("early_stopping_patience", self.early_stopping_patience, "epochs")
        check_count("log_every_n_steps", self.log_every_n_steps, "steps")
        check_count("save_top_k", self.save_top_k, "epochs", least=-1)
        check_count("keep_last", self.keep_last, "states")
        check_count("accumulate_grad_batches", self.accumulate_grad_batches, "batches")
        check_positive("gradient_clip_val", self.gradient_clip_val, or_zero=True, hint="0 does not clip")
        if self.checkpoint_every_n_steps is not None:
            check_count("checkpoint_every_n_steps", self.checkpoint_every_n_steps, "steps")

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
        return [option.name for option in fields(cls) if option.name != "trainer_kwargs"]
