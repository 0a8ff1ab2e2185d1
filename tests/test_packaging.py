"""What is published holds what it must, and every file that describes the package says the same of it."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import scforge

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
FALLBACK = PYPROJECT["tool"]["hatch"]["version"]["fallback-version"]
META = yaml.safe_load((ROOT / "packaging" / "meta.yaml").read_text())
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
PYTHONS = [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]


def contents(builder: type) -> dict[str, int]:
    """Return the paths and sizes, in bytes, of the files that a distribution takes in."""
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
        "datasets/data/pbmc3k.h5ad",
        "datasets/splits/pbmc3k-v1.csv.gz",
        "hub/models/pbmc3k-light/model.safetensors",
        "hub/registry.json",
        "py.typed",
    }
    assert {f"scforge/{name}" for name in names} <= set(wheel)
    assert not [name for name in wheel if "/tests/" in name or Path(name).name.startswith(("test_", "conftest"))]
    kinds = {Path(name).suffix.removeprefix(".") for name in wheel}
    assert kinds == {"gz", "h5ad", "json", "md", "py", "safetensors", "typed", "yaml"}
    assert sum(wheel.values()) < 12e6


def test_sdist_can_be_built_and_tested():
    sdist = contents(SdistBuilder)
    # The builder itself adds pyproject.toml and the license.
    assert {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "README.md", "constraints.txt"} <= set(sdist)
    assert {"docs/api.md", "packaging/meta.yaml", "src/scforge/_version.py", "tests/conftest.py"} <= set(sdist)
    assert sum(sdist.values()) < 25e6
    built = ("docs/_build/", "docs/generated/", "docs/notebooks/", "quickstart/")
    assert not [name for name in sdist if name.startswith(built) or "__pycache__" in name]


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with what the version is made from, and git in it, without any tag."""
    if not shutil.which("git"):
        pytest.skip("git is not there")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    """Run git, whoever calls and whatever is configured."""
    who = ["-c", "user.name=scforge", "-c", "user.email=scforge@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True)


def commit(folder: Path) -> None:
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "Something")


def version_of(folder: Path) -> str:
    return ProjectMetadata(str(folder), PluginManager()).version


def test_versions_of_a_checkout(checkout):
    version = Version(version_of(checkout))
    assert version.is_devrelease
    assert version.local.startswith("g")
    assert version > Version(FALLBACK)
    git(checkout, "tag", "v7.3.0")
    assert version_of(checkout) == "7.3.0"
    commit(checkout)
    assert re.fullmatch(r"7\.3\.1\.dev1\+g[0-9a-f]+", version_of(checkout))
    shutil.rmtree(checkout / ".git")
    assert version_of(checkout) == FALLBACK


