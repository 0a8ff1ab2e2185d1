"""A bidirectional transformer over gene tokens, trained to predict masked genes.

Shapes: B cells, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scforge._checks import check_bool, check_choice, check_positive
from scforge._constants import IGNORE_LABEL
from scforge.errors import OptionError
from scforge.models._utils import Architecture, init_weights
from scforge.models.components.attention import check_shapes, token_positions
from scforge.models.components.config import TransformerConfig
from scforge.models.components.cross_entropy import token_loss
from scforge.models.components.embeddings import GeneExpressionEmbedding
from scforge.models.components.heads import (
    BinPredictionHead,
    DeepExpressionHead,
    ExpressionPredictionHead,
    MaskedGenePredictionHead,
)
from scforge.models.components.pooling import POOLINGS, depth_pool
from scforge.models.components.transformer import StackOutput, TransformerStack
from scforge.models.protocol import ModelOutput
from scforge.models.registry import register_model


@register_model("transformer_encoder")
class TransformerEncoder(Architecture):
    """BERT-style encoder: gene embedding, transformer layers, and a head for masked genes.

    Parameters
    ----------
    vocab_size
        Number of tokens V, including special tokens.
    hidden_dim
        Width H; a multiple of `num_heads`.
    num_layers
        Number of transformer blocks.
    num_heads
        Number of attention heads.
    ffn_dim
        Width of the feed-forward layers. If None, uses ``4 * hidden_dim``.
    dropout
        Dropout rate on embeddings and residual branches.
    max_seq_len
        Maximum number of tokens per cell.
    pooling
        ``"cls"`` (state of the first token), ``"mean"`` (mean over tokens), ``"genes"`` (mean over tokens other than
        special tokens, see `n_special`), ``"last"`` (state of the last token) or ``"depths"`` (four vectors, as in
        scFoundation, see :func:`scforge.models.components.pooling.depth_pool`).
    activation
        ``"gelu"``, ``"relu"`` or ``"silu"``.
    use_expression_values
        Whether to add the projected expression value of each token.
    layer_norm_eps
        Epsilon of the layer norms.
    gene_vectors
        Options to embed genes with pretrained vectors: a dict with the arguments ``dim``, ``learned`` and ``frozen`` of
        :class:`scforge.models.components.GeneVectorEmbedding`; ``Encoder`` sets it for tokenizers with gene vectors.
    position_embedding
        ``"learned"``, ``"rotary"``, or ``"none"``, in which case the order of the tokens does not matter.
    norm_first
        Whether to use pre-norm layers and a final norm instead of post-norm layers.
    tie_head
        Whether to use the gene embedding as the last layer of the head.
    expression_head
        Head that also predicts the expression of masked tokens: ``"value"`` (mean squared error), ``"deep"`` (the same
        with the three layers of scGPT) or ``"bin"`` (cross entropy).
    n_bins
        Number of expression bins for ``"bin"``.
    expression_loss_weight
        Weight of the expression loss relative to the gene loss.
    gradient_checkpointing
        Whether to recompute the activations of each layer in the backward pass, which takes less memory and more time.
    unpad
        Whether to remove padding from the computation. If None, removes it if this is faster.
    gene_head, head_activation
        Whether there is a head for masked genes, and its activation.
    value_encoder, n_value_bins, value_bins_alpha, embedding_norm
        Options of the gene and value embedding; see :class:`scforge.models.components.GeneExpressionEmbedding`.
    n_special
        Number of special tokens; their ids are below this number.
    special_value, mask_value
        Values of special tokens and of masked tokens, which replace the values in the batch (scGPT: -2 and -1). If
        None, the values are unchanged.
    final_norm
        Whether a norm follows the last layer. If None, a norm is added to pre-norm layers.
    embedding_layer
        Number of layers before the last layer at which the embedding is pooled (1 for the published Geneformer
        embeddings).
    normalize_embedding
        Whether to divide the embedding by its length (as for the published scGPT embeddings).

    Examples
    --------
    >>> model = TransformerEncoder(vocab_size=50, hidden_dim=8, num_layers=1, num_heads=2)
    >>> ids, mask = torch.randint(4, 50, (2, 5)), torch.ones(2, 5)
    >>> output = model(ids, mask, labels=ids)
    >>> output.loss.shape, output.logits.shape, output.embeddings.shape
    (torch.Size([]), torch.Size([2, 5, 50]), torch.Size([2, 8]))
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int,
        num_layers: int,
        num_heads: int,
        ffn_dim: int | None = None,
        dropout: float = 0.1,
        max_seq_len: int = 2048,
        pooling: str = "cls",
        activation: str = "gelu",
        use_expression_values: bool = True,
        layer_norm_eps: float = 1e-12,
        gene_vectors: dict[str, Any] | None = None,
        *,
        position_embedding: str = "learned",
        norm_first: bool = True,
        tie_head: bool = False,
        expression_head: str | None = None,
        n_bins: int | None = None,
        expression_loss_weight: float = 1.0,
        gradient_checkpointing: bool = False,
        unpad: bool | None = None,
        gene_head: bool = True,
        head_activation: str = "gelu",
        value_encoder: str = "linear",
        n_value_bins: int | None = None,
        value_bins_alpha: float = 1.0,
        embedding_norm: str = "sum",
        n_special: int = 0,
        special_value: float | None = None,
        mask_value: float | None = None,
        final_norm: bool | None = None,
        embedding_layer: int = 0,
        normalize_embedding: bool = False,
    ) -> None:
        super().__init__()
        check_choice("pooling", pooling, sorted([*POOLINGS, "depths", "genes"]))
        if expression_head is not None:
            check_choice("expression_head", expression_head, ["value", "deep", "bin"])
        if (expression_head == "bin") != (n_bins is not None):
            raise OptionError(
                f"does not work with expression_head={expression_head!r}; set n_bins if and only if "
                "expression_head='bin'.",
                n_bins=n_bins,
            )
        if tie_head and (gene_vectors is not None or not gene_head):
            raise OptionError(
                "requires a learned gene embedding and a gene head that shares its weights, and does "
                "not work with gene_vectors or gene_head=False; omit tie_head, or change the other option.",
                tie_head=True,
            )
        if embedding_layer >= num_layers:
            raise OptionError(
                f", but there are only {num_layers} layers; pass a smaller number.", embedding_layer=embedding_layer
            )
        if not n_special and (pooling in ("depths", "genes") or special_value is not None):
            raise OptionError(
                f"with special_value={special_value!r} requires n_special, the number of special tokens.",
                pooling=pooling,
            )
        config = TransformerConfig(
            hidden_dim=hidden_dim,
            num_layers=num_layers,
            num_heads=num_heads,
            ffn_dim=ffn_dim,
            dropout=dropout,
            activation=activation,
            layer_norm_eps=layer_norm_eps,
            norm_first=norm_first,
            final_norm=final_norm,
            rotary=position_embedding == "rotary",
            gradient_checkpointing=gradient_checkpointing,
            unpad=unpad,
        )
        self.vocab_size = vocab_size
        self.hidden_dim = hidden_dim
        self.pooling = pooling
        self.n_special = n_special
        self.special_value = special_value
        self.mask_value = mask_value
        self.embedding_layer = embedding_layer
        self.normalize_embedding = check_bool("normalize_embedding", normalize_embedding)
        self.tie_head = tie_head
        self.expression_loss_weight = check_positive("expression_loss_weight", expression_loss_weight, or_zero=True)
        self.uses_order = position_embedding != "none" or pooling in ("last", "depths")
        self.embedding = GeneExpressionEmbedding(
            vocab_size=vocab_size,
            hidden_dim=hidden_dim,
            max_seq_len=max_seq_len,
            dropout=dropout,
            use_expression_values=use_expression_values,
            layer_norm_eps=layer_norm_eps,
            gene_vectors=gene_vectors,
            position_embedding=position_embedding,
            value_encoder=value_encoder,
            n_value_bins=n_value_bins,
            value_bins_alpha=value_bins_alpha,
            embedding_norm=embedding_norm,
        )
        self.encoder = TransformerStack(config)
        self.head: MaskedGenePredictionHead | None = None
        if gene_head:
            self.head = MaskedGenePredictionHead(
                hidden_dim, vocab_size, layer_norm_eps, own_weight=not tie_head, activation=head_activation
            )
        self.expression_head: ExpressionPredictionHead | BinPredictionHead | None = None
        if expression_head in ("value", "deep"):
            kind = DeepExpressionHead if expression_head == "deep" else ExpressionPredictionHead
            self.expression_head = kind(hidden_dim)
        if n_bins is not None:
            self.expression_head = BinPredictionHead(hidden_dim, n_bins, layer_norm_eps)
        self.apply(init_weights)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        attention_bias: torch.Tensor | None = None,
        masked_positions: torch.Tensor | None = None,
        value_labels: torch.Tensor | None = None,
        bin_labels: torch.Tensor | None = None,
        return_logits: bool = True,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> ModelOutput:
        """Predict the masked genes of a batch, and also their expression with an expression head.

        Parameters
        ----------
        input_ids
            Token ids, shape (B, S).
        attention_mask
            Nonzero for tokens, bool, int or float, shape (B, S).
        values
            Expression values, shape (B, S).
        labels
            Token ids to predict, shape (B, S); -100 at positions without a target.
        attention_bias
            Value to add to the attention scores of each token as a key, shape (B, S).
        masked_positions, value_labels
            Positions of the values to predict (bool), and the values, shape (B, S); for ``expression_head="value"`` and
            ``"deep"``.
        bin_labels
            Bins to predict, shape (B, S); -100 at positions without a target; for ``expression_head="bin"``.
        return_logits
            If false, heads run only at positions with targets, and ``logits`` and ``expression`` are None.
        output_hidden_states, output_attentions
            Whether to return the states after each layer, and the attention weights.
        **kwargs
            Other keys of the batch, which are ignored.

        Returns
        -------
        ``loss`` (if there are targets), ``logits`` (B, S, V), ``embeddings`` (B, H) and ``expression``, which contains
        values (B, S) or bin logits (B, S, n_bins).
        """
        out = self._states(
            input_ids,
            attention_mask,
            values,
            attention_bias,
            masked_positions,
            output_hidden_states=output_hidden_states or self.embedding_layer > 0,
            output_attentions=output_attentions,
        )
        tokens_bs = attention_mask != 0
        if labels is not None:
            labels = labels.masked_fill(~tokens_bs, IGNORE_LABEL)
        loss = logits = None
        if self.head is not None:
            weight = self.embedding.gene_embedding.weight if self.tie_head else None
            loss, logits = token_loss(self.head, out.hidden, labels, return_logits=return_logits, weight_vh=weight)
        expression = None
        if self.expression_head is not None:
            further = None
            if isinstance(self.expression_head, BinPredictionHead):
                if bin_labels is not None:
                    bins_bs = bin_labels.masked_fill(~tokens_bs, IGNORE_LABEL)
                    further, _ = token_loss(self.expression_head, out.hidden, bins_bs, return_logits=False)
            elif masked_positions is not None and value_labels is not None:
                chosen = (masked_positions != 0) & tokens_bs
                error = self.expression_head(out.hidden[chosen]).float() - value_labels[chosen].float()
                further = error.square().sum() / max(1, len(error))
            if further is not None:
                further = self.expression_loss_weight * further
                loss = further if loss is None else loss + further
            expression = self.expression_head(out.hidden) if return_logits else None
        return ModelOutput(
            loss=loss,
            logits=logits,
            embeddings=self._pool(out, input_ids, attention_mask),
            hidden_states=out.hidden_states if output_hidden_states else None,
            attentions=out.attentions,
            expression=expression,
        )

    def encode(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        *,
        attention_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return cell embeddings, shape (B, H). For the arguments, see :meth:`forward`."""
        further = self.embedding_layer > 0
        out = self._states(input_ids, attention_mask, values, attention_bias, output_hidden_states=further)
        return self._pool(out, input_ids, attention_mask)

    def _states(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None,
        attention_bias: torch.Tensor | None,
        masked_positions: torch.Tensor | None = None,
        **wanted: bool,
    ) -> StackOutput:
        check_shapes(input_ids.shape, attention_mask=attention_mask, values=values, attention_bias=attention_bias)
        tokens_bs = attention_mask != 0
        if values is None and self.special_value is not None:
            values = torch.zeros_like(input_ids, dtype=torch.float32)
        if values is not None:
            if self.special_value is not None:
                values = values.masked_fill(input_ids < self.n_special, self.special_value)
            if self.mask_value is not None and masked_positions is not None:
                values = values.masked_fill(masked_positions != 0, self.mask_value)
            values = values.masked_fill(~tokens_bs, 0)
        embedded_bsh = self.embedding(input_ids, values, token_positions(tokens_bs))
        return self.encoder(embedded_bsh, attention_mask, attention_bias=attention_bias, **wanted)

    def _pool(self, out: StackOutput, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden_bsh = out.hidden
        if self.embedding_layer and out.hidden_states is not None:
            hidden_bsh = out.hidden_states[-1 - self.embedding_layer]
        genes_bs = (attention_mask != 0) & (input_ids >= self.n_special)
        if self.pooling == "depths":
            pooled_bh = depth_pool(hidden_bsh, attention_mask, genes_bs)
        elif self.pooling == "genes":
            pooled_bh = POOLINGS["mean"](hidden_bsh, genes_bs)
        else:
            pooled_bh = POOLINGS[self.pooling](hidden_bsh, attention_mask)
        return nn.functional.normalize(pooled_bh, dim=-1) if self.normalize_embedding else pooled_bh

    def init_token_prior(self, token_counts: torch.Tensor) -> None:
        """Initialize the head from `token_counts`, (V,); see :meth:`MaskedGenePredictionHead.init_bias`."""
        if self.head is not None:
            self.head.init_bias(token_counts)

    def init_value_prior(self, mean: float) -> None:
        """Initialize an expression head for values at the mean of the values to predict."""
        if isinstance(self.expression_head, ExpressionPredictionHead):
            nn.init.constant_(self.expression_head.decoder.bias, mean)
