"""ScDiVa: a transformer that generates cells by denoising masked genes and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scforge._checks import check_choice, check_count, check_share
from scforge._constants import MASK_ID, N_SPECIAL, PAD_ID
from scforge.errors import DataError, OptionError
from scforge.models._utils import Architecture, evaluating, number_of_each
from scforge.models.components.attention import check_shapes, put_back_weights
from scforge.models.components.config import TransformerConfig
from scforge.models.components.heads import ExpressionPredictionHead
from scforge.models.components.latent import (
    BatchIntegrationHead,
    classification_loss,
    kl_divergence,
    reconstruction_loss,
)
from scforge.models.components.transformer import Dropout, TransformerStack
from scforge.models.generation import (
    LARGEST,
    check_drawing,
    draw,
    first_of_its_kind,
    generator_of,
    read_prompt,
    softmax,
)
from scforge.models.protocol import GeneratedCells, ModelOutput
from scforge.models.registry import register_model
from scforge.models.scdiva_parts import (
    AnnotationHead,
    GeneEmbedding,
    ValueEncoder,
    VariationalLayer,
    init_scdiva,
    mean_over_cells,
)

if TYPE_CHECKING:
    from scforge.config.schema import ModelConfig


NEVER = -100.0
"""Logit of impossible genes: special tokens, and genes that occur elsewhere in the cell."""

_LOGITS_AT_ONCE = {"cpu": 2**22}
_LOGITS_AT_ONCE_ON_GPU = 2**28

_TASKS = ["annotation", "batch_integration"]

_NEARLY_ZERO = 1e-2
"""Mean square of a vector after the norm; it is 1 unless the input was about as small as epsilon."""

_OWN_BETA = 1e-3
"""Weight of the KL divergence if the latent variable is trained only on masked genes."""

_VALUES_AT_ONCE = 2**24
"""Number of logits computed at a time."""


@dataclass(frozen=True)
class Seen:
    """The visible part of a batch of tokens; all of shape (B, S).

    Attributes
    ----------
    ids
        Token ids, int64.
    tokens
        True for tokens, bool.
    values
        Expression values, float; 0 if the value is masked.
    has_gene
        True for genes with a visible identity.
    has_value
        True for tokens with a visible value.
    hidden_value
        True for tokens with a masked value.
    hidden
        True for tokens with a masked identity or value.
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

    def first(self, most: int) -> Attended | None:
        """Return the first `most` tokens of each cell, masked tokens first, or None if all tokens are used."""
        if self.ids.shape[1] <= most:
            return None
        last = 2 * (~self.tokens).to(torch.uint8) + (~self.hidden).to(torch.uint8)
        places = torch.argsort(last, dim=1, stable=True)[:, :most].sort(dim=1).values
        return Attended(places, self.ids.shape[1])


