"""Choose the batch size and the precision of a training run by short measurements."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from scforge.data.memory import available_memory
from scforge.errors import OptionError, TrainingError
from scforge.training.datamodule import CellDataModule
from scforge.training.devices import out_of_memory, unchanged

logger = logging.getLogger("scforge")

_MAX = 1024

_MIN_STEPS = 8

_SHARE = 0.5
"""Fraction of free memory that a training step may use on a CPU."""

_FASTER = 1.1
"""Speedup that 16 bits must achieve to justify the rounding errors."""


def find_batch_size(
    module: nn.Module, data: CellDataModule, device: torch.device, *, precision: str | None = None, most: int = _MAX
) -> int:
    """Return the largest power of two for which a training step with this batch size fits into memory.

    The trial uses the longest cells of the data and reserves memory for the two states of AdamW. A CPU raises no error
    before memory runs out, so memory is extrapolated from the tensors that autograd keeps for the backward pass of a
    few cells. The batch size is limited so that an epoch consists of at least 8 steps.

    Parameters
    ----------
    module
        The module; it is not changed.
    data
        A data module that is bound to a tokenizer and an objective.
    device
        Device that the training will run on.
    precision
        Training precision; mixed precision takes less memory.
    most
        Largest batch size to try.

    Returns
    -------
    Number of cells, a power of two, at most `most`.

    Raises
    ------
    TrainingError
        If a batch of one cell does not fit.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:60, :300].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("continuous_projection", cells.vocab)
    >>> sizes = {"hidden_dim": 8, "pooling": "weighted_sum", "latent_dim": 4}
    >>> module = scforge.models.GenePoolingModel(len(cells.vocab), **sizes)
    >>> data = scforge.training.CellDataModule(cells, tokenizer, scforge.training.JointEmbedding())
    >>> find_batch_size(module, data, torch.device("cpu"), most=4)
    4
    """
    limit = max(1, min(most, len(data.train_rows) // _MIN_STEPS))
    sizes = [1 << power for power in range(limit.bit_length())]
    largest: int | None
    if device.type == "cuda":
        largest = _by_trying(module, data, device, sizes, precision)
    elif (memory := available_memory()) is None:
        largest = max(size for size in sizes if size <= data.objective.defaults.batch_size)
    else:
        few, more = sizes[min(1, len(sizes) - 1)], sizes[min(3, len(sizes) - 1)]
        kept = {size: _kept_bytes(module, data, size) for size in {few, more}}
        per_cell = (kept[more] - kept[few]) / (more - few) if more > few else kept[few] / few
        # A backward pass stores the gradients of a layer in addition to unused activations.
        largest = max((size for size in sizes if 1.5 * per_cell * size <= _SHARE * memory), default=None)
    if largest is None:
        raise TrainingError(
            "memory ran out with a batch of one cell; lower the tokenizer's max_len (data.max_genes), or pass "
            "gradient_checkpointing=True (training.gradient_checkpointing)."
        )
    logger.info("Using batches of %d cells (batch_size='auto').", largest)
    return largest


def choose_precision(module: nn.Module, data: CellDataModule, device: torch.device, processes: int = 1) -> str:
    """Return ``"bf16-mixed"`` if it speeds up a training step, otherwise ``"32-true"``.

    GPUs with native bfloat16 support are faster with it. On a CPU, three steps in each precision are timed on the same
    batch, and bfloat16 must be at least 10% faster. Random states and weights do not change.

    Parameters
    ----------
    module
        The module; it is not changed.
    data
        A data module that is bound to a tokenizer and an objective.
    device
        Device that the training will run on.
    processes
        Number of training processes.

    Raises
    ------
    OptionError
        If steps would have to be timed in several processes.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            # Older GPUs emulate bfloat16, which is slower than float32.
            return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    if processes != 1:
        raise OptionError(
            "works only with a single process; with several, pass a precision such as 'bf16-mixed'.", precision="auto"
        )
    if device.type != "cpu":
        return "32-true"
    batch_size = data.batch_size or data.objective.defaults.batch_size
    batch = _batch(data, min(batch_size, len(data.train_rows)), device)
    module.to(device)
    seconds = {}
    for precision in ("32-true", "bf16-mixed"):
        times = []
        for _ in range(4):
            start = time.perf_counter()
            with _autocast(device, precision):
                _step(module, data, batch)
            times.append(time.perf_counter() - start)
        seconds[precision] = min(times[1:])  # the first step also creates plans and kernels
    gain = seconds["32-true"] / seconds["bf16-mixed"]
    chosen = "bf16-mixed" if gain >= _FASTER else "32-true"
    logger.info("A training step in bf16 is %.2f times as fast as in float32; using precision=%r.", gain, chosen)
    return chosen


def _kept_bytes(module: nn.Module, data: CellDataModule, size: int) -> int:
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _step(module, data, _batch(data, size, torch.device("cpu")))
    return sum(kept.values())


def _autocast(device: torch.device, precision: str | None) -> torch.autocast:
    """Return the autocast context for a precision."""
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision or "")
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def _by_trying(
    module: nn.Module, data: CellDataModule, device: torch.device, sizes: list[int], precision: str | None
) -> int | None:
    largest = None
    module.to(device)
    for size in sizes:
        states: list[torch.Tensor] = []
        try:
            # In training the optimizer creates its states after the first step.
            states += [torch.empty_like(p) for p in module.parameters() if p.requires_grad for _ in range(2)]
            with _autocast(device, precision):
                _step(module, data, _batch(data, size, device))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            break
        finally:
            del states
            torch.cuda.empty_cache()
        largest = size
    return largest


def _batch(data: CellDataModule, size: int, device: torch.device) -> dict[str, Any]:
    """Return a training batch of the longest cells."""
    rows = data.train_rows
    longest = rows[np.argsort(data.bound.n_expressed[rows], kind="stable")[-size:]]
    batch = data.objective.prepare(data.bound.block(np.sort(longest)), data.tokenizer, epoch=0, seed=data.seed)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _step(module: nn.Module, data: CellDataModule, batch: dict[str, Any]) -> None:
    """Compute a step, then discard the gradients and restore the random states."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    mode = module.training
    module.train()
    try:
        with unchanged(module):
            loss, _ = data.objective.loss(module, batch)
            torch.autograd.grad(loss, parameters, allow_unused=True)
    finally:
        module.train(mode)
