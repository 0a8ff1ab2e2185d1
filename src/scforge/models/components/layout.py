"""Visible tokens first: how a model that hides tokens orders them, so that an encoder runs on the visible ones alone.

Shapes: B cells, S tokens, C positions that hold all visible tokens, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Layout", "lay_out"]


@dataclass(frozen=True)
class Layout:
    """How the tokens of a batch stand inside a model.

    Attributes
    ----------
    visible, hidden
        Bool, shape (B, S), in the order of the layout. `hidden` is None where nothing is.
    width
        The first C positions hold all visible tokens.
    order
        Where each position was in the batch, int64, shape (B, S). None: tokens stand as in the batch.
    furthest
        Positions of the batch up to the last visible token.
    """

    visible: torch.Tensor
    hidden: torch.Tensor | None
    width: int
    order: torch.Tensor | None = None
    furthest: int = 0

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


def lay_out(tokens_bs: torch.Tensor, hidden_bs: torch.Tensor, *, compact: bool = True) -> Layout:
    """Put visible tokens first, then hidden ones, then padding; each in the order of the batch.

    Parameters
    ----------
    tokens_bs, hidden_bs
        True for tokens, and for those of them that are hidden, bool, shape (B, S).
    compact
        If false, tokens stay in their places.
    """
    seq = tokens_bs.shape[1]
    visible_bs = tokens_bs & ~hidden_bs
    if not compact:
        return Layout(visible_bs, hidden_bs, seq, furthest=seq)
    kind_bs = 2 - 2 * visible_bs.to(torch.uint8) - hidden_bs.to(torch.uint8)
    order_bs = torch.argsort(kind_bs, dim=1, stable=True)
    places = torch.arange(1, seq + 1, device=tokens_bs.device)
    most, furthest = torch.stack([visible_bs.sum(dim=1).amax(), (visible_bs * places).amax()]).tolist()
    return Layout(
        visible_bs.gather(1, order_bs), hidden_bs.gather(1, order_bs), max(1, int(most)), order_bs, int(furthest)
    )
