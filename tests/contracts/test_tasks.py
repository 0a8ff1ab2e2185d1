"""What every registered task promises. A new one needs a line in TASKS_HERE: its options for the cells below."""

import json
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

from scforge.errors import OptionError
from scforge.estimators import Encoder
from scforge.finetuning import Task, get_task, list_tasks
from scforge.finetuning.base import TASKS

TASKS_HERE: dict[str, dict[str, Any]] = {
    "adaptation": {},
    "annotation": {"labels_key": "group"},
    "integration": {"batch_key": "donor", "labels_key": "group"},
    "multi_label": {"labels_key": "group"},
    "perturbation": {"perturbation_key": "perturbation", "control": "control"},
    "regression": {"labels_key": "depth"},
}
"""Options that a task cannot do without, on the cells of :func:`cells`."""
TOKENS = {"input_ids", "attention_mask", "values", "labels", "bin_ids"}
QUICK = {"max_epochs": 1, "batch_size": 32, "progress_bar": False, "accelerator": "cpu", "num_threads": 0}
pytestmark = pytest.mark.filterwarnings("ignore::scforge.errors.ScforgeWarning")


@pytest.fixture(scope="module")
def cells(many_adata: ad.AnnData) -> ad.AnnData:
    """160 cells with groups, donors, numbers, and knockouts of six genes."""
    adata = many_adata[:160].copy()
    adata.obs["perturbation"] = np.where(np.arange(160) % 2 == 0, "control", [f"gene{i % 12}" for i in range(160)])
    return adata


@pytest.fixture(scope="module")
def base(cells: ad.AnnData) -> Encoder:
    Encoder.setup_anndata(cells)
    model = Encoder(cells, n_top_genes=80, hidden_dim=16, ffn_dim=16, latent_dim=8)
    model.train(**QUICK)
    return model


@pytest.fixture(scope="module", params=list_tasks())
def tuned(request: pytest.FixtureRequest, base: Encoder, cells: ad.AnnData) -> Encoder:
    """A small model that was fine-tuned for the task; not to be changed."""
    options = TASKS_HERE[request.param]
    return base.finetune({"name": request.param, **options}, cells.copy(), **QUICK)


@pytest.fixture
def batch(tuned: Encoder) -> dict[str, torch.Tensor]:
    """Twelve training cells, as the training gets them: the same each time."""
    split, bound = tuned.fitted.split_of(tuned.open_cells()), tuned.open_cells()
    task = tuned.spec.build_objective()
    task.bind(bound, split.train)
    tuned._bound_task = task
    one, two = (task.prepare(bound.block(split.train[:12]), tuned.tokenizer, epoch=0, seed=0) for _ in range(2))
    assert all(one[name].equal(two[name]) for name in one)
    return one


@pytest.mark.parametrize("name", list_tasks())
def test_options_are_kept(name: str) -> None:
    assert sorted(TASKS_HERE) == list_tasks()
    task = get_task(name, **TASKS_HERE[name])
    assert isinstance(task, Task)
    config = json.loads(json.dumps(task.config()))
    assert set(config) == set(TASKS.get(name).option_names())
    assert get_task(name, **config).config() == task.config()
    assert TASKS_HERE[name].items() <= config.items()
    assert set(type(task).keys) <= set(config)
    assert task.monitor_mode in ("min", "max")


def test_the_batch_has_tokens_and_targets_and_the_head_gives_one_row_a_cell(tuned: Encoder, batch) -> None:
    with torch.no_grad():
        output = tuned.module(**batch)
    n = len(batch["input_ids"])  # tasks may look at a cell more than once, or at fewer cells
    assert output.embeddings.shape == (n, tuned.spec.tuning.n_latent)
    assert output.logits.ndim == 2
    assert len(output.logits) == n
    assert output.logits.isfinite().all()
    tokens = set(tuned.tokenizer(tuned.open_cells().block(np.arange(12))))
    assert not set(tuned._bound_task.targets(np.arange(12))) & TOKENS
    assert {"input_ids", "attention_mask"} <= set(batch)
    assert tokens - set(batch) <= {"values"}  # an objective may take them away


def test_the_loss_reaches_head_and_encoder(tuned: Encoder, batch: dict[str, torch.Tensor]) -> None:
    task, module = tuned._bound_task, tuned.module
    module.train()
    module.zero_grad()
    loss, figures = task.loss(module, batch)
    loss.backward()
    assert loss.isfinite()
    assert all(value.isfinite().all() for value in figures.values())
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    for part in ("encoder.", "head."):
        own = [name for name, p in module.named_parameters() if name.startswith(part) and p.requires_grad]
        assert not own or any(gradients[name].any() for name in own if name in gradients), part
    means = {"loss": np.asarray(loss.item()), **{name: value.detach().numpy() for name, value in figures.items()}}
    assert {"loss", task.monitor} <= set(task.summarize(means))
    module.zero_grad()
    module.eval()


def test_a_saved_model_predicts_the_same(tuned: Encoder, cells: ad.AnnData, tmp_path: Path) -> None:
    options = json.loads(json.dumps(tuned.spec.tuning.to_json()))["task"]
    assert get_task(options.pop("name"), **options).config() == tuned.spec.tuning.task_options
    tuned.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model")
    assert again.spec.tuning == tuned.spec.tuning
    here, there = cells.copy(), cells.copy()
    one, other = tuned.predict(here), again.predict(there)
    if isinstance(one, ad.AnnData):
        one, other = one.to_df(), other.to_df()
    pd.testing.assert_frame_equal(pd.DataFrame(one), pd.DataFrame(other))
    pd.testing.assert_frame_equal(here.obs, there.obs)
    here.write_h5ad(tmp_path / "cells.h5ad")


def test_scores_can_be_saved(tuned: Encoder, tmp_path: Path) -> None:
    if tuned.spec.tuning.task == "adaptation":  # nothing tells how well it is done
        with pytest.raises(OptionError, match="score"):
            tuned.evaluate(baselines=False)
        return
    metrics = tuned.evaluate(baselines=False)
    assert metrics.index[0] == "scforge"
    assert metrics.loc["scforge"].notna().any()
    tuned.adata.write_h5ad(tmp_path / "cells.h5ad")
