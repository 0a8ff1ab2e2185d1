"""Embedding cells with a trained module.

Shapes: N cells, D dimensions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from scforge.data.cells import CellSource
from scforge.data.sampler import CellSampler
from scforge.tokenizers.base import Tokenizer

__all__ = ["embed"]


@torch.inference_mode()
def embed(
    module: nn.Module, cells: CellSource, tokenizer: Tokenizer, *, batch_size: int = 256, rows: np.ndarray | None = None
) -> np.ndarray:
    """Return the embedding of each cell in the order of the source, float32, shape (N, D).

    Cells of like length share a batch; dropout is off. The module's mode is left as it was.

    Parameters
    ----------
    module
        An architecture with ``encode``.
    cells
        The cells.
    tokenizer
        The tokenizer that the module was trained with.
    batch_size
        Cells a batch.
    rows
        Only these rows of `cells`; all if None.
    """
    rows = np.arange(len(cells)) if rows is None else np.asarray(rows)
    device = next(module.parameters()).device
    lengths = tokenizer.lengths(cells.n_expressed[rows])
    sampler = CellSampler(np.arange(len(rows)), batch_size, lengths=lengths, shuffle=False)
    in_training = [part for part in module.modules() if part.training]  # frozen parts are not
    module.eval()
    result: np.ndarray | None = None
    try:
        for batch in sampler:
            tokens = tokenizer(cells.block(rows[batch.rows]))
            embedding = module.encode(**{name: tensor.to(device) for name, tensor in dict[str, Any](tokens).items()})
            if result is None:
                result = np.empty((len(rows), embedding.shape[1]), dtype=np.float32)
            result[batch.rows] = embedding.float().cpu().numpy()
    finally:
        for part in in_training:
            part.training = True
    assert result is not None
    return result
