"""Pooling of token states to one vector per cell.

Shapes: B cells, S tokens, H hidden.
"""

from __future__ import annotations

import torch


def cls_pool(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the state of the first token of each cell, shape (B, H); zeros for a cell without tokens.

    Parameters
    ----------
    hidden_states
        Token states, shape (B, S, H).
    attention_mask
        Nonzero for tokens, shape (B, S). If None, every position is a token.

    Returns
    -------
    The embedding of each cell, shape (B, H).

    Examples
    --------
    >>> import torch
    >>> states = torch.arange(6.0).reshape(1, 3, 2)
    >>> cls_pool(states, torch.tensor([[1, 1, 0]]))
    tensor([[0., 1.]])
    """
    if attention_mask is None:
        return hidden_states[:, 0]
    tokens_bs = attention_mask != 0
    return _state_at(hidden_states, tokens_bs.to(torch.uint8).argmax(dim=1), tokens_bs)


def _state_at(hidden_bsh: torch.Tensor, place_b: torch.Tensor, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return the state at one position of each cell, or zeros for a cell without tokens."""
    chosen_bh = hidden_bsh.gather(1, place_b[:, None, None].expand(-1, 1, hidden_bsh.shape[2])).squeeze(1)
    return torch.where(tokens_bs.any(dim=1, keepdim=True), chosen_bh, torch.zeros_like(chosen_bh))


def mean_pool(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean over all tokens that are not padding, shape (B, H).

    Parameters
    ----------
    hidden_states
        Token states, shape (B, S, H).
    attention_mask
        Nonzero for tokens, shape (B, S). If None, every position is a token.

    Returns
    -------
    The embedding of each cell, shape (B, H); zeros for a cell without tokens.

    Examples
    --------
    >>> import torch
    >>> states = torch.arange(6.0).reshape(1, 3, 2)
    >>> mean_pool(states, torch.tensor([[1, 1, 0]])), mean_pool(states)
    (tensor([[1., 2.]]), tensor([[2., 3.]]))
    """
    if attention_mask is None:
        return hidden_states.mean(dim=1)
    weights = (attention_mask != 0).to(hidden_states.dtype).unsqueeze(-1)
    return (hidden_states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


def last_pool(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the state of the last token of each cell, shape (B, H); zeros for a cell without tokens.

    Parameters
    ----------
    hidden_states
        Token states, shape (B, S, H).
    attention_mask
        Nonzero for tokens, shape (B, S). If None, every position is a token.

    Returns
    -------
    The embedding of each cell, shape (B, H).

    Examples
    --------
    >>> import torch
    >>> states = torch.arange(6.0).reshape(1, 3, 2)
    >>> last_pool(states, torch.tensor([[1, 1, 0]]))
    tensor([[2., 3.]])
    """
    if attention_mask is None:
        return hidden_states[:, -1]
    tokens_bs = attention_mask != 0
    places = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)
    return _state_at(hidden_states, torch.where(tokens_bs, places, 0).amax(dim=1), tokens_bs)


def depth_pool(hidden_states: torch.Tensor, attention_mask: torch.Tensor, genes: torch.Tensor) -> torch.Tensor:
    """Return the cell embedding of scFoundation (Hao et al. 2024), shape (B, 4 H).

    The embedding concatenates the state of the last token (the depth of the cell), the state of the previous token (the
    target depth), and the maximum and mean over genes in each dimension. It is zero if there is nothing to pool.

    Parameters
    ----------
    hidden_states
        Token states, shape (B, S, H).
    attention_mask
        Nonzero for tokens, shape (B, S).
    genes
        True for tokens that are genes, bool, shape (B, S).

    Returns
    -------
    The embedding of each cell, shape (B, 4 H): last token, previous token, maximum over genes, mean over genes.

    Examples
    --------
    >>> import torch
    >>> states = torch.arange(8.0).reshape(1, 4, 2)
    >>> mask, genes = torch.ones(1, 4), torch.tensor([[True, True, False, False]])
    >>> depth_pool(states, mask, genes).tolist()
    [[6.0, 7.0, 4.0, 5.0, 2.0, 3.0, 1.0, 2.0]]
    """
    tokens_bs = attention_mask != 0
    places = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)
    before_bs = tokens_bs & (places < torch.where(tokens_bs, places, 0).amax(dim=1, keepdim=True))
    largest_bh = hidden_states.masked_fill(~genes[:, :, None], float("-inf")).amax(dim=1)
    largest_bh = largest_bh.masked_fill(~genes.any(dim=1, keepdim=True), 0.0)
    last_bh, wanted_bh = last_pool(hidden_states, tokens_bs), last_pool(hidden_states, before_bs)
    return torch.cat([last_bh, wanted_bh, largest_bh, mean_pool(hidden_states, genes)], dim=1)


POOLINGS = {"cls": cls_pool, "mean": mean_pool, "last": last_pool}
