from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from scforge.config import Config, ModelConfig
from scforge.config.schema import DataConfig, MaskingConfig, TokenizerConfig, TrainingConfig


def test_options_of_an_architecture() -> None:
    given = {"architecture": "transformer_encoder", "vocab_size": 5000, "num_heads": 8, "pooling": "mean", "n_bins": 51}
    config = ModelConfig(**given)
    assert {name: getattr(config, name) for name in given} == given
    assert config.user_options() == {"num_heads": 8, "pooling": "mean", "n_bins": 51}
    config = ModelConfig(hidden_dim=512)  # as by default, but set
    config.num_layers = 2
    config.vocab_size = 10
    assert config.user_options() == {"hidden_dim": 512, "num_layers": 2}
    assert ModelConfig(vocab_size=None).user_options() == {}
    tokenizer = TokenizerConfig(strategy="rank_value", append_cls=False, masking={"mask_ratio": 0.3})
    assert tokenizer.user_options() == {"append_cls": False}


@pytest.mark.parametrize(
    ("section", "options"),
    [
        (ModelConfig, {"hidden_dim": 0}),
        (ModelConfig, {"dropout": 1.0}),
        (ModelConfig, {"pooling": ""}),
        (MaskingConfig, {"mask_ratio": 0.0}),
        (MaskingConfig, {"mask_token_prob": -0.1}),
        (MaskingConfig, {"random_token_prob": 0.5, "mask_token_prob": 0.6}),
        *((TrainingConfig, {"devices": devices}) for devices in (0, -2, True, 1.5, "all", "", "0,", None, [0])),
    ],
)
def test_what_a_section_refuses(section: type[BaseModel], options: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        section(**options)


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


def test_one_path_becomes_a_list_and_an_option_moves(tmp_path: Path) -> None:
    assert DataConfig(paths="a.h5ad").paths == ["a.h5ad"]
    assert DataConfig(paths=tmp_path / "a.h5ad").paths == [str(tmp_path / "a.h5ad")]
    moved = Config(data=DataConfig(paths="a.h5ad"), tokenizer=TokenizerConfig(strategy="rank_value", max_genes=7))
    assert moved.data.max_genes == 7
    assert moved.tokenizer.user_options() == {}


def test_user_set_finds_what_was_assigned_into_default_sections() -> None:
    config = Config(data={"paths": "a.h5ad"})
    assert config.user_set() == {"data": {"paths": ["a.h5ad"]}}
    config.training.optimizer.lr = 0.1
    config.seed = 3
    assert config.user_set() == {"data": {"paths": ["a.h5ad"]}, "training": {"optimizer": {"lr": 0.1}}, "seed": 3}
