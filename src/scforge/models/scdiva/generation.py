"""Generation of cells by iterative unmasking of genes and their values.

Shapes: B cells, S tokens, P tokens of a prompt, V vocabulary, M masked tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_count
from scforge._constants import MASK_ID, PAD_ID
from scforge.errors import OptionError
from scforge.models._utils import evaluating, number_of_each
from scforge.models.generation import (
    LARGEST,
    check_drawing,
    draw,
    first_of_its_kind,
    generator_of,
    read_prompt,
    softmax,
)
from scforge.models.protocol import GeneratedCells
from scforge.models.scdiva.parts import Backbone, Seen, scores_of, what_is_seen

_VALUES_AT_ONCE = 2**24
"""Number of logits computed at a time."""


@torch.no_grad()
def generate_cells(
    model: Backbone,
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
    with evaluating(cast(nn.Module, model)):
        while (cells.no_gene_bs | cells.no_value_bs).any():
            cells.look()
            if cells.no_gene_bs.any():
                random = _random_numbers(draws, cells.no_gene_bs.cpu(), lengths_b).to(device)
                cells.unmask(min(1.0, (step + 1) / n_steps), random, temperature, top_k)
            step += 1
    return cells.tokens()


def _lengths(
    model: Backbone,
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
        model: Backbone,
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
