"""A causal transformer over gene tokens, trained to predict the next gene and its expression.

Shapes: B cells, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_count, check_positive
from scforge._constants import IGNORE_LABEL
from scforge.errors import OptionError
from scforge.models._utils import build_from_config, check_choice, count_parameters, init_weights
from scforge.models.components.attention import KeyValueCache, token_positions
from scforge.models.components.cross_entropy import token_loss
from scforge.models.components.embeddings import GeneExpressionEmbedding, between_rows, check_shapes, waves
from scforge.models.components.heads import BinPredictionHead, MaskedGenePredictionHead, cell_loss, of_next_token
from scforge.models.components.pooling import POOLINGS, last_pool
from scforge.models.components.transformer import TransformerStack
from scforge.models.generation import generate_cells
from scforge.models.protocol import ModelOutput
from scforge.models.registry import register_model

if TYPE_CHECKING:
    from scforge.config.schema import ModelConfig

__all__ = ["AutoregressiveTransformer"]

_READOUT = "cls"
_WEIGHTS = ("gene_loss_weight", "expression_loss_weight", "cell_loss_weight")
_INIT_STD = 0.5
"""Of what is added to, or stands beside, embeddings of unit variance; at 0.02 it would be hundreds of steps behind."""


class _States(NamedTuple):
    """States of the tokens (B, S, H), of the read-out (B, H) if there is one, and what else was asked for."""

    tokens: torch.Tensor
    readout: torch.Tensor | None
    hidden_states: tuple[torch.Tensor, ...] | None
    attentions: tuple[torch.Tensor, ...] | None


@register_model("autoregressive_transformer")
class AutoregressiveTransformer(nn.Module):
    """GPT-style decoder: each token sees those before it, and predicts the gene and the expression bin of the next.

    The state of token t knows the genes and values up to t. Two heads read it: one predicts the gene of token t + 1,
    the other its bin. Embeddings come from the same causal states as the predictions, so that :meth:`encode` computes
    what was trained.

    Parameters
    ----------
    vocab_size
        Number of tokens V, special tokens included.
    n_bins
        Number of expression bins, bin 0 for genes without counts included.
    hidden_dim
        Width H; a multiple of `num_heads`.
    num_layers
        Number of transformer blocks.
    num_heads
        Number of attention heads.
    ffn_dim
        Width of the feed-forward layers; ``4 * hidden_dim`` if None.
    dropout
        Dropout on embeddings and residual branches.
    max_seq_len
        Most tokens of a cell.
    pooling
        ``"mean"`` (mean over tokens), ``"last"`` (state of the last token) or ``"cls"``. As a CLS token in front would
        see nothing of the cell, a read-out stands behind the last token: a learned vector that sees all tokens, and
        that none sees. It learns to name the genes of the cell (see `cell_loss_weight`).
    activation
        ``"gelu"``, ``"relu"`` or ``"silu"``.
    use_expression_values
        Add the value of each token by a learned vector for each bin; between bins, what lies between their vectors.
    layer_norm_eps
        Epsilon of the layer norms.
    gene_loss_weight, expression_loss_weight
        Weights of the losses of the next gene and of its bin.
    gene_vectors
        Embed genes by pretrained vectors: the arguments ``dim``, ``learned`` and ``frozen`` of
        :class:`scforge.models.components.GeneVectorEmbedding`. ``Encoder`` sets it for tokenizers with gene vectors.
    cell_loss_weight
        With ``pooling="cls"``, weight of the mean of ``-log p(gene | read-out)`` over the labelled tokens of a cell.
    n_conditions
        Number of classes that cells may be conditioned on; see `condition` of :meth:`forward`.
    position_embedding
        ``"learned"``, ``"rotary"`` or ``"none"``; positions count the tokens of a cell, padding left out.
    norm_first
        Pre-norm layers and a final norm, rather than post-norm layers.
    gradient_checkpointing
        Compute each layer again in the backward pass rather than keep what it computed.
    unpad
        Whether padding is taken out of the computation; None does where it is worth its while.
    shift_labels
        If false, each token is compared with its own label and bin instead of those of the next one, and the loss has
        the two terms of the gene and its bin alone. Labels then have to be hidden in the input, as
        ``masked_gene_prediction`` does, the model does not generate, and ``"cls"`` is the first token.
    causal_encode
        If false, :meth:`encode` lets each token see all tokens, and ``"cls"`` is the first token. The attention is
        then another one than that of the training.

    Attributes
    ----------
    bin_values
        What the bins stand for in generated cells, float32, shape (n_bins,); 0, 1, 2, ... until
        :meth:`init_bin_values`.

    Examples
    --------
    >>> model = AutoregressiveTransformer(vocab_size=50, n_bins=6, hidden_dim=8, num_layers=1, num_heads=2)
    >>> ids, bins, mask = torch.randint(4, 50, (2, 5)), torch.randint(1, 6, (2, 5)), torch.ones(2, 5)
    >>> output = model(ids, mask, values=bins.float(), labels=ids, bin_ids=bins)
    >>> output.loss.shape, output.logits.shape, output.expression.shape
    (torch.Size([]), torch.Size([2, 5, 50]), torch.Size([2, 5, 6]))
    >>> model.generate(3, max_len=10).input_ids.shape
    torch.Size([3, 10])
    """

    uses_order = True
    predicts_next = True
    """The state of a token has not seen what it is to predict, so that labels may be the tokens themselves."""

    def __init__(
        self,
        vocab_size: int,
        n_bins: int = 51,
        hidden_dim: int = 512,
        num_layers: int = 12,
        num_heads: int = 8,
        ffn_dim: int | None = None,
        dropout: float = 0.1,
        max_seq_len: int = 2048,
        pooling: str = "cls",
        activation: str = "gelu",
        use_expression_values: bool = True,
        layer_norm_eps: float = 1e-12,
        gene_loss_weight: float = 1.0,
        expression_loss_weight: float = 1.0,
        *,
        gene_vectors: dict[str, Any] | None = None,
        cell_loss_weight: float = 1.0,
        n_conditions: int = 0,
        position_embedding: str = "learned",
        norm_first: bool = True,
        gradient_checkpointing: bool = False,
        unpad: bool | None = None,
        shift_labels: bool = True,
        causal_encode: bool = True,
    ) -> None:
        super().__init__()
        check_choice("pooling", pooling, sorted(POOLINGS))
        if pooling == _READOUT and causal_encode and not shift_labels:
            raise OptionError(
                "pooling='cls' with shift_labels=False is the first token, which sees no other in a causal encode; "
                "choose causal_encode=False or pooling='mean'."
            )
        self.shift_labels = self.predicts_next = shift_labels
        self.causal_encode = causal_encode
        has_readout = pooling == _READOUT and shift_labels
        check_count("n_bins", n_bins, "bins", least=2)
        check_count("n_conditions", n_conditions, "classes", least=0)
        self.gene_loss_weight = gene_loss_weight
        self.expression_loss_weight = expression_loss_weight
        self.cell_loss_weight = cell_loss_weight
        weights = {name: getattr(self, name) for name in _WEIGHTS[: 3 if has_readout else 2]}
        for name in _WEIGHTS:
            check_positive(name, getattr(self, name), or_zero=True)
        if not any(weights.values()):
            raise OptionError(f"{', '.join(weights)} are all 0, so that nothing would be learnt; raise one of them.")
        self.vocab_size = vocab_size
        self.n_bins = n_bins
        self.hidden_dim = hidden_dim
        self.max_seq_len = max_seq_len
        self.pooling = pooling
        self.n_conditions = n_conditions
        self.embedding = GeneExpressionEmbedding(
            vocab_size,
            hidden_dim,
            max_seq_len,
            dropout,
            False,
            layer_norm_eps,
            gene_vectors,
            position_embedding=position_embedding,
        )
        # A bin as a number would reach 50 times a projection: behind a layer norm little else is left, and of the bin
        # itself only that it is large (PBMC 3k, 8 epochs: loss of the next bin 2.1, and .24 by vectors of bins).
        self.bin_embedding = nn.Embedding(n_bins, hidden_dim) if use_expression_values else None
        self.condition_embedding = nn.Embedding(n_conditions, hidden_dim) if n_conditions else None
        self.readout = nn.Parameter(torch.empty(hidden_dim)) if has_readout else None
        self.decoder = TransformerStack(
            hidden_dim,
            num_layers,
            num_heads,
            ffn_dim,
            dropout,
            activation,
            layer_norm_eps,
            norm_first=norm_first,
            rotary=position_embedding == "rotary",
            gradient_checkpointing=gradient_checkpointing,
            unpad=unpad,
        )
        self.head = MaskedGenePredictionHead(hidden_dim, vocab_size, layer_norm_eps)
        self.bin_head = BinPredictionHead(hidden_dim, n_bins, layer_norm_eps)
        self.bin_values: torch.Tensor
        self.register_buffer("bin_values", torch.arange(n_bins, dtype=torch.float32))
        self.apply(init_weights)
        if self.bin_embedding is not None:
            with torch.no_grad():
                self.bin_embedding.weight.copy_(waves(n_bins, hidden_dim))
        for vectors in (self.readout, None if self.condition_embedding is None else self.condition_embedding.weight):
            if vectors is not None:
                nn.init.normal_(vectors, std=_INIT_STD)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        bin_ids: torch.Tensor | None = None,
        bin_labels: torch.Tensor | None = None,
        condition: torch.Tensor | None = None,
        attention_bias: torch.Tensor | None = None,
        return_logits: bool = True,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> ModelOutput:
        """Predict the next gene, and its bin, at each token of a batch.

        Labels stand where their tokens stand, and are shifted here: what a token predicts is compared with the label
        of the next token of its cell. The first token of a cell is predicted by none. (Unless ``shift_labels`` is
        false.)

        Parameters
        ----------
        input_ids
            Token ids, shape (B, S).
        attention_mask
            Bool, int or float of shape (B, S), nonzero for tokens.
        values
            Expression values, shape (B, S).
        labels
            Token ids to predict, aligned with `input_ids`, shape (B, S); -100 where there is nothing to predict.
        bin_ids, bin_labels
            Bins to predict, aligned with `input_ids`, shape (B, S), at the tokens that have a label; of the two
            `bin_labels` counts, where -100 is nothing to predict.
        condition
            Class of each cell, int64, shape (B,): 0 for none, else 1 to `n_conditions`. None is none for all. Its
            vector is added to the embedding of every token, so that no attention has to carry it to where it is used.
        attention_bias
            Number to add to the attention scores of each token as a key, shape (B, S).
        return_logits
            If false, heads run only where there is something to predict, and ``logits`` and ``expression`` are None.
        output_hidden_states, output_attentions
            Also return the states after each layer, and the attention weights, without the read-out's.
        **kwargs
            Other keys of the batch, ignored.

        Returns
        -------
        ``loss`` (with labels), ``logits`` (B, S, V) of the next gene, ``expression`` (B, S, n_bins), logits of its bin,
        and ``embeddings`` (B, H).
        """
        check_shapes(input_ids, labels=labels, bin_ids=bin_ids, bin_labels=bin_labels)
        wanted = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        states = self._states(input_ids, attention_mask, values, condition, attention_bias, **wanted)
        tokens_bs, next_labels, next_bins = attention_mask != 0, None, None
        if labels is not None:
            next_labels = self._targets(labels, tokens_bs)
            bins = bin_ids if bin_labels is None else bin_labels
            if bins is not None:
                next_bins = self._targets(bins, tokens_bs).masked_fill(next_labels == IGNORE_LABEL, IGNORE_LABEL)
        gene_loss, logits = token_loss(self.head, states.tokens, next_labels, return_logits=return_logits)
        bin_loss, bin_logits = token_loss(self.bin_head, states.tokens, next_bins, return_logits=return_logits)
        loss = None
        if gene_loss is not None and labels is not None:
            loss = self.gene_loss_weight * gene_loss
            if bin_loss is not None:
                loss = loss + self.expression_loss_weight * bin_loss
            if states.readout is not None and self.cell_loss_weight > 0:
                loss = loss + self.cell_loss_weight * cell_loss(self.head, states.readout, labels, tokens_bs)
        return ModelOutput(
            loss=loss,
            logits=logits,
            embeddings=self._pool(states, attention_mask),
            hidden_states=states.hidden_states,
            expression=bin_logits,
            attentions=states.attentions,
        )

    def encode(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        *,
        condition: torch.Tensor | None = None,
        attention_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return cell embeddings, shape (B, H). The arguments are those of :meth:`forward`."""
        causal = self.causal_encode
        states = self._states(input_ids, attention_mask, values, condition, attention_bias, causal=causal)
        return self._pool(states, attention_mask)

    generate = generate_cells

    def next_token(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor,
        cache: KeyValueCache,
        condition: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the next gene (B, V) and of its bin (B, n_bins) behind the last of further tokens.

        `input_ids`, `attention_mask` and `values`, shape (B, s), follow on those in `cache`, and are added to it;
        `condition` is as in :meth:`forward`. What comes behind a cell without further tokens means nothing.

        Raises
        ------
        OptionError
            If the model was made with ``shift_labels=False``.
        """
        if not self.shift_labels:
            raise OptionError("shift_labels=False predicts each token itself and not the next one; train with True.")
        tokens_bs = attention_mask != 0
        before_b = 0 if cache.tokens is None else cache.tokens.sum(dim=1, keepdim=True)
        hidden_bsh = self._embed(input_ids, tokens_bs, values, token_positions(tokens_bs) + before_b, condition)
        last_bh = last_pool(self.decoder(hidden_bsh, tokens_bs, causal=True, cache=cache).hidden, tokens_bs)
        return self.head(last_bh), self.bin_head(last_bh)

    def init_token_prior(self, token_counts: torch.Tensor) -> None:
        """Start the gene head at the frequencies of `token_counts`, see :meth:`MaskedGenePredictionHead.init_bias`."""
        self.head.init_bias(token_counts)

    @torch.no_grad()
    def init_bin_values(self, bin_values: torch.Tensor) -> None:
        """Say by `bin_values` what the bins stand for, e.g. their mean log1p CP10K; shape (n_bins,)."""
        if bin_values.shape != self.bin_values.shape:
            raise OptionError(f"bin_values has the shape {tuple(bin_values.shape)} but there are {self.n_bins} bins.")
        self.bin_values.copy_(bin_values)

    @classmethod
    def from_config(cls, config: ModelConfig) -> AutoregressiveTransformer:
        """Make the model that `config` describes; raises ``ValueError`` if ``config.vocab_size`` is None."""
        return build_from_config(cls, config)

    def num_parameters(self, *, trainable_only: bool = True) -> int:
        """Return the number of parameters; with `trainable_only` frozen ones do not count."""
        return count_parameters(self, trainable_only=trainable_only)

    def _states(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None,
        condition: torch.Tensor | None,
        attention_bias: torch.Tensor | None,
        *,
        causal: bool = True,
        **wanted: bool,
    ) -> _States:
        """Run the decoder, with the read-out as one more token behind all others where it is causal."""
        check_shapes(input_ids, attention_mask=attention_mask, values=values, attention_bias=attention_bias)
        if condition is not None and condition.shape != input_ids.shape[:1]:
            raise OptionError(
                f"condition has the shape {tuple(condition.shape)} for {len(input_ids)} cells; give one class for each."
            )
        n_tokens, tokens_bs = input_ids.shape[1], attention_mask != 0
        hidden_bsh = self._embed(input_ids, tokens_bs, values, token_positions(tokens_bs), condition)
        readout = self.readout if causal else None
        if readout is not None:
            # Behind the padding it sees the same tokens as right behind the last one; it has no position of its own.
            readout_b1h = readout.to(hidden_bsh.dtype).expand(hidden_bsh.shape[0], 1, -1)
            hidden_bsh = torch.cat([hidden_bsh, readout_b1h], dim=1)
            tokens_bs = F.pad(tokens_bs, (0, 1), value=True)
            attention_bias = None if attention_bias is None else F.pad(attention_bias, (0, 1))
        out = self.decoder(hidden_bsh, tokens_bs, causal=causal, attention_bias=attention_bias, **wanted)
        return _States(
            out.hidden[:, :n_tokens],
            None if readout is None else out.hidden[:, n_tokens],
            None if out.hidden_states is None else tuple(state[:, :n_tokens] for state in out.hidden_states),
            None if out.attentions is None else tuple(part[..., :n_tokens, :n_tokens] for part in out.attentions),
        )

    def _targets(self, targets_bs: torch.Tensor, tokens_bs: torch.Tensor) -> torch.Tensor:
        """Return what each token is compared with, -100 at padding."""
        if self.shift_labels:
            return of_next_token(targets_bs, tokens_bs)
        return targets_bs.masked_fill(~tokens_bs, IGNORE_LABEL)

    def _embed(
        self,
        input_ids: torch.Tensor,
        tokens_bs: torch.Tensor,
        values: torch.Tensor | None,
        positions_bs: torch.Tensor,
        condition: torch.Tensor | None,
    ) -> torch.Tensor:
        hidden_bsh = self.embedding(input_ids, positions=positions_bs)
        if self.bin_embedding is not None:
            values = torch.zeros_like(input_ids) if values is None else values.masked_fill(~tokens_bs, 0)
            hidden_bsh = hidden_bsh + between_rows(self.bin_embedding, values)
        if condition is None:
            return hidden_bsh
        if self.condition_embedding is None:
            if bool((condition != 0).any()):
                raise OptionError("condition names classes but n_conditions=0; make the model with n_conditions.")
            return hidden_bsh
        vectors_bh = self.condition_embedding((condition - 1).clamp(min=0)) * (condition > 0).unsqueeze(1)
        return hidden_bsh + vectors_bh.unsqueeze(1)

    def _pool(self, states: _States, attention_mask: torch.Tensor) -> torch.Tensor:
        if states.readout is not None:
            return states.readout
        return POOLINGS[self.pooling](states.tokens, attention_mask)
