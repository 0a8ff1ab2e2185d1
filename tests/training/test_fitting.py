import os
import re
import signal

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from scforge.errors import OptionError, ScforgeWarning
from scforge.testing import raises
from scforge.training.fitting import SaveBest, default_max_epochs


class Spy(Callback):
    """Takes down what happens, and calls `act` with the step after each step."""

    def __init__(self, act=lambda step, module: None):
        self.act = act
        self.modes, self.lrs, self.states, self.losses, self.steps = [], [], [], [], 0

    def on_train_batch_start(self, trainer, plan, batch, index):
        self.modes.append(all(part.training for part in plan.modules()))
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, plan, *args):
        self.steps += 1
        self.act(self.steps, plan.module)

    def on_train_epoch_end(self, trainer, plan):
        self.states.append({name: value.clone() for name, value in plan.module.state_dict().items()})
        self.losses.append(float(trainer.callback_metrics["validation_loss"]))


def same(one, two) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(autouse=True)
def ctrl_c_is_handed_back():
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("fixture", ["setup", "masked_setup"])
def test_the_loss_falls_and_is_logged(request, fixture, capfd, recwarn):
    result = request.getfixturevalue(fixture).fit(max_epochs=12, early_stopping=False)
    history = result.history
    assert {"train_loss", "validation_loss", "seconds"} <= set(history)
    assert all(len(values) == 12 for values in history.values())
    assert np.mean(history["train_loss"][-3:]) < history["train_loss"][0]
    assert min(history["validation_loss"]) < history["validation_loss"][0]
    assert history["seconds"] == sorted(history["seconds"])
    assert result.n_epochs == 12
    assert not result.stopped
    assert result.device == torch.device("cpu")
    # Nothing is said without a bar.
    assert "".join(capfd.readouterr()) == ""
    assert not recwarn.list
    for stage in ("train", "validation") if fixture == "setup" else ():
        parts = (1 - 0.05) * history[f"{stage}_agreement"][0] + 0.05 * history[f"{stage}_sigreg"][0]
        assert history[f"{stage}_loss"][0] == pytest.approx(parts, rel=1e-5)
        assert history[f"{stage}_spread"][0] > 0


def test_logged_loss_is_the_mean_over_cells(masked_setup):
    setup = masked_setup
    # 50 training cells in batches of 20, 20 and 10; nothing moves at a rate of 0.
    history = setup.fit(setup.plan(lr=1e-30, weight_decay=0.0), setup.data(batch_size=20), max_epochs=1).history
    loader = setup.data(batch_size=20).val_dataloader()
    with torch.no_grad():
        losses = [float(setup.objective.loss(setup.module.eval(), batch)[0]) for batch in loader]
    assert history["validation_loss"] == pytest.approx(losses, rel=1e-4)


def test_the_best_weights_are_kept(setup):
    def spoil(step, module):
        if step == 28:  # in the sixth epoch of five steps
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.normal_(std=3.0)

    def save(name, n_epochs, weights):
        assert n_epochs == int(name.removeprefix("epoch=")) + 1
        assert name not in folders
        folders[name] = weights

    folders, spy = {}, Spy(spoil)
    callbacks = [spy, SaveBest(save, folders.pop, top_k=3, monitor="validation_loss")]
    result = setup.fit(setup.plan(schedule="constant"), max_epochs=8, early_stopping=False, callbacks=callbacks)
    assert result.best_epoch == int(np.argmin(spy.losses)) == int(np.argmin(result.history["validation_loss"]))
    assert result.best_epoch < 5
    assert same(setup.module.state_dict(), spy.states[result.best_epoch])
    assert not same(setup.module.state_dict(), spy.states[-1])
    assert not setup.module.training
    best = np.argsort(spy.losses, kind="stable")[:3]
    assert [name for _, name in callbacks[1].kept] == [f"epoch={epoch:02d}" for epoch in best]
    assert set(folders) == {f"epoch={epoch:02d}" for epoch in best}
    assert all(same(folders[f"epoch={epoch:02d}"], spy.states[epoch]) for epoch in best)


def test_few_cells_are_told(setup):
    with pytest.warns(
        ScforgeWarning,
        match="The model is trained on 3 cells, which are too few to select the best epoch; pass at least 50",
    ):
        setup.fit(data=setup.data(n_validation=57), max_epochs=1)
    # Without validation cells the loss of training decides.
    result = setup.fit(data=setup.data(n_validation=0), max_epochs=3)
    assert "validation_loss" not in result.history
    assert result.best_epoch == int(np.argmin(result.history["train_loss"]))


def test_early_stopping(setup):
    options = {"plan": setup.plan(lr=0.3, schedule="constant"), "max_epochs": 200}
    result = setup.fit(**options, early_stopping_patience=3)
    assert result.n_epochs < 100
    assert result.n_epochs - 1 - result.best_epoch == 3
    assert not result.stopped


def test_the_schedule_spans_the_training(setup):
    plan = setup.plan(schedule="linear_warmup", lr=1.0)
    spy = Spy()
    setup.fit(plan, max_epochs=None, max_steps=7, callbacks=[spy])
    assert spy.steps == 7
    # A plan can be fitted again.
    spy = Spy()
    setup.fit(plan, max_epochs=4, early_stopping=False, callbacks=[spy])
    assert all(spy.modes)
    assert len(spy.lrs) == 20  # 50 cells in batches of 10
    assert max(spy.lrs) == spy.lrs[2] == 1.0
    assert spy.lrs[-1] == pytest.approx(1 / 18)
    defaults = type(setup.objective).defaults
    most = defaults.max_epochs
    assert [default_max_epochs(defaults, n) for n in (2500, 10, 10**8)] == [most, 10 * most, 3]


