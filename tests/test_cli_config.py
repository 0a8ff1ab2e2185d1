import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scforge.cli import main
from scforge.config import list_recipes, recipe_path

CONFIG = """\
data:
  paths: [cells.h5ad]
  max_genes: 30
model:
  architecture: transformer_encoder
  hidden_dim: 8
  num_layers: 1
  num_heads: 2
training:
  batch_size: 16
output:
  checkpoint_dir: ck
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    Path("recipe.yaml").write_text(CONFIG)
    return folder


def test_check_takes_the_usual_folder(folder: Path) -> None:
    Path("plain.yaml").write_text("data: {paths: cells.h5ad}\ntraining: {checkpoint_every_n_steps: 5}\n")
    assert main(["config", "check", "plain.yaml"]) == 0
    assert main(["config", "check", "plain.yaml", "output.checkpoint_dir="]) == 2


def test_init_check_and_show(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "init", "masked_gene", "-o", "mine.yaml"]) == 0
    assert Path("mine.yaml").read_text() == recipe_path("masked_gene").read_text()
    assert capsys.readouterr().out.startswith("Wrote mine.yaml. ")
    assert main(["config", "init", "masked_gene", "-o", "mine.yaml", "--overwrite"]) == 0
    capsys.readouterr()
    assert main(["config", "check", "mine.yaml", "data.paths=cells.h5ad"]) == 0
    line = "mine.yaml is fine: transformer_encoder on tokens of rank_value, trained by masked_gene_prediction.\n"
    assert capsys.readouterr().out == line
    assert main(["config", "show", "mine.yaml", "seed=4"]) == 0
    shown = capsys.readouterr().out
    assert "  num_heads: 4\n" in shown
    assert shown.endswith("seed: 4\n")


def test_list_and_schema(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "init", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == list_recipes()
    assert main(["config", "schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert main(["config", "schema", "-o", "schema.json"]) == 0
    assert json.loads(Path("schema.json").read_text()) == printed
    assert capsys.readouterr().out == ""
    assert not list(Path.cwd().glob("light.yaml"))


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("check none.yaml", "config='none.yaml' cannot be read: No such file or directory; "),
        ("check tabs.yaml", "tabs.yaml, line 10, column 1 is not valid YAML: "),
        ("show recipe.yaml model.architecture=bert", "architecture='bert' is not known (known: "),
        ("init -o recipe.yaml", "output='recipe.yaml' exists; choose another name"),
        ("init lite", "recipe='lite' is not known; did you mean 'light'?"),
        ("init -o recipe.yaml/x.yaml", "recipe.yaml"),
        ("", "--help)"),
    ],
)
def test_mistakes(told: Callable[..., str], line: str, part: str) -> None:
    Path("tabs.yaml").write_text(CONFIG.replace("  batch_size", "\tbatch_size"))
    assert part in told("config", *line.split())
