"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves rotated as in GPT-NeoX.

Shapes: ... anything, N heads, D dimensions of a head.
"""

from __future__ import annotations

import torch

__all__ = ["rotate", "rotation_of"]

_LONGEST_WAVE = 10_000.0


def rotation_of(positions: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the cosines and sines of positions, float32, shape (2, ..., 1, D / 2); the 1 is for the heads."""
    half = torch.arange(head_dim // 2, device=positions.device, dtype=torch.float32)
    angles = positions.float().unsqueeze(-1) * _LONGEST_WAVE ** (-2.0 * half / head_dim)
    return torch.stack([angles.cos(), angles.sin()]).unsqueeze(-2)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys of shape (..., N, D) in float32; they keep their dtype."""
    cos, sin = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
