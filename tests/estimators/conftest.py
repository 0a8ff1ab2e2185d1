from collections.abc import Callable, Iterator
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from scforge.config.schema import ModelConfig
from scforge.estimators import Encoder
from scforge.models import register_model
from scforge.models.components import GeneExpressionEmbedding, MaskedGenePredictionHead, mean_pool
from scforge.models.protocol import ModelOutput
from scforge.models.registry import MODELS

LIGHT = {"n_top_genes": 40, "hidden_dim": 8, "ffn_dim": 8, "latent_dim": 4}
TRANSFORMER = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "ffn_dim": 16}


@pytest.fixture
def quick() -> dict:
    return {"max_epochs": 2, "batch_size": 16, "progress_bar": False, "accelerator": "cpu"}


@pytest.fixture
def build(tiny_adata: ad.AnnData) -> Callable[..., Encoder]:
    def build(architecture=None, *parts, adata=None, setup=None, **options) -> Encoder:
        adata = tiny_adata if adata is None else adata
        Encoder.setup_anndata(adata, **(setup or {}))
        small = {None: LIGHT, "transformer_encoder": TRANSFORMER}.get(architecture, {})
        return Encoder(adata, architecture, *parts, **(small | options))

    return build


@pytest.fixture
def trained(build: Callable[..., Encoder], quick: dict) -> Callable[..., Encoder]:
    def trained(*args, train=None, **options) -> Encoder:
        model = build(*args, **options)
        model.train(**(quick | (train or {})))
        return model

    return trained


@pytest.fixture
def model(trained: Callable[..., Encoder]) -> Encoder:
    return trained(setup={"labels_key": "group"})


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a light model, ``plain``, of a transformer, ``base``, and of adapters on it; do not change them."""
    group = np.arange(40) % 2
    mean = np.full((40, 40), 0.5)
    mean[group == 0, :10], mean[group == 1, -10:] = 6.0, 6.0
    obs = pd.DataFrame({"group": pd.Categorical(np.where(group, "b", "a"))}, index=[f"cell{i}" for i in range(40)])
    counts = np.random.default_rng(0).poisson(mean).astype(np.float32)
    cells = ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=[f"gene{i}" for i in range(40)]))
    options = {"max_epochs": 1, "batch_size": 16, "progress_bar": False, "accelerator": "cpu", "num_threads": 0}
    Encoder.setup_anndata(cells, labels_key="group")
    plain = Encoder(cells, n_top_genes=24, hidden_dim=8, ffn_dim=8, latent_dim=4)
    base = Encoder(cells, "transformer_encoder", n_top_genes=24, hidden_dim=8, num_layers=1, num_heads=2, ffn_dim=8)
    for model in (plain, base):
        model.train(**options)
    adapted = base.finetune("annotation", cells, labels_key="group", lora={"r": 2}, **(options | {"lr": 1e-2}))
    folder = tmp_path_factory.mktemp("saved")
    plain.save(folder / "plain")
    base.save(folder / "base")
    adapted.save(folder / "adapter", adapter_only=True)
    return folder


@pytest.fixture
def custom_architecture() -> Iterator[str]:
    """An architecture that a user registers in one file, in the manner of the tutorial on custom models."""

    @register_model("my_pooling")
    class MyPooling(nn.Module):
        def __init__(self, vocab_size: int, hidden_dim: int, num_layers: int = 2, dropout: float = 0.1) -> None:
            super().__init__()
            self.embedding = GeneExpressionEmbedding(vocab_size=vocab_size, hidden_dim=hidden_dim, dropout=dropout)
            self.layers = nn.ModuleList([nn.Linear(hidden_dim, hidden_dim) for _ in range(num_layers)])
            self.head = MaskedGenePredictionHead(hidden_dim=hidden_dim, vocab_size=vocab_size)

        def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs) -> ModelOutput:
            hidden = self.embedding(input_ids, values=values)
            for layer in self.layers:
                hidden = hidden + layer(hidden)
            logits, loss = self.head(hidden), None
            if labels is not None:
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            return ModelOutput(loss=loss, logits=logits, embeddings=mean_pool(hidden, attention_mask))

        def encode(self, input_ids, attention_mask, values=None, **kwargs) -> torch.Tensor:
            return self.forward(input_ids, attention_mask, values).embeddings

        @classmethod
        def from_config(cls, config: ModelConfig) -> nn.Module:
            return cls(config.vocab_size, config.hidden_dim, num_layers=config.num_layers, dropout=config.dropout)

    yield "my_pooling"
    MODELS._entries.pop("my_pooling")
