import json
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import anndata as ad
import pytest

from scforge.config import Config, load_config
from scforge.config.aliases import known_names
from scforge.data import GeneVocab
from scforge.errors import ConfigError
from scforge.estimators import Encoder
from scforge.testing import raises
from scforge.training import CellDataModule
from scforge.training.options import TrainOptions
from scforge.workflows import finetune as finetuning_from_config
from scforge.workflows import train as config_data
from scforge.workflows import train as from_config

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


def arguments(made: Mock, *names: str) -> dict[str, Any]:
    call = made.call_args or mock.call()
    return dict(zip(names, call.args, strict=False)) | call.kwargs


class Built:
    """What is made of a configuration, without training; each part when it is asked for."""

    def __init__(self, config: Config, patch: pytest.MonkeyPatch) -> None:
        self.config = config
        self.patch = patch

    def replaced(self, target: str, result: Any = None) -> Mock:
        made = Mock(return_value=result)
        self.patch.setattr(f"scforge.{target}", made)
        return made

    @cached_property
    def train(self) -> dict[str, Any]:
        """Arguments of ``Encoder.train``, those left out with its defaults."""
        return vars(TrainOptions(**from_config.train_arguments(self.config)))

    @cached_property
    def parts(self) -> tuple[Encoder, CellDataModule]:
        return from_config._model(config_data.open_source(self.config.data), self.config)

    @property
    def model(self) -> Encoder:
        return self.parts[0]

    @property
    def data(self) -> CellDataModule:
        return self.parts[1]

    @property
    def set_up(self) -> dict[str, Any]:
        return self.model.registry_["setup_args"]

    @cached_property
    def opened(self) -> dict[str, Any]:
        """Arguments with which the cells are opened."""
        query = self.replaced("data.census.CensusQuery", Mock())
        cells = self.replaced("workflows.train.open_cells")
        self.replaced("workflows.train.read_h5ad", ad.AnnData(obs={name: [0] for name in "ab"}))
        config_data.open_source(self.config.data)
        seen = arguments(query) | arguments(cells)
        return seen | {"query": query.called, "obs_columns": seen.get("obs")}

    @cached_property
    def loggers(self) -> dict[str, Any]:
        made = self.replaced("training.monitoring.make_loggers")
        from_config.train_arguments(self.config)
        return arguments(made, "loggers", "log_dir")

    @cached_property
    def scores(self) -> dict[str, Any]:
        """Arguments with which the benchmarks are made."""
        made = self.replaced("eval.callback.BenchmarkCallback")
        self.replaced("workflows.check.embedding_evaluations", [])
        from_config.train_arguments(self.config)
        return arguments(made, "benchmarks")

    @cached_property
    def tuned(self) -> dict[str, Any]:
        """Which model is fine-tuned, and the arguments of ``Encoder.finetune``."""
        model = Mock(vocab=None, registry_={"setup_args": {}})
        model.finetune.return_value = model
        load = self.replaced("estimators.hub.load_folder", model)
        self.replaced("workflows.finetune.outputs_of")
        finetuning_from_config.finetune_from_config(self.config)
        seen = arguments(model.finetune, "task", "source")
        base_model = str(load.call_args.args[1])
        return seen | {"task": seen["task"]["name"], "base_model": base_model, "evaluate": model.evaluate.called}

    @cached_property
    def written(self) -> list[str]:
        """Files that are written in the end."""
        for name in ("train", "get_latent_representation"):
            self.replaced(f"estimators.Encoder.{name}")
        write = self.replaced("workflows.train.write")
        from_config.train_from_config(self.config)
        return [call.args[0] for call in write.call_args_list]


def look(built: Built, part: str, name: str) -> Any:
    found = attrgetter(part)(built)
    return found.get(name) if isinstance(found, dict) else getattr(found, name)


def rows(section: str, values: dict[str, Any], part: str, needed: Sequence[str] = ()) -> dict[str, tuple]:
    """Cases of keys whose values arrive under their own names in a part of what is built."""
    return {f"{section}.{name}": (value, partial(look, part=part, name=name), needed) for name, value in values.items()}


