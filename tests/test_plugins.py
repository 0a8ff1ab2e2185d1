import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from scforge._registry import Registry
from scforge.errors import OptionError, ScforgeError
from scforge.models import list_models
from scforge.models.registry import MODELS
from scforge.training import get_objective, list_objectives

EXAMPLE = Path(__file__).parents[1] / "docs" / "example_plugin"


@pytest.mark.slow
def test_the_example_is_installed_and_works(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=EXAMPLE, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # In a process of its own, away from the sources, so that what is tested is what was installed.
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests")]
    done = subprocess.run(test, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, content: str, group: str, **names: str) -> None:
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(content)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        points = "".join(f"{key} = {module}:{value}\n" for key, value in names.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{points}")
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


@pytest.mark.parametrize(
    ("content", "said"),
    [("import not_installed", "No module named 'not_installed'"), ("1 / 0", "division by zero"), ("", "has no attr")],
)
def test_a_broken_plugin_breaks_nothing_else(install, content: str, said: str) -> None:
    install("broken-plugin", content, "scforge.models", broken="Model")
    assert "broken" in list_models()
    assert MODELS.get("gene_pooling") is not None
    with pytest.raises(ScforgeError, match="architecture 'broken'.* package 'broken-plugin'.*imported: .*" + said):
        MODELS.get("broken")


def test_a_plugin(install) -> None:
    install("their-plugin", "class Thing: pass", "scforge.things", theirs="Thing")
    registry = Registry("thing", group="scforge.things")
    assert registry.names() == ["theirs"]
    value = registry.get("theirs")
    assert (value.__name__, value.__module__) == ("Thing", "their_plugin")
    registry.register("theirs")(value)  # as a plugin that registers itself does
    assert registry.get("theirs") is value


def test_two_packages_of_one_name(install) -> None:
    install("plugin-a", "class Objective: pass", "scforge.objectives", same="Objective")
    install("plugin-b", "class Objective: pass", "scforge.objectives", same="Objective")
    assert list_objectives().count("same") == 1
    with pytest.raises(
        OptionError, match="objective 'same' is provided by the packages 'plugin-a', 'plugin-b'; keep only one"
    ):
        get_objective("same")
