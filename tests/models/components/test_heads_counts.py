import numpy as np
import pytest
import torch
from scipy import stats

from scforge.errors import OptionError
from scforge.models.components.heads import COUNT_LOSSES, check_count_targets, count_loss, expected_counts

LOG_RATES = [-12.0, -3.0, 0.0, 1.5, 6.0, 9.0]
COUNTS = [1.0, 2.0, 7.0, 500.0, 20_000.0]
LOG_DISPERSIONS = [-4.0, 0.0, 3.0, 12.0]
every_loss = pytest.mark.parametrize("name", COUNT_LOSSES)


def grid(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """All combinations of rates, counts and dispersions; a count of 0 where there may be one."""
    counts = COUNTS if "truncated" in name else [0.0, *COUNTS]
    parts = torch.cartesian_prod(*(torch.tensor(x, dtype=dtype) for x in (LOG_RATES, counts, LOG_DISPERSIONS)))
    return parts[:, 0], parts[:, 1], parts[:, 2] if "binomial" in name else None


@every_loss
def test_it_is_the_log_likelihood_of_scipy(name):
    log_rate, counts, log_dispersion = grid(name, torch.float64)
    rate, law = log_rate.exp().numpy(), stats.poisson(log_rate.exp().numpy())
    if log_dispersion is not None:
        r = log_dispersion.exp().numpy()
        law = stats.nbinom(r, r / (r + rate))
    expected = -law.logpmf(counts.numpy())
    if "truncated" in name:
        expected += law.logsf(0)
    # Where scipy itself loses digits (r / (r + m) next to 1) the two agree to as many as it keeps.
    found = count_loss(name, log_rate, counts, log_dispersion).numpy()
    finite = np.isfinite(expected)
    assert finite.mean() > 0.9
    np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-6, atol=1e-6)
    assert np.isfinite(found).all()


@every_loss
@pytest.mark.parametrize("log_rate", [-20.0, -1.0, 2.0])
def test_probabilities_sum_to_one_and_the_expected_count_is_their_mean(name, log_rate):
    counts = torch.arange(float("truncated" in name), 4000.0, dtype=torch.float64)
    dispersion = torch.full_like(counts, 0.3) if "binomial" in name else None
    rates = torch.full_like(counts, log_rate)
    shares = (-count_loss(name, rates, counts, dispersion)).exp()
    assert float(shares.sum()) == pytest.approx(1.0, abs=1e-9)
    mean = (counts * shares).sum()
    torch.testing.assert_close(expected_counts(name, rates, dispersion)[0], mean, rtol=1e-8, atol=1e-12)


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


def test_targets_names_and_dispersion_are_checked():
    for name, value in (
        ("poisson", -1.0),
        ("negative_binomial", 1.5),
        ("negative_binomial", float("nan")),
        ("zero_truncated_poisson", 0.0),
        ("zero_truncated_negative_binomial", float("inf")),
    ):
        check_count_targets(name, torch.tensor([3.0, float("truncated" in name)]))
        with pytest.raises(
            OptionError, match=f"value_loss='{name}' requires integer counts of at least ., but a target is"
        ):
            check_count_targets(name, torch.tensor([3.0, value]))
