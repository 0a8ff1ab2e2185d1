"""Losses of counts: Poisson and negative binomial, whole or without the zero.

Shapes: ... anything; B cells, S tokens.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from scforge.errors import OptionError

__all__ = [
    "COUNT_LOSSES",
    "VALUE_LOSSES",
    "check_count_targets",
    "count_loss",
    "expected_counts",
    "is_truncated",
    "log1mexp",
    "log_counts",
    "mean_expressed",
]

COUNT_LOSSES = ("poisson", "negative_binomial", "zero_truncated_poisson", "zero_truncated_negative_binomial")
VALUE_LOSSES = ("mse", *COUNT_LOSSES)

_LOG_RATES = (-50.0, 30.0)
_LOG_DISPERSIONS = (-15.0, 15.0)
"""Within these bounds nothing overflows, also in float32, and no count needs more."""


def is_truncated(name: str) -> bool:
    """Return whether a loss is of counts that are at least 1."""
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

    With rate m, count y and dispersion r (the variance is m + m^2 / r; the parametrisation of scVI, Lopez et al.
    2018)::

        poisson                          m - y log m + log y!
        negative_binomial                (y + r) log(r + m) - r log r - y log m + lgamma(r) + log y! - lgamma(y + r)
        zero_truncated_...               the same + log(1 - P(0)), with -log P(0) = m, or r log(1 + m / r)

    Truncated losses are for data that hold expressed genes alone: there 0 cannot come, and a plain Poisson would be
    pulled towards it (TranscriptFormer, Pearce et al. 2025, uses the truncated Poisson).

    Parameters
    ----------
    name
        One of ``COUNT_LOSSES``.
    log_rate
        Natural logarithm of the rate, shape (...). Values beyond -50 and 30 are taken as those.
    counts
        Whole numbers, at least 0, or at least 1 for a truncated loss, shape (...).
    log_dispersion
        Logarithm of r, shape (...), for the negative binomial. Values beyond -15 and 15 are taken as those.

    Returns
    -------
    Shape (...), float32; float64 if `log_rate` is.

    Examples
    --------
    >>> count_loss("poisson", torch.zeros(2), torch.tensor([0.0, 1.0]))
    tensor([1., 1.])
    """
    rate, dispersion = _working(name, log_rate, log_dispersion)
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
    """Return the mean count: the rate, over 1 - P(0) for a truncated loss. The arguments are those of `count_loss`."""
    rate, dispersion = _working(name, log_rate, log_dispersion)
    if is_truncated(name):
        nothing = rate.exp() if dispersion is None else _minus_log_zero(rate, dispersion)
        rate = rate - log1mexp(nothing)
    return rate.exp().to(_result_dtype(log_rate))


def log_counts(name: str, counts_bs: torch.Tensor, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return log1p of the counts of tokens, and 0 elsewhere, float32, shape (B, S).

    Parameters
    ----------
    name
        One of ``COUNT_LOSSES``, for the message.
    counts_bs
        Counts, shape (B, S).
    tokens_bs
        False where counts do not count, bool, shape (B, S).

    Raises
    ------
    OptionError
        If a count is below 0; on the CPU alone, as a GPU would have to be waited for.
    """
    counts_bs = counts_bs.float().masked_fill(~tokens_bs, 0.0)
    if counts_bs.device.type == "cpu" and not torch.compiler.is_compiling() and bool((counts_bs < 0).any()):
        raise OptionError(
            f"value_loss={name!r} is for counts but a value is {float(counts_bs.min()):g}; use a tokenizer that gives "
            "counts (continuous_projection with transform='counts'), or value_loss='mse'."
        )
    return counts_bs.log1p()


def mean_expressed(counts_bs: torch.Tensor, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return the mean of the counts above 0 of the tokens of each cell, float32, shape (B, 1); 1 where there is none.

    Parameters
    ----------
    counts_bs
        Counts, shape (B, S).
    tokens_bs
        False where counts do not count, bool, shape (B, S).

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
    """Raise unless `counts` can be targets of the loss `name`; waits for a GPU, so call it where data are on the CPU.

    Raises
    ------
    OptionError
        Naming the loss and the first count that it cannot have.
    """
    least = 1 if is_truncated(name) else 0
    bad = ~((counts >= least) & (counts == counts.round()) & counts.isfinite())
    if bool(bad.any()):
        value = float(counts[bad][0])
        raise OptionError(
            f"value_loss={name!r} needs whole counts of at least {least} but a target is {value:g}; use a tokenizer "
            "that gives counts (continuous_projection with transform='counts')"
            + (", without genes that are not expressed, " if least else ", ")
            + "or value_loss='mse'."
        )


_EXACT = 40.0
"""Where softplus(x) becomes x: in float64 the two are the same there."""


def _minus_log_zero(rate: torch.Tensor, dispersion: torch.Tensor) -> torch.Tensor:
    """Return -log P(0) of the negative binomial, from logarithms."""
    return dispersion.exp() * F.softplus(rate - dispersion, threshold=_EXACT)


def _working(
    name: str, log_rate: torch.Tensor, log_dispersion: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bring rate and dispersion to where they are computed with.

    Differences of lgamma of large numbers lose all their digits in float32, and there are few numbers here.
    """
    if name not in COUNT_LOSSES:
        raise OptionError(f"value_loss={name!r} is not a loss of counts (known: {', '.join(COUNT_LOSSES)}).")
    if ("binomial" in name) != (log_dispersion is not None):
        given = "None" if log_dispersion is None else f"(tensor of shape {tuple(log_dispersion.shape)})"
        raise OptionError(f"log_dispersion={given} does not go with {name!r}; give it for 'binomial' alone.")
    dtype = torch.float32 if log_rate.device.type == "mps" else torch.float64
    rate = log_rate.to(dtype).clamp(*_LOG_RATES)
    return rate, None if log_dispersion is None else log_dispersion.to(dtype).clamp(*_LOG_DISPERSIONS)


def _result_dtype(given: torch.Tensor) -> torch.dtype:
    return torch.float64 if given.dtype == torch.float64 else torch.float32
