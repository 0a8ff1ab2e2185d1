"""Where tokens stand in their cell.

Shapes: B cells, S positions.
"""

from __future__ import annotations

import torch

__all__ = ["token_positions"]


def token_positions(tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return the position of each token among the tokens of its cell, int64, shape (B, S).

    Parameters
    ----------
    tokens_bs
        True for tokens, bool, in any pattern.

    Examples
    --------
    >>> token_positions(torch.tensor([[False, True, True]]))
    tensor([[0, 0, 1]])
    """
    return (tokens_bs.long().cumsum(dim=1) - 1).clamp(min=0)
