from types import SimpleNamespace

import pytest
import torch

from scforge.errors import OptionError
from scforge.finetuning import PredictionHead
from scforge.finetuning.mapping import FineTunedModule
from scforge.models import GenePoolingModel, TransformerEncoder
from scforge.testing import raises
from scforge.training.layers import freeze_layers, layer_groups, learning_rate_factors
from scforge.training.plan import GradualUnfreezing

N_LAYERS = 3


@pytest.fixture
def transformer() -> TransformerEncoder:
    return TransformerEncoder(vocab_size=50, hidden_dim=8, num_layers=N_LAYERS, num_heads=2, max_seq_len=16)


def test_every_parameter_is_in_one_group(transformer) -> None:
    pooling = GenePoolingModel(50, 8, 2, dropout=0.1, pooling="weighted_sum", latent_dim=4)
    for module in (transformer, pooling, FineTunedModule(transformer, PredictionHead(8, 2))):
        groups = layer_groups(module)
        assert sorted(id(p) for group in groups for p in group) == sorted(id(p) for p in module.parameters())
        assert len(groups) > 2
        assert all(any(p.ndim > 1 for p in group) for group in groups[:-1])


def test_groups_of_a_transformer(transformer) -> None:
    module = FineTunedModule(transformer, PredictionHead(8, 2))
    names = {id(p): name for name, p in module.named_parameters()}
    groups = [[names[id(p)] for p in group] for group in layer_groups(module)]
    assert len(groups) == N_LAYERS + 2
    assert any("embedding" in name for name in groups[0])
    for number, group in enumerate(groups[1:-1]):
        assert all(f".layers.{number}." in name for name in group)
    assert "head.out.weight" in groups[-1]


def test_freezing_and_learning_rates_that_fall_toward_the_input(transformer) -> None:
    factors = learning_rate_factors(transformer, 0.5)
    freeze_layers(transformer, 2)
    for number, group in enumerate(layer_groups(transformer)):
        assert {p.requires_grad for p in group} == {number > 2}
        assert {factors[id(p)] for p in group} == {0.5 ** (N_LAYERS + 1 - number)}
    assert learning_rate_factors(transformer, None) == {}
    with raises(OptionError, "freeze"):
        freeze_layers(transformer, N_LAYERS + 1)
    assert GradualUnfreezing(2).state_dict() == {}
    with raises(OptionError, "gradual_unfreezing"):
        GradualUnfreezing(0)
    for decay in (0, 1.5, True):
        with raises(OptionError, "layer_lr_decay"):
            learning_rate_factors(transformer, decay)


@pytest.mark.parametrize(("epoch", "n_trained"), [(1, 1), (2, 2), (50, N_LAYERS + 2)])
def test_thawing_every_second_epoch(transformer, epoch: int, n_trained: int) -> None:
    for parameter in transformer.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer, plan = SimpleNamespace(current_epoch=epoch), SimpleNamespace(module=transformer)
    GradualUnfreezing(2).on_before_optimizer_step(trainer, plan, None)
    thawed = [all(p.grad is not None for p in group) for group in layer_groups(transformer)]
    assert thawed == [False] * (N_LAYERS + 2 - n_trained) + [True] * n_trained
