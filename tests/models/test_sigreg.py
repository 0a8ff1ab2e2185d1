"""SIGReg over cells against the formula written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scforge.errors import OptionError
from scforge.models.components import SIGReg


def reference(x: np.ndarray, noise: np.ndarray, points: int = 17, t_max: float = 3.0) -> float:
    """N * integral of |mean_n exp(i t p) - exp(-t^2/2)|^2 exp(-t^2/2) over [-t_max, t_max], mean over directions."""
    t = np.linspace(-t_max, t_max, 2 * points - 1)
    statistics = []
    for direction in noise.T:
        p = x @ (direction / np.sqrt((direction**2).sum()))
        phi = np.exp(1j * np.outer(t, p)).mean(axis=1)
        integrand = np.abs(phi - np.exp(-(t**2) / 2)) ** 2 * np.exp(-(t**2) / 2)
        statistics.append(len(x) * np.trapezoid(integrand, t))
    return float(np.mean(statistics))


@pytest.mark.parametrize(("points", "t_max"), [(17, 3.0), (9, 5.0)])
def test_equals_the_formula(points, t_max):
    generator = np.random.default_rng(0)
    x, noise = generator.normal(size=(2, 40, 6)) * 1.5 + 0.3, generator.normal(size=(6, 11))
    expected = np.mean([reference(part, noise, points, t_max) for part in x])
    sigreg, given = SIGReg(11, points, t_max), torch.from_numpy(x)
    assert float(sigreg.compute(given, torch.from_numpy(noise).float())) == pytest.approx(expected, rel=1e-4)
    assert sigreg(given) != sigreg(given), "new directions each call"
    assert not sigreg.state_dict()


def test_isotropic_cells_score_lower_than_all_others():
    torch.manual_seed(0)
    sigreg, x = SIGReg(256), torch.randn(500, 8)
    isotropic = sigreg(x)
    others = {
        "collapsed": torch.zeros(500, 8),
        "small": 0.3 * x,
        "large": 3 * x,
        "shifted": x + 1,
        "stretched": x * torch.tensor([4.0, 1, 1, 1, 1, 1, 1, 1]),
        "flat": x * (torch.arange(8) < 4),
        "two points": torch.sign(x[:, :1]).expand(-1, 8),
    }
    scores = {name: float(sigreg(y)) for name, y in others.items()}
    assert all(score > 2 * isotropic for score in scores.values()), (isotropic, scores)


def test_expectation_does_not_depend_on_the_number_of_cells():
    torch.manual_seed(0)
    sigreg = SIGReg(128)
    few = torch.stack([sigreg(torch.randn(16, 4)) for _ in range(60)]).mean()
    many = torch.stack([sigreg(torch.randn(256, 4)) for _ in range(60)]).mean()
    assert float(few / many) == pytest.approx(1.0, abs=0.15)


def test_collapsed_cells_are_pushed_apart():
    torch.manual_seed(0)
    x = (0.05 * torch.randn(100, 3)).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.1)
    sigreg = SIGReg(32)
    for _ in range(120):
        optimizer.zero_grad()
        sigreg(x).backward()
        optimizer.step()
    covariance = torch.cov(x.detach().T)
    torch.testing.assert_close(covariance, torch.eye(3), atol=0.3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_number(dtype):
    sigreg, noise = SIGReg(64), torch.randn(8, 64)
    x = torch.randn(200, 8).to(dtype)
    shares = torch.zeros(2, 200)
    shares[0, :50], shares[1, 50:] = 1 / 50, 1 / 150
    wide = x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone, groups = sigreg.compute(x, noise), sigreg.of_groups(x, noise, shares)
        torch.manual_seed(3)
        drawn = sigreg(x)
    assert alone.dtype == groups.dtype == drawn.dtype == torch.float32
    torch.testing.assert_close(alone, sigreg.compute(wide, noise))
    torch.testing.assert_close(groups, sigreg.of_groups(wide, noise, shares))
    torch.manual_seed(3)
    torch.testing.assert_close(drawn, sigreg(wide))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_module_of_another_dtype_computes_the_same(dtype):
    x, noise, shares = torch.randn(30, 5), torch.randn(5, 16), torch.full((1, 30), 1 / 30)
    plain, other = SIGReg(16, 9, 3.7), SIGReg(16, 9, 3.7).to(dtype)
    torch.testing.assert_close(other.compute(x, noise), plain.compute(x, noise))
    torch.testing.assert_close(
        other.of_groups(x.double(), noise.double(), shares.double()), plain.of_groups(x, noise, shares)
    )
    assert other(x.to(dtype)).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [({"points": 1}, "points=1"), ({"slices": 0}, "slices=0"), ({"t_max": -1.0}, "t_max"), ({"sync": "no"}, "sync")],
)
def test_numbers_that_cannot_be_used(options, words):
    with pytest.raises(OptionError, match=words):
        SIGReg(**options)
