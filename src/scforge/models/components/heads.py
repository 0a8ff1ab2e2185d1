"""Heads that predict genes, values and counts, and their losses."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_choice
from scforge._constants import IGNORE_LABEL
from scforge.errors import OptionError
from scforge.models.components.config import ACTIVATIONS
from scforge.models.components.cross_entropy import linear_cross_entropy, mean_token_loss

COUNT_LOSSES = ("poisson", "negative_binomial", "zero_truncated_poisson", "zero_truncated_negative_binomial")
VALUE_LOSSES = ("mse", *COUNT_LOSSES)

_LOG_RATES = (-50.0, 30.0)
_LOG_DISPERSIONS = (-15.0, 15.0)
"""Bounds within which nothing overflows, even in float32; all realistic counts lie within them."""

_CONSTANT = 1e-6
"""Standard deviation of embeddings below which a dimension counts as constant."""

_EXACT = 40.0
"""Threshold above which softplus(x) is computed as x; in float64, the two are equal there."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_truncated(name: str) -> bool:
    """Return whether a loss is for counts of at least 1."""
    return name.startswith("zero_truncated_")


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return ``log(1 - exp(-x))`` for x > 0, exact for small and large x (Maechler 2012, package Rmpfr)."""
    small = x < math.log(2.0)
    # Both branches are differentiated, so neither may see what it cannot take.
    near, far = torch.where(small, x, 0.5), torch.where(small, 1.0, x)
    return torch.where(small, (-torch.expm1(-near)).log(), torch.log1p(-torch.exp(-far)))


def count_loss(
    name: str, log_rate: torch.Tensor, counts: torch.Tensor, log_dispersion: torch.Tensor | None = None
) -> torch.Tensor:
    r"""Return the negative log-likelihood of each count.

    With rate m, count y and dispersion r (the variance is m + m^2 / r; the parametrization of scVI, Lopez et al.
    2018)::

        poisson                          m - y log m + log y!
        negative_binomial                (y + r) log(r + m) - r log r - y log m + lgamma(r) + log y! - lgamma(y + r)
        zero_truncated_...               the same + log(1 - P(0)), with -log P(0) = m, or r log(1 + m / r)

    Truncated losses are for data that contain only expressed genes. Such data have no zeros, so the fit of a plain
    Poisson distribution would be biased (TranscriptFormer, Pearce et al. 2025, uses the truncated Poisson).

    All have the shape (...). The logarithms of rate and dispersion are clipped to ``_LOG_RATES`` and
    ``_LOG_DISPERSIONS``. The loss is float32, or float64 if `log_rate` is.

    Examples
    --------
    >>> count_loss("poisson", torch.zeros(2), torch.tensor([0.0, 1.0]))
    tensor([1., 1.])
    """
    rate, dispersion = _working(log_rate, log_dispersion)
    y = counts.to(rate.dtype)
    if dispersion is None:
        nothing = rate.exp()
        loss = nothing - y * rate + torch.lgamma(y + 1)
    else:
        r = dispersion.exp()
        nothing = _minus_log_zero(rate, dispersion)
        loss = nothing + y * F.softplus(dispersion - rate, threshold=_EXACT)
        loss = loss + torch.lgamma(r) + torch.lgamma(y + 1) - torch.lgamma(y + r)
    if is_truncated(name):
        loss = loss + log1mexp(nothing)
    return loss.to(_result_dtype(log_rate))


def expected_counts(name: str, log_rate: torch.Tensor, log_dispersion: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean count: the rate, divided by 1 - P(0) for a truncated loss. For arguments, see `count_loss`."""
    rate, dispersion = _working(log_rate, log_dispersion)
    if is_truncated(name):
        nothing = rate.exp() if dispersion is None else _minus_log_zero(rate, dispersion)
        rate = rate - log1mexp(nothing)
    return rate.exp().to(_result_dtype(log_rate))


