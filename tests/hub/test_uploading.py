"""Sending folders: one commit with our files, and nothing that should stay here."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from scforge.errors import MissingFileError, ModelFileError, OptionError
from scforge.hub import upload

# huggingface_hub sends large files with an argument that its HTTP client has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw:DeprecationWarning")

CARD = b"---\ntags: []\n---\n"
MODEL = {"config.json": b"{}", "vocab.json": b"{}", "model.safetensors": b"weights", "README.md": CARD}
ADAPTER = {"adapter.json": b"{}", "adapter.safetensors": b"weights", "README.md": CARD}


def make(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make(tmp_path / "model", MODEL)


def test_one_commit_of_our_files(hub, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model / "adata.h5ad").write_bytes(b"cells")
    (model / "model.pt").write_bytes(b"pickle")
    with caplog.at_level(logging.INFO, "scforge"):
        url = upload(model, "org/light", commit_message="first")
    assert url == f"{hub.url}/org/light"
    assert hub.files("org/light") == {**MODEL, ".gitattributes": b"*.safetensors filter=lfs\n"}
    assert sum("/commit/" in path for path in hub.requests) == 1
    assert "Not sent, because it is no part of a shared model: 'adata.h5ad', 'model.pt'" in caplog.text


def test_files_of_an_earlier_model_are_removed_and_others_stay(hub, model: Path, tmp_path: Path) -> None:
    upload(model, "org/light")
    hub.add_file("org/light", "notes.txt", b"of somebody")
    upload(make(tmp_path / "adapter", ADAPTER), "org/light")
    assert set(hub.files("org/light")) == {*ADAPTER, ".gitattributes", "notes.txt"}


def test_the_same_again_is_no_commit(hub, model: Path) -> None:
    upload(model, "org/light")
    before = len(hub.repos["org/light"].commits)
    assert upload(model, "org/light") == f"{hub.url}/org/light"
    assert len(hub.repos["org/light"].commits) == before


def test_branches_and_pull_requests(hub, model: Path) -> None:
    assert upload(model, "org/light", revision="v1") == f"{hub.url}/org/light/tree/v1"
    assert set(hub.files("org/light", "v1")) == {*MODEL, ".gitattributes"}
    assert set(hub.files("org/light")) == {".gitattributes"}
    assert upload(model, "org/light", token="hf_reader", create_pr=True) == f"{hub.url}/org/light/discussions/1"
    assert set(hub.files("org/light", "refs/pr/1")) == {*MODEL, ".gitattributes"}
    assert set(hub.files("org/light")) == {".gitattributes"}


def test_nothing_is_sent_where_everybody_would_see_it(hub, model: Path) -> None:
    upload(model, "org/light")
    before = hub.files("org/light")
    (model / "config.json").write_bytes(b"secret")
    with pytest.raises(OptionError, match="exists and is public, so private=True cannot be kept"):
        upload(model, "org/light", private=True)
    assert hub.files("org/light") == before
    upload(model, "org/secret", private=True)
    assert hub.repos["org/secret"].private


@pytest.mark.parametrize(
    ("repo_id", "options", "message"),
    [
        ("org/light", {"token": "hf_wrong"}, "does not know the token"),
        ("org/light", {"token": False}, "does not know the token"),
        ("org/light", {"token": "hf_reader"}, r"forbids it \(403.*\); pass a token that may write to 'org/light'"),
        ("light", {}, "is no name of a repository; give it as 'organisation/name'"),
        ("hf://org/light", {}, "is no name of a repository"),
        ("org/light?", {}, "is no name of a repository"),
        ("org/light", {"revision": "v1", "create_pr": True}, "pull requests go to the main branch"),
    ],
)
def test_what_cannot_be_sent(hub, model: Path, repo_id: str, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        upload(model, repo_id, **options)
    assert "\n" not in str(caught.value)
    assert not hub.large


def test_a_card_that_the_hub_refuses(hub, model: Path) -> None:
    (model / "README.md").write_bytes(b"---\nlicense: bad\n---\n")
    with pytest.raises(OptionError, match='not take what was sent .*"license" is bad.*mend the model card'):
        upload(model, "org/light")


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        (None, MissingFileError, "does not exist; give the folder that model.save"),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, ModelFileError, "holds no model .* or adapter"),
    ],
)
def test_folders_without_a_model(hub, tmp_path: Path, files, error, message: str) -> None:
    if files is not None:
        make(tmp_path / "other", files)
    with pytest.raises(error, match=message):
        upload(tmp_path / "other", "org/light")
    assert not hub.requests
