"""A small training: 60 cells of two planted groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scforge.data import open_cells
from scforge.models import GenePoolingModel
from scforge.tokenizers import get_tokenizer
from scforge.training import CellDataModule, FitResult, JointEmbedding, MaskedGenePrediction, TrainingPlan, fit


class Setup:
    """Everything that a training needs, made anew for each test."""

    def __init__(self, adata, vocab, objective="joint_embedding", **options):
        torch.manual_seed(0)
        self.cells = open_cells(adata, vocab)
        if objective == "joint_embedding":
            self.objective = JointEmbedding(views=2, slices=32, **options)
            self.tokenizer = get_tokenizer("continuous_projection", vocab, append_cls=False)
        else:
            self.objective = MaskedGenePrediction(**options)
            self.tokenizer = get_tokenizer("rank_value", vocab)
        self.module = GenePoolingModel(len(vocab), 16, 1, dropout=0.1, pooling="weighted_sum", ffn_dim=32, latent_dim=4)

    def data(self, n_validation=10, batch_size=10, **options) -> CellDataModule:
        rows = np.arange(len(self.cells))
        return CellDataModule(
            self.cells,
            self.tokenizer,
            self.objective,
            train_rows=rows[n_validation:],
            validation_rows=rows[:n_validation],
            batch_size=batch_size,
            **options,
        )

    def plan(self, **options) -> TrainingPlan:
        return TrainingPlan(self.module, self.objective, **{"lr": 1e-2, **options})

    def fit(self, plan=None, data=None, **options) -> FitResult:
        options = {"max_epochs": 3, "progress_bar": False, "accelerator": "cpu", **options}
        return fit(plan or self.plan(), data or self.data(), **options)


@pytest.fixture
def setup(tiny_adata, tiny_vocab) -> Setup:
    return Setup(tiny_adata, tiny_vocab)


@pytest.fixture
def masked_setup(tiny_adata, tiny_vocab) -> Setup:
    return Setup(tiny_adata, tiny_vocab, "masked_gene_prediction")