def log_counts(name: str, counts_bs: torch.Tensor, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return log1p of the token counts, and 0 elsewhere, float32, shape (B, S); `name` is that of the loss.

    That no count is below 0 is checked only on the CPU, to avoid waiting for a GPU.
    """
    counts_bs = counts_bs.float().masked_fill(~tokens_bs, 0.0)
    if counts_bs.device.type == "cpu" and not torch.compiler.is_compiling() and bool((counts_bs < 0).any()):
        raise OptionError(
            f"requires counts, but the values include {float(counts_bs.min()):g}; use a tokenizer "
            "that returns counts (continuous_projection with transform='counts'), or value_loss='mse'.",
            value_loss=name,
        )
    return counts_bs.log1p()


def mean_expressed(counts_bs: torch.Tensor, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return the mean of the nonzero token counts of each cell, float32, shape (B, 1), or 1 if all counts are zero.

    Examples
    --------
    >>> mean_expressed(torch.tensor([[2.0, 0.0, 4.0]]), torch.tensor([[True, True, True]]))
    tensor([[3.]])
    """
    counts_bs = counts_bs.float().masked_fill(~tokens_bs, 0.0)
    n_expressed = (counts_bs > 0).sum(dim=1, keepdim=True)
    mean = counts_bs.sum(dim=1, keepdim=True) / n_expressed.clamp(min=1)
    return torch.where(n_expressed > 0, mean, 1.0)


def check_count_targets(name: str, counts: torch.Tensor) -> None:
    """Raise an error if `counts` are not valid targets for the loss `name`; call it before moving data to a GPU."""
    least = 1 if is_truncated(name) else 0
    bad = ~((counts >= least) & (counts == counts.round()) & counts.isfinite())
    if bool(bad.any()):
        value = float(counts[bad][0])
        raise OptionError(
            f"requires integer counts of at least {least}, but a target is {value:g}; use a "
            "tokenizer that returns counts (continuous_projection with transform='counts')"
            + (" without unexpressed genes, " if least else ", ")
            + "or value_loss='mse'.",
            value_loss=name,
        )


def _minus_log_zero(rate: torch.Tensor, dispersion: torch.Tensor) -> torch.Tensor:
    """Return -log P(0) of the negative binomial distribution, from logarithms."""
    return dispersion.exp() * F.softplus(rate - dispersion, threshold=_EXACT)


def _working(log_rate: torch.Tensor, log_dispersion: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convert rate and dispersion to the precision of the computation.

    Differences between lgamma values of large numbers lose all digits in float32, and only few numbers are computed
    here.
    """
    dtype = torch.float32 if log_rate.device.type == "mps" else torch.float64
    rate = log_rate.to(dtype).clamp(*_LOG_RATES)
    return rate, None if log_dispersion is None else log_dispersion.to(dtype).clamp(*_LOG_DISPERSIONS)


def _result_dtype(given: torch.Tensor) -> torch.dtype:
    return torch.float64 if given.dtype == torch.float64 else torch.float32


def of_next_token(targets_bs: torch.Tensor, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return for each token the target of the next token of the cell, or -100 at the last token and at padding.

    Examples
    --------
    >>> of_next_token(torch.tensor([[-100, 7, 8, 9]]), torch.tensor([[True, True, False, True]]))
    tensor([[   7,    9, -100, -100]])
    """
    n_tokens = targets_bs.shape[1]
    places = torch.arange(n_tokens, device=targets_bs.device)
    # Where the token before stands; one column more takes the targets of what has none.
    last_bs = torch.where(tokens_bs, places, -1).cummax(dim=1).values
    before_bs = F.pad(last_bs[:, :-1], (1, 0), value=-1)
    before_bs = before_bs.masked_fill(~tokens_bs | (before_bs < 0), n_tokens)
    shifted = targets_bs.new_full((targets_bs.shape[0], n_tokens + 1), IGNORE_LABEL)
    return shifted.scatter(1, before_bs, targets_bs)[:, :n_tokens]


def cell_loss(
    head: nn.Module, state_bh: torch.Tensor, labels_bs: torch.Tensor, tokens_bs: torch.Tensor
) -> torch.Tensor:
    """Return ``-log p(label | state of the cell)``, averaged over the labels of each cell and then over cells."""
    labeled_bs = (labels_bs != IGNORE_LABEL) & tokens_bs
    log_p_bv = head(state_bh).float().log_softmax(dim=-1)
    log_p_bs = log_p_bv.gather(1, labels_bs.masked_fill(~labeled_bs, 0)) * labeled_bs
    n_labels_b = labeled_bs.sum(dim=1)
    of_cells_b = log_p_bs.sum(dim=1) / n_labels_b.clamp(min=1)
    return -of_cells_b.sum() / (n_labels_b > 0).sum().clamp(min=1)


class Standardize(nn.Module):
    """Subtract a mean and divide by a scale, both set once, so that a head does not depend on units.

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
        """Set mean and scale from embeddings, shape (N, D); a constant dimension keeps the scale 1."""
        mean, scale = embeddings.mean(axis=0, dtype=np.float64), embeddings.std(axis=0, dtype=np.float64)
        scale = np.where(scale > _CONSTANT, scale, 1.0)
        self.mean.copy_(torch.from_numpy(mean))
        self.scale.copy_(torch.from_numpy(scale))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return standardized values, shape (B, D)."""
        return (values - self.mean) / self.scale


class MaskedGenePredictionHead(nn.Module):
    """Predict logits over the vocabulary: Linear, activation, LayerNorm, Linear.

    Parameters
    ----------
    hidden_dim
        Width H of the input states.
    vocab_size
        Number of tokens V.
    layer_norm_eps
        Epsilon of the layer norm.
    own_weight
        Whether the last layer has its own weight. If false, the last layer is the gene embedding, which is passed with
        each call.
    activation
        ``"gelu"``, ``"relu"`` or ``"silu"``.

    Raises
    ------
    OptionError
        If `activation` is unknown.

    Examples
    --------
    >>> head = MaskedGenePredictionHead(hidden_dim=8, vocab_size=50)
    >>> head(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 50])
    """

    takes_labels = True
    """Whether :meth:`forward` computes the loss if labels are given."""

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
        """Return logits, or with `labels` the mean cross entropy, computed without storing all logits.

        Parameters
        ----------
        hidden_states
            States, shape (..., H).
        weight
            Weight of the last layer, shape (V, H), for a head without its own weight.
        labels
            Token ids, int64, shape (M,), for states of shape (M, H).

        Returns
        -------
        The logits, shape (..., V), or the loss, a scalar.
        """
        states, bias = self.layer_norm(self.activation(self.dense(hidden_states))), self.bias
        if self.decoder is not None:
            # What was wrapped (LoRA), parametrized or hooked is called as it is.
            hooked = any(getattr(self.decoder, hooks) for hooks in _HOOKS)
            if labels is None or type(self.decoder) is not nn.Linear or hooked:
                logits = self.decoder(states)
                return logits if labels is None else mean_token_loss(logits, labels)
            weight, bias = self.decoder.weight, self.decoder.bias
        assert weight is not None
        if labels is None or torch.compiler.is_compiling():
            logits = F.linear(states, weight, bias)
            return logits if labels is None else mean_token_loss(logits, labels)
        return linear_cross_entropy(states, weight, bias, labels)

    @torch.no_grad()
    def init_bias(self, token_counts: torch.Tensor) -> None:
        """Initialize from token frequencies: the bias becomes ``log((count + 1) / sum)``, shape (V,).

        The loss then starts near the entropy of the token frequencies instead of ``log V``, so that all steps are used
        to learn differences between cells.

        Parameters
        ----------
        token_counts
            Number of occurrences of each token, shape (V,).
        """
        smoothed = token_counts.double() + 1.0
        bias = self.bias if self.decoder is None else self.decoder.bias
        assert bias is not None
        bias.copy_((smoothed / smoothed.sum()).log())


class BinPredictionHead(nn.Module):
    """Predict logits over expression bins: Linear, GELU, LayerNorm, Linear.

    Parameters
    ----------
    hidden_dim
        Width H of the input states.
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
    """Predict a number for each token: Linear, GELU, Linear.

    Parameters
    ----------
    hidden_dim
        Width H of the input states.

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
    """Predict a number for each token: Linear, LeakyReLU, Linear, LeakyReLU, Linear, as in scGPT (Cui et al. 2024).

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
