"""How the cells of a batch are laid out for the layers of a transformer: in groups of like length, or in one row.

Shapes: B cells, S positions, P packed positions, b cells of a group, s positions of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

__all__ = ["Group", "Packing", "pack_cells"]

_WORTH = 0.95
"""Share of positions that are tokens, above which padding is left in place."""
_SHORTEST = 0.875
"""A group takes cells of at least this share of the length of its longest."""


@dataclass(frozen=True)
class Group:
    """Cells that are computed together.

    Attributes
    ----------
    n_cells, longest
        Number b of cells and s of positions of each.
    tokens
        True for tokens, bool, shape (b, s); None where all are.
    """

    n_cells: int
    longest: int
    tokens: torch.Tensor | None


@dataclass(frozen=True)
class Packing:
    """Where each token of a batch goes.

    Attributes
    ----------
    shape
        B and S.
    groups
        Groups of cells, in order.
    index
        Position in the batch, counted through its cells, of each packed position, int64, shape (P,). None where the
        groups are simply the cells in their order.
    ends
        Where each cell ends, int32, shape (B + 1,), from 0 on, and the most tokens of one; only where no padding is
        left at all.
    """

    shape: tuple[int, int]
    groups: tuple[Group, ...]
    index: torch.Tensor | None = None
    ends: tuple[torch.Tensor, int] | None = None

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """Take what stands at tokens: from shape (B, S, ...) to (P, ...)."""
        flat = padded.flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Put things back to where they were taken from: from (P, ...) to (B, S, ...), zeros at the rest."""
        if self.index is not None:
            padded = packed.new_zeros((self.shape[0] * self.shape[1], *packed.shape[1:]))
            packed = padded.index_copy(0, self.index, packed)
        return packed.unflatten(0, self.shape)

    def split(self, padded: torch.Tensor) -> list[torch.Tensor]:
        """Return what stands at the tokens of each group: from shape (B, S, ...) to (b, s, ...) of each."""
        sizes = [group.n_cells * group.longest for group in self.groups]
        parts = self.pack(padded).split(sizes)
        return [part.unflatten(0, (g.n_cells, g.longest)) for part, g in zip(parts, self.groups, strict=True)]


def pack_cells(
    shape: tuple[int, int],
    tokens_bs: torch.Tensor | None,
    unpad: bool | None = None,
    *,
    exact: bool = False,
    most: int | None = None,
) -> Packing | None:
    """Plan a packing, or return None where the batch is best computed as it is.

    Parameters
    ----------
    shape
        B and S.
    tokens_bs
        True for tokens, bool, in any pattern, shape (B, S); None if all are.
    unpad
        None takes padding out where it is more than a twentieth of the positions; True wherever there is any; False
        never.
    exact
        Leave no padding at all, for kernels that know where cells end.
    most
        Most positions of a group (though at least a cell); None for no limit.
    """
    batch, seq = shape
    lengths = [seq] * batch if tokens_bs is None else tokens_bs.sum(dim=1).tolist()
    share = sum(lengths) / max(1, batch * seq)
    if tokens_bs is not None and unpad is not False and 0 < share <= (1.0 - 1e-12 if unpad else _WORTH):
        return _in_one_row(tokens_bs, lengths) if exact else _by_length(tokens_bs, lengths, most)
    if most is None or batch * seq <= most:
        return None
    step, groups = max(1, most // max(1, seq)), []
    for start in range(0, batch, step):
        some = lengths[start : start + step]
        whole = tokens_bs is None or min(some) == seq
        groups.append(Group(len(some), seq, None if whole or tokens_bs is None else tokens_bs[start : start + step]))
    return Packing(shape, tuple(groups))


def _in_one_row(tokens_bs: torch.Tensor, lengths: list[int]) -> Packing:
    index = tokens_bs.flatten().nonzero().squeeze(1)
    ends = F.pad(tokens_bs.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
    return Packing((len(lengths), tokens_bs.shape[1]), (Group(1, len(index), None),), index, (ends, max(lengths)))


def _by_length(tokens_bs: torch.Tensor, lengths: list[int], most: int | None) -> Packing:
    batch, seq = tokens_bs.shape
    device = tokens_bs.device
    # The tokens of each cell in their order, then its padding.
    place_bs = torch.argsort((~tokens_bs).to(torch.uint8), dim=1, stable=True)
    place_bs = place_bs + seq * torch.arange(batch, device=device).unsqueeze(1)
    order = sorted((cell for cell in range(batch) if lengths[cell]), key=lambda cell: -lengths[cell])
    places, groups, start = [], [], 0
    while start < len(order):
        longest = lengths[order[start]]
        limit = len(order) if most is None else start + max(1, most // longest)
        stop = start + 1
        while stop < min(limit, len(order)) and lengths[order[stop]] >= _SHORTEST * longest:
            stop += 1
        some = order[start:stop]
        places.append(place_bs[torch.tensor(some, device=device), :longest].flatten())
        tokens = None
        if lengths[some[-1]] < longest:
            ends = torch.tensor([lengths[cell] for cell in some], device=device)
            tokens = torch.arange(longest, device=device) < ends.unsqueeze(1)
        groups.append(Group(len(some), longest, tokens))
        start = stop
    return Packing((batch, seq), tuple(groups), torch.cat(places))
