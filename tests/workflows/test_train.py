from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.config import list_recipes, load_config, recipe_path
from scforge.errors import ConfigError, MissingFileError, OptionError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.models.registry import MODELS
from scforge.testing import raises
from scforge.workflows import train_from_config

SMALL = """
data: {paths: [cells.h5ad]}
model: {hidden_dim: 8, ffn_dim: 8}
training: {max_epochs: 1, batch_size: 16, accelerator: cpu}
"""
TRANSFORMER = SMALL.replace("ffn_dim: 8", "architecture: transformer_encoder, num_layers: 1, num_heads: 2")

PLAIN = [name for name in list_recipes() if not name.endswith("_cluster")]
PLAIN = [name for name in PLAIN if load_config(recipe_path(name)).finetune is None]

CUSTOM_MODEL = Path(__file__).parents[1] / "config" / "custom_model.yaml"
PROPOSAL = CUSTOM_MODEL.with_name("proposal.yaml")
TUTORIAL_MODEL = Path(__file__).parents[1] / "seeds" / "examples_custom_model" / "gene_pooling.py"


@pytest.fixture
def run(tiny_adata: ad.AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Encoder]:
    monkeypatch.chdir(tmp_path)
    tiny_adata.layers["counts"] = tiny_adata.X.copy()
    tiny_adata.write_h5ad("cells.h5ad")

    def run(text: str, *overrides: str) -> Encoder:
        Path("config.yaml").write_text(text)
        return train_from_config(load_config("config.yaml", overrides), progress_bar=False)

    return run


def models(folder: str) -> list[str]:
    return sorted(path.parent.name for path in Path(folder).glob("[!s]*/config.json"))


@pytest.mark.slow
@pytest.mark.parametrize("save_top_k", [1, -1, 0])
def test_checkpoints(run, save_top_k: int) -> None:
    model = run(SMALL, "training.max_epochs=4", "output.checkpoint_dir=ck", f"output.save_top_k={save_top_k}")
    embedding, losses = model.get_latent_representation(), model.history["validation_loss"]["validation_loss"]
    best = losses.sort_values().index[: 4 if save_top_k < 0 else save_top_k]
    *names, final = models("ck")
    assert (names, final) == (sorted(f"epoch={epoch:02d}" for epoch in best), "final")
    for name in names:
        saved = Encoder.load(Path("ck") / name)
        assert saved.is_trained_
        assert saved.n_epochs_ == int(name[-2:]) + 1
        assert np.isfinite(saved.get_latent_representation(model.adata, key_added=None)).all()
    for name in (final, f"epoch={losses.argmin():02d}")[: 1 + len(names)]:
        saved = Encoder.load(f"ck/{name}", model.adata)
        np.testing.assert_allclose(saved.get_latent_representation(), embedding, atol=1e-6)


def test_log_embedding_and_benchmarks(run) -> None:
    keys = ["eval.benchmarks=[label_prediction: {name: groups}]", "data.labels_key=group", "eval.every_n_epochs=2"]
    keys += ["training.max_epochs=3", "training.validation_size=0.4"]
    model = run(SMALL, *keys, "output.log_dir=logs", "output.embedding=out/cells.h5ad")
    (log,) = Path("logs").rglob("metrics.csv")
    losses = pd.read_csv(log)["validation_loss"].dropna()
    assert len(losses) == 3
    np.testing.assert_allclose(losses, model.history["validation_loss"]["validation_loss"])
    written = ad.read_h5ad("out/cells.h5ad")
    np.testing.assert_array_equal(written.obsm["X_scforge"], model.get_latent_representation(key_added=None))
    assert written.uns["scforge"]["X_scforge"]["vocab_hash"] == model.vocab.hash
    scores = next(model.history[name][name] for name in model.history if name.startswith("groups_"))
    assert scores.notna().tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({}, "checkpoint_dir"),
        ({"resume": "auto", "overwrite": True}, "resume"),
        (
            {"resume": "ck"},
            "resume",
        ),
        ({"resume": "other/step=1"}, "resume"),
    ],
)
def test_a_folder_that_does_not_fit_is_told_before_the_cells_are_read(run, options, argument, monkeypatch) -> None:
    for name in ("ck/step=00000004/training", "ck/final", "other/step=1/training"):
        Path(name).mkdir(parents=True)
    monkeypatch.setattr("scforge.workflows.train.open_source", lambda data: pytest.fail("cells were read"))
    Path("config.yaml").write_text(f"{SMALL}output:\n  checkpoint_dir: ck\n")
    with raises((OptionError, MissingFileError), argument):
        train_from_config(load_config("config.yaml"), progress_bar=False, **options)


def test_the_configuration_is_kept_and_results_are_replaced_if_told(run) -> None:
    keep = ["output.checkpoint_dir=ck", "output.embedding=out.h5ad", "training.max_steps=2"]
    before = run(SMALL, *keep).module.state_dict()
    kept = load_config("ck/config.yaml")
    assert kept == load_config("config.yaml", keep)
    with pytest.raises(OptionError, match=r"output\.embedding='out\.h5ad' exists"):
        run(SMALL, keep[1])
    with raises(OptionError, "checkpoint_dir"):
        run(SMALL, keep[0])
    after = train_from_config(kept, progress_bar=False, overwrite=True).module.state_dict()
    assert all(value.equal(after[name]) for name, value in before.items())
    with pytest.raises(ConfigError, match=r"resume='auto' requires output\.checkpoint_dir, the folder"):
        train_from_config(load_config("config.yaml"), resume="auto")


