"""Heads on cell embeddings.

Shapes: B cells, D dimensions, K outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from scforge._checks import check_count, check_share
from scforge._registry import check_options
from scforge.errors import OptionError

__all__ = ["HEAD_OPTIONS", "PredictionHead", "Standardise", "check_head"]

HEAD_OPTIONS = ("hidden_dim", "dropout")
_SMALLEST = 1e-6


def check_head(head: Any) -> dict[str, Any]:
    """Return the option `head` of a task, or raise :class:`~scforge.errors.OptionError`."""
    if head is None:
        return {}
    if not isinstance(head, Mapping):
        raise OptionError(f"head={head!r} is not a dict of options; give e.g. {{'hidden_dim': 128, 'dropout': 0.1}}.")
    check_options("option of head", "head", head, list(HEAD_OPTIONS))
    options = dict(head)
    if "hidden_dim" in options:
        check_count("head['hidden_dim']", options["hidden_dim"], "dimensions", least=0)
    if "dropout" in options:
        check_share("head['dropout']", options["dropout"])
    return options


class Standardise(nn.Module):
    """Subtracts a mean and divides by a scale that are set once, so that a head does not care for units.

    Parameters
    ----------
    n_in
        Number of dimensions D.
    """

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_in))
        self.register_buffer("scale", torch.ones(n_in))

    @torch.no_grad()
    def set_from(self, embeddings: np.ndarray) -> None:
        """Take mean and standard deviation of embeddings, shape (N, D); a constant dimension keeps the scale 1."""
        mean, scale = embeddings.mean(axis=0, dtype=np.float64), embeddings.std(axis=0, dtype=np.float64)
        scale = np.where(scale > _SMALLEST, scale, 1.0)
        self.mean.copy_(torch.from_numpy(mean))
        self.scale.copy_(torch.from_numpy(scale))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return standardised values, shape (B, D)."""
        return (values - self.mean) / self.scale


class PredictionHead(nn.Module):
    """Standardised embeddings, a hidden layer if wanted, and a linear layer.

    Parameters
    ----------
    n_in, n_out
        Dimensions D and outputs K.
    hidden_dim
        Width of a hidden layer; 0 for none.
    dropout
        Dropout before the last layer.

    Examples
    --------
    >>> PredictionHead(8, 3)(torch.randn(5, 8)).shape
    torch.Size([5, 3])
    """

    def __init__(self, n_in: int, n_out: int, *, hidden_dim: int = 0, dropout: float = 0.1) -> None:
        super().__init__()
        self.standardise = Standardise(n_in)
        self.hidden = nn.Sequential(nn.Linear(n_in, hidden_dim), nn.GELU()) if hidden_dim else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(hidden_dim or n_in, n_out)

    def forward(self, embeddings: torch.Tensor, batch: Mapping[str, Any] | None = None) -> torch.Tensor:
        """Return outputs, shape (B, K)."""
        return self.out(self.dropout(self.hidden(self.standardise(embeddings))))
