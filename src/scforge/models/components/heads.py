"""Prediction heads.

Shapes: B cells, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from scforge.errors import OptionError
from scforge.models._utils import check_choice
from scforge.models.components.cross_entropy import linear_cross_entropy, mean_token_loss
from scforge.models.components.transformer import ACTIVATIONS

__all__ = ["BinPredictionHead", "DeepExpressionHead", "ExpressionPredictionHead", "MaskedGenePredictionHead"]


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class MaskedGenePredictionHead(nn.Module):
    """Logits over the vocabulary: Linear, activation, LayerNorm, Linear.

    Parameters
    ----------
    hidden_dim
        Width H of what comes in.
    vocab_size
        Number of tokens V.
    layer_norm_eps
        Epsilon of the layer norm.
    own_weight
        False for a head whose last layer is the gene embedding, which it is given with each call.
    activation
        ``"gelu"``, ``"relu"`` or ``"silu"``.

    Raises
    ------
    OptionError
        If `activation` is not known.

    Examples
    --------
    >>> head = MaskedGenePredictionHead(hidden_dim=8, vocab_size=50)
    >>> head(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 50])
    """

    takes_labels = True
    """Whether :meth:`forward` computes the loss when it is given labels."""

    def __init__(
        self,
        hidden_dim: int,
        vocab_size: int,
        layer_norm_eps: float = 1e-12,
        *,
        own_weight: bool = True,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        check_choice("head_activation", activation, sorted(ACTIVATIONS))
        self.activation = ACTIVATIONS[activation]
        self.dense = nn.Linear(hidden_dim, hidden_dim)
        self.layer_norm = nn.LayerNorm(hidden_dim, eps=layer_norm_eps)
        self.decoder = nn.Linear(hidden_dim, vocab_size) if own_weight else None
        self.bias = None if own_weight else nn.Parameter(torch.zeros(vocab_size))

    def forward(
        self, hidden_states: torch.Tensor, weight: torch.Tensor | None = None, *, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits, or with `labels` the mean cross entropy without all logits at once.

        Parameters
        ----------
        hidden_states
            Shape (..., H).
        weight
            Last layer of a head without its own, shape (V, H).
        labels
            Token ids, int64, shape (M,), for states of shape (M, H).

        Returns
        -------
        Shape (..., V), or a scalar.
        """
        states, bias = self.layer_norm(self.activation(self.dense(hidden_states))), self.bias
        if self.decoder is not None:
            # What was wrapped (LoRA), parametrised or hooked is called as it is.
            hooked = any(getattr(self.decoder, hooks) for hooks in _HOOKS)
            if labels is None or type(self.decoder) is not nn.Linear or hooked:
                logits = self.decoder(states)
                return logits if labels is None else mean_token_loss(logits, labels)
            weight, bias = self.decoder.weight, self.decoder.bias
        if weight is None:
            raise OptionError("weight=None but the head has none of its own; pass the gene embedding that it shares.")
        if labels is None or torch.compiler.is_compiling():
            logits = F.linear(states, weight, bias)
            return logits if labels is None else mean_token_loss(logits, labels)
        return linear_cross_entropy(states, weight, bias, labels)

    @torch.no_grad()
    def init_bias(self, token_counts: torch.Tensor) -> None:
        """Start from the token frequencies: the bias becomes ``log((count + 1) / sum)``, shape (V,).

        Training then begins at about the entropy of the token frequencies instead of ``log V``, and every step goes
        into what depends on the cell.

        Parameters
        ----------
        token_counts
            How often each token occurs, shape (V,).
        """
        smoothed = token_counts.double() + 1.0
        bias = self.bias if self.decoder is None else self.decoder.bias
        assert bias is not None
        bias.copy_((smoothed / smoothed.sum()).log())


class BinPredictionHead(nn.Module):
    """Logits over expression bins: Linear, GELU, LayerNorm, Linear.

    Parameters
    ----------
    hidden_dim
        Width H of what comes in.
    n_bins
        Number of bins.
    layer_norm_eps
        Epsilon of the layer norm.

    Examples
    --------
    >>> head = BinPredictionHead(hidden_dim=8, n_bins=51)
    >>> head(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 51])
    """

    def __init__(self, hidden_dim: int, n_bins: int, layer_norm_eps: float = 1e-12) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_dim, hidden_dim)
        self.layer_norm = nn.LayerNorm(hidden_dim, eps=layer_norm_eps)
        self.decoder = nn.Linear(hidden_dim, n_bins)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (..., n_bins) for `hidden_states` of shape (..., H)."""
        return self.decoder(self.layer_norm(F.gelu(self.dense(hidden_states))))


class ExpressionPredictionHead(nn.Module):
    """A number for each token: Linear, GELU, Linear.

    Parameters
    ----------
    hidden_dim
        Width H of what comes in.

    Examples
    --------
    >>> head = ExpressionPredictionHead(hidden_dim=8)
    >>> head(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5])
    """

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_dim, hidden_dim)
        self.decoder = nn.Linear(hidden_dim, 1)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return numbers of shape (...) for `hidden_states` of shape (..., H)."""
        return self.decoder(F.gelu(self.dense(hidden_states))).squeeze(-1)


class DeepExpressionHead(ExpressionPredictionHead):
    """A number for each token: Linear, LeakyReLU, Linear, LeakyReLU, Linear, as in scGPT (Cui et al. 2024).

    Parameters
    ----------
    hidden_dim
        Width H of what comes in.

    Examples
    --------
    >>> head = DeepExpressionHead(hidden_dim=8)
    >>> head(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5])
    """

    def __init__(self, hidden_dim: int) -> None:
        super().__init__(hidden_dim)
        self.middle = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return numbers of shape (...) for `hidden_states` of shape (..., H)."""
        states = F.leaky_relu(self.middle(F.leaky_relu(self.dense(hidden_states))))
        return self.decoder(states).squeeze(-1)
