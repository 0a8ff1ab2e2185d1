from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.config import load_config, recipe_path
from scforge.data import convert
from scforge.errors import ConfigError, MissingFileError, OptionError
from scforge.estimators import Encoder
from scforge.testing import raises
from scforge.workflows import evaluate_to, finetune_from_config, predict_to, train_from_config
from scforge.workflows.finetune import FinetuningResult, finetuning_report

TEXT = """
data: {paths: [cells.h5ad]}
finetune:
  base_model: base
  task: annotation
  labels_key: group
training: {max_epochs: 2, batch_size: 32, accelerator: cpu}
output: {checkpoint_dir: ck}
"""


@pytest.fixture(scope="module")
def folder(many_adata: ad.AnnData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finetune")
    some, other = many_adata[:160].copy(), many_adata[160:220].copy()
    for adata in (some, other):
        n = len(adata)
        adata.obs["batch"] = adata.obs["donor"].astype(str)
        adata.obs["perturbation"] = np.where(np.arange(n) % 2 == 0, "control", [f"gene{i % 5}" for i in range(n)])
    some.write_h5ad(path / "cells.h5ad")
    other.write_h5ad(path / "others.h5ad")
    Encoder.setup_anndata(some)
    model = Encoder(some, n_top_genes=60, hidden_dim=16, ffn_dim=16, latent_dim=8)
    model.train(max_epochs=1, batch_size=32, progress_bar=False, accelerator="cpu")
    model.save(path / "base")
    return path


@pytest.fixture
def place(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("cells.h5ad", "others.h5ad", "base"):
        Path(name).symlink_to(folder / name)
    Path("config.yaml").write_text(TEXT)
    return tmp_path


@pytest.fixture
def run(place: Path) -> Callable[..., FinetuningResult]:
    return lambda *keys, **options: finetune_from_config(
        load_config("config.yaml", keys), progress_bar=False, **options
    )


@pytest.fixture(scope="module")
def tuned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuned") / "ck"
    (path.parent / "config.yaml").write_text(TEXT)
    changes = [f"data.paths={folder / 'cells.h5ad'}", f"finetune.base_model={folder / 'base'}"]
    config = load_config(path.parent / "config.yaml", [*changes, f"output.checkpoint_dir={path}"])
    finetune_from_config(config, progress_bar=False)
    return path / "final"


def test_what_is_written_and_told(run: Callable[..., FinetuningResult]) -> None:
    result = run("finetune.evaluate=true", "finetune.test_size=0.2", "output.embedding=out.h5ad")
    metrics = result.metrics
    assert metrics.index[0] == "scforge"
    assert len(metrics) > 1
    pd.testing.assert_frame_equal(pd.read_csv("ck/evaluation.csv", index_col=0), metrics, check_dtype=False)
    assert ad.read_h5ad("out.h5ad").obsm["X_scforge"].shape == (160, 8)
    lines = finetuning_report(result, load_config("config.yaml"))
    assert "Cells:       112 to train, 16 to validate, 32 to test" in lines
    assert load_config("ck/config.yaml").finetune.test_size == 0.2
    again = Encoder.load("ck/final", ad.read_h5ad("cells.h5ad"))
    pd.testing.assert_frame_equal(again.predict(), result.model.predict())
    pd.testing.assert_frame_equal(again.evaluate(base=Encoder.load("base")), metrics)


def test_going_on(run: Callable[..., FinetuningResult]) -> None:
    constant, longer = "training.scheduler.name=constant", "training.max_epochs=3"
    whole = run("output.checkpoint_dir=whole", longer, constant).model.module.state_dict()
    run(constant)
    result = run(longer, constant, resume="auto")
    assert result.model.n_epochs_ == 3
    assert all(value.equal(whole[name]) for name, value in result.model.module.state_dict().items())
    with raises(OptionError, "checkpoint_dir"):
        run()
    run(overwrite=True)
    with pytest.raises(ConfigError, match=r"config\.yaml, line 3: .*run it with scforge finetune --config"):
        train_from_config(load_config("config.yaml"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::scforge.errors.ScforgeWarning")
@pytest.mark.parametrize("size", ["", "_cluster"])
@pytest.mark.parametrize("task", ["annotation", "integration", "perturbation"])
def test_each_recipe_fine_tunes(place: Path, task: str, size: str) -> None:
    recipe = recipe_path(task + size)
    changes = ["training.max_epochs=1", "training.accelerator=cpu", "training.devices=1", "training.strategy=auto"]
    changes += ["training.precision=32-true", "finetune.base_model=base", "data.paths=cells.h5ad"]
    columns = {"labels_key": "group", "split_by": "donor", "batch_key": "batch", "context_key": "batch"}
    written = load_config(recipe).finetune.user_set()
    changes += [f"finetune.{key}={column}" for key, column in columns.items() if key in written]
    if size:
        convert("cells.h5ad", "store.zarr", progress=False)
        changes += ["data.paths=store.zarr", "data.max_tokens_per_batch=", "training.batch_size=64"]
    config = load_config(recipe, changes)
    result = finetune_from_config(config, progress_bar=False)
    assert result.model.spec.tuning.task == config.finetune.task
    assert (result.metrics is not None) == bool(config.finetune.evaluate)
    assert Encoder.load(Path(config.output.checkpoint_dir) / "final").is_trained_


def test_columns_of_perturbations_are_found(run: Callable[..., FinetuningResult], caplog) -> None:
    caplog.set_level("INFO", logger="scforge")
    Path("config.yaml").write_text(TEXT.replace("annotation", "perturbation").replace("  labels_key: group\n", ""))
    options = run().model.spec.tuning.task_options
    assert (options["perturbation_key"], options["control"]) == ("perturbation", "control")
    assert "Using finetune.perturbation_key='perturbation' and finetune.control='control'" in caplog.text
    with pytest.raises(OptionError, match=r"requires control, but the cells contain none of 'control', .*\.control"):
        run("finetune.perturbation_key=group", "output.checkpoint_dir=other")


MISTAKES = [
    ("finetune.base_model=none", MissingFileError, "base_model='none' .--base-model. does not exist; "),
    ("finetune.base_model=hub://geneformer", MissingFileError, "is a URL; pass the folder of a model"),
    ("finetune.base_model=.", MissingFileError, "contains no model; pass the folder of a model"),
    ("finetune.task=anotation", OptionError, "task='anotation' is not known; did you mean 'annotation'"),
    ("finetune.label_smooting=0.1", OptionError, "is unknown to 'annotation'; did you mean 'label_smoothing'"),
    ("finetune.label_smoothing=2", OptionError, "label_smoothing=2 "),
    ("finetune.batch_key=donor", OptionError, "task option 'batch_key' is unknown to 'annotation'"),
    ("finetune.evaluate=perturbbench", ConfigError, "'perturbbench' is not an evaluation of the task 'annotation'"),
    (
        "finetune={evaluate: true, test_size: 0}",
        ConfigError,
        "finetune.evaluate=True requires test cells, but test_size=0",
    ),
    ("finetune=", ConfigError, "the configuration has no 'finetune' section; add "),
]


@pytest.mark.parametrize(("override", "error", "message"), MISTAKES, ids=[override for override, *_ in MISTAKES])
def test_mistakes(run: Callable[..., FinetuningResult], override: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        run(override)
    assert "\n" not in str(caught.value)
    assert not Path("ck/final").exists()


def test_a_store(run: Callable[..., FinetuningResult], store: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = run(f"data.paths={store}", "finetune.evaluate=true", "data.num_threads=0")
    assert result.metrics.loc["scforge", "accuracy"] > 0.5
    caplog.clear()
    with caplog.at_level("INFO", "scforge"):
        assert predict_to("ck/final", store, "labels.csv") == "700 cells"
    assert [message.split()[0] for message in caplog.messages] == ["Opened", "The"], "once, and how many are known"
    table = pd.read_csv("labels.csv", index_col=0)
    assert table.index.str.startswith("cell").all()
    assert list(table) == ["label", "confidence", "entropy", "scforge_split"]
    with raises(OptionError, "output"):
        predict_to("ck/final", store, "labels.h5ad")
    # The cells that were held out, also where the store is at another place.
    np.testing.assert_allclose(evaluate_to("ck/final", store, baselines=False), result.metrics.iloc[:1], rtol=1e-5)


def test_predictions_in_files(place: Path, tuned: Path) -> None:
    assert predict_to(tuned, "cells.h5ad", "labels.csv") == "160 cells"
    table = pd.read_csv("labels.csv", index_col="cell")
    assert predict_to(tuned, "cells.h5ad", "out.h5ad", threshold=1.0, key_added="mine") == "160 cells"
    adata = ad.read_h5ad("out.h5ad")
    assert (adata.obs["mine"] == "unassigned").all()
    np.testing.assert_allclose(adata.obs["mine_confidence"], table["confidence"], rtol=1e-5)
    assert list(adata.obs_names) == list(table.index)
    for model, output, options, message in (
        (tuned, "out.txt", {}, "output='out.txt' must end with .csv or .h5ad"),
        (tuned, "cells.h5ad", {}, "is the input file"),
        (tuned, "new.csv", {"thresold": 1}, "'thresold' is unknown to 'annotation'; did you mean 'threshold'"),
        (tuned, "new.csv", {"device": "cpuu"}, "device='cpuu' cannot be used: "),
        (tuned.parent, "new.csv", {}, r"is the folder of a training run; did you mean '.*final'"),
        ("base", "new.csv", {}, r"model='base' \(--model\) was not fine-tuned, so it has no task"),
    ):
        with pytest.raises((OptionError, MissingFileError), match=message):
            predict_to(model, "cells.h5ad", output, **options)


@pytest.mark.filterwarnings("ignore:the model before fine-tuning is not available")
def test_evaluations_in_files(place: Path, tuned: Path) -> None:
    own = evaluate_to(tuned, "cells.h5ad", "own.csv", base_model="base")
    assert own.loc["scforge", "n_scored"] == 16
    assert "frozen_embedding" in own.index
    pd.testing.assert_frame_equal(pd.read_csv("own.csv", index_col=0), own, check_dtype=False)
    differences = pd.read_csv("own_differences.csv")
    assert set(differences["method"]) == set(own.index) - {"scforge"}
    assert set(differences["verdict"].dropna()) <= {"better", "worse", "tie"}
    evaluate_to(tuned, "cells.h5ad", "own.csv", base_model="base", intervals=False, overwrite=True)
    assert not Path("own_differences.csv").exists()
    others = evaluate_to(tuned, "others.h5ad", trained_on="cells.h5ad")
    assert others.loc["scforge", "n_scored"] == 60
    assert len(others) > 1
    assert list(evaluate_to(tuned, "others.h5ad", baselines=False).index) == ["scforge"]
    with raises(OptionError, "trained_on"):
        evaluate_to(tuned, "cells.h5ad", trained_on="others.h5ad")
    with raises(OptionError, "output"):
        evaluate_to(tuned, "cells.h5ad", ".")
    with raises(OptionError, "groups_key"):
        evaluate_to(tuned, "cells.h5ad", groups_key="group")
    with pytest.raises(OptionError, match=r"output='own\.csv' exists"):
        evaluate_to(tuned, "cells.h5ad", "own.csv")
