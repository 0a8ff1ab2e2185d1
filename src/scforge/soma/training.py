"""Training of byte-level language models with Lightning."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import lightning
import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from scforge._checks import check_count, check_positive, check_seed
from scforge._io import atomic_folder
from scforge.errors import DataError, OptionError, TrainingError, first_line, spelled
from scforge.soma.byte_data import ByteData, hold_out
from scforge.soma.documents import Document, Files, read_documents, read_groups
from scforge.soma.model_folder import FINAL, WEIGHTS, device_of, read_model, write_model
from scforge.soma.v1.configs import V1_PAD_TOKEN_ID, ModelConfig, SIGRegConfig
from scforge.soma.v1.torch import Model, SIGReg, compute_loss
from scforge.training.checkpoint import SaveOptions, SavingError, check_settings
from scforge.training.devices import out_of_memory
from scforge.training.fitting import FitResult, default_max_epochs, fit
from scforge.training.monitoring import EpochProgress
from scforge.training.objectives.base import TrainingDefaults
from scforge.training.options import TrainOptions
from scforge.training.plan import NotFiniteError, TrainingPlan
from scforge.training.run_folder import RunFolder, check_state, read_state, write_state

logger = logging.getLogger("scforge")

_SECONDS = 60.0
"""Seconds between two log lines."""

_BITS_OF_FIRST = 8.0
"""Number of bits for the first byte of a chunk, which is not predicted."""

_AUTO = "auto"

_KEPT = 2

_HELD_OUT = 0.1


class _Remembered(nn.Module):
    """A regularizer that stores its last value, which is part of the loss."""

    def __init__(self, config: SIGRegConfig) -> None:
        super().__init__()
        self.regularizer = SIGReg(config) if config.coefficient else None
        self.value = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = x.new_zeros(()) if self.regularizer is None else self.regularizer(x)
        self.value = value.detach()
        return value


class NextByte:
    """The soma loss, with bits per byte as a metric.

    Bits per byte are the size of a file compressed with the model: the bits of all predicted tokens, including the end
    of each document, plus 8 bits for the first byte of each chunk, divided by the number of bytes.

    Parameters
    ----------
    sig_reg
        The regularizer.
    seq_len
        Number of tokens per sequence.
    """

    defaults: ClassVar[TrainingDefaults] = TrainingDefaults(
        batch_size=16, lr=2e-3, weight_decay=0.1, schedule="cosine_warmup", max_epochs=10
    )
    monitor: ClassVar[str] = "bits_per_byte"
    monitor_mode: ClassVar[str] = "min"

    def __init__(self, sig_reg: SIGRegConfig, *, seq_len: int) -> None:
        self.sig_reg = _Remembered(sig_reg)
        self.seq_len = seq_len

    def check_architecture(self, architecture: Any) -> None:
        """Accept any byte-level module."""

    def n_cells(self, batch: dict[str, torch.Tensor]) -> int:
        """Return the number of sequences in a batch."""
        return len(batch["input_ids"])

    def max_tokens(self, tokenizer: Any) -> int:
        """Return the number of tokens per sequence."""
        return self.seq_len

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a batch, and the bits and bytes per sequence."""
        assert isinstance(module, Model)
        targets = batch["targets"]
        loss, _ = compute_loss(module, self.sig_reg.to(targets.device), batch["input_ids"], targets)
        cross_entropy = (loss.detach() - self.sig_reg.value).float()
        bits = cross_entropy / math.log(2) * (targets != V1_PAD_TOKEN_ID).sum() + _BITS_OF_FIRST * len(targets)
        return loss, {"bits": bits / len(targets), "bytes": batch["n_bytes"] / len(targets)}

    def summarize(self, means: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the loss and the bits per byte of an epoch."""
        return {"loss": float(means["loss"]), "bits_per_byte": float(means["bits"] / means["bytes"])}


class ByteProgress(EpochProgress):
    """A progress bar with bits per byte; without a terminal, one log line per epoch and per minute."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Open the progress bar."""
        super().on_train_start(trainer, pl_module)
        self._told = time.perf_counter()

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        """Advance the progress bar."""
        super().on_train_batch_end(trainer, *args, **kwargs)
        if self._lines and time.perf_counter() - self._told > _SECONDS:
            self._told = time.perf_counter()
            total = trainer.lightning_module.total_steps
            logger.info("Step %d/%d%s.", trainer.global_step, total, self._left(trainer.global_step, total))

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Show the bits per byte of the epoch."""
        names = {"train_bits_per_byte": "trained on", "validation_bits_per_byte": "held out"}
        figures = trainer.callback_metrics
        text = ", ".join(f"{float(figures[name]):.3f} {words}" for name, words in names.items() if name in figures)
        most = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
        epoch = f"Epoch {trainer.current_epoch + 1}{most}"
        if self._bar is not None:
            self._bar.set_description(epoch)
            self._bar.set_postfix_str(f"bits per byte: {text}")
        elif self._lines:
            self._told = time.perf_counter()
            logger.info("%s: bits per byte %s%s.", epoch, text, self._left(trainer.global_step, pl_module.total_steps))

    def _left(self, step: int, total: int) -> str:
        left = self._clock.seconds_left(step, total)
        return f", about {datetime.timedelta(seconds=round(left))} left" if left else ""


@dataclass(frozen=True)
class TrainedModel:
    r"""Result of :func:`train`.

    Attributes
    ----------
    model
        The model of the best epoch, on the CPU.
    path
        Folder of the model.
    bits_per_byte
        Bits per byte on the held-out bytes, or on the training bytes if no bytes were held out.
    history
        A mapping from metric name to one value per epoch.

    Examples
    --------
    >>> from pathlib import Path
    >>> from scforge import soma
    >>> _ = Path("dna.fasta").write_text(">a\nACGTACGT\n>b\nTTGACGTT\n")
    >>> sizes = {"embedding_dim": 8, "num_layers": 1, "num_heads": 1, "seq_len": 8}
    >>> trained = soma.train("dna.fasta", "trained", **sizes, max_epochs=1, progress_bar=False)
    >>> trained.path.name, trained.bits_per_byte > 0
    ('final', True)
    """

    model: Model
    path: Path
    bits_per_byte: float
    history: dict[str, list[float]]

    def __fspath__(self) -> str:
        """Return the path of the model folder."""
        return str(self.path)


def train(
    files: Files,
    checkpoint_dir: str | os.PathLike[str],
    *,
    validation: Files | None = None,
    validation_size: float | None = None,
    embedding_dim: int = 192,
    pwff_hidden_dim: int | None = None,
    num_layers: int = 4,
    num_heads: int = 4,
    dropout_rate: float = 0.0,
    seq_len: int = 256,
    sig_reg: float = 0.0,
    max_epochs: int | None = None,
    max_steps: int = -1,
    batch_size: int | None = None,
    optimizer: str = "adamw",
    lr: float | None = None,
    gradient_checkpointing: bool = False,
    device: str = "auto",
    precision: str | None = None,
    checkpoint_every_n_steps: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    seed: int = 0,
    progress_bar: bool = True,
    **reading: Any,
) -> TrainedModel:
    r"""Train a byte-level language model on files of any kind.

    At the end of each epoch, a checkpoint is saved in the folder (``step=NNNNNNNN``), from which training resumes bit
    for bit. The model of the best epoch is saved as ``final``. For the documents in a file, see :func:`read_documents`:
    each FASTA record, each table row, or each other file is one document.

    Parameters
    ----------
    files
        Files to train on.
    checkpoint_dir
        Folder of the training run.
    validation
        Files to hold out. If None, holds out a fraction of the documents.
    validation_size
        Fraction of the bytes to hold out for validation. If None, uses 0.1; 0 holds out nothing.
    embedding_dim, num_layers, num_heads, dropout_rate
        Model sizes; see :class:`scforge.soma.v1.configs.ModelConfig`. The defaults are small enough for a laptop.
    pwff_hidden_dim
        Number of hidden units in a feed-forward block. If None, uses four times `embedding_dim`.
    seq_len
        Length of the sequences in bytes, the context of a prediction.
    sig_reg
        Weight of the regularizer; 0.02 in the publication. The regularizer pulls the norm of each state to a constant,
        which the final LayerNorm already does, and takes a third of the training time of a small model.
    max_epochs, max_steps
        Maximum numbers of epochs and steps. With None and -1, the number depends on the number of bytes. Training also
        stops after ten epochs without improvement.
    batch_size
        Number of sequences per step. If None, uses 16.
    optimizer
        ``"adamw"``, ``"adam"``, ``"sgd"``, or ``"muon"`` for the weights of all linear layers.
    lr
        Peak learning rate. If None, uses 0.002 (``"muon"``: 0.01).
    gradient_checkpointing
        Whether to recompute layers in the backward pass, which takes less memory but is slower.
    device
        ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    precision
        Lightning precision, e.g. ``"bf16-mixed"``. If None, uses float32.
    checkpoint_every_n_steps
        Number of steps after which an additional checkpoint is saved.
    resume
        ``"auto"`` resumes from the latest checkpoint in the folder, if any; a path resumes from the checkpoint in that
        folder.
    overwrite
        Whether to replace the training run in the folder.
    seed
        Random seed for weights, order and split.
    progress_bar
        Whether to show a progress bar, or one line per epoch in a log file.
    **reading
        Options for :func:`read_documents`: ``kind``, ``field``, ``gene_column``, ``text_column``.

    Returns
    -------
    The model, its folder and its metrics.

    Raises
    ------
    OptionError
        If an option cannot be used, or the folder contains another training run.
    MissingFileError
        If a file does not exist.
    DataError
        If a file is empty or cannot be read, or held-out documents are also training documents.
    TrainingError
        If the loss is NaN, memory runs out, or a checkpoint cannot be saved.

    Examples
    --------
    >>> _ = Path("dna.fasta").write_text(">a\nACGTACGT\n>b\nTTGACGTT\n")
    >>> trained = train(
    ...     "dna.fasta", "run", embedding_dim=8, num_layers=1, num_heads=1, seq_len=8, max_epochs=1, progress_bar=False
    ... )
    >>> sorted(part.name for part in trained.path.iterdir())
    ['README.md', 'config.json', 'weights.safetensors']
    """
    if resume is not None and overwrite:
        raise OptionError("and overwrite=True contradict each other; pass only one of the two.", resume=str(resume))
    if checkpoint_every_n_steps is not None:
        check_count("checkpoint_every_n_steps", checkpoint_every_n_steps, "steps")
    check_positive("sig_reg", sig_reg, or_zero=True)
    hidden = 4 * embedding_dim if pwff_hidden_dim is None else pwff_hidden_dim
    config = ModelConfig(dropout_rate, embedding_dim, hidden, num_layers, num_heads)
    place_of_work = device_of(device)
    training, held_out = _documents(files, validation, validation_size, seed, reading)
    size = NextByte.defaults.batch_size if batch_size is None else batch_size
    data: Any = ByteData(training, held_out, seq_len=seq_len, batch_size=size, seed=seed)
    if max_epochs is None:
        max_epochs = default_max_epochs(NextByte.defaults, len(data.train_rows)) if max_steps < 0 else -1
    objective: Any = NextByte(SIGRegConfig(coefficient=sig_reg), seq_len=seq_len)
    data.objective, data.tokenizer = objective, None
    peak = lr if lr is not None else {"muon": 1e-2}.get(optimizer, NextByte.defaults.lr)
    settings = {
        **asdict(config),
        **{"seq_len": seq_len, "sig_reg": sig_reg, "batch_size": size, "optimizer": optimizer, "lr": peak},
        **{"max_epochs": max_epochs, "max_steps": max_steps, "precision": precision or "32-true", "seed": seed},
        **{"bytes_trained_on": _sum(training), "bytes_held_out": _sum(held_out)},
    }
    folder = RunFolder(checkpoint_dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.locked())
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(check_seed(seed))
        checkpoint = _found(folder, resume)
        begin: Callable[[], None]
        if checkpoint is None:
            folder.check_free(resumes=resume == _AUTO, overwrite=overwrite)
            model, state, begin = Model(config, gradient_checkpointing=gradient_checkpointing), None, folder.clear
        else:
            path, state = checkpoint
            check_settings(state["settings"], settings, where=str(path))
            model = Model.load(path / WEIGHTS, config, gradient_checkpointing=gradient_checkpointing)
            logger.info("Resuming from %s: epoch %d, step %d.", path, state["epoch"] + 1, state["step"])
            begin = _after(folder, path, state)
        parts = ((training, data.train_chunks), (held_out, data.held_out_chunks))
        sizes = [f"{chunks.n_bytes:,} bytes of {len(documents):,} documents" for documents, chunks in parts]
        logger.info("Training on %s; %s are held out.", *sizes)
        facts = {"bytes": data.train_chunks.n_bytes, "held_out_bytes": data.held_out_chunks.n_bytes, **settings}
        plan = TrainingPlan(model, objective, optimizer=optimizer, lr=peak)
        result = _fit(
            plan,
            data,
            TrainOptions(
                max_epochs=max_epochs,
                max_steps=max_steps,
                progress_bar=False,
                callbacks=[ByteProgress()] if progress_bar else [],
                precision=precision,
                accelerator=place_of_work.type,
                devices=1 if place_of_work.index is None else [place_of_work.index],
            ),
            SaveOptions(
                write=_writer(model, folder, seq_len, facts),
                every_n_steps=checkpoint_every_n_steps,
                settings=settings,
                resume=state,
                begin=begin,
            ),
        )
        model.to("cpu", torch.float32).eval()
        if result.interrupted:
            raise KeyboardInterrupt
        if result.signal is not None:
            how = spelled("resume='auto'", "--resume auto")
            logger.warning("Training stopped and a checkpoint was saved; continue with %s.", how)
            signal.raise_signal(result.signal)
        measured = "validation" if "validation_bits_per_byte" in result.history else "train"
        bits = result.history[f"{measured}_bits_per_byte"][result.best_epoch]
        facts |= {"bits_per_byte": bits, "epochs": result.n_epochs, "best_epoch": result.best_epoch + 1}
        with atomic_folder(folder.path / FINAL, overwrite=True) as target:
            write_model(target, model, seq_len=seq_len, facts=facts)
    return TrainedModel(model, folder.path / FINAL, bits, result.history)


def _documents(
    files: Files, validation: Files | None, share: float | None, seed: int, reading: dict[str, Any]
) -> tuple[list[Document], list[Document]]:
    if validation is None:
        return hold_out(read_documents(files, **reading), _HELD_OUT if share is None else share, seed=seed)
    if share is not None:
        raise OptionError("has no effect if validation is passed; pass only one of the two.", validation_size=share)
    documents, held_out = read_groups([files, validation], **reading)
    if repeated := {document.data for document in documents} & {document.data for document in held_out}:
        name = next(document.name for document in held_out if document.data in repeated)
        raise DataError(
            f"contains {len(repeated)} documents that are also in files, e.g. {name!r}; remove these documents "
            "from one of the two.",
            argument="validation",
        )
    return documents, held_out


def _sum(documents: Sequence[Document]) -> str:
    """Return a checksum of the bytes and the document boundaries."""
    total = hashlib.sha256()
    for document in documents:
        total.update(len(document.data).to_bytes(8, "big"))
        total.update(document.data)
    return total.hexdigest()[:16]


def _found(folder: RunFolder, resume: str | os.PathLike[str] | None) -> tuple[Path, dict[str, Any]] | None:
    if resume is None:
        return None
    if resume != _AUTO:
        path = Path(resume)
        check_state(path, folder)
        read_model(path)  # raises if it is corrupted
        return path, read_state(path)
    latest = folder.latest(read_model)
    return None if latest is None else latest[:2]


def _after(folder: RunFolder, path: Path, state: dict[str, Any]) -> Callable[[], None]:
    """Return the callback that removes later checkpoints before the first step of a resumed run."""
    if folder.holds(path):
        return lambda: folder.go_back_to(state["step"], state["epoch"])
    folder.check_free()
    return lambda: None


def _writer(
    model: Model, folder: RunFolder, seq_len: int, facts: dict[str, Any]
) -> Callable[[str, dict[str, Any], dict[str, torch.Tensor]], None]:
    def write(name: str, state: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        try:
            with atomic_folder(folder.path / name, overwrite=True) as target:
                write_model(target, model, seq_len=seq_len, facts={**facts, "epochs": state["epoch"]})
                write_state(target, state)
            folder.keep_last(_KEPT)
        except (OSError, SafetensorError) as error:
            raise SavingError(
                f"checkpoint_dir={str(folder.path)!r}: {name} cannot be written ({first_line(error)}); free some disk "
                f"space and resume training with {spelled("resume='auto'", '--resume auto')}."
            ) from error

    return write


def _fit(plan: TrainingPlan, data: Any, options: TrainOptions, saving: SaveOptions) -> FitResult:
    """Train the model; error messages refer to bytes instead of cells."""
    data.tokenizer = data  # used by the hint about memory below
    try:
        return fit(plan, data, options, saving=saving)
    except NotFiniteError as error:
        raise TrainingError(f"{first_line(error).split(';')[0]}; lower the learning rate (lr).") from error
    except TrainingError as error:
        if error.__cause__ is None or not out_of_memory(error.__cause__):
            raise
        raise TrainingError(
            f"memory ran out with batches of {data.batch_size} sequences of {data.train_chunks.seq_len} tokens; lower "
            f"batch_size or seq_len, or pass {spelled('gradient_checkpointing=True', '--gradient-checkpointing')}."
        ) from error
