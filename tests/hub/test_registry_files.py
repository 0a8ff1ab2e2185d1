"""The registry of names: what it holds, which file counts, and what is wrong with one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from scforge.errors import MissingFileError, ModelFileError, OptionError
from scforge.hub import known_models
from scforge.hub.registry_files import find_registered

A, B = "a" * 40, "b" * 40
REPO = {"repo_id": "org/x"}


def write(path: Path, models: object, format: object = 1) -> Path:
    path.write_text(json.dumps({"format": format, "models": models}))
    return path


def entry(description: str = "Small", latest: str = "2", **versions: dict) -> dict:
    given = versions or {"1": {"repo_id": "org/light", "revision": A}, "2": {"repo_id": "org/light", "revision": B}}
    return {"description": description, "latest": latest, "versions": given}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write(
        tmp_path / "models.json", {"light": entry(), "here": entry(latest="1", **{"1": {"folder": "models/a"}})}
    )
    monkeypatch.setenv("SCFORGE_MODELS", str(path))
    return path


def test_the_shipped_registry_names_nothing_that_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCFORGE_MODELS", raising=False)
    assert known_models() == {}


def test_versions(registry: Path) -> None:
    assert known_models() == {"light": "Small", "here": "Small"}
    assert find_registered("scforge://light", "it").revision == B
    assert find_registered("scforge://light@1", "it").revision == A
    assert find_registered("scforge://here", "it").folder == registry.parent / "models/a"


def test_the_first_file_counts(registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write(tmp_path / "other.json", {"light": entry("Other"), "more": entry()})
    monkeypatch.setenv("SCFORGE_MODELS", f"{other}{os.pathsep}{registry}")
    assert known_models() == {"light": "Other", "more": "Small", "here": "Small"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scforge://lihgt", "is not in the registry; did you mean 'light'"),
        ("scforge://light@3", r"has no version '3'.*\(known: '1', '2'\)"),
        ("scforge://light@", "is no name of a model; write it as scforge://name or"),
        ("scforge://a/b", "is no name of a model"),
    ],
)
def test_names_that_are_not_known(registry: Path, name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        find_registered(name, f"name={name!r}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no registry of models"),
        ("[]", "is no registry of models"),
        ('{"format": 1, "format": 1}', "holds the key 'format' twice"),
        ('{"format": 2, "models": {}}', "has format 2, and this scforge reads up to 1; update scforge"),
        ('{"format": true, "models": {}}', "has format=True"),
        ('{"format": 1, "models": []}', "no mapping of names"),
        (json.dumps({"format": 1, "models": {"../x": entry()}}), "has an entry '../x' that cannot be used"),
        (json.dumps({"format": 1, "models": {"x": entry(latest="9")}}), "an entry 'x' that cannot be used"),
        (
            json.dumps({"format": 1, "models": {"x": entry(latest="1", **{"1": {"repo_id": "org/x"}})}}),
            "each with repo_id and revision .*, or with folder",
        ),
        *(
            (
                json.dumps({"format": 1, "models": {"x": entry(latest="1", **{"1": {**REPO, "revision": name}})}}),
                r"an entry 'x' that cannot be used.*revision \(a commit, 40 digits\)",
            )
            for name in ("main", "v1", "abc1234")
        ),
    ],
)
def test_files_that_are_no_registry(registry: Path, content: str, message: str) -> None:
    registry.write_text(content)
    with pytest.raises(ModelFileError, match=message):
        known_models()


def test_no_names_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCFORGE_MODELS", raising=False)
    with pytest.raises(
        OptionError, match="is not in the registry, which is empty; name a registry file in SCFORGE_MODELS"
    ):
        find_registered("scforge://light", "name='scforge://light'")


def test_a_file_that_is_not_there(registry: Path) -> None:
    registry.unlink()
    with pytest.raises(MissingFileError, match=r"SCFORGE_MODELS='.*models.json' is no file"):
        known_models()
