"""Parts of ScDiVa: layers, the visible part of a batch, the two modes, and the losses of masked genes.

Shapes: B cells, S tokens, K attended tokens, G genes, V vocabulary, H hidden, L latent, T cell types, M tokens with a
target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scforge._checks import check_count
from scforge._constants import PAD_ID
from scforge.errors import OptionError
from scforge.models.components.attention import check_shapes, put_back_weights
from scforge.models.components.config import NORMS, TransformerConfig
from scforge.models.components.latent import LOG_VARIANCES, BatchIntegrationHead, draw_latent
from scforge.models.components.transformer import Dropout, StackOutput, TransformerStack

NEVER = -100.0
"""Logit of impossible genes: special tokens, and genes that occur elsewhere in the cell."""

_LOGITS_AT_ONCE = {"cpu": 2**22}
_LOGITS_AT_ONCE_ON_GPU = 2**28

_STD = 0.02

_NEARLY_ZERO = 1e-2
"""Mean square of a vector after the norm; it is 1 unless the input was about as small as epsilon."""


class GeneEmbedding(nn.Module):
    """The projection ``LayerNorm(x W + b)`` of an expression profile; the rows of W also embed single genes.

    W has shape (G, H), the transpose of the weight of a linear layer from G to H.

    Examples
    --------
    >>> embedding = GeneEmbedding(6, TransformerConfig(hidden_dim=4, num_layers=1, num_heads=1, dropout=0.0))
    >>> x = torch.tensor([[0.0, 2.0, 0.0, 1.0, 0.0, 0.0]])
    >>> genes, values = torch.tensor([[3, 1]]), torch.tensor([[1.0, 2.0]])
    >>> bool(torch.allclose(embedding(x), embedding.norm(embedding.bag(genes, values)), atol=1e-6))
    True
    """

    def __init__(self, num_genes: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_genes, config.hidden_dim))
        self.bias = nn.Parameter(torch.empty(config.hidden_dim))
        self.norm = NORMS[config.norm](config.hidden_dim, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize weights from N(0, 0.02) and the bias with zeros."""
        nn.init.normal_(self.weight, std=_STD)
        nn.init.zeros_(self.bias)

    def project(self, x_bg: torch.Tensor) -> torch.Tensor:
        """Return ``x W + b`` for profiles (B, G), shape (B, H)."""
        return F.linear(x_bg.to(self.weight.dtype), self.weight.t(), self.bias)

    def bag(self, genes_bs: torch.Tensor, values_bs: torch.Tensor) -> torch.Tensor:
        """Return the same projection from genes and their values, shape (B, H), without a profile over all genes.

        Values of genes to ignore are 0.
        """
        values_bs = values_bs.to(self.weight.dtype)
        return F.embedding_bag(genes_bs, self.weight, mode="sum", per_sample_weights=values_bs) + self.bias

    def forward(self, x_bg: torch.Tensor) -> torch.Tensor:
        """Embed profiles of shape (B, G) as vectors of shape (B, H)."""
        return self.dropout(self.norm(self.project(x_bg)))


