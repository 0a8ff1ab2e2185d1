"""The sections on their own: defaults, checks, what the user set."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from scforge.config import Config, DataConfig, MaskingConfig, ModelConfig, TokenizerConfig, TrainingConfig
from scforge.config.schema import Section


def test_options_of_an_architecture() -> None:
    given = {"architecture": "transformer_encoder", "vocab_size": 5000, "num_heads": 8, "pooling": "mean", "n_bins": 51}
    config = ModelConfig(**given)
    assert {name: getattr(config, name) for name in given} == given
    assert config.user_options() == {"num_heads": 8, "pooling": "mean", "n_bins": 51}
    config = ModelConfig(hidden_dim=512)  # as by default, but set
    config.architecture = "autoregressive_transformer"
    config.num_layers = 2
    config.vocab_size = 10
    assert (config.architecture, config.user_options()) == (
        "autoregressive_transformer",
        {"hidden_dim": 512, "num_layers": 2},
    )
    assert ModelConfig(vocab_size=None).user_options() == {}
    tokenizer = TokenizerConfig(strategy="rank_value", append_cls=False, masking={"mask_ratio": 0.3})
    assert tokenizer.user_options() == {"append_cls": False}


@pytest.mark.parametrize(
    ("section", "options"),
    [
        (ModelConfig, {"hidden_dim": 0}),
        (ModelConfig, {"hidden_dim": True}),
        (ModelConfig, {"num_heads": 1.5}),
        (ModelConfig, {"dropout": 1.0}),
        (ModelConfig, {"dropout": float("nan")}),
        (ModelConfig, {"layer_norm_eps": 0}),
        (ModelConfig, {"pooling": ""}),
        (MaskingConfig, {"mask_ratio": 0.0}),
        (MaskingConfig, {"mask_ratio": 1.0}),
        (MaskingConfig, {"mask_token_prob": -0.1}),
        (MaskingConfig, {"random_token_prob": 1.1}),
        (MaskingConfig, {"random_token_prob": 0.5, "mask_token_prob": 0.6}),
        (DataConfig, {"paths": []}),
        *((TrainingConfig, {"devices": devices}) for devices in (0, -2, True, 1.5, "all", "", "0,", None, [0])),
    ],
)
def test_what_a_section_refuses(section: type[BaseModel], options: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        section(**options)


@pytest.mark.parametrize("devices", [1, -1, "auto", "0,1"])
def test_devices(devices: int | str) -> None:
    assert TrainingConfig(devices=devices).devices == devices


def test_assignments_are_checked() -> None:
    config = ModelConfig()
    with pytest.raises(ValidationError):
        config.hidden_dim = -3
    assert config.hidden_dim == 512
    masking = MaskingConfig()
    with pytest.raises(ValidationError, match="sum to"):
        masking.mask_token_prob = 0.95
    assert masking.mask_token_prob == 0.8
    masking.mask_token_prob = 0.9  # 1 with that of a random token
    assert masking.mask_token_prob == 0.9


def test_one_path_becomes_a_list(tmp_path: Path) -> None:
    assert DataConfig(paths="a.h5ad").paths == ["a.h5ad"]
    assert DataConfig(paths=tmp_path / "a.h5ad").paths == [str(tmp_path / "a.h5ad")]
    assert DataConfig(paths=["a.h5ad", tmp_path]).paths == ["a.h5ad", str(tmp_path)]


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
