import numpy as np
import pytest
import torch

from scforge.errors import ScforgeWarning
from scforge.training.objectives._views import CollapseWatch, geometry, geometry_moments, has_collapsed
from scforge.training.plan import EpochMetrics


def moments(*steps: torch.Tensor) -> dict[str, np.ndarray]:
    means = EpochMetrics()
    for z_bd in steps:
        means.add(geometry_moments(z_bd), len(z_bd))
    return means.take()


def of_steps(*steps: torch.Tensor) -> dict[str, float]:
    taken = moments(*steps)
    found = geometry(taken)
    assert not taken, "nothing of the moments is left for the log"
    return found


def normal(n_cells: int = 2000, n_dims: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(n_cells, n_dims, generator=torch.Generator().manual_seed(seed))


LINE, FAR = torch.eye(6)[:2]
COLLAPSED = [
    normal() * LINE + 1e-3 * normal(seed=1),  # on a line
    normal() * LINE + 0.1 * normal(seed=1) + 20 * FAR,  # on a thin line far from the origin
    1e-3 * normal() + 1,  # in a point
    torch.ones(20, 6),
]


def test_figures_are_those_of_all_cells():
    z = normal() * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.1, 0.0]) + 5
    shares = np.linalg.eigvalsh(np.cov(z.numpy().astype(np.float64).T))
    shares = shares[shares > 1e-9] / shares.sum()
    assert of_steps(z)["effective_rank"] == pytest.approx(np.exp(-np.sum(shares * np.log(shares))), rel=1e-4)
    z = normal(300) + 2 * LINE
    units = z / z.norm(dim=1, keepdim=True)
    for steps in ((z,), (z[:100], z[100:])):
        assert of_steps(*steps)["mean_cosine"] == pytest.approx(float((units @ units.T).mean()), rel=1e-5)
    # An embedding that moves as a whole has no further direction.
    steps = [normal(100, seed=step) + 50 * step * LINE for step in range(20)]
    assert of_steps(*steps)["effective_rank"] == pytest.approx(6, rel=0.02)
    assert of_steps(normal(1), normal(7)) == of_steps(normal() * torch.tensor(float("nan"))) == {}
    assert of_steps(normal(1), normal(20)) != {}
    # Under autocast nothing is rounded.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = geometry_moments(z.requires_grad_())
    for name, tensor in geometry_moments(z).items():
        assert tensor.dtype == torch.float32
        assert not found[name].requires_grad
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("z", COLLAPSED)
def test_collapse_is_named(z):
    found = of_steps(z)
    message = rf"collapsed: its effective rank is {found['effective_rank']:.2f} of 6 dim.*larger weight.*smaller lr\."
    watch = CollapseWatch()
    with pytest.warns(ScforgeWarning, match=message):
        assert watch.figures(moments(z)) == found
    assert watch.figures(moments(z)) == found, "and told once"


def test_what_keeps_cells_apart_has_not_collapsed():
    two_kinds = torch.tensor([1.0, -1.0]).repeat(1000).unsqueeze(1) * LINE + 0.04 * normal()
    for z in (normal(), normal() + 20, two_kinds, 1e-3 * normal(), normal(n_dims=1) * 0.1 + 5):
        assert not has_collapsed(of_steps(z), z.shape[1])
    assert not has_collapsed({}, 6)
    assert not has_collapsed({"effective_rank": 1.0, "mean_cosine": 0.2}, 2), "two dimensions may need one"
