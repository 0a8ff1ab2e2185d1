"""What the geometry of an embedding says, over an epoch of steps, and when it is called collapsed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scforge.errors import ScforgeWarning
from scforge.training.means import EpochMeans
from scforge.training.objectives._collapse import geometry, geometry_moments, warn_of_collapse


def of_steps(*steps: torch.Tensor) -> dict[str, float]:
    means = EpochMeans()
    for z_bd in steps:
        means.add(geometry_moments(z_bd), len(z_bd))
    taken = means.take()
    found = geometry(taken)
    assert not taken, "nothing of the moments is left for the log"
    return found


def normal(n_cells: int = 2000, n_dims: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(n_cells, n_dims, generator=torch.Generator().manual_seed(seed))


def test_effective_rank_is_that_of_the_covariance():
    z = normal() * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.1, 0.0]) + 5
    shares = np.linalg.eigvalsh(np.cov(z.numpy().astype(np.float64).T))
    shares = shares[shares > 1e-9] / shares.sum()
    assert of_steps(z)["effective_rank"] == pytest.approx(np.exp(-np.sum(shares * np.log(shares))), rel=1e-4)
    assert of_steps(normal())["effective_rank"] == pytest.approx(6, rel=0.01)


def test_mean_cosine_is_that_of_all_pairs():
    z = normal(300) + torch.tensor([2.0, 0, 0, 0, 0, 0])
    units = z / z.norm(dim=1, keepdim=True)
    assert of_steps(z)["mean_cosine"] == pytest.approx(float((units @ units.T).mean()), rel=1e-5)
    assert of_steps(z[:100], z[100:])["mean_cosine"] == pytest.approx(of_steps(z)["mean_cosine"], rel=1e-5)


def test_an_embedding_that_moves_as_a_whole_has_no_further_direction():
    along = torch.tensor([1.0, 0, 0, 0, 0, 0])
    steps = [normal(100, seed=step) + 50 * step * along for step in range(20)]
    assert of_steps(*steps)["effective_rank"] == pytest.approx(6, rel=0.02)


def test_under_autocast_nothing_is_rounded():
    z = normal() + 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = geometry_moments(z.requires_grad_())
    for name, tensor in geometry_moments(z).items():
        assert tensor.dtype == torch.float32
        assert not found[name].requires_grad
        assert torch.equal(found[name], tensor)


def test_few_cells_and_what_is_not_finite_have_no_figures():
    assert of_steps(normal(1), normal(7)) == {}
    assert of_steps(normal(1), normal(20)) != {}
    assert of_steps(normal() * torch.tensor(float("nan"))) == {}
    assert not warn_of_collapse({}, 6)


LINE = torch.tensor([1.0, 0, 0, 0, 0, 0])
FAR = torch.tensor([0.0, 1, 0, 0, 0, 0])


@pytest.mark.parametrize(
    "z",
    [
        normal() * LINE + 1e-3 * normal(seed=1),  # on a line
        normal() * LINE + 0.1 * normal(seed=1) + 20 * FAR,  # on a thin line far from the origin
        1e-3 * normal() + 1,  # in a point
        torch.ones(20, 6),
    ],
)
def test_collapse_is_named(z):
    found = of_steps(z)
    message = rf"collapsed: its effective rank is {found['effective_rank']:.2f} of 6 dim.*larger weight.*smaller lr\."
    with pytest.warns(ScforgeWarning, match=message):
        assert warn_of_collapse(found, 6)


def two_kinds() -> torch.Tensor:
    signs = torch.tensor([1.0, -1.0]).repeat(1000).unsqueeze(1)
    return signs * LINE + 0.04 * normal()


@pytest.mark.parametrize("z", [normal(), normal() + 20, two_kinds(), 1e-3 * normal(), normal(n_dims=1) * 0.1 + 5])
def test_what_keeps_cells_apart_has_not_collapsed(z):
    assert not warn_of_collapse(of_steps(z), z.shape[1])


def test_two_dimensions_may_need_one():
    assert not warn_of_collapse({"effective_rank": 1.0, "mean_cosine": 0.2}, 2)


def test_the_first_process_alone_warns(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert warn_of_collapse({"effective_rank": 0.0, "mean_cosine": 1.0}, 6)
