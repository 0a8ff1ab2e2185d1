import ast
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
GROUPS = PYPROJECT["dependency-groups"]
ALONE = ("census", "cz")  # extras with an environment of their own


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def tracked_files() -> list[Path]:
    try:
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def pins_of(name: str) -> list[str]:
    pins = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    odd = [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[\w.+!]+( ; .+)?", pin)]
    assert not odd, f"{name} holds pins only, without addresses or extras"
    return pins


def test_everything_installed_is_pinned():
    pins = pins_of("constraints.txt")
    groups = [entry for group in GROUPS.values() for entry in group if isinstance(entry, str)]
    extras = [
        r for name, extra in PROJECT["optional-dependencies"].items() if name not in {"all", *ALONE} for r in extra
    ]
    missing = {name_of(r) for r in [*PROJECT["dependencies"], *groups, *extras]} - {name_of(pin) for pin in pins}
    assert not missing, "renew with: make constraints"

    for extra in ALONE:
        wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra], *GROUPS["test"]]
        missing = {name_of(r) for r in wanted} - {name_of(pin) for pin in pins_of(f"constraints-{extra}.txt")}
        assert not missing, "renew with: make constraints"


def test_known_unsafe_readers_are_not_installed():
    floors = {"torch": "2.9.1", "zarr": "3.1.3", "zarrs": "0.2.0"}  # the last releases that are too old
    required = {name_of(text): Requirement(text) for text in PROJECT["dependencies"]}
    assert not [name for name, version in floors.items() if required[name].specifier.contains(version)]


def test_extra_all_is_every_extra_that_goes_with_the_others():
    (everything,) = PROJECT["optional-dependencies"]["all"]
    named = set(re.search(r"\[(.*)\]", everything)[1].split(","))
    assert named == set(PROJECT["optional-dependencies"]) - {"all", *ALONE}


# Written in pieces, so that this file does not match itself.
MACHINE_PATH = r"(?<![\w.:/~>}-])/(?:home|root|Users|work)" + r"/[\w.]+"
REGISTRY_HOST = r"\b(?:py" + r"pi\.org|pythonhosted\.org|extra-index-" + r"url|find-" + r"links)\b"


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY_HOST], ids=["machine path", "registry host"])
def test_no_file_names(pattern):
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # binary data
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in re.finditer(pattern, text)]
    assert not found


def test_warnings_point_at_the_line_of_the_user():
    # errors.warn finds that line whatever the depth; a number is wrong as soon as a function moves.
    found = [path for path in (ROOT / "src").rglob("*.py") if "stacklevel=" in path.read_text(encoding="utf-8")]
    assert [str(path.relative_to(ROOT)) for path in found] == []


def test_files_that_the_design_names_exist():
    named = set(re.findall(r"`([a-z_/]+\.py)(?:::\w+)?`", (ROOT / "docs" / "design.md").read_text(encoding="utf-8")))
    tests = {name for name in named if Path(name).name.startswith("test_")}
    assert min(len(tests), len(named - tests)) > 10
    assert [name for name in sorted(named - tests) if not (ROOT / "src" / "scforge" / name).is_file()] == []
    assert [name for name in sorted(tests) if not list((ROOT / "tests").rglob(name))] == []


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_have_cells_with_ids_of_their_own_and_no_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    ids = [cell["id"] for cell in cells]
    assert len(set(ids)) == len(ids)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_constants_are_above_definitions_that_they_do_not_need():
    wrong = []
    for path in sorted((ROOT / "src" / "scforge").rglob("*.py")):
        defined: set[str] = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.TypeAlias):
                defined.add(node.name.id if isinstance(node, ast.TypeAlias) else node.name)
            elif isinstance(node, ast.Assign) and defined:
                names = {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
                if defined & {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}:
                    defined |= names
                elif all(re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name) for name in names):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


ACROSS_MODULES = ("contracts", "docs", "security", "seeds", "soma")
"""Folders of tests that are not about one module."""


def test_files_of_tests_are_named_after_a_module():
    package = ROOT / "src" / "scforge"
    misnamed = []
    for path in tracked_files():
        if not path.is_relative_to(ROOT / "tests") or not re.fullmatch(r"test_\w+\.py", path.name):
            continue
        folder = path.parent.relative_to(ROOT / "tests")
        if folder == Path() or folder.parts[0] in ACROSS_MODULES:
            continue
        words = path.stem.removeprefix("test_").split("_")
        modules = ["_".join(words[:n]) for n in range(1, len(words) + 1)]  # what follows is an aspect of it
        names = [name for module in modules for name in (module, f"{module}.py", f"_{module}.py")]
        if not any((package / folder / name).exists() for name in names):
            misnamed.append(str(path.relative_to(ROOT)))
    assert not misnamed
