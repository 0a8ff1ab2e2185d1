"""Sizes of version 1, and the five configurations made of them.

They hold numbers only, equal to the published ones; modules check them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from scforge._checks import check_count, check_positive, check_share
from scforge.errors import OptionError

V1_EMBEDDING_DIM: Final = 2048
V1_NUM_HEADS: Final = 8
V1_NUM_LAYERS: Final = 24
V1_MAX_SEQ_LEN: Final = 1024
V1_VOCAB_SIZE: Final = 264
"""The 256 bytes and 8 special tokens, of which two have a use."""
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


@dataclass
class ModelConfig:
    """A model: embedding, encoder, final norm, predictor.

    Parameters
    ----------
    dropout_rate
        Share of attention weights, of hidden units and of what a block adds that is dropped in training.
    embedding_dim
        Width of a token.
    pwff_hidden_dim
        Hidden units of a feed-forward block.
    num_layers
        Number of layers.
    num_heads
        Heads of attention, a divisor of `embedding_dim`.
    vocab_size
        Number of tokens.
    max_wavelength
        Longest wave of the rotary positions.
    scale_factor
        Positions are divided by it; at least 1.

    Examples
    --------
    >>> config = ModelConfig(0.0, embedding_dim=192, pwff_hidden_dim=768, num_layers=4, num_heads=4)
    >>> config.embedding_dim, config.vocab_size
    (192, 264)
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
class EncoderConfig:
    """A stack of layers; fields as in :class:`ModelConfig`.

    Parameters
    ----------
    dropout_rate
        Share that is dropped in training.
    embedding_dim
        Width of a token.
    pwff_hidden_dim
        Hidden units of a feed-forward block.
    num_layers
        Number of layers.
    num_heads
        Heads of attention.
    max_wavelength, scale_factor
        Of the rotary positions.

    Examples
    --------
    >>> EncoderConfig(dropout_rate=0.1, embedding_dim=8, num_layers=2).pwff_hidden_dim
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
class LayerConfig:
    """One layer; fields as in :class:`ModelConfig`.

    Parameters
    ----------
    dropout_rate
        Share that is dropped in training.
    embedding_dim
        Width of a token.
    pwff_hidden_dim
        Hidden units of a feed-forward block.
    num_heads
        Heads of attention.
    max_wavelength, scale_factor
        Of the rotary positions.

    Examples
    --------
    >>> LayerConfig(dropout_rate=0.1, embedding_dim=8).pwff_hidden_dim
    8192
    """

    dropout_rate: float
    embedding_dim: int = V1_EMBEDDING_DIM
    pwff_hidden_dim: int = V1_PWFF_HIDDEN_DIM
    num_heads: int = V1_NUM_HEADS
    max_wavelength: float = V1_MAX_WAVELENGTH
    scale_factor: float = V1_SCALE_FACTOR


@dataclass
class PositionWiseFeedForwardConfig:
    """A feed-forward block; fields as in :class:`ModelConfig`.

    Parameters
    ----------
    dropout_rate
        Share that is dropped in training.
    embedding_dim
        Width of a token.
    pwff_hidden_dim
        Hidden units of a feed-forward block.

    Examples
    --------
    >>> PositionWiseFeedForwardConfig(dropout_rate=0.1, embedding_dim=8).pwff_hidden_dim
    8192
    """

    dropout_rate: float
    embedding_dim: int = V1_EMBEDDING_DIM
    pwff_hidden_dim: int = V1_PWFF_HIDDEN_DIM


@dataclass
class SIGRegConfig:
    """The regularizer of embeddings.

    Parameters
    ----------
    t_max
        Largest t of the characteristic function.
    points
        Number of t, at least 2.
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
    """Return a configuration of a part with the numbers of that of the whole."""
    return kind(**{field.name: getattr(config, field.name) for field in fields(kind)})  # type: ignore[arg-type]


_COUNTS = {
    "embedding_dim": "dimensions",
    "pwff_hidden_dim": "hidden units",
    "num_layers": "layers",
    "num_heads": "heads",
    "vocab_size": "tokens",
    "slices": "directions",
}


def check_config(config: Any, wanted: type | None = None) -> None:
    """Raise unless the numbers of one of the configurations can be used, and it has the fields of `wanted`, if given.

    Examples
    --------
    >>> check_config(ModelConfig(dropout_rate=0.1, num_heads=7))
    Traceback (most recent call last):
        ...
    scforge.errors.OptionError: embedding_dim=2048 is not divisible by num_heads=7; change one of them.
    """
    named = [field.name for field in fields(wanted)] if wanted else []
    usable: bool = is_dataclass(config) and not isinstance(config, type)
    if not usable or not all(hasattr(config, name) for name in named):
        kind = wanted.__name__ if wanted else "one of the configurations"
        given = config.__name__ if isinstance(config, type) else type(config).__name__
        raise OptionError(f"config={given} cannot be used; pass an instance of {kind}.")
    for name, value in vars(config).items():
        if name in _COUNTS:
            check_count(name, value, _COUNTS[name])
        elif name == "points":
            check_count(name, value, "points", least=2)
        elif name in ("max_wavelength", "t_max"):
            check_positive(name, value)
        elif name == "coefficient":
            check_positive(name, value, or_zero=True)
        elif name == "dropout_rate":
            check_share(name, value)
        elif name == "scale_factor":
            check_scale_factor(value)
    if hasattr(config, "num_heads"):
        check_heads(config.embedding_dim, config.num_heads)


def check_heads(width: int, num_heads: int, *, argument: str = "embedding_dim") -> None:
    """Raise unless `width` is divisible into heads of an even width, whose halves are rotated against each other."""
    if width % num_heads:
        raise OptionError(f"{argument}={width} is not divisible by num_heads={num_heads}; change one of them.")
    if (width // num_heads) % 2:
        raise OptionError(
            f"{argument}={width} and num_heads={num_heads} make heads of the odd width {width // num_heads}, which"
            " cannot be rotated by halves; change one of them."
        )


def check_scale_factor(value: float) -> None:
    """Raise unless positions can be divided by `value`, a number of at least 1."""
    check_positive("scale_factor", value)
    if value < 1:
        raise OptionError(f"scale_factor={value} is below 1; give 1, or more for positions that stand closer.")
