import json
import logging
import os
import shutil
import traceback
from pathlib import Path

import pytest

from scforge.errors import HubError, MissingFileError, ModelFileError, OptionError, ScforgeError, ScforgeWarning
from scforge.hub import resolve, upload
from scforge.hub.finding import copy_model, find_model, is_hub_name

# huggingface_hub sends large files with an argument that its HTTP client has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw:DeprecationWarning")

MODEL = {
    "config.json": b'{"scforge_version": "1"}',
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
    assert contents(resolve(repo)) == MODEL
    hub.requests.clear()
    assert contents(resolve(f"hf://{repo}")) == MODEL
    assert hub.requests == ["GET /api/models/org/light"], "what is in the cache is not fetched again"
    with pytest.raises(OptionError, match="does not know the token"):
        resolve(repo, token="hf_wrong")  # and gets nothing from the cache either
    upload(folder, "org/secret", private=True, token=" hf_writer\n")  # space is no part of it
    monkeypatch.delenv("HF_TOKEN")
    assert contents(resolve("org/secret", token="hf_writer ")) == MODEL


def test_pickles_and_code_are_not_fetched(hub, repo: str, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("pytorch_model.bin", "modeling.py", "data.pkl", "sub/config.json"):
        hub.add_file(repo, name, PICKLE)
    with caplog.at_level(logging.INFO, "scforge"):
        folder = resolve("org/light/")
        assert resolve("hf://org/light/") == folder
    assert contents(folder) == MODEL
    said = f"it is the repository org/light of the hub, at {hub.repos[repo].branches['main']}"
    assert caplog.text.count(said) == 1, "of the bare name"
    assert not [path for path in hub.requests if "resolve" in path and not path.endswith(tuple(MODEL))]
    assert "'pytorch_model.bin', 'modeling.py', 'data.pkl', which can run code" in caplog.text


@pytest.mark.slow
def test_revisions(hub, repo: str, folder: Path) -> None:
    first = hub.repos[repo].branches["main"]
    (folder / "model.safetensors").write_bytes(b"other weights")
    upload(folder, repo, revision="v2")
    upload(folder, repo, commit_message="again")
    for name, weights in {first: b"weights", "v2": b"other weights", "main": b"other weights"}.items():
        assert contents(resolve(repo, revision=name))["model.safetensors"] == weights
    assert contents(resolve(f"hf://{repo}@{first}"))["model.safetensors"] == b"weights"
    assert resolve(repo, revision=first).name == first


def test_offline_from_the_cache(hub, repo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = resolve(repo)
    hub.requests.clear()
    assert resolve(repo, local_files_only=True) == fetched
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve(repo) == fetched
    assert not hub.requests
    with pytest.raises(MissingFileError, match=r"'org/other' is not in the cache.* fetch it once"):
        resolve("org/other")
    with pytest.raises(MissingFileError, match=r"'org/light' at revision 'v9' is not in the cache"):
        resolve(repo, revision="v9")
    with pytest.raises(HubError, match="HF_HUB_OFFLINE says so; unset it"):
        upload(fetched, repo)
    (fetched / "vocab.json").unlink()
    with pytest.raises(MissingFileError, match="'org/light' is not in the cache, or not all of it"):
        resolve(repo, local_files_only=True)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert contents(resolve(repo)) == MODEL


def test_without_a_connection(hub, repo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = resolve(repo)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.warns(ScforgeWarning, match=r"127\.0\.0\.1:9 does not answer .* from the cache, which may be older"):
        assert resolve(repo) == fetched
    with pytest.raises(HubError, match=r"9 does not answer .*, and 'org/other' is not in the cache; check the conn"):
        resolve("org/other")
    with pytest.raises(HubError, match=r"127\.0\.0\.1:9 does not answer .*; check the connection and HF_ENDPOINT"):
        upload(fetched, repo)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("org/nothing", {}, MissingFileError, "there is no repository 'org/nothing' .*check the name, or pass a token"),
        ("org/light", {"token": "hf_wrong"}, OptionError, "does not know the token .*HF_TOKEN"),
        ("org/light", {"revision": "v9"}, MissingFileError, "has no revision 'v9'; give a branch"),
        ("org/secret", {"token": "hf_reader"}, MissingFileError, "or it is private and the token does not open it"),
        ("org/asking", {"token": "hf_reader"}, OptionError, "granted on request only; ask for it at http.*/org/asking"),
        ("org/foreign", {}, ModelFileError, "neither a model .*config.json.* nor an adapter .*convert-checkpoint"),
    ],
)
def test_what_cannot_be_had(hub, repo: str, folder: Path, name, options: dict, error, message: str) -> None:
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
        ("https://hub.org/org/light/tree/v1?x=1", {}, MissingFileError, "is a URL; write hf://org/light@v1"),
        ("nothing", {}, MissingFileError, "name='nothing' does not exist; give the folder of a model, a repository"),
        ("hf://org/--bad..name", {}, OptionError, "is no name of a repository .*'organization/name'"),
        ("hf://org/light@v1", {"revision": "v2"}, OptionError, "revision='v2' is another one; give one of them"),
        (None, {}, OptionError, "name=None names no model"),
        ("org/light", {"revision": 1}, OptionError, "revision=1 is no text"),
        ("org/light", {"cache_dir": 1}, OptionError, "cache_dir=1 is no folder"),
        ("org/light", {"cache_dir": __file__}, OptionError, "is a file; give the name of a folder"),
        ("org/light", {"cache_dir": "/proc/nothing"}, OptionError, "give cache_dir, or HF_HUB_CACHE, where you may"),
        ("org/light", {"local_files_only": "no"}, OptionError, "local_files_only='no' is neither True nor False"),
    ],
)
def test_arguments(hub, name, options: dict, error, message: str) -> None:
    hub.add_repo("org/light", MODEL)
    with pytest.raises(error, match=message):
        resolve(name, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "is_variable"),
    [*((token, False) for token in ("hf_a\nb", "", 3, True)), ("hf_\u00e4", True)],
)
def test_a_malformed_token_gets_nothing_and_is_not_shown(hub, repo: str, token, is_variable: bool, monkeypatch) -> None:
    resolve(repo)
    monkeypatch.delenv("HF_TOKEN")
    if is_variable:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.requests.clear()
    with pytest.raises(OptionError, match="copy it again|not text|there is none here") as caught:
        resolve(repo, token=None if is_variable else token)
    assert "hf_" not in str(caught.value)
    assert not hub.requests


