"""What is best found by trying: how many cells fit into memory, and which precision is faster."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from scforge._checks import check_share
from scforge.data.stream_memory import available_memory
from scforge.errors import OptionError, TrainingError
from scforge.training.datamodule import CellDataModule
from scforge.training.devices import out_of_memory
from scforge.training.modes import unchanged

__all__ = ["choose_precision", "find_batch_size"]

logger = logging.getLogger("scforge")

_MOST = 1024
_FEWEST_STEPS = 8
_FASTER = 1.1
"""How much faster 16 bits have to be to be worth their rounding."""


def find_batch_size(
    module: nn.Module, data: CellDataModule, device: torch.device, *, share: float = 0.5, most: int = _MOST
) -> int:
    """Return the largest power of two of cells whose training step fits into memory.

    The longest cells of the data are tried. On a CPU, where nothing fails before the machine does, the memory of a step
    is what autograd keeps for the backward pass of a few cells, scaled up. At least 8 steps an epoch are left.

    Parameters
    ----------
    module
        The module; it is left as it was.
    data
        A data module that is bound to a tokenizer and an objective.
    device
        Where the training will run.
    share
        Share of the free memory that a step may take, on a CPU.
    most
        Largest number of cells to try.

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
    check_share("share", share)
    limit = max(1, min(most, len(data.train_rows) // _FEWEST_STEPS))
    sizes = [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]
    found = _by_trying(module, data, device, sizes) if device.type == "cuda" else _by_size(module, data, sizes, share)
    if found is None:
        raise TrainingError(
            "memory ran out with a batch of one cell; lower the tokenizer's max_len (data.max_genes), or pass "
            "gradient_checkpointing=True (training.gradient_checkpointing)."
        )
    logger.info("Batches have %d cells (batch_size='auto').", found)
    return found


def choose_precision(module: nn.Module, data: CellDataModule, device: torch.device, processes: int | None = 1) -> str:
    """Return ``"bf16-mixed"`` where a training step is faster so, else ``"32-true"``.

    A GPU that knows bfloat16 is faster so. On a CPU three steps of each are timed on the same batch, and 10 % count;
    random numbers and weights stay as they were.

    Parameters
    ----------
    module
        The module; it is left as it was.
    data
        A data module that is bound to a tokenizer and an objective.
    device
        Where the training will run.
    processes
        How many will train; None if that is not known.

    Raises
    ------
    OptionError
        If steps of several processes would have to be timed.
    """
    if device.type == "cuda":
        return "bf16-mixed" if torch.cuda.is_bf16_supported() else "32-true"
    if processes != 1:
        raise OptionError("precision='auto' measures one process; name the precision, e.g. 'bf16-mixed', for several.")
    if device.type != "cpu":
        return "32-true"
    batch_size = data.batch_size or (data.objective.defaults.batch_size if data.objective else 1)
    batch = _batch(data, min(batch_size, len(data.train_rows)), device)
    seconds = {}
    for precision in ("32-true", "bf16-mixed"):
        times = []
        for _ in range(4):
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                _step(module.to(device), data, batch)
            times.append(time.perf_counter() - start)
        seconds[precision] = min(times[1:])  # the first one also makes plans and kernels
    gain = seconds["32-true"] / seconds["bf16-mixed"]
    chosen = "bf16-mixed" if gain >= _FASTER else "32-true"
    logger.info("A step in bf16 is %.2f times as fast: precision=%r.", gain, chosen)
    return chosen


def _by_size(module: nn.Module, data: CellDataModule, sizes: list[int], share: float) -> int | None:
    there = available_memory()
    if there is None:
        return max(size for size in sizes if size <= data.objective.defaults.batch_size)  # type: ignore[union-attr]
    few, more = sizes[min(1, len(sizes) - 1)], sizes[min(3, len(sizes) - 1)]
    kept = {size: _kept_bytes(module, data, size) for size in {few, more}}
    per_cell = (kept[more] - kept[few]) / (more - few) if more > few else kept[few] / few
    # A backward pass holds the gradients of a layer beside what it has not used yet.
    fitting = [size for size in sizes if 1.5 * per_cell * size <= share * there]
    return max(fitting, default=None)


def _kept_bytes(module: nn.Module, data: CellDataModule, size: int) -> int:
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _step(module, data, _batch(data, size, torch.device("cpu")))
    return sum(kept.values())


def _by_trying(module: nn.Module, data: CellDataModule, device: torch.device, sizes: list[int]) -> int | None:
    found = None
    module.to(device)
    for size in sizes:
        try:
            _step(module, data, _batch(data, size, device))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            break
        finally:
            torch.cuda.empty_cache()
        found = size
    return found


def _batch(data: CellDataModule, size: int, device: torch.device) -> dict[str, Any]:
    """Return a training batch of the longest cells."""
    assert data.objective is not None
    assert data.tokenizer is not None
    rows = data.train_rows
    longest = rows[np.argsort(data.bound.n_expressed[rows], kind="stable")[-size:]]
    batch = data.objective.prepare(data.bound.block(np.sort(longest)), data.tokenizer, epoch=0, seed=data.seed)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _step(module: nn.Module, data: CellDataModule, batch: dict[str, Any]) -> None:
    """Compute a step, and leave neither gradients nor drawn numbers behind."""
    assert data.objective is not None
    parameters = [p for p in module.parameters() if p.requires_grad]
    mode = module.training
    module.train()
    try:
        with unchanged(module):
            loss, _ = data.objective.loss(module, batch)
            torch.autograd.grad(loss, parameters, allow_unused=True)
    finally:
        module.train(mode)
