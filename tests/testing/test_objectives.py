"""Objectives that break a rule, and what the check says about them."""

import numpy as np
import pytest
import torch

from scforge.errors import OptionError
from scforge.testing import check_objective, raises
from scforge.training import MaskedGenePrediction, Objective, TrainingDefaults


class MeanValue(Objective):
    """Predict the mean value of a cell; keeps all rules."""

    defaults = TrainingDefaults(batch_size=8, lr=1e-3, weight_decay=0.0, schedule="cosine", max_epochs=1)

    def __init__(self, *, weight: float = 1.0) -> None:
        self.weight = weight

    def prepare(self, block, tokenizer, *, epoch, seed):
        return dict(tokenizer(block))

    def loss(self, module, batch):
        error = module.encode(**batch).mean(1) - batch["values"].mean(1)
        return self.weight * error.square().mean(), {"error": error.abs().mean().detach()}


class Draws(MeanValue):
    def prepare(self, block, tokenizer, *, epoch, seed):
        batch = super().prepare(block, tokenizer, epoch=epoch, seed=seed)
        return batch | {"values": batch["values"] + torch.rand(batch["values"].shape)}


class DrawsUnused(MeanValue):
    def prepare(self, block, tokenizer, *, epoch, seed):
        torch.randperm(3)
        return super().prepare(block, tokenizer, epoch=epoch, seed=seed)


class DrawsUnusedOfNumpy(MeanValue):
    def prepare(self, block, tokenizer, *, epoch, seed):
        np.random.rand(2)
        return super().prepare(block, tokenizer, epoch=epoch, seed=seed)


class MissingLabels(MeanValue):
    def prepare(self, block, tokenizer, *, epoch, seed):
        labels = torch.full((len(block.rows),), torch.nan)
        return super().prepare(block, tokenizer, epoch=epoch, seed=seed) | {"target": labels}

    def loss(self, module, batch):
        return super().loss(module, {name: tensor for name, tensor in batch.items() if name != "target"})


class NumberOfCells(MeanValue):
    def prepare(self, block, tokenizer, *, epoch, seed):
        return super().prepare(block, tokenizer, epoch=epoch, seed=seed) | {"n": torch.tensor(len(block.rows))}


class UsesCells(MeanValue):
    """Initializes a model with what it has found in the training cells."""

    def bind(self, cells, train_rows):
        self.depth = float(cells.totals[train_rows].mean())

    def initialize(self, module, cells, tokenizer):
        assert self.depth > 0


class DrawsByPosition(MeanValue):
    def prepare(self, block, tokenizer, *, epoch, seed):
        batch = super().prepare(block, tokenizer, epoch=epoch, seed=seed)
        noise = np.random.default_rng([seed, epoch]).random(batch["values"].shape, dtype=np.float32)
        return batch | {"values": batch["values"] + torch.from_numpy(noise)}


class Forgets(MeanValue):
    def config(self):
        return {"weight": 1.0}


class ArrayBatch(MeanValue):
    def prepare(self, block, tokenizer, *, epoch, seed):
        return super().prepare(block, tokenizer, epoch=epoch, seed=seed) | {"rows": block.rows}


class LossPerCell(MeanValue):
    def loss(self, module, batch):
        return module.encode(**batch).mean(1), {}


class WithoutModel(MeanValue):
    def loss(self, module, batch):
        return batch["values"].mean(), {}


class LossOfNothing(MeanValue):
    def loss(self, module, batch):
        return 0.0 * module.encode(**batch).mean() / 0.0, {}


class AttachedMetric(MeanValue):
    def loss(self, module, batch):
        loss, _ = super().loss(module, batch)
        return loss, {"same": loss}


class OverwritesBatch(MeanValue):
    def loss(self, module, batch):
        batch["values"] += 1
        return super().loss(module, batch)


class UnknownMonitor(MeanValue):
    monitor = "accuracy"


class WithoutDefaults(MeanValue):
    defaults = None


def test_an_objective_that_keeps_the_rules():
    check_objective(MeanValue)
    check_objective(MeanValue(weight=0.5), architecture="mlp")
    check_objective(MissingLabels)
    check_objective(UsesCells)
    check_objective(MaskedGenePrediction, architecture="transformer_encoder", tokenizer="rank_value", mask_ratio=0.3)


@pytest.mark.parametrize(
    ("cls", "problem"),
    [
        (Draws, "different batch"),
        (DrawsUnused, "global generator"),
        (DrawsUnusedOfNumpy, "global generator"),
        (NumberOfCells, "'n' of the batch is a single number"),
        (DrawsByPosition, "order of the cells"),
        (ArrayBatch, "'rows' of the batch is not a tensor"),
        (LossPerCell, "not a single number"),
        (WithoutModel, "does not depend on the weights"),
        (LossOfNothing, "the loss is nan"),
        (AttachedMetric, "'same' is not detached"),
        (OverwritesBatch, "changes the batch"),
        (UnknownMonitor, "monitor='accuracy'"),
        (WithoutDefaults, "TrainingDefaults"),
    ],
)
def test_a_broken_rule_is_named(cls, problem):
    with pytest.raises(AssertionError, match=problem) as failure:
        check_objective(cls)
    assert str(failure.value).startswith(cls.__name__)


def test_an_option_that_config_loses_is_found():
    with pytest.raises(AssertionError, match="different loss"):
        check_objective(Forgets(weight=2.0))


def test_options_of_an_instance():
    with raises(OptionError, "options"):
        check_objective(MeanValue(), weight=2.0)
    with raises(OptionError, "weigth"):
        check_objective(MeanValue, weigth=2.0)
