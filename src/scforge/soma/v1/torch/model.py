"""The model, which maps bytes to the logits of the next byte.

Shapes: B sequences, S tokens, H width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from scforge._checks import check_bool
from scforge.soma.v1.configs import (
    V1_PAD_TOKEN_ID,
    EncoderConfig,
    ModelConfig,
    check_config,
    check_one_a_token,
    check_tokens,
    check_whole,
    part_of,
)
from scforge.soma.v1.torch.modules.encoder import Encoder
from scforge.soma.v1.torch.serde import Serializable


class Model(Serializable, nn.Module):
    """Embedding, encoder, final norm and predictor.

    Parameters
    ----------
    config
        Sizes.
    gradient_checkpointing
        Whether to store only the input of each layer, and recompute the layer for its gradient, which takes less memory
        and is a third slower.
    pad_mask
        Whether to exclude PAD: no token attends to a PAD token except itself, and the loss uses only other tokens for
        the embedding and the regularizer. If False, PAD is treated like any other token, as in the published model.

    Raises
    ------
    OptionError
        If a number of `config` cannot be used.

    Examples
    --------
    >>> import torch
    >>> model = Model(ModelConfig(0.0, embedding_dim=8, pwff_hidden_dim=16, num_layers=1, num_heads=2))
    >>> tokens = torch.tensor([[97, 98, 257]])
    >>> model(tokens, torch.arange(3)[None]).shape
    torch.Size([1, 3, 264])
    """

    def __init__(self, config: ModelConfig, *, gradient_checkpointing: bool = False, pad_mask: bool = False) -> None:
        super().__init__()
        check_config(config, ModelConfig)
        self.config = config
        self.pad_mask = check_bool("pad_mask", pad_mask)
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_dim)
        self.encoder = Encoder(part_of(config, EncoderConfig), gradient_checkpointing=gradient_checkpointing)
        self.final_norm = nn.LayerNorm(config.embedding_dim, eps=1e-5)
        self.predictor = nn.Linear(config.embedding_dim, config.vocab_size)

    def encode(self, input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the states after the final norm, shape (B, S, H).

        Parameters
        ----------
        input
            Tokens, integers, shape (B, S).
        positions
            Positions of the tokens, integers, shape (B, S).

        Raises
        ------
        DataError
            If tokens or positions are not tensors, have a different shape or dtype, or tokens on a CPU are outside the
            vocabulary. On other devices, a check would require a synchronization, and invalid tokens raise a torch
            error.
        """
        check_whole("input", input, torch.Tensor)
        check_whole("positions", positions, torch.Tensor)
        check_one_a_token("positions", positions, "input", input, or_one_row=True)
        if can_look_at(input):
            check_tokens("input", input, self.config.vocab_size)
        mask = self._mask(input) if self.pad_mask else None
        return self.final_norm(self.encoder(self.embedding(input.long()), positions, mask=mask))

    def predict(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the logits, shape (..., V), for states of shape (..., H)."""
        return self.predictor(embeddings)

    def forward(self, input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits, shape (B, S, V); for the parameters, see :meth:`encode`."""
        return self.predict(self.encode(input, positions))

    @staticmethod
    def _mask(tokens_bs: torch.Tensor) -> torch.Tensor:
        """Return which tokens attend to which, (B, 1, S, S); each token attends at least to itself."""
        n = tokens_bs.shape[1]
        before = torch.ones((n, n), dtype=torch.bool, device=tokens_bs.device).tril()
        itself = torch.eye(n, dtype=torch.bool, device=tokens_bs.device)
        return ((before & (tokens_bs != V1_PAD_TOKEN_ID)[:, None, :]) | itself)[:, None]


def can_look_at(values: torch.Tensor) -> bool:
    """Return whether values can be checked without waiting for a device, and are not traced by torch."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling() and not is_functorch_wrapped_tensor(values)
