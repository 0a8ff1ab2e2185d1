import logging
from pathlib import Path

import pytest

from scforge._io import marked
from scforge.errors import HubError, MissingFileError, ModelFileError, OptionError
from scforge.hub import upload

# huggingface_hub sends large files with an argument that its HTTP client has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw:DeprecationWarning")


def card(text: bytes) -> bytes:
    return marked(f"---\ntags: []\n---\n{text.decode()}").encode()


CARD = card(b"A model.\n")
CONFIG = b'{"scforge_version": "1"}'
MODEL = {"config.json": CONFIG, "vocab.json": b"{}", "model.safetensors": b"weights", "README.md": CARD}
ADAPTER = {"adapter.json": b"{}", "adapter.safetensors": b"weights", "README.md": card(b"Adapters.\n")}


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
    assert "These files are not part of a shared model and were not uploaded: 'adata.h5ad', 'model.pt'" in caplog.text


def test_files_of_an_earlier_model_are_removed_and_others_stay(hub, model: Path, tmp_path: Path) -> None:
    upload(model, "org/light")
    before = len(hub.repos["org/light"].commits)
    assert upload(model, "org/light") == f"{hub.url}/org/light"
    assert len(hub.repos["org/light"].commits) == before, "the same again is no commit"
    hub.add_file("org/light", "notes.txt", b"of somebody")
    upload(make(tmp_path / "adapter", ADAPTER), "org/light")
    assert hub.files("org/light")["README.md"] == ADAPTER["README.md"]
    assert set(hub.files("org/light")) == {*ADAPTER, ".gitattributes", "notes.txt"}


def test_branches_and_pull_requests(hub, model: Path) -> None:
    with pytest.raises(MissingFileError):
        upload(model, "org/light", create_pr=True)
    assert not hub.repos
    assert upload(model, "org/light", revision="v1") == f"{hub.url}/org/light/tree/v1"
    assert upload(model, "org/light", token="hf_reader", create_pr=True) == f"{hub.url}/org/light/discussions/1"
    for revision in ("v1", "refs/pr/1"):
        assert set(hub.files("org/light", revision)) == {*MODEL, ".gitattributes"}
    assert set(hub.files("org/light")) == {".gitattributes"}


@pytest.mark.slow
@pytest.mark.parametrize("theirs", [b"# About us\n", CARD.replace(b"A model.", b"A model of ours."), None])
def test_cards_of_somebody_stay(hub, model: Path, theirs: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    upload(model, "org/light")
    if theirs is None:
        theirs = CARD
        (model / "README.md").unlink()
    else:
        hub.add_file("org/light", "README.md", theirs)
        (model / "README.md").write_bytes(card(b"Another model.\n"))
    (model / "vocab.json").write_bytes(b"[]")
    upload(model, "org/light")
    assert hub.files("org/light")["README.md"] == theirs
    assert hub.files("org/light")["vocab.json"] == b"[]"
    assert ("was written or edited by a user" in caplog.text) == (theirs != CARD)
    written = b"---\ntags: []\n---\n# About us, again\n"  # by the sender, and so it is sent
    (model / "README.md").write_bytes(written)
    upload(model, "org/light")
    assert hub.files("org/light")["README.md"] == written


def test_of_two_pushes_at_once_one_is_refused(hub, model: Path) -> None:
    upload(model, "org/light")
    hub.before_commit = lambda: hub.add_file("org/light", "vocab.json", b"of somebody")
    (model / "config.json").write_bytes(CONFIG + b"\n")
    with pytest.raises(HubError):
        upload(model, "org/light")
    assert hub.files("org/light")["config.json"] == CONFIG


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "theirs", "revision"),
    [
        (MODEL, b'{"model_type": "bert"}', None),
        (ADAPTER, b'{"model_type": "bert"}', "v1"),
    ],
)
def test_models_of_other_packages_are_not_written_over(hub, tmp_path, files, theirs, revision) -> None:
    hub.add_repo("org/bert", {"config.json": theirs, "model.safetensors": b""})
    with pytest.raises(OptionError, match="contains a model of another package that would be overwritten"):
        upload(make(tmp_path / "second", files), "org/bert", revision=revision)
    assert hub.files("org/bert")["config.json"] == theirs


def test_nothing_is_sent_where_everybody_would_see_it(hub, model: Path) -> None:
    upload(model, "org/light")
    before = hub.files("org/light")
    (model / "vocab.json").write_bytes(b"secret")
    with pytest.raises(OptionError, match="already exists and is public; make the repository private in its settings"):
        upload(model, "org/light", private=True)
    assert hub.files("org/light") == before


@pytest.mark.parametrize(
    ("repo_id", "options", "message"),
    [
        ("org/light", {"token": "hf_wrong"}, r"failed \(401, Invalid credentials.* a token \(HF_TOKEN"),
        ("org/light", {"token": "hf_reader"}, r"failed \(403, You don't have the rights.* a token \(HF_TOKEN"),
        ("org/light?", {}, "this is not a valid repository name; pass 'organization/name'"),
        ("org/light", {"revision": "v1", "create_pr": True}, "create_pr=True, which targets the main branch"),
        ("org/light", {"token": True}, "no token was found; log in with hf auth login"),
    ],
)
def test_what_cannot_be_sent(hub, model: Path, repo_id, options: dict, message: str, monkeypatch) -> None:
    if options.get("token") is True:
        monkeypatch.delenv("HF_TOKEN")
    with pytest.raises((OptionError, HubError), match=message) as caught:
        upload(model, repo_id, **options)
    assert "\n" not in str(caught.value)
    assert "hf_" not in str(caught.value)
    assert not hub.large


def test_a_card_that_the_hub_refuses(hub, model: Path) -> None:
    (model / "README.md").write_bytes(b"---\nlicense: bad\n---\n")
    with pytest.raises(HubError):
        upload(model, "org/light")


def test_folders_without_a_model(hub, tmp_path: Path) -> None:
    foreign = make(tmp_path / "other", {"config.json": b"{}", "pytorch_model.bin": b""})
    for folder, error, message in [
        (tmp_path / "nowhere", MissingFileError, "is not a folder; pass a folder written by model.save"),
        (foreign, ModelFileError, "contains no model .* or adapter"),
    ]:
        with pytest.raises(error, match=message):
            upload(folder, "org/light")
    assert not hub.requests
