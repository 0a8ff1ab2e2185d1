from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import sparse

from scforge.data import open_cells
from scforge.data.cells import CellSource
from scforge.models import GenePoolingModel
from scforge.tokenizers import get_tokenizer
from scforge.training import CellDataModule, JointEmbedding, MaskedGenePrediction, TrainingPlan
from scforge.training.fitting import FitResult, fit
from scforge.training.options import TrainOptions


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
        options = {"max_epochs": 3, "progress_bar": False, "accelerator": "cpu", "gradient_clip_val": 0, **options}
        return fit(plan or self.plan(), data or self.data(), TrainOptions.from_arguments(options))


@pytest.fixture
def setup(tiny_adata, tiny_vocab) -> Setup:
    return Setup(tiny_adata, tiny_vocab)


@pytest.fixture
def masked_setup(tiny_adata, tiny_vocab) -> Setup:
    return Setup(tiny_adata, tiny_vocab, "masked_gene_prediction")


@pytest.fixture
def cells(tiny_adata, tiny_vocab) -> CellSource:
    return open_cells(tiny_adata, tiny_vocab)


@pytest.fixture
def entropy_ranked(tiny_vocab):
    return get_tokenizer("entropy_ranked", tiny_vocab)


@pytest.fixture(scope="session")
def random_cells() -> CellSource:
    """550 cells of 20 of 60 genes each, with any ranks: nothing about a gene follows from the others."""
    generator = np.random.default_rng(0)
    counts = np.zeros((550, 60), dtype=np.float32)
    for row in counts:
        row[generator.choice(60, 20, replace=False)] = generator.permutation(20) + 1
    return CellSource(sparse.csr_matrix(counts), counts.sum(axis=1).astype(float))


@pytest.fixture
def train_on() -> Callable[..., dict[str, list[float]]]:
    """Return a function that trains on all cells but the last ones, and returns what is logged."""

    def train_on(cells, tokenizer, module, objective, *, epochs, n_held_out, lr=1e-2, batch_size=50):
        torch.manual_seed(0)
        objective.initialize(module, cells, tokenizer)
        rows = np.arange(len(cells))
        split = {"train_rows": rows[:-n_held_out], "validation_rows": rows[-n_held_out:]}
        data = CellDataModule(cells, tokenizer, objective, batch_size=batch_size, **split)
        plan = TrainingPlan(module, objective, lr=lr)
        options = TrainOptions(
            max_epochs=epochs, early_stopping=False, progress_bar=False, accelerator="cpu", gradient_clip_val=0
        )
        return fit(plan, data, options).history

    return train_on
