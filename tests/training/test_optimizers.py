import pytest
import torch
from torch import nn

from scforge.errors import OptionError
from scforge.models import GenePoolingModel, TransformerEncoder
from scforge.testing import raises
from scforge.training.optimizers import SCHEDULES, make_optimizer, make_schedule, parameter_groups


def rates(name: str, total: int, warmup: int | None = None) -> list[float]:
    """Learning rate of each step, with a peak of 1."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_schedule(optimizer, name=name, total_steps=total, warmup_steps=warmup)
    seen = []
    for _ in range(total):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "module",
    [TransformerEncoder(20, 8, 2, 2), GenePoolingModel(20, 8, pooling="weighted_sum"), GenePoolingModel(20, 8)],
    ids=["transformer", "weighted sum", "mean"],
)
def test_groups_hold_each_parameter_once(module, frozen):
    next(module.parameters()).requires_grad_(not frozen)
    decay, plain = parameter_groups(module, 0.1)
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    ids = [id(p) for group in (decay, plain) for p in group["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in module.parameters() if p.requires_grad}
    linear = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad}
    assert {id(p) for p in decay["params"]} == linear
    # A weight that is shared with an embedding is not decayed.
    shared = nn.ModuleDict({"head": nn.Linear(4, 10, bias=False), "embedding": nn.Embedding(10, 4)})
    shared["head"].weight = shared["embedding"].weight
    assert [len(group["params"]) for group in parameter_groups(shared, 0.1)] == [0, 1]


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_optimizers(name, kind):
    module = nn.Linear(3, 1)
    optimizer = make_optimizer(module, name=name, lr=0.05, weight_decay=0.1)
    assert type(optimizer) is kind
    assert optimizer.defaults.get("momentum", 0.9) == 0.9
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.05, 0.1), (0.05, 0.0)]
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = (module(inputs)[:, 0] - inputs.sum(dim=1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    make_schedule(optimizer, name="one_cycle", total_steps=10)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_schedules(name):
    seen = rates(f"{name}_warmup", 100, 10)
    assert seen[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert seen[10] == max(seen) == 1.0
    assert all(a > b for a, b in zip(seen[10:], seen[11:], strict=False))
    assert 0 <= seen[-1] < 0.02
    assert rates(f"{name}_warmup", 100).index(1.0) == 10
    # No warm-up unless it is asked for.
    assert rates(name, 100) == pytest.approx(rates(f"{name}_warmup", 100, 0))
    assert rates(name, 100, 10) == seen
    quarter = 0.75 if name == "linear" else 0.5 * (1 + 0.5**0.5)
    assert [rates(name, 100)[i] for i in (0, 25, 50)] == pytest.approx([1.0, quarter, 0.5])
    assert rates("constant", 20) == [1.0] * 20
    assert rates("constant", 20, 4)[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    one_cycle = rates("one_cycle", 100)
    assert one_cycle.index(max(one_cycle)) == 29
    assert (one_cycle[0], one_cycle[29]) == pytest.approx((1 / 25, 1.0))
    assert one_cycle[-1] < 1e-4
    with raises(OptionError, "schedule"):
        rates("cosin", 10)
    with raises(OptionError, "optimizer"):
        make_optimizer(nn.Linear(2, 2), name="rmsprop", lr=1.0, weight_decay=0.0)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("warmup", [None, 0, 1, 3, 1000])
def test_short_runs_have_a_usable_rate(name, warmup):
    for total in range(1, 14):
        seen = rates(name, total, warmup)
        assert all(0 <= rate <= 1 + 1e-9 for rate in seen)
        assert sum(seen) > 0
        if total >= 3:
            assert max(seen) > 0.5
