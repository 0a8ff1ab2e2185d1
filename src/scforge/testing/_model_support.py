"""Batches and comparisons for the checks of models.

Shapes: B cells, S tokens of the longest cell, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scforge._constants import CLS_ID, IGNORE_LABEL, MASK_ID, N_SPECIAL
from scforge.errors import OptionError
from scforge.models.components.gene_vectors import GeneVectorEmbedding
from scforge.testing._rules import require

__all__ = [
    "N_TOKENS",
    "VOCAB_SIZE",
    "Batch",
    "Subject",
    "encode",
    "jittered",
    "per_token",
    "require_close",
    "require_equal",
    "subject_of",
    "took_part",
    "widened",
]

Batch = dict[str, torch.Tensor]

N_TOKENS, VOCAB_SIZE = 12, 60
_BLANKS = {"labels": IGNORE_LABEL, "bin_labels": IGNORE_LABEL}
_LENGTHS = (12, 12, 9, 5, 3)
_N_BINS = 5
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Subject:
    """A model on trial: in evaluation mode, without gradients, for each rule.

    ``again`` makes one of other weights. ``tokens`` is a batch to encode, ``masked`` the same with hidden tokens, and
    ``shown`` has labels at all tokens and hides none.
    """

    model: nn.Module
    again: Callable[[], nn.Module]
    tokens: Batch
    masked: Batch
    shown: Batch


def subject_of(model: nn.Module, remake: Callable[[], nn.Module] | None) -> Subject:
    """Return what the rules look at; `model` itself is left alone."""
    vocab_size = getattr(model, "vocab_size", VOCAB_SIZE)
    if vocab_size < N_SPECIAL + N_TOKENS:
        raise OptionError(f"vocab_size={vocab_size} is too small to be checked; make the model with {VOCAB_SIZE}.")
    model = jittered(_filled(copy.deepcopy(model).cpu()))

    def again() -> nn.Module:
        return jittered(_filled(remake()) if remake is not None else copy.deepcopy(model), std=0.1).eval()

    return Subject(model, again, *_batches(model, vocab_size))


def jittered(model: nn.Module, std: float = 0.02) -> nn.Module:
    """Move all weights a little: some start at zero on purpose, and then nothing passes through them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=std)
    return model


def _filled(model: nn.Module) -> nn.Module:
    """Give embeddings of gene vectors that wait for their vectors some."""
    for part in model.modules():
        if isinstance(part, GeneVectorEmbedding) and not part.scale:
            vectors = torch.randn(part.vocab_size, part.vectors.embedding_dim)
            vectors[: part.n_learned] = torch.nan
            part.fill(vectors)
    return model


def _batches(model: nn.Module, vocab_size: int) -> tuple[Batch, Batch, Batch]:
    generator = torch.Generator().manual_seed(1)
    n_cells = len(_LENGTHS)
    mask = torch.arange(N_TOKENS) < torch.tensor(_LENGTHS)[:, None]
    ids = torch.stack([torch.randperm(vocab_size - N_SPECIAL, generator=generator)[:N_TOKENS] for _ in range(n_cells)])
    ids += N_SPECIAL
    ids[:, 0] = CLS_ID
    genes = mask & (ids != CLS_ID)
    n_bins = min(getattr(model, "n_bins", _N_BINS), _N_BINS)
    tokens = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        # Whole numbers, as some models take them for counts.
        "values": torch.randint(1, 9, ids.shape, generator=generator).float() * genes,
        "bin_ids": torch.randint(1, n_bins, ids.shape, generator=generator) * genes,
    }
    if "condition" in inspect.signature(model.forward).parameters:
        tokens["condition"] = torch.arange(n_cells) % (1 + int(getattr(model, "n_conditions", 0) or 0))
    hidden = torch.zeros_like(mask)
    hidden[:, 1], hidden[:3, 4] = True, True
    masked = tokens | {
        "input_ids": tokens["input_ids"].masked_fill(hidden, MASK_ID),
        "values": tokens["values"].masked_fill(hidden, 0.0),
        "bin_ids": tokens["bin_ids"].masked_fill(hidden, 0),
        "masked_positions": hidden,
        **_labels(tokens, hidden),
    }
    return tokens, masked, tokens | {"masked_positions": torch.zeros_like(mask), **_labels(tokens, mask)}


def _labels(tokens: Batch, chosen: torch.Tensor) -> Batch:
    return {
        "labels": tokens["input_ids"].masked_fill(~chosen, IGNORE_LABEL),
        "bin_labels": tokens["bin_ids"].masked_fill(~chosen, IGNORE_LABEL),
        "value_labels": tokens["values"].masked_fill(~chosen, 0.0),
    }


def per_token(batch: Batch) -> Batch:
    """Return what has the shape (B, S)."""
    return {key: tensor for key, tensor in batch.items() if tensor.ndim == 2}


def widened(batch: Batch, width: int) -> Batch:
    """Return a batch with more padding, or with less if `width` is negative."""
    return batch | {
        key: nn.functional.pad(tensor, (0, width), value=_BLANKS.get(key, 0))
        for key, tensor in per_token(batch).items()
    }


def encode(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        embeddings: torch.Tensor = model.encode(**batch)
    return embeddings


def took_part(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has a gradient that is not zero."""
    return parameter.grad is not None and bool(parameter.grad.any())


def require_close(one: torch.Tensor, two: torch.Tensor, sentence: str, *, tolerance: float = _TOLERANCE) -> None:
    """Raise unless two tensors are the same but for rounding."""
    require(one.shape == two.shape, f"{sentence} (its shape: {tuple(one.shape)} and {tuple(two.shape)}).")
    one, two = one.detach().double(), two.detach().double()
    require(one.isfinite().all() and two.isfinite().all(), f"{sentence} (there are numbers that are not finite).")
    if one.numel():
        most = float((one - two).abs().max())
        require(most <= tolerance * (1 + float(two.abs().max())), f"{sentence} (by {most:.2g}).")


def require_equal(before: Any, after: Any, sentence: str) -> None:
    """Raise unless two batches are the same."""
    for key in before:
        require(key in after and torch.equal(before[key], after[key]), f"{sentence} ({key!r}).")
