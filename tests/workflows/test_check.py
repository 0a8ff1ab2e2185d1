import importlib.util
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import pytest
import yaml

from scforge.config import Config, list_recipes, load_config, recipe_path
from scforge.errors import ConfigError, DataError, MissingFileError, OptionError, ScforgeError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.workflows import check_config, train_from_config
from scforge.workflows.check import _absent, check_settings, show_config

TEXT = """
data:
  paths: [cells.h5ad]
  max_genes: 50
model:
  architecture: transformer_encoder
  hidden_dim: 8
  num_layers: 1
  num_heads: 2
output:
  checkpoint_dir: ck
"""


@pytest.fixture
def load(tiny_adata: ad.AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    monkeypatch.chdir(tmp_path)
    tiny_adata.write_h5ad("cells.h5ad")
    Path("recipe.yaml").write_text(TEXT)
    return lambda *overrides, path="recipe.yaml": load_config(path, overrides)


def test_what_is_fine(load: Callable[..., Config], store: Path) -> None:
    assert check_config(load()) == "transformer_encoder on tokens of rank_value, trained by masked_gene_prediction"
    assert check_config(load("data.preprocessing.hvg_selection=60")).endswith("about 0.0 million parameters")
    check_config(load("eval.benchmarks=[cell_type_annotation]", "data.labels_key=group"))
    check_config(load(f"data.paths=[{store}]", "data.labels_key=kind", "model.max_seq_len=60"))
    check_settings(load("data.paths=[./*.h5ad]", "output.embedding=out/new.h5ad"))
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["cells.h5ad", "recipe.yaml"]


BENCHMARKS = "eval.benchmarks=[cell_type_annotation]"
MISTAKES = [
    (
        "model.vocab_size=3",
        ConfigError,
        "model.vocab_size=3 cannot be set, because it is determined by the genes; remove model.vocab_size",
    ),
    (
        "tokenizer.max_length=3",
        OptionError,
        "tokenizer option 'max_length' is unknown to 'rank_value'; did you mean 'max_len'",
    ),
    ("tokenizer.max_len=many", ConfigError, "override 'tokenizer.max_len=many': data.max_genes='many' is not"),
    ("objective={name: joint_embedding, views: 0}", OptionError, "views=0 is too small"),
    ("tokenizer.append_cls=3", OptionError, "append_cls=3 must be True or False"),
    (
        "model={expression_head: bin, n_bins: 9}",
        OptionError,
        "expression_head='bin' requires bins, which the tokenizer",
    ),
    ("data.paths=[cels.h5ad]", MissingFileError, "the file 'cels.h5ad' does not exist; did you mean 'cells.h5ad'?"),
    ("data.labels_key=cell_type", DataError, "'cell_type'"),
    (("data.labels_key=cell_kind", "data.paths=[STORE]"), DataError, "cell_kind"),
    ("data.gene_key=symbol", OptionError, "gene_key='symbol' is not in var of 'cells.h5ad'; did"),
    ("data.gene_vocab=human", OptionError, "vocab='human' is neither a shipped vocabulary nor a file"),
    ("training.validation_size=0", ConfigError, "validation_size=0 leaves no validation cells, but"),
    (
        ("training.checkpoint_every_n_steps=5", "output.checkpoint_dir="),
        ConfigError,
        "has no effect without output.chec",
    ),
    (("output.log_dir=logs", "output.loggers=wandb"), OptionError, "'wandb', which is not installed; install with pip"),
    ("output.checkpoint_dir=cells.h5ad", OptionError, "output.checkpoint_dir='cells.h5ad' cannot be a folder"),
    ("eval={benchmarks: [label_prediction], datasets: {a: b.h5ad}}", MissingFileError, "the file 'b.h5ad' does not"),
    ("data.labels_key=", ConfigError, "requires labels_key, a column of obs; set data.labels_key"),
    (
        "eval.benchmarks=[{batch_integration: {labels_key: a}}]",
        ConfigError,
        "requires batch_key, a column of obs; set d",
    ),
    ("eval.datasets={a: cells.h5ad}", ConfigError, "eval.datasets.a='cells.h5ad' is not used by any benchmark; remove"),
    ("eval.benchmarks=[{cell_type_annotation: {dataset: tabula_sapien}}]", OptionError, "did you mean 'tabula_sapiens"),
    (
        "output.embedding=./cells.h5ad",
        ConfigError,
        "output.embedding='cells.h5ad' is an input file and",
    ),
    (("data.paths=[./*.h5ad]", "output.embedding=new.h5ad"), ConfigError, "'new.h5ad' is an input file"),
]


@pytest.mark.parametrize(("overrides", "error", "message"), MISTAKES, ids=[message[:50] for *_, message in MISTAKES])
def test_mistakes(load, store: Path, monkeypatch, overrides, error: type[ScforgeError], message: str) -> None:
    util = importlib.util
    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    overrides = [overrides] if isinstance(overrides, str) else [one.replace("STORE", str(store)) for one in overrides]
    with pytest.raises(error) as caught:
        check_config(load(BENCHMARKS, "data.labels_key=group", *overrides))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_told_but_no_mistake(load: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(
        ScforgeWarning,
        match=r"line \d+: model\.num_heads=2 has no effect, because the architecture 'gene_pooling' has no",
    ):
        check_config(load("model.architecture=gene_pooling"))
    with pytest.warns(ScforgeWarning, match=r"model\.max_seq_len=9 has no effect, because the architecture 'scdiva' "):
        check_config(load("model.architecture=scdiva", "model.max_seq_len=9"))
    monkeypatch.delenv("SCFORGE_DATA", raising=False)
    two = "{cell_type_annotation: {dataset: tabula_sapiens}}, {batch_integration: {dataset: immune_atlas}}"
    config = load(f"eval.benchmarks=[{two}]")
    with (
        pytest.warns(
            ScforgeWarning, match="the data set 'tabula_sapiens' was not found.*Training requires this data set"
        ),
        pytest.warns(ScforgeWarning, match="the data set 'immune_atlas' was not found"),
    ):
        check_config(config)
    with pytest.raises(MissingFileError):
        train_from_config(config)


def test_mistakes_have_a_place(load: Callable[..., Config]) -> None:
    for old, new, start in (
        ("num_heads: 2", "d_model: 2", r"^recipe\.yaml, line 8: option 'd_model' is unknown"),
        ("transformer_encoder", "transfomer", r"^recipe\.yaml, line 5: architecture='transfomer' is not known"),
    ):
        Path("recipe.yaml").write_text(TEXT[1:].replace(old, new))
        with pytest.raises(ScforgeError, match=start):
            check_config(load())
    Path("recipe.yaml").write_text(
        "data: {paths: [cells.h5ad]}\nfinetune:\n  task: annotation\n  base_model: nowhere\n"
    )
    with pytest.raises(MissingFileError, match=r"^recipe\.yaml, line 4: finetune\.base_model='nowhere' "):
        check_config(load("finetune.labels_key=group"))


def tunable(config: Config) -> list[str]:
    """Make a base model; return what else a recipe has to say of cells with other columns."""
    adata = ad.read_h5ad("cells.h5ad")
    Encoder.setup_anndata(adata)
    Encoder(adata, n_top_genes=40, hidden_dim=8, ffn_dim=8).save(config.finetune.base_model)
    names = {"labels_key": "group", "perturbation_key": "group"}
    names |= dict.fromkeys(("batch_key", "split_by", "context_key"), "batch")
    written = config.finetune.user_set()
    return [f"finetune.{key}={name}" for key, name in names.items() if key in written]


@pytest.mark.parametrize("name", list_recipes())
def test_recipes_are_fine_and_can_be_shown(load: Callable[..., Config], name: str) -> None:
    config = load("data.paths=[cells.h5ad]", path=recipe_path(name))
    if config.finetune is not None:
        config = load(*tunable(config), "data.paths=[cells.h5ad]", path=recipe_path(name))
    assert check_config(config)
    assert yaml.safe_load(show_config(config))["data"]["paths"] == ["cells.h5ad"]


def test_show_has_the_defaults_of_all_parts(load: Callable[..., Config]) -> None:
    Path("recipe.yaml").write_text(TEXT + "training: {lr: 0.5}\ntokenizer: {masking: {mask_ratio: 0.25}}\n")
    shown = yaml.safe_load(show_config(load("seed=7", "eval.benchmarks=[{label_prediction: {max_cells: 9}}]")))
    assert (shown["seed"], shown["training"]["optimizer"]["lr"]) == (7, 0.5)
    assert (shown["objective"]["mask_ratio"], shown["objective"]["mask_token_prob"]) == (0.25, 0.8)
    assert shown["eval"]["benchmarks"] == [{"label_prediction": {"max_cells": 9}}]
    assert "layer" not in shown["data"]
    Path("recipe.yaml").write_text(TEXT)
    by_another_name = ["model={architecture: masked_autoencoder, hidden_dim: 16}", "tokenizer.max_len=40"]
    shown = yaml.safe_load(show_config(load(*by_another_name)))
    assert shown["model"]["decoder_layers"] == 2
    assert shown["tokenizer"]["max_len"] == 40


def test_a_benchmark_takes_several_files():
    options = ["data.paths=a.h5ad", "eval.benchmarks=[{cell_type_annotation: {dataset: [a.h5ad, b.h5ad]}}]"]
    assert not _absent(load_config(recipe_path("light"), options))
