"""What a model was fine-tuned for, and how: enough to build its module again from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from scforge._checks import check_count
from scforge.errors import ModelFileError, OptionError
from scforge.finetuning.adapters import inject_lora
from scforge.finetuning.base import Task, get_task
from scforge.finetuning.heads import FineTunedModule
from scforge.training.objectives.base import Objective
from scforge.training.plan import freeze_layers


@dataclass(frozen=True)
class Tuning:
    """A task with its options, the width of the embeddings, adapters, and what is frozen.

    Attributes
    ----------
    task, task_options
        Name in the registry, and options.
    n_latent
        Width of the embeddings of the base model.
    lora
        Options of the adapters, all spelled out; None for none.
    freeze
        True for the whole encoder, or the number of its first layers; False for nothing.
    split
        How cells were split, and of which cells: see :func:`scforge.estimators.finetuning_run.finetune`.
    base
        What the base model was: its checksum, its epochs.
    backbone
        Architecture with weights to put the head on, in place of a new one; not saved.
    """

    task: str
    task_options: dict[str, Any]
    n_latent: int
    lora: dict[str, Any] | None = None
    freeze: bool | int = False
    split: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    backbone: nn.Module | None = field(default=None, repr=False, compare=False)

    def build_task(self, pretraining: Objective) -> Task:
        """Make the task, on a base model that was trained with the objective `pretraining`."""
        task = get_task(self.task, **self.task_options)
        task.pretraining = pretraining
        if self.lora is not None:
            task.for_adapters()
        return task

    def build_module(self, encoder: nn.Module) -> FineTunedModule:
        """Put a head on an architecture, and adapters into it, and freeze what is frozen."""
        task = get_task(self.task, **self.task_options)
        if self.freeze is True:
            encoder.requires_grad_(False)
        elif self.freeze:
            freeze_layers(encoder, self.freeze)
        head = task.make_head(self.n_latent, encoder)
        if self.lora is not None:
            inject_lora(encoder, self.lora)
        module = FineTunedModule(encoder, head)
        module.frozen = self.freeze is True
        return module

    def to_json(self) -> dict[str, Any]:
        """Return all of it, JSON-safe."""
        return {
            "task": {"name": self.task, **self.task_options},
            "n_latent": self.n_latent,
            "lora": self.lora,
            "freeze": self.freeze,
            "split": self.split,
            "base": self.base,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | None, *, source: str) -> Tuning | None:
        """Read what :meth:`to_json` wrote; None for None.

        Raises
        ------
        ModelFileError
            If something is missing.
        """
        if content is None:
            return None
        try:
            options = dict(content["task"])
            name = options.pop("name")
            rest = {key: content[key] for key in ("n_latent", "lora", "freeze", "split", "base")}
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFileError(
                f"the description of the fine-tuning in {source!r} lacks {error}; copy it again."
            ) from error
        return cls(task=name, task_options=options, **rest)


def check_freeze(freeze: bool | int, lora: Any, gradual_unfreezing: int | None) -> None:
    """Raise :class:`~scforge.errors.OptionError` unless what is frozen makes sense."""
    if not isinstance(freeze, bool):
        check_count("freeze", freeze, "layers")
    has_lora = lora is not False and lora is not None
    if freeze is not False and has_lora:
        raise OptionError(
            f"freeze={freeze!r} and lora={lora!r}: adapters freeze the weights of the encoder anyway; leave freeze out."
        )
    if gradual_unfreezing is not None and (freeze is True or has_lora):
        what = "freeze=True" if freeze is True else f"lora={lora!r}"
        raise OptionError(
            f"gradual_unfreezing={gradual_unfreezing} thaws layers that {what} keeps frozen; leave one of the two out."
        )
