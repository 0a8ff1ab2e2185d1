"""Drawing cells from a denoising ScDiVa: all tokens hidden at first, and unmasked step by step.

Shapes: B cells, P tokens of the longest prompt, S tokens of the longest cell, M hidden tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from scforge._checks import check_count, check_positive, check_seed
from scforge._constants import MASK_ID, PAD_ID
from scforge.errors import OptionError
from scforge.models._utils import evaluating
from scforge.models.generation import GeneratedCells, _draw, _softmax
from scforge.models.scdiva_tokens import Seen, scores_of, what_is_seen

if TYPE_CHECKING:
    from scforge.models.scdiva_denoiser import ScDiVaDenoiser

__all__ = ["unmask_cells"]

_NUMBERS = 2**24
"""Logits at a time."""


@torch.no_grad()
def unmask_cells(
    model: ScDiVaDenoiser,
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
    """Draw cells by unmasking, see :meth:`scforge.models.ScDiVaModel.generate`."""
    check_count("n_cells", n_cells, "cells")
    check_count("n_steps", n_steps, "steps")
    check_positive("temperature", temperature)
    check_seed(seed)
    if top_k is not None:
        check_count("top_k", top_k, "genes")
    if not model.denoising:
        raise OptionError("denoising=False leaves nothing to generate cells with; train with 'masked_diffusion'.")
    draws = [_generator(seed, first_cell + cell) for cell in range(n_cells)]
    ids_bp, values_bp, mask_bp = _checked_prompt(model, n_cells, prompt, first_id, mask_id)
    lengths_b = _lengths(model, n_tokens, mask_bp.sum(dim=1), draws, first_id)
    device = model.gene_embedding.weight.device
    cells = _Cells(model, ids_bp, values_bp, mask_bp, lengths_b.to(device), mask_id)
    step = 0
    with evaluating(model):
        while cells.unfinished():
            cells.look()
            if cells.no_gene_bs.any():
                random = _random_numbers(draws, cells.no_gene_bs.cpu(), lengths_b).to(device)
                cells.unmask(min(1.0, (step + 1) / n_steps), random, temperature, top_k)
            step += 1
    return cells.tokens()


class _Cells:
    """Cells of which ever less is hidden."""

    def __init__(
        self,
        model: ScDiVaDenoiser,
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
        """Return whether anything is hidden."""
        return bool((self.no_gene_bs | self.no_value_bs).any())

    def look(self) -> None:
        """Run the model, and take the values that it predicts where the gene is known."""
        self.seen: Seen = what_is_seen(
            self.ids_bs,
            self.tokens_bs,
            self.values_bs,
            self.no_gene_bs,
            self.no_value_bs,
            self.model.n_special,
        )
        self.states = self.model.states(self.seen, table=True)
        known_bs = self.no_value_bs & ~self.no_gene_bs
        if known_bs.any():
            self.values_bs[known_bs] = self.model.values_of(self.states, self.ids_bs, known_bs).clamp(min=0.0)
            self.no_value_bs = self.no_value_bs & ~known_bs

    def unmask(self, share: float, random_bs2: torch.Tensor, temperature: float, top_k: int | None) -> None:
        """Draw a gene for every hidden token, and keep the surest, so that `share` of all is unmasked."""
        gene_m, log_share_m = self._drawn(random_bs2[..., 0][self.no_gene_bs], temperature, top_k)
        gene_bs = self.ids_bs.masked_scatter(self.no_gene_bs, gene_m)
        # Gumbel noise that fades, as in MaskGIT (Chang et al. 2022): at first nearly any, in the end the surest.
        noise_bs = -(-random_bs2[..., 1].clamp(min=1e-12).log()).log()
        sure_bs = torch.full_like(noise_bs, float("-inf")).masked_scatter(self.no_gene_bs, log_share_m)
        sure_bs = sure_bs + temperature * (1.0 - share) * noise_bs
        order_bs = sure_bs.argsort(dim=1, descending=True, stable=True)
        hidden_bs = self.no_gene_bs.gather(1, order_bs)
        new_bs = hidden_bs & _first_of_its_kind(gene_bs.gather(1, order_bs).masked_fill(~hidden_bs, -1))
        left_b = (self.n_hidden_b.double() * (1.0 - share)).floor().long()
        n_now_b1 = (self.no_gene_bs.sum(dim=1) - left_b).unsqueeze(1)
        new_bs = new_bs & (new_bs.long().cumsum(dim=1) <= n_now_b1)
        new_bs = torch.zeros_like(new_bs).scatter(1, order_bs, new_bs)
        self.ids_bs = torch.where(new_bs, gene_bs, self.ids_bs)
        self.no_gene_bs = self.no_gene_bs & ~new_bs

    def _drawn(
        self, random_m: torch.Tensor, temperature: float, top_k: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a gene for each hidden token, int64, and the logarithm of its share, float64, both (M,)."""
        table_vh = self.states.table
        assert table_vh is not None
        blocked_bv = self.seen.blocked(len(table_vh), self.model.n_special)
        cells_m = self.no_gene_bs.nonzero()[:, 0]
        states_mh = self.states.tokens[self.no_gene_bs]
        genes, shares = [], []
        step = max(1, _NUMBERS // len(table_vh))
        for start in range(0, len(states_mh), step):
            part = slice(start, start + step)
            logits = scores_of(states_mh[part], table_vh, self.model.token_prior)
            share_mv = _softmax(logits, ~blocked_bv[cells_m[part]], temperature, top_k)
            genes.append(_draw(share_mv, random_m[part]))
            shares.append(share_mv.gather(1, genes[-1].unsqueeze(1)).squeeze(1).log())
        return torch.cat(genes), torch.cat(shares)

    def tokens(self) -> GeneratedCells:
        """Return the cells."""
        ids = self.ids_bs.masked_fill(~self.tokens_bs, PAD_ID)
        return GeneratedCells(ids, self.values_bs.float(), torch.zeros_like(ids), self.tokens_bs)


def _first_of_its_kind(genes_bs: torch.Tensor) -> torch.Tensor:
    """Return whether no earlier place of the row has the same number, bool, (B, S)."""
    sorted_bs, order_bs = genes_bs.sort(dim=1, stable=True)
    first_bs = torch.ones_like(sorted_bs, dtype=torch.bool)
    first_bs[:, 1:] = sorted_bs.diff(dim=1) != 0
    return torch.zeros_like(first_bs).scatter(1, order_bs, first_bs)


def _generator(seed: int, cell: int) -> torch.Generator:
    """Return the random numbers of a cell, which depend on nothing else."""
    digest = hashlib.blake2b(f"unmask {seed} {cell}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def _random_numbers(draws: list[torch.Generator], hidden_bs: torch.Tensor, lengths_b: torch.Tensor) -> torch.Tensor:
    """Return two numbers in [0, 1) for each token of the cells of which anything is hidden, float64, (B, S, 2)."""
    numbers = torch.zeros((*hidden_bs.shape, 2), dtype=torch.float64)
    for cell, generator in enumerate(draws):
        if hidden_bs[cell].any():
            n_tokens = int(lengths_b[cell])
            numbers[cell, :n_tokens] = torch.rand((n_tokens, 2), generator=generator, dtype=torch.float64)
    return numbers.clamp_(max=1.0 - 1e-12)


def _lengths(
    model: ScDiVaDenoiser,
    n_tokens: int | torch.Tensor | None,
    given_b: torch.Tensor,
    draws: list[torch.Generator],
    first_id: int | None,
) -> torch.Tensor:
    """Return the number of tokens of each cell, int64, (B,)."""
    most = model.num_genes + (first_id is not None)
    if model.mode == "tokens":
        most = min(most, model.max_tokens)
    if int(given_b.max()) > most:
        raise OptionError(f"prompt has {int(given_b.max())} tokens, but the model takes {most} of a cell; give fewer.")
    if n_tokens is None:
        quantiles = model.length_quantiles
        if quantiles is None or not bool(quantiles.any()):
            raise OptionError("n_tokens=None needs a model that knows lengths of cells; give n_tokens, or train it.")
        places = torch.stack([torch.rand((), generator=draw, dtype=torch.float64) for draw in draws]) * 100
        low = places.floor().long().clamp(max=99)
        quantiles = quantiles.double().cpu()
        lengths = torch.lerp(quantiles[low], quantiles[low + 1], places - low).round().long()
        return torch.maximum(lengths.clamp(min=1, max=most), given_b)
    lengths = torch.as_tensor(n_tokens).cpu()
    if lengths.is_floating_point() or lengths.dtype == torch.bool or lengths.ndim > 1:
        raise OptionError(f"n_tokens={n_tokens!r} is no whole number; give one, or one for each cell.")
    if lengths.ndim == 1 and len(lengths) != len(draws):
        raise OptionError(f"n_tokens has {len(lengths)} numbers for n_cells={len(draws)}; give one for each.")
    lengths = lengths.long().expand(len(draws))
    if bool((lengths < given_b.clamp(min=1)).any()) or int(lengths.max()) > most:
        raise OptionError(
            f"n_tokens={int(lengths.min())} to {int(lengths.max())} is not between the {int(given_b.max())} tokens of "
            f"prompt and the {most} that the model takes; give a number between, at least 1."
        )
    return lengths


def _checked_prompt(
    model: ScDiVaDenoiser,
    n_cells: int,
    prompt: Mapping[str, torch.Tensor] | None,
    first_id: int | None,
    mask_id: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, values (NaN where they are to be drawn) and mask of what cells begin with, (B, P), tokens first."""
    if not 0 < mask_id < model.n_special:
        raise OptionError(f"mask_id={mask_id} is none of the {model.n_special} special tokens; give that of MASK.")
    ids, values = torch.empty((n_cells, 0), dtype=torch.int64), torch.empty((n_cells, 0))
    mask = torch.empty((n_cells, 0), dtype=torch.bool)
    if prompt is not None:
        if not isinstance(prompt, Mapping) or "input_ids" not in prompt:
            raise OptionError("prompt is no mapping with 'input_ids'; give a batch of the tokenizer.")
        ids = torch.as_tensor(prompt["input_ids"]).cpu().long()
        values, mask = prompt.get("values"), prompt.get("attention_mask")
        values = torch.full(ids.shape, float("nan")) if values is None else torch.as_tensor(values).cpu().float()
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else torch.as_tensor(mask).cpu() != 0
        if ids.ndim not in (1, 2) or (ids.ndim == 2 and len(ids) != n_cells):
            raise OptionError(f"prompt has ids of shape {tuple(ids.shape)}; give (P,), or ({n_cells}, P) for n_cells.")
        for name, tensor in (("values", values), ("attention_mask", mask)):
            if tensor.shape != ids.shape:
                raise OptionError(f"prompt has {name} of shape {tuple(tensor.shape)} for ids of {tuple(ids.shape)}.")
        ids, values, mask = (part.expand(n_cells, ids.shape[-1]) for part in (ids, values, mask))
    if first_id is not None and not (ids.shape[1] and bool((ids[:, 0] == first_id).all())):
        ids, values = F.pad(ids, (1, 0), value=first_id), F.pad(values, (1, 0))
        mask = F.pad(mask, (1, 0), value=True)
    place = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)
    ids, values, mask = (part.gather(1, place) for part in (ids, values, mask))
    gene = (ids >= model.n_special) & (ids < model.vocab_size)
    first = torch.zeros_like(mask)
    first[:, :1] = first_id is not None
    if bool((mask & ~gene & ~first).any()):
        raise OptionError(f"prompt has the token {int(ids[mask & ~gene & ~first][0])}, which is no gene; leave it out.")
    if not bool(_first_of_its_kind(ids.masked_fill(~mask, -1))[mask].all()):
        raise OptionError("prompt has a gene twice in a cell; give each once.")
    wrong = mask & gene & (values.isinf() | (values < 0))
    if bool(wrong.any()):
        raise OptionError(f"prompt has the value {float(values[wrong][0])}; give log1p of counts, or NaN to draw it.")
    width = int(mask.sum(dim=1).max()) if mask.numel() else 0
    values = values.masked_fill(~(mask & gene), 0.0)
    return ids.masked_fill(~mask, PAD_ID)[:, :width], values[:, :width], mask[:, :width]
