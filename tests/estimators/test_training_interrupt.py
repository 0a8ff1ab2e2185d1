import logging
import os
import signal

import numpy as np
import pytest
from lightning.pytorch.callbacks import Callback

from scforge.errors import TrainingError
from scforge.estimators import Encoder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send")


class CtrlC(Callback):
    def __init__(self, epoch: int, batch: int, times: int = 1) -> None:
        self.when, self.times = (epoch, batch), times

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if (trainer.current_epoch, batch_idx) == self.when:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_keeps_the_best_weights_and_says_so(build, quick, caplog) -> None:
    handler = signal.getsignal(signal.SIGINT)
    model = build()
    with caplog.at_level(logging.INFO, logger="scforge"):
        model.train(**(quick | {"max_epochs": 1000}), callbacks=[CtrlC(2, 1)])
    assert signal.getsignal(signal.SIGINT) is handler
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("scforge")]
    assert message.startswith("Training was stopped by Ctrl-C in epoch 3; the model has the weights of epoch ")
    assert model.is_trained_
    assert model.n_epochs_ == len(model.history["train_loss"]) == 3
    assert not model.module.training
    model.train(**quick)
    assert model.n_epochs_ == 5


def test_a_second_ctrl_c_interrupts_and_keeps_the_best_weights(build, quick, tmp_path) -> None:
    model = build()
    with pytest.raises(KeyboardInterrupt):
        model.train(**(quick | {"max_epochs": 1000}), callbacks=[CtrlC(2, 1, times=2)], checkpoint_dir=tmp_path)
    assert model.is_trained_
    assert model.n_epochs_ == 2
    (best,) = tmp_path.glob("epoch=*")
    saved = Encoder.load(best, model.adata)
    np.testing.assert_allclose(saved.get_latent_representation(), model.get_latent_representation(), atol=1e-6)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    early = build()
    with pytest.raises(KeyboardInterrupt):
        early.train(**quick, callbacks=[CtrlC(0, 0, times=2)])
    assert (early.is_trained_, early.n_epochs_) == (False, 0)


@pytest.mark.parametrize("validation_size", [0.1, 0.0])
def test_a_loss_that_is_not_a_number_leaves_the_model_as_it_was(trained, quick, validation_size: float) -> None:
    model = trained()
    before = model.get_latent_representation(key_added=None)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(TrainingError, match=r"is (nan|inf) in batch \d of epoch 0 \(step \d\); lower the"):
        model.train(**quick, lr=1e30, validation_size=validation_size, gradient_clip_val=0)
    np.testing.assert_array_equal(model.get_latent_representation(key_added=None), before)
    assert signal.getsignal(signal.SIGINT) is handler
    assert not model.module.training
    assert model.n_epochs_ == 2
    model.train(**quick)
    assert np.isfinite(model.get_latent_representation(key_added=None)).all()
