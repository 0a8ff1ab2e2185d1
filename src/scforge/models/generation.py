"""Drawing cells from an autoregressive model, token by token.

Shapes: B cells, P tokens of the longest prompt, T tokens so far, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from scforge._checks import check_count, check_positive, check_seed
from scforge._constants import CLS_ID, N_SPECIAL, PAD_ID
from scforge.errors import OptionError
from scforge.models.components.attention import KeyValueCache

if TYPE_CHECKING:
    from scforge.models.autoregressive import AutoregressiveTransformer

__all__ = ["GeneratedCells", "generate_cells"]

_LARGEST = 1.0 - 1e-12
"""Largest random number, so that its product with a sum of probabilities stays below the sum."""


class GeneratedCells(NamedTuple):
    """Tokens of generated cells, padded to the longest, shape (B, S).

    ``input_ids``: int64, 0 at padding. ``values``: what the bins stand for, float32. ``bin_ids``: int64; values and
    bins are 0 at special tokens and padding. ``attention_mask``: True for tokens, bool.
    """

    input_ids: torch.Tensor
    values: torch.Tensor
    bin_ids: torch.Tensor
    attention_mask: torch.Tensor


class _Prompt(NamedTuple):
    """What cells begin with: ids (B, P), bins (B, P) with -1 where they are to be drawn, and lengths (B,)."""

    ids: torch.Tensor
    bins: torch.Tensor
    lengths: torch.Tensor


@torch.inference_mode()
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
    """Draw cells gene by gene, each with the bin of its expression.

    No gene comes twice in a cell, and no special token but EOS, which ends it; bin 0, for genes without counts, is
    never drawn. The random numbers of a cell depend on `seed` and on its number alone, neither on the other cells nor
    on torch's own generator.

    Parameters
    ----------
    model
        The model; it computes without dropout, and is left in its mode.
    n_cells
        Number of cells B.
    prompt
        Tokens that the cells begin with, in the manner of a tokenizer's batch: ``input_ids`` (P,) for all cells or
        (B, P), and if given ``values`` (the bins as numbers, NaN where a bin is to be drawn; without them all are) and
        ``attention_mask``, of the same shape. `first_id` is put in front unless all of them begin with it.
    temperature
        Logits of genes and bins are divided by it: below 1 the likely becomes likelier.
    top_k
        Draw among so many of the likeliest genes only.
    seed
        Seed of what is drawn.
    condition
        Class of each cell, int64, shape (B,), or one for all; 0 or None for none.
    max_len
        Most tokens of a cell, all included; None for as many as `model` and the genes allow.
    eos_id
        Token that ends a cell; None lets all cells grow to `max_len`. It is not drawn as long as a cell has no gene.
    first_id
        Token that cells begin with; None for a model of cells that begin with a gene, which needs a prompt.
    n_special
        Ids below this one are those of special tokens.
    first_cell
        Number of the first cell, where cells are generated in several calls.

    Raises
    ------
    OptionError
        If an argument cannot be used.
    """
    check_count("n_cells", n_cells, "cells")
    check_positive("temperature", temperature)
    check_seed(seed)
    if top_k is not None:
        check_count("top_k", top_k, "genes")
    device = next(model.parameters()).device
    max_len = _checked_length(model, max_len, int(first_id is not None), int(eos_id is not None), n_special)
    begin = _checked_prompt(prompt, n_cells, first_id, n_special, model, max_len)
    classes = _checked_condition(condition, n_cells, model.n_conditions, device)
    draws_bt2 = _random_numbers(n_cells, max_len, seed, first_cell).to(device)
    with _evaluating(model):
        cells = _Cells(model, begin, n_special, eos_id, temperature, top_k)
        for step in range(max_len):
            gene_b, bin_b = cells.choose(step, draws_bt2[:, step])
            if not cells.add(gene_b, bin_b):
                break
            if step + 1 < max_len:
                cells.look(classes)
        return cells.tokens()


class _Cells:
    """Cells that grow by a token at a time."""

    def __init__(
        self,
        model: AutoregressiveTransformer,
        begin: _Prompt,
        n_special: int,
        eos_id: int | None,
        temperature: float,
        top_k: int | None,
    ) -> None:
        self.model, self.n_special, self.eos_id = model, n_special, eos_id
        self.temperature, self.top_k = temperature, top_k
        device = next(model.parameters()).device
        self.begin = _Prompt(*(part.to(device) for part in begin))
        self.rows = torch.arange(len(begin.ids), device=device)
        self.used_bv = torch.zeros((len(begin.ids), model.vocab_size), dtype=torch.bool, device=device)
        self.used_bv[:, :n_special] = True
        self.grows_b = torch.ones_like(self.rows, dtype=torch.bool)
        self.has_genes_b = torch.zeros_like(self.grows_b)
        self.cache = KeyValueCache()
        self.logits: tuple[torch.Tensor, torch.Tensor] | None = None
        self.columns: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def choose(self, step: int, random_b2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next gene and its bin of each cell, int64, shape (B,): those of the prompt, or drawn."""
        gene_b, bin_b = torch.zeros_like(self.rows), torch.zeros_like(self.rows)
        given_b = step < self.begin.lengths
        if self.logits is not None:
            gene_logits_bv, bin_logits = self.logits
            allowed_bv = ~self.used_bv
            left_b = allowed_bv.any(dim=1)
            if self.eos_id is not None:
                allowed_bv[:, self.eos_id] = self.has_genes_b | ~left_b
            else:
                self.grows_b &= given_b | left_b
            gene_b = _draw(gene_logits_bv, allowed_bv, self.temperature, self.top_k, random_b2[:, 0])
            expressed = torch.arange(bin_logits.shape[1], device=bin_logits.device) > 0
            bin_b = _draw(bin_logits, expressed.expand_as(bin_logits), self.temperature, None, random_b2[:, 1])
        if step < self.begin.ids.shape[1]:
            gene_b = torch.where(given_b, self.begin.ids[:, step], gene_b)
            known_b = given_b & (self.begin.bins[:, step] >= 0)
            bin_b = torch.where(known_b, self.begin.bins[:, step], bin_b)
        return gene_b, bin_b

    def add(self, gene_b: torch.Tensor, bin_b: torch.Tensor) -> bool:
        """Add a token to the cells that grow; return whether there was any."""
        if not bool(self.grows_b.any()):
            return False
        is_gene_b = self.grows_b & (gene_b >= self.n_special)
        gene_b = gene_b.masked_fill(~self.grows_b, PAD_ID)
        self.columns.append((gene_b, bin_b.masked_fill(~is_gene_b, 0), self.grows_b))
        self.used_bv[self.rows, gene_b] = True
        self.has_genes_b = self.has_genes_b | is_gene_b
        if self.eos_id is not None:
            self.grows_b = self.grows_b & (gene_b != self.eos_id)
        return True

    def look(self, classes: torch.Tensor | None) -> None:
        """Let the model predict what follows on the last token; those before are in the cache."""
        gene_b, bin_b, token_b = (part.unsqueeze(1) for part in self.columns[-1])
        self.logits = self.model.next_token(gene_b, token_b, bin_b.float(), self.cache, classes)

    def tokens(self) -> GeneratedCells:
        """Return the cells so far."""
        ids_bs, bins_bs, mask_bs = (torch.stack(parts, dim=1) for parts in zip(*self.columns, strict=True))
        values_bs = self.model.bin_values[bins_bs].masked_fill(bins_bs == 0, 0.0)
        return GeneratedCells(ids_bs, values_bs, bins_bs, mask_bs)


