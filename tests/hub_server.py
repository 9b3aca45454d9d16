"""A small Hub on 127.0.0.1 that speaks what huggingface_hub's client asks for: repositories, branches, LFS, commits."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Content = dict[str, bytes]


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    private: bool
    commits: dict[str, Content] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, content: Content) -> str:
        digest = hashlib.sha1(repr((len(self.commits), sorted(content))).encode()).hexdigest()
        self.commits[digest] = content
        self.branches[branch] = digest
        return digest

    def at(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


class Hub:
    """State and faults. `cut`: uploads to cut off halfway. `cut_commits`: commits whose connection is closed unread.

    `refuse`: status by fragment of a path, with `words` as the server's message.
    """

    def __init__(self, token: str):
        self.token = token
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.cut = self.cut_commits = 0
        self.refuse: dict[str, int] = {}
        self.words = "not allowed"
        self.leaked: list[str] = []

    def __enter__(self) -> Hub:
        handler = type("Handler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def files(self, repo: str, revision: str = "main") -> Content:
        repository = self.repositories[repo]
        return {k: v for k, v in repository.commits[repository.branches[revision]].items() if k != ".gitattributes"}

    def count(self, method: str, fragment: str) -> int:
        return sum(m == method and fragment in path for m, path in self.requests)


class Refused(Exception):
    def __init__(self, status: int, words: str, code: str = ""):
        self.status, self.words, self.code = status, words, code


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object = None, headers: dict[str, str] | None = None, size: int | None = None):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if size is None else size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def drop(self) -> None:
        """Close the socket without an answer."""
        self.close_connection = True
        self.connection.close()

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def handle_one(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        if self.command == "PUT" and self.hub.cut > 0:
            self.hub.cut -= 1
            self.rfile.read(int(self.headers.get("Content-Length") or 2) // 2)
            return self.drop()
        content = self.body()
        if "/commit/" in path and self.hub.cut_commits > 0:
            self.hub.cut_commits -= 1
            return self.drop()
        try:
            for fragment, status in self.hub.refuse.items():
                if fragment in path:
                    raise Refused(status, self.hub.words)
            self.route(path.strip("/").split("/"), content)
        except Refused as refused:
            words = " ".join(refused.words.split())
            headers = {"X-Error-Message": words}
            if refused.code:
                headers["X-Error-Code"] = refused.code
            self.answer(refused.status, {"error": words}, headers)
        return None

    do_GET = do_HEAD = do_POST = do_PUT = handle_one

    def find(self, repo: str, write: bool = False) -> Repository:
        found = self.hub.repositories.get(repo)
        if found is None or (found.private and not self.known):
            raise Refused(401 if not self.known else 404, "Repository not found", "RepoNotFound")
        if write and not self.known:
            raise Refused(401, "Invalid username or password.")
        return found

    def revision(self, repository: Repository, name: str) -> str:
        digest = repository.at(name)
        if digest is None:
            raise Refused(404, f"Invalid rev id: {name}", "RevisionNotFound")
        return digest

    def route(self, parts: list[str], content: bytes) -> None:
        match parts:
            case ["api", "repos", "create"]:
                self.create(json.loads(content))
            case ["api", "validate-yaml"]:
                self.answer(200, {"errors": [], "warnings": [{"message": "a warning\nof two lines"}]})
            case ["api", "models", org, name]:
                self.info(f"{org}/{name}", "main")
            case ["api", "models", org, name, "revision", *revision]:
                self.info(f"{org}/{name}", "/".join(revision))
            case ["api", "models", org, name, "tree", *revision]:
                self.tree(self.find(f"{org}/{name}"), "/".join(revision))
            case ["api", "models", org, name, "branch", *branch]:
                self.branch(self.find(f"{org}/{name}", write=True), "/".join(branch))
            case ["api", "models", org, name, "preupload", *revision]:
                self.preupload(self.find(f"{org}/{name}", write=True), "/".join(revision), json.loads(content))
            case ["api", "models", org, name, "commit", *revision]:
                self.commit(f"{org}/{name}", "/".join(revision), content)
            case [org, name, "info", "lfs", "objects", "batch"]:
                self.find(f"{org}/{name.removesuffix('.git')}", write=True)
                self.batch(json.loads(content))
            case ["lfs", "verify"]:
                asked = json.loads(content)
                self.answer(200 if len(self.hub.stored.get(asked["oid"], b"")) == asked["size"] else 404, {})
            case ["lfs", oid]:
                self.store(oid, content)
            case [org, name, "resolve", revision, *path]:
                self.resolve(self.find(f"{org}/{name}"), revision, "/".join(path))
            case _:
                raise Refused(404, f"no such page {parts}")

    def create(self, asked: dict) -> None:
        if not self.known:
            raise Refused(401, "Invalid username or password.")
        repo = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != "org":
            raise Refused(403, f"You don't have the rights to create a model under {asked['organization']}")
        if repo in self.hub.repositories:
            self.answer(409, {"error": "exists", "url": f"{self.hub.endpoint}/{repo}"})
            return
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repositories[repo] = Repository(private)
        self.hub.repositories[repo].commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.answer(200, {"url": f"{self.hub.endpoint}/{repo}"})

    def info(self, repo: str, revision: str) -> None:
        repository = self.find(repo)
        digest = self.revision(repository, revision)
        files = [{"rfilename": name} for name in repository.commits[digest]]
        self.answer(200, {"id": repo, "sha": digest, "private": repository.private, "siblings": files})

    def branch(self, repository: Repository, name: str) -> None:
        if name in repository.branches:
            raise Refused(409, "Reference already exists")
        repository.branches[name] = repository.branches["main"]
        self.answer(201, {})

    def tree(self, repository: Repository, revision: str) -> None:
        rows = []
        for name, content in repository.commits[self.revision(repository, revision)].items():
            row = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
            if name.endswith(".safetensors"):
                digest = hashlib.sha256(content).hexdigest()
                row["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
            rows.append(row)
        self.answer(200, rows)

    def preupload(self, repository: Repository, revision: str, asked: dict) -> None:
        there = repository.commits[self.revision(repository, revision)]
        rows = []
        for file in asked["files"]:
            lfs, old = file["path"].endswith(".safetensors"), there.get(file["path"])
            oid = None if old is None else hashlib.sha256(old).hexdigest() if lfs else git_hash(old)
            mode = "lfs" if lfs else "regular"
            rows.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": rows})

    def batch(self, asked: dict) -> None:
        """Upload instructions; an object that is stored already gets none."""
        rows = []
        for object in asked["objects"]:
            oid, size = object["oid"], object["size"]
            row = {"oid": oid, "size": size}
            if oid not in self.hub.stored:
                upload = {"href": f"{self.hub.endpoint}/lfs/{oid}?signature=secret"}
                row["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.endpoint}/lfs/verify"}}
            rows.append(row)
        self.answer(200, {"transfer": "basic", "objects": rows})

    def store(self, oid: str, content: bytes) -> None:
        if "Authorization" in self.headers:
            self.hub.leaked.append(self.path)  # storage is another company's server
        if hashlib.sha256(content).hexdigest() != oid:
            raise Refused(400, "content does not match its name")
        self.hub.stored[oid] = content
        self.answer(200, {})

    def commit(self, repo: str, branch: str, content: bytes) -> None:
        repository = self.find(repo, write=True)
        new = dict(repository.commits[self.revision(repository, branch)])
        for line in content.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                new[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    raise Refused(400, "LFS object is missing")
                new[value["path"]] = self.hub.stored[value["oid"]]
            elif item["key"] == "deletedFile":
                del new[value["path"]]
        digest = repository.commit(branch, new)
        self.answer(200, {"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{digest}", "commitOid": digest})

    def resolve(self, repository: Repository, revision: str, path: str) -> None:
        digest = self.revision(repository, revision)
        content = repository.commits[digest].get(path)
        if content is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": digest}
        self.answer(200, content, headers)
