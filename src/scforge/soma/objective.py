"""What training of bytes minimises and tells, in the form that :class:`scforge.training.plan.TrainingPlan` takes."""

from __future__ import annotations

import datetime
import logging
import math
import time
from typing import Any, ClassVar

import lightning
import numpy as np
import torch
from torch import nn

from scforge.soma.v1.configs import V1_PAD_TOKEN_ID, SIGRegConfig
from scforge.soma.v1.torch import Model, SIGReg, compute_loss
from scforge.training.monitoring import EpochProgress
from scforge.training.objectives.base import TrainingDefaults

__all__ = ["ByteProgress", "NextByte"]

logger = logging.getLogger("scforge")

_SECONDS = 60.0
"""Between two lines of the log."""

_BITS_OF_FIRST = 8.0
"""What the first byte of a chunk costs, which nothing predicts."""


class _Remembered(nn.Module):
    """A regulariser that remembers its last value, which the loss contains."""

    def __init__(self, config: SIGRegConfig) -> None:
        super().__init__()
        self.regulariser = SIGReg(config) if config.coefficient else None
        self.value = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = x.new_zeros(()) if self.regulariser is None else self.regulariser(x)
        self.value = value.detach()
        return value


class NextByte:
    """The loss of soma, and bits per byte beside it.

    Bits per byte are what a file would take if the model compressed it: the bits of all predicted tokens, the end of
    each document included, and 8 for the first byte of each chunk, over the number of bytes.

    Parameters
    ----------
    sig_reg
        The regulariser.
    seq_len
        Tokens of a sequence.
    """

    defaults: ClassVar[TrainingDefaults] = TrainingDefaults(
        batch_size=16, lr=2e-3, weight_decay=0.1, schedule="cosine_warmup", max_epochs=10
    )
    monitor: ClassVar[str] = "bits_per_byte"
    monitor_mode: ClassVar[str] = "min"

    def __init__(self, sig_reg: SIGRegConfig, *, seq_len: int) -> None:
        self.sig_reg = _Remembered(sig_reg)
        self.seq_len = seq_len

    def n_cells(self, batch: dict[str, torch.Tensor]) -> int:
        """Return the number of sequences of a batch."""
        return len(batch["input_ids"])

    def max_tokens(self, tokenizer: Any) -> int:
        """Return the tokens of a sequence."""
        return self.seq_len

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a batch; beside it its bits and bytes, each a sequence."""
        assert isinstance(module, Model)
        targets = batch["targets"]
        loss, _ = compute_loss(module, self.sig_reg.to(targets.device), batch["input_ids"], targets)
        cross_entropy = (loss.detach() - self.sig_reg.value).float()
        bits = cross_entropy / math.log(2) * (targets != V1_PAD_TOKEN_ID).sum() + _BITS_OF_FIRST * len(targets)
        return loss, {"bits": bits / len(targets), "bytes": batch["n_bytes"] / len(targets)}

    def summarise(self, means: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the loss and the bits per byte of an epoch."""
        return {"loss": float(means["loss"]), "bits_per_byte": float(means["bits"] / means["bytes"])}


class ByteProgress(EpochProgress):
    """The bar, with bits per byte behind it; where nobody looks at it, a line of the log each epoch and each minute."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Open the bar."""
        super().on_train_start(trainer, pl_module)
        self._told = time.perf_counter()

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        """Move the bar."""
        super().on_train_batch_end(trainer, *args, **kwargs)
        if self._lines and time.perf_counter() - self._told > _SECONDS:
            self._told = time.perf_counter()
            total = trainer.lightning_module.total_steps
            logger.info("Step %d/%d%s.", trainer.global_step, total, self._left(trainer.global_step, total))

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Show the bits per byte."""
        names = {"train_bits_per_byte": "trained on", "validation_bits_per_byte": "held out"}
        figures = trainer.callback_metrics
        told = ", ".join(f"{float(figures[name]):.3f} {words}" for name, words in names.items() if name in figures)
        most = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
        epoch = f"Epoch {trainer.current_epoch + 1}{most}"
        if self._bar is not None:
            self._bar.set_description(epoch)
            self._bar.set_postfix_str(f"bits per byte: {told}")
        elif self._lines:
            self._told = time.perf_counter()
            logger.info("%s: bits per byte %s%s.", epoch, told, self._left(trainer.global_step, pl_module.total_steps))

    def _left(self, step: int, total: int) -> str:
        left = self._clock.seconds_left(step, total)
        return f", about {datetime.timedelta(seconds=round(left))} left" if left else ""