def _draw(
    logits_bv: torch.Tensor, allowed_bv: torch.Tensor, temperature: float, top_k: int | None, random_b: torch.Tensor
) -> torch.Tensor:
    """Draw one of the allowed entries of each row by inverting its distribution function, int64, shape (B,)."""
    logits_bv = (logits_bv.double() / temperature).masked_fill(~allowed_bv, float("-inf"))
    if top_k is not None and top_k < logits_bv.shape[1]:
        least_b1 = logits_bv.topk(top_k, dim=1).values[:, -1:]
        logits_bv = logits_bv.masked_fill(logits_bv < least_b1, float("-inf"))
    # Rows in which nothing is allowed are those of cells that have ended.
    sums_bv = logits_bv.softmax(dim=1).nan_to_num(0.0).cumsum(dim=1)
    aim_b1 = (random_b * sums_bv[:, -1]).unsqueeze(1)
    return torch.searchsorted(sums_bv, aim_b1, right=True).squeeze(1).clamp(max=logits_bv.shape[1] - 1)


def _random_numbers(n_cells: int, n_steps: int, seed: int, first_cell: int) -> torch.Tensor:
    """Return numbers in [0, 1) for the gene and the bin of each step of each cell, float64, shape (B, n_steps, 2)."""
    numbers = torch.empty((n_cells, n_steps, 2), dtype=torch.float64)
    generator = torch.Generator()
    for row in range(n_cells):
        digest = hashlib.blake2b(f"{seed} {first_cell + row}".encode(), digest_size=7).digest()
        generator.manual_seed(int.from_bytes(digest, "little"))
        torch.rand((n_steps, 2), generator=generator, dtype=torch.float64, out=numbers[row])
    return numbers.clamp_(max=_LARGEST)


def _checked_length(
    model: AutoregressiveTransformer, max_len: int | None, n_first: int, n_last: int, n_special: int
) -> int:
    most = n_first + model.vocab_size - n_special + n_last
    if max_len is None:
        return min(most, model.max_seq_len)
    check_count("max_len", max_len, "tokens", least=1 + n_first)
    if max_len > model.max_seq_len:
        raise OptionError(f"max_len={max_len} is above max_seq_len={model.max_seq_len} of the model; lower it.")
    if max_len > most:
        raise OptionError(
            f"max_len={max_len} is more than the {model.vocab_size - n_special} genes and {n_first + n_last} special "
            "tokens that a cell can have, as no gene comes twice; lower it."
        )
    return int(max_len)


