"""What ScDiVa sees of a batch of tokens, which of them it attends to, and which gene each hidden one is.

Shapes: B cells, S tokens, K tokens that are attended to, H hidden, V vocabulary, M tokens with a target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scforge._constants import PAD_ID
from scforge.models.components.embeddings import check_shapes

__all__ = ["NEVER", "Attended", "Seen", "gene_logits", "gene_losses", "scores_of", "what_is_seen"]

NEVER = -100.0
"""Logit of genes that cannot be: special tokens, and genes that stand elsewhere in the cell."""

_NUMBERS = {"cpu": 2**22}
_NUMBERS_ELSEWHERE = 2**28


@dataclass(frozen=True)
class Seen:
    """What is seen of a batch of tokens; all of shape (B, S).

    Attributes
    ----------
    ids
        Token ids, int64.
    tokens
        True for tokens, bool.
    values
        Expression values, float; 0 where there is none to be seen.
    has_gene
        True for genes whose identity is seen.
    has_value
        True where the value is seen.
    hidden_value
        True for tokens whose value is hidden.
    hidden
        True where anything is hidden.
    """

    ids: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor
    has_gene: torch.Tensor
    has_value: torch.Tensor
    hidden_value: torch.Tensor
    hidden: torch.Tensor

    def blocked(self, vocab_size: int, n_special: int) -> torch.Tensor:
        """Return which tokens no hidden one can be: special ones, and genes that are seen; bool, (B, V)."""
        blocked = torch.zeros((self.ids.shape[0], vocab_size), dtype=torch.bool, device=self.ids.device)
        blocked = blocked.scatter(1, self.ids.masked_fill(~self.has_gene, PAD_ID), True)
        return blocked | (torch.arange(vocab_size, device=self.ids.device) < n_special)

    def first(self, most: int) -> Attended | None:
        """Return the first `most` tokens of each cell, hidden ones before others; None where all are taken."""
        if self.ids.shape[1] <= most:
            return None
        last = 2 * (~self.tokens).to(torch.uint8) + (~self.hidden).to(torch.uint8)
        places = torch.argsort(last, dim=1, stable=True)[:, :most].sort(dim=1).values
        return Attended(places, self.ids.shape[1])


@dataclass(frozen=True)
class Attended:
    """The places of the tokens that are attended to, int64, (B, K), and the number S of places."""

    places: torch.Tensor
    width: int

    def take(self, tensor_bs: torch.Tensor) -> torch.Tensor:
        """From (B, S) to (B, K)."""
        return tensor_bs.gather(1, self.places)

    def put_back(self, states_bkh: torch.Tensor) -> torch.Tensor:
        """From (B, K, H) to (B, S, H), zeros at the rest."""
        states = states_bkh.new_zeros((states_bkh.shape[0], self.width, states_bkh.shape[2]))
        return states.scatter(1, self.places.unsqueeze(-1).expand_as(states_bkh), states_bkh)

    def put_back_weights(self, weights_bnkk: torch.Tensor) -> torch.Tensor:
        """From (B, N, K, K) to (B, N, S, S), zeros at the rest."""
        n_heads = weights_bnkk.shape[1]
        rows = torch.stack([self.put_back(weights_bnkk[:, head]) for head in range(n_heads)], dim=1)
        columns = [self.put_back(rows[:, head].transpose(1, 2)).transpose(1, 2) for head in range(n_heads)]
        return torch.stack(columns, dim=1)

    def of(self, seen: Seen) -> Seen:
        """Return what is seen of the tokens that are attended to."""
        return Seen(**{name: self.take(tensor) for name, tensor in vars(seen).items()})

    def has(self) -> torch.Tensor:
        """Return which places are attended to, bool, (B, S)."""
        nowhere = torch.zeros((self.places.shape[0], self.width), dtype=torch.bool, device=self.places.device)
        return nowhere.scatter(1, self.places, True)


def what_is_seen(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    values: torch.Tensor | None,
    masked_positions: torch.Tensor | None,
    masked_values: torch.Tensor | None,
    n_special: int,
) -> Seen:
    """Part a batch into what is seen and what is hidden.

    Parameters
    ----------
    input_ids, attention_mask, values
        Shape (B, S); without values every gene has the value 1.
    masked_positions
        Nonzero where the identity of a token is hidden, (B, S), or None.
    masked_values
        Nonzero where its value is hidden, (B, S); None: where the identity is.
    n_special
        Ids below this one are those of special tokens.
    """
    check_shapes(
        input_ids,
        attention_mask=attention_mask,
        values=values,
        masked_positions=masked_positions,
        masked_values=masked_values,
    )
    tokens = attention_mask != 0
    nothing = torch.zeros_like(tokens)
    no_gene = nothing if masked_positions is None else tokens & (masked_positions != 0)
    no_value = no_gene if masked_values is None else tokens & (masked_values != 0)
    gene = tokens & (input_ids >= n_special)
    has_value = (gene | no_gene) & ~no_value
    values = torch.ones_like(input_ids, dtype=torch.float32) if values is None else values.float()
    return Seen(
        ids=input_ids,
        tokens=tokens,
        values=values.masked_fill(~has_value, 0.0),
        has_gene=gene & ~no_gene,
        has_value=has_value,
        hidden_value=no_value,
        hidden=no_gene | no_value,
    )


def gene_logits(
    states_bsh: torch.Tensor, table_vh: torch.Tensor, prior_v: torch.Tensor | None, seen: Seen, n_special: int
) -> torch.Tensor:
    """Return how likely each token is each gene: the product of its state and of the vector of the gene, (B, S, V).

    Products are divided by the square root of H. Special tokens, and genes that are seen at another token of the cell,
    have the logit ``NEVER``.
    """
    logits = scores_of(states_bsh, table_vh, prior_v)
    blocked = seen.blocked(len(table_vh), n_special).unsqueeze(1)
    own = seen.ids.masked_fill(~seen.has_gene, PAD_ID).unsqueeze(-1)
    of_own = torch.where(seen.has_gene.unsqueeze(-1), logits.gather(2, own), NEVER)
    return logits.masked_fill(blocked, NEVER).scatter(2, own, of_own)


def gene_losses(
    states_bsh: torch.Tensor,
    table_vh: torch.Tensor,
    prior_v: torch.Tensor | None,
    seen: Seen,
    labels_bs: torch.Tensor,
    chosen_bs: torch.Tensor,
    n_special: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of the gene at the chosen tokens, (M,), and the number of the cell of each, (M,).

    What cannot be is left out of the softmax, so there is no credit for knowing it. The logits are made some tokens at
    a time, and made again in the backward pass where they are many.
    """
    cells_m = chosen_bs.nonzero()[:, 0]
    labels_m = labels_bs[chosen_bs]
    own_m = torch.where(seen.has_gene, seen.ids, labels_bs)[chosen_bs]
    blocked_bv = seen.blocked(len(table_vh), n_special)

    def losses_of(states: torch.Tensor, labels: torch.Tensor, own: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        blocked = blocked_bv[cells].scatter(1, own.unsqueeze(1), False).scatter(1, labels.unsqueeze(1), False)
        logits = scores_of(states, table_vh, prior_v).float().masked_fill(blocked, float("-inf"))
        return F.cross_entropy(logits, labels, reduction="none")

    states_mh = states_bsh[chosen_bs]
    step = max(1, _NUMBERS.get(states_mh.device.type, _NUMBERS_ELSEWHERE) // len(table_vh))
    again = len(states_mh) > step and torch.is_grad_enabled()
    parts = []
    for start in range(0, len(states_mh), step):
        part = slice(start, start + step)
        given = (states_mh[part], labels_m[part], own_m[part], cells_m[part])
        parts.append(checkpoint(losses_of, *given, use_reentrant=False) if again else losses_of(*given))
    return (torch.cat(parts) if parts else states_mh.new_zeros(0, dtype=torch.float32)), cells_m


def scores_of(states: torch.Tensor, table_vh: torch.Tensor, prior_v: torch.Tensor | None) -> torch.Tensor:
    """Return states (..., H) times vectors of genes, over the square root of H, plus the prior, shape (..., V)."""
    scores = F.linear(states / math.sqrt(states.shape[-1]), table_vh.to(states.dtype))
    return scores if prior_v is None else scores + prior_v.to(scores.dtype)
