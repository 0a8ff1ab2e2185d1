import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
FALLBACK = PYPROJECT["tool"]["hatch"]["version"]["fallback-version"]
META = yaml.safe_load((ROOT / "packaging" / "meta.yaml").read_text())
RECIPE = yaml.safe_load((ROOT / "packaging" / "recipe.yaml").read_text())
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
PYTHONS = [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]


def contents(builder: type) -> dict[str, int]:
    included = builder(str(ROOT)).recurse_included_files()
    return {file.distribution_path.replace("\\", "/"): Path(file.path).stat().st_size for file in included}


def test_wheel_is_the_package_and_nothing_else():
    wheel = contents(WheelBuilder)
    tree = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "scforge").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".DS_Store"
    }
    assert set(wheel) == tree
    names = {
        "config/recipes/light.yaml",
        "data/tables/human_genes.csv.gz",
        "datasets/cards/pbmc3k.yaml",
        "datasets/data/lung_cell_lines.h5ad",
        "datasets/data/pbmc3k.h5ad",
        "datasets/splits/pbmc3k-v1.csv.gz",
        "hub/models/human-blood/reference.safetensors",
        "hub/models/pbmc3k-light/model.safetensors",
        "hub/registry.json",
        "py.typed",
    }
    assert {f"scforge/{name}" for name in names} <= set(wheel)
    assert not [name for name in wheel if "/tests/" in name or Path(name).name.startswith(("test_", "conftest"))]
    kinds = {Path(name).suffix.removeprefix(".") for name in wheel}
    assert kinds == {"gz", "h5ad", "json", "md", "py", "safetensors", "typed", "yaml"}
    assert sum(wheel.values()) < 16e6


def test_sdist_can_be_built_and_tested():
    sdist = contents(SdistBuilder)
    # The builder itself adds pyproject.toml and the license.
    assert {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "README.md", "constraints.txt"} <= set(sdist)
    assert {"docs/api.md", "packaging/meta.yaml", "src/scforge/_version.py", "tests/conftest.py"} <= set(sdist)
    assert sum(sdist.values()) < 25e6
    built = ("docs/_build/", "docs/generated/", "docs/notebooks/", "quickstart/")
    assert not [name for name in sdist if name.startswith(built) or "__pycache__" in name]


def test_links_of_the_readme_work_on_pypi():
    text = ProjectMetadata(str(ROOT), PluginManager()).core.readme
    links = re.findall(r"""\]\(([^)]+)\)|(?:src|srcset|href)="([^"]+)\"""", text)
    assert len(links) > 8
    assert not [link for pair in links for link in pair if link and not link.startswith("https://")]
    names = re.findall(r"readthedocs\.io/en/latest/(\w+)\.html", text)
    assert names
    assert all((ROOT / "docs" / f"{name}.md").is_file() for name in names)


def test_nothing_under_the_gpl_is_imported():
    imported = re.compile(r"^\s*(?:import|from) (?:harmonypy|igraph|leidenalg|louvain)\b", re.MULTILINE)
    assert not [path.name for path in (ROOT / "src").rglob("*.py") if imported.search(path.read_text("utf-8"))]