def _checked_condition(
    condition: torch.Tensor | int | None, n_cells: int, n_conditions: int, device: torch.device
) -> torch.Tensor | None:
    if condition is None:
        return None
    classes = torch.as_tensor(condition, device=device)
    if classes.dtype.is_floating_point or classes.dtype == torch.bool or classes.ndim > 1:
        raise OptionError(f"condition is of {classes.dtype} and shape {tuple(classes.shape)}; give whole numbers (B,).")
    if classes.ndim == 1 and len(classes) != n_cells:
        raise OptionError(f"condition has {len(classes)} classes for n_cells={n_cells}; give one, or one for each.")
    if bool(((classes < 0) | (classes > n_conditions)).any()):
        wrong = int(classes[(classes < 0) | (classes > n_conditions)].flatten()[0])
        raise OptionError(f"condition={wrong} is not between 0 (none) and n_conditions={n_conditions} of the model.")
    return classes.long().expand(n_cells)


def _checked_prompt(
    prompt: Mapping[str, torch.Tensor] | None,
    n_cells: int,
    first_id: int | None,
    n_special: int,
    model: AutoregressiveTransformer,
    max_len: int,
) -> _Prompt:
    """Return what the cells begin with, tokens first and padding behind them."""
    ids, values = torch.empty((n_cells, 0), dtype=torch.int64), torch.empty((n_cells, 0))
    mask = torch.empty((n_cells, 0), dtype=torch.bool)
    if prompt is not None:
        ids, values, mask = _prompt_tensors(prompt, n_cells)
    # Tokens come together, whatever the pattern of the padding.
    place = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)
    ids, values, mask = ids.gather(1, place), values.gather(1, place), mask.gather(1, place)
    if first_id is not None and not (ids.shape[1] and bool((ids[:, 0] == first_id).all())):
        ids, values = nn.functional.pad(ids, (1, 0), value=first_id), nn.functional.pad(values, (1, 0))
        mask = nn.functional.pad(mask, (1, 0), value=True)
    lengths = mask.sum(dim=1)
    if int(lengths.min()) == 0:
        raise OptionError("first_id=None needs a prompt with a token for every cell; give one.")
    if int(lengths.max()) > max_len:
        raise OptionError(f"prompt has {int(lengths.max())} tokens, the first included, but max_len={max_len}.")
    is_first = torch.zeros_like(mask)
    is_first[:, 0] = first_id is not None
    allowed = (ids >= n_special) & (ids < model.vocab_size) | is_first
    if not bool(allowed[mask].all()):
        raise OptionError(f"prompt has the token {int(ids[mask & ~allowed][0])}, which is no gene; leave it out.")
    for row in range(n_cells):
        if len(ids[row, : lengths[row]].unique()) < int(lengths[row]):
            raise OptionError(f"prompt has a gene twice in cell {row}; give each once.")
    bins = values.nan_to_num(-1.0).round().long().masked_fill(is_first, 0)
    known = mask & ~is_first & ~values.isnan()
    wrong = known & ((bins < 1) | (bins >= model.n_bins) | (values != bins))
    if bool(wrong.any()):
        raise OptionError(
            f"prompt has the value {float(values[wrong][0]):g}, which is no bin from 1 to {model.n_bins - 1}; give the "
            "bins of the tokenizer, or NaN for bins to be drawn."
        )
    if first_id is None and not bool(known[:, 0].all()):
        raise OptionError("prompt has no bin for the first token, which nothing predicts; give it in values.")
    return _Prompt(ids, bins, lengths)


def _prompt_tensors(
    prompt: Mapping[str, torch.Tensor], n_cells: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, values and mask of a prompt, shape (B, P)."""
    if not isinstance(prompt, Mapping) or "input_ids" not in prompt:
        raise OptionError("prompt is no mapping with 'input_ids'; give a batch of the tokenizer.")
    ids = torch.as_tensor(prompt["input_ids"]).cpu().long()
    values = prompt.get("values")
    values = torch.full(ids.shape, float("nan")) if values is None else torch.as_tensor(values).cpu().float()
    mask = prompt.get("attention_mask")
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else torch.as_tensor(mask).cpu() != 0
    for name, tensor in (("values", values), ("attention_mask", mask)):
        if tensor.shape != ids.shape:
            raise OptionError(f"prompt has {name} of shape {tuple(tensor.shape)} for ids of {tuple(ids.shape)}.")
    if ids.ndim not in (1, 2) or (ids.ndim == 2 and len(ids) != n_cells):
        raise OptionError(f"prompt has ids of shape {tuple(ids.shape)}; give (P,), or ({n_cells}, P) for n_cells.")
    shape = (n_cells, ids.shape[-1])
    return ids.expand(shape), values.expand(shape), mask.expand(shape)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Turn dropout off, and leave all parts of the model in the mode in which they were."""
    in_training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in in_training:
            part.training = True
