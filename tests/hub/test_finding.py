import json
import re
import shutil
import traceback
from pathlib import Path

import pytest
from huggingface_hub import constants

from scforge.cli import main
from scforge.errors import HubError, MissingFileError, ModelFileError, OptionError
from scforge.hub import resolve, upload
from scforge.hub.finding import copy_model, find_model, is_hub_name
from scforge.models import Encoder
from scforge.testing import raises

# huggingface_hub sends large files with an argument that its HTTP client has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw:DeprecationWarning")

MODEL = {
    "config.json": b'{"scforge_version": "1", "sha256": {}}',
    "vocab.json": b"{}",
    "model.safetensors": b"weights",
    "README.md": b"---\ntags: []\n---\n",
}
PICKLE = b"\x80\x04 never to be fetched"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of a model; what is in them, the hub does not look at."""
    path = tmp_path / "model"
    path.mkdir()
    for name, content in MODEL.items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture
def repo(hub, folder: Path) -> str:
    upload(folder, "org/light")
    return "org/light"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_was_sent_is_fetched(hub, repo: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert contents(resolve(f"hf://{repo}")) == MODEL
    hub.requests.clear()
    assert contents(resolve(f"hf://{repo}")) == MODEL
    assert not [path for path in hub.requests if "resolve" in path], "what is in the cache is not fetched again"
    upload(folder, "org/secret", private=True, token="hf_writer")
    monkeypatch.delenv("HF_TOKEN")
    assert contents(resolve("hf://org/secret", token="hf_writer")) == MODEL


def test_pickles_and_code_are_not_fetched(hub, repo: str) -> None:
    for name in ("pytorch_model.bin", "modeling.py", "data.pkl", "sub/config.json"):
        hub.add_file(repo, name, PICKLE)
    assert contents(resolve("hf://org/light/")) == MODEL
    assert not [path for path in hub.requests if "resolve" in path and not path.endswith(tuple(MODEL))]


@pytest.mark.slow
def test_revisions(hub, repo: str, folder: Path) -> None:
    first = hub.repos[repo].branches["main"]
    (folder / "model.safetensors").write_bytes(b"other weights")
    upload(folder, repo, revision="v2")
    upload(folder, repo, commit_message="again")
    for name, weights in {first: b"weights", "v2": b"other weights", "main": b"other weights"}.items():
        assert contents(resolve(f"hf://{repo}", revision=name))["model.safetensors"] == weights
    assert contents(resolve(f"hf://{repo}@{first}"))["model.safetensors"] == b"weights"
    assert resolve(f"hf://{repo}", revision=first).name == first


def test_offline_from_the_cache(hub, repo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = resolve(f"hf://{repo}")
    hub.requests.clear()
    assert resolve(f"hf://{repo}", local_files_only=True) == fetched
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(f"hf://{repo}") == fetched
    assert not hub.requests
    with pytest.raises(MissingFileError):
        resolve("hf://org/other")
    with pytest.raises(MissingFileError):
        resolve(f"hf://{repo}", revision="v9")
    with pytest.raises(HubError):
        upload(fetched, repo)


def test_without_a_connection(hub, repo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = resolve(f"hf://{repo}")
    monkeypatch.setattr(constants, "ENDPOINT", "http://us:hunter2@127.0.0.1:9")
    assert resolve(f"hf://{repo}") == fetched
    with pytest.raises(MissingFileError):
        resolve("hf://org/other")
    with pytest.raises(HubError, match=r"127\.0\.0\.1:9 failed .*; check the connection and HF_ENDPOINT") as caught:
        upload(fetched, repo)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "hf://org/light",
            {"token": "hf_wrong"},
            HubError,
            r"failed \(401, Invalid credentials.* a token .HF_TOKEN",
        ),
        ("hf://org/nothing", {}, MissingFileError, "name='hf://org/nothing': there is no repository 'org/nothing'"),
        ("hf://org/light", {"revision": "v9"}, MissingFileError, "there is no revision 'v9' of 'org/light'"),
        ("hf://org/secret", {"token": "hf_reader"}, MissingFileError, "or it is private; check the name"),
        ("hf://org/asking", {"token": "hf_reader"}, OptionError, "request access at http.*/org/asking"),
        ("hf://org/foreign", {}, ModelFileError, "contains no model .*config.json.* or adapter .*convert-checkpoint"),
    ],
)
def test_what_cannot_be_had(hub, folder: Path, name, options: dict, error, message: str) -> None:
    upload(folder, "org/light")
    upload(folder, "org/secret", private=True)
    upload(folder, "org/asking")
    hub.repos["org/asking"].gated = True
    upload(folder, "org/foreign")
    hub.repos["org/foreign"].commit("main", {"config.json": b"{}", "pytorch_model.bin": PICKLE}, "foreign")
    with pytest.raises(error, match=message) as caught:
        resolve(name, **options)
    assert "\n" not in str(caught.value)
    assert "hf_" not in str(caught.value).replace("hf_reader", "")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "nothing",
            {},
            MissingFileError,
            "name='nothing' does not exist; pass a folder, a hub repository .hf://org/name",
        ),
        ("hf://org/--bad..name", {}, OptionError, "is not a valid repository name; pass 'organization/name'"),
        ("hf://org/light@v1", {"revision": "v2"}, OptionError, "revision='v2' is given too; pass only one"),
    ],
)
def test_arguments(hub, name, options: dict, error, message: str) -> None:
    hub.add_repo("org/light", MODEL)
    with pytest.raises(error, match=message):
        resolve(name, **options)


@pytest.mark.parametrize("name", ["org/light", "ckpt/final", "checkpoints/light/"])
def test_the_hub_is_asked_for_hub_names_only(hub, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo(name.rstrip("/"), MODEL)
    hub.requests.clear()
    monkeypatch.chdir(tmp_path)
    plain = name.rstrip("/")
    message = f"name='{name}' does not exist; pass a folder, hf://{plain} if it is a repository of the hub, or scforge:"
    with pytest.raises(MissingFileError, match=re.escape(message)):
        resolve(name)
    with pytest.raises(MissingFileError):
        resolve(name, revision="v1")
    with pytest.raises(MissingFileError):
        Encoder.load(name)
    assert main(["embed", "cells.h5ad", "-m", name, "-o", "out.h5ad"]) == 2
    assert not hub.requests
    assert contents(resolve(f"hf://{plain}")) == MODEL


def test_a_folder_is_no_repository(hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "org/light")
    assert not is_hub_name("org/light")
    assert resolve("org/light") == Path("org/light")
    with raises(OptionError, "revision"):
        resolve("org/light", revision="v1")
    assert not hub.requests


def test_names_of_the_registry_lead_to_the_hub(hub, repo: str, tmp_path: Path, monkeypatch) -> None:
    first = hub.repos[repo].branches["main"]
    hub.add_file(repo, "README.md", b"later")
    versions = {"1": {"repo_id": repo, "revision": first}, "2": {"folder": str(tmp_path / "copy")}}
    entry = {"description": "Small", "latest": "1", "versions": versions}
    (tmp_path / "models.json").write_text(json.dumps({"format": 1, "models": {"light": entry}}))
    monkeypatch.setenv("SCFORGE_MODELS", str(tmp_path / "models.json"))
    assert resolve("scforge://light").name == first
    found = find_model("scforge://light@1", prefix="model")
    assert (contents(found.folder), found.repo_id, found.commit) == (MODEL, repo, first)
    # A copy has files and no links, and knows where it is from.
    copied = copy_model(found.folder, tmp_path / "copy", origin=(repo, first))
    assert {**contents(copied), **MODEL} == contents(copied)
    assert not [path for path in copied.iterdir() if path.is_symlink()]
    again = find_model("scforge://light@2", prefix="model")
    assert (again.repo_id, again.commit) == (repo, first)


def test_a_copy_replaces_the_model_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    copied = copy_model(folder, tmp_path / "copy")
    (copied / "notes.txt").write_text("mine")
    (folder / "model.safetensors").write_bytes(b"other weights")
    copy_model(folder, copied, overwrite=True)
    assert (copied / "notes.txt").read_text() == "mine"
    assert (copied / "model.safetensors").read_bytes() == b"other weights"


def test_a_hub_that_fails(hub, repo: str) -> None:
    folder = resolve(f"hf://{repo}")
    hub.status = 500
    with pytest.raises(HubError):
        upload(folder, repo)
