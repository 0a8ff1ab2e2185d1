"""A small model over small cells, with the head of a task."""

from collections.abc import Callable

import anndata as ad
import numpy as np
import pytest
import torch

from scforge.data import GeneVocab, open_cells
from scforge.finetuning import Task, get_task
from scforge.finetuning.base import EvaluationContext, Predictor
from scforge.finetuning.mapping import FineTunedModule
from scforge.models import GenePoolingModel
from scforge.tokenizers import get_tokenizer

TRAIN, HELD_OUT = np.arange(0, 150), np.arange(150, 200)


@pytest.fixture
def cells200(many_adata: ad.AnnData) -> ad.AnnData:
    return many_adata[:200].copy()


@pytest.fixture
def tuned() -> Callable[..., Predictor]:
    """Return a function that makes a module for a task, and starts its head; the encoder has random weights."""

    def make(name: str, adata: ad.AnnData, train: np.ndarray = TRAIN, **options: object) -> Predictor:
        torch.manual_seed(0)
        vocab = GeneVocab.from_adata(adata)
        cells = open_cells(adata, vocab)
        tokenizer = get_tokenizer("continuous_projection", vocab, append_cls=False)
        task = get_task(name, **options)
        found = task.options_from(lambda key: adata.obs[key].iloc[train])
        task = get_task(name, **{**task.config(), **found})
        encoder = GenePoolingModel(len(vocab), 128, 1, dropout=0.1, pooling="weighted_sum", ffn_dim=64, latent_dim=64)
        module = FineTunedModule(encoder, task.make_head(64, encoder)).eval()
        task.bind(cells, train)
        task.initialize(module, cells.take(train), tokenizer)
        return Predictor(module, tokenizer, task, cells, batch_size=16)

    return make


@pytest.fixture
def context() -> Callable[..., EvaluationContext]:
    """Return a function that makes the context of an evaluation on cells that were held out."""

    def make(predictor: Predictor, **changes: object) -> EvaluationContext:
        base = Predictor(predictor.module.encoder, predictor.tokenizer, predictor.task, predictor.cells)
        given = {
            "predictor": predictor,
            "rows": HELD_OUT,
            "train": predictor,
            "train_rows": TRAIN,
            "base": base,
            "base_train": base,
            "cells": predictor.cells,
            "train_cells": predictor.cells,
        }
        return EvaluationContext(**{**given, **changes})

    return make


def step(predictor: Predictor, rows: np.ndarray) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and figures of some cells."""
    task: Task = predictor.task
    return task.loss(predictor.module, task.prepare(predictor.cells.block(rows), predictor.tokenizer, epoch=0, seed=0))


@pytest.fixture(name="step")
def step_fixture() -> Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    return step
