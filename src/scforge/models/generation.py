"""Drawing cells from an autoregressive model, token by token.

Shapes: B cells, P tokens of the longest prompt, S tokens of the longest cell, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from scforge._checks import check_count, check_positive, check_seed
from scforge._constants import CLS_ID, N_SPECIAL, PAD_ID
from scforge.errors import OptionError, TrainingError
from scforge.models._utils import evaluating
from scforge.models.components.attention import KeyValueCache

if TYPE_CHECKING:
    from scforge.models.autoregressive import AutoregressiveTransformer

__all__ = ["GeneratedCells", "generate_cells"]

_AT_ONCE = 128
"""Tokens of a prompt that are read at once, so that masks and states of long prompts stay small."""

_LARGEST = 1.0 - 1e-12
"""Largest random number, so that its product with a sum of probabilities stays below the sum."""


class GeneratedCells(NamedTuple):
    """Tokens of generated cells, padded to the longest, shape (B, S).

    Parameters
    ----------
    input_ids
        Token ids, int64, 0 (PAD) at padding.
    values
        What the bins stand for, float32, 0 at special tokens and padding.
    bin_ids
        Expression bins, int64, 0 at special tokens and padding.
    attention_mask
        True for tokens, bool.

    Examples
    --------
    >>> import torch
    >>> from scforge.models import AutoregressiveTransformer
    >>> model = AutoregressiveTransformer(vocab_size=24, hidden_dim=8, num_layers=1, num_heads=2, n_bins=5)
    >>> cells = model.generate(3, max_len=6, seed=0)
    >>> cells.input_ids.shape, cells.input_ids[:, 0].tolist()
    (torch.Size([3, 6]), [3, 3, 3])
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
    with evaluating(model):
        cells = _Cells(model, begin, classes, max_len, n_special, eos_id, temperature, top_k)
        growing = cells.begin_with_prompt()
        while growing:
            growing = cells.add(*cells.choose(draws_bt2[cells.rows, cells.lengths_b.clamp(max=max_len - 1)]))
        return cells.tokens()


