"""From token states to one vector a cell.

Shapes: B cells, S tokens, H hidden.
"""

from __future__ import annotations

import torch

__all__ = ["POOLINGS", "cls_pool", "last_pool", "mean_pool"]


def cls_pool(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the state of the first token, shape (B, H).

    Parameters
    ----------
    hidden_states
        Shape (B, S, H).
    attention_mask
        Not used; present so that all poolings are called alike.
    """
    return hidden_states[:, 0]


def mean_pool(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean over all tokens that are not padding, shape (B, H).

    Parameters
    ----------
    hidden_states
        Shape (B, S, H).
    attention_mask
        Shape (B, S), nonzero for tokens; None takes every position as a token.
    """
    if attention_mask is None:
        return hidden_states.mean(dim=1)
    weights = (attention_mask != 0).to(hidden_states.dtype).unsqueeze(-1)
    return (hidden_states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


def last_pool(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the state of the last token of each cell, shape (B, H); of the first position where there is no token.

    Parameters
    ----------
    hidden_states
        Shape (B, S, H).
    attention_mask
        Shape (B, S), nonzero for tokens; None takes every position as a token.
    """
    if attention_mask is None:
        return hidden_states[:, -1]
    places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    last = torch.where(attention_mask != 0, places, 0).amax(dim=1)
    return hidden_states[torch.arange(last.shape[0], device=last.device), last]


POOLINGS = {"cls": cls_pool, "mean": mean_pool, "last": last_pool}
