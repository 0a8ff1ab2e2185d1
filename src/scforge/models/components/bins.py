"""Vectors of expression bins.

Shapes: B cells, S tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["between_rows", "waves"]

_AMPLITUDE = 0.5


def waves(n_rows: int, dim: int) -> torch.Tensor:
    """Return vectors of which neighbours are alike, float32, shape (n_rows, dim): sines and cosines of the row.

    The longest wave is twice the table, so that low and high rows lie apart; the shortest spans four rows.

    Examples
    --------
    >>> waves(51, 8).shape
    torch.Size([51, 8])
    """
    n_waves = (dim + 1) // 2
    longest, shortest = 2.0 * n_rows, 4.0
    lengths = longest * (shortest / longest) ** torch.linspace(0.0, 1.0, n_waves)
    angles = 2.0 * torch.pi * torch.arange(n_rows).unsqueeze(1) / lengths
    return _AMPLITUDE * torch.cat([angles.sin(), angles.cos()], dim=1)[:, :dim]


def between_rows(table: nn.Embedding, values_bs: torch.Tensor) -> torch.Tensor:
    """Look up numbers in a table, shape (B, S, H): between two rows, what lies between their vectors.

    Numbers below the first row, or above the last, count as that.

    Examples
    --------
    >>> table = nn.Embedding.from_pretrained(torch.tensor([[0.0], [2.0], [10.0]]))
    >>> between_rows(table, torch.tensor([[1.0, 1.25, -3.0, 7.0]])).flatten()
    tensor([ 2.,  4.,  0., 10.])
    """
    values_bs = values_bs.to(torch.float32).clamp(0, table.num_embeddings - 1)
    lower_bs = values_bs.floor()
    share_bs1 = (values_bs - lower_bs).unsqueeze(-1)
    lower_bsh = table(lower_bs.long())
    upper_bsh = table(values_bs.ceil().long())
    return torch.lerp(lower_bsh, upper_bsh, share_bs1.to(lower_bsh.dtype))
