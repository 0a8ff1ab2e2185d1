"""Targets of a model that predicts the next token, and the loss of one state that sums up a cell.

Shapes: B cells, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from scforge._constants import IGNORE_LABEL

__all__ = ["cell_loss", "of_next_token"]


def of_next_token(targets_bs: torch.Tensor, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return the target of the next token of the cell at each token, -100 at the last token and at padding.

    Examples
    --------
    >>> of_next_token(torch.tensor([[-100, 7, 8, 9]]), torch.tensor([[True, True, False, True]]))
    tensor([[   7,    9, -100, -100]])
    """
    n_tokens = targets_bs.shape[1]
    places = torch.arange(n_tokens, device=targets_bs.device)
    # Where the token before stands; one column more takes the targets of what has none.
    last_bs = torch.where(tokens_bs, places, -1).cummax(dim=1).values
    before_bs = F.pad(last_bs[:, :-1], (1, 0), value=-1)
    before_bs = before_bs.masked_fill(~tokens_bs | (before_bs < 0), n_tokens)
    shifted = targets_bs.new_full((targets_bs.shape[0], n_tokens + 1), IGNORE_LABEL)
    return shifted.scatter(1, before_bs, targets_bs)[:, :n_tokens]


def cell_loss(
    head: nn.Module, state_bh: torch.Tensor, labels_bs: torch.Tensor, tokens_bs: torch.Tensor
) -> torch.Tensor:
    """Return the mean over cells of the mean of ``-log p(label | state of the cell)`` over the labels of each.

    Parameters
    ----------
    head
        Makes logits of shape (B, V) of states of shape (B, H).
    state_bh
        What sums up each cell, shape (B, H).
    labels_bs
        Token ids, -100 where there is none, int64, shape (B, S).
    tokens_bs
        False where labels do not count, bool, shape (B, S).
    """
    labelled_bs = (labels_bs != IGNORE_LABEL) & tokens_bs
    log_p_bv = head(state_bh).float().log_softmax(dim=-1)
    log_p_bs = log_p_bv.gather(1, labels_bs.masked_fill(~labelled_bs, 0)) * labelled_bs
    n_labels_b = labelled_bs.sum(dim=1)
    of_cells_b = log_p_bs.sum(dim=1) / n_labels_b.clamp(min=1)
    return -of_cells_b.sum() / (n_labels_b > 0).sum().clamp(min=1)
