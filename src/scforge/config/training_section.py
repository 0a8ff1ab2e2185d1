"""The section ``training`` of a configuration file: how the weights are learned, and on what hardware."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from scforge.config._fields import Float, Int, Positive, Section

__all__ = ["OptimizerConfig", "SchedulerConfig", "TrainingConfig"]


# Validators of their own instead of ``int | str``, which reports a mistake twice, once for each type.
def _batch_size(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is None or value == "auto" or (whole and value >= 1):
        return value
    if whole:
        raise ValueError("is out of range; it must be at least 1")
    if isinstance(value, str) and value.strip().isdecimal() and int(value) >= 1:
        return int(value)
    raise ValueError("is neither a whole number of cells nor 'auto', which takes as many as fit into memory")


def _devices(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and (value >= 1 or value == -1):
        return value
    if isinstance(value, str) and (value == "auto" or all(part.strip().isdecimal() for part in value.split(","))):
        return value
    raise ValueError("is neither a number of devices, nor -1 for all, nor 'auto', nor indices such as '0,1'")


BatchSize = Annotated[
    Any,
    BeforeValidator(_batch_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}, {"type": "null"}]}),
]
Devices = Annotated[
    Any,
    BeforeValidator(_devices),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": -1}, {"type": "string"}]}),
]


class OptimizerConfig(Section):
    """The optimizer; None takes the default of the objective.

    Parameters
    ----------
    name
        ``"adamw"``, ``"adam"``, ``"sgd"``, or ``"muon"``, which orthogonalises the steps of the matrices inside the
        layers.
    lr
        Highest learning rate. Also accepted as ``training.lr``.
    weight_decay
        Weight decay.

    Examples
    --------
    >>> OptimizerConfig(name="muon", lr=1e-3).lr
    0.001
    """

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    lr: Annotated[Float, Field(gt=0)] | None = None
    weight_decay: Annotated[Float, Field(ge=0)] | None = None


class SchedulerConfig(Section):
    """The course of the learning rate; None takes the default of the objective.

    Parameters
    ----------
    name
        Name of the schedule.
    warmup_steps
        Optimizer steps until the highest learning rate.

    Examples
    --------
    >>> SchedulerConfig(name="cosine_warmup", warmup_steps=500).warmup_steps
    500
    """

    name: Literal["cosine_warmup", "cosine", "linear_warmup", "linear", "one_cycle", "constant"] | None = None
    warmup_steps: Annotated[Int, Field(ge=0)] | None = None


class TrainingConfig(Section):
    """The training run; None takes the default of the objective, or what suits the data.

    Parameters
    ----------
    batch_size
        Cells per step and device; ``"auto"`` tries how many fit into memory.
    max_epochs, max_steps
        Where training ends, whichever comes first.
    validation_size
        Share of cells held out for validation, in [0, 1).
    early_stopping
        Stop when the validation loss no longer falls.
    early_stopping_patience
        Epochs without an improvement until then.
    precision
        Precision of the arithmetic, as Lightning names it; ``"auto"`` takes bfloat16 where it is faster.
    accelerator, devices
        Hardware: kind, and number of devices of a machine (or ``"auto"``, or a list of indices as text, ``"0,1"``).
        ``training.num_gpus`` sets both.
    num_nodes
        Machines, with as many devices each.
    strategy
        How several devices share the work: ``"ddp"`` gives each a whole model, ``"fsdp"`` a share of the weights;
        ``"auto"`` takes ``"ddp"`` where there are several.
    gradient_clip_val
        Largest norm of the gradient; 0 does not clip.
    accumulate_grad_batches
        Batches whose gradients are added up before a step, so that a step sees so many times the cells.
    gradient_checkpointing
        Compute layers again in the backward pass instead of keeping their states: less memory, more time.
    layer_lr_decay
        Learning rate of a layer over that of the layer above it, e.g. 0.8. None trains all alike.
    gradual_unfreezing
        Train the top layer first, and one more below it every so many epochs. None trains all from the start.
    compile
        Compile the model with ``torch.compile``: a slow first step, faster ones after it.
    ema_decay
        Keep an average of the weights over the steps, of which this share is carried on in each, e.g. 0.999.
    log_every_n_steps
        Steps between two lines of the log.
    checkpoint_every_n_steps
        Steps between two states that a run can be resumed from, besides the one at the end of an epoch.
    optimizer, scheduler
        Optimizer and course of the learning rate.

    Examples
    --------
    >>> config = TrainingConfig(max_epochs=20, batch_size="auto", optimizer={"lr": 1e-4})
    >>> config.max_epochs, config.optimizer.lr, config.gradient_clip_val
    (20, 0.0001, 1.0)
    """

    batch_size: BatchSize = None
    max_epochs: Positive | None = None
    max_steps: Positive | None = None
    validation_size: Annotated[Float, Field(ge=0, lt=1)] = 0.1
    early_stopping: bool = True
    early_stopping_patience: Positive | None = None
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"] | None = None
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    devices: Devices = 1
    num_nodes: Positive = 1
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    gradient_clip_val: Annotated[Float, Field(ge=0)] = 1.0
    accumulate_grad_batches: Positive = 1
    gradient_checkpointing: bool | None = None
    layer_lr_decay: Annotated[Float, Field(gt=0, le=1)] | None = None
    gradual_unfreezing: Positive | None = None
    compile: bool = False
    ema_decay: Annotated[Float, Field(gt=0, lt=1)] | None = None
    log_every_n_steps: Positive = 10
    checkpoint_every_n_steps: Positive | None = None
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
