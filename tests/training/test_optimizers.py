"""Weight decay groups and learning-rate schedules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scforge.errors import OptionError
from scforge.models import GenePoolingModel, TransformerEncoder
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


@pytest.mark.parametrize(
    "module",
    [TransformerEncoder(20, 8, 2, 2), GenePoolingModel(20, 8, pooling="weighted_sum"), GenePoolingModel(20, 8)],
    ids=["transformer", "weighted sum", "mean"],
)
def test_groups_hold_each_parameter_once(module):
    decay, plain = parameter_groups(module, 0.1)
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    ids = [id(p) for group in (decay, plain) for p in group["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in module.parameters()}
    decayed = {id(p) for p in decay["params"]}
    linear = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}
    assert decayed == linear


def test_frozen_parameters_are_left_out():
    module = TransformerEncoder(20, 8, 1, 2)
    module.embedding.requires_grad_(False)
    ids = {id(p) for group in parameter_groups(module, 0.1) for p in group["params"]}
    assert ids == {id(p) for p in module.parameters() if p.requires_grad}


def test_a_weight_shared_with_an_embedding_is_not_decayed():
    module = nn.ModuleDict({"head": nn.Linear(4, 10, bias=False), "embedding": nn.Embedding(10, 4)})
    module["head"].weight = module["embedding"].weight
    decay, plain = parameter_groups(module, 0.1)
    assert (len(decay["params"]), len(plain["params"])) == (0, 1)


def test_optimizer():
    optimizer = make_optimizer(TransformerEncoder(20, 8, 1, 2), name="adamw", lr=3e-4, weight_decay=0.2)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["lr"] for group in optimizer.param_groups] == [3e-4, 3e-4]
    with pytest.raises(OptionError, match="optimizer='rmsprop' is not known"):
        make_optimizer(nn.Linear(2, 2), name="rmsprop", lr=1.0, weight_decay=0.0)


@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)])
def test_other_optimizers(name, kind):
    module = nn.Linear(3, 1)
    optimizer = make_optimizer(module, name=name, lr=0.05, weight_decay=0.1)
    assert type(optimizer) is kind
    assert optimizer.defaults.get("momentum", 0.9) == 0.9
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
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


@pytest.mark.parametrize("name", ["cosine_warmup", "linear_warmup"])
def test_warm_up_then_down_to_nothing(name):
    seen = rates(name, 100, 10)
    assert seen[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert seen[10] == max(seen) == 1.0
    assert all(a > b for a, b in zip(seen[10:], seen[11:], strict=False))
    assert 0 <= seen[-1] < 0.02


def test_shapes():
    assert rates("linear_warmup", 100, 0)[50] == pytest.approx(0.5)
    assert rates("cosine_warmup", 100, 0)[50] == pytest.approx(0.5)
    assert rates("cosine_warmup", 100, 0)[25] == pytest.approx(0.5 * (1 + 0.5**0.5))
    assert rates("constant", 20) == [1.0] * 20
    assert rates("constant", 20, 4)[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_one_cycle():
    seen = rates("one_cycle", 100)
    assert seen.index(max(seen)) == 29
    assert max(seen) == pytest.approx(1.0)
    assert seen[0] == pytest.approx(1 / 25)
    assert seen[-1] < 1e-4


def test_default_warm_up_is_a_tenth():
    assert rates("cosine_warmup", 100).index(1.0) == 10


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("warmup", [None, 0, 1, 3, 1000])
def test_short_runs_have_a_usable_rate(name, warmup):
    for total in range(1, 14):
        seen = rates(name, total, warmup)
        assert all(0 <= rate <= 1 + 1e-9 for rate in seen)
        assert sum(seen) > 0
        if total >= 3:
            assert max(seen) > 0.5


def test_unknown_schedule():
    with pytest.raises(OptionError, match="schedule='cosin' is not known; did you mean 'cosine'"):
        rates("cosin", 10)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_no_warm_up_unless_asked_for(name):
    assert rates(name, 100) == pytest.approx(rates(f"{name}_warmup", 100, 0))
    assert rates(name, 100)[0] == 1.0
    assert rates(name, 100, 10) == rates(f"{name}_warmup", 100, 10)
