"""Tasks from fine-tuning to a loaded model, through the front class."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scforge.errors import ScforgeWarning
from scforge.models import Encoder

QUICK = {"max_epochs": 2, "progress_bar": False, "accelerator": "cpu"}


@pytest.fixture
def base(cells200):
    cells200.obs["age"] = np.where(cells200.obs["group"] == "a", 20.0, 60.0) + np.arange(200) % 7
    cells200.obs["has_a"] = cells200.obs["group"] == "a"
    cells200.obs["rare"] = cells200.obs["kind"] == "rare"
    Encoder.setup_anndata(cells200, labels_key="group")
    model = Encoder(cells200, objective={"name": "joint_embedding", "views": 2, "slices": 16}, latent_dim=8)
    model.train(**QUICK)
    return model


@pytest.mark.parametrize(
    ("task", "options", "written", "figure"),
    [
        ("annotation", {}, ["scforge_group", "scforge_confidence", "scforge_entropy"], "macro_f1"),
        ("regression", {"labels_key": "age"}, ["scforge_age"], "r2"),
        ("multi_label", {"labels_keys": ["has_a", "rare"]}, ["scforge_has_a", "scforge_rare"], "auroc"),
    ],
)
def test_a_task_from_end_to_end(base, cells200, tmp_path, task, options, written, figure):
    tuned = base.finetune(task, **options, **QUICK)
    table = tuned.predict(cells200)
    assert set(written) <= {*cells200.obs}
    metrics = tuned.evaluate()
    assert metrics.index[0] == "scforge"
    assert {"frozen_embedding"} < {*metrics.index}
    assert metrics[figure].iloc[0] > 0.5
    tuned.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model", cells200)
    pd.testing.assert_frame_equal(again.predict(cells200), table)
    cells200.write_h5ad(tmp_path / "cells.h5ad")


def test_a_class_of_held_out_donors_alone(base, cells200):
    cells200.obs["type"] = np.where(cells200.obs["donor"] == "d0", "new", np.asarray(cells200.obs["group"], dtype=str))
    part = cells200.obs["donor"].astype(str).map({"d0": "test", "d1": "test", "d2": "validation"}).fillna("train")
    cells200.obs["part"] = part
    with pytest.warns(ScforgeWarning, match="labels_key='type': no training cell has 'new', which 31 held-out cells"):
        tuned = base.finetune("annotation", labels_key="type", split_key="part", **QUICK)
    metrics = tuned.evaluate()
    n_new, n_test = (cells200.obs["type"] == "new").sum(), (part == "test").sum()
    assert (metrics["n_unknown_label"] == n_new).all()
    assert (metrics["n_scored"] == n_test - n_new).all()
    assert metrics.loc["scforge", "accuracy"] > 0.9
    # Each annotator has a confidence of its own.
    second = base.finetune("annotation", labels_key="kind", **QUICK)
    expected = {key: one.predict(cells200) for key, one in (("type", tuned), ("kind", second))}
    for key, table in expected.items():
        for name in ("confidence", "entropy"):
            assert (cells200.obs[f"scforge_{key}_{name}"] == table[name]).all()
    assert (cells200.obs["scforge_confidence"] == expected["kind"]["confidence"]).all()  # the latest
