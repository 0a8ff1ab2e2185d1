"""Causal self-attention with rotary positions."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from scforge.errors import DataError
from scforge.soma.v1.configs import V1_MAX_WAVELENGTH, V1_SCALE_FACTOR, check_numbers

Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation_of(
    positions: torch.Tensor,
    head_dim: int,
    max_wavelength: float = V1_MAX_WAVELENGTH,
    scale_factor: float = V1_SCALE_FACTOR,
    dtype: torch.dtype = torch.float32,
) -> Rotation:
    """Return cosines and sines of the angles by which the pairs of a head are rotated, each (B, S, 1, D / 2).

    Pair i is rotated by ``position / max_wavelength^(2 i / D) / scale_factor`` (Su et al. 2021, arXiv:2104.09864).
    Angles are not computed in a 16-bit dtype: bfloat16 cannot represent all integers above 256, nor float16 all
    integers above 2048.

    Parameters
    ----------
    positions
        Integers, shape (B, S), or (1, S) if all sequences have the same positions.
    head_dim
        Head width D.
    max_wavelength, scale_factor
        As in :class:`~scforge.soma.v1.configs.ModelConfig`.
    dtype
        float32 or float64.
    """
    if positions.dim() == 2 and positions.stride(0) == 0:
        positions = positions[:1]  # one row that was expanded
    pairs = torch.arange(head_dim // 2, dtype=dtype, device=positions.device)
    timescale = max_wavelength ** (2 * pairs / head_dim)
    angles = (positions.to(dtype).unsqueeze(-1) / timescale / scale_factor).unsqueeze(-2)
    return angles.cos(), angles.sin()


def apply_rope(
    inputs: torch.Tensor,
    positions: torch.Tensor,
    head_dim: int,
    max_wavelength: float = V1_MAX_WAVELENGTH,
    scale_factor: float = V1_SCALE_FACTOR,
) -> torch.Tensor:
    """Return queries or keys (B, S, N, D), rotated by their positions (B, S); angles are at least float32.

    The first half of a head is rotated against the second half. For the parameters, see :func:`rotation_of`.

    Raises
    ------
    OptionError
        If `scale_factor` is below 1.
    """
    check_numbers(scale_factor=scale_factor)
    wide = torch.promote_types(inputs.dtype, torch.float32)
    return _rotate(inputs, *rotation_of(positions, head_dim, max_wavelength, scale_factor, wide))


def _rotate(x_bsnd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first half of each head against the second half."""
    first, second = x_bsnd.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_bsnd.dtype)


class MultiHeadAttention(nn.Module):
    """Self-attention in which each token attends to itself and to previous tokens.

    Parameters
    ----------
    num_heads
        Number of heads N.
    num_features
        Width H, a multiple of `num_heads`.
    dropout_rate
        Fraction of attention weights that is dropped in training.
    use_bias
        Whether the four projections have biases.
    max_wavelength, scale_factor
        As in :class:`~scforge.soma.v1.configs.ModelConfig`.

    Raises
    ------
    OptionError
        If the heads do not divide the width, `scale_factor` is below 1, or a number cannot be used.

    Examples
    --------
    >>> attention = MultiHeadAttention(num_heads=2, num_features=8)
    >>> attention(torch.zeros(1, 3, 8), positions=torch.arange(3)[None]).shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        num_heads: int,
        num_features: int,
        *,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        max_wavelength: float = V1_MAX_WAVELENGTH,
        scale_factor: float = V1_SCALE_FACTOR,
    ) -> None:
        super().__init__()
        check_numbers(
            num_heads=num_heads,
            num_features=num_features,
            dropout_rate=dropout_rate,
            max_wavelength=max_wavelength,
            scale_factor=scale_factor,
        )
        self.num_heads = num_heads
        self.num_features = num_features
        self.head_dim = num_features // num_heads
        self.dropout_rate = dropout_rate
        self.max_wavelength = max_wavelength
        self.scale_factor = scale_factor
        self.query = nn.Linear(num_features, num_features, bias=use_bias)
        self.key = nn.Linear(num_features, num_features, bias=use_bias)
        self.value = nn.Linear(num_features, num_features, bias=use_bias)
        self.output = nn.Linear(num_features, num_features, bias=use_bias)

    def forward(
        self,
        inputs: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        rotation: Rotation | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply the attention.

        Parameters
        ----------
        inputs
            States, shape (B, S, H).
        positions
            Positions of the tokens, shape (B, S). If None, queries and keys are not rotated.
        rotation
            Result of :func:`rotation_of`, used instead of `positions` by layers that share it.
        mask
            False where attention is forbidden in addition to the causal mask, bool, of a shape that broadcasts to (B,
            N, S, S), e.g. (B, 1, S, S). It cannot allow a token to attend to later tokens. The output at a token that
            attends to no token, not even itself, is meaningless. If None, uses only the causal mask.

        Returns
        -------
        States, shape (B, S, H).

        Raises
        ------
        DataError
            If `inputs` has a different shape, or `mask` has a different shape or dtype.
        """
        if inputs.dim() != 3 or inputs.shape[-1] != self.num_features:
            raise DataError(
                f"has shape {tuple(inputs.shape)}; pass shape (batch, seq, {self.num_features}).", argument="inputs"
            )
        if mask is not None:
            mask = self._with_causal(mask, inputs)
        heads = (self.num_heads, self.head_dim)
        query, key, value = (part(inputs).unflatten(-1, heads) for part in (self.query, self.key, self.value))
        if rotation is None and positions is not None:
            wide = torch.promote_types(inputs.dtype, torch.float32)
            rotation = rotation_of(positions, self.head_dim, self.max_wavelength, self.scale_factor, wide)
        if rotation is not None:
            query, key = _rotate(query, *rotation), _rotate(key, *rotation)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout_rate if self.training else 0.0,
            is_causal=mask is None,
        )
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _with_causal(self, mask: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return the combination of `mask` and the causal mask, (B, 1 or N, S, S)."""
        n_sequences, n_tokens, _ = inputs.shape
        wanted = (n_sequences, self.num_heads, n_tokens, n_tokens)
        shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        fits = len(shape) == 4 and all(n in (1, m) for n, m in zip(shape, wanted, strict=True))
        if mask.dtype != torch.bool or not fits:
            raise DataError(
                f"has dtype {mask.dtype} and shape {tuple(mask.shape)}; pass a bool tensor with a shape that "
                f"broadcasts to {wanted}.",
                argument="mask",
            )
        before = torch.ones((n_tokens, n_tokens), dtype=torch.bool, device=mask.device).tril()
        return (mask.view(shape) & before).expand(n_sequences, -1, -1, -1)
