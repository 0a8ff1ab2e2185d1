import dataclasses
from types import SimpleNamespace

import pytest
import torch

from scforge.soma.v1.torch import Model, ModelConfig

TINY = ModelConfig(dropout_rate=0.0, embedding_dim=16, pwff_hidden_dim=32, num_layers=2, num_heads=2)


@pytest.fixture(scope="session")
def published() -> SimpleNamespace:
    soma = pytest.importorskip("soma_models.v1.torch", reason="the published package is not installed")
    from soma_models.v1.torch.modules.attention import MultiHeadAttention, apply_rope
    from soma_models.v1.torch.serde import Serde

    return SimpleNamespace(**vars(soma), Serde=Serde, MultiHeadAttention=MultiHeadAttention, apply_rope=apply_rope)


@pytest.fixture
def tiny() -> ModelConfig:
    return TINY


@pytest.fixture
def pair(published, tiny):
    def make(**changes) -> tuple[Model, torch.nn.Module]:
        config = dataclasses.replace(tiny, **changes)
        torch.manual_seed(0)
        theirs = published.Model(published.ModelConfig(**dataclasses.asdict(config)))
        return Model.load_bytes(theirs.save_bytes(), config), theirs

    return make


@pytest.fixture
def batch() -> SimpleNamespace:
    """Tokens, targets and places without order."""
    generator = torch.Generator().manual_seed(0)
    draw = {"size": (3, 70), "generator": generator}
    tokens, targets = (torch.randint(0, 258, **draw) for _ in range(2))
    return SimpleNamespace(tokens=tokens, targets=targets, positions=torch.randint(0, 5000, **draw))
