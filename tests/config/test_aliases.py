from pathlib import Path
from typing import Any

import pytest

from scforge.config import Config, load_config
from scforge.config.aliases import ALIASES, apply_aliases, known_names
from scforge.errors import ConfigError


def nested(dotted: str, value: object) -> dict[str, Any]:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize(
    ("alias", "value", "expected"),
    [
        ("model.mask_ratio", 0.3, {"model": {}, "tokenizer": {"masking": {"mask_ratio": 0.3}}}),
        ("tokenizer.max_len", 7, {"tokenizer": {}, "data": {"max_genes": 7}}),
        ("training.lr", 1e-4, {"training": {"optimizer": {"lr": 1e-4}}}),
        ("finetune.data", "a.h5ad", {"finetune": {}, "data": {"paths": "a.h5ad"}}),
        ("finetune.data", {"obs": ["a"]}, {"finetune": {}, "data": {"obs_columns": ["a"]}}),
        ("training.num_gpus", 0, {"training": {"accelerator": "cpu", "devices": 1}}),
    ],
)
def test_each_alias_moves(alias: str, value: object, expected: dict[str, Any]) -> None:
    raw = nested(alias, value)
    assert apply_aliases(raw) == expected
    assert apply_aliases(expected) == expected
    assert raw == nested(alias, value)


def test_the_table_fits_the_schema() -> None:
    known = known_names(Config)
    assert set(ALIASES.values()) <= set(known)
    assert not set(ALIASES) & set(known)


@pytest.mark.parametrize(("alias", "canonical"), [item for item in ALIASES.items() if item[0] != "training.num_gpus"])
def test_alias_and_canonical_must_agree(alias: str, canonical: str) -> None:
    section, key = alias.split(".")
    raw = nested(canonical, 0.5)
    raw.setdefault(section, {})[key] = 0.5
    assert apply_aliases(raw) == {section: {}} | nested(canonical, 0.5)
    raw[section][key] = 0.25
    with pytest.raises(ConfigError, match="set the same option to different values") as caught:
        apply_aliases(raw)
    assert alias in str(caught.value)
    assert canonical in str(caught.value)


@pytest.mark.parametrize(
    "training",
    [
        {"num_gpus": 4, "accelerator": "cpu"},
        {"num_gpus": -1},
        {"num_gpus": True},
        {"lr": 1e-4, "optimizer": 5},
    ],
)
def test_what_an_alias_refuses(training: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"num_gpus|training\.optimizer must be a section"):
        apply_aliases({"training": training})


@pytest.mark.parametrize(("given", "kept"), [("auto", "gpu"), ("cuda", "cuda")])
def test_num_gpus_keeps_a_fitting_accelerator(given: str, kept: str) -> None:
    assert apply_aliases({"training": {"num_gpus": 2, "accelerator": given}})["training"]["accelerator"] == kept


def test_no_gpus_in_place_of_those_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("data: {paths: a.h5ad}\ntraining:\n  num_gpus: 4\n")
    config = load_config(path)
    assert config.place_of("training.devices") == f"{path}, line 3: "
    training = load_config(path, ["training.num_gpus=0"]).training
    assert (training.accelerator, training.devices) == ("cpu", 1)
