"""Options and columns that a task cannot use."""

import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, OptionError
from scforge.finetuning import get_task

TABLES = {
    "annotation": {"labels_key": "group"},
    "multi_label": {"labels_key": "sets"},
    "regression": {"labels_key": "age"},
    "perturbation": {"perturbation_key": "target", "control": "ctrl"},
    "integration": {"batch_key": "donor"},
}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("annotation", {"labels_key": None}, "requires labels_key"),
        ("annotation", {"classes": ["a", "a"]}, "is not a list of unique names"),
        ("annotation", {"classes": "ab"}, "classes='ab' is not a list"),
        ("annotation", {"class_weights": "even"}, "class_weights='even'"),
        ("annotation", {"class_weights": {"a": -1}}, r"class_weights\['a'\]=-1"),
        ("annotation", {"classes": ["a", "b"], "class_weights": {"c": 1}}, "class_weights contains 'c'"),
        ("annotation", {"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ("annotation", {"head": {"hiden_dim": 3}}, "did you mean 'hidden_dim'"),
        ("annotation", {"head": 3}, "head=3 is not a dict of options"),
        ("annotation", {"head": {"hidden_dim": -1}}, r"head\['hidden_dim'\]=-1"),
        ("annotation", {"head": {"dropout": 2}}, r"head\['dropout'\]=2"),
        ("annotation", {"label_smoting": 0.1}, "did you mean 'label_smoothing'"),
        ("multi_label", {"labels_key": None}, "pass either labels_keys .boolean columns. or labels_key"),
        ("multi_label", {"labels_key": None, "labels_keys": "p"}, "labels_keys='p' is not a list"),
        ("multi_label", {"labels_key": None, "labels_keys": ["p", "p"]}, "is not a list of unique names"),
        (
            "multi_label",
            {"labels_key": None, "labels_keys": ["p", "q"], "classes": ["p"]},
            "does not match labels_keys",
        ),
        ("multi_label", {"separator": " "}, "separator=' '"),
        ("multi_label", {"pos_weight": 3}, "pos_weight=3"),
        ("regression", {"loss_function": "l1"}, "loss_function='l1'"),
        ("regression", {"center": 1.0}, "must be given together"),
        ("regression", {"center": 1.0, "scale": 0.0}, "scale=0.0"),
        ("perturbation", {"heldout": "gene0"}, "heldout='gene0' is not a list of unique names"),
        ("perturbation", {"heldout": ["a"], "heldout_contexts": ["b"]}, "cannot be combined"),
        ("perturbation", {"heldout_contexts": ["b"]}, "requires context_key"),
        ("perturbation", {"delta_loss": "l1"}, "delta_loss='l1'"),
        ("integration", {"alignment": -1.0}, "alignment=-1.0"),
        ("integration", {"n_reference": 3, "batches": ["a", "b"]}, "n_reference=3"),
    ],
)
def test_options_that_cannot_be_used(name, options, message):
    with pytest.raises(OptionError, match=message):
        get_task(name, **{**TABLES[name], **options})


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("annotation", ["x"] * 200, "has only one label"),
        ("annotation", [np.nan] * 200, "has no labels among the training cells"),
        ("annotation", np.linspace(0, 1, 200), r"non-integer numbers \(first: 0.00502513\).*'regression'"),
        ("annotation", [np.inf, 1.0] * 100, "non-integer numbers"),
        (
            "annotation",
            [f"AAAC{i}" for i in range(200)],
            "has a different value for each of the 200 training cells",
        ),
        ("multi_label", ["yes", "no"] * 100, "'column' contains 'yes'; use only True and False"),
        ("multi_label", [0, 2] * 100, "'column' contains '2'"),
        ("multi_label", [1.0] * 200, "contains labels of all or none of the training cells .'column'."),
        ("label sets", [""] * 200, "has no label for any training cell"),
        ("regression", ["old", "young"] * 100, "does not contain numbers .first: 'old'.*'annotation'"),
        ("regression", [True, False] * 100, "does not contain numbers .first: True"),
        ("regression", pd.Categorical(["1", "2"] * 100), "does not contain numbers"),
        ("regression", [1.0, np.inf] * 100, "infinite values"),
        ("regression", [3.0] * 200, r"only one value \(3\)"),
        ("regression", [np.nan] * 200, "no values among the training cells"),
    ],
)
def test_columns_that_cannot_be_learned(cells200, name, values, message):
    cells200.obs["column"] = values
    cells200.obs["other"] = [0, 1] * 100
    given = {"labels_keys": ["column", "other"]} if name == "multi_label" else {"labels_key": "column"}
    task = get_task("multi_label" if name == "label sets" else name, **given)
    with pytest.raises(DataError, match=message):
        task.options_from(lambda key: cells200.obs[key])
