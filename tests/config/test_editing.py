from pathlib import Path
from typing import Any

import jsonschema
import pytest

from scforge.config import Config, list_recipes, load_config, recipe_path
from scforge.config.aliases import ALIASES, known_names
from scforge.config.editing import config_schema, init_config
from scforge.config.load import parse_yaml
from scforge.errors import OptionError

HERE = Path(__file__).parent
FILES = [*map(recipe_path, list_recipes()), HERE / "custom_model.yaml", HERE / "proposal.yaml"]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    made = config_schema()
    jsonschema.Draft202012Validator.check_schema(made)
    return made


def option(schema: dict[str, Any], dotted: str) -> dict[str, Any]:
    found = schema
    for key in dotted.split("."):
        found = found["properties"][key]
        reference = found.get("$ref") or found.get("anyOf", [{}])[0].get("$ref")
        if reference:
            found = schema["$defs"][reference.rpartition("/")[2]]
    return found


def test_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert init_config() == Path("light.yaml")
    assert init_config("masked_gene", "new/mine.yaml").read_text() == recipe_path("masked_gene").read_text()
    assert load_config("new/mine.yaml").model.architecture == "transformer_encoder"
    Path("light.yaml").write_text("mine")
    with pytest.raises(OptionError, match=r"output='light\.yaml' exists; choose another name"):
        init_config()
    assert Path("light.yaml").read_text() == "mine"
    init_config(overwrite=True)
    assert Path("light.yaml").read_text() == recipe_path("light").read_text()
    with pytest.raises(OptionError, match=r"output='new' is a folder"):
        init_config(output="new", overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_schema_takes_files(schema: dict[str, Any], path: Path) -> None:
    content = parse_yaml(path.read_text(), where="file")[0]
    jsonschema.validate(content, schema)
    content |= {"training": {"batch_size": "auto", "devices": "0,1", "num_gpus": 2, "lr": 1e-4}, "model": {"mine": 3}}
    content |= {"eval": {"benchmarks": ["label_prediction", {"label_prediction": {"dataset": "a"}}]}, "tokenizer": None}
    jsonschema.validate(content | {"output": {"loggers": "csv"}}, schema)


def test_the_schema_knows_every_option_and_alias(schema: dict[str, Any]) -> None:
    assert config_schema() is not config_schema()
    for name in [*known_names(Config), *ALIASES]:
        assert option(schema, name)["description"], name


@pytest.mark.parametrize(
    "content",
    [
        {"trainig": {}},
        {"training": {"batch_size": 0}},
        {"data": ["a"]},
        {"eval": {"benchmarks": [{"a": {}, "b": {}}]}},
    ],
)
def test_the_schema_marks_mistakes(schema: dict[str, Any], content: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"data": {"paths": ["a"]}} | content, schema)
