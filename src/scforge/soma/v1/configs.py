"""Sizes of version 1, the five published configurations, and checks of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final

from scforge._checks import check_count, check_positive, check_share
from scforge.errors import DataError, OptionError

V1_EMBEDDING_DIM: Final = 2048
V1_NUM_HEADS: Final = 8
V1_NUM_LAYERS: Final = 24
V1_MAX_SEQ_LEN: Final = 1024
V1_VOCAB_SIZE: Final = 264
"""Vocabulary size: 256 bytes and 8 special tokens, two of which are used."""
V1_PWFF_HIDDEN_DIM: Final = 8192
V1_MAX_WAVELENGTH: Final = 10_000.0
V1_SCALE_FACTOR: Final = 1.0
V1_PAD_TOKEN_ID: Final = 256
V1_EOS_TOKEN_ID: Final = 257
V1_SIG_REG_T_MAX: Final = 3.0
V1_SIG_REG_SLICES: Final = 256
V1_SIG_REG_POINTS: Final = 17
V1_SIG_REG_COEFFICIENT: Final = 0.02
V1_BATCH_SIZE: Final = 16


_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "embedding_dim": partial(check_count, what="dimensions"),
    "num_features": partial(check_count, what="dimensions"),
    "pwff_hidden_dim": partial(check_count, what="hidden units"),
    "num_layers": partial(check_count, what="layers"),
    "num_heads": partial(check_count, what="heads"),
    "vocab_size": partial(check_count, what="tokens"),
    "slices": partial(check_count, what="directions"),
    "points": partial(check_count, what="points", least=2),
    "dropout_rate": check_share,
    "max_wavelength": check_positive,
    "t_max": check_positive,
    "coefficient": partial(check_positive, or_zero=True),
    "scale_factor": check_positive,
}


def check_numbers(**numbers: Any) -> None:
    """Raise an error if the numbers of a configuration are invalid, individually or in combination.

    Heads have an even width, because their halves are rotated against each other.
    """
    for name, check in _CHECKS.items():
        if name in numbers:
            check(name, numbers[name])
    if (factor := numbers.get("scale_factor", 1)) < 1:
        raise OptionError("is below 1; pass 1, or a larger number for closer positions.", scale_factor=factor)
    width = "embedding_dim" if "embedding_dim" in numbers else "num_features"
    if (n_heads := numbers.get("num_heads")) and numbers[width] % (2 * n_heads):
        raise OptionError(
            f"cannot be split into num_heads={n_heads} heads of even width; change one of the two.",
            argument=width,
            value=numbers[width],
        )


class _Checked:
    def __post_init__(self) -> None:
        check_numbers(**vars(self))


@dataclass
class ModelConfig(_Checked):
    """A model: embedding, encoder, final norm and predictor.

    Parameters
    ----------
    dropout_rate
        Dropout rate of attention weights, hidden units and residual branches.
    embedding_dim
        Width of a token state.
    pwff_hidden_dim
        Number of hidden units in a feed-forward block.
    num_layers
        Number of layers.
    num_heads
        Number of attention heads, a divisor of `embedding_dim`.
    vocab_size
        Number of tokens.
    max_wavelength
        Maximum wavelength of the rotary positions.
    scale_factor
        Divisor of the positions; at least 1.

    Examples
    --------
    >>> config = ModelConfig(0.0, embedding_dim=192, pwff_hidden_dim=768, num_layers=4, num_heads=4)
    >>> config.embedding_dim, config.vocab_size
    (192, 264)
    >>> ModelConfig(0.0, num_heads=7)
    Traceback (most recent call last):
        ...
    scforge.errors.OptionError: embedding_dim=2048 cannot be split into num_heads=7 heads of even width; change ...
    """

    dropout_rate: float
    embedding_dim: int = V1_EMBEDDING_DIM
    pwff_hidden_dim: int = V1_PWFF_HIDDEN_DIM
    num_layers: int = V1_NUM_LAYERS
    num_heads: int = V1_NUM_HEADS
    vocab_size: int = V1_VOCAB_SIZE
    max_wavelength: float = V1_MAX_WAVELENGTH
    scale_factor: float = V1_SCALE_FACTOR


@dataclass
class EncoderConfig(_Checked):
    """A stack of layers, with fields as in :class:`ModelConfig`.

    Parameters
    ----------
    dropout_rate
        Dropout rate in training.
    embedding_dim
        Width of a token state.
    pwff_hidden_dim
        Number of hidden units in a feed-forward block.
    num_layers
        Number of layers.
    num_heads
        Number of attention heads.
    max_wavelength, scale_factor
        Parameters of the rotary positions.

    Examples
    --------
    >>> EncoderConfig(dropout_rate=0.1, embedding_dim=16, num_layers=2).pwff_hidden_dim
    8192
    """

    dropout_rate: float
    embedding_dim: int = V1_EMBEDDING_DIM
    pwff_hidden_dim: int = V1_PWFF_HIDDEN_DIM
    num_layers: int = V1_NUM_LAYERS
    num_heads: int = V1_NUM_HEADS
    max_wavelength: float = V1_MAX_WAVELENGTH
    scale_factor: float = V1_SCALE_FACTOR


@dataclass
class LayerConfig(_Checked):
    """One layer, with fields as in :class:`ModelConfig`.

    Parameters
    ----------
    dropout_rate
        Dropout rate in training.
    embedding_dim
        Width of a token state.
    pwff_hidden_dim
        Number of hidden units in a feed-forward block.
    num_heads
        Number of attention heads.
    max_wavelength, scale_factor
        Parameters of the rotary positions.

    Examples
    --------
    >>> LayerConfig(dropout_rate=0.1, embedding_dim=16).pwff_hidden_dim
    8192
    """

    dropout_rate: float
    embedding_dim: int = V1_EMBEDDING_DIM
    pwff_hidden_dim: int = V1_PWFF_HIDDEN_DIM
    num_heads: int = V1_NUM_HEADS
    max_wavelength: float = V1_MAX_WAVELENGTH
    scale_factor: float = V1_SCALE_FACTOR


@dataclass
class PositionWiseFeedForwardConfig(_Checked):
    """A feed-forward block, with fields as in :class:`ModelConfig`.

    Parameters
    ----------
    dropout_rate
        Dropout rate in training.
    embedding_dim
        Width of a token state.
    pwff_hidden_dim
        Number of hidden units in a feed-forward block.

    Examples
    --------
    >>> PositionWiseFeedForwardConfig(dropout_rate=0.1, embedding_dim=8).pwff_hidden_dim
    8192
    """

    dropout_rate: float
    embedding_dim: int = V1_EMBEDDING_DIM
    pwff_hidden_dim: int = V1_PWFF_HIDDEN_DIM


@dataclass
class SIGRegConfig(_Checked):
    """Settings of SIGReg, the embedding regularizer.

    Parameters
    ----------
    t_max
        Maximum t of the characteristic function.
    points
        Number of values of t, at least 2.
    slices
        Number of random directions.
    coefficient
        Weight in the loss.

    Examples
    --------
    >>> SIGRegConfig(slices=64)
    SIGRegConfig(t_max=3.0, points=17, slices=64, coefficient=0.02)
    """

    t_max: float = V1_SIG_REG_T_MAX
    points: int = V1_SIG_REG_POINTS
    slices: int = V1_SIG_REG_SLICES
    coefficient: float = V1_SIG_REG_COEFFICIENT


def part_of[C](config: Any, kind: type[C]) -> C:
    """Return the configuration of a part, with values from the model configuration."""
    return kind(**{field.name: getattr(config, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def check_config(config: Any, kind: type) -> None:
    """Raise an error if a configuration lacks a field of `kind`."""
    if lacking := [field.name for field in fields(kind) if not hasattr(config, field.name)]:
        raise OptionError(f"config={config!r:.60} has no field {lacking[0]}; pass a {kind.__name__}(...).")


def check_whole(argument: str, values: Any, kind: type = object) -> None:
    """Raise an error if `values` are not integers of shape (B, S) in an array of the type `kind` of the framework."""
    if not isinstance(values, kind):
        raise DataError(f"is of type {type(values).__name__}; pass a {kind.__name__}.", argument=argument)
    dtype, shape = getattr(values, "dtype", type(values).__name__), tuple(getattr(values, "shape", ()))
    if "int" not in str(dtype) or len(shape) != 2:
        raise DataError(f"has dtype {dtype} and shape {shape}; pass integers of shape (batch, seq).", argument=argument)


def check_tokens(argument: str, values: Any, vocab_size: int) -> None:
    """Raise an error if a token is outside the vocabulary."""
    if values.shape[0] and values.shape[1] and not 0 <= int(values.min()) <= int(values.max()) < vocab_size:
        wrong = values.min() if values.min() < 0 else values.max()
        raise DataError(
            f"contains {int(wrong)}, which is not in the vocabulary; pass token ids from 0 to {vocab_size - 1}.",
            argument=argument,
        )


def check_one_a_token(argument: str, values: Any, of: str, tokens: Any, *, or_one_row: bool = False) -> None:
    """Raise an error if `values` does not have the shape of `tokens` (argument `of`), or optionally of one row."""
    if tuple(values.shape) not in {tuple(tokens.shape), *([(1, tokens.shape[1])] if or_one_row else [])}:
        raise DataError(
            f"has shape {tuple(values.shape)}, but {of} has shape {tuple(tokens.shape)}; pass one value per token.",
            argument=argument,
        )


def check_states(x: Any, noise: Any = None) -> None:
    """Raise an error if `x` are not real numbers of shape (..., H), or `noise` is not of shape (H, directions)."""
    if "float" not in str(x.dtype) or not x.shape:
        raise DataError(
            f"has dtype {x.dtype} and shape {tuple(x.shape)}; pass states of shape (..., width).", argument="x"
        )
    if noise is not None and (len(noise.shape) != 2 or len(noise) != x.shape[-1]):
        raise DataError(f"has shape {tuple(noise.shape)}; pass shape ({x.shape[-1]}, directions).", argument="noise")
