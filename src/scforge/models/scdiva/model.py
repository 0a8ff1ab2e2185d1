"""The ScDiVa model, which runs the transformer in one of two modes, its generation of cells, and its configuration.

Shapes: B cells, S tokens, P tokens of a prompt, G genes, V vocabulary, H hidden, L latent, M masked tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_choice, check_count, check_share
from scforge._constants import MASK_ID, N_SPECIAL, PAD_ID
from scforge.errors import DataError, OptionError
from scforge.models._utils import Architecture, evaluating, number_of_each
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
from scforge.models.scdiva.parts import (
    AnnotationHead,
    GeneEmbedding,
    Seen,
    States,
    ValueEncoder,
    VariationalLayer,
    gene_logits,
    gene_losses,
    init_scdiva,
    mean_over_cells,
    scores_of,
    token_profile_states,
    token_states,
    vector_profile_states,
    vector_states,
    what_is_seen,
)

if TYPE_CHECKING:
    from scforge.config.schema import ModelConfig


_TASKS = ["annotation", "batch_integration"]

_VALUES_AT_ONCE = 2**24
"""Number of logits computed at a time."""

_OWN_BETA = 1e-3
"""Weight of the KL divergence if the latent variable is trained only on masked genes."""


@torch.no_grad()
def generate_cells(
    model: ScDiVaModel,
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

    Dropout is disabled, and the mode of the model is restored afterwards. At first, all tokens except the prompt
    are masked. In each step a gene is sampled for every masked token, and the most confident genes are kept, so
    that the number of masked tokens decreases evenly over the steps. The values of these genes are predicted in the
    next step. Each gene occurs at most once in a cell. The random numbers of a cell depend only on `seed` and its
    index.

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
    if not model.denoising:
        raise OptionError(
            "a model with denoising=False has no head to generate cells; train a model with the objective "
            "'masked_diffusion'."
        )
    if not 0 < mask_id < model.n_special:
        raise OptionError(f"is not one of the {model.n_special} special tokens; pass the MASK id.", mask_id=mask_id)
    ids_bp, values_bp, mask_bp, is_first_bp = read_prompt(prompt, n_cells, first_id, model.n_special, model.vocab_size)
    known_bp = mask_bp & ~is_first_bp
    wrong_bp = known_bp & (values_bp.isinf() | (values_bp < 0))
    if bool(wrong_bp.any()):
        value = float(values_bp[wrong_bp][0])
        raise OptionError(
            f"contains the value {value}; pass log1p of counts, or NaN for values to sample.", argument="prompt"
        )
    ids_bp, values_bp = ids_bp.masked_fill(~mask_bp, PAD_ID), values_bp.masked_fill(~known_bp, 0.0)
    width = int(mask_bp.sum(dim=1).max()) if mask_bp.numel() else 0
    draws = [generator_of(f"unmask {seed} {first_cell + cell}") for cell in range(n_cells)]
    lengths_b = _lengths(model, n_tokens, mask_bp[:, :width].sum(dim=1), draws, first_id)
    device = model.gene_embedding.weight.device
    given = (ids_bp[:, :width], values_bp[:, :width], mask_bp[:, :width])
    cells = _Cells(model, *given, lengths_b.to(device), mask_id)
    step = 0
    with evaluating(model):
        while (cells.no_gene_bs | cells.no_value_bs).any():
            cells.look()
            if cells.no_gene_bs.any():
                random = _random_numbers(draws, cells.no_gene_bs.cpu(), lengths_b).to(device)
                cells.unmask(min(1.0, (step + 1) / n_steps), random, temperature, top_k)
            step += 1
    return cells.tokens()


def _lengths(
    model: ScDiVaModel,
    n_tokens: int | torch.Tensor | None,
    given_b: torch.Tensor,
    draws: list[torch.Generator],
    first_id: int | None,
) -> torch.Tensor:
    """Return the number of tokens of each cell, int64, (B,)."""
    most, n_given = min(model.num_genes + (first_id is not None), model.max_generated), int(given_b.max())
    if n_given > most:
        raise OptionError(
            f"has {n_given} tokens, but the model accepts at most {most}; pass fewer tokens.", argument="prompt"
        )
    if n_tokens is None:
        if model.length_quantiles is None or not bool(model.length_quantiles.any()):
            raise OptionError(
                "requires a trained model, which contains the lengths of the training cells; pass "
                "n_tokens, or train the model.",
                n_tokens=None,
            )
        places = torch.stack([torch.rand((), generator=draw, dtype=torch.float64) for draw in draws]) * 100
        low = places.floor().long().clamp(max=99)
        quantiles = model.length_quantiles.double().cpu()
        lengths = torch.lerp(quantiles[low], quantiles[low + 1], places - low).round().long()
        return torch.maximum(lengths.clamp(min=1, max=most), given_b)
    lengths = number_of_each("n_tokens", n_tokens, len(draws)).cpu()
    wrong = lengths[(lengths < given_b.clamp(min=1)) | (lengths > most)]
    if len(wrong):
        raise OptionError(
            f"does not fit: prompt has {n_given} tokens and the model accepts at most "
            f"{most}; pass numbers from {max(n_given, 1)} to {most}.",
            n_tokens=int(wrong[0]),
        )
    return lengths


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
        table_vh = self.states.table
        blocked_bv = self.seen.blocked(len(table_vh), self.model.n_special)
        cells_m, random_m = self.no_gene_bs.nonzero()[:, 0], random_bs2[..., 0][self.no_gene_bs]
        states_mh = self.states.tokens[self.no_gene_bs]
        genes, log_shares = [], []
        step = max(1, _VALUES_AT_ONCE // len(table_vh))
        for start in range(0, len(states_mh), step):
            part = slice(start, start + step)
            logits = scores_of(states_mh[part], table_vh, self.model.token_prior)
            share_mv = softmax(logits, ~blocked_bv[cells_m[part]], temperature, top_k)
            genes.append(draw(share_mv, random_m[part]))
            log_shares.append(share_mv.gather(1, genes[-1].unsqueeze(1)).squeeze(1).log())
        gene_bs = self.ids_bs.masked_scatter(self.no_gene_bs, torch.cat(genes))
        # Gumbel noise that fades, as in MaskGIT (Chang et al. 2022): at first nearly any, at the end the most
        # confident.
        noise_bs = -(-random_bs2[..., 1].clamp(min=1e-12).log()).log()
        sure_bs = torch.full_like(noise_bs, float("-inf")).masked_scatter(self.no_gene_bs, torch.cat(log_shares))
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
            hidden_dim=hidden_dim,
            num_layers=num_layers,
            num_heads=num_heads,
            ffn_dim=ffn_dim,
            dropout=dropout,
            activation=activation,
            layer_norm_eps=layer_norm_eps,
            norm_first=norm_style == "pre",
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
        has_tokens = self.mode == "tokens"
        self.uses_order = has_tokens and position_embedding == "rotary"
        self.gene_embedding = GeneEmbedding(self.num_genes, config)
        self.special_embedding: Any = nn.Embedding(n_special, hidden_dim) if has_tokens else None
        self.value_encoder: Any = ValueEncoder(hidden_dim) if has_tokens else None
        self.dropout = Dropout(dropout)
        self.encoder = TransformerStack(config)
        self.variational_layer = VariationalLayer(hidden_dim, latent_dim, variational=variational)
        self.annotation_head = AnnotationHead(latent_dim, hidden_dim, num_cell_types) if num_cell_types else None
        self.batch_integration_head = BatchIntegrationHead(latent_dim, hidden_dim, self.num_genes, n_batches)
        self.value_head: Any = ExpressionPredictionHead(hidden_dim) if denoising else None
        self.apply(init_scdiva)
        both = has_tokens and denoising
        self.hidden_value = nn.Parameter(nn.init.normal_(torch.empty(hidden_dim), std=0.02)) if both else None
        self.register_buffer("gene_weights", torch.ones(self.num_genes) if has_tokens else None)
        self.register_buffer("token_prior", torch.zeros(vocab_size) if has_tokens else None)
        self.register_buffer("length_quantiles", torch.zeros(101) if denoising else None)

    def encode(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the cell embeddings of a batch of tokens, (B, L), or the output of :meth:`infer` for a profile."""
        latent = self.infer(input_ids, attention_mask, values, **kwargs)
        return latent if attention_mask is None else latent["mu"]

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
            x_bg = input_ids
            if x_bg.ndim != 2 or x_bg.shape[1] != self.num_genes or not x_bg.is_floating_point():
                raise OptionError(
                    f"the profiles have dtype {x_bg.dtype} and shape {tuple(x_bg.shape)}; pass floats of shape (B, "
                    f"{self.num_genes}) for the genes of the model, or tokens with their attention_mask."
                )
            # (On other devices the check would wait for them.)
            if x_bg.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(x_bg.isfinite().all()):
                cell = int((~x_bg.isfinite().all(dim=1)).nonzero()[0, 0])
                raise DataError(
                    f"the profile of cell {cell} has NaN or infinite values; pass log1p of counts per 10,000."
                )
            run = token_profile_states if self.mode == "tokens" else vector_profile_states
            readout = run(self, x_bg, ~(x_bg != 0).any(dim=1, keepdim=True))
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
        wanted = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        run = token_states if self.mode == "tokens" else vector_states
        return run(self, seen, table_vh, **wanted)

    @torch.no_grad()
    def init_gene_weights(self, weights: torch.Tensor) -> None:
        """Set the gene weights, shape (G,), that rank the genes of a profile; not used in mode ``"vector"``."""
        weights = torch.as_tensor(weights)
        if tuple(weights.shape) != (self.num_genes,):
            raise OptionError(
                f"has shape {tuple(weights.shape)}; pass one number for each of the {self.num_genes} genes.",
                argument="weights",
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
        latent, mu, logvar = self.variational_layer(states.readout)
        losses: dict[str, torch.Tensor] = {}
        genes_bs = seen.ids.masked_fill(~seen.has_gene, PAD_ID)
        if labels is not None:
            chosen_bs = seen.tokens & (labels >= self.n_special)
            genes_bs = torch.where(chosen_bs, labels, genes_bs)
            chosen_bs = chosen_bs & states.attended
            losses_m, cells_m = gene_losses(
                states.tokens, states.table, self.token_prior, seen, labels, chosen_bs, self.n_special
            )
            losses["identity"] = mean_over_cells(losses_m, cells_m, loss_weights)
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
            chosen_bs = seen.tokens & (labels >= self.n_special)
            log_share_bg = self.decode(latent, batch).float().log_softmax(dim=1)
            log_share_bs = log_share_bg.gather(1, (labels - self.n_special).clamp(min=0))
            n_chosen = chosen_bs.sum()
            losses["latent"] = -log_share_bs.masked_fill(~chosen_bs, 0.0).sum() / n_chosen.clamp(min=1)
            if self.variational:
                losses["kl"] = kl_divergence(mu, logvar) * (n_chosen > 0)
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
        cell = self.infer(x_bg)
        expression = self.decode(cell["latent"], batch)
        logits = self.classify(cell["latent"]) if self.annotation_head is not None else None
        losses: dict[str, torch.Tensor] = {}
        if labels is not None:
            losses["classification"] = classification_loss(self.classify(cell["latent"]), labels)
        if target is not None:
            losses["reconstruction"] = reconstruction_loss(expression, target)
        if losses and self.variational:
            losses["kl"] = kl_divergence(cell["mu"], cell["logvar"])
        return ModelOutput(
            loss=_sum(losses, beta), logits=logits, embeddings=cell["mu"], expression=expression, losses=losses or None
        )

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
            raise OptionError(
                f"has more than max_tokens={self.max_tokens} values per cell; mask fewer.", argument="masked_values"
            )
        predicted_bs = torch.zeros_like(seen.values)
        predicted_bs[chosen_bs] = self.values_of(states, seen.ids, chosen_bs).to(predicted_bs.dtype)
        return predicted_bs

    @torch.no_grad()
    def init_lengths(self, quantiles: torch.Tensor) -> None:
        """Set the 101 percentiles of the number of tokens per cell, from which ``generate`` samples lengths."""
        quantiles = torch.as_tensor(quantiles)
        if self.length_quantiles is None or tuple(quantiles.shape) != (101,):
            raise OptionError(
                f"has shape {tuple(quantiles.shape)}; pass 101 quantiles if denoising=True.", argument="quantiles"
            )
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

    generate = generate_cells


def _sum(losses: dict[str, torch.Tensor], beta: float | torch.Tensor) -> torch.Tensor | None:
    """Return the sum of the losses, with the KL divergence weighted by `beta`, or None without losses."""
    if not losses:
        return None
    task = torch.stack([part for name, part in losses.items() if name != "kl"]).sum()
    return task + beta * losses["kl"] if "kl" in losses else task


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
