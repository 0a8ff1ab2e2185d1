"""A masked autoencoder of genes and their values, in which the encoder receives only visible tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_choice
from scforge._constants import IGNORE_LABEL
from scforge.errors import OptionError
from scforge.models._utils import Architecture, init_weights
from scforge.models.components.attention import check_shapes, put_back_weights, token_positions
from scforge.models.components.config import TransformerConfig
from scforge.models.components.embeddings import GeneExpressionEmbedding
from scforge.models.components.heads import (
    COUNT_LOSSES,
    VALUE_LOSSES,
    ExpressionPredictionHead,
    check_count_targets,
    count_loss,
    expected_counts,
    log_counts,
    mean_expressed,
)
from scforge.models.components.pooling import POOLINGS
from scforge.models.components.transformer import StackOutput, TransformerStack
from scforge.models.protocol import ModelOutput
from scforge.models.registry import register_model


@dataclass(frozen=True)
class Layout:
    """Layout of the tokens of a batch inside the model.

    Attributes
    ----------
    visible, hidden
        Visible and masked tokens, bool, shape (B, S), in the order of the layout. `hidden` is None without masked
        tokens.
    positions
        Position of each token among the tokens of its cell in the batch, int64, shape (B, S), in the order of the
        layout.
    width
        Number of positions C at the start that contain all visible tokens.
    order
        Position of each token in the batch, int64, shape (B, S). If None, the order is the same as in the batch.
    """

    visible: torch.Tensor
    hidden: torch.Tensor | None
    positions: torch.Tensor
    width: int
    order: torch.Tensor | None = None

    def take(self, batch_bs: torch.Tensor) -> torch.Tensor:
        """Reorder token properties from batch order to layout order."""
        return batch_bs if self.order is None else batch_bs.gather(1, self.order)

    def put_back(self, x_bs: torch.Tensor) -> torch.Tensor:
        """Reorder token values from layout order to batch order."""
        return x_bs if self.order is None else torch.zeros_like(x_bs).scatter(1, self.order, x_bs)

    def put_back_states(self, states_bch: torch.Tensor) -> torch.Tensor:
        """Reorder states of the first C positions to batch order, (B, S, H), with zeros for masked tokens."""
        seen_bch = states_bch.masked_fill(~self.visible[:, : self.width, None], 0.0)
        if self.order is None:
            return seen_bch
        batch, seq = self.order.shape
        place_bch = self.order[:, : self.width, None].expand_as(seen_bch)
        return seen_bch.new_zeros(batch, seq, seen_bch.shape[-1]).scatter(1, place_bch, seen_bch)

    def furthest(self) -> int:
        """Return the maximum number of tokens up to the last visible token of a cell; synchronizes with a GPU."""
        return int(((self.positions + 1) * self.visible).amax()) if self.visible.numel() else 0


def lay_out(tokens_bs: torch.Tensor, hidden_bs: torch.Tensor | None = None) -> Layout:
    """Sort tokens: visible tokens first, then masked tokens, then padding, each in the order of the batch.

    Parameters
    ----------
    tokens_bs, hidden_bs
        Masks of all tokens and of masked tokens, bool, shape (B, S). Without `hidden_bs`, the order does not change.
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


