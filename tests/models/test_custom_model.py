"""A custom architecture from one file, with the examples of the tutorial, which the package's own model passes too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from scforge.config.schema import ModelConfig
from scforge.data import open_cells
from scforge.models import CellModule, get_model, list_models
from scforge.models.gene_pooling import GenePoolingModel
from scforge.models.registry import MODELS
from scforge.testing import check_model
from scforge.tokenizers import get_tokenizer
from scforge.training import CellDataModule, MaskedGenePrediction, TrainingPlan, embed, fit


@pytest.fixture
def custom(monkeypatch) -> type[nn.Module]:
    """The class in my_gene_pooling.py, registered by running the file, for the time of a test."""
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
    spec = importlib.util.spec_from_file_location("my_gene_pooling", Path(__file__).with_name("my_gene_pooling.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MyGenePooling


def test_a_custom_model_keeps_the_rules(custom):
    assert custom.__name__ == "MyGenePooling"
    assert "my_gene_pooling" in list_models()
    check_model("my_gene_pooling", hidden_dim=8, num_layers=1)


def test_it_is_gone_after_the_test():
    assert "my_gene_pooling" not in list_models()


def test_it_trains_and_embeds(custom, tiny_adata, tiny_vocab):
    cells = open_cells(tiny_adata, tiny_vocab)
    tokenizer = get_tokenizer("rank_value", tiny_vocab)
    model = get_model("my_gene_pooling", ModelConfig(vocab_size=len(tiny_vocab), hidden_dim=16, num_layers=1))
    assert isinstance(model, CellModule)
    objective = MaskedGenePrediction()
    data = CellDataModule(
        cells, tokenizer, objective, train_rows=np.arange(50), validation_rows=np.arange(50, 60), batch_size=10
    )
    result = fit(TrainingPlan(model, objective, lr=1e-2), data, max_epochs=5, progress_bar=False, accelerator="cpu")
    assert result.history["train_loss"][-1] < result.history["train_loss"][0]
    assert embed(model, cells, tokenizer).shape == (60, 16)


@pytest.mark.parametrize("options", [{}, {"pooling": "cls"}], ids=str)
@pytest.mark.parametrize("kind", ["custom", "package"])
def test_the_examples_of_the_tutorial(request, tiny_config, dummy_batch, kind, options):
    """The pooling of the configuration is left alone by a model that has but one."""
    model_class = request.getfixturevalue("custom") if kind == "custom" else GenePoolingModel
    config = tiny_config.model_copy(update=options)
    model = model_class.from_config(config)
    assert model.num_parameters() == model.num_parameters(trainable_only=False) > 0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        output = model(**dummy_batch)
        output.loss.backward()
        optimizer.step()
        losses.append(output.loss.item())
    assert losses[-1] < losses[0]
    assert output.embeddings.shape == (4, config.hidden_dim)
    assert output.logits.shape == (4, 16, config.vocab_size)
    with pytest.raises(ValueError, match="vocab_size must be set"):
        model_class.from_config(ModelConfig(vocab_size=None))
