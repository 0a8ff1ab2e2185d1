"""Losses of counts, against scipy and by their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from scforge.errors import OptionError
from scforge.models.components.count_losses import (
    COUNT_LOSSES,
    check_count_targets,
    count_loss,
    expected_counts,
    log1mexp,
)

LOG_RATES = [-12.0, -3.0, 0.0, 1.5, 6.0, 9.0]
COUNTS = [1.0, 2.0, 7.0, 500.0, 20_000.0]
LOG_DISPERSIONS = [-4.0, 0.0, 3.0, 12.0]
every_loss = pytest.mark.parametrize("name", COUNT_LOSSES)


def grid(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """All combinations of rates, counts and dispersions; a count of 0 where there may be one."""
    counts = COUNTS if "truncated" in name else [0.0, *COUNTS]
    parts = torch.cartesian_prod(*(torch.tensor(x, dtype=dtype) for x in (LOG_RATES, counts, LOG_DISPERSIONS)))
    return parts[:, 0], parts[:, 1], parts[:, 2] if "binomial" in name else None


def scipy_of(name: str, log_rate: torch.Tensor, log_dispersion: torch.Tensor | None):
    rate = log_rate.double().exp().numpy()
    if log_dispersion is None:
        return stats.poisson(rate)
    r = log_dispersion.double().exp().numpy()
    return stats.nbinom(r, r / (r + rate))


@every_loss
def test_it_is_the_log_likelihood_of_scipy(name):
    log_rate, counts, log_dispersion = grid(name, torch.float64)
    law = scipy_of(name, log_rate, log_dispersion)
    expected = -law.logpmf(counts.numpy())
    if "truncated" in name:
        expected += law.logsf(0)
    # Where scipy itself loses digits (r / (r + m) next to 1) the two agree to as many as it keeps.
    found = count_loss(name, log_rate, counts, log_dispersion).numpy()
    finite = np.isfinite(expected)
    assert finite.mean() > 0.9
    np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-6, atol=1e-6)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("name", ["zero_truncated_poisson", "zero_truncated_negative_binomial"])
@pytest.mark.parametrize("log_rate", [-20.0, -1.0, 2.0])
def test_truncated_probabilities_sum_to_one(name, log_rate):
    counts = torch.arange(1.0, 4000.0, dtype=torch.float64)
    dispersion = torch.full_like(counts, 0.3) if "binomial" in name else None
    losses = count_loss(name, torch.full_like(counts, log_rate), counts, dispersion)
    assert float((-losses).exp().sum()) == pytest.approx(1.0, abs=1e-9)


@every_loss
@pytest.mark.parametrize("log_rate", [-20.0, -1.0, 2.0])
def test_the_expected_count_is_the_mean(name, log_rate):
    counts = torch.arange(float("truncated" in name), 4000.0, dtype=torch.float64)
    dispersion = torch.full_like(counts, 0.3) if "binomial" in name else None
    rates = torch.full_like(counts, log_rate)
    mean = (counts * (-count_loss(name, rates, counts, dispersion)).exp()).sum()
    torch.testing.assert_close(expected_counts(name, rates, dispersion)[0], mean, rtol=1e-8, atol=1e-12)


@every_loss
def test_gradients(name):
    rate = torch.tensor([-3.0, 0.2, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([1.0, 3.0, 40.0, 2.0], dtype=torch.float64)
    inputs = (rate,)
    if "binomial" in name:
        inputs = (rate, torch.tensor([-2.0, 0.5, 4.0, 8.0], dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(lambda r, *d: count_loss(name, r, counts, *d), inputs)
    assert torch.autograd.gradcheck(lambda r, *d: expected_counts(name, r, *d), inputs)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_computed_in_high(name, dtype):
    log_rate, counts, log_dispersion = grid(name, dtype)
    log_rate.requires_grad_()
    losses = count_loss(name, log_rate, counts, log_dispersion)
    assert losses.dtype == torch.float32
    wide = None if log_dispersion is None else log_dispersion.double()
    exact = count_loss(name, log_rate.detach().double(), counts.double(), wide)
    torch.testing.assert_close(losses.double(), exact, rtol=1e-6, atol=1e-6)
    losses.sum().backward()
    assert log_rate.grad.isfinite().all()


@every_loss
@pytest.mark.parametrize("log_rate", [-1e4, -60.0, 60.0, 1e4])
def test_extremes_are_finite(name, log_rate):
    rate = torch.full((3,), log_rate)
    counts = torch.tensor([1.0, 100.0, 1e6])
    for extreme in (-1e3, 1e3):
        dispersion = torch.full((3,), extreme) if "binomial" in name else None
        assert count_loss(name, rate, counts, dispersion).isfinite().all()
        assert expected_counts(name, rate, dispersion).isfinite().all()


def test_log1mexp():
    x = torch.tensor([1e-30, 1e-8, 0.5, 0.7, 30.0, 800.0], dtype=torch.float64, requires_grad=True)
    result = log1mexp(x)
    expected = [np.log(1e-30), np.log(1e-8) - 5e-9, *np.log1p(-np.exp([-0.5, -0.7, -30.0, -800.0]))]
    np.testing.assert_allclose(result.detach().numpy(), expected, rtol=1e-12)
    result.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "value", "fine"),
    [
        ("poisson", 0.0, True),
        ("poisson", -1.0, False),
        ("negative_binomial", 1.5, False),
        ("negative_binomial", float("nan"), False),
        ("zero_truncated_poisson", 0.0, False),
        ("zero_truncated_negative_binomial", 1.0, True),
        ("zero_truncated_negative_binomial", float("inf"), False),
    ],
)
def test_targets_are_checked(name, value, fine):
    targets = torch.tensor([3.0, value])
    if fine:
        check_count_targets(name, targets)
        return
    with pytest.raises(OptionError, match=f"value_loss='{name}' needs whole counts of at least . but a target is"):
        check_count_targets(name, targets)


def test_names_and_dispersion_are_checked():
    with pytest.raises(OptionError, match="value_loss='mse' is not a loss of counts"):
        count_loss("mse", torch.zeros(1), torch.ones(1))
    with pytest.raises(OptionError, match=r"^log_dispersion=\(tensor of shape \(300,\)\) does not go with 'poisson'; "):
        count_loss("poisson", torch.zeros(300), torch.ones(300), torch.zeros(300))
    with pytest.raises(OptionError, match="log_dispersion=None does not go with 'negative_binomial'"):
        count_loss("negative_binomial", torch.zeros(1), torch.ones(1))
