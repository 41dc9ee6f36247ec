"""A Hub made of a dictionary, and this process's Hub client beside it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

MODEL = r"([^/]+/[^/]+?)"


LARGE = ".safetensors"


class Hub(ThreadingHTTPServer):
    """Repositories of models, each a list of commits, each a dictionary of files, under the Hub's addresses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.large: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.private: set[str] = set()
        self.refuse: dict[str, int] = {}  # part of an address -> the status that answers it

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        digest = hashlib.sha1(b"".join(sorted(files.values())) + repo.encode()).hexdigest()
        self.repos.setdefault(repo, {})[digest] = files
        return digest

    def at(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]]:
        commits = self.repos[repo]
        revision = list(commits)[-1] if revision == "main" else revision
        return revision, commits[revision]


def asked_private(made: dict[str, Any]) -> bool:
    """Whether a request to create a repository asks for a private one, by the field of either version of the client."""
    return made.get("visibility") == "private" or made.get("private") is True


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any, code: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def handle_any(self) -> None:
        hub, path, data = self.server, unquote(urlsplit(self.path).path), self.body()
        hub.asked.append(f"{self.command} {path}")
        status = next((status for part, status in hub.refuse.items() if part in path), None)
        if status is not None:
            return self.answer({"error": "refused"}, status)
        if path == "/":
            self.answer(b"")
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            values = json.loads(data)
            name = f"{values.get('organization') or 'me'}/{values['name']}"
            if name not in hub.repos and asked_private(values):
                hub.private.add(name)
            hub.created.append(values)
            there = name in hub.repos
            hub.repos.setdefault(name, {"0" * 40: {}})
            self.answer({"url": f"{hub.url}/{name}", "id": name, "name": name}, 409 if there else 200)
        elif found := re.fullmatch(r"/upload/([0-9a-f]{64})", path):
            hub.large[found[1]] = data
            self.answer(b"")
        elif re.fullmatch(rf"/{MODEL}\.git/info/lfs/objects/batch", path):
            wanted = json.loads(data)["objects"]
            uploads = [{**o, "actions": {"upload": {"href": f"{hub.url}/upload/{o['oid']}"}}} for o in wanted]
            self.answer({"transfer": "basic", "objects": uploads})
        elif found := re.fullmatch(rf"/api/models/{MODEL}(?:/(preupload|commit|revision|tree)/([^/]+).*)?", path):
            self.about(found[1], found[2], found[3] or "main", data)
        elif found := re.fullmatch(rf"/{MODEL}/resolve/([^/]+)/(.+)", path):
            self.file(*found.groups())
        else:
            self.answer({}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def about(self, repo: str, what: str, revision: str, data: bytes) -> None:
        if repo not in self.server.repos:
            return self.answer({}, 404, X_Error_Code="RepoNotFound")
        if what == "preupload":
            modes = {True: "lfs", False: "regular"}
            paths = [file["path"] for file in json.loads(data)["files"]]
            files = [{"path": p, "uploadMode": modes[p.endswith(LARGE)], "shouldIgnore": False} for p in paths]
            return self.answer({"files": files})
        if what == "commit":
            return self.answer(self.committed(repo, [json.loads(line) for line in data.splitlines()]))
        sha, files = self.server.at(repo, revision)
        entries = []
        for name, content in files.items():
            entry = {"type": "file", "path": name, "size": len(content), "oid": blob_hash(content)}
            if name.endswith(LARGE):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}
            entries.append(entry)
        if what == "tree":
            return self.answer(entries)
        siblings = [{"rfilename": name} for name in files]
        self.answer({"id": repo, "sha": sha, "private": repo in self.server.private, "tags": [], "siblings": siblings})

    def committed(self, repo: str, lines: list[dict[str, Any]]) -> dict[str, str]:
        files = dict(self.server.at(repo, "main")[1])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = self.server.commit(repo, files)
        return {"commitUrl": f"{self.server.url}/{repo}/commit/{sha}", "commitOid": sha}

    def file(self, repo: str, revision: str, name: str) -> None:
        if repo not in self.server.repos:
            return self.answer({}, 404, X_Error_Code="RepoNotFound")
        sha, files = self.server.at(repo, revision)
        if name not in files:
            return self.answer({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        etag = f'"{hashlib.sha256(files[name]).hexdigest()}"'
        self.answer(files[name], ETag=etag, X_Repo_Commit=sha)


def blob_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def online(hub, monkeypatch, tmp_path):
    """This process's Hub client talks to the local Hub and has a cache of its own."""
    import huggingface_hub
    from huggingface_hub import constants

    for module in (constants, sys.modules["huggingface_hub.hf_api"]):
        monkeypatch.setattr(module, "ENDPOINT", hub.url, raising=False)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("retrofox.hub.HfApi", lambda: huggingface_hub.HfApi(endpoint=hub.url, token="hf_x"))
    return hub