def test_how_to_begin_reaches_the_training_and_the_first_process_writes(run, monkeypatch) -> None:
    begun: list[dict] = []
    monkeypatch.setattr(Encoder, "train", lambda self, **options: begun.append(options))
    monkeypatch.setattr("lightning.fabric.utilities.rank_zero.rank_zero_only.rank", 1)
    run(SMALL, "output.checkpoint_dir=ck", "output.embedding=out.h5ad")
    assert not {"resume", "overwrite"} & set(begun[-1])
    for option in ({"resume": "auto"}, {"overwrite": True}):
        train_from_config(load_config("config.yaml", ["output.checkpoint_dir=ck"]), **option)
        assert option.items() <= begun[-1].items()
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["cells.h5ad", "config.yaml"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*of the 20120 genes of the vocabulary")
def test_the_tutorial_on_custom_models(run, pbmc: ad.AnnData, monkeypatch) -> None:
    """With the class of the tutorial, which takes no pooling."""
    code = TUTORIAL_MODEL.read_text(encoding="utf-8").replace('@register_model("gene_pooling")', "")
    names: dict[str, Any] = {"__name__": "my_pool"}
    exec(compile(code, str(TUTORIAL_MODEL), "exec"), names)
    monkeypatch.setitem(MODELS._entries, "my_pool", names["GenePoolingModel"])
    pbmc[:60].copy().write_h5ad("pbmc.h5ad")
    text = CUSTOM_MODEL.read_text(encoding="utf-8").replace("/path/to/dataset.h5ad", "pbmc.h5ad")
    few = ["training.max_epochs=2", "training.accelerator=cpu", "data.max_genes=64", "model.max_seq_len=64"]
    few += ["model.hidden_dim=8", "model.num_layers=1", "model.architecture=my_pool"]
    with pytest.warns(
        ScforgeWarning, match=r"model\.pooling='mean' has no effect, because the architecture 'my_pool' has no"
    ):
        model = run(text, *few)
    assert (model.spec.tokenizer, model.spec.objective) == ("rank_value", "masked_gene_prediction")
    assert model.vocab.n_genes == 20_120
    assert isinstance(model.module, names["GenePoolingModel"])
    assert models("checkpoints/gene_pooling") == ["epoch=00", "epoch=01", "final"]
    assert list(Path("logs/gene_pooling").rglob("metrics.csv"))
    again = Encoder.load("checkpoints/gene_pooling/final", model.adata)
    np.testing.assert_allclose(again.get_latent_representation(), model.get_latent_representation(), atol=1e-6)


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*of the 20120 genes of the vocabulary")
def test_the_columns_of_a_card(run, pbmc: ad.AnnData, monkeypatch) -> None:
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
    few = ["training.max_steps=1", "training.batch_size=8", "training.accelerator=cpu", "data.max_genes=64"]
    config = load_config(recipe_path(name), [*few, "model.hidden_dim=16", "model.num_layers=1"])
    model = train_from_config(config, progress_bar=False)
    assert model.is_trained_
    assert model.spec.architecture == config.model.architecture
    assert Encoder.load(Path(config.output.checkpoint_dir) / "final").is_trained_


def test_a_custom_architecture_by_its_name(run, custom_architecture: str) -> None:
    text = SMALL.replace("ffn_dim: 8", "architecture: my_pooling, num_layers: 3")
    model = run(text)
    assert len(model.module.layers) == 3
    assert "my_pooling" in repr(model)
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["cells.h5ad", "config.yaml"], "not asked for"
    with raises(OptionError, "n_heads"):
        run(text, "model.n_heads=3")


UNDONE = "data.preprocessing.log1p=false"
MISTAKES = [
    (SMALL, ["tokenizer.masking.mask_ratio=0.2", "objective.name=joint_embedding"], "'joint_embedding' does not mask"),
    (
        SMALL,
        ["tokenizer.transform=counts", UNDONE],
        r"tokenizer\.transform='counts' contradicts data\.preprocessing, which requires ",
    ),
    (TRANSFORMER, ["tokenizer.strategy=binned_expression", UNDONE], "tokenizer 'binned_expression' does not provide"),
    (SMALL, ["output.embedding=cells.h5ad/o.h5ad"], r"output\.embedding='cells.h5ad.*is a file; choose another path"),
]


@pytest.mark.parametrize(("text", "overrides", "message"), MISTAKES)
def test_mistakes_are_told_before_training(run, text: str, overrides: list[str], message: str, monkeypatch) -> None:
    monkeypatch.setattr(Encoder, "train", lambda *args, **kwargs: pytest.fail("training began"))
    with pytest.raises((ConfigError, OptionError), match=message):
        run(text, *overrides)