@dataclass(frozen=True)
class Attended:
    """Positions of the attended tokens (int64, shape (B, K)), and the total number of positions S."""

    places: torch.Tensor
    width: int

    def take(self, tensor_bs: torch.Tensor) -> torch.Tensor:
        """Select attended tokens: from shape (B, S) to (B, K)."""
        return tensor_bs.gather(1, self.places)

    def put_back(self, states_bkh: torch.Tensor) -> torch.Tensor:
        """Restore attended tokens to their positions: from shape (B, K, H) to (B, S, H), with zeros elsewhere."""
        states = states_bkh.new_zeros((states_bkh.shape[0], self.width, states_bkh.shape[2]))
        return states.scatter(1, self.places.unsqueeze(-1).expand_as(states_bkh), states_bkh)

    def of(self, seen: Seen) -> Seen:
        """Return the visible part of the attended tokens."""
        return Seen(**{name: self.take(tensor) for name, tensor in vars(seen).items()})

    def has(self) -> torch.Tensor:
        """Return a mask of the attended positions, bool, (B, S)."""
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
    """Split a batch into its visible and masked parts.

    Parameters
    ----------
    input_ids, attention_mask, values
        Token ids, attention mask and values, shape (B, S); without values, every gene has the value 1.
    masked_positions
        Nonzero for tokens with a masked identity, (B, S), or None.
    masked_values
        Nonzero for tokens with a masked value, (B, S). If None, uses `masked_positions`.
    n_special
        Number of special tokens; their ids are below this number.
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


@register_model("scdiva")
class ScDiVaModel(Architecture):
    """Variational transformer for cells, in two modes.

    ``mode="vector"``: a linear layer with a norm maps a profile of all genes to one vector, which passes through the
    transformer as a sequence of length 1. The softmax over one key is 1, so attention is a linear map of the vector,
    and queries and keys are not trained.

    ``mode="tokens"``: the same layer is computed as a sum over genes of gene vector times value. This sum is the first
    token, LAT. Each gene is a further token: the vector of the gene after the norm, plus a vector of the value. Genes
    therefore attend to each other, and LAT is the read-out. This mode has H^2 + 6 H more parameters than the other
    mode.

    The read-out is mapped to a mean and a variance with L dimensions. In evaluation, the latent variable is the mean,
    which is the cell embedding. Two heads decode the latent variable: one predicts the cell type, and one predicts the
    expression of all genes.

    All methods take either a token batch, as in every architecture, or, without `attention_mask`, a dense profile of
    log1p of counts per 10,000, float, (B, G).

    Parameters
    ----------
    vocab_size
        Number of tokens V, including special tokens; there are G = V - `n_special` genes.
    hidden_dim, num_layers, num_heads, ffn_dim
        Width H, number of layers, number of heads, and width of the feed-forward layers (if None, ``4 * hidden_dim``)
        of the transformer.
    dropout
        Dropout rate on embeddings and residual branches.
    max_tokens
        Maximum number of attended tokens per cell, in addition to LAT, which sums over all tokens. Masked tokens are
        attended to first, then other tokens in the order of the batch. 0 selects the mode ``"vector"``.
    mode
        ``"tokens"`` or ``"vector"``.
    norm_style
        ``"post"`` puts norms after each sum; ``"pre"`` puts them at the start of each branch, which is easier to train
        in deep models.
    norm, activation, bias
        See :class:`scforge.models.components.TransformerConfig`; `norm` is also used in the embedding.
    final_norm
        Whether a norm follows the last layer. If None, a norm is added with ``norm_style="pre"``.
    latent_dim
        Width L of the latent variable.
    num_cell_types
        Number of cell types T in the annotation head; 0 for no annotation head.
    n_batches
        Number of batches that the expression decoder is conditioned on.
    variational
        If false, there is no variance and no noise.
    denoising
        Whether to add a vector for masked values and a head that predicts these values; the objective
        ``masked_diffusion`` requires both.
    layer_norm_eps
        Epsilon of the norms.
    position_embedding
        ``"none"``, in which case the order of tokens does not matter, or ``"rotary"``, with positions in the order of
        the tokens.
    n_special
        Number of special tokens; their ids are below this number.
    gradient_checkpointing
        Whether to recompute the activations of each layer in the backward pass, which takes less memory and more time.
    unpad
        Whether to remove padding from the computation. If None, removes it if this is faster.

    Examples
    --------
    >>> model = ScDiVaModel(vocab_size=54, hidden_dim=8, num_layers=1, num_heads=2, latent_dim=3, num_cell_types=2)
    >>> profile = torch.rand(5, 50)
    >>> model.encode(profile)["mu"].shape, model.predict(profile).shape
    (torch.Size([5, 3]), torch.Size([5, 2]))
    >>> ids, mask, values = torch.randint(4, 54, (5, 6)), torch.ones(5, 6), torch.rand(5, 6)
    >>> model.encode(ids, mask, values).shape
    torch.Size([5, 3])
    """

    gene_weights: Any
    token_prior: torch.Tensor | None
    length_quantiles: torch.Tensor | None

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int = 1024,
        num_layers: int = 24,
        num_heads: int = 16,
        ffn_dim: int | None = None,
        dropout: float = 0.1,
        max_tokens: int = 1200,
        *,
        mode: str = "tokens",
        norm_style: str = "post",
        norm: str = "layer",
        activation: str = "gelu",
        bias: bool = True,
        final_norm: bool | None = None,
        latent_dim: int = 128,
        num_cell_types: int = 0,
        n_batches: int = 0,
        variational: bool = True,
        denoising: bool = False,
        layer_norm_eps: float = 1e-12,
        position_embedding: str = "none",
        n_special: int = N_SPECIAL,
        gradient_checkpointing: bool = False,
        unpad: bool | None = None,
    ) -> None:
        super().__init__()
        check_choice("mode", mode, ["tokens", "vector"])
        check_choice("norm_style", norm_style, ["post", "pre"])
        check_choice("position_embedding", position_embedding, ["none", "rotary"])
        check_share("dropout", dropout)
        check_count("max_tokens", max_tokens, "tokens", least=0)
        config = TransformerConfig(
            *(hidden_dim, num_layers, num_heads, ffn_dim, dropout, activation, layer_norm_eps, norm_style == "pre"),
            norm=norm,
            bias=bias,
            final_norm=final_norm,
            rotary=position_embedding == "rotary",
            gradient_checkpointing=gradient_checkpointing,
            unpad=unpad,
        )
        self.vocab_size, self.num_genes, self.n_special = vocab_size, vocab_size - n_special, n_special
        self.hidden_dim, self.latent_dim, self.max_tokens = hidden_dim, latent_dim, max_tokens
        self.mode = mode if max_tokens else "vector"
        self.num_cell_types, self.n_batches = num_cell_types, n_batches
        self.variational, self.denoising = variational, denoising
        tokens = self.mode == "tokens"
        self.uses_order = tokens and position_embedding == "rotary"
        self.gene_embedding = GeneEmbedding(self.num_genes, config)
        self.special_embedding: Any = nn.Embedding(n_special, hidden_dim) if tokens else None
        self.value_encoder: Any = ValueEncoder(hidden_dim) if tokens else None
        self.dropout = Dropout(dropout)
        self.encoder = TransformerStack(config)
        self.variational_layer = VariationalLayer(hidden_dim, latent_dim, variational=variational)
        self.annotation_head = AnnotationHead(latent_dim, hidden_dim, num_cell_types) if num_cell_types else None
        self.batch_integration_head = BatchIntegrationHead(latent_dim, hidden_dim, self.num_genes, n_batches)
        self.value_head: Any = ExpressionPredictionHead(hidden_dim) if denoising else None
        self.apply(init_scdiva)
        both = tokens and denoising
        self.hidden_value = nn.Parameter(nn.init.normal_(torch.empty(hidden_dim), std=0.02)) if both else None
        self.register_buffer("gene_weights", torch.ones(self.num_genes) if tokens else None)
        self.register_buffer("token_prior", torch.zeros(vocab_size) if tokens else None)
        self.register_buffer("length_quantiles", torch.zeros(101) if denoising else None)

    def encode(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the cell embeddings of a batch of tokens, (B, L), or the output of :meth:`infer` for a profile."""
        found = self.infer(input_ids, attention_mask, values, **kwargs)
        return found if attention_mask is None else found["mu"]

    def infer(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        *,
        masked_positions: torch.Tensor | None = None,
        masked_values: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Return ``latent``, ``mu`` and ``logvar`` of cells, float32, each (B, L).

        In training, the latent variable is sampled; in evaluation, it is the mean. The variance is ``exp(logvar)``. For
        the arguments, see :meth:`forward`.
        """
        if attention_mask is None:
            readout = self._dense_states(input_ids)
        else:
            seen = what_is_seen(input_ids, attention_mask, values, masked_positions, masked_values, self.n_special)
            readout = self.states(seen).readout
        return dict(zip(("latent", "mu", "logvar"), self.variational_layer(readout), strict=True))

    def decode(self, latent: torch.Tensor, batch: torch.Tensor | int | None = None) -> torch.Tensor:
        """Decode latent variables (B, L) to the expression of all genes (B, G) for `batch`, or the mean batch."""
        return self.batch_integration_head(latent, batch)

    def classify(self, latent: torch.Tensor) -> torch.Tensor:
        """Return logits of cell types, (B, T), for latent variables (B, L).

        Raises
        ------
        OptionError
            If the model has no annotation head.
        """
        if self.annotation_head is None:
            raise OptionError(
                "the model has num_cell_types=0 and therefore no annotation head; create it with the number of cell "
                "types as num_cell_types."
            )
        return self.annotation_head(latent)

    @torch.no_grad()
    def predict(
        self,
        input_ids: torch.Tensor,
        task: str = "annotation",
        *,
        attention_mask: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Predict from the latent mean, without dropout and gradients.

        Parameters
        ----------
        input_ids
            Profile, float, (B, G), or, with `attention_mask` and `values`, token ids, (B, S).
        task
            ``"annotation"`` returns logits of cell types, (B, T); ``"batch_integration"`` returns expression, (B, G).
        batch
            Batch for which expression is predicted. If None, uses the mean of all batches.
        """
        check_choice("task", task, _TASKS)
        with evaluating(self):
            mu = self.infer(input_ids, attention_mask, values, **kwargs)["mu"]
            return self.classify(mu) if task == "annotation" else self.decode(mu, batch)

    def token_table(self) -> torch.Tensor:
        """Return the vectors of all tokens after the norm, without values, (V, H).

        In mode ``"vector"``, which has no special tokens, the vectors of special tokens are zeros.
        """
        genes = self.gene_embedding.weight + self.gene_embedding.bias
        if self.special_embedding is None:
            return F.pad(self.gene_embedding.norm(genes), (0, 0, self.n_special, 0))
        return self.gene_embedding.norm(torch.cat([self.special_embedding.weight, genes]))

    def _summed(self, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted sum of genes with visible identity and value, (B, H), and which cells lack such genes."""
        values_bs = seen.values.masked_fill(~(seen.has_gene & seen.has_value), 0.0)
        summed_bh = self.gene_embedding.bag((seen.ids - self.n_special).clamp(min=0), values_bs)
        return summed_bh, ~(values_bs != 0).any(dim=1, keepdim=True)

    def _readout(self, seen: Seen) -> torch.Tensor:
        """Return LAT, the sum after the norm, (B, H)."""
        summed_bh, nothing_b1 = self._summed(seen)
        # A norm of (nearly) zero would have gradients without bounds; the vector of padding is of no other use.
        summed_bh = summed_bh + nothing_b1 * self.special_embedding.weight[PAD_ID]
        return self.gene_embedding.dropout(self.gene_embedding.norm(summed_bh))

    def _alone(
        self, summed_bh: torch.Tensor, nothing_b1: torch.Tensor, *, output_hidden_states: bool = False
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        """Run the transformer on one vector per cell; return its state, (B, H), and the layer states if requested.

        Without genes, the vector equals the bias, which starts at zero, where the gradient of a norm is unbounded.
        Cells without genes therefore pass no gradient to the bias. They also pass no gradient to the transformer while
        the vector after the norm is nearly zero.
        """
        vector_bh = self.gene_embedding.norm(torch.where(nothing_b1, summed_bh.detach(), summed_bh))
        zero_b1 = nothing_b1 & (vector_bh.square().mean(dim=1, keepdim=True) < _NEARLY_ZERO)
        vector_b1h = self.gene_embedding.dropout(vector_bh).unsqueeze(1)
        out = self.encoder(vector_b1h, output_hidden_states=output_hidden_states)
        state_bh = out.hidden[:, 0]
        return torch.where(zero_b1, state_bh.detach(), state_bh), out.hidden_states

    def _embed(self, seen: Seen, table_vh: torch.Tensor | None) -> torch.Tensor:
        """Return the vectors of tokens, (B, K, H)."""
        if table_vh is None:
            genes = F.embedding((seen.ids - self.n_special).clamp(min=0), self.gene_embedding.weight)
            special = self.special_embedding(seen.ids.clamp(max=self.n_special - 1))
            is_special = (seen.ids < self.n_special).unsqueeze(-1)
            vectors = self.gene_embedding.norm(torch.where(is_special, special, genes + self.gene_embedding.bias))
        else:
            vectors = F.embedding(seen.ids, table_vh)
        vectors = vectors + self.value_encoder(seen.values) * seen.has_value.unsqueeze(-1)
        if self.hidden_value is not None:
            vectors = vectors + seen.hidden_value.unsqueeze(-1) * self.hidden_value
        return self.dropout(vectors)

    def states(
        self, seen: Seen, *, table: bool = False, output_hidden_states: bool = False, output_attentions: bool = False
    ) -> States:
        """Run the transformer on tokens; with `table`, also return the vectors of all tokens.

        Raises
        ------
        OptionError
            If attention weights are requested in mode ``"vector"``.
        """
        # (An exported graph has to do for batches of all sizes.)
        many = torch.compiler.is_compiling() or seen.ids.numel() > self.vocab_size
        table_vh = self.token_table() if table or (many and self.mode == "tokens") else None
        if self.mode == "vector":
            if output_attentions:
                raise OptionError(
                    "output_attentions=True requires mode='tokens', because mode='vector' has no attention; omit "
                    "output_attentions, or choose mode='tokens'."
                )
            state_bh, layers = self._alone(*self._summed(seen), output_hidden_states=output_hidden_states)
            shape = (-1, seen.ids.shape[1], -1)
            further = None if layers is None else tuple(layer.expand(shape) for layer in layers)
            return States(state_bh, state_bh.unsqueeze(1).expand(shape), seen.tokens, table_vh, further)
        readout_bh = self._readout(seen)
        kept = seen.first(self.max_tokens)
        part = seen if kept is None else kept.of(seen)
        states_bkh = torch.cat([readout_bh.unsqueeze(1), self._embed(part, table_vh)], dim=1)
        tokens_bk = F.pad(part.tokens, (1, 0), value=True)
        wanted = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        out = self.encoder(states_bkh, tokens_bk, **wanted)
        states, weights = out.hidden_states, out.attentions
        put: Callable[[torch.Tensor], torch.Tensor] = (lambda state: state) if kept is None else kept.put_back
        return States(
            readout=out.hidden[:, 0],
            tokens=put(out.hidden[:, 1:]),
            attended=seen.tokens if kept is None else seen.tokens & kept.has(),
            table=table_vh,
            hidden_states=None if states is None else tuple(put(state[:, 1:]) for state in states),
            attentions=None
            if weights is None
            else tuple(put_back_weights(part[:, :, 1:, 1:], put) for part in weights),
        )

    def _dense_states(self, x_bg: torch.Tensor) -> torch.Tensor:
        """Run the transformer on profiles; return the read-out, (B, H)."""
        if x_bg.ndim != 2 or x_bg.shape[1] != self.num_genes or not x_bg.is_floating_point():
            raise OptionError(
                f"the profiles have dtype {x_bg.dtype} and shape {tuple(x_bg.shape)}; pass floats of shape (B, "
                f"{self.num_genes}) for the genes of the model, or tokens with their attention_mask."
            )
        # (On other devices the check would wait for them.)
        if x_bg.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(x_bg.isfinite().all()):
            cell = int((~x_bg.isfinite().all(dim=1)).nonzero()[0, 0])
            raise DataError(f"the profile of cell {cell} has NaN or infinite values; pass log1p of counts per 10,000.")
        nothing_b1 = ~(x_bg != 0).any(dim=1, keepdim=True)
        if self.mode == "vector":
            return self._alone(self.gene_embedding.project(x_bg), nothing_b1)[0]
        readout_bh = self.gene_embedding(x_bg)
        part = self.serialize(x_bg)
        if not torch.compiler.is_compiling() and bool(nothing_b1.any()):
            readout_bh = torch.where(nothing_b1, self._readout(part), readout_bh)
        table_vh = self.token_table() if part.ids.numel() > self.vocab_size else None
        states_bkh = torch.cat([readout_bh.unsqueeze(1), self._embed(part, table_vh)], dim=1)
        return self.encoder(states_bkh, F.pad(part.tokens, (1, 0), value=True)).hidden[:, 0]

    def serialize(self, x: torch.Tensor) -> Seen:
        """Return the genes of each profile that become tokens: the first `max_tokens` by value times gene weight.

        Ties are resolved by gene order. The weights are set by :meth:`init_gene_weights`.

        Parameters
        ----------
        x
            Profiles, (B, G); genes above 0 are expressed.
        """
        expressed_bg = x > 0
        score_bg = (x * self.gene_weights.to(x.dtype)).masked_fill(~expressed_bg, float("-inf"))
        width = min(self.max_tokens, self.num_genes)
        if not torch.compiler.is_compiling():
            width = min(width, max(1, int(expressed_bg.sum(dim=1).max())) if len(x) else 1)
        genes_bk = score_bg.sort(dim=1, descending=True, stable=True).indices[:, :width]
        tokens_bk = expressed_bg.gather(1, genes_bk)
        ids_bk = (genes_bk + self.n_special).masked_fill(~tokens_bk, PAD_ID)
        return what_is_seen(ids_bk, tokens_bk, x.gather(1, genes_bk), None, None, self.n_special)

    @torch.no_grad()
    def init_gene_weights(self, weights: torch.Tensor) -> None:
        """Set the gene weights, shape (G,), that rank the genes of a profile; not used in mode ``"vector"``."""
        weights = torch.as_tensor(weights)
        if tuple(weights.shape) != (self.num_genes,):
            raise OptionError(
                f"weights has shape {tuple(weights.shape)}; pass one number for each of the {self.num_genes} genes."
            )
        if self.gene_weights is not None:
            self.gene_weights.copy_(weights)

    @torch.no_grad()
    def init_expression_prior(self, mean: torch.Tensor) -> None:
        """Initialize the expression decoder at the mean expression of each gene, (G,)."""
        self.batch_integration_head.decoder.bias.copy_(mean)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        value_labels: torch.Tensor | None = None,
        masked_positions: torch.Tensor | None = None,
        masked_values: torch.Tensor | None = None,
        loss_weights: torch.Tensor | None = None,
        target: torch.Tensor | None = None,
        beta: float | torch.Tensor = 1.0,
        batch: torch.Tensor | None = None,
        return_logits: bool = True,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> ModelOutput:
        """Predict masked genes and values for a token batch, or cell type and expression for a profile.

        Parameters
        ----------
        input_ids
            Token ids, int64, shape (B, S), or a profile, float, (B, G).
        attention_mask
            Nonzero for tokens, shape (B, S). If None, `input_ids` is a profile.
        values
            Value of each token, shape (B, S). If None, all values are 1.
        labels
            Genes to predict, int64, (B, S); -100 elsewhere (labels of special tokens are ignored). For a profile, cell
            types, (B,).
        value_labels
            Values to predict, (B, S), with ``denoising=True``.
        masked_positions, masked_values
            Nonzero for tokens with a masked identity and a masked value, (B, S). If None, `masked_values` equals
            `masked_positions`. `input_ids` contains MASK for masked identities. Masked values are visible neither to
            LAT nor to their token.
        loss_weights
            Weight of each cell, (B,). If given, the loss is the average over cells of the weight times the mean over
            the masked tokens of the cell. Otherwise, token losses are averaged over tokens.
        target
            Expression to reconstruct from the latent variable, (B, G), e.g. of the cell before masking.
        beta
            Weight of the KL divergence of the latent distribution.
        batch
            Batch of each cell for the reconstruction, (B,).
        return_logits
            If false, ``logits`` and ``expression`` of tokens are None.
        output_hidden_states, output_attentions
            Whether to return states and attention weights of the tokens after each layer, without LAT.
        **kwargs
            Other keys of the batch, which are ignored.

        Returns
        -------
        For tokens, ``logits`` (B, S, V), ``embeddings`` (B, L), which are the latent means, and with ``denoising=True``
        ``expression`` (B, S). ``losses`` contains the loss terms that have a target: ``"identity"`` (cross entropy),
        ``"value"`` (squared error), and with `target` ``"reconstruction"`` and ``"kl"``. With labels but without
        `target` and `loss_weights`, the latent variable is trained on the labels: ``"latent"`` is the cross entropy of
        the masked genes given only the latent variable, and ``"kl"`` is weighted by 1e-3.

        For a profile, ``logits`` of cell types (B, T) or None, ``embeddings``, and ``expression`` (B, G), with a loss
        if there are `labels` (``"classification"``) or a `target`.
        """
        if attention_mask is None:
            return self._forward_dense(input_ids, labels, target, beta, batch)
        seen = what_is_seen(input_ids, attention_mask, values, masked_positions, masked_values, self.n_special)
        wanted = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        states = self.states(seen, table=labels is not None or return_logits or self.denoising, **wanted)
        latent, mu, logvar = found = self.variational_layer(states.readout)
        losses: dict[str, torch.Tensor] = {}
        genes_bs = seen.ids.masked_fill(~seen.has_gene, PAD_ID)
        if labels is not None:
            chosen_bs = seen.tokens & (labels >= self.n_special)
            genes_bs = torch.where(chosen_bs, labels, genes_bs)
            chosen_bs = chosen_bs & states.attended
            of_genes, cells = gene_losses(
                states.tokens, states.table, self.token_prior, seen, labels, chosen_bs, self.n_special
            )
            losses["identity"] = mean_over_cells(of_genes, cells, loss_weights)
        if self.denoising and value_labels is not None:
            chosen_bs = seen.hidden_value & states.attended & (genes_bs >= self.n_special)
            error = self.values_of(states, genes_bs, chosen_bs) - value_labels[chosen_bs].float()
            losses["value"] = mean_over_cells(error.square(), chosen_bs.nonzero()[:, 0], loss_weights)
        if target is not None:
            losses["reconstruction"] = reconstruction_loss(self.decode(latent, batch), target)
            if self.variational:
                losses["kl"] = kl_divergence(mu, logvar)
        elif labels is not None and loss_weights is None:
            beta = _OWN_BETA
            losses |= self._latent_losses(seen, labels, found, batch)
        loss = _sum(losses, beta)
        logits = expression = None
        if return_logits:
            logits = gene_logits(states.tokens, states.table, self.token_prior, seen, self.n_special)
            expression = self._expected_values(states, seen, logits)
        return ModelOutput(
            loss=loss,
            logits=logits,
            embeddings=mu,
            hidden_states=states.hidden_states,
            expression=expression,
            attentions=states.attentions,
            losses=losses or None,
        )

    def _forward_dense(
        self,
        x_bg: torch.Tensor,
        labels: torch.Tensor | None,
        target: torch.Tensor | None,
        beta: float | torch.Tensor,
        batch: torch.Tensor | None,
    ) -> ModelOutput:
        found = self.infer(x_bg)
        expression = self.decode(found["latent"], batch)
        logits = self.classify(found["latent"]) if self.annotation_head is not None else None
        losses: dict[str, torch.Tensor] = {}
        if labels is not None:
            losses["classification"] = classification_loss(self.classify(found["latent"]), labels)
        if target is not None:
            losses["reconstruction"] = reconstruction_loss(expression, target)
        if losses and self.variational:
            losses["kl"] = kl_divergence(found["mu"], found["logvar"])
        return ModelOutput(
            loss=_sum(losses, beta), logits=logits, embeddings=found["mu"], expression=expression, losses=losses or None
        )

    def _latent_losses(
        self,
        seen: Seen,
        labels: torch.Tensor,
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        batch: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Return the loss of predicting labeled genes from the latent variable, which trains it without a profile."""
        chosen_bs = seen.tokens & (labels >= self.n_special)
        log_share_bg = self.decode(found[0], batch).float().log_softmax(dim=1)
        of_tokens_bs = log_share_bg.gather(1, (labels - self.n_special).clamp(min=0))
        n_chosen = chosen_bs.sum()
        losses = {"latent": -of_tokens_bs.masked_fill(~chosen_bs, 0.0).sum() / n_chosen.clamp(min=1)}
        if self.variational:
            losses["kl"] = kl_divergence(found[1], found[2]) * (n_chosen > 0)
        return losses

    @classmethod
    def from_config(cls, config: ModelConfig | ScDiVaConfig) -> ScDiVaModel:
        """Create the model that `config` describes. Raises a ``ValueError`` if ``config.vocab_size`` is None."""
        return config.build() if isinstance(config, ScDiVaConfig) else super().from_config(config)

    model_class: ClassVar[str] = "ScDiVa"
    """The class of ``scforge.models`` with the methods that only this architecture supports."""

    @property
    def attended_tokens(self) -> int | None:
        """Maximum number of attended tokens per cell, or None in mode ``"vector"``, which has one vector per cell."""
        return self.max_tokens if self.mode == "tokens" else None

    @property
    def max_generated(self) -> int:
        """Maximum number of tokens per generated cell."""
        return self.attended_tokens or self.num_genes + 1

    def values_of(self, states: States, genes_bs: torch.Tensor, chosen_bs: torch.Tensor) -> torch.Tensor:
        """Return the predicted values of the selected tokens, given their genes, shape (M,)."""
        vectors_mh = states.table[genes_bs[chosen_bs]]
        return self.value_head(states.tokens[chosen_bs] + vectors_mh).float()

    def _expected_values(self, states: States, seen: Seen, logits_bsv: torch.Tensor) -> torch.Tensor | None:
        """Return the predicted value of every token; masked genes use the expected gene vector."""
        if self.value_head is None:
            return None
        mean_bsh = logits_bsv.softmax(dim=-1) @ states.table.to(logits_bsv.dtype)
        own_bsh = states.table[seen.ids.masked_fill(~seen.has_gene, PAD_ID)].to(mean_bsh.dtype)
        vectors_bsh = torch.where(seen.has_gene.unsqueeze(-1), own_bsh, mean_bsh)
        return self.value_head(states.tokens + vectors_bsh).float()

    def predict_values(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        *,
        masked_values: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return predictions for the masked values of visible genes, shape (B, S), with zeros elsewhere.

        Parameters
        ----------
        input_ids, attention_mask, values
            See :meth:`forward`.
        masked_values
            Nonzero for values to predict, shape (B, S); at most `max_tokens` per cell.

        Raises
        ------
        OptionError
            If the model has no value head, or a cell has too many masked values.
        """
        if not self.denoising:
            raise OptionError(
                "a model with denoising=False has no head to predict values; train a model with the objective "
                "'masked_diffusion'."
            )
        seen = what_is_seen(input_ids, attention_mask, values, None, masked_values, self.n_special)
        states = self.states(seen, table=True)
        chosen_bs = seen.hidden_value & seen.has_gene
        if bool((chosen_bs & ~states.attended).any()):
            raise OptionError(f"masked_values has more than max_tokens={self.max_tokens} values per cell; mask fewer.")
        predicted_bs = torch.zeros_like(seen.values)
        predicted_bs[chosen_bs] = self.values_of(states, seen.ids, chosen_bs).to(predicted_bs.dtype)
        return predicted_bs

    @torch.no_grad()
    def init_lengths(self, quantiles: torch.Tensor) -> None:
        """Set the 101 percentiles of the number of tokens per cell, from which ``generate`` samples lengths."""
        quantiles = torch.as_tensor(quantiles)
        if self.length_quantiles is None or tuple(quantiles.shape) != (101,):
            raise OptionError(f"quantiles has shape {tuple(quantiles.shape)}; pass 101 quantiles if denoising=True.")
        self.length_quantiles.copy_(quantiles)

    @torch.no_grad()
    def init_token_prior(self, token_counts: torch.Tensor) -> None:
        """Initialize the gene prediction from token counts (V,); unused in mode ``"vector"``."""
        if self.token_prior is not None:
            smoothed = token_counts.double() + 1.0
            self.token_prior.copy_((smoothed / smoothed.sum()).log())

    def init_value_prior(self, mean: float) -> None:
        """Initialize the prediction of masked values at the mean of the values to predict."""
        if self.value_head is not None:
            nn.init.constant_(self.value_head.decoder.bias, mean)

    @torch.no_grad()
    def generate(
        self,
        n_cells: int,
        prompt: Mapping[str, torch.Tensor] | None = None,
        *,
        n_tokens: int | torch.Tensor | None = None,
        n_steps: int = 16,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        first_cell: int = 0,
        first_id: int | None = None,
        mask_id: int = MASK_ID,
    ) -> GeneratedCells:
        """Generate cells by iterative unmasking.

        At first, all tokens except the prompt are masked. In each step a gene is sampled for every masked token, and
        the most confident genes are kept, so that the number of masked tokens decreases evenly over the steps. The
        values of these genes are predicted in the next step. Each gene occurs at most once in a cell. The random
        numbers of a cell depend only on `seed` and its index.

        Parameters
        ----------
        n_cells
            Number of cells B.
        prompt
            Known part of the cells: ``input_ids``, (P,) for all cells or (B, P), and optionally ``values`` and
            ``attention_mask`` of the same shape. ``values`` are NaN for values to predict; without ``values``, all
            values are predicted.
        n_tokens
            Number of tokens for all cells, or for each cell, int64, (B,), including the prompt and `first_id`. If None,
            samples from the lengths that the model was trained on.
        n_steps
            Number of unmasking steps; a few more are used if sampled genes collide.
        temperature
            Divisor of the logits, and factor of the noise in the order of unmasking.
        top_k
            Number of most likely genes to sample from.
        seed
            Random seed.
        first_cell
            Index of the first cell, if cells are generated in several calls.
        first_id
            Special token that all cells begin with, if the tokenizer adds one.
        mask_id
            Id of MASK.

        Raises
        ------
        OptionError
            If the model was created without ``denoising=True``, or an argument cannot be used.
        """
        check_drawing(n_cells, temperature, seed, top_k)
        check_count("n_steps", n_steps, "steps")
        if not self.denoising:
            raise OptionError(
                "a model with denoising=False has no head to generate cells; train a model with the objective "
                "'masked_diffusion'."
            )
        draws = [generator_of(f"unmask {seed} {first_cell + cell}") for cell in range(n_cells)]
        ids_bp, values_bp, mask_bp = self._begin(n_cells, prompt, first_id, mask_id)
        lengths_b = self._lengths(n_tokens, mask_bp.sum(dim=1), draws, first_id)
        device = self.gene_embedding.weight.device
        cells = _Cells(self, ids_bp, values_bp, mask_bp, lengths_b.to(device), mask_id)
        step = 0
        with evaluating(self):
            while cells.unfinished():
                cells.look()
                if cells.no_gene_bs.any():
                    random = _random_numbers(draws, cells.no_gene_bs.cpu(), lengths_b).to(device)
                    cells.unmask(min(1.0, (step + 1) / n_steps), random, temperature, top_k)
                step += 1
        return cells.tokens()

    def _begin(
        self, n_cells: int, prompt: Mapping[str, torch.Tensor] | None, first_id: int | None, mask_id: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the ids, values (NaN for values to sample) and mask of the prompts, (B, P)."""
        if not 0 < mask_id < self.n_special:
            raise OptionError(f"mask_id={mask_id} is not one of the {self.n_special} special tokens; pass the MASK id.")
        ids, values, mask, first = read_prompt(prompt, n_cells, first_id, self.n_special, self.vocab_size)
        known = mask & ~first
        wrong = known & (values.isinf() | (values < 0))
        if bool(wrong.any()):
            value = float(values[wrong][0])
            raise OptionError(f"prompt contains the value {value}; pass log1p of counts, or NaN for values to sample.")
        width = int(mask.sum(dim=1).max()) if mask.numel() else 0
        return (ids.masked_fill(~mask, PAD_ID)[:, :width], values.masked_fill(~known, 0.0)[:, :width], mask[:, :width])

    def _lengths(
        self,
        n_tokens: int | torch.Tensor | None,
        given_b: torch.Tensor,
        draws: list[torch.Generator],
        first_id: int | None,
    ) -> torch.Tensor:
        """Return the number of tokens of each cell, int64, (B,)."""
        most, n_given = min(self.num_genes + (first_id is not None), self.max_generated), int(given_b.max())
        if n_given > most:
            raise OptionError(f"prompt has {n_given} tokens, but the model accepts at most {most}; pass fewer tokens.")
        if n_tokens is None:
            if self.length_quantiles is None or not bool(self.length_quantiles.any()):
                raise OptionError(
                    "n_tokens=None requires a trained model, which contains the lengths of the training cells; pass "
                    "n_tokens, or train the model."
                )
            places = torch.stack([torch.rand((), generator=draw, dtype=torch.float64) for draw in draws]) * 100
            low = places.floor().long().clamp(max=99)
            quantiles = self.length_quantiles.double().cpu()
            lengths = torch.lerp(quantiles[low], quantiles[low + 1], places - low).round().long()
            return torch.maximum(lengths.clamp(min=1, max=most), given_b)
        lengths = number_of_each("n_tokens", n_tokens, len(draws)).cpu()
        wrong = lengths[(lengths < given_b.clamp(min=1)) | (lengths > most)]
        if len(wrong):
            raise OptionError(
                f"n_tokens={int(wrong[0])} does not fit: prompt has {n_given} tokens and the model accepts at most "
                f"{most}; pass numbers from {max(n_given, 1)} to {most}."
            )
        return lengths


def _sum(losses: dict[str, torch.Tensor], beta: float | torch.Tensor) -> torch.Tensor | None:
    """Return the sum of the losses, with the KL divergence weighted by `beta`, or None without losses."""
    if not losses:
        return None
    task = torch.stack([part for name, part in losses.items() if name != "kl"]).sum()
    return task + beta * losses["kl"] if "kl" in losses else task


class _Cells:
    """Cells during iterative unmasking."""

    def __init__(
        self,
        model: ScDiVaModel,
        ids_bp: torch.Tensor,
        values_bp: torch.Tensor,
        mask_bp: torch.Tensor,
        lengths_b: torch.Tensor,
        mask_id: int,
    ) -> None:
        self.model = model
        device = lengths_b.device
        more = (0, int(lengths_b.max()) - ids_bp.shape[1])
        given_bs = F.pad(mask_bp.to(device), more)
        places = torch.arange(given_bs.shape[1], device=device)
        self.tokens_bs = places < lengths_b.unsqueeze(1)
        self.no_gene_bs = self.tokens_bs & ~given_bs
        self.ids_bs = F.pad(ids_bp.to(device), more).masked_fill(self.no_gene_bs, mask_id)
        values_bs = F.pad(values_bp.to(device), more)
        self.no_value_bs = self.no_gene_bs | (given_bs & values_bs.isnan())
        self.values_bs = values_bs.masked_fill(self.no_value_bs, 0.0)
        self.n_hidden_b = self.no_gene_bs.sum(dim=1)

    def unfinished(self) -> bool:
        """Return whether any gene or value is still masked."""
        return bool((self.no_gene_bs | self.no_value_bs).any())

    def look(self) -> None:
        """Run the model, and set the predicted values of known genes."""
        self.seen: Seen = what_is_seen(
            self.ids_bs, self.tokens_bs, self.values_bs, self.no_gene_bs, self.no_value_bs, self.model.n_special
        )
        self.states = self.model.states(self.seen, table=True)
        known_bs = self.no_value_bs & ~self.no_gene_bs
        if known_bs.any():
            self.values_bs[known_bs] = self.model.values_of(self.states, self.ids_bs, known_bs).clamp(min=0.0)
            self.no_value_bs = self.no_value_bs & ~known_bs

    def unmask(self, share: float, random_bs2: torch.Tensor, temperature: float, top_k: int | None) -> None:
        """Sample a gene for every masked token, and keep the most confident until a fraction `share` is unmasked."""
        gene_m, log_share_m = self._drawn(random_bs2[..., 0][self.no_gene_bs], temperature, top_k)
        gene_bs = self.ids_bs.masked_scatter(self.no_gene_bs, gene_m)
        # Gumbel noise that fades, as in MaskGIT (Chang et al. 2022): at first nearly any, at the end the most
        # confident.
        noise_bs = -(-random_bs2[..., 1].clamp(min=1e-12).log()).log()
        sure_bs = torch.full_like(noise_bs, float("-inf")).masked_scatter(self.no_gene_bs, log_share_m)
        sure_bs = sure_bs + temperature * (1.0 - share) * noise_bs
        order_bs = sure_bs.argsort(dim=1, descending=True, stable=True)
        hidden_bs = self.no_gene_bs.gather(1, order_bs)
        new_bs = hidden_bs & first_of_its_kind(gene_bs.gather(1, order_bs).masked_fill(~hidden_bs, -1))
        left_b = (self.n_hidden_b.double() * (1.0 - share)).floor().long()
        n_now_b1 = (self.no_gene_bs.sum(dim=1) - left_b).unsqueeze(1)
        new_bs = new_bs & (new_bs.long().cumsum(dim=1) <= n_now_b1)
        new_bs = torch.zeros_like(new_bs).scatter(1, order_bs, new_bs)
        self.ids_bs = torch.where(new_bs, gene_bs, self.ids_bs)
        self.no_gene_bs = self.no_gene_bs & ~new_bs

    def _drawn(
        self, random_m: torch.Tensor, temperature: float, top_k: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a gene (int64) and its log probability (float64) for each masked token, both of shape (M,)."""
        table_vh = self.states.table
        blocked_bv = self.seen.blocked(len(table_vh), self.model.n_special)
        cells_m = self.no_gene_bs.nonzero()[:, 0]
        states_mh = self.states.tokens[self.no_gene_bs]
        genes, shares = [], []
        step = max(1, _VALUES_AT_ONCE // len(table_vh))
        for start in range(0, len(states_mh), step):
            part = slice(start, start + step)
            logits = scores_of(states_mh[part], table_vh, self.model.token_prior)
            share_mv = softmax(logits, ~blocked_bv[cells_m[part]], temperature, top_k)
            genes.append(draw(share_mv, random_m[part]))
            shares.append(share_mv.gather(1, genes[-1].unsqueeze(1)).squeeze(1).log())
        return torch.cat(genes), torch.cat(shares)

    def tokens(self) -> GeneratedCells:
        """Return the generated cells."""
        ids = self.ids_bs.masked_fill(~self.tokens_bs, PAD_ID)
        return GeneratedCells(ids, self.values_bs.float(), torch.zeros_like(ids), self.tokens_bs)


def _random_numbers(draws: list[torch.Generator], hidden_bs: torch.Tensor, lengths_b: torch.Tensor) -> torch.Tensor:
    """Return two random numbers in [0, 1) for each token of cells with masked tokens, float64, (B, S, 2)."""
    numbers = torch.zeros((*hidden_bs.shape, 2), dtype=torch.float64)
    for cell, generator in enumerate(draws):
        if hidden_bs[cell].any():
            n_tokens = int(lengths_b[cell])
            numbers[cell, :n_tokens] = torch.rand((n_tokens, 2), generator=generator, dtype=torch.float64)
    return numbers.clamp_(max=LARGEST)


@dataclass(frozen=True, kw_only=True)
class ScDiVaConfig:
    """Sizes and options of a ScDiVa model, with the names used in the publication.

    Parameters
    ----------
    num_genes
        Number of genes G.
    hidden_size, num_hidden_layers, num_attention_heads
        Width H, number of layers and number of heads of the encoder.
    intermediate_size
        Width of the feed-forward layers. If None, uses four times `hidden_size`.
    latent_dim
        Width L of the latent variable.
    num_cell_types
        Number of cell types in the annotation head; 0 for no annotation head.
    n_batches
        Number of batches on which the expression decoder is conditioned; 0 for no batches.
    dropout
        Dropout rate on embeddings and residual branches.
    layer_norm_eps
        Epsilon of the norms.
    mode, norm_style, max_tokens, norm, activation, bias, final_norm, variational, denoising, position_embedding
        See :class:`scforge.models.ScDiVaModel`.

    Examples
    --------
    >>> import torch
    >>> with torch.device("meta"):
    ...     model = ScDiVaConfig.base(num_cell_types=100, mode="vector").build()
    >>> model.num_parameters()
    343921540
    """

    num_genes: int = 20_000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int | None = None
    latent_dim: int = 128
    num_cell_types: int = 0
    n_batches: int = 0
    dropout: float = 0.1
    layer_norm_eps: float = 1e-12
    mode: str = "tokens"
    norm_style: str = "post"
    max_tokens: int = 1200
    norm: str = "layer"
    activation: str = "gelu"
    bias: bool = True
    final_norm: bool | None = None
    variational: bool = True
    denoising: bool = False
    position_embedding: str = "none"

    @classmethod
    def base(cls, **changes: Any) -> ScDiVaConfig:
        """Return the base size, nominally 350 million parameters, updated with `changes`.

        Parameters
        ----------
        **changes
            Fields to override.
        """
        return cls(**changes)

    @classmethod
    def large(cls, **changes: Any) -> ScDiVaConfig:
        """Return the large size, nominally 1.5 billion parameters (1.74 with feed-forward layers four times as wide).

        `intermediate_size` of three times `hidden_size` makes it 1.47 billion.

        Parameters
        ----------
        **changes
            Fields to override.

        Examples
        --------
        >>> ScDiVaConfig.large(num_cell_types=10).num_hidden_layers
        32
        """
        sizes = {"num_genes": 30_000, "hidden_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 32}
        return cls(**{**sizes, "latent_dim": 256, **changes})

    def options(self) -> dict[str, Any]:
        """Return the arguments of :class:`scforge.models.ScDiVaModel`, with the usual special tokens."""
        options = asdict(self)
        renamed = {
            "hidden_size": "hidden_dim",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "intermediate_size": "ffn_dim",
        }
        options = {renamed.get(name, name): value for name, value in options.items() if name != "num_genes"}
        return {"vocab_size": self.num_genes + N_SPECIAL, **options}

    def build(self) -> ScDiVaModel:
        """Create the model."""
        return ScDiVaModel(**self.options())
