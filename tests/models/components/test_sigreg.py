"""SIGReg over cells against the formula written out in NumPy."""

import numpy as np
import pytest
import torch

from scforge.errors import OptionError
from scforge.models.components import SIGReg
from scforge.testing import raises


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
    ("options", "argument"),
    [({"points": 1}, "points"), ({"slices": 0}, "slices"), ({"t_max": -1.0}, "t_max"), ({"sync": "no"}, "sync")],
)
def test_numbers_that_cannot_be_used(options, argument):
    with raises(OptionError, argument):
        SIGReg(**options)
