"""An architecture with a head on its cell embeddings.

Shapes: B cells, D dimensions, K outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scforge.models.protocol import ModelOutput

__all__ = ["FineTunedModule"]


class FineTunedModule(nn.Module):
    """An architecture, and a head that takes its cell embeddings.

    Parameters
    ----------
    encoder
        The architecture.
    head
        ``forward(embeddings, batch)`` takes (B, D) and the batch, and returns (B, K).

    Attributes
    ----------
    frozen
        Whether the whole encoder stays as it is; it does not drop anything out then.

    Examples
    --------
    >>> import scforge
    >>> class Head(nn.Linear):
    ...     def forward(self, embeddings, batch):
    ...         return super().forward(embeddings)
    >>> encoder = scforge.models.GenePoolingModel(50, hidden_dim=8)
    >>> module = FineTunedModule(encoder, Head(8, 3))
    >>> ids, mask = torch.tensor([[5, 9]]), torch.ones(1, 2)
    >>> module(ids, mask, values=torch.ones(1, 2)).logits.shape
    torch.Size([1, 3])
    """

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.frozen = False

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **batch: Any) -> torch.Tensor:
        """Return cell embeddings, shape (B, D)."""
        return self.encoder.encode(input_ids=input_ids, attention_mask=attention_mask, **batch)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **batch: Any) -> ModelOutput:
        """Return the outputs of the head as ``logits``, shape (B, K), and ``embeddings``, shape (B, D)."""
        whole = {"input_ids": input_ids, "attention_mask": attention_mask, **batch}
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            embeddings = self.encode(**whole)
        return ModelOutput(logits=self.head(embeddings, whole), embeddings=embeddings)

    def train(self, mode: bool = True) -> FineTunedModule:
        """Switch dropout and the like on or off, but for an encoder that is frozen."""
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self
