"""The sections on their own: defaults, checks, what the user set."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from scforge.config import Config, DataConfig, MaskingConfig, ModelConfig, TokenizerConfig, TrainingConfig
from scforge.config.schema import Section


def test_importing_the_room_imports_no_torch() -> None:
    code = "import sys, scforge.config, scforge.config.schema, scforge.config.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_model_config_as_the_reference_uses_it() -> None:
    config = ModelConfig(
        architecture="transformer_encoder",
        vocab_size=5000,
        hidden_dim=512,
        num_layers=12,
        num_heads=8,
        dropout=0.1,
        pooling="mean",
    )
    assert (config.vocab_size, config.hidden_dim, config.pooling, config.max_seq_len) == (5000, 512, "mean", 2048)
    config.architecture = "autoregressive_transformer"
    assert config.architecture == "autoregressive_transformer"


def test_model_config_keeps_options_of_an_architecture() -> None:
    config = ModelConfig(architecture="autoregressive_transformer", vocab_size=9, n_bins=51, expression_loss_weight=0.5)
    assert config.n_bins == 51
    assert config.user_options() == {"n_bins": 51, "expression_loss_weight": 0.5}


def test_user_options_are_those_that_differ_in_being_set_not_in_value() -> None:
    assert ModelConfig(vocab_size=None).user_options() == {}
    assert ModelConfig(hidden_dim=512).user_options() == {"hidden_dim": 512}
    config = ModelConfig()
    config.num_layers = 2
    config.vocab_size = 10
    assert config.user_options() == {"num_layers": 2}


def test_other_open_sections_separate_their_options() -> None:
    tokenizer = TokenizerConfig(strategy="rank_value", append_cls=False, masking={"mask_ratio": 0.3})
    assert tokenizer.user_options() == {"append_cls": False}


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_dim": 0},
        {"hidden_dim": True},
        {"num_layers": -1},
        {"num_heads": 1.5},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"dropout": float("nan")},
        {"layer_norm_eps": 0},
        {"vocab_size": 0},
        {"pooling": ""},
    ],
)
def test_model_config_refuses(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ModelConfig(**options)


def test_assignments_are_checked() -> None:
    config = ModelConfig()
    with pytest.raises(ValidationError):
        config.hidden_dim = -3
    assert config.hidden_dim == 512
    masking = MaskingConfig()
    with pytest.raises(ValidationError, match="sum to"):
        masking.mask_token_prob = 0.95
    assert masking.mask_token_prob == 0.8


@pytest.mark.parametrize(
    "options",
    [
        {"mask_ratio": 0.0},
        {"mask_ratio": 1.0},
        {"mask_token_prob": -0.1},
        {"random_token_prob": 1.1},
        {"mask_token_prob": 0.6, "random_token_prob": 0.5},
        {"mask_token_prob": 1.0},
    ],
)
def test_masking_refuses(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        MaskingConfig(**options)


def test_masking_accepts_probabilities_that_sum_to_one() -> None:
    assert MaskingConfig(mask_token_prob=0.9, random_token_prob=0.1).random_token_prob == 0.1
    assert MaskingConfig(mask_token_prob=1.0, random_token_prob=0.0).mask_token_prob == 1.0


def test_one_path_becomes_a_list(tmp_path: Path) -> None:
    assert DataConfig(paths="a.h5ad").paths == ["a.h5ad"]
    assert DataConfig(paths=tmp_path / "a.h5ad").paths == [str(tmp_path / "a.h5ad")]
    assert DataConfig(paths=["a.h5ad", tmp_path]).paths == ["a.h5ad", str(tmp_path)]
    with pytest.raises(ValidationError):
        DataConfig(paths=[])


@pytest.mark.parametrize("devices", [1, 4, -1, "auto", "0,1", "3"])
def test_devices(devices: int | str) -> None:
    assert TrainingConfig(devices=devices).devices == devices


@pytest.mark.parametrize("devices", [0, -2, True, 1.5, "all", "", "0,", None, [0]])
def test_devices_refuses(devices: object) -> None:
    with pytest.raises(ValidationError, match="devices"):
        TrainingConfig(devices=devices)


def test_user_set_finds_what_was_assigned_into_default_sections() -> None:
    config = Config(data={"paths": "a.h5ad"})
    assert config.user_set() == {"data": {"paths": ["a.h5ad"]}}
    config.training.optimizer.lr = 0.1
    config.seed = 3
    assert config.user_set() == {"data": {"paths": ["a.h5ad"]}, "training": {"optimizer": {"lr": 0.1}}, "seed": 3}


def test_sections_given_as_objects() -> None:
    training = TrainingConfig(batch_size=8)
    config = Config(data=DataConfig(paths="a.h5ad"), training=training)
    assert config.training is training
    moved = Config(data=DataConfig(paths="a.h5ad"), tokenizer=TokenizerConfig(strategy="rank_value", max_genes=7))
    assert moved.data.max_genes == 7
    assert moved.tokenizer.user_options() == {}


def _sections(schema: type[BaseModel]) -> list[type[BaseModel]]:
    found = [schema]
    for field in schema.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += _sections(field.annotation)
    return found


@pytest.mark.parametrize("section", _sections(Config), ids=lambda section: section.__name__)
def test_every_option_is_documented(section: type[BaseModel]) -> None:
    assert issubclass(section, Section)
    described = {
        name.strip()
        for line in section.__doc__.splitlines()
        if line.startswith("    ") and not line.startswith("        ")
        for name in line.split(",")
    }
    assert set(section.model_fields) <= described