def test_ecosystem_entry_and_citation_agree_with_the_project():
    assert META["name"] == META["install"]["pypi"] == PROJECT["name"]
    assert META["description"] == PROJECT["description"]
    assert META["license"] == CITATION["license"] == PROJECT["license"]
    assert META["project_home"] == PROJECT["urls"]["Homepage"]
    assert META["documentation_home"] == CITATION["url"] == PROJECT["urls"]["Documentation"]
    assert META["category"] == "ecosystem"
    assert "version" not in META, "the list reads it from PyPI"
    (group,) = re.findall(r"--group (\S+)", META["test_command"])
    assert any(str(requirement).startswith("pytest>") for requirement in PYPROJECT["dependency-groups"][group])
    assert CITATION["title"] == f"{PROJECT['name']}: {PROJECT['description'][0].lower()}{PROJECT['description'][1:]}"
    assert CITATION["repository-code"] == PROJECT["urls"]["Source"]
    assert [author["name"] for author in CITATION["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert not {"version", "date-released"} & set(CITATION), "it would grow old"


def test_recipe_of_conda_agrees_with_the_project():
    other_names = {"huggingface_hub": "huggingface-hub", "matplotlib-base": "matplotlib", "pytorch": "torch"}

    def requirements(section: str) -> set[str]:
        lines = (line.split(" ", 1) for line in RECIPE["requirements"][section] if "python_min" not in line)
        return {other_names.get(name, name) + "".join(limits) for name, *limits in lines} - {"pip"}

    def wanted(texts: list[str]) -> set[str]:
        return {
            requirement.name + ",".join(sorted(map(str, requirement.specifier), reverse=True))
            for requirement in map(Requirement, texts)
        }

    assert requirements("run") == wanted(PROJECT["dependencies"])
    assert requirements("host") == wanted(PYPROJECT["build-system"]["requires"])
    assert RECIPE["context"]["version"] == FALLBACK
    assert RECIPE["build"]["python"]["entry_points"] == [f"{k} = {v}" for k, v in PROJECT["scripts"].items()]
    assert RECIPE["about"]["summary"] == PROJECT["description"]
    assert RECIPE["about"]["license"] == PROJECT["license"]


def test_the_newest_section_of_the_changelog_is_the_released_version():
    (newest, *_) = re.findall(
        r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert newest == FALLBACK


@pytest.mark.skipif(not (ROOT / ".github" / "workflows").is_dir(), reason="not a checkout")
def test_workflows():
    folder = ROOT / ".github" / "workflows"
    matrix = yaml.safe_load((folder / "test.yaml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert matrix["python"] == PYTHONS
    assert {entry["python"] for entry in matrix["include"]} <= set(PYTHONS)
    systems = {"ubuntu": "POSIX :: Linux", "macos": "MacOS :: MacOS X"}
    tested = {*matrix["os"], *(entry["os"] for entry in matrix["include"])}
    named = {c.removeprefix("Operating System :: ") for c in PROJECT["classifiers"] if c.startswith("Operating")}
    assert {systems[system.split("-")[0]] for system in tested} == named
    text = "".join(path.read_text() for path in folder.glob("*.yaml"))
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert not [action for action in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)]
    assert not re.findall(r"uvx (?!\w+@)\S+", text)
    publish = yaml.safe_load((folder / "release.yaml").read_text())["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert not [step for step in publish["steps"] if "run" in step or "checkout" in step["uses"]]


COMPATIBLE = re.compile(
    r"Apache|\bMIT\b|BSD|\bISC\b|\bPSF|Python Software Foundation|MPL|Mozilla|matplotlib|Kiwi|NVIDIA|MIT-CMU|Zlib|CC0"
)
COPYLEFT = re.compile(r"(?<!L)A?GPL|(?<!Lesser )General Public|Affero")
UNSTATED = {"cuda-toolkit": "NVIDIA", "python-dateutil": "Apache-2.0", "sparsecca": "BSD-3-Clause"}
"""Licenses of packages whose metadata name none."""
UNAVOIDABLE = {"igraph": "scib-metrics"}
"""GPL packages that a package of ours requires; scforge itself must not import them."""


def required_packages() -> dict[str, set[str]]:
    """Return what is installed with scforge, each with the packages that require it."""
    found: dict[str, set[str]] = {}
    todo = [("scforge", text, "") for text in PROJECT["dependencies"]]
    seen = set()
    while todo:
        if (step := todo.pop()) in seen:
            continue
        seen.add(step)
        parent, text, extra = step
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found.setdefault(name, set()).add(parent)
        for one in ("", *requirement.extras):
            todo += [(name, text, one) for text in distribution(name).requires or []]
    return found


def license_of(name: str) -> str:
    """Return the license that a package states: an expression, or classifiers and the first line of the text."""
    meta = distribution(name).metadata
    if "License-Expression" in meta:
        return meta["License-Expression"]
    stated = [c.rsplit(" :: ", 1)[1] for c in meta.get_all("Classifier", []) if c.startswith("License ::")]
    if "License" in meta:
        stated += meta["License"].strip().splitlines()[:1]
    return "; ".join(stated)


def test_licenses_of_what_is_required_are_compatible():
    required = required_packages()
    assert {"torch", "scanpy", "numpy"} <= set(required)
    licenses = {name: UNSTATED.get(name) or license_of(name) for name in required}
    odd = {
        f"{name} ({license}), required by {', '.join(sorted(required[name]))}"
        for name, license in licenses.items()
        if name not in UNAVOIDABLE and (COPYLEFT.search(license) or not COMPATIBLE.search(license))
    }
    assert not odd
    # The exceptions are in use, and not ours.
    assert {name: required[name] for name in UNAVOIDABLE} == {name: {by} for name, by in UNAVOIDABLE.items()}
    assert all(COPYLEFT.search(licenses[name]) for name in UNAVOIDABLE)
