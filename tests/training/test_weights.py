"""Moving averages of weights."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from scforge.errors import OptionError
from scforge.training.weights import MovingAverage


class Spy(Callback):
    def __init__(self) -> None:
        self.after, self.validated = [], []

    @staticmethod
    def weights(plan):
        return {name: value.detach().clone() for name, value in plan.module.state_dict().items()}

    def on_train_start(self, trainer, plan):
        self.first = self.weights(plan)

    def on_train_batch_end(self, trainer, plan, *args):
        self.after.append(self.weights(plan))

    def on_validation_batch_end(self, trainer, plan, *args):
        self.validated.append(self.weights(plan))


def test_the_average_is_validated_and_kept_and_the_weights_are_trained(setup):
    spy = Spy()
    result = setup.fit(max_epochs=1, ema_decay=0.9, early_stopping=False, callbacks=[spy])
    average = spy.first
    for step, weights in enumerate(spy.after, 1):
        keep = min(0.9, (1 + step) / (10 + step))
        average = {name: keep * average[name] + (1 - keep) * value for name, value in weights.items()}
    kept = setup.module.state_dict()
    for name, value in average.items():
        torch.testing.assert_close(kept[name], value)
        torch.testing.assert_close(spy.validated[0][name], value)
    assert any(not torch.allclose(kept[name], value) for name, value in spy.after[-1].items())
    assert result.best_epoch == 0


@pytest.mark.parametrize("decay", [0, 1, "fast"])
def test_bad_decays(decay):
    with pytest.raises(OptionError, match="ema_decay="):
        MovingAverage(decay)
