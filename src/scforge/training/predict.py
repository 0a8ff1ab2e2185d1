"""Embedding cells with a trained module.

Shapes: N cells, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from scforge.data.cells import CellBlock, Cells
from scforge.data.sampling import CellOrder
from scforge.errors import OptionError, TrainingError
from scforge.models._utils import evaluating
from scforge.tokenizers.base import Tokenizer
from scforge.training.loading import BatchLoader
from scforge.training.objectives.base import Objective


def embed(
    module: nn.Module,
    cells: Cells,
    tokenizer: Tokenizer,
    *,
    objective: Objective | None = None,
    batch_size: int = 256,
    rows: np.ndarray | None = None,
) -> np.ndarray:
    """Return the embedding of each cell in the order of the source, float32, shape (N, D).

    Cells of similar length share a batch, and dropout is disabled. The mode of the module is restored afterwards.

    Parameters
    ----------
    module
        An architecture with ``encode``.
    cells
        The cells.
    tokenizer
        The tokenizer that the module was trained with.
    objective
        The objective that the module was trained with, which may reorder the tokens of a cell. If None, keeps the order
        of the tokenizer.
    batch_size
        Number of cells per batch.
    rows
        Rows of `cells` to embed, in this order. If None, embeds all cells.

    Returns
    -------
    The embeddings, float32, shape (N, D).

    Raises
    ------
    OptionError
        If `rows` is empty.
    TrainingError
        If the embedding of a cell is not finite, e.g. because weights or counts are too large.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:60, :300].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("continuous_projection", cells.vocab)
    >>> sizes = {"hidden_dim": 8, "pooling": "weighted_sum", "latent_dim": 4}
    >>> module = scforge.models.GenePoolingModel(len(cells.vocab), **sizes)
    >>> embed(module, cells, tokenizer).shape
    (60, 4)
    """
    return run_over(
        module,
        cells,
        tokenizer,
        lambda batch: module.encode(**batch),
        objective=objective,
        batch_size=batch_size,
        rows=rows,
    )


@torch.inference_mode()
def run_over(
    module: nn.Module,
    cells: Cells,
    tokenizer: Tokenizer,
    compute: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    *,
    objective: Objective | None = None,
    batch_size: int = 256,
    rows: np.ndarray | None = None,
) -> np.ndarray:
    """Return the output of `compute` for each cell in the order of the source, float32, shape (N, D).

    Parameters
    ----------
    compute
        Function that takes a batch of tokens on the device of `module`, and returns one row per cell, shape (B, D).
    module, cells, tokenizer, objective, batch_size, rows
        See :func:`embed`.
    """
    wanted, places = np.arange(len(cells)), None
    if rows is not None:
        wanted, places = np.unique(np.asarray(rows, dtype=np.int64), return_inverse=True)
    if not len(wanted):
        raise OptionError("is empty; pass at least one cell to embed.", argument="rows")
    device = next(module.parameters()).device
    lengths = tokenizer.lengths(cells.n_expressed[wanted].astype(np.int32, copy=False))
    order = CellOrder(wanted, batch_size, chunk_size=cells.chunk_size, lengths=lengths, shuffle=False)

    def prepare(block: CellBlock) -> dict[str, Any]:
        tokens = tokenizer(block)
        if objective is not None:
            # Random orders depend on the cell alone, not on its number.
            tokens = objective.arrange(tokens, tokenizer, np.zeros(len(block), dtype=np.int64), epoch=0, seed=0)
        return {"rows": torch.from_numpy(block.rows), **tokens}

    result: np.ndarray | None = None
    with evaluating(module):
        for batch in BatchLoader(cells, order, prepare, pin_memory=device.type == "cuda"):
            at = np.searchsorted(wanted, batch.pop("rows").numpy())
            computed = compute({name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()})
            if not isinstance(computed, torch.Tensor) or computed.ndim != 2 or len(computed) != len(at):
                shape = getattr(computed, "shape", None)
                given = f"a {type(computed).__name__}" if shape is None else f"an embedding of shape {tuple(shape)}"
                raise TrainingError(
                    f"{type(module).__name__} returned {given} for {len(at)} cells; encode must return one vector per "
                    "cell, as a tensor of shape (B, H)."
                )
            values = computed.float().cpu().numpy()
            if not (is_finite := np.isfinite(values).all(axis=1)).all():
                raise TrainingError(
                    f"{type(module).__name__} computed NaN or infinite values for {np.count_nonzero(~is_finite)} of "
                    f"{len(at)} cells (first: cell {wanted[at[~is_finite]].min()}); check its weights, and the counts "
                    "of these cells for extreme values."
                )
            if result is None:
                result = np.empty((len(wanted), values.shape[1]), dtype=np.float32)
            result[at] = values
    assert result is not None
    return result if places is None else result[places]
