"""Mode ``"tokens"`` of ScDiVa: genes attend to each other and to LAT, the sum of all genes, which is the read-out.

Shapes: B cells, S tokens, K attended tokens, G genes, V vocabulary, H hidden.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from scforge._constants import PAD_ID
from scforge.models.components.attention import put_back_weights
from scforge.models.components.transformer import StackOutput
from scforge.models.scdiva.parts import Backbone, Seen, States, weighted_sum, what_is_seen


def batch_states(model: Backbone, seen: Seen, table_vh: torch.Tensor | None, **wanted: bool) -> States:
    """Run the transformer on LAT and the first `max_tokens` tokens of each cell, masked tokens first."""
    readout_bh = _readout(model, seen)
    part, attended_bs, places_bk = seen, seen.tokens, None
    if seen.ids.shape[1] > model.max_tokens:
        last = 2 * (~seen.tokens).to(torch.uint8) + (~seen.hidden).to(torch.uint8)
        places_bk = torch.argsort(last, dim=1, stable=True)[:, : model.max_tokens].sort(dim=1).values
        part = Seen(**{name: tensor.gather(1, places_bk) for name, tensor in vars(seen).items()})
        attended_bs = seen.tokens & torch.zeros_like(seen.tokens).scatter(1, places_bk, True)

    def put(states_bkh: torch.Tensor) -> torch.Tensor:
        """Restore attended tokens to their positions: from shape (B, K, H) to (B, S, H), with zeros elsewhere."""
        if places_bk is None:
            return states_bkh
        states_bsh = states_bkh.new_zeros((*seen.ids.shape, states_bkh.shape[2]))
        return states_bsh.scatter(1, places_bk.unsqueeze(-1).expand_as(states_bkh), states_bkh)

    out = _run(model, readout_bh, part, table_vh, **wanted)
    states, weights = out.hidden_states, out.attentions
    return States(
        readout=out.hidden[:, 0],
        tokens=put(out.hidden[:, 1:]),
        attended=attended_bs,
        table=table_vh,
        hidden_states=None if states is None else tuple(put(state[:, 1:]) for state in states),
        attentions=None if weights is None else tuple(put_back_weights(part[:, :, 1:, 1:], put) for part in weights),
    )


def profile_states(model: Backbone, x_bg: torch.Tensor, nothing_b1: torch.Tensor) -> torch.Tensor:
    """Run the transformer on the projections of profiles and their genes; return the states of LAT, (B, H)."""
    readout_bh = model.gene_embedding(x_bg)
    part = serialize(model, x_bg)
    if not torch.compiler.is_compiling() and bool(nothing_b1.any()):
        readout_bh = torch.where(nothing_b1, _readout(model, part), readout_bh)
    table_vh = model.token_table() if part.ids.numel() > model.vocab_size else None
    return _run(model, readout_bh, part, table_vh).hidden[:, 0]


def serialize(model: Backbone, x_bg: torch.Tensor) -> Seen:
    """Return the genes of each profile that become tokens: the first `max_tokens` above 0 by value times gene weight.

    Ties are resolved by gene order. The weights are set by :meth:`ScDiVaModel.init_gene_weights`.
    """
    expressed_bg = x_bg > 0
    score_bg = (x_bg * model.gene_weights.to(x_bg.dtype)).masked_fill(~expressed_bg, float("-inf"))
    width = min(model.max_tokens, model.num_genes)
    if not torch.compiler.is_compiling():
        width = min(width, max(1, int(expressed_bg.sum(dim=1).max())) if len(x_bg) else 1)
    genes_bk = score_bg.sort(dim=1, descending=True, stable=True).indices[:, :width]
    tokens_bk = expressed_bg.gather(1, genes_bk)
    ids_bk = (genes_bk + model.n_special).masked_fill(~tokens_bk, PAD_ID)
    return what_is_seen(ids_bk, tokens_bk, x_bg.gather(1, genes_bk), None, None, model.n_special)


def _readout(model: Backbone, seen: Seen) -> torch.Tensor:
    """Return LAT, the sum after the norm, (B, H)."""
    summed_bh, nothing_b1 = weighted_sum(model, seen)
    # A norm of (nearly) zero would have gradients without bounds; the vector of padding is of no other use.
    summed_bh = summed_bh + nothing_b1 * model.special_embedding.weight[PAD_ID]
    return model.gene_embedding.dropout(model.gene_embedding.norm(summed_bh))


def _run(
    model: Backbone, readout_bh: torch.Tensor, seen: Seen, table_vh: torch.Tensor | None, **wanted: bool
) -> StackOutput:
    """Embed the tokens, from the vectors of all tokens if given, and run the transformer on LAT and them."""
    readout_b1h = readout_bh.unsqueeze(1)
    if table_vh is None:
        genes = F.embedding((seen.ids - model.n_special).clamp(min=0), model.gene_embedding.weight)
        special = model.special_embedding(seen.ids.clamp(max=model.n_special - 1))
        is_special = (seen.ids < model.n_special).unsqueeze(-1)
        vectors = model.gene_embedding.norm(torch.where(is_special, special, genes + model.gene_embedding.bias))
    else:
        vectors = F.embedding(seen.ids, table_vh)
    vectors = vectors + model.value_encoder(seen.values) * seen.has_value.unsqueeze(-1)
    if model.hidden_value is not None:
        vectors = vectors + seen.hidden_value.unsqueeze(-1) * model.hidden_value
    states_bkh = torch.cat([readout_b1h, model.dropout(vectors)], dim=1)
    return model.encoder(states_bkh, F.pad(seen.tokens, (1, 0), value=True), **wanted)
