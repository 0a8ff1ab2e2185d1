"""The body of ScDiVa: from tokens or profiles to the latent, and from the latent to cell types and expression.

Shapes: B cells, S tokens, K tokens that are attended to, G genes, H hidden, L latent, T cell types, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import torch
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_bool, check_count, check_share
from scforge._constants import N_SPECIAL, PAD_ID
from scforge.errors import DataError, OptionError
from scforge.models._utils import check_choice, count_parameters, evaluating
from scforge.models.components.dropout import Dropout
from scforge.models.components.heads import ExpressionPredictionHead
from scforge.models.components.transformer import TransformerStack
from scforge.models.scdiva_parts import (
    AnnotationHead,
    BatchIntegrationHead,
    GeneEmbedding,
    ValueEncoder,
    VariationalLayer,
    init_scdiva,
)
from scforge.models.scdiva_tokens import Seen, what_is_seen

__all__ = ["ScDiVaBody", "States"]

_TASKS = ["annotation", "batch_integration"]

_NEARLY_ZERO = 1e-2
"""Mean square of a vector after its norm, which is 1 unless what came in was about as small as the epsilon."""


class States(NamedTuple):
    """What the transformer makes of cells.

    ``readout``: states of LAT, (B, H). ``tokens``: states of the tokens, (B, S, H), zeros where none is attended to.
    ``attended``: where one is, bool, (B, S). ``table``: vectors of all tokens, (V, H), if asked for.
    ``hidden_states`` and ``attentions``: as in :class:`scforge.models.ModelOutput`.
    """

    readout: torch.Tensor
    tokens: torch.Tensor
    attended: torch.Tensor
    table: torch.Tensor | None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class ScDiVaBody(nn.Module):
    """All layers of :class:`scforge.models.ScDiVaModel`, and what they compute besides its loss."""

    gene_weights: torch.Tensor | None
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
        check_count("n_special", n_special, "special tokens")
        for argument, count, what in (
            ("max_tokens", max_tokens, "tokens"),
            ("num_cell_types", num_cell_types, "cell types"),
            ("n_batches", n_batches, "batches"),
        ):
            check_count(argument, count, what, least=0)
        if vocab_size <= n_special:
            raise OptionError(f"vocab_size={vocab_size} leaves no gene beside n_special={n_special}; raise it.")
        self.vocab_size, self.num_genes, self.n_special = vocab_size, vocab_size - n_special, n_special
        self.hidden_dim, self.latent_dim, self.max_tokens = hidden_dim, latent_dim, max_tokens
        self.mode = mode if max_tokens else "vector"
        self.num_cell_types, self.n_batches = num_cell_types, n_batches
        self.variational = check_bool("variational", variational)
        self.denoising = check_bool("denoising", denoising)
        tokens = self.mode == "tokens"
        self.uses_order = tokens and position_embedding == "rotary"
        self.gene_embedding = GeneEmbedding(self.num_genes, hidden_dim, dropout, layer_norm_eps, norm)
        self.special_embedding = nn.Embedding(n_special, hidden_dim) if tokens else None
        self.value_encoder = ValueEncoder(hidden_dim) if tokens else None
        self.dropout = Dropout(dropout)
        self.encoder = TransformerStack(
            hidden_dim,
            num_layers,
            num_heads,
            ffn_dim,
            dropout,
            activation,
            layer_norm_eps,
            norm_first=norm_style == "pre",
            rotary=position_embedding == "rotary",
            gradient_checkpointing=gradient_checkpointing,
            unpad=unpad,
            norm=norm,
            bias=bias,
            final_norm=final_norm,
        )
        self.variational_layer = VariationalLayer(hidden_dim, latent_dim, variational=variational)
        self.annotation_head = AnnotationHead(latent_dim, hidden_dim, num_cell_types) if num_cell_types else None
        self.batch_integration_head = BatchIntegrationHead(latent_dim, hidden_dim, self.num_genes, n_batches)
        self.value_head = ExpressionPredictionHead(hidden_dim) if denoising else None
        self.apply(init_scdiva)
        both = tokens and denoising
        self.hidden_value = nn.Parameter(nn.init.normal_(torch.empty(hidden_dim), std=0.02)) if both else None
        self.register_buffer("gene_weights", torch.ones(self.num_genes) if tokens else None)
        self.register_buffer("token_prior", torch.zeros(vocab_size) if tokens else None)
        self.register_buffer("length_quantiles", torch.zeros(101) if denoising else None)

    @overload
    def encode(
        self, input_ids: torch.Tensor, attention_mask: None = None, values: None = None
    ) -> dict[str, torch.Tensor]: ...

    @overload
    def encode(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor: ...

    def encode(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the cell embeddings of a batch of tokens, (B, L), or what :meth:`infer` returns of a profile."""
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

        In training the latent is drawn, in evaluation it is the mean. The variance is ``exp(logvar)``. The arguments
        are those of :meth:`forward`.
        """
        if attention_mask is None:
            readout = self._dense_states(input_ids)
        else:
            seen = self._seen(input_ids, attention_mask, values, masked_positions, masked_values)
            readout = self.states(seen).readout
        return dict(zip(("latent", "mu", "logvar"), self.variational_layer(readout), strict=True))

    def decode(self, latent: torch.Tensor, batch: torch.Tensor | int | None = None) -> torch.Tensor:
        """Return the expression of all genes, (B, G), of latents (B, L), in a batch, or in the mean of all (None)."""
        return self.batch_integration_head(latent, batch)

    def classify(self, latent: torch.Tensor) -> torch.Tensor:
        """Return logits of cell types, (B, T), of latents (B, L).

        Raises
        ------
        OptionError
            If the model has no annotation head.
        """
        if self.annotation_head is None:
            raise OptionError("the model has num_cell_types=0 and so no annotation head; make it with num_cell_types.")
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
        """Predict from the mean of the latent, without dropout and gradients.

        Parameters
        ----------
        input_ids
            Profile, float, (B, G), or with `attention_mask` and `values` token ids, (B, S).
        task
            ``"annotation"``: logits of cell types, (B, T); ``"batch_integration"``: expression, (B, G).
        batch
            Batch in which expression is wanted; None for the mean of all.
        """
        check_choice("task", task, _TASKS)
        with evaluating(self):
            mu = self.infer(input_ids, attention_mask, values, **kwargs)["mu"]
            return self.classify(mu) if task == "annotation" else self.decode(mu, batch)

    def token_table(self) -> torch.Tensor:
        """Return the vectors of all tokens after the norm, without a value, (V, H).

        In mode ``"vector"``, which has no special tokens, theirs are zeros.
        """
        genes = self.gene_embedding.weight + self.gene_embedding.bias
        if self.special_embedding is None:
            return F.pad(self.gene_embedding.norm(genes), (0, 0, self.n_special, 0))
        return self.gene_embedding.norm(torch.cat([self.special_embedding.weight, genes]))

    def _seen(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None,
        masked_positions: torch.Tensor | None = None,
        masked_values: torch.Tensor | None = None,
    ) -> Seen:
        return what_is_seen(input_ids, attention_mask, values, masked_positions, masked_values, self.n_special)

    def _summed(self, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted sum of all genes of which identity and value are seen, (B, H), and where it has none."""
        values_bs = seen.values.masked_fill(~(seen.has_gene & seen.has_value), 0.0)
        summed_bh = self.gene_embedding.bag((seen.ids - self.n_special).clamp(min=0), values_bs)
        return summed_bh, ~(values_bs != 0).any(dim=1, keepdim=True)

    def _readout(self, seen: Seen) -> torch.Tensor:
        """Return LAT, the sum after the norm, (B, H)."""
        assert self.special_embedding is not None
        summed_bh, nothing_b1 = self._summed(seen)
        # A norm of (nearly) zero would have gradients without bounds; the vector of padding is of no other use.
        summed_bh = summed_bh + nothing_b1 * self.special_embedding.weight[PAD_ID]
        return self.gene_embedding.dropout(self.gene_embedding.norm(summed_bh))

    def _alone(
        self, summed_bh: torch.Tensor, nothing_b1: torch.Tensor, *, output_hidden_states: bool = False
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        """Run the transformer on one vector a cell; return its state, (B, H), and if asked for those of the layers.

        Without a gene the vector is the bias, which starts at zero, where each norm has a gradient without bounds. So
        such a cell passes none to the bias, and while the norm leaves (nearly) zero none to the transformer either.
        """
        vector_bh = self.gene_embedding.norm(torch.where(nothing_b1, summed_bh.detach(), summed_bh))
        zero_b1 = nothing_b1 & (vector_bh.square().mean(dim=1, keepdim=True) < _NEARLY_ZERO)
        vector_b1h = self.gene_embedding.dropout(vector_bh).unsqueeze(1)
        out = self.encoder(vector_b1h, output_hidden_states=output_hidden_states)
        state_bh = out.hidden[:, 0]
        return torch.where(zero_b1, state_bh.detach(), state_bh), out.hidden_states

    def _embed(self, seen: Seen, table_vh: torch.Tensor | None) -> torch.Tensor:
        """Return the vectors of tokens, (B, K, H)."""
        assert self.special_embedding is not None
        assert self.value_encoder is not None
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
        """Run the transformer on tokens; `table`: also return the vectors of all tokens.

        Raises
        ------
        OptionError
            If attention weights are asked for in mode ``"vector"``.
        """
        # (An exported graph has to do for batches of all sizes.)
        many = torch.compiler.is_compiling() or seen.ids.numel() > self.vocab_size
        table_vh = self.token_table() if table or (many and self.mode == "tokens") else None
        if self.mode == "vector":
            if output_attentions:
                raise OptionError("output_attentions=True needs mode='tokens'; one vector attends to nothing else.")
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
        put = (lambda state: state) if kept is None else kept.put_back
        put_weights = (lambda part: part) if kept is None else kept.put_back_weights
        return States(
            readout=out.hidden[:, 0],
            tokens=put(out.hidden[:, 1:]),
            attended=seen.tokens if kept is None else seen.tokens & kept.has(),
            table=table_vh,
            hidden_states=None if states is None else tuple(put(state[:, 1:]) for state in states),
            attentions=None if weights is None else tuple(put_weights(part[:, :, 1:, 1:]) for part in weights),
        )

    def _dense_states(self, x_bg: torch.Tensor) -> torch.Tensor:
        """Run the transformer on profiles; return the read-out, (B, H)."""
        if x_bg.ndim != 2 or x_bg.shape[1] != self.num_genes or not x_bg.is_floating_point():
            raise OptionError(
                f"a profile of {x_bg.dtype} and shape {tuple(x_bg.shape)} was given; give floats (B, {self.num_genes}) "
                "for the genes of the model, or tokens with their attention_mask."
            )
        # (On other devices the check would wait for them.)
        if x_bg.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(x_bg.isfinite().all()):
            cell = int((~x_bg.isfinite().all(dim=1)).nonzero()[0, 0])
            raise DataError(f"the profile of cell {cell} holds NaN or infinity; give log1p of counts per 10,000.")
        nothing_b1 = ~(x_bg != 0).any(dim=1, keepdim=True)
        if self.mode == "vector":
            return self._alone(self.gene_embedding.project(x_bg), nothing_b1)[0]
        readout_bh = self.gene_embedding(x_bg)
        part = self.serialise(x_bg)
        if not torch.compiler.is_compiling() and bool(nothing_b1.any()):
            readout_bh = torch.where(nothing_b1, self._readout(part), readout_bh)
        table_vh = self.token_table() if part.ids.numel() > self.vocab_size else None
        states_bkh = torch.cat([readout_bh.unsqueeze(1), self._embed(part, table_vh)], dim=1)
        return self.encoder(states_bkh, F.pad(part.tokens, (1, 0), value=True)).hidden[:, 0]

    def serialise(self, x: torch.Tensor) -> Seen:
        """Return the genes of profiles that become tokens: the first `max_tokens` by value times weight of the gene.

        Equal ones stand in the order of the genes. The weights are those of :meth:`init_gene_weights`.

        Parameters
        ----------
        x
            Profiles, (B, G); genes above 0 are expressed.
        """
        assert self.gene_weights is not None
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
        """Set the weights, (G,), by which the genes of a profile are put in order; in mode ``"vector"`` unused."""
        weights = torch.as_tensor(weights)
        if tuple(weights.shape) != (self.num_genes,):
            raise OptionError(
                f"weights has the shape {tuple(weights.shape)}; give one number a gene, {self.num_genes}."
            )
        if self.gene_weights is not None:
            self.gene_weights.copy_(weights)

    @torch.no_grad()
    def init_expression_prior(self, mean: torch.Tensor) -> None:
        """Start the expression that the latent is decoded to at the mean of each gene, (G,)."""
        self.batch_integration_head.decoder.bias.copy_(mean)

    def num_parameters(self, *, trainable_only: bool = True) -> int:
        """Return the number of parameters; with `trainable_only` frozen ones do not count."""
        return count_parameters(self, trainable_only=trainable_only)