def test_a_tree_that_is_not_installed_can_be_imported():
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import scforge; print(scforge.__version__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0+unknown\n"
    assert Version(done.stdout.strip())


def test_links_of_the_readme_work_on_pypi(checkout):
    text = ProjectMetadata(str(checkout), PluginManager()).core.readme
    links = re.findall(r"""\]\(([^)]+)\)|(?:src|srcset|href)="([^"]+)\"""", text)
    assert len(links) > 8
    assert not [link for pair in links for link in pair if link and not link.startswith("https://")]
    names = re.findall(r"readthedocs\.io/en/latest/(\w+)\.html", text)
    assert names
    assert all((ROOT / "docs" / f"{name}.md").is_file() for name in names)


# What Apache-2.0 can require. NVIDIA's own terms are those of the libraries in torch's wheels for CUDA.
COMPATIBLE = re.compile(
    r"Apache|\bMIT\b|BSD|\bISC\b|\bPSF|Python Software Foundation|MPL|Mozilla|matplotlib|Kiwi|NVIDIA|MIT-CMU|Zlib|CC0"
)
COPYLEFT = re.compile(r"(?<!L)A?GPL|(?<!Lesser )General Public|Affero")
UNSTATED = {"cuda-toolkit": "NVIDIA", "python-dateutil": "Apache-2.0", "sparsecca": "BSD-3-Clause"}
"""Licences of packages whose metadata name none."""
UNAVOIDABLE = {"igraph": "scib-metrics"}
"""GPL packages that a package of ours requires; scforge itself must not import them."""
GPL_MODULES = {"harmonypy", "igraph", "leidenalg", "louvain"}


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


def licence_of(name: str) -> str:
    """Return the licence that a package states: an expression, or classifiers and the first line of the text."""
    meta = distribution(name).metadata
    if "License-Expression" in meta:
        return meta["License-Expression"]
    stated = [c.rsplit(" :: ", 1)[1] for c in meta.get_all("Classifier", []) if c.startswith("License ::")]
    if "License" in meta:
        stated += meta["License"].strip().splitlines()[:1]
    return "; ".join(stated)


def test_licences_of_what_is_required_are_compatible():
    required = required_packages()
    assert {"torch", "scanpy", "numpy"} <= set(required)
    licences = {name: UNSTATED.get(name) or licence_of(name) for name in required}
    odd = {
        f"{name} ({licence}), required by {', '.join(sorted(required[name]))}"
        for name, licence in licences.items()
        if name not in UNAVOIDABLE and (COPYLEFT.search(licence) or not COMPATIBLE.search(licence))
    }
    assert not odd
    # The exceptions are in use, and not ours.
    assert {name: required[name] for name in UNAVOIDABLE} == {name: {by} for name, by in UNAVOIDABLE.items()}
    assert all(COPYLEFT.search(licences[name]) for name in UNAVOIDABLE)


def test_nothing_under_the_gpl_is_imported():
    imported = re.compile(rf"^\s*(?:import|from) (?:{'|'.join(sorted(GPL_MODULES))})\b", re.MULTILINE)
    assert not [path.name for path in (ROOT / "src").rglob("*.py") if imported.search(path.read_text("utf-8"))]


def test_command_of_the_package_can_be_called():
    (script,) = [point for point in entry_points(group="console_scripts") if point.name == "scforge"]
    assert script.value == PROJECT["scripts"]["scforge"]
    assert callable(script.load())


def test_ecosystem_entry_and_citation_agree_with_the_project():
    assert META["name"] == META["install"]["pypi"] == PROJECT["name"]
    assert META["description"] == PROJECT["description"]
    assert META["license"] == CITATION["license"] == PROJECT["license"]
    assert META["project_home"] == PROJECT["urls"]["Homepage"]
    assert META["documentation_home"] == CITATION["url"] == PROJECT["urls"]["Documentation"]
    assert META["version"] == f"v{Version(FALLBACK).base_version}"
    assert Version(META["version"]) <= Version(Version(scforge.__version__).base_version)
    (group,) = re.findall(r"--group (\S+)", META["test_command"])
    assert any(str(requirement).startswith("pytest>") for requirement in PYPROJECT["dependency-groups"][group])
    assert CITATION["title"] == f"{PROJECT['name']}: {PROJECT['description'][0].lower()}{PROJECT['description'][1:]}"
    assert CITATION["repository-code"] == PROJECT["urls"]["Source"]
    assert [author["name"] for author in CITATION["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert not {"version", "date-released"} & set(CITATION), "it would grow old"


def test_python_versions_agree():
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert (ROOT / "CONTRIBUTING.md").read_text().count(f"Python {PYTHONS[0]} to {PYTHONS[-1]}") == 1
    minors = [int(version.split(".")[1]) for version in PYTHONS]
    assert minors == list(range(minors[0], minors[-1] + 1))


@pytest.mark.skipif(not (ROOT / ".github" / "workflows").is_dir(), reason="not a checkout")
def test_workflows():
    """They test every version of Python and every system that the project names, and pin what they download."""
    folder = ROOT / ".github" / "workflows"
    matrix = yaml.safe_load((folder / "test.yaml").read_text())["jobs"]["test"]["strategy"]["matrix"]
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


@pytest.mark.skipif(not (ROOT / ".readthedocs.yaml").is_file(), reason="not a checkout")
def test_read_the_docs_runs_the_notebooks_before_it_builds():
    commands = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())["build"]["jobs"]["build"]["html"]
    assert [("make notebooks" in line, "sphinx" in line) for line in commands] == [(True, False), (False, True)]


def test_changelog_has_a_place_for_this_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    version = Version(scforge.__version__)
    assert headings[0] == "Unreleased" or version.base_version == headings[0]
    assert version.is_devrelease or version.base_version in headings
    assert Version(FALLBACK).is_devrelease or headings[headings[0] == "Unreleased"] == FALLBACK