@register_model("masked_autoencoder")
class MaskedAutoencoder(Architecture):
    """Asymmetric masked autoencoder for expression, after scFoundation (Hao et al. 2024) and He et al. (2022).

    The encoder runs only on visible tokens, so its cost depends on their number. The cell embedding is pooled from the
    resulting states. The decoder receives the encoder states of visible tokens and a learned mask token for each masked
    token, both combined with the gene embedding. It predicts the values of masked tokens.

    The decoder identifies tokens by their gene, not by their position. If positions are used, only the encoder receives
    them. In a ranking, the position of a masked token reveals its value. Move masked tokens to the end, as in the
    objective ``masked_value_prediction``, or use no positions, which is the default.

    Parameters
    ----------
    vocab_size
        Number of tokens V, including special tokens.
    encoder_dim, encoder_layers, encoder_heads
        Width H, number of blocks and number of attention heads of the encoder.
    decoder_dim, decoder_layers, decoder_heads
        The same for the decoder. If None, the width is half of `encoder_dim`, and the number of heads is
        `encoder_heads`.
    ffn_dim
        Width of the encoder's feed-forward layers. If None, uses ``4 * encoder_dim``. The decoder uses
        ``4 * decoder_dim``.
    dropout
        Dropout rate on embeddings and residual branches.
    max_seq_len
        Maximum number of tokens per cell in the encoder.
    pooling
        ``"mean"`` (mean over visible tokens), ``"cls"`` (state of the first visible token) or ``"last"`` (state of the
        last visible token).
    activation
        ``"gelu"``, ``"relu"`` or ``"silu"``.
    use_expression_values
        Whether to add the projected expression value of each visible token.
    layer_norm_eps
        Epsilon of the layer norms.
    gene_vectors
        Options to embed genes with pretrained vectors: a dict with the arguments ``dim``, ``learned`` and ``frozen`` of
        :class:`scforge.models.components.GeneVectorEmbedding`; ``Encoder`` sets it for tokenizers with gene vectors.
    position_embedding
        ``"none"``; ``"learned"`` adds a vector for the position in the cell; ``"rotary"`` counts positions among the
        visible tokens.
    norm_first
        Whether to use pre-norm layers and final norms instead of post-norm layers.
    gradient_checkpointing
        Whether to recompute the activations of each layer in the backward pass, which takes less memory and more time.
    unpad
        Whether to remove padding from the computation. If None, removes it if this is faster.
    value_loss
        ``"mse"``, or for counts ``"poisson"``, ``"negative_binomial"`` (with a dispersion for each gene),
        ``"zero_truncated_poisson"`` or ``"zero_truncated_negative_binomial"``. The truncated losses require that only
        expressed genes are tokens; see :func:`scforge.models.components.heads.count_loss`. With a count loss, the head
        predicts the logarithm of the rate divided by the mean count of the expressed visible tokens of the cell, and
        the encoder receives log1p of the counts.

    Examples
    --------
    >>> model = MaskedAutoencoder(vocab_size=50, encoder_dim=8, encoder_layers=1, decoder_layers=1, encoder_heads=2)
    >>> ids, mask = torch.randint(4, 50, (2, 5)), torch.ones(2, 5)
    >>> values, hidden = torch.rand(2, 5), torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 1, 1]])
    >>> output = model(ids, mask, values, masked_positions=hidden, value_labels=values)
    >>> output.loss.shape, output.logits.shape, output.embeddings.shape
    (torch.Size([]), torch.Size([2, 5]), torch.Size([2, 8]))
    """

    config_names: ClassVar[Mapping[str, str]] = {
        "hidden_dim": "encoder_dim",
        "num_layers": "encoder_layers",
        "num_heads": "encoder_heads",
    }

    labels_name_genes: ClassVar[bool] = True
    """Labels specify the masked gene, not the target."""

    def __init__(
        self,
        vocab_size: int,
        encoder_dim: int = 512,
        decoder_dim: int | None = None,
        encoder_layers: int = 12,
        decoder_layers: int = 4,
        encoder_heads: int = 8,
        decoder_heads: int | None = None,
        ffn_dim: int | None = None,
        dropout: float = 0.1,
        max_seq_len: int = 2048,
        pooling: str = "mean",
        activation: str = "gelu",
        use_expression_values: bool = True,
        layer_norm_eps: float = 1e-12,
        *,
        gene_vectors: dict[str, Any] | None = None,
        position_embedding: str = "none",
        norm_first: bool = True,
        gradient_checkpointing: bool = False,
        unpad: bool | None = None,
        value_loss: str = "mse",
    ) -> None:
        super().__init__()
        check_choice("pooling", pooling, sorted(POOLINGS))
        check_choice("value_loss", value_loss, list(VALUE_LOSSES))
        decoder_dim = encoder_dim // 2 if decoder_dim is None else decoder_dim
        decoder_heads = encoder_heads if decoder_heads is None else decoder_heads
        if decoder_dim < 1 or decoder_dim % decoder_heads:
            raise OptionError(
                f"is not divisible by decoder_heads={decoder_heads}; change one.", decoder_dim=decoder_dim
            )
        config = TransformerConfig(
            hidden_dim=encoder_dim,
            num_layers=encoder_layers,
            num_heads=encoder_heads,
            ffn_dim=ffn_dim,
            dropout=dropout,
            activation=activation,
            layer_norm_eps=layer_norm_eps,
            norm_first=norm_first,
            rotary=position_embedding == "rotary",
            gradient_checkpointing=gradient_checkpointing,
            unpad=unpad,
        )
        self.vocab_size = vocab_size
        self.encoder_dim = encoder_dim
        self.decoder_dim = decoder_dim
        self.pooling = pooling
        self.value_loss = value_loss
        self.uses_order = position_embedding != "none" or pooling == "last"
        self.embedding = GeneExpressionEmbedding(
            vocab_size=vocab_size,
            hidden_dim=encoder_dim,
            max_seq_len=max_seq_len,
            dropout=dropout,
            use_expression_values=use_expression_values,
            layer_norm_eps=layer_norm_eps,
            gene_vectors=gene_vectors,
            position_embedding=position_embedding,
        )
        self.encoder = TransformerStack(config)
        self.decoder_projection = nn.Linear(encoder_dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.empty(decoder_dim))
        # Gene embeddings start fifty times smaller than encoder states, and would be negligible compared with them.
        self.gene_norm = nn.LayerNorm(encoder_dim, eps=layer_norm_eps)
        self.gene_projection = nn.Linear(encoder_dim, decoder_dim)
        narrow: dict[str, Any] = {"hidden_dim": decoder_dim, "num_layers": decoder_layers, "num_heads": decoder_heads}
        self.decoder = TransformerStack(replace(config, ffn_dim=None, rotary=False, **narrow))
        self.head = ExpressionPredictionHead(decoder_dim)
        self.log_dispersion = nn.Embedding(vocab_size, 1) if "binomial" in value_loss else None
        self.apply(init_weights)
        nn.init.normal_(self.mask_token, std=0.02)

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
        return_logits: bool = True,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> ModelOutput:
        """Encode visible tokens and predict the values of masked tokens.

        Parameters
        ----------
        input_ids
            Token ids, shape (B, S).
        attention_mask
            Nonzero for tokens, bool, int or float, shape (B, S).
        values
            Expression values, shape (B, S). Values of masked tokens are used only as targets.
        labels
            Gene of each masked token if `input_ids` does not contain it, int64, shape (B, S); -100 elsewhere. If given,
            a loss is computed.
        attention_bias
            Values to add to the attention scores of each visible token as a key in the encoder, shape (B, S).
        masked_positions
            Nonzero for masked tokens, shape (B, S). If None, tokens with `labels` other than -100 are masked.
        value_labels
            Values to predict, shape (B, S). If None, uses `values`.
        return_logits
            If false, the head runs only at masked tokens, and ``logits`` is None.
        output_hidden_states, output_attentions
            Whether to return the encoder states after each layer, with zeros for masked tokens, and the attention
            weights.
        **kwargs
            Other keys of the batch, which are ignored.

        Returns
        -------
        ``loss`` (with masked tokens and `labels` or `value_labels`), ``logits`` (B, S), which are the predicted values
        (expected counts for a count loss), and ``embeddings`` (B, H) from the visible tokens.
        """
        check_shapes(
            input_ids.shape,
            attention_mask=attention_mask,
            values=values,
            labels=labels,
            attention_bias=attention_bias,
            masked_positions=masked_positions,
            value_labels=value_labels,
        )
        tokens_bs = attention_mask != 0
        masked_bs = None
        if masked_positions is not None:
            masked_bs = tokens_bs & (masked_positions != 0)
        elif labels is not None:
            masked_bs = tokens_bs & (labels != IGNORE_LABEL)
        layout = lay_out(tokens_bs, masked_bs)
        encoded = self._encode(
            layout, input_ids, values, attention_bias, keep=output_hidden_states, weights=output_attentions
        )
        target = values if value_labels is None else value_labels
        wanted = target is not None and masked_bs is not None and (labels is not None or value_labels is not None)
        loss = logits = None
        if wanted or return_logits:
            genes_bs = input_ids
            if labels is not None and masked_bs is not None:
                genes_bs = torch.where(masked_bs & (labels != IGNORE_LABEL), labels, input_ids)
            offset_b1 = None
            if self.value_loss in COUNT_LOSSES:
                seen_bs = torch.zeros_like(layout.visible) if values is None else layout.take(values)
                offset_b1 = mean_expressed(seen_bs, layout.visible).log()
            loss, logits = self._predict(
                layout,
                encoded.hidden,
                layout.take(genes_bs),
                offset_b1,
                layout.take(target) if wanted and target is not None else None,
                return_logits=return_logits,
            )
        states, weights = encoded.hidden_states, encoded.attentions
        return ModelOutput(
            loss=loss,
            logits=logits,
            embeddings=self._pool(layout, encoded.hidden),
            hidden_states=None if states is None else tuple(layout.put_back_states(state) for state in states),
            attentions=None
            if weights is None
            else tuple(put_back_weights(part, layout.put_back_states) for part in weights),
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
        """Return cell embeddings from all tokens, shape (B, H). For the arguments, see :meth:`forward`."""
        check_shapes(input_ids.shape, attention_mask=attention_mask, values=values, attention_bias=attention_bias)
        layout = lay_out(attention_mask != 0)
        return self._pool(layout, self._encode(layout, input_ids, values, attention_bias).hidden)

    def _encode(
        self,
        layout: Layout,
        input_ids: torch.Tensor,
        values: torch.Tensor | None,
        attention_bias: torch.Tensor | None,
        *,
        keep: bool = False,
        weights: bool = False,
    ) -> StackOutput:
        """Run the encoder on the visible tokens, (B, C, H)."""

        def seen(batch_bs: torch.Tensor | None) -> torch.Tensor | None:
            return None if batch_bs is None else layout.take(batch_bs)[:, : layout.width]

        visible_bc = layout.visible[:, : layout.width]
        values_bc = seen(values)
        if values_bc is not None and self.value_loss in COUNT_LOSSES:
            values_bc = log_counts(self.value_loss, values_bc, visible_bc)
        most = self.embedding.max_seq_len
        # In a batch that is narrow enough no token can stand too far behind, and a GPU need not be asked.
        learned = self.embedding.position_embedding is not None
        if learned and layout.visible.shape[1] > most and (furthest := layout.furthest()) > most:
            advice = "increase max_seq_len, or lower the tokenizer's max_len"
            raise OptionError(f"a cell has {furthest} tokens, but max_seq_len={most}; {advice}.")
        # Tokens that the encoder does not see may stand beyond the last position.
        positions_bc = layout.positions[:, : layout.width].clamp(max=most - 1)
        embedded = self.embedding(layout.take(input_ids)[:, : layout.width], values_bc, positions_bc)
        return self.encoder(
            embedded,
            visible_bc,
            attention_bias=seen(attention_bias),
            output_hidden_states=keep,
            output_attentions=weights,
        )

    def _pool(self, layout: Layout, encoded_bch: torch.Tensor) -> torch.Tensor:
        if not layout.width:
            return encoded_bch.sum(dim=1)
        return POOLINGS[self.pooling](encoded_bch, layout.visible[:, : layout.width])

    def _predict(
        self,
        layout: Layout,
        encoded_bch: torch.Tensor,
        genes_bs: torch.Tensor,
        offset_b1: torch.Tensor | None,
        target_bs: torch.Tensor | None,
        *,
        return_logits: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run the decoder; return the loss at positions with a target, and the logits in the order of the batch."""
        states_bsd = F.pad(self.decoder_projection(encoded_bch), (0, 0, 0, genes_bs.shape[1] - layout.width))
        states_bsd = torch.where(layout.visible.unsqueeze(-1), states_bsd, self.mask_token)
        identity_bsd = self.gene_projection(self.gene_norm(self.embedding.gene_embedding(genes_bs)))
        tokens_bs = layout.visible if layout.hidden is None else layout.visible | layout.hidden
        decoded_bsd = self.decoder(states_bsd + identity_bsd, tokens_bs).hidden
        chosen = layout.hidden
        raw_bs = self.head(decoded_bsd).float() if return_logits else None
        loss = logits = None
        if target_bs is not None and chosen is not None:
            raw_m = self.head(decoded_bsd[chosen]).float() if raw_bs is None else raw_bs[chosen]
            offset_m = None if offset_b1 is None else offset_b1.expand_as(target_bs)[chosen]
            target_m = target_bs[chosen].float()
            if offset_m is None:
                losses_m = (raw_m - target_m).square()
            else:
                if target_m.device.type == "cpu" and not torch.compiler.is_compiling():
                    check_count_targets(self.value_loss, target_m)
                losses_m = count_loss(self.value_loss, raw_m + offset_m, target_m, self._dispersion(genes_bs[chosen]))
            loss = losses_m.sum() / max(1, len(target_m))
        if raw_bs is not None:
            if offset_b1 is not None:
                raw_bs = expected_counts(self.value_loss, raw_bs + offset_b1, self._dispersion(genes_bs))
            logits = layout.put_back(raw_bs)
        return loss, logits

    def _dispersion(self, genes: torch.Tensor) -> torch.Tensor | None:
        return None if self.log_dispersion is None else self.log_dispersion(genes).squeeze(-1).float()

    def init_value_prior(self, mean: float) -> None:
        """Initialize the head at the mean of the values to predict.

        Count losses do not need this, because their predictions start at the mean of each cell.
        """
        if self.value_loss not in COUNT_LOSSES:
            nn.init.constant_(self.head.decoder.bias, mean)
