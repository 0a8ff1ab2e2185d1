"""Mode ``"vector"`` of ScDiVa: one vector per cell passes through the transformer as a sequence of length 1.

The softmax over one key is 1, so attention is a linear map of the vector, and queries and keys are not trained.
"""

from __future__ import annotations

import torch

from scforge.errors import OptionError
from scforge.models.scdiva.parts import Backbone, Seen, States, weighted_sum

_NEARLY_ZERO = 1e-2
"""Mean square of a vector after the norm; it is 1 unless the input was about as small as epsilon."""


def batch_states(
    model: Backbone, seen: Seen, table_vh: torch.Tensor | None, *, output_hidden_states: bool, output_attentions: bool
) -> States:
    """Run the transformer on the weighted sum of the genes of each cell; every token has the state of its cell."""
    if output_attentions:
        raise OptionError(
            "requires mode='tokens', because mode='vector' has no attention; omit "
            "output_attentions, or choose mode='tokens'.",
            output_attentions=True,
        )
    state_bh, layers = _run(model, *weighted_sum(model, seen), output_hidden_states=output_hidden_states)
    shape = (-1, seen.ids.shape[1], -1)
    hidden_states = None if layers is None else tuple(layer.expand(shape) for layer in layers)
    return States(state_bh, state_bh.unsqueeze(1).expand(shape), seen.tokens, table_vh, hidden_states)


def profile_states(model: Backbone, x_bg: torch.Tensor, nothing_b1: torch.Tensor) -> torch.Tensor:
    """Run the transformer on the projections of profiles; return the states, (B, H)."""
    return _run(model, model.gene_embedding.project(x_bg), nothing_b1)[0]


def _run(
    model: Backbone, summed_bh: torch.Tensor, nothing_b1: torch.Tensor, *, output_hidden_states: bool = False
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
    """Run the transformer on one vector per cell; return its state, (B, H), and the layer states if requested.

    Without genes, the vector equals the bias, which starts at zero, where the gradient of a norm is unbounded. Cells
    without genes therefore pass no gradient to the bias. They also pass no gradient to the transformer while the vector
    after the norm is nearly zero.
    """
    vector_bh = model.gene_embedding.norm(torch.where(nothing_b1, summed_bh.detach(), summed_bh))
    zero_b1 = nothing_b1 & (vector_bh.square().mean(dim=1, keepdim=True) < _NEARLY_ZERO)
    vector_b1h = model.gene_embedding.dropout(vector_bh).unsqueeze(1)
    out = model.encoder(vector_b1h, output_hidden_states=output_hidden_states)
    state_bh = out.hidden[:, 0]
    return torch.where(zero_b1, state_bh.detach(), state_bh), out.hidden_states
