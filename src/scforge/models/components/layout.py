"""Visible tokens first: how a model that hides tokens orders them, so that an encoder runs on the visible ones alone.

Shapes: B cells, S tokens, C positions that hold all visible tokens, H hidden, N heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scforge.models.components.positions import token_positions

__all__ = ["Layout", "lay_out"]


@dataclass(frozen=True)
class Layout:
    """How the tokens of a batch stand inside a model.

    Attributes
    ----------
    visible, hidden
        Bool, shape (B, S), in the order of the layout. `hidden` is None where nothing is.
    positions
        Position of each token among the tokens of its cell in the batch, int64, shape (B, S), in the order of the
        layout.
    width
        The first C positions hold all visible tokens.
    order
        Where each position was in the batch, int64, shape (B, S). None: tokens stand as in the batch.
    """

    visible: torch.Tensor
    hidden: torch.Tensor | None
    positions: torch.Tensor
    width: int
    order: torch.Tensor | None = None

    def take(self, batch_bs: torch.Tensor) -> torch.Tensor:
        """Bring what is known of each token into the order of the layout."""
        return batch_bs if self.order is None else batch_bs.gather(1, self.order)

    def put_back(self, x_bs: torch.Tensor) -> torch.Tensor:
        """Bring numbers of each token back into the order of the batch."""
        return x_bs if self.order is None else torch.zeros_like(x_bs).scatter(1, self.order, x_bs)

    def put_back_states(self, states_bch: torch.Tensor) -> torch.Tensor:
        """Bring states of the first C positions to where their tokens were, (B, S, H); zeros where none is visible."""
        seen_bch = states_bch.masked_fill(~self.visible[:, : self.width, None], 0.0)
        if self.order is None:
            return seen_bch
        batch, seq = self.order.shape
        place_bch = self.order[:, : self.width, None].expand_as(seen_bch)
        return seen_bch.new_zeros(batch, seq, seen_bch.shape[-1]).scatter(1, place_bch, seen_bch)

    def put_back_weights(self, weights_bncc: torch.Tensor) -> torch.Tensor:
        """Bring attention weights to where their tokens were, (B, N, S, S); zeros where a token is not visible."""
        heads, width = weights_bncc.shape[1], weights_bncc.shape[2]
        # Rows are put back, then columns.
        rows_bcx = self.put_back_states(weights_bncc.transpose(1, 2).flatten(2))
        rows_bsnc = rows_bcx.unflatten(2, (heads, width))
        columns_bcx = self.put_back_states(rows_bsnc.permute(0, 3, 1, 2).flatten(2))
        return columns_bcx.unflatten(2, rows_bsnc.shape[1:3]).permute(0, 3, 2, 1)

    def furthest(self) -> int:
        """Return the most tokens of a cell up to its last visible one; waits for a GPU."""
        return int(((self.positions + 1) * self.visible).amax()) if self.visible.numel() else 0


def lay_out(tokens_bs: torch.Tensor, hidden_bs: torch.Tensor | None = None) -> Layout:
    """Put visible tokens first, then hidden ones, then padding; each in the order of the batch.

    Parameters
    ----------
    tokens_bs, hidden_bs
        True for tokens, and for those of them that are hidden, bool, shape (B, S). Without the latter, tokens stay
        where they are.
    """
    positions_bs = token_positions(tokens_bs)
    if hidden_bs is None or not tokens_bs.numel():
        return Layout(tokens_bs, hidden_bs, positions_bs, tokens_bs.shape[1])
    visible_bs = tokens_bs & ~hidden_bs
    kind_bs = 2 - 2 * visible_bs.to(torch.uint8) - hidden_bs.to(torch.uint8)
    order_bs = torch.argsort(kind_bs, dim=1, stable=True)
    return Layout(
        visible_bs.gather(1, order_bs),
        hidden_bs.gather(1, order_bs),
        positions_bs.gather(1, order_bs),
        max(1, int(visible_bs.sum(dim=1).amax())),
        order_bs,
    )
