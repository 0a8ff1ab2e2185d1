"""A low-rank adapter for weighted sums of gene embeddings, which peft has none for."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Embedding
from torch import nn
from torch.nn import functional as F

__all__ = ["LoraBag"]


class LoraBag(Embedding):
    """LoRA for a :class:`torch.nn.EmbeddingBag` that sums.

    The table of V embeddings changes by a product of matrices of shape (V, r) and (r, H), as in peft's layer for
    :class:`torch.nn.Embedding`, whose merging and saving are the same. DoRA has no form for sums, so a bag has a plain
    adapter then, too.

    Parameters
    ----------
    base_layer
        The bag.
    adapter_name, config, r, lora_alpha
        As peft gives them to its own layers.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:
        plain = copy.copy(config)
        plain.use_dora = False
        with warnings.catch_warnings():
            # peft does not know how large a bag is; update_layer says it.
            warnings.filterwarnings("ignore", "Unsupported layer type", UserWarning)
            super().__init__(base_layer, adapter_name, plain, r=r, lora_alpha=lora_alpha)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter, as peft calls it."""
        bag = self.get_base_layer()
        self.in_features, self.out_features = bag.num_embeddings, bag.embedding_dim
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sums, as :class:`torch.nn.EmbeddingBag` is called, shape (B, H)."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        sums = self.base_layer(input, offsets, per_sample_weights)
        if self.disable_adapters or self.merged:
            return sums
        bag = self.get_base_layer()
        for name in self.active_adapters:
            if name not in self.lora_embedding_A:
                continue
            of_genes = F.embedding_bag(
                input,
                self.lora_embedding_A[name].T.contiguous(),
                offsets,
                mode="sum",
                per_sample_weights=per_sample_weights,
                padding_idx=bag.padding_idx,
            )
            sums = sums + of_genes @ self.lora_embedding_B[name].T * self.scaling[name]
        return sums