class _Cells:
    """Cells that grow by a token at a time."""

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
        """Take over each prompt up to the first bin that is to be drawn; return whether any cell is to grow.

        The tokens are read many at a time rather than one by one.
        """
        ids_bp, bins_bp, lengths_b = self.prompt
        places = torch.arange(ids_bp.shape[1], device=ids_bp.device)
        known_bp = ((places < lengths_b[:, None]) & (bins_bp >= 0)).long().cumprod(dim=1).bool()
        for start in range(0, int(known_bp.sum(dim=1).max()), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            self._look(*self._append(ids_bp[:, part], bins_bp[:, part], known_bp[:, part]))
        return self._grow()

    def choose(self, random_b2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next gene and its bin of each cell, int64, shape (B,): those of the prompt, or drawn."""
        given_b = self.lengths_b < self.prompt.lengths
        gene_b = _draw(self._shares(self.gene_logits_bv), random_b2[:, 0])
        expressed_bn = (torch.arange(self.model.n_bins, device=gene_b.device) > 0).expand_as(self.bin_logits)
        bin_b = _draw(_softmax(self.bin_logits, expressed_bn, self.temperature), random_b2[:, 1])
        place_b1 = self.lengths_b.clamp(max=self.prompt.ids.shape[1] - 1).unsqueeze(1)
        given_bin_b = self.prompt.bins.gather(1, place_b1).squeeze(1)
        gene_b = torch.where(given_b, self.prompt.ids.gather(1, place_b1).squeeze(1), gene_b)
        return gene_b, torch.where(given_b & (given_bin_b >= 0), given_bin_b, bin_b)

    def _shares(self, logits_bv: torch.Tensor) -> torch.Tensor:
        """Return the probability of each next token, float64, shape (B, V).

        A cell ends with the probability that the model says. Genes that it has already make way for its other genes
        alone, else cells would end too early.
        """
        shares_bv = _softmax(logits_bv, ~self.used_bv, self.temperature, self.top_k)
        if self.eos_id is None:
            return shares_bv
        end_b = _softmax(logits_bv, self.could_v.expand_as(logits_bv), self.temperature)[:, self.eos_id]
        end_b = end_b * self.has_genes_b
        end_b = torch.where((~self.used_bv).any(dim=1), end_b, 1.0)
        shares_bv = shares_bv * (1.0 - end_b).unsqueeze(1)
        shares_bv[:, self.eos_id] = end_b
        return shares_bv

    def add(self, gene_b: torch.Tensor, bin_b: torch.Tensor) -> bool:
        """Add a token to the cells that grow; return whether any is to grow further."""
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
        """Add tokens, and return them with zeros where there is none."""
        ids_bs = ids_bs.masked_fill(~tokens_bs, PAD_ID)
        is_gene_bs = tokens_bs & (ids_bs >= self.n_special)
        self.parts.append((ids_bs, bins_bs.masked_fill(~is_gene_bs, 0), tokens_bs))
        self.used_bv.scatter_(1, ids_bs, True)
        self.lengths_b = self.lengths_b + tokens_bs.sum(dim=1)
        self.has_genes_b = self.has_genes_b | is_gene_bs.any(dim=1)
        return self.parts[-1]

    def _grow(self) -> bool:
        """End the cells that are full, or have all genes and no EOS to come; return whether any is left."""
        self.grows_b = self.grows_b & (self.lengths_b < self.max_len)
        if self.eos_id is None:
            self.grows_b = self.grows_b & ~self.used_bv.all(dim=1)
        return bool(self.grows_b.any())

    def _look(self, ids_bs: torch.Tensor, bins_bs: torch.Tensor, tokens_bs: torch.Tensor) -> None:
        """Let the model predict what follows on the last of these tokens; those before are in the cache."""
        new = self.model.next_token(ids_bs, tokens_bs, bins_bs.float(), self.cache, self.classes)
        more_b1 = tokens_bs.any(dim=1, keepdim=True)
        self.gene_logits_bv = torch.where(more_b1, new[0], self.gene_logits_bv)
        self.bin_logits = torch.where(more_b1, new[1], self.bin_logits)

    def tokens(self) -> GeneratedCells:
        """Return the cells, the tokens of each together."""
        ids_bs, bins_bs, mask_bs = (torch.cat(parts, dim=1) for parts in zip(*self.parts, strict=True))
        place_bs = torch.argsort((~mask_bs).to(torch.uint8), dim=1, stable=True)[:, : int(self.lengths_b.max())]
        ids_bs, bins_bs, mask_bs = (part.gather(1, place_bs) for part in (ids_bs, bins_bs, mask_bs))
        values_bs = self.model.bin_values[bins_bs].masked_fill(bins_bs == 0, 0.0)
        return GeneratedCells(ids_bs, values_bs, bins_bs, mask_bs)


def _softmax(
    logits_bv: torch.Tensor, allowed_bv: torch.Tensor, temperature: float, top_k: int | None = None
) -> torch.Tensor:
    """Return the probabilities of the allowed entries, float64, shape (B, V); zeros in a row without any."""
    if not bool(logits_bv.isfinite().all()):
        raise TrainingError("the model predicts numbers that are not finite; train it again with a lower lr.")
    logits_bv = logits_bv.double().masked_fill(~allowed_bv, float("-inf"))
    if top_k is not None and top_k < logits_bv.shape[1]:
        likeliest_bk = logits_bv.topk(top_k, dim=1).indices
        among_bv = torch.zeros_like(allowed_bv).scatter(1, likeliest_bk, True)
        logits_bv = logits_bv.masked_fill(~among_bv, float("-inf"))
    # Taken off before the division, which may be by next to nothing.
    logits_bv = (logits_bv - logits_bv.amax(dim=1, keepdim=True)) / temperature
    return logits_bv.softmax(dim=1).nan_to_num(0.0)


def _draw(shares_bv: torch.Tensor, random_b: torch.Tensor) -> torch.Tensor:
    """Draw an entry of each row by inverting its distribution function, int64, shape (B,)."""
    sums_bv = shares_bv.cumsum(dim=1)
    aim_b1 = (random_b * sums_bv[:, -1]).unsqueeze(1)
    return torch.searchsorted(sums_bv, aim_b1, right=True).squeeze(1).clamp(max=shares_bv.shape[1] - 1)


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
    sorted_ids = ids.masked_fill(~mask, -1).sort(dim=1).values
    twice = (sorted_ids.diff(dim=1) == 0) & (sorted_ids[:, 1:] >= 0)
    if bool(twice.any()):
        row, place = (int(number) for number in twice.nonzero()[0])
        raise OptionError(f"prompt has the gene {int(sorted_ids[row, place])} twice in cell {row}; give each once.")
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
