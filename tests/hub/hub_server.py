"""A hub on this machine: the part of the Hugging Face Hub's HTTP protocol that sending and fetching models needs.

It keeps everything in memory: repositories with branches and commits, large files by their checksum, who may read and
write. Large files are sent apart (LFS batch, PUT) and fetched by a redirect to another host, as from the hub's CDN,
where a token must not go. ``python hub_server.py`` serves one until its standard input ends, and prints the address.
"""

import base64
import contextlib
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

WRITER, READER = "hf_writer", "hf_reader"
"""Tokens: of who owns every repository, and of somebody with an account."""

_LARGE = ".safetensors"


@dataclass
class Repo:
    """Branches to commits, and commits to files; a large file is the checksum of its content."""

    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes | str]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes | str], message: str) -> str:
        name = hashlib.sha1(f"{id(self)} {len(self.commits)} {branch} {message}".encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name


class Hub:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []  # method and path of each
        self.errors: list[str] = []  # what must not have happened
        self.status: int | None = None  # fail so
        self.before_commit: Callable[[], object] = lambda: None
        self.url = ""

    def add_repo(self, repo_id: str, files: dict[str, bytes]) -> None:
        """Make a repository with files, without any request."""
        self.repos[repo_id] = repo = Repo()
        repo.commit("main", dict(files), "first")

    def add_file(self, repo_id: str, name: str, content: bytes, branch: str = "main") -> str:
        """Put a file into a repository, as somebody else does."""
        repo = self.repos[repo_id]
        return repo.commit(branch, {**repo.commits[repo.branches[branch]], name: content}, f"add {name}")

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        repo = self.repos[repo_id]
        found = repo.commits[repo.branches.get(revision, revision)]
        return {name: self.large[one] if isinstance(one, str) else one for name, one in found.items()}


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, **more: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.more = status, message, code, more


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = self._chunks()
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.hub.requests.append(f"{self.command} {url.path}")
        try:
            if self.hub.status is not None:
                raise _Refused(self.hub.status, "the hub is ill")
            self._route([unquote(part) for part in url.path.strip("/").split("/")])
        except _Refused as refused:
            headers = {"X-Error-Message": refused.message} | ({"X-Error-Code": refused.code} if refused.code else {})
            self._send(json.dumps({"error": refused.message, **refused.more}).encode(), refused.status, headers)

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, content: Any) -> None:
        self._send(json.dumps(content).encode(), headers={"Content-Type": "application/json"})

    def _route(self, parts: list[str]) -> None:
        match [self.command, *parts]:
            case ["GET", "cdn", oid]:
                if "Authorization" in self.headers:
                    self.hub.errors.append("a token went to the CDN")
                self._content(self.hub.large[oid])
            case ["PUT", "lfs", oid]:
                if hashlib.sha256(self.body).hexdigest() != oid:
                    raise _Refused(400, "the checksum is another one")
                self.hub.large[oid] = self.body
                self._send(b"")
            case ["GET", "api", "agent-harnesses"]:
                raise _Refused(404, "no such list")  # the client does without
            case ["POST", "api", "validate-yaml"]:
                self._validate()
            case ["POST", "api", "repos", "create"]:
                self._create()
            case ["GET", "api", "models", owner, name]:
                self._info(f"{owner}/{name}", "main")
            case ["GET", "api", "models", owner, name, "revision", revision]:
                self._info(f"{owner}/{name}", revision)
            case ["GET", "api", "models", owner, name, "tree", revision, *_]:
                self._tree(f"{owner}/{name}", revision)
            case ["POST", "api", "models", owner, name, "branch", branch]:
                repo = self._repo(f"{owner}/{name}", writing=True)
                if branch in repo.branches:
                    raise _Refused(409, "the branch exists")
                repo.branches[branch] = repo.branches["main"]
                self._json({})
            case ["POST", "api", "models", owner, name, "preupload", revision]:
                self._preupload(f"{owner}/{name}", revision)
            case ["POST", "api", "models", owner, name, "commit", revision]:
                self._commit(f"{owner}/{name}", revision)
            case ["POST", owner, name, "info", "lfs", "objects", "batch"]:
                self._batch(f"{owner}/{name.removesuffix('.git')}")
            case ["GET" | "HEAD", owner, name, "resolve", revision, *path]:
                self._resolve(f"{owner}/{name}", revision, "/".join(path))
            case _:
                self.hub.errors.append(f"unknown request: {self.command} {self.path}")
                raise _Refused(501, "not spoken here")

    def _token(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        if token not in (None, WRITER, READER):
            raise _Refused(401, "Invalid credentials in Authorization header")
        return token

    def _repo(self, repo_id: str, *, writing: bool = False) -> Repo:
        token = self._token()
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and token != WRITER):
            raise _Refused(401 if token is None else 404, "Repository not found", "RepoNotFound")
        if writing and token != WRITER and not self.query.get("create_pr"):
            raise _Refused(403, "You have no right to write")
        return repo

    def _commit_of(self, repo_id: str, revision: str) -> tuple[str, dict[str, bytes | str]]:
        repo = self._repo(repo_id)
        name = repo.branches.get(revision, revision)
        if name not in repo.commits:
            raise _Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return name, repo.commits[name]

    def _validate(self) -> None:
        content = json.loads(self.body)["content"]
        front = yaml.safe_load(content.split("---\n")[1]) if content.startswith("---\n") else None
        if front is None or not isinstance(front.get("tags", []), list) or front.get("license") == "bad":
            self._send(json.dumps({"errors": [{"message": '"license" is bad'}]}).encode(), 400)
        else:
            self._json({"errors": [], "warnings": []})

    def _create(self) -> None:
        asked = json.loads(self.body)
        repo_id = f"{asked['organization']}/{asked['name']}"
        if self._token() is None:
            raise _Refused(401, "Invalid username or password.")
        if repo_id in self.hub.repos:
            raise _Refused(409, "You already created this model repo", url=f"{self.hub.url}/{repo_id}")
        if self._token() != WRITER:
            raise _Refused(403, f"You don't have the rights to create a model under {asked['organization']}")
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        repo = self.hub.repos[repo_id] = Repo(private=private)
        repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self._json({"url": f"{self.hub.url}/{repo_id}"})

    def _info(self, repo_id: str, revision: str) -> None:
        name, files = self._commit_of(repo_id, revision)
        repo = self.hub.repos[repo_id]
        siblings = [{"rfilename": file} for file in files]
        gated = "manual" if repo.gated else False
        self._json({"id": repo_id, "sha": name, "private": repo.private, "gated": gated, "siblings": siblings})

    def _tree(self, repo_id: str, revision: str) -> None:
        _, files = self._commit_of(repo_id, revision)
        found = []
        for path, content in files.items():
            size = len(self.hub.large[content]) if isinstance(content, str) else len(content)
            entry: dict[str, Any] = {"type": "file", "path": path, "size": size, "oid": _etag(content)[:40]}
            if isinstance(content, str):
                entry["lfs"] = {"oid": content, "size": size, "pointerSize": 130}
            found.append(entry)
        self._json(found)

    def _preupload(self, repo_id: str, revision: str) -> None:
        repo = self._repo(repo_id, writing=True)
        there = repo.commits[repo.branches[revision]]
        files = []
        for path in (file["path"] for file in json.loads(self.body)["files"]):
            mode = "lfs" if path.endswith(_LARGE) else "regular"
            oid = _etag(there[path]) if path in there else None
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": files})

    def _batch(self, repo_id: str) -> None:
        self._repo(repo_id)
        objects: list[dict[str, Any]] = json.loads(self.body)["objects"]
        for one in objects:
            if one["oid"] not in self.hub.large:
                one["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, repo_id: str, revision: str) -> None:
        repo = self._repo(repo_id, writing=True)
        self.hub.before_commit()
        files = dict(repo.commits[repo.branches[revision]])
        message = ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            match entry["key"]:
                case "header":
                    message = value["summary"]
                    if value.get("parentCommit") not in (None, repo.branches[revision]):
                        raise _Refused(412, "A commit has happened since. Please refresh and try again.")
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in self.hub.large:
                        raise _Refused(400, "a large file was never sent")
                    files[value["path"]] = value["oid"]
                case "deletedFile":
                    del files[value["path"]]
        pull_request = None
        if self.query.get("create_pr"):
            revision, pull_request = "refs/pr/1", f"{self.hub.url}/{repo_id}/discussions/1"
        name = repo.commit(revision, files, message)
        url = f"{self.hub.url}/{repo_id}/commit/{name}"
        self._json({"commitUrl": url, "commitOid": name, "pullRequestUrl": pull_request})

    def _resolve(self, repo_id: str, revision: str, path: str) -> None:
        name, files = self._commit_of(repo_id, revision)
        if self.hub.repos[repo_id].gated and self._token() != WRITER:
            raise _Refused(403, f"Access to model {repo_id} is restricted", "GatedRepo")
        if path not in files:
            raise _Refused(404, "Entry not found", "EntryNotFound")
        content = files[path]
        headers = {"X-Repo-Commit": name, "ETag": f'"{_etag(content)}"'}
        if isinstance(content, str):
            elsewhere = self.hub.url.replace("127.0.0.1", "localhost")
            headers |= {"X-Linked-Etag": f'"{content}"', "X-Linked-Size": str(len(self.hub.large[content]))}
            self._send(b"", 302, {**headers, "Location": f"{elsewhere}/cdn/{content}"})
        else:
            self._content(content, headers)

    def _content(self, content: bytes, headers: dict[str, str] | None = None) -> None:
        self._send(content, headers=headers)


def _etag(content: bytes | str) -> str:
    if isinstance(content, str):
        return content
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """Serve a hub from a thread; its address is ``hub.url``."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    with serve() as running:
        print(running.url, flush=True)
        sys.stdin.read()