class ValueEncoder(nn.Module):
    """Embed the value of a token: Linear, GELU, Linear, with the last layer initialized at zero."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.linear_in = nn.Linear(1, hidden_dim)
        self.linear_out = nn.Linear(hidden_dim, hidden_dim, bias=False)

    def forward(self, values_bs: torch.Tensor) -> torch.Tensor:
        """Embed values of shape (B, S) as vectors of shape (B, S, H)."""
        return self.linear_out(F.gelu(self.linear_in(values_bs.unsqueeze(-1).to(self.linear_in.weight.dtype))))


class VariationalLayer(nn.Module):
    """Compute the latent mean and variance, and sample the latent variable in training (Kingma and Welling 2013).

    If not `variational`, there is no variance, and the latent variable is the mean.

    Examples
    --------
    >>> latent, mu, logvar = VariationalLayer(hidden_dim=8, latent_dim=3).eval()(torch.randn(2, 8))
    >>> bool((latent == mu).all()), logvar.shape
    (True, torch.Size([2, 3]))
    """

    def __init__(self, hidden_dim: int, latent_dim: int, *, variational: bool = True) -> None:
        super().__init__()
        check_count("latent_dim", latent_dim, "dimensions")
        self.mu_projection = nn.Linear(hidden_dim, latent_dim)
        self.logvar_projection = nn.Linear(hidden_dim, latent_dim) if variational else None

    def forward(self, hidden_bh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the latent variable, mean and log-variance, each (B, L); in evaluation, the first two are equal.

        Without a variance, the log-variance is at its lower bound, -15.
        """
        mu_bl = _wide(self.mu_projection(hidden_bh))
        if self.logvar_projection is None:
            return mu_bl, mu_bl, torch.full_like(mu_bl, LOG_VARIANCES[0])
        logvar_bl = _wide(self.logvar_projection(hidden_bh)).clamp(*LOG_VARIANCES)
        if not self.training:
            return mu_bl, mu_bl, logvar_bl
        return draw_latent(mu_bl, logvar_bl), mu_bl, logvar_bl


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class AnnotationHead(nn.Module):
    """Predict cell types from latent variables: Linear to H, GELU, Linear to T."""

    def __init__(self, latent_dim: int, hidden_dim: int, num_cell_types: int) -> None:
        super().__init__()
        self.dense = nn.Linear(latent_dim, hidden_dim)
        self.classifier = nn.Linear(hidden_dim, num_cell_types)

    def forward(self, latent_bl: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (B, T)."""
        return self.classifier(F.gelu(self.dense(latent_bl)))


def init_scdiva(module: nn.Module) -> None:
    """Initialize one module, for ``model.apply``: weights from N(0, 0.02), zero biases, norms with ones and zeros."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_STD)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        nn.init.ones_(module.weight)
    if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
        nn.init.zeros_(module.bias)
    elif isinstance(module, GeneEmbedding):
        module.reset_parameters()
    # Children come first, so these have the last word.
    elif isinstance(module, ValueEncoder):
        nn.init.zeros_(module.linear_out.weight)
    elif isinstance(module, BatchIntegrationHead) and module.batch_embedding is not None:
        nn.init.zeros_(module.batch_embedding.weight)


@dataclass(frozen=True)
class Seen:
    """The visible part of a batch of tokens; all tensors have the shape (B, S).

    `ids` are int64. `tokens` is true for tokens, and `values` are 0 if they are masked. `has_gene` and `has_value` are
    true for tokens with a visible identity and a visible value, `hidden_value` for those with a masked value, and
    `hidden` for those with a masked identity or value.
    """

    ids: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor
    has_gene: torch.Tensor
    has_value: torch.Tensor
    hidden_value: torch.Tensor
    hidden: torch.Tensor

    def blocked(self, vocab_size: int, n_special: int) -> torch.Tensor:
        """Return which tokens a masked token cannot be: special tokens and visible genes, bool, (B, V)."""
        blocked = torch.zeros((self.ids.shape[0], vocab_size), dtype=torch.bool, device=self.ids.device)
        blocked = blocked.scatter(1, self.ids.masked_fill(~self.has_gene, PAD_ID), True)
        return blocked | (torch.arange(vocab_size, device=self.ids.device) < n_special)


def what_is_seen(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    values: torch.Tensor | None,
    masked_positions: torch.Tensor | None,
    masked_values: torch.Tensor | None,
    n_special: int,
) -> Seen:
    """Split a batch into its visible and masked parts.

    All tensors have the shape (B, S). Without values, every gene has the value 1; `masked_values` are those of
    `masked_positions` unless given. Ids of special tokens are below `n_special`.
    """
    check_shapes(
        input_ids.shape,
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


class States(NamedTuple):
    """Output of the transformer for cells.

    ``readout`` contains the states of LAT, (B, H), and ``tokens`` the states of the tokens, (B, S, H), with zeros for
    tokens that are not attended to. ``attended`` specifies the attended tokens, bool, (B, S). ``table`` contains the
    vectors of all tokens, (V, H), if requested. ``hidden_states`` and ``attentions`` are as in
    :class:`scforge.models.ModelOutput`.
    """

    readout: torch.Tensor
    tokens: torch.Tensor
    attended: torch.Tensor
    table: Any
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class Backbone(Protocol):
    """What the two modes use of :class:`scforge.models.ScDiVaModel`."""

    vocab_size: int
    num_genes: int
    n_special: int
    max_tokens: int
    gene_embedding: GeneEmbedding
    special_embedding: Any
    value_encoder: Any
    hidden_value: nn.Parameter | None
    dropout: Dropout
    encoder: TransformerStack
    gene_weights: Any

    def token_table(self) -> torch.Tensor:
        """Return the vectors of all tokens after the norm, (V, H)."""


def weighted_sum(model: Backbone, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted sum of genes with visible identity and value, (B, H), and which cells lack such genes."""
    values_bs = seen.values.masked_fill(~(seen.has_gene & seen.has_value), 0.0)
    summed_bh = model.gene_embedding.bag((seen.ids - model.n_special).clamp(min=0), values_bs)
    return summed_bh, ~(values_bs != 0).any(dim=1, keepdim=True)


def token_states(model: Backbone, seen: Seen, table_vh: torch.Tensor | None, **wanted: bool) -> States:
    """Run the transformer on LAT and the first `max_tokens` tokens of each cell, masked first (mode ``"tokens"``).

    Genes attend to each other and to LAT, the sum of all genes, which is the read-out.
    """
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

    out = _run_tokens(model, readout_bh, part, table_vh, **wanted)
    states, weights = out.hidden_states, out.attentions
    return States(
        readout=out.hidden[:, 0],
        tokens=put(out.hidden[:, 1:]),
        attended=attended_bs,
        table=table_vh,
        hidden_states=None if states is None else tuple(put(state[:, 1:]) for state in states),
        attentions=None if weights is None else tuple(put_back_weights(part[:, :, 1:, 1:], put) for part in weights),
    )


def token_profile_states(model: Backbone, x_bg: torch.Tensor, nothing_b1: torch.Tensor) -> torch.Tensor:
    """Run the transformer on the projections of profiles and their genes; return the states of LAT, (B, H)."""
    readout_bh = model.gene_embedding(x_bg)
    part = serialize(model, x_bg)
    if not torch.compiler.is_compiling() and bool(nothing_b1.any()):
        readout_bh = torch.where(nothing_b1, _readout(model, part), readout_bh)
    table_vh = model.token_table() if part.ids.numel() > model.vocab_size else None
    return _run_tokens(model, readout_bh, part, table_vh).hidden[:, 0]


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


def _run_tokens(
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


def vector_states(
    model: Backbone, seen: Seen, table_vh: torch.Tensor | None, *, output_hidden_states: bool, output_attentions: bool
) -> States:
    """Run the transformer on the weighted sum of the genes of each cell (mode ``"vector"``), as one vector per cell.

    Every token has the state of its cell. The softmax over one key is 1, so attention is a linear map of the vector,
    and queries and keys are not trained.
    """
    if output_attentions:
        raise OptionError(
            "requires mode='tokens', because mode='vector' has no attention; omit "
            "output_attentions, or choose mode='tokens'.",
            output_attentions=True,
        )
    state_bh, layers = _run_vector(model, *weighted_sum(model, seen), output_hidden_states=output_hidden_states)
    shape = (-1, seen.ids.shape[1], -1)
    hidden_states = None if layers is None else tuple(layer.expand(shape) for layer in layers)
    return States(state_bh, state_bh.unsqueeze(1).expand(shape), seen.tokens, table_vh, hidden_states)


def vector_profile_states(model: Backbone, x_bg: torch.Tensor, nothing_b1: torch.Tensor) -> torch.Tensor:
    """Run the transformer on the projections of profiles; return the states, (B, H)."""
    return _run_vector(model, model.gene_embedding.project(x_bg), nothing_b1)[0]


def _run_vector(
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


def gene_logits(
    states_bsh: torch.Tensor, table_vh: torch.Tensor, prior_v: torch.Tensor | None, seen: Seen, n_special: int
) -> torch.Tensor:
    """Return the logit of each gene at each token, the product of token state and gene vector, (B, S, V).

    Products are divided by the square root of H. Special tokens, and genes that are visible at another token of the
    cell, have the logit ``NEVER``.
    """
    logits = scores_of(states_bsh, table_vh, prior_v)
    blocked = seen.blocked(len(table_vh), n_special).unsqueeze(1)
    own = seen.ids.masked_fill(~seen.has_gene, PAD_ID).unsqueeze(-1)
    own_logit = torch.where(seen.has_gene.unsqueeze(-1), logits.gather(2, own), NEVER)
    return logits.masked_fill(blocked, NEVER).scatter(2, own, own_logit)


def gene_losses(
    states_bsh: torch.Tensor,
    table_vh: torch.Tensor,
    prior_v: torch.Tensor | None,
    seen: Seen,
    labels_bs: torch.Tensor,
    chosen_bs: torch.Tensor,
    n_special: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of the gene and the cell index of each selected token, both of shape (M,).

    Impossible genes are left out of the softmax, so excluding them does not reduce the loss. The logits are computed
    for some tokens at a time, and are recomputed in the backward pass if there are many.
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
    step = max(1, _LOGITS_AT_ONCE.get(states_mh.device.type, _LOGITS_AT_ONCE_ON_GPU) // len(table_vh))
    again = len(states_mh) > step and torch.is_grad_enabled()
    parts = []
    for start in range(0, len(states_mh), step):
        part = slice(start, start + step)
        given = (states_mh[part], labels_m[part], own_m[part], cells_m[part])
        parts.append(checkpoint(losses_of, *given, use_reentrant=False) if again else losses_of(*given))
    return (torch.cat(parts) if parts else states_mh.new_zeros(0, dtype=torch.float32)), cells_m


def scores_of(states: torch.Tensor, table_vh: torch.Tensor, prior_v: torch.Tensor | None) -> torch.Tensor:
    """Return states (..., H) times gene vectors, divided by the square root of H, plus the prior, shape (..., V)."""
    scores = F.linear(states / math.sqrt(states.shape[-1]), table_vh.to(states.dtype))
    return scores if prior_v is None else scores + prior_v.to(scores.dtype)


def mean_over_cells(losses_m: torch.Tensor, cells_m: torch.Tensor, weights_b: torch.Tensor | None) -> torch.Tensor:
    """Return the mean token loss of each cell times the weight of the cell, averaged over cells, a scalar.

    A cell without tokens contributes 0. Without weights, the result is the mean over all tokens, or 0 if there are no
    tokens. The token losses and the indices of their cells have the shape (M,), the weights (B,).
    """
    if weights_b is None:
        return losses_m.sum() / max(1, len(losses_m))
    n_tokens_b = torch.zeros_like(weights_b, dtype=losses_m.dtype).index_add(0, cells_m, torch.ones_like(losses_m))
    share_b = weights_b.to(losses_m.dtype) / (n_tokens_b.clamp(min=1) * max(1, len(weights_b)))
    return (losses_m * share_b[cells_m]).sum()
