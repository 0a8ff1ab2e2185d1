"""The options of a training run, which ``Encoder.train``, configurations and the command line share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scforge.training.datamodule import CellDataModule


@dataclass(kw_only=True)
class TrainOptions:
    """What :meth:`scforge.models.Encoder.train` takes, with the defaults.

    Parameters
    ----------
    max_epochs
        Maximum number of epochs; None chooses by objective and number of cells.
    max_steps
        Maximum number of optimizer steps; -1 for no limit.
    datamodule
        Cells to train on instead of those that the model was created with; it also sets how minibatches are made
        (`batch_size`, `max_tokens_per_batch`, `validation_size`, `num_threads`).
    batch_size
        Cells per step and process; ``"auto"`` takes the most that fit into memory. If None, uses the objective's
        default.
    max_tokens_per_batch
        A batch contains as many cells of similar length as fit into this many tokens, padding included.
    validation_size
        Fraction of cells held out, sampled with the model's seed, so the same cells in every call; None holds out 0.1.
    num_threads
        Threads that prepare batches while the model computes; 0 for none, None chooses.
    optimizer
        ``"adamw"``, ``"adam"``, ``"sgd"``, or ``"muon"`` for the matrices of the hidden layers (AdamW for the rest).
    lr, weight_decay, schedule
        If None, uses the objective's defaults. `schedule` is one of ``"cosine_warmup"``, ``"cosine"``,
        ``"linear_warmup"``, ``"linear"``, ``"one_cycle"``, ``"constant"``.
    warmup_steps
        Steps until the peak of the learning rate. If None, uses a share of all steps.
    layer_lr_decay
        Learning rate of a layer over that of the layer above it, e.g. 0.8; None trains all alike.
    gradual_unfreezing
        Train the top layer first, and one more below it every that many epochs; None trains all from the start.
    early_stopping, early_stopping_patience
        Stop when the validation loss has not improved for this many epochs after the warm-up of the learning rate.
    accelerator, devices, num_nodes
        As in :class:`lightning.Trainer`.
    strategy
        ``"ddp"`` (a whole model in each process), ``"fsdp"`` (a share of it), or ``"auto"`` (DDP for several).
    precision
        As in :class:`lightning.Trainer`, or ``"auto"``: bfloat16 mixed precision if a short measurement shows that it
        is faster. If None, computes in 32 bits. Query models need 32-bit weights: no ``"bf16-true"``.
    gradient_clip_val
        Largest norm of the gradient; 0 does not clip.
    accumulate_grad_batches
        Batches whose gradients are averaged for a step.
    gradient_checkpointing
        Compute activations again in the backward pass, which takes less memory and more time; None does as the model
        was made.
    compile
        Compile the layers with torch.compile.
    ema_decay
        Validate and keep an exponential moving average of the weights, e.g. 0.999; None does not.
    progress_bar
        Show a bar (in a log file: a line an epoch).
    logger
        Lightning loggers, e.g. of :func:`scforge.training.make_loggers`; None means no loggers.
    log_every_n_steps
        Steps between two rows of the loggers.
    checkpoint_dir
        Folder for states to resume from (``step=NNNNNNNN``) and for the best epochs (``epoch=NN``); all are model
        folders. States are saved at the end of each epoch, and when the process is asked to end (SIGTERM).
    checkpoint_every_n_steps
        Save a state after this many steps, too.
    keep_last, save_top_k
        How many states, and how many of the best epochs to keep there; ``save_top_k=-1`` keeps all.
    resume
        ``"auto"`` resumes from the last state in `checkpoint_dir`, if there is one; or the folder of a state. The model
        has to be made as before; the outcome is that of a training run that was never interrupted.
    overwrite
        Replace what another training run has left in `checkpoint_dir`.
    callbacks
        Further Lightning callbacks, e.g. :class:`scforge.eval.BenchmarkCallback`.
    trainer_kwargs
        Further options of :class:`lightning.Trainer`.

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

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the options, without `trainer_kwargs`."""
        return [one.name for one in fields(cls) if one.name != "trainer_kwargs"]