@pytest.mark.slow
@pytest.mark.parametrize("address", ["foo", "http://hub:x", "ftp://hub.org"])
def test_what_is_no_address_of_a_hub(hub, repo: str, folder: Path, address: str, monkeypatch) -> None:
    resolve(repo)
    monkeypatch.setenv("HF_ENDPOINT", address)
    for ask in (lambda: resolve(repo), lambda: upload(folder, repo)):
        with pytest.raises(OptionError, match=r"is no address of a hub; set HF_ENDPOINT to one") as caught:
            ask()
        assert "hf_" not in str(caught.value)


@pytest.mark.parametrize("last", ["Last", "step-100"])
def test_mistyped_folders_of_a_training_are_not_looked_for_on_the_hub(hub, last: str) -> None:
    hub.add_repo(f"ckpt/{last}", MODEL)
    hub.requests.clear()
    with pytest.raises(MissingFileError, match=f"no folder 'ckpt/{last}' here; give .*, or hf://ckpt/{last} for a"):
        resolve(f"ckpt/{last}/")
    assert not hub.requests
    assert contents(resolve(f"hf://ckpt/{last}")) == MODEL


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"token": "hf_wrong"}, {"revision": "v9"}, {"local_files_only": True}])
def test_errors_of_bare_names_say_that_there_is_no_folder(hub, repo: str, options: dict, tmp_path: Path) -> None:
    name = "org/light" if "revision" in options else "org/nothing"
    options = {**options, "cache_dir": tmp_path / "empty"}
    with pytest.raises((MissingFileError, OptionError), match=rf"\(and there is no folder '{name}' here\)\.$"):
        resolve(name, **options)
    with pytest.raises((MissingFileError, OptionError)) as caught:
        resolve(f"hf://{name}", **options)
    assert "no folder" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [b"null", b"[" * 100_000, b"\xff"]
    + [
        json.dumps({"id": "org/light", "sha": sha, "siblings": siblings}).encode()
        for sha, siblings in [(None, []), ("../../etc", []), ("a" * 40, 3), ("a" * 40, [{}])]
    ],
)
def test_a_hub_that_answers_nonsense(hub, repo: str, folder: Path, answer: bytes) -> None:
    hub.answer = answer
    for call in (lambda: resolve("hf://org/light"), lambda: upload(folder, "org/light")):
        with pytest.raises(HubError, match="answers what no hub answers|names no commit of") as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("status", [None, 500, 404, 401, "silent", "no scheme"])
