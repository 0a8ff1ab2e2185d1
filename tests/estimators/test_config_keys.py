"""Every key of a configuration is read by something: a changed value changes what is built."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata as ad
import numpy as np
import pytest

from scforge.config import Config, load_config
from scforge.config._messages import known_names
from scforge.data import GeneVocab
from scforge.errors import ConfigError
from scforge.estimators import Encoder, config_data, finetuning_from_config, from_config
from scforge.training import CellDataModule

BASE = """
data: {paths: [cells.h5ad], preprocessing: {hvg_selection: 0}}
model: {architecture: transformer_encoder, hidden_dim: 8, num_layers: 1, num_heads: 2}
training: {accelerator: cpu}
"""
CENSUS = ["data.source=cellxgene_census", "data.paths="]
STORE = ["data.paths=cells.zarr"]
LOGS = ["output.log_dir=logs", "output.loggers=[wandb, tensorboard]"]
SCORES = ["eval.benchmarks=[label_prediction]", "data.labels_key=group"]
ON_ATLAS = ["eval.benchmarks=[label_prediction: {dataset: a}]", "data.labels_key=group"]
BALANCED = ["data.sampling.balance_key=group"]
TUNED = ["model=", "data.preprocessing=", "finetune={base_model: base, task: annotation, labels_key: group}"]


class Built:
    """What is made of a configuration, without training; each part when it is asked for."""

    def __init__(self, config: Config, patch: pytest.MonkeyPatch) -> None:
        self.config = config
        self.patch = patch

    @cached_property
    def train(self) -> dict[str, Any]:
        """Arguments of ``Encoder.train``, those left out with its defaults."""
        bound = inspect.signature(Encoder.train).bind(None, **from_config.train_arguments(self.config))
        bound.apply_defaults()
        return bound.arguments

    @cached_property
    def parts(self) -> tuple[Encoder, CellDataModule]:
        return from_config._model(config_data.open_source(self.config.data), self.config)

    @cached_property
    def data(self) -> CellDataModule:
        return self.parts[1]

    @cached_property
    def spec(self) -> Any:
        return self.parts[0]._spec

    @cached_property
    def setup(self) -> dict[str, Any]:
        return self.parts[0].registry_["setup_args"]

    @cached_property
    def opened(self) -> dict[str, Any]:
        """Arguments with which the cells are opened."""
        seen: dict[str, Any] = {}

        class Query:
            def __init__(self, **options: Any) -> None:
                seen.update(options, query=True)

            def open(self, vocab: Any) -> None:
                seen["vocab"] = vocab

        self.patch.setattr("scforge.data.census.CensusQuery", Query)
        self.patch.setattr(config_data, "open_cells", lambda paths, vocab, **options: seen.update(options, vocab=vocab))
        self.patch.setattr(config_data, "read_h5ad", lambda paths: ad.AnnData(obs={name: [0] for name in "ab"}))
        config_data.open_source(self.config.data)
        return seen

    @cached_property
    def loggers(self) -> dict[str, Any]:
        """Arguments with which loggers are made."""
        seen: dict[str, Any] = {}
        self.patch.setattr(
            "scforge.training.loggers.make_loggers",
            lambda names, log_dir, **options: seen.update(options, names=names, log_dir=log_dir),
        )
        from_config.train_arguments(self.config)
        return seen

    @cached_property
    def scores(self) -> dict[str, Any]:
        """Arguments with which the benchmarks are made."""
        seen: dict[str, Any] = {}

        def make(benchmarks: list[Any], **options: Any) -> SimpleNamespace:
            seen.update(options, benchmarks=benchmarks)
            return SimpleNamespace(evaluations=[])

        self.patch.setattr("scforge.eval.callback.BenchmarkCallback", make)
        from_config.train_arguments(self.config)
        return seen

    @cached_property
    def tuned(self) -> dict[str, Any]:
        """Which model is fine-tuned, and the arguments of ``Encoder.finetune``."""
        seen: dict[str, Any] = {}

        class Tuned:
            vocab, registry_ = None, {"setup_args": {}}

            def finetune(self, task: dict[str, Any], source: Any, **options: Any) -> Tuned:
                seen.update(options, task=task["name"])
                return self

            def evaluate(self, **options: Any) -> None:
                seen["evaluate"] = True

        self.patch.setattr(Encoder, "load", lambda path, *args, **options: seen.update(base_model=str(path)) or Tuned())
        self.patch.setattr(finetuning_from_config, "outputs_of", lambda *args: None)
        finetuning_from_config.finetune_from_config(self.config)
        return seen

    @cached_property
    def written(self) -> list[str]:
        """Files that are written in the end."""
        seen: list[str] = []
        self.patch.setattr(Encoder, "train", lambda *args, **kwargs: None)
        self.patch.setattr(Encoder, "get_latent_representation", lambda self: None)
        self.patch.setattr(from_config, "_write", lambda adata, path: seen.append(path))
        from_config.train_from_config(self.config)
        return seen


def held_out_batches(data: CellDataModule) -> set[str]:
    return set(np.asarray(data.cells.column("batch"), dtype=object)[data.validation_rows])


def argument(name: str) -> Callable[[Built], Any]:
    return lambda built: built.train[name]


def of_tuning(name: str) -> Callable[[Built], Any]:
    return lambda built: built.tuned.get(name)


Case = tuple[Any, Callable[[Built], Any], list[str]]
CASES: dict[str, Case] = {
    "data.source": ("cellxgene_census", lambda b: b.opened.get("query"), []),
    "data.paths": (["more.h5ad"], lambda b: len(b.data.cells), []),
    "data.organism": ("mus_musculus", lambda b: b.opened.get("organism"), CENSUS),
    "data.filters": ({"tissue": "lung"}, lambda b: b.opened.get("filters"), CENSUS),
    "data.census_version": ("2025-01-30", lambda b: b.opened.get("census_version"), CENSUS),
    "data.uri": ("folder", lambda b: b.opened.get("uri"), CENSUS),
    "data.obs_columns": (["donor"], lambda b: b.opened["obs"], STORE),
    "data.storage_options": ({"anon": True}, lambda b: b.opened["storage_options"], STORE),
    "data.modality": ("rna", lambda b: b.opened["modality"], STORE),
    "data.memory": ("1GB", lambda b: b.opened["memory"], STORE),
    "data.cache": ("cache.zarr", lambda b: b.opened["cache"], STORE),
    "data.gene_vocab": ("genes.json", lambda b: b.parts[0].vocab.n_genes, []),
    "data.max_genes": (13, lambda b: b.parts[0].tokenizer.max_len, []),
    "data.layer": ("counts", lambda b: b.setup["layer"], []),
    "data.gene_key": ("ensembl", lambda b: b.setup["gene_key"], []),
    "data.batch_key": ("batch", lambda b: b.setup["batch_key"], []),
    "data.labels_key": ("group", lambda b: b.setup["labels_key"], []),
    "data.preprocessing.hvg_selection": (30, lambda b: b.parts[0].vocab.n_genes, []),
    "data.preprocessing.keep_genes": (
        ["gene40", "gene41", "gene42"],
        lambda b: [gene for gene in ("gene40", "gene41", "gene42") if gene in b.parts[0].vocab.genes],
        ["data.preprocessing.hvg_selection=30"],
    ),
    "data.preprocessing.normalize": ("none", lambda b: b.parts[0].tokenizer.transform, []),
    "data.preprocessing.target_sum": (500, lambda b: b.parts[0].tokenizer.target_sum, []),
    "data.preprocessing.log1p": (False, lambda b: b.parts[0].tokenizer.transform, []),
    "data.sampling.balance_key": ("group", lambda b: b.data._balance is not None, []),
    "data.sampling.warmup_epochs": (3, lambda b: b.data._balance.warmup_epochs, BALANCED),
    "data.sampling.start": (0.25, lambda b: b.data._balance.start, BALANCED),
    "data.sampling.end": (0.5, lambda b: b.data._balance.end, BALANCED),
    "data.split.by": ("batch", lambda b: held_out_batches(b.data), []),
    "data.max_tokens_per_batch": (512, lambda b: b.data.max_tokens_per_batch, []),
    "data.num_threads": (0, lambda b: b.data.num_threads, []),
    "data.pin_memory": (True, lambda b: b.data.pin_memory, []),
    "tokenizer.strategy": ("binned_expression", lambda b: b.spec.tokenizer, []),
    "tokenizer.masking.mask_ratio": (0.4, lambda b: b.spec.objective_options["mask_ratio"], []),
    "tokenizer.masking.mask_token_prob": (0.7, lambda b: b.spec.objective_options["mask_token_prob"], []),
    "tokenizer.masking.random_token_prob": (0.2, lambda b: b.spec.objective_options["random_token_prob"], []),
    "objective.name": ("joint_embedding", lambda b: b.spec.objective, []),
    "model.architecture": ("autoregressive_transformer", lambda b: b.spec.architecture, []),
    "model.hidden_dim": (16, lambda b: b.parts[0].module.hidden_dim, []),
    "model.num_layers": (2, lambda b: b.spec.model_options["num_layers"], []),
    "model.num_heads": (4, lambda b: b.spec.model_options["num_heads"], []),
    "model.ffn_dim": (24, lambda b: b.spec.model_options.get("ffn_dim"), []),
    "model.dropout": (0.5, lambda b: b.spec.model_options.get("dropout"), []),
    "model.max_seq_len": (100, lambda b: b.spec.model_options["max_seq_len"], []),
    "model.pooling": ("cls", lambda b: b.parts[0].module.pooling, []),
    "model.activation": ("relu", lambda b: b.spec.model_options.get("activation"), []),
    "model.use_expression_values": (False, lambda b: len(b.parts[0].module.state_dict()), []),
    "model.layer_norm_eps": (0.1, lambda b: b.spec.model_options.get("layer_norm_eps"), []),
    "finetune.base_model": ("other", of_tuning("base_model"), TUNED),
    "finetune.task": ("regression", of_tuning("task"), TUNED),
    "finetune.labels_key": ("batch", of_tuning("labels_key"), TUNED),
    "finetune.batch_key": ("batch", of_tuning("batch_key"), [*TUNED, "finetune.task=integration"]),
    "finetune.validation_size": (0.3, of_tuning("validation_size"), TUNED),
    "finetune.test_size": (0.3, of_tuning("test_size"), TUNED),
    "finetune.split_by": ("batch", of_tuning("split_by"), TUNED),
    "finetune.split_key": ("batch", of_tuning("split_key"), TUNED),
    "finetune.freeze": (1, of_tuning("freeze"), TUNED),
    "finetune.lora": ({"r": 2}, of_tuning("lora"), TUNED),
    "finetune.head": ({"hidden_dim": 4}, of_tuning("head"), TUNED),
    "finetune.evaluate": (True, of_tuning("evaluate"), TUNED),
    "training.batch_size": (20, lambda b: b.data.batch_size, []),
    "training.max_epochs": (2, argument("max_epochs"), []),
    "training.max_steps": (3, argument("max_steps"), []),
    "training.validation_size": (0.5, lambda b: len(b.data.validation_rows), []),
    "training.early_stopping": (False, argument("early_stopping"), []),
    "training.early_stopping_patience": (3, argument("early_stopping_patience"), []),
    "training.precision": ("auto", argument("precision"), []),
    "training.accelerator": ("gpu", argument("accelerator"), []),
    "training.devices": ("0,1", argument("devices"), []),
    "training.num_nodes": (2, argument("num_nodes"), []),
    "training.strategy": ("fsdp", argument("strategy"), []),
    "training.gradient_clip_val": (0.1, argument("gradient_clip_val"), []),
    "training.accumulate_grad_batches": (4, argument("accumulate_grad_batches"), []),
    "training.gradient_checkpointing": (True, argument("gradient_checkpointing"), []),
    "training.layer_lr_decay": (0.5, argument("layer_lr_decay"), []),
    "training.gradual_unfreezing": (2, argument("gradual_unfreezing"), []),
    "training.compile": (True, argument("compile"), []),
    "training.ema_decay": (0.9, argument("ema_decay"), []),
    "training.log_every_n_steps": (5, argument("log_every_n_steps"), []),
    "training.checkpoint_every_n_steps": (7, argument("checkpoint_every_n_steps"), []),
    "training.optimizer.name": ("muon", argument("optimizer"), []),
    "training.optimizer.lr": (0.01, argument("lr"), []),
    "training.optimizer.weight_decay": (0.5, argument("weight_decay"), []),
    "training.scheduler.name": ("constant", argument("schedule"), []),
    "training.scheduler.warmup_steps": (2, argument("warmup_steps"), []),
    "eval.benchmarks": (["label_prediction"], lambda b: b.scores.get("benchmarks"), []),
    "eval.every_n_epochs": (3, lambda b: b.scores["every_n_epochs"], SCORES),
    "eval.datasets": ({"a": "more.h5ad"}, lambda b: b.scores["datasets"], ON_ATLAS),
    "output.log_dir": ("logs", lambda b: b.loggers.get("log_dir"), []),
    "output.loggers": (["tensorboard"], lambda b: b.loggers["names"], ["output.log_dir=logs"]),
    "output.project": ("atlas", lambda b: b.loggers["project"], LOGS),
    "output.run_name": ("first", lambda b: b.loggers["run_name"], LOGS),
    "output.wandb_mode": ("offline", lambda b: b.loggers["wandb_mode"], LOGS),
    "output.checkpoint_dir": ("ck", argument("checkpoint_dir"), []),
    "output.save_top_k": (-1, argument("save_top_k"), []),
    "output.keep_last": (3, argument("keep_last"), []),
    "output.embedding": ("out.h5ad", lambda b: b.written, []),
    "seed": (3, lambda b: (b.parts[0].seed, b.data.seed), []),
}
"""Key to a value that is not the default, what shows that it is read, and what else has to be set for it."""

TRANSLATED = {
    "eval.benchmarks",
    "data.source",
    "data.paths",
    "data.gene_vocab",
    "data.preprocessing.log1p",
    "data.preprocessing.normalize",
    "data.split.by",
    "data.sampling.balance_key",
    "model.architecture",
    "model.use_expression_values",
    "training.validation_size",
    "output.embedding",
    "seed",
}
"""Keys whose value does not arrive as it is written."""

ONE_VALUE = {"model.vocab_size": "100"}
"""Keys that nobody may choose: any value is refused."""


def leaves() -> list[str]:
    names = known_names(Config)
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture
def build(
    folder: Path, tiny_adata: ad.AnnData, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[list[str]], Built]]:
    """Return a function that makes what a configuration with changes is made into."""
    monkeypatch.chdir(folder)
    if not Path("cells.h5ad").exists():
        tiny_adata.layers["counts"] = tiny_adata.X.copy()
        tiny_adata.write_h5ad("cells.h5ad")
        tiny_adata[:40].copy().write_h5ad("more.h5ad")
        GeneVocab.from_genes(tiny_adata.var_names[:50]).save("genes.json")
        for name in ("base", "other"):
            Path(name).mkdir()
            Path(name, "config.json").touch()
        Path("config.yaml").write_text(BASE)
    with pytest.MonkeyPatch.context() as patch:
        yield lambda changes: Built(load_config("config.yaml", changes), patch)


def test_every_key_has_a_case() -> None:
    assert set(CASES) | set(ONE_VALUE) == set(leaves())
    assert not set(CASES) & set(ONE_VALUE)


@pytest.mark.parametrize("key", CASES)
def test_a_changed_key_changes_what_is_built(build: Callable[[list[str]], Built], key: str) -> None:
    value, look, needed = CASES[key]
    before = look(build(needed))
    without = ["data.paths="] if key == "data.source" else []
    changed = build([*needed, f"{key}={json.dumps(value)}", *without])
    after = look(changed)
    assert after != before
    if key not in TRANSLATED:
        assert after == value


@pytest.mark.parametrize(("key", "value"), ONE_VALUE.items())
def test_keys_with_one_value_refuse_others(build: Callable[[list[str]], Built], key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        from_config.train_from_config(build([f"{key}={value}"]).config)


def test_what_fits_into_memory_is_tried_out_by_the_training(build: Callable[[list[str]], Built]) -> None:
    built = build(["training.batch_size=auto"])
    assert (built.train["batch_size"], built.data.batch_size) == ("auto", None)
    assert build(["training.batch_size=4"]).train["batch_size"] is None


# What else of a configuration reaches a fine-tuning.
PASSED_ON = {
    "data.labels_key": ("batch", of_tuning("labels_key"), [*TUNED, "finetune.labels_key="]),
    "data.max_tokens_per_batch": (512, of_tuning("max_tokens_per_batch"), TUNED),
    "data.num_threads": (0, of_tuning("num_threads"), TUNED),
    "finetune.class_weights": ("balanced", lambda b: b.config.finetune.user_options().get("class_weights"), TUNED),
    "output.checkpoint_dir": ("ck", of_tuning("checkpoint_dir"), TUNED),
    "seed": (3, of_tuning("seed"), TUNED),
    "training.batch_size": (20, of_tuning("batch_size"), TUNED),
    "training.gradual_unfreezing": (2, of_tuning("gradual_unfreezing"), TUNED),
    "training.lr": (0.01, of_tuning("lr"), TUNED),
    "training.max_epochs": (2, of_tuning("max_epochs"), TUNED),
}


@pytest.mark.parametrize("key", PASSED_ON)
def test_fine_tuning_gets_the_other_sections(build: Callable[[list[str]], Built], key: str) -> None:
    value, look, needed = PASSED_ON[key]
    assert look(build([*needed, f"{key}={json.dumps(value)}"])) == value


@pytest.mark.parametrize(
    "key",
    [
        *("model.hidden_dim=8", "tokenizer.strategy=rank_value", "objective.name=joint_embedding", "data.max_genes=9"),
        *("data.gene_vocab=genes.json", "data.preprocessing.hvg_selection=9", "data.sampling.balance_key=group"),
        *("data.split.by=batch", "data.pin_memory=true", "training.validation_size=0.2"),
    ],
)
def test_fine_tuning_refuses_what_it_would_not_read(build: Callable[[list[str]], Built], key: str) -> None:
    with pytest.raises(ConfigError, match=r"settled by the base model of a fine-tuning|has no use in a fine-tuning"):
        finetuning_from_config.finetune_from_config(build([*TUNED, key]).config)


def test_benchmarks_become_a_callback(build: Callable[[list[str]], Built]) -> None:
    (callback,) = build([*SCORES, "eval.every_n_epochs=2"]).train["callbacks"]
    assert callback.every_n_epochs == 2
    assert build([*SCORES, "eval.benchmarks=[]"]).train["callbacks"] == []


def test_defaults_of_the_schema_are_those_of_the_training(build: Callable[[list[str]], Built]) -> None:
    """A default that stands in both places is one."""
    given = inspect.signature(Encoder.train).parameters
    config = build([]).config
    for section, names in from_config._ARGUMENTS.items():
        for name in names:
            default = type(getattr(config, section)).model_fields[name].default
            assert default in (None, given[name].default), f"{section}.{name}"