TRAINING = {"max_epochs": 2, "max_steps": 3, "early_stopping": False, "early_stopping_patience": 3, "precision": "auto"}
TRAINING |= {"accelerator": "gpu", "devices": "0,1", "num_nodes": 2, "strategy": "fsdp", "gradient_clip_val": 0.1}
TRAINING |= {"accumulate_grad_batches": 4, "gradient_checkpointing": True, "layer_lr_decay": 0.5, "compile": True}
TRAINING |= {"gradual_unfreezing": 2, "ema_decay": 0.9, "log_every_n_steps": 5, "checkpoint_every_n_steps": 7}
TUNING = {"base_model": "other", "task": "regression", "labels_key": "batch", "validation_size": 0.3, "test_size": 0.3}
TUNING |= {"split_by": "batch", "split_key": "batch", "freeze": 1, "lora": {"r": 2}, "head": {"hidden_dim": 4}}
MODEL = {"num_layers": 2, "num_heads": 4, "ffn_dim": 24, "dropout": 0.5, "max_seq_len": 100, "activation": "relu"}
IN_STORE = {"obs_columns": ["donor"], "storage_options": {"anon": True}, "modality": "rna", "memory": "1GB"}
OF_CENSUS = {"organism": "mus_musculus", "filters": {"tissue": "lung"}, "census_version": "2025-01-30", "uri": "here"}
SET_UP = {"layer": "counts", "gene_key": "ensembl", "batch_key": "batch", "labels_key": "group"}
MASKING = {"mask_ratio": 0.4, "mask_token_prob": 0.7, "random_token_prob": 0.2}

CASES = {
    **rows("data", OF_CENSUS, "opened", CENSUS),
    **rows("data", IN_STORE | {"cache": "cache.zarr"}, "opened", STORE),
    **rows("data", SET_UP, "set_up"),
    **rows("data", {"max_tokens_per_batch": 512, "num_threads": 0, "pin_memory": True}, "data"),
    **rows("data.sampling", {"warmup_epochs": 3, "start": 0.25, "end": 0.5}, "data._balance", BALANCED),
    **rows("tokenizer.masking", MASKING, "model.spec.objective_options"),
    **rows("model", MODEL | {"layer_norm_eps": 0.1}, "model.spec.model_options"),
    **rows("model", {"hidden_dim": 16, "pooling": "cls"}, "model.module"),
    **rows("finetune", TUNING | {"evaluate": True}, "tuned", TUNED),
    **rows("training", TRAINING, "train"),
    **rows("training", {"batch_size": 20}, "data"),
    **rows("eval", {"benchmarks": ["label_prediction"]}, "scores"),
    **rows("eval", {"every_n_epochs": 3}, "scores", SCORES),
    **rows("eval", {"datasets": {"a": "more.h5ad"}}, "scores", ON_ATLAS),
    **rows("output", {"checkpoint_dir": "ck", "save_top_k": -1, "keep_last": 3}, "train"),
    **rows("output", {"log_dir": "logs"}, "loggers"),
    **rows("output", {"loggers": ["tensorboard"]}, "loggers", ["output.log_dir=logs"]),
    **rows("output", {"project": "atlas", "run_name": "first", "wandb_mode": "offline"}, "loggers", LOGS),
    "data.source": ("cellxgene_census", lambda b: b.opened.get("query"), []),
    "data.paths": (["more.h5ad"], lambda b: len(b.data.cells), []),
    "data.gene_vocab": ("genes.json", lambda b: b.model.vocab.n_genes, []),
    "data.max_genes": (13, lambda b: b.model.tokenizer.max_len, []),
    "data.preprocessing.hvg_selection": (30, lambda b: b.model.vocab.n_genes, []),
    "data.preprocessing.keep_genes": (
        ["gene40", "gene41", "gene42"],
        lambda b: [gene for gene in ("gene40", "gene41", "gene42") if gene in b.model.vocab.genes],
        ["data.preprocessing.hvg_selection=30"],
    ),
    "data.preprocessing.normalize": ("none", lambda b: b.model.tokenizer.transform, []),
    "data.preprocessing.target_sum": (500, lambda b: b.model.tokenizer.target_sum, []),
    "data.preprocessing.log1p": (False, lambda b: b.model.tokenizer.transform, []),
    "data.sampling.balance_key": ("group", lambda b: b.data._balance is not None, []),
    "data.split.by": ("batch", lambda b: set(b.data.cells.column("batch").to_numpy()[b.data.validation_rows]), []),
    "tokenizer.strategy": ("binned_expression", lambda b: b.model.spec.tokenizer, []),
    "objective.name": ("joint_embedding", lambda b: b.model.spec.objective, []),
    "model.architecture": ("autoregressive_transformer", lambda b: b.model.spec.architecture, []),
    "model.use_expression_values": (False, lambda b: len(b.model.module.state_dict()), []),
    "finetune.batch_key": ("batch", lambda b: b.tuned.get("batch_key"), [*TUNED, "finetune.task=integration"]),
    "training.validation_size": (0.5, lambda b: len(b.data.validation_rows), []),
    "training.optimizer.name": ("muon", lambda b: b.train["optimizer"], []),
    "training.optimizer.lr": (0.01, lambda b: b.train["lr"], []),
    "training.optimizer.weight_decay": (0.5, lambda b: b.train["weight_decay"], []),
    "training.scheduler.name": ("constant", lambda b: b.train["schedule"], []),
    "training.scheduler.warmup_steps": (2, lambda b: b.train["warmup_steps"], []),
    "output.embedding": ("out.h5ad", lambda b: b.written, []),
    "seed": (3, lambda b: (b.model.seed, b.data.seed), []),
}
"""Key to a value that is not the default, what shows that it is read, and what else has to be set for it."""