def test_a_password_in_the_address_is_not_shown(hub, repo: str, monkeypatch, status) -> None:
    address = {"silent": "http://us:hunter2@127.0.0.1:9", "no scheme": "us:hunter2@hub"}
    monkeypatch.setenv("HF_ENDPOINT", address.get(status, hub.url.replace("//", "//us:hunter2@")))
    hub.status = status if isinstance(status, int) else None
    with pytest.raises(ScforgeError) as caught:
        resolve("org/light" if status else "org/nothing")
    fixes = {500: "failed (500, the hub is ill); try again later", 404: "check HF_ENDPOINT"}
    assert fixes.get(status, "") in str(caught.value)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_folder_comes_before_the_hub(hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "org/light")
    assert is_hub_name("other/light")
    assert resolve("org/light") == Path("org/light")
    with pytest.raises(MissingFileError, match="'org/lihgt' does not exist: .*, or hf://org/lihgt for a repository"):
        resolve("org/lihgt")
    with pytest.raises(OptionError, match="revision='v1' has no use where name='org/light' is a folder here"):
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
    found = find_model("scforge://light@1", said="model")
    assert (contents(found.folder), found.repo_id, found.commit) == (MODEL, repo, first)
    with pytest.raises(OptionError, match="'scforge://light' has versions, so revision='v1' has no use"):
        resolve("scforge://light", revision="v1")
    # A copy has files and no links, and knows where it is from.
    copied = copy_model(found.folder, tmp_path / "copy", origin=(repo, first))
    assert {**contents(copied), **MODEL} == contents(copied)
    assert not [path for path in copied.iterdir() if path.is_symlink()]
    again = find_model("scforge://light@2", said="model")
    assert (again.repo_id, again.commit) == (repo, first)


@pytest.mark.skipif(os.name != "posix", reason="links of POSIX")
@pytest.mark.parametrize(("name", "kind"), [("config.json", "link"), ("README.md", "pipe"), ("config.json", "folder")])
def test_only_files_of_a_folder_are_sent_or_copied(hub, folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (folder / name).unlink(missing_ok=True)
    make = {"link": lambda path: path.symlink_to("../secret"), "pipe": os.mkfifo, "folder": Path.mkdir}
    make[kind](folder / name)
    for call in (lambda: upload(folder, "org/light"), lambda: copy_model(folder, tmp_path / "copy")):
        with pytest.raises(ModelFileError, match=rf"{name}' is (a link out of its folder|not a regular file)|holds no"):
            call()
    assert not hub.repos
    assert not (tmp_path / "copy").exists()


def test_a_copy_replaces_the_model_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    copied = copy_model(folder, tmp_path / "copy")
    (copied / "notes.txt").write_text("mine")
    (folder / "model.safetensors").write_bytes(b"other weights")
    copy_model(folder, copied, overwrite=True)
    assert (copied / "notes.txt").read_text() == "mine"
    assert (copied / "model.safetensors").read_bytes() == b"other weights"


def test_a_hub_that_fails(hub, repo: str) -> None:
    for status, fix in {500: "try again later", 404: "check HF_ENDPOINT"}.items():
        hub.status = status
        with pytest.raises(HubError, match=rf"failed \({status}, the hub is ill\); {fix}"):
            resolve(repo)
