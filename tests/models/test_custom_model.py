"""A custom architecture from one file, with the tests of the tutorial, which the package's own model passes too."""

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
from scforge.models.protocol import ModelOutput
from scforge.models.registry import MODELS
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


@pytest.fixture(params=["custom", "package"])
def model_class(request) -> type[nn.Module]:
    return request.getfixturevalue("custom") if request.param == "custom" else GenePoolingModel


@pytest.fixture(params=[{}, {"pooling": "cls"}], ids=["unset", "cls"])
def tiny_config(request, tiny_config) -> ModelConfig:
    """The seed's model ignores the pooling of the configuration."""
    return tiny_config.model_copy(update=request.param) if request.param else tiny_config


class TestRegistration:
    def test_known_by_name(self, custom, tiny_config):
        assert "my_gene_pooling" in list_models()
        assert isinstance(get_model("my_gene_pooling", tiny_config), custom)
        assert isinstance(get_model("my_gene_pooling", tiny_config), CellModule)

    def test_gone_after_the_test(self):
        assert "my_gene_pooling" not in list_models()

    def test_trains_and_embeds(self, custom, tiny_adata, tiny_vocab):
        cells = open_cells(tiny_adata, tiny_vocab)
        tokenizer = get_tokenizer("rank_value", tiny_vocab)
        model = get_model("my_gene_pooling", ModelConfig(vocab_size=len(tiny_vocab), hidden_dim=16, num_layers=1))
        objective = MaskedGenePrediction()
        data = CellDataModule(
            cells, tokenizer, objective, train_rows=np.arange(50), validation_rows=np.arange(50, 60), batch_size=10
        )
        result = fit(TrainingPlan(model, objective, lr=1e-2), data, max_epochs=5, progress_bar=False, accelerator="cpu")
        assert result.history["train_loss"][-1] < result.history["train_loss"][0]
        assert embed(model, cells, tokenizer).shape == (60, 16)


class TestGenePoolingForward:
    """Tests for the forward pass."""

    def test_forward_returns_model_output(self, model_class, tiny_config, dummy_batch):
        model = model_class.from_config(tiny_config)
        out = model(**dummy_batch)
        assert isinstance(out, ModelOutput)

    def test_forward_embeddings_shape(self, model_class, tiny_config, dummy_batch):
        model = model_class.from_config(tiny_config)
        out = model(**dummy_batch)
        batch_size = dummy_batch["input_ids"].size(0)
        assert out.embeddings.shape == (batch_size, tiny_config.hidden_dim)

    def test_forward_logits_shape(self, model_class, tiny_config, dummy_batch):
        model = model_class.from_config(tiny_config)
        out = model(**dummy_batch)
        batch_size, seq_len = dummy_batch["input_ids"].shape
        assert out.logits.shape == (batch_size, seq_len, tiny_config.vocab_size)

    def test_forward_with_labels_has_loss(self, model_class, tiny_config, dummy_batch):
        model = model_class.from_config(tiny_config)
        out = model(**dummy_batch)
        assert out.loss is not None
        assert out.loss.shape == ()
        assert out.loss.item() > 0

    def test_forward_without_labels_no_loss(self, model_class, tiny_config, dummy_batch):
        model = model_class.from_config(tiny_config)
        batch_no_labels = {k: v for k, v in dummy_batch.items() if k != "labels"}
        out = model(**batch_no_labels)
        assert out.loss is None


class TestGenePoolingEncode:
    """Tests for the encode method."""

    def test_encode_output_shape(self, model_class, tiny_config, dummy_batch):
        model = model_class.from_config(tiny_config)
        emb = model.encode(
            dummy_batch["input_ids"],
            dummy_batch["attention_mask"],
            values=dummy_batch["values"],
        )
        batch_size = dummy_batch["input_ids"].size(0)
        assert emb.shape == (batch_size, tiny_config.hidden_dim)

    def test_encode_matches_forward_embeddings(self, model_class, tiny_config, dummy_batch):
        model = model_class.from_config(tiny_config)
        model.training = False
        with torch.no_grad():
            emb = model.encode(
                dummy_batch["input_ids"],
                dummy_batch["attention_mask"],
                values=dummy_batch["values"],
            )
            out = model(**dummy_batch)
        assert torch.allclose(emb, out.embeddings, atol=1e-6)


class TestGenePoolingConfig:
    """Tests for configuration and initialization."""

    def test_from_config_success(self, model_class, tiny_config):
        model = model_class.from_config(tiny_config)
        assert model.vocab_size == tiny_config.vocab_size
        assert model.hidden_dim == tiny_config.hidden_dim

    def test_from_config_missing_vocab_size_raises(self, model_class):
        config = ModelConfig(vocab_size=None)
        with pytest.raises(ValueError, match="vocab_size must be set"):
            model_class.from_config(config)

    def test_num_parameters(self, model_class, tiny_config):
        model = model_class.from_config(tiny_config)
        total = model.num_parameters(trainable_only=False)
        trainable = model.num_parameters(trainable_only=True)
        assert total > 0
        assert trainable == total  # All params trainable by default


class TestGenePoolingTraining:
    """Tests for training behavior."""

    def test_loss_decreases_with_training(self, model_class, tiny_config, dummy_batch):
        model = model_class.from_config(tiny_config)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        # Initial loss
        out1 = model(**dummy_batch)
        initial_loss = out1.loss.item()

        # Training steps
        for _ in range(10):
            optimizer.zero_grad()
            out = model(**dummy_batch)
            out.loss.backward()
            optimizer.step()

        # Final loss
        out2 = model(**dummy_batch)
        final_loss = out2.loss.item()

        # Loss should decrease
        assert final_loss < initial_loss
