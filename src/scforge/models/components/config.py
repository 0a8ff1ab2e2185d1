"""The options of transformer layers, and what they choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_bool, check_choice, check_count, check_positive
from scforge.errors import OptionError

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}

GATED = "swiglu"
"""Activation of a gated feed-forward layer: ``silu(gate) * inner``, both from one projection (Shazeer 2020)."""

NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@dataclass(frozen=True)
class TransformerConfig:
    """Options of a stack of transformer layers, which its layers and their attention receive as a whole.

    Parameters
    ----------
    hidden_dim, num_layers, num_heads
        Width H, number of layers, and number of attention heads N, of which H is a multiple.
    ffn_dim
        Width of the feed-forward layers. If None, uses ``4 * hidden_dim``.
    dropout
        Dropout rate on each residual branch and inside the feed-forward layers.
    activation
        ``"gelu"``, ``"relu"``, ``"silu"``, or ``"swiglu"``, a gated layer with an inner layer twice as wide.
    layer_norm_eps
        Epsilon of the norms.
    norm_first
        Whether to apply norms at the start of each branch (pre-norm) instead of after each sum (post-norm).
    norm
        ``"layer"``, or ``"rms"``, which scales by the root mean square and has no shift.
    bias
        Whether the linear layers have biases.
    final_norm
        Whether a norm follows the last layer. If None, a norm is added to pre-norm layers.
    rotary
        Whether to rotate queries and keys by the position of their token among the tokens of the cell.
    gradient_checkpointing
        Whether to recompute the activations of each layer in the backward pass, which takes less memory and more time.
    unpad
        Whether to remove padding from the computation. If None, removes it if this is faster.

    Raises
    ------
    OptionError
        If a value cannot be used.

    Examples
    --------
    >>> config = TransformerConfig(hidden_dim=8, num_layers=2, num_heads=2)
    >>> config.head_dim, config.inner_dim
    (4, 32)
    """

    hidden_dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int | None = None
    dropout: float = 0.1
    activation: str = "gelu"
    layer_norm_eps: float = 1e-12
    norm_first: bool = True
    norm: str = "layer"
    bias: bool = True
    final_norm: bool | None = None
    rotary: bool = False
    gradient_checkpointing: bool = False
    unpad: bool | None = None

    def __post_init__(self) -> None:
        check_count("hidden_dim", self.hidden_dim, "dimensions")
        check_count("num_layers", self.num_layers, "layers")
        check_count("num_heads", self.num_heads, "heads")
        if self.hidden_dim % self.num_heads:
            raise OptionError(
                f"is not divisible by num_heads={self.num_heads}; change one.", hidden_dim=self.hidden_dim
            )
        check_count("ffn_dim", self.inner_dim, "dimensions")
        check_choice("activation", self.activation, sorted([*ACTIVATIONS, GATED]))
        check_positive("layer_norm_eps", self.layer_norm_eps)
        check_choice("norm", self.norm, sorted(NORMS))
        for name in ("norm_first", "bias", "rotary", "gradient_checkpointing"):
            check_bool(name, getattr(self, name))
        for name in ("final_norm", "unpad"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))
        if self.rotary and self.head_dim % 2:
            raise OptionError(
                f"requires heads of even width, but hidden_dim={self.hidden_dim} and "
                f"num_heads={self.num_heads} give a width of {self.head_dim}; change one of the two.",
                position_embedding="rotary",
            )

    @property
    def head_dim(self) -> int:
        """Width D of an attention head."""
        return self.hidden_dim // self.num_heads

    @property
    def inner_dim(self) -> int:
        """Width F of the feed-forward layers."""
        return 4 * self.hidden_dim if self.ffn_dim is None else self.ffn_dim
