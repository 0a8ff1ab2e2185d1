"""Checks of tokens, in torch and in flax."""

from __future__ import annotations

from typing import Any

from scforge.errors import DataError


def check_whole(argument: str, values: Any) -> None:
    """Raise unless `values` are whole numbers of shape (B, S), in an array of the framework."""
    dtype, shape = getattr(values, "dtype", type(values).__name__), tuple(getattr(values, "shape", ()))
    if "int" not in str(dtype) or len(shape) != 2:
        raise DataError(f"{argument} has dtype {dtype} and shape {shape}; pass whole numbers of shape (batch, seq).")


def check_tokens(argument: str, values: Any, vocab_size: int) -> None:
    """Raise if a token is outside the vocabulary."""
    if values.shape[0] and values.shape[1] and not 0 <= int(values.min()) <= int(values.max()) < vocab_size:
        wrong = values.min() if values.min() < 0 else values.max()
        raise DataError(f"{argument} holds {int(wrong)}; pass tokens from 0 to {vocab_size - 1}, the vocabulary.")


def check_one_a_token(argument: str, values: Any, of: str, tokens: Any, *, or_one_row: bool = False) -> None:
    """Raise unless `values` has the shape of `tokens`, which the argument `of` names; or one row of it."""
    if tuple(values.shape) not in {tuple(tokens.shape), *([(1, tokens.shape[1])] if or_one_row else [])}:
        raise DataError(f"{argument} has shape {tuple(values.shape)} and {of} {tuple(tokens.shape)}; pass one a token.")