TRANSLATED = {"data.source", "data.paths", "data.gene_vocab", "data.split.by", "data.sampling.balance_key", "seed"}
TRANSLATED |= {"data.preprocessing.log1p", "data.preprocessing.normalize", "eval.benchmarks", "output.embedding"}
TRANSLATED |= {"model.architecture", "model.use_expression_values", "training.validation_size"}
"""Keys whose value does not arrive as it is written."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture
def build(files: Path, tiny_adata: ad.AnnData, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], Built]:
    monkeypatch.chdir(files)
    if not Path("cells.h5ad").exists():
        tiny_adata.layers["counts"] = tiny_adata.X.copy()
        tiny_adata.write_h5ad("cells.h5ad")
        tiny_adata[:40].copy().write_h5ad("more.h5ad")
        GeneVocab.from_genes(tiny_adata.var_names[:50]).save("genes.json")
        for name in ("base", "other"):
            Path(name).mkdir()
            Path(name, "config.json").touch()
        Path("config.yaml").write_text(BASE)
    return lambda changes: Built(load_config("config.yaml", changes), monkeypatch)


def test_every_key_has_a_case(build: Callable[[list[str]], Built]) -> None:
    names = known_names(Config)
    leaves = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
    assert leaves - {"model.vocab_size"} == set(CASES)
    with raises(ConfigError, "model.vocab_size"):  # which nobody may choose
        from_config.train_from_config(build(["model.vocab_size=100"]).config)


@pytest.mark.parametrize("key", CASES)
def test_a_changed_key_changes_what_is_built(build: Callable[[list[str]], Built], key: str) -> None:
    value, see, needed = CASES[key]
    before = see(build(needed))
    without = ["data.paths="] if key == "data.source" else []
    changed = build([*needed, f"{key}={json.dumps(value)}", *without])
    after = see(changed)
    assert after != before
    if key not in TRANSLATED:
        assert after == value


def test_what_fits_into_memory_is_tried_out_by_the_training(build: Callable[[list[str]], Built]) -> None:
    built = build(["training.batch_size=auto"])
    assert (built.train["batch_size"], built.data.batch_size) == ("auto", None)
    assert build(["training.batch_size=4"]).train["batch_size"] is None
    (callback,) = build([*SCORES, "eval.every_n_epochs=2"]).train["callbacks"]
    assert callback.every_n_epochs == 2
    assert build([*SCORES, "eval.benchmarks=[]"]).train["callbacks"] == []


PASSED_ON = {
    **rows("data", {"max_tokens_per_batch": 512, "num_threads": 0}, "tuned", TUNED),
    **rows("training", {"batch_size": 20, "gradual_unfreezing": 2, "lr": 0.01, "max_epochs": 2}, "tuned", TUNED),
    "data.labels_key": ("batch", lambda b: b.tuned.get("labels_key"), [*TUNED, "finetune.labels_key="]),
    "finetune.class_weights": ("balanced", lambda b: b.config.finetune.user_options().get("class_weights"), TUNED),
    "output.checkpoint_dir": ("ck", lambda b: b.tuned.get("checkpoint_dir"), TUNED),
    "seed": (3, lambda b: b.tuned.get("seed"), TUNED),
}


@pytest.mark.parametrize("key", PASSED_ON)
def test_fine_tuning_gets_the_other_sections(build: Callable[[list[str]], Built], key: str) -> None:
    value, see, needed = PASSED_ON[key]
    assert see(build([*needed, f"{key}={json.dumps(value)}"])) == value


@pytest.mark.parametrize("key", ["model.hidden_dim=8", "data.gene_vocab=genes.json", "data.split.by=batch"])
def test_fine_tuning_refuses_what_it_would_not_read(build: Callable[[list[str]], Built], key: str) -> None:
    with pytest.raises(ConfigError, match=r"determined by the base model in fine-tuning|has no effect in fine-tuning"):
        finetuning_from_config.finetune_from_config(build([*TUNED, key]).config)


def test_defaults_of_the_schema_are_those_of_the_training(build: Callable[[list[str]], Built]) -> None:
    config = build([]).config
    for section in ("training", "output"):
        fields = type(getattr(config, section)).model_fields
        for name in set(TrainOptions.names()) & fields.keys() - {"validation_size", "optimizer"}:
            assert fields[name].default in (None, TrainOptions.model_fields[name].default), f"{section}.{name}"
