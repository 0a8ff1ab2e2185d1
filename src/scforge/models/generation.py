"""Shared parts of generative architectures: prompts, and random numbers per cell.

Shapes: B cells, P tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.nn import functional as F

from scforge._checks import check_count, check_positive, check_seed
from scforge.errors import OptionError, TrainingError

LARGEST = 1.0 - 1e-12
"""Maximum random number, so that its product with a sum of probabilities stays below the sum."""


class Prompt(NamedTuple):
    """Prompts of cells, all of shape (B, P), with tokens first and padding after them.

    ``values`` is NaN for values to sample. ``first`` is true for the special token that cells begin with.
    """

    ids: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    first: torch.Tensor


def read_prompt(
    prompt: Mapping[str, torch.Tensor] | None, n_cells: int, first_id: int | None, n_special: int, vocab_size: int
) -> Prompt:
    """Return the prompts of `n_cells` cells; `first_id` is prepended unless all prompts start with it."""
    ids, values = torch.empty((n_cells, 0), dtype=torch.int64), torch.empty((n_cells, 0))
    mask = torch.empty((n_cells, 0), dtype=torch.bool)
    if prompt is not None:
        ids, values, mask = _read_tensors(prompt, n_cells)
    # Tokens come together, whatever the pattern of the padding.
    order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)
    ids, values, mask = (part.gather(1, order) for part in (ids, values, mask))
    if first_id is not None and not (ids.shape[1] and bool((ids[:, 0] == first_id).all())):
        ids, values = F.pad(ids, (1, 0), value=first_id), F.pad(values, (1, 0))
        mask = F.pad(mask, (1, 0), value=True)
    first = torch.zeros_like(mask)
    first[:, :1] = first_id is not None
    wrong = mask & ~first & ((ids < n_special) | (ids >= vocab_size))
    if bool(wrong.any()):
        raise OptionError(
            f"contains the token {int(ids[wrong][0])}, which is not a gene; remove this token.", argument="prompt"
        )
    again = mask & ~first_of_its_kind(ids.masked_fill(~mask, -1))
    if bool(again.any()):
        row, column = again.nonzero()[0].tolist()
        raise OptionError(
            f"contains gene {int(ids[row, column])} more than once in cell {row}; pass each once.", argument="prompt"
        )
    return Prompt(ids, values, mask, first)


def _read_tensors(prompt: Mapping[str, torch.Tensor], n_cells: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ids, values and mask of a prompt, shape (B, P)."""
    if not isinstance(prompt, Mapping) or "input_ids" not in prompt:
        raise OptionError(
            "is not a mapping with the key 'input_ids'; pass a batch from the tokenizer.", argument="prompt"
        )
    ids = torch.as_tensor(prompt["input_ids"]).cpu().long()
    values, mask = prompt.get("values"), prompt.get("attention_mask")
    values = torch.full(ids.shape, float("nan")) if values is None else torch.as_tensor(values).cpu().float()
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else torch.as_tensor(mask).cpu() != 0
    for name, tensor in (("values", values), ("attention_mask", mask)):
        if tensor.shape != ids.shape:
            raise OptionError(
                f"has {name} of shape {tuple(tensor.shape)}, but input_ids of shape {tuple(ids.shape)}; pass "
                "one number per token.",
                argument="prompt",
            )
    if ids.ndim not in (1, 2) or (ids.ndim == 2 and len(ids) != n_cells):
        raise OptionError(
            f"has input_ids of shape {tuple(ids.shape)}; pass shape (P,) or ({n_cells}, P).", argument="prompt"
        )
    shape = (n_cells, ids.shape[-1])
    return ids.expand(shape), values.expand(shape), mask.expand(shape)


def check_drawing(n_cells: int, temperature: float, seed: int, top_k: int | None) -> None:
    """Raise an error if cells cannot be sampled with these options."""
    check_count("n_cells", n_cells, "cells")
    check_positive("temperature", temperature)
    check_seed(seed)
    if top_k is not None:
        check_count("top_k", top_k, "genes")


def first_of_its_kind(genes_bs: torch.Tensor) -> torch.Tensor:
    """Return whether each entry is the first entry with its value in the row, bool, (B, S)."""
    sorted_bs, order_bs = genes_bs.sort(dim=1, stable=True)
    first_bs = torch.ones_like(sorted_bs, dtype=torch.bool)
    first_bs[:, 1:] = sorted_bs.diff(dim=1) != 0
    return torch.zeros_like(first_bs).scatter(1, order_bs, first_bs)


def generator_of(name: str) -> torch.Generator:
    """Return a random generator that depends only on `name`."""
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def softmax(
    logits_bv: torch.Tensor, allowed_bv: torch.Tensor, temperature: float, top_k: int | None = None
) -> torch.Tensor:
    """Return probabilities of the allowed entries, float64, shape (B, V); rows without allowed entries are zeros."""
    if not bool(logits_bv.isfinite().all()):
        raise TrainingError("the model predicts NaN or infinite values; train it again with a lower lr.")
    logits_bv = logits_bv.double().masked_fill(~allowed_bv, float("-inf"))
    if top_k is not None and top_k < logits_bv.shape[1]:
        likeliest_bk = logits_bv.topk(top_k, dim=1).indices
        among_bv = torch.zeros_like(allowed_bv).scatter(1, likeliest_bk, True)
        logits_bv = logits_bv.masked_fill(~among_bv, float("-inf"))
    # Taken off before the division, which may be by next to nothing.
    logits_bv = (logits_bv - logits_bv.amax(dim=1, keepdim=True)) / temperature
    return logits_bv.softmax(dim=1).nan_to_num(0.0)


def draw(shares_bv: torch.Tensor, random_b: torch.Tensor) -> torch.Tensor:
    """Sample an entry of each row by inverting its distribution function, int64, shape (B,)."""
    sums_bv = shares_bv.cumsum(dim=1)
    aim_b1 = (random_b * sums_bv[:, -1]).unsqueeze(1)
    return torch.searchsorted(sums_bv, aim_b1, right=True).squeeze(1).clamp(max=shares_bv.shape[1] - 1)
