"""Training from a configuration: every key changes what is built, every recipe trains, every checkpoint loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

from scforge.config import list_recipes, load_config, recipe_path
from scforge.errors import ConfigError, MissingFileError, OptionError, ScforgeWarning
from scforge.estimators import Encoder, train_from_config
from scforge.models.registry import MODELS

SMALL = """
data:
  paths: [cells.h5ad]
model:
  hidden_dim: 8
  ffn_dim: 8
training:
  max_epochs: 1
  batch_size: 16
  accelerator: cpu
"""
TRANSFORMER = """
data:
  paths: [cells.h5ad]
model:
  architecture: transformer_encoder
  hidden_dim: 8
  num_layers: 1
  num_heads: 2
training:
  max_epochs: 1
  batch_size: 16
  accelerator: cpu
"""

# Those that fine-tune are run in test_finetuning_from_config.py.
PLAIN = [name for name in list_recipes() if not name.endswith("_cluster")]
PLAIN = [name for name in PLAIN if load_config(recipe_path(name)).finetune is None]

CUSTOM_MODEL = Path(__file__).parents[1] / "config" / "custom_model.yaml"
PROPOSAL = CUSTOM_MODEL.with_name("proposal.yaml")
TUTORIAL_MODEL = Path(__file__).parents[1] / "seeds" / "examples_custom_model" / "gene_pooling.py"


@pytest.fixture
def run(tiny_adata: ad.AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Encoder]:
    """Return a function that trains from the text of a configuration, in a folder with cells.h5ad."""
    monkeypatch.chdir(tmp_path)
    tiny_adata.layers["counts"] = tiny_adata.X.copy()
    tiny_adata.write_h5ad("cells.h5ad")

    def run(text: str, *overrides: str) -> Encoder:
        Path("config.yaml").write_text(text)
        return train_from_config(load_config("config.yaml", overrides), progress_bar=False)

    return run


# test_config_keys.py shows that each key arrives; each of these is read to the very end, for it changes the weights.
WEIGHTS = [
    "training.lr=0.01",
    "training.accumulate_grad_batches=2",
    "training.gradient_clip_val=0.001",
    "training.ema_decay=0.5",
    "training.precision=bf16-true",
    "training.optimizer.name=muon",
    "training.optimizer.weight_decay=0.9",
    "training.scheduler.warmup_steps=1",
    "tokenizer.use_medians=false",
    "tokenizer.masking.mask_token_prob=0.1",
    "objective.token_prior=false",
]


@pytest.mark.slow
@pytest.mark.parametrize("override", WEIGHTS)
def test_keys_change_the_weights(run, override: str) -> None:
    before, after = run(TRANSFORMER).module.state_dict(), run(TRANSFORMER, override).module.state_dict()
    assert all(value.dtype == torch.float32 for value in after.values() if value.is_floating_point())
    assert set(before) != set(after) or any(
        before[name].shape != after[name].shape or not before[name].equal(after[name]) for name in before
    )


def models(folder: str) -> list[str]:
    """Return the names of the models in a folder of checkpoints, which also holds states to go on with."""
    return sorted(path.parent.name for path in Path(folder).glob("[!s]*/config.json"))


def test_the_same_file_gives_the_same_weights(run) -> None:
    before, after = run(TRANSFORMER).module.state_dict(), run(TRANSFORMER).module.state_dict()
    assert all(before[name].equal(after[name]) for name in before)


def test_keys_of_the_parts(run) -> None:
    model = run(
        SMALL,
        "tokenizer.append_cls=true",
        "objective.name=joint_embedding",
        "objective.views=2",
        "objective.weight=0.1",
        "model.latent_dim=6",
    )
    assert model.tokenizer.append_cls is True
    assert (model._spec.objective_options["views"], model._spec.objective_options["weight"]) == (2, 0.1)
    assert model.get_latent_representation(key_added=None).shape == (60, 6)
    assert run(SMALL, "model.pooling=mean").objective == "masked_gene_prediction"
    assert run(SMALL, "tokenizer.masking.mask_ratio=0.3").objective == "masked_gene_prediction"
    assert run(SMALL, "tokenizer.masking.mask_ratio=0.3")._spec.objective_options["mask_ratio"] == 0.3
    assert run(SMALL, "model.mask_ratio=0.4")._spec.objective_options["mask_ratio"] == 0.4


def test_max_steps_that_cut_an_epoch_short(run) -> None:
    """Training on 54 cells takes 4 steps an epoch; what the last steps learned counts too."""
    keep = ["output.checkpoint_dir=ck", "output.save_top_k=-1"]
    model = run(SMALL, "training.max_steps=6", "training.max_epochs=9", *keep)
    assert len(model.history["validation_loss"]) == 2
    assert model.n_epochs_ == 2
    assert models("ck") == ["epoch=00", "epoch=01", "final"]


@pytest.mark.slow
@pytest.mark.parametrize("save_top_k", [1, 2, -1, 0])
def test_checkpoints(run, save_top_k: int) -> None:
    model = run(SMALL, "training.max_epochs=4", "output.checkpoint_dir=ck", f"output.save_top_k={save_top_k}")
    names = models("ck")
    kept = 4 if save_top_k < 0 else save_top_k
    assert len(names) == kept + 1
    assert "final" in names
    embedding = model.get_latent_representation()
    np.testing.assert_allclose(Encoder.load("ck/final", model.adata).get_latent_representation(), embedding, atol=1e-6)
    losses = model.history["validation_loss"]["validation_loss"]
    best = sorted(f"epoch={epoch:02d}" for epoch in losses.sort_values().index[:kept])
    assert names[:-1] == best
    for name in names[:-1]:
        saved = Encoder.load(Path("ck") / name)
        assert saved.is_trained_
        assert saved.n_epochs_ == int(name[-2:]) + 1
        assert np.isfinite(saved.get_latent_representation(model.adata, key_added=None)).all()
    if kept:
        saved = Encoder.load(f"ck/epoch={losses.argmin():02d}", model.adata)
        np.testing.assert_allclose(saved.get_latent_representation(), embedding, atol=1e-6)


def test_log_and_embedding(run) -> None:
    model = run(SMALL, "training.max_epochs=3", "output.log_dir=logs", "output.embedding=out/cells.h5ad")
    (log,) = Path("logs").rglob("metrics.csv")
    table = pd.read_csv(log)
    assert table["validation_loss"].notna().sum() == 3
    np.testing.assert_allclose(table["validation_loss"].dropna(), model.history["validation_loss"]["validation_loss"])
    written = ad.read_h5ad("out/cells.h5ad")
    np.testing.assert_array_equal(written.obsm["X_scforge"], model.get_latent_representation(key_added=None))
    assert written.uns["scforge"]["X_scforge"]["vocab_hash"] == model.vocab.hash


def test_benchmarks_run_while_training(run) -> None:
    keys = ["eval.benchmarks=[label_prediction: {name: groups}]", "data.labels_key=group", "eval.every_n_epochs=2"]
    history = run(SMALL, "training.max_epochs=3", "training.validation_size=0.4", *keys).history
    figures = [name for name in history if name.startswith("groups_")]
    assert figures
    assert history[figures[0]][figures[0]].notna().tolist() == [False, True, True]


def test_going_on_with_a_run_and_replacing_it(run) -> None:
    keep = ["output.checkpoint_dir=ck", "output.log_dir=logs"]
    run(SMALL, *keep)
    config = load_config("config.yaml", [*keep, "training.max_epochs=2"])
    with pytest.raises(OptionError, match=r"checkpoint_dir='ck'"):
        train_from_config(config, progress_bar=False)
    again = train_from_config(config, progress_bar=False, overwrite=True)
    assert again.n_epochs_ == 2
    with pytest.raises(ConfigError, match=r"resume='auto' looks into output\.checkpoint_dir, which is not set"):
        train_from_config(load_config("config.yaml"), resume="auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"config.yaml, line \d+: checkpoint_dir='ck' holds a training already"),
        ({"resume": "auto", "overwrite": True}, "--resume and --overwrite"),
        ({"resume": "ck/step=9"}, "resume='ck/step=9' does not exist"),
        ({"resume": "ck"}, r"resume='ck' holds no state .*; did you mean --resume auto, or ck/step=00000004\?$"),
        ({"resume": "ck/final"}, "resume='ck/final' holds no state .*; give one such as"),
        ({"resume": "other/step=1"}, "checkpoint_dir='ck' holds a training already"),
    ],
)
def test_a_folder_that_does_not_fit_is_told_before_the_cells_are_read(run, options, message, monkeypatch) -> None:
    for name in ("ck/step=00000004/training", "ck/final", "other/step=1/training"):
        Path(name).mkdir(parents=True)
    monkeypatch.setattr("scforge.estimators.from_config.open_source", lambda data: pytest.fail("cells were read"))
    Path("config.yaml").write_text(f"{SMALL}output:\n  checkpoint_dir: ck\n")
    with pytest.raises((OptionError, MissingFileError), match=message):
        train_from_config(load_config("config.yaml"), progress_bar=False, **options)


def test_the_configuration_is_kept_and_an_embedding_is_replaced_if_told(run) -> None:
    keep = ["output.checkpoint_dir=ck", "output.embedding=out.h5ad", "training.max_steps=2"]
    before = run(SMALL, *keep)
    kept = load_config("ck/config.yaml")
    assert kept == load_config("config.yaml", keep)
    with pytest.raises(ConfigError, match=r"output\.embedding='out\.h5ad' exists"):
        run(SMALL, keep[1])
    after = train_from_config(kept, progress_bar=False, overwrite=True)
    for name, value in before.module.state_dict().items():
        assert value.equal(after.module.state_dict()[name])


def test_only_the_first_process_writes(run, monkeypatch) -> None:
    monkeypatch.setattr("lightning.fabric.utilities.rank_zero.rank_zero_only.rank", 1)
    monkeypatch.setattr(Encoder, "train", lambda *args, **kwargs: None)
    run(SMALL, "output.checkpoint_dir=ck", "output.embedding=out.h5ad")
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["cells.h5ad", "config.yaml"]


@pytest.mark.parametrize(("name", "value"), [("resume", "auto"), ("overwrite", True)])
def test_how_to_begin_reaches_the_training(run, name: str, value, monkeypatch) -> None:
    seen: dict = {}
    monkeypatch.setattr(Encoder, "train", lambda self, **options: seen.update(options))
    monkeypatch.setattr(Encoder, "save", lambda *args, **kwargs: None)
    run(SMALL)
    assert name not in seen
    train_from_config(load_config("config.yaml", ["output.checkpoint_dir=ck"]), **{name: value})
    assert seen[name] == value


def test_nothing_is_written_unasked(run) -> None:
    run(SMALL)
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["cells.h5ad", "config.yaml"]


@pytest.mark.filterwarnings("ignore:.*of the 20120 genes of the vocabulary")
def test_the_tutorial_on_custom_models(run, pbmc: ad.AnnData) -> None:
    pbmc[:60].copy().write_h5ad("pbmc.h5ad")
    few = ["training.max_epochs=2", "training.accelerator=cpu", "model.hidden_dim=8", "model.num_layers=1"]
    model = run(
        CUSTOM_MODEL.read_text(encoding="utf-8").replace("/path/to/dataset.h5ad", "pbmc.h5ad"),
        *few,
        "data.max_genes=64",
        "model.max_seq_len=64",
    )
    assert (model._spec.architecture, model._spec.tokenizer, model.objective) == (
        "gene_pooling",
        "rank_value",
        "masked_gene_prediction",
    )
    assert model.vocab.n_genes == 20_120
    assert model.module.pooling == "mean"
    assert models("checkpoints/gene_pooling") == ["epoch=00", "epoch=01", "final"]
    assert list(Path("logs/gene_pooling").rglob("metrics.csv"))
    again = Encoder.load("checkpoints/gene_pooling/final", model.adata)
    np.testing.assert_allclose(again.get_latent_representation(), model.get_latent_representation(), atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*of the 20120 genes of the vocabulary")
def test_the_model_of_the_tutorial_with_its_configuration(run, pbmc: ad.AnnData, monkeypatch) -> None:
    """The class of the tutorial takes no pooling, which its configuration sets."""
    text = TUTORIAL_MODEL.read_text(encoding="utf-8").replace('@register_model("gene_pooling")', "")
    names: dict[str, Any] = {"__name__": "my_pool"}
    exec(compile(text, str(TUTORIAL_MODEL), "exec"), names)
    monkeypatch.setattr(MODELS, "_entries", {**MODELS._entries, "my_pool": names["GenePoolingModel"]})
    pbmc[:60].copy().write_h5ad("pbmc.h5ad")
    config = CUSTOM_MODEL.read_text(encoding="utf-8").replace("/path/to/dataset.h5ad", "pbmc.h5ad")
    few = ["training.max_steps=1", "training.accelerator=cpu", "data.max_genes=64", "model.max_seq_len=64"]
    with pytest.warns(ScforgeWarning, match=r"line \d+: model\.pooling='mean' has no effect, as 'my_pool' has no such"):
        model = run(config.replace("architecture: gene_pooling", "architecture: my_pool"), *few)
    assert type(model.module).__name__ == "GenePoolingModel"
    assert models("checkpoints/gene_pooling") == ["epoch=00", "final"]


@pytest.mark.parametrize("text", [SMALL, TRANSFORMER], ids=["continuous_projection", "rank_value"])
@pytest.mark.parametrize(
    ("asked", "values"),
    [
        (["log1p=false"], lambda counts, total: counts / total * 1e4),
        (["target_sum=500"], lambda counts, total: np.log1p(counts / total * 500)),
        (["normalize=none"], lambda counts, total: np.log1p(counts)),
        (["normalize=none", "log1p=false"], lambda counts, total: counts),
    ],
)
def test_normalization_in_training_and_inference(run, tiny_adata: ad.AnnData, text: str, asked, values) -> None:
    model = run(text, "output.checkpoint_dir=ck", *(f"data.preprocessing.{one}" for one in asked))
    again = Encoder.load("ck/final", tiny_adata)
    counts = tiny_adata[:, list(model.vocab.genes)].X.toarray()[:5]
    totals = np.asarray(tiny_adata.X.sum(axis=1)).ravel()[:5]
    expected = values(counts, totals[:, None])
    for one in (model, again):
        batch = one.tokenizer(counts, totals=totals)
        for cell in range(5):
            genes = batch["input_ids"][cell].numpy() - one.vocab.n_special
            kept = genes >= 0
            np.testing.assert_allclose(batch["values"][cell].numpy()[kept], expected[cell][genes[kept]], rtol=1e-5)
    np.testing.assert_allclose(again.get_latent_representation(), model.get_latent_representation(), atol=1e-5)


def test_normalization_that_a_tokenizer_does_not_make(run) -> None:
    with pytest.raises(ConfigError, match=r"log1p=False has no use with the tokenizer 'binned_expression'"):
        run(TRANSFORMER, "tokenizer.strategy=binned_expression", "data.preprocessing.log1p=false")
    with pytest.raises(ConfigError, match=r"log1p=False and tokenizer\.transform='counts' contradict each other"):
        run(SMALL, "tokenizer.transform=counts", "data.preprocessing.log1p=false")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*of the 20120 genes of the vocabulary")
def test_the_columns_of_a_card(run, pbmc: ad.AnnData, monkeypatch) -> None:
    """Benchmarks on data sets with cards, as in the proposal: nothing names their columns."""
    atlas = pbmc[pbmc.obs["cell_type"].isin(["B", "CD14+ Mono"])][:60].copy()
    atlas.obs["donor_id"] = ["x", "y"] * 30
    for name in ("tabula_sapiens", "immune_atlas"):
        atlas.write_h5ad(f"{name}.h5ad")
    monkeypatch.setenv("SCFORGE_DATA", ".")
    atlas.write_h5ad("pbmc.h5ad")
    overrides = ["data.source=local", "data.organism=", "data.filters=", "data.paths=pbmc.h5ad"]
    overrides += ["training.num_gpus=0", "training.strategy=auto", "training.max_steps=1", "training.batch_size=8"]
    overrides += ["data.max_genes=64", "model.num_layers=1", "model.hidden_dim=16"]
    text = PROPOSAL.read_text(encoding="utf-8")
    figures = {"cell_type_annotation_macro_f1", "batch_integration_silhouette_label"}
    assert figures <= set(run(text, *overrides).history)
    # Files that the configuration names instead: columns of the data go before those of the card.
    named = "eval.datasets={tabula_sapiens: tabula_sapiens.h5ad, immune_atlas: other.h5ad}"
    atlas.obs = atlas.obs.rename(columns={"donor_id": "batch"})
    atlas.write_h5ad("other.h5ad")
    atlas.write_h5ad("pbmc.h5ad")
    assert figures <= set(run(text, *overrides, named, "data.batch_key=batch").history)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*of the 20120 genes of the vocabulary")
@pytest.mark.parametrize("name", PLAIN)
def test_each_recipe_trains_a_step(run, pbmc: ad.AnnData, name: str) -> None:
    pbmc[:60].copy().write_h5ad("data.h5ad")
    overrides = ["training.max_steps=1", "training.batch_size=8", "training.accelerator=cpu", "data.max_genes=64"]
    overrides += ["model.hidden_dim=16", "model.num_layers=1"]
    config = load_config(recipe_path(name), overrides)
    model = train_from_config(config, progress_bar=False)
    assert model.is_trained_
    assert model._spec.architecture == config.model.architecture
    assert Encoder.load(Path(config.output.checkpoint_dir) / "final").is_trained_


def test_a_custom_architecture_by_its_name(run, custom_architecture: str) -> None:
    text = SMALL.replace("  ffn_dim: 8\n", "  architecture: my_pooling\n  num_layers: 3\n")
    model = run(text)
    assert len(model.module.layers) == 3
    with pytest.raises(ConfigError, match=r"model\.n_heads=3 is not an option of 'my_pooling'; did you mean"):
        run(text, "model.n_heads=3")


def test_masking_for_an_objective_that_masks_nothing(run) -> None:
    with pytest.raises(ConfigError, match="masking is set but the objective 'joint_embedding' masks nothing"):
        run(SMALL, "tokenizer.masking.mask_ratio=0.2", "objective.name=joint_embedding")


def test_more_tokens_than_positions(run) -> None:
    with pytest.raises(OptionError, match=r"max_seq_len=20 is smaller than the 50 tokens .*data\.max_genes"):
        run(TRANSFORMER, "data.max_genes=50", "model.max_seq_len=20")


@pytest.mark.parametrize("key", ["checkpoint_dir", "log_dir", "embedding"])
def test_an_output_below_a_file_is_refused_before_training(run, key: str, monkeypatch) -> None:
    monkeypatch.setattr(Encoder, "train", lambda *args, **kwargs: pytest.fail("training began"))
    with pytest.raises(OptionError, match=rf"output\.{key}='cells.h5ad.*is a file; give the name of a folder"):
        run(SMALL, f"output.{key}=cells.h5ad{'/out.h5ad' if key == 'embedding' else ''}")