@pytest.mark.parametrize("step", [3, 8])
def test_ctrl_c_stops_after_the_step_and_keeps_the_weights(setup, caplog, step):
    start = {name: value.clone() for name, value in setup.module.state_dict().items()}
    spy = Spy(lambda n, _: os.kill(os.getpid(), signal.SIGINT) if n == step else None)
    result = setup.fit(max_epochs=50, callbacks=[spy])
    assert result.stopped
    assert not result.interrupted
    assert spy.steps == step
    assert not same(setup.module.state_dict(), start)
    assert result.n_epochs == -(-step // 5), "the epoch that was cut short has its figures and is not repeated"
    assert f"stopped by Ctrl-C in epoch {result.n_epochs}" in caplog.text


def test_a_line_an_epoch_in_a_log_and_a_bar_in_a_notebook(setup, capsys, caplog, monkeypatch):
    with caplog.at_level("INFO", logger="scforge"):
        setup.fit(max_epochs=2, progress_bar=True)
    assert capsys.readouterr().err == ""
    first, last = caplog.messages
    assert re.fullmatch(r"Epoch 1/2: validation_loss \S+, train_loss \S+, about 0:00:\d\d left\.", first)
    assert last.startswith("Epoch 2/2: ")
    with monkeypatch.context() as patch:
        patch.setattr("scforge.training.monitoring.in_notebook", lambda: True)
        setup.fit(max_epochs=2, progress_bar=True)
    assert "Epoch 2/2" in capsys.readouterr().err
    # Where nobody set up logging, lines are shown.
    monkeypatch.setattr("scforge._progress.logger.hasHandlers", lambda: False)
    for level, expected in ((0, ["Epoch 1/2", "Epoch 2/2"]), (30, [])):
        monkeypatch.setattr("scforge._progress.logger.level", level)
        setup.fit(max_epochs=2, progress_bar=True)
        assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == expected


def test_further_devices_after_a_training_on_one(setup, monkeypatch):
    setup.fit(max_epochs=1)
    with raises(OptionError, "devices"):
        setup.fit(max_epochs=1, devices=2)
    # Where Slurm starts all processes, Lightning tells: ours would be wrong.
    numbers = {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
    for name, value in {**numbers, "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "train"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="--ntasks-per-node=4. does not match"):
        setup.fit(max_epochs=1, devices=2, accelerator="cpu")


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"callbacks": [object()]}, "callbacks"),
        (
            {"logger": "wandb"},
            "logger",
        ),
        ({"logger": [3]}, "logger"),
        ({"early_stopping": 5}, "early_stopping"),
    ],
)
def test_bad_options(setup, options, argument):
    with raises(OptionError, argument):
        setup.fit(**{"max_epochs": 1, **options})


@pytest.mark.slow
def test_epochs_of_batches_by_tokens_are_whole(masked_setup) -> None:
    """Such epochs have different numbers of batches, which a schedule of one cycle has to bear."""
    lengths = masked_setup.tokenizer.lengths(masked_setup.cells.n_expressed)
    data = masked_setup.data(batch_size=None, max_tokens_per_batch=int(3.3 * lengths.mean()), window_cells=6)
    seen, validated = [], []

    class Count(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            seen.append((trainer.current_epoch, len(batch["input_ids"])))

        def on_validation_epoch_end(self, trainer, pl_module) -> None:
            validated.append(sum(n_cells for _, n_cells in seen))

    for optimizer in ("adamw", "muon"):
        plan = masked_setup.plan(schedule="one_cycle", optimizer=optimizer)
        masked_setup.fit(plan, data, max_epochs=6, early_stopping=False, callbacks=[Count()])
    assert len({sum(epoch == number for epoch, _ in seen) for number in range(6)}) > 1
    assert validated == [50 * number for number in range(1, 13)]


def test_the_average_is_validated_and_kept_and_the_weights_are_trained(setup):
    def weights():
        return {name: value.detach().clone() for name, value in setup.module.state_dict().items()}

    class Validated(Callback):
        def on_validation_batch_end(self, trainer, plan, *args):
            validated.append(weights())

    average, after, validated = weights(), [], []
    callbacks = [Spy(lambda step, module: after.append(weights())), Validated()]
    result = setup.fit(max_epochs=1, ema_decay=0.9, early_stopping=False, callbacks=callbacks)
    for step, trained in enumerate(after, 1):
        keep = min(0.9, (1 + step) / (10 + step))
        average = {name: keep * average[name] + (1 - keep) * value for name, value in trained.items()}
    kept = setup.module.state_dict()
    for name, value in average.items():
        torch.testing.assert_close(kept[name], value)
        torch.testing.assert_close(validated[0][name], value)
    assert any(not torch.allclose(kept[name], value) for name, value in after[-1].items())
    assert result.best_epoch == 0
    for decay in (0, 1, "fast"):
        with raises(OptionError, "ema_decay"):
            setup.fit(ema_decay=decay)
