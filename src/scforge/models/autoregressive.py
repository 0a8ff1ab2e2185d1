"""A causal transformer that predicts the next gene and its bin, and generates cells token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_choice, check_count, check_positive
from scforge._constants import CLS_ID, IGNORE_LABEL, N_SPECIAL, PAD_ID
from scforge.errors import OptionError
from scforge.models._utils import Architecture, evaluating, init_weights, number_of_each
from scforge.models.components.attention import KeyValueCache, check_shapes, token_positions
from scforge.models.components.config import TransformerConfig
from scforge.models.components.cross_entropy import token_loss
from scforge.models.components.embeddings import GeneExpressionEmbedding, between_rows, waves
from scforge.models.components.heads import BinPredictionHead, MaskedGenePredictionHead, cell_loss, of_next_token
from scforge.models.components.pooling import POOLINGS, last_pool
from scforge.models.components.transformer import TransformerStack
from scforge.models.generation import LARGEST, check_drawing, draw, generator_of, read_prompt, softmax
from scforge.models.protocol import GeneratedCells, ModelOutput
from scforge.models.registry import register_model

_AT_ONCE = 128
"""Number of prompt tokens that are read at once, so that masks and states of long prompts stay small."""

_READOUT = "cls"

_INIT_STD = 0.5
"""Standard deviation of vectors added to embeddings of unit variance; 0.02 would cost hundreds of training steps."""


class _Prompt(NamedTuple):
    """Prompts of the cells: ids (B, P), bins (B, P) with -1 for bins to sample, and lengths (B,)."""

    ids: torch.Tensor
    bins: torch.Tensor
    lengths: torch.Tensor


@torch.no_grad()
def generate_cells(
    model: AutoregressiveTransformer,
    n_cells: int,
    prompt: Mapping[str, torch.Tensor] | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    condition: torch.Tensor | int | None = None,
    max_len: int | None = None,
    eos_id: int | None = None,
    first_id: int | None = CLS_ID,
    n_special: int = N_SPECIAL,
    first_cell: int = 0,
) -> GeneratedCells:
    """Generate cells gene by gene, each gene with its expression bin.

    Each gene occurs at most once in a cell, and EOS, which ends the cell, is the only special token. Bin 0, for genes
    without counts, is never sampled. The random numbers of a cell depend only on `seed` and its index, not on the other
    cells or on the torch generator.

    Parameters
    ----------
    model
        The model. Dropout is disabled, and the mode of the model is restored afterwards.
    n_cells
        Number of cells B.
    prompt
        Tokens that the cells begin with, as a batch from a tokenizer: ``input_ids``, (P,) for all cells or (B, P), and
        optionally ``values`` and ``attention_mask`` of the same shape. ``values`` are the bins as numbers, NaN for bins
        to sample; without ``values``, all bins are sampled. `first_id` is prepended unless all prompts begin with it.
    temperature
        Divisor of the gene and bin logits; below 1, likely values become more likely.
    top_k
        Number of most likely genes to sample from.
    seed
        Random seed.
    condition
        Class of each cell, int64, shape (B,), or one class for all cells. 0 or None specifies no class.
    max_len
        Maximum number of tokens per cell, including special tokens. If None, uses as many as `model` and the genes
        allow.
    eos_id
        Token that ends a cell. It is not sampled before a cell contains a gene. If None, all cells grow to `max_len`.
    first_id
        First token of each cell. If None, cells begin with a gene, so generation requires a prompt.
    n_special
        Number of special tokens; their ids are below this number.
    first_cell
        Index of the first cell, if cells are generated in several calls.

    Raises
    ------
    OptionError
        If an argument cannot be used.
    """
    check_drawing(n_cells, temperature, seed, top_k)
    device = next(model.parameters()).device
    n_first = int(first_id is not None)
    most = min(n_first + model.vocab_size - n_special + int(eos_id is not None), model.max_seq_len)
    if max_len is None:
        max_len = most
    if check_count("max_len", max_len, "tokens", least=1 + n_first) > most:
        raise OptionError(
            f"is more than the {most} tokens that a cell can have, because each gene occurs once and "
            f"max_seq_len={model.max_seq_len}; lower max_len.",
            max_len=max_len,
        )
    begin = _begin(prompt, n_cells, first_id, n_special, model, max_len)
    classes = None if condition is None else number_of_each("condition", condition, n_cells, device)
    if classes is not None and (wrong_b := (classes < 0) | (classes > model.n_conditions)).any():
        raise OptionError(
            f"must be between 0 (no condition) and n_conditions={model.n_conditions}.",
            condition=int(classes[wrong_b][0]),
        )
    draws = [generator_of(f"{seed} {first_cell + row}") for row in range(n_cells)]
    draws_bt2 = torch.stack([torch.rand((max_len, 2), generator=generator, dtype=torch.float64) for generator in draws])
    draws_bt2 = draws_bt2.clamp_(max=LARGEST).to(device)
    with evaluating(model):
        cells = _Cells(model, begin, classes, max_len, n_special, eos_id, temperature, top_k)
        growing = cells.begin_with_prompt()
        while growing:
            growing = cells.add(*cells.choose(draws_bt2[cells.rows, cells.lengths_b.clamp(max=max_len - 1)]))
        return cells.tokens()


class _Cells:
    """Cells that grow by one token at a time."""

    def __init__(
        self,
        model: AutoregressiveTransformer,
        begin: _Prompt,
        classes: torch.Tensor | None,
        max_len: int,
        n_special: int,
        eos_id: int | None,
        temperature: float,
        top_k: int | None,
    ) -> None:
        self.model, self.classes, self.max_len = model, classes, max_len
        self.n_special, self.eos_id, self.temperature, self.top_k = n_special, eos_id, temperature, top_k
        device = next(model.parameters()).device
        self.prompt = _Prompt(*(part.to(device) for part in begin))
        self.rows = torch.arange(len(begin.ids), device=device)
        self.lengths_b = torch.zeros_like(self.rows)
        self.used_bv = torch.zeros((len(begin.ids), model.vocab_size), dtype=torch.bool, device=device)
        self.used_bv[:, :n_special] = True
        self.could_v = torch.arange(model.vocab_size, device=device) >= n_special
        if eos_id is not None:
            self.could_v[eos_id] = True
        self.grows_b = torch.ones_like(self.rows, dtype=torch.bool)
        self.has_genes_b = torch.zeros_like(self.grows_b)
        self.cache = KeyValueCache()
        self.gene_logits_bv = torch.zeros((len(begin.ids), model.vocab_size), device=device)
        self.bin_logits = torch.zeros((len(begin.ids), model.n_bins), device=device)
        self.parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def begin_with_prompt(self) -> bool:
        """Copy each prompt up to the first bin to sample; return whether any cell has to grow.

        Many tokens are read at once instead of one by one.
        """
        ids_bp, bins_bp, lengths_b = self.prompt
        places = torch.arange(ids_bp.shape[1], device=ids_bp.device)
        known_bp = ((places < lengths_b[:, None]) & (bins_bp >= 0)).long().cumprod(dim=1).bool()
        for start in range(0, int(known_bp.sum(dim=1).max()), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            self._look(*self._append(ids_bp[:, part], bins_bp[:, part], known_bp[:, part]))
        return self._grow()

    def choose(self, random_b2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next gene and bin of each cell, int64, shape (B,), from the prompt or sampled.

        A cell ends with the probability that the model predicts. The probability of genes that a cell already contains
        is redistributed only to other genes, because cells would otherwise end too early.
        """
        share_bv = softmax(self.gene_logits_bv, ~self.used_bv, self.temperature, self.top_k)
        if self.eos_id is not None:
            could_bv = self.could_v.expand_as(share_bv)
            end_b = softmax(self.gene_logits_bv, could_bv, self.temperature)[:, self.eos_id] * self.has_genes_b
            end_b = torch.where((~self.used_bv).any(dim=1), end_b, 1.0)
            share_bv = share_bv * (1.0 - end_b).unsqueeze(1)
            share_bv[:, self.eos_id] = end_b
        gene_b = draw(share_bv, random_b2[:, 0])
        expressed_bn = (torch.arange(self.model.n_bins, device=gene_b.device) > 0).expand_as(self.bin_logits)
        bin_b = draw(softmax(self.bin_logits, expressed_bn, self.temperature), random_b2[:, 1])
        given_b = self.lengths_b < self.prompt.lengths
        place_b1 = self.lengths_b.clamp(max=self.prompt.ids.shape[1] - 1).unsqueeze(1)
        given_bin_b = self.prompt.bins.gather(1, place_b1).squeeze(1)
        gene_b = torch.where(given_b, self.prompt.ids.gather(1, place_b1).squeeze(1), gene_b)
        return gene_b, torch.where(given_b & (given_bin_b >= 0), given_bin_b, bin_b)

    def add(self, gene_b: torch.Tensor, bin_b: torch.Tensor) -> bool:
        """Add a token to the growing cells; return whether any cell has to grow further."""
        new = self._append(gene_b.unsqueeze(1), bin_b.unsqueeze(1), self.grows_b.unsqueeze(1))
        if self.eos_id is not None:
            self.grows_b = self.grows_b & (gene_b != self.eos_id)
        growing = self._grow()
        if growing:
            self._look(*new)
        return growing

    def _append(
        self, ids_bs: torch.Tensor, bins_bs: torch.Tensor, tokens_bs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add tokens, and return them, with zeros for cells without a new token."""
        ids_bs = ids_bs.masked_fill(~tokens_bs, PAD_ID)
        is_gene_bs = tokens_bs & (ids_bs >= self.n_special)
        self.parts.append((ids_bs, bins_bs.masked_fill(~is_gene_bs, 0), tokens_bs))
        self.used_bv.scatter_(1, ids_bs, True)
        self.lengths_b = self.lengths_b + tokens_bs.sum(dim=1)
        self.has_genes_b = self.has_genes_b | is_gene_bs.any(dim=1)
        return self.parts[-1]

    def _grow(self) -> bool:
        """End cells that are full, or contain all genes and expect no EOS; return whether any cells are left."""
        self.grows_b = self.grows_b & (self.lengths_b < self.max_len)
        if self.eos_id is None:
            self.grows_b = self.grows_b & ~self.used_bv.all(dim=1)
        return bool(self.grows_b.any())

    def _look(self, ids_bs: torch.Tensor, bins_bs: torch.Tensor, tokens_bs: torch.Tensor) -> None:
        """Predict the token after these tokens; earlier tokens are in the cache."""
        new = self.model.next_token(ids_bs, tokens_bs, bins_bs.float(), self.cache, self.classes)
        more_b1 = tokens_bs.any(dim=1, keepdim=True)
        self.gene_logits_bv = torch.where(more_b1, new[0], self.gene_logits_bv)
        self.bin_logits = torch.where(more_b1, new[1], self.bin_logits)

    def tokens(self) -> GeneratedCells:
        """Return the generated cells."""
        ids_bs, bins_bs, mask_bs = (torch.cat(parts, dim=1) for parts in zip(*self.parts, strict=True))
        place_bs = torch.argsort((~mask_bs).to(torch.uint8), dim=1, stable=True)[:, : int(self.lengths_b.max())]
        ids_bs, bins_bs, mask_bs = (part.gather(1, place_bs) for part in (ids_bs, bins_bs, mask_bs))
        values_bs = self.model.bin_values[bins_bs].masked_fill(bins_bs == 0, 0.0)
        return GeneratedCells(ids_bs, values_bs, bins_bs, mask_bs)


def _begin(
    prompt: Mapping[str, torch.Tensor] | None,
    n_cells: int,
    first_id: int | None,
    n_special: int,
    model: AutoregressiveTransformer,
    max_len: int,
) -> _Prompt:
    """Return the prompts of the cells, tokens first and padding after them."""
    ids, values, mask, is_first = read_prompt(prompt, n_cells, first_id, n_special, model.vocab_size)
    lengths = mask.sum(dim=1)
    if int(lengths.min()) == 0:
        raise OptionError(
            "requires a prompt with at least one token for every cell; pass such a prompt.", first_id=None
        )
    if int(lengths.max()) > max_len:
        raise OptionError(
            f"has {int(lengths.max())} tokens, including the first token, but max_len={max_len}; pass fewer "
            "tokens, or increase max_len.",
            argument="prompt",
        )
    bins = values.nan_to_num(-1.0).round().long().masked_fill(is_first, 0)
    has_value = mask & ~is_first & ~values.isnan()
    wrong = has_value & ((bins < 1) | (bins >= model.n_bins) | (values != bins))
    if bool(wrong.any()):
        raise OptionError(
            f"contains the value {float(values[wrong][0]):g}, which is not a bin from 1 to {model.n_bins - 1}; "
            "pass bins from the tokenizer, or NaN for bins to sample.",
            argument="prompt",
        )
    if first_id is None and not bool(has_value[:, 0].all()):
        raise OptionError(
            "has no bin for the first token, which cannot be predicted; pass its bin in values.", argument="prompt"
        )
    return _Prompt(ids, bins, lengths)


class _States(NamedTuple):
    """States of the tokens (B, S, H) and of the read-out (B, H), if any, and other requested output."""

    tokens: torch.Tensor
    readout: torch.Tensor | None
    hidden_states: tuple[torch.Tensor, ...] | None
    attentions: tuple[torch.Tensor, ...] | None


@register_model("autoregressive_transformer")
class AutoregressiveTransformer(Architecture):
    """GPT-style decoder: each token attends to previous tokens and predicts the gene and bin of the next token.

    The state of token t depends on the genes and values up to t. From this state, one head predicts the gene of token t
    + 1, and another head predicts the bin. Embeddings use the same causal states as the predictions, so :meth:`encode`
    computes states that were trained.

    Parameters
    ----------
    vocab_size
        Number of tokens V, including special tokens.
    n_bins
        Number of expression bins, including bin 0 for genes without counts.
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
        ``"mean"`` (mean over tokens), ``"last"`` (state of the last token) or ``"cls"``. A CLS token at the front could
        not attend to the cell. With ``"cls"``, a read-out therefore follows the last token: a learned vector that
        attends to all tokens, and that no token attends to. It is trained to predict the genes of the cell (see
        `cell_loss_weight`).
    activation
        ``"gelu"``, ``"relu"`` or ``"silu"``.
    use_expression_values
        Whether to add a learned vector for the bin of each token; vectors are interpolated for values between bins.
    layer_norm_eps
        Epsilon of the layer norms.
    gene_loss_weight, expression_loss_weight
        Weights of the losses of the next gene and of its bin.
    gene_vectors
        Options to embed genes with pretrained vectors: a dict with the arguments ``dim``, ``learned`` and ``frozen`` of
        :class:`scforge.models.components.GeneVectorEmbedding`; ``Encoder`` sets it for tokenizers with gene vectors.
    cell_loss_weight
        With ``pooling="cls"``, weight of the mean of ``-log p(gene | read-out)`` over the labeled tokens of a cell.
    n_conditions
        Number of classes to condition on; see `condition` of :meth:`forward`.
    position_embedding
        ``"learned"``, ``"rotary"`` or ``"none"``; positions count the tokens of a cell without padding.
    norm_first
        Whether to use pre-norm layers and a final norm instead of post-norm layers.
    gradient_checkpointing
        Whether to recompute the activations of each layer in the backward pass, which takes less memory and more time.
    unpad
        Whether to remove padding from the computation. If None, removes it if this is faster.
    shift_labels
        If false, each token predicts its own label and bin instead of predicting the next token, and the loss contains
        only the gene and bin terms. The input must then be masked, as in ``masked_gene_prediction``. The model cannot
        generate cells, and ``"cls"`` is the first token.
    causal_encode
        If false, each token attends to all tokens in :meth:`encode`, and ``"cls"`` is the first token. The attention
        then differs from that in training.

    Attributes
    ----------
    bin_values
        Expression values of the bins in generated cells, float32, shape (n_bins,); 0, 1, 2, ... until
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
    """The state of a token does not depend on its target, so the tokens themselves may be used as labels."""

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
                "with shift_labels=False uses the first token, which attends to no other token in a "
                "causal encoder; choose causal_encode=False or pooling='mean'.",
                pooling="cls",
            )
        self.shift_labels = self.predicts_next = shift_labels
        self.causal_encode = causal_encode
        has_readout = pooling == _READOUT and shift_labels
        check_count("n_bins", n_bins, "bins", least=2)
        self.gene_loss_weight = check_positive("gene_loss_weight", gene_loss_weight, or_zero=True)
        self.expression_loss_weight = check_positive("expression_loss_weight", expression_loss_weight, or_zero=True)
        self.cell_loss_weight = check_positive("cell_loss_weight", cell_loss_weight, or_zero=True)
        if not gene_loss_weight + expression_loss_weight + (cell_loss_weight if has_readout else 0):
            raise OptionError("all loss weights are 0, so the model would not learn; increase at least one of them.")
        config = TransformerConfig(
            hidden_dim=hidden_dim,
            num_layers=num_layers,
            num_heads=num_heads,
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
        self.n_bins = n_bins
        self.hidden_dim = hidden_dim
        self.max_seq_len = max_seq_len
        self.pooling = pooling
        self.n_conditions = n_conditions
        self.embedding = GeneExpressionEmbedding(
            vocab_size=vocab_size,
            hidden_dim=hidden_dim,
            max_seq_len=max_seq_len,
            dropout=dropout,
            use_expression_values=False,
            layer_norm_eps=layer_norm_eps,
            gene_vectors=gene_vectors,
            position_embedding=position_embedding,
        )
        # A bin as a number would reach 50 times a projection: behind a layer norm little else is left, and of the bin
        # itself only that it is large (PBMC 3k, 8 epochs: loss of the next bin 2.1, and 0.24 by vectors of bins).
        self.bin_embedding = nn.Embedding(n_bins, hidden_dim) if use_expression_values else None
        self.condition_embedding = nn.Embedding(n_conditions, hidden_dim) if n_conditions else None
        self.readout = nn.Parameter(torch.empty(hidden_dim)) if has_readout else None
        self.decoder = TransformerStack(config)
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
        """Predict the next gene and its bin at each token of a batch.

        Labels are aligned with their tokens and are shifted in this method, unless ``shift_labels`` is false. The
        prediction of a token is compared with the label of the next token of its cell, and the first token of a cell is
        not predicted.

        Parameters
        ----------
        input_ids
            Token ids, shape (B, S).
        attention_mask
            Nonzero for tokens, bool, int or float, shape (B, S).
        values
            Expression values, shape (B, S).
        labels
            Token ids to predict, aligned with `input_ids`, shape (B, S); -100 at positions without a target.
        bin_ids, bin_labels
            Bins to predict at tokens with a label, aligned with `input_ids`, shape (B, S). If both are given,
            `bin_labels` is used, which is -100 at positions without a target.
        condition
            Class of each cell, int64, shape (B,): 0 for no class, otherwise 1 to `n_conditions`. If None, uses 0 for
            all cells. The class vector is added to the embedding of every token, so attention need not propagate it.
        attention_bias
            Value to add to the attention scores of each token as a key, shape (B, S).
        return_logits
            If false, heads run only at positions with targets, and ``logits`` and ``expression`` are None.
        output_hidden_states, output_attentions
            Whether to return the states after each layer, and the attention weights, both without the read-out.
        **kwargs
            Other keys of the batch, which are ignored.

        Returns
        -------
        ``loss`` (with labels), ``logits`` of the next gene (B, S, V), ``expression``, which contains the logits of the
        next bin (B, S, n_bins), and ``embeddings`` (B, H).
        """
        check_shapes(input_ids.shape, labels=labels, bin_ids=bin_ids, bin_labels=bin_labels)
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
        """Return cell embeddings, shape (B, H). For the arguments, see :meth:`forward`."""
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
        """Return the logits of the next gene (B, V) and the next bin (B, n_bins) after further tokens.

        `input_ids`, `attention_mask` and `values`, shape (B, s), continue the tokens in `cache`, and are added to the
        cache. For `condition`, see :meth:`forward`. The output for a cell without further tokens is meaningless.

        Raises
        ------
        OptionError
            If the model was created with ``shift_labels=False``.
        """
        if not self.shift_labels:
            raise OptionError(
                "a model with shift_labels=False predicts each token itself, so it cannot generate the next token; "
                "train a model with shift_labels=True."
            )
        tokens_bs = attention_mask != 0
        before_b = 0 if cache.tokens is None else cache.tokens.sum(dim=1, keepdim=True)
        hidden_bsh = self._embed(input_ids, tokens_bs, values, token_positions(tokens_bs) + before_b, condition)
        last_bh = last_pool(self.decoder(hidden_bsh, tokens_bs, causal=True, cache=cache).hidden, tokens_bs)
        return self.head(last_bh), self.bin_head(last_bh)

    def init_token_prior(self, token_counts: torch.Tensor) -> None:
        """Initialize the gene head from `token_counts`; see :meth:`MaskedGenePredictionHead.init_bias`."""
        self.head.init_bias(token_counts)

    @torch.no_grad()
    def init_bin_values(self, bin_values: torch.Tensor) -> None:
        """Set the bin values, shape (n_bins,), e.g. the mean log1p CP10K of each bin."""
        if bin_values.shape != self.bin_values.shape:
            raise OptionError(
                f"has shape {tuple(bin_values.shape)}, but there are {self.n_bins} bins; pass one value per bin.",
                argument="bin_values",
            )
        self.bin_values.copy_(bin_values)

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
        """Run the decoder; if it is causal, the read-out is an additional token after all others."""
        check_shapes(input_ids.shape, attention_mask=attention_mask, values=values, attention_bias=attention_bias)
        if condition is not None and condition.shape != input_ids.shape[:1]:
            raise OptionError(
                f"has shape {tuple(condition.shape)}, but there are {len(input_ids)} cells; pass one class per cell.",
                argument="condition",
            )
        n_tokens, tokens_bs = input_ids.shape[1], attention_mask != 0
        hidden_bsh = self._embed(input_ids, tokens_bs, values, token_positions(tokens_bs), condition)
        readout = self.readout if causal else None
        if readout is not None:
            # Behind the padding it sees the same tokens as right behind the last one; it has no position.
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
        """Return the label of each token, -100 at padding."""
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
                raise OptionError(
                    "contains classes, but n_conditions=0; create the model with the number of classes as "
                    "n_conditions.",
                    argument="condition",
                )
            return hidden_bsh
        vectors_bh = self.condition_embedding((condition - 1).clamp(min=0)) * (condition > 0).unsqueeze(1)
        return hidden_bsh + vectors_bh.unsqueeze(1)

    def _pool(self, states: _States, attention_mask: torch.Tensor) -> torch.Tensor:
        if states.readout is not None:
            return states.readout
        return POOLINGS[self.pooling](states.tokens, attention_mask)
