"""A local server with the interface of the Hugging Face Hub, to test pushing and pulling.

It implements the part of the Hub's HTTP interface that `push_to_hub`, `from_pretrained`,
`upload_folder`, `snapshot_download`, `create_branch` and `create_tag` use for models. It keeps
repositories in memory. As on the Hub, binary files are not part of a commit. They are kept in a
store by their sha256 (git LFS), and are downloaded from another host without a token.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_loopback"
USER = "user"

_REPO = r"(?P<repo_id>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
_API = rf"/api/models/{_REPO}"
_ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/validate-yaml", "validate_card"),
    ("POST", r"/api/repos/create", "create"),
    ("GET", rf"{_API}(?:/revision/{_REVISION})?", "info"),
    ("GET", rf"{_API}/refs", "refs"),
    ("GET", rf"{_API}/tree/{_REVISION}(?:/(?P<folder>.+))?", "tree"),
    ("POST", rf"{_API}/branch/(?P<name>.+)", "branch"),
    ("POST", rf"{_API}/tag/{_REVISION}", "tag"),
    ("POST", rf"{_API}/preupload/{_REVISION}", "preupload"),
    ("POST", rf"{_API}/commit/{_REVISION}", "commit"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "batch"),
    ("GET", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "file"),
    ("PUT", rf"/store/{_REPO}/(?P<sha256>\w+)", "store"),
    ("GET", rf"/store/{_REPO}/(?P<sha256>\w+)", "stored"),
]


class Commit(NamedTuple):
    """A commit: the files of a repository by path."""

    sha: str
    message: str
    files: dict[str, bytes]


class Repository:
    """The commits, branches and tags of a repository."""

    def __init__(self, first: Commit, private: bool) -> None:
        self.private = private
        self.commits = {first.sha: first}
        self.branches = {"main": [first.sha]}
        self.tags: dict[str, str] = {}

    def at(self, revision: str) -> Commit:
        """Return the commit of a branch, a tag or a sha."""
        heads = {name: shas[-1] for name, shas in self.branches.items()}
        sha = {**self.tags, **heads}.get(revision, revision)
        if sha not in self.commits:
            raise Refusal(404, "RevisionNotFound")
        return self.commits[sha]

    def add(self, branch: str, message: str, files: dict[str, bytes]) -> Commit:
        """Add a commit to a branch."""
        content = "".join(f"{path} {blob_id(file)}" for path, file in sorted(files.items()))
        parent = self.at(branch).sha
        commit = Commit(blob_id(f"{parent} {message} {content}".encode()), message, files)
        self.commits[commit.sha] = commit
        self.branches[branch].append(commit.sha)
        return commit


class Request(NamedTuple):
    """A request of a client."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Reply(NamedTuple):
    """An answer of the Hub. Content other than bytes is sent as JSON."""

    body: Any
    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012  nobody writes to it


class Refusal(Exception):  # noqa: N818  an answer, not a fault
    """A 4xx answer. huggingface_hub chooses its exception class by `code`."""

    def __init__(self, status: int, code: str, message: str = "", **headers: str) -> None:
        super().__init__(code)
        named = {"X-Error-Code": code, "X-Error-Message": message or code, **headers}
        self.reply = Reply({"error": message or code}, status, named)


def blob_id(content: bytes) -> str:
    """Return git's hash of a file. huggingface_hub does not upload files with an unchanged hash."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def in_store(content: bytes) -> bool:
    """Tell whether a file is binary, and therefore kept in the store."""
    return b"\0" in content[:512]


class LoopbackHub:
    """A server on 127.0.0.1 until the end of the block `with LoopbackHub() as hub`.

    `unknown_requests` lists requests that this class does not support. `store` has the binary files
    by their sha256. Clients download changed entries.
    """

    def __enter__(self) -> Self:
        self.unknown_requests: list[str] = []
        self.store: dict[str, bytes] = {}
        self._repositories: dict[str, Repository] = {}
        self._cuts: list[list[Any]] = []
        self._lock = threading.Lock()
        self._homes = tempfile.mkdtemp()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        shutil.rmtree(self._homes)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a new client process. Each access creates empty caches.

        huggingface_hub reads the environment during its import, so a new process is necessary.
        """
        foreign = re.compile(
            r"HF_|HUGGINGFACE_|HUGGING_FACE_|TRANSFORMERS_|\w+_proxy$", re.IGNORECASE
        )
        return {
            **{name: value for name, value in os.environ.items() if not foreign.match(name)},
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": TOKEN,
            "HF_HOME": tempfile.mkdtemp(dir=self._homes),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a repository."""
        return self._repositories[repo_id].at(revision).files

    def commits(self, repo_id: str, branch: str = "main") -> list[Commit]:
        """Return all commits of a branch, beginning with the oldest, which is empty."""
        repository = self._repositories[repo_id]
        return [repository.commits[sha] for sha in repository.branches[branch]]

    def publish(self, repo_id: str, files: dict[str, bytes]) -> None:
        """Replace all files of a repository, as on the web page of the Hub."""
        self._new(repo_id).add("main", "published", files)
        self.store |= {
            hashlib.sha256(file).hexdigest(): file for file in files.values() if in_store(file)
        }

    def cut(self, method: str, path: str, times: int) -> None:
        """Close the connection halfway through the next requests for a path (a pattern).

        The Hub gets half of a POST or PUT and does nothing. The client gets half of a GET.
        """
        self._cuts.append([method, path, times])

    def is_cut(self, method: str, path: str) -> bool:
        """Tell whether to close the connection now."""
        with self._lock:
            for cut in self._cuts:
                if cut[0] == method and cut[2] and re.fullmatch(cut[1], path):
                    cut[2] -= 1
                    return True
        return False

    def answer(self, request: Request) -> Reply:
        """Answer one request."""
        for method, pattern, name in _ROUTES:
            match = re.fullmatch(pattern, request.path)
            if match and method == request.method.replace("HEAD", "GET"):
                groups = {key: unquote(value) for key, value in match.groupdict().items() if value}
                try:
                    with self._lock:
                        self._admit(request, name, groups.get("repo_id"))
                        return getattr(self, f"_{name}")(request, **groups)
                except Refusal as refusal:
                    return refusal.reply
        self.unknown_requests.append(f"{request.method} {request.path}")
        return Refusal(404, "UnknownRequest").reply

    def _admit(self, request: Request, name: str, repo_id: str | None) -> None:
        """Check the token of a request. Addresses of the store are secrets and need no token."""
        authorization = request.headers.get("authorization")
        if authorization not in (None, f"Bearer {TOKEN}"):
            raise Refusal(401, "Unauthorized", "Invalid credentials in Authorization header")
        if authorization or name in ("store", "stored"):
            return
        known = self._repositories.get(repo_id) if repo_id else None
        if request.method == "POST" or (repo_id and (known is None or known.private)):
            # A private repository looks like a missing one.
            raise Refusal(401, "RepoNotFound", "Invalid username or password.")

    def _whoami(self, request: Request) -> Reply:
        token = {"role": "write", "displayName": "loopback"}
        return Reply({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": token}})

    def _validate_card(self, request: Request) -> Reply:
        return Reply({"errors": [], "warnings": []})

    def _create(self, request: Request) -> Reply:
        wanted = request.json
        repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
        status = 409 if repo_id in self._repositories else 200
        self._new(repo_id, private=wanted.get("visibility") == "private")
        return Reply({"url": f"{self.endpoint}/{repo_id}", "id": repo_id}, status)

    def _info(self, request: Request, repo_id: str, revision: str = "main") -> Reply:
        repository = self._at(repo_id)
        commit = repository.at(revision)
        siblings = [{"rfilename": path} for path in commit.files]
        about = {"id": repo_id, "sha": commit.sha, "private": repository.private}
        return Reply({**about, "siblings": siblings})

    def _refs(self, request: Request, repo_id: str) -> Reply:
        repository = self._at(repo_id)
        heads = {name: shas[-1] for name, shas in repository.branches.items()}

        def listed(kind: str, names: dict[str, str]) -> list[dict[str, str]]:
            return [
                {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": sha}
                for name, sha in names.items()
            ]

        return Reply({"branches": listed("heads", heads), "tags": listed("tags", repository.tags)})

    def _tree(self, request: Request, repo_id: str, revision: str, folder: str = "") -> Reply:
        prefix = folder and f"{folder}/"
        files = self._at(repo_id).at(revision).files
        inside = {path: content for path, content in files.items() if path.startswith(prefix)}
        if folder and not inside:
            raise Refusal(404, "EntryNotFound")
        entries: dict[str, dict[str, Any]] = {}
        for path, content in inside.items():
            *parents, _ = path.removeprefix(prefix).split("/")
            if parents and request.query.get("recursive") != ["true"]:
                top = prefix + parents[0]
                entries[top] = {"type": "directory", "path": top, "oid": blob_id(top.encode())}
                entries[top]["size"] = 0
                continue
            entries[path] = {"type": "file", "path": path, "oid": blob_id(content)}
            entries[path]["size"] = len(content)
            if in_store(content):
                sha256 = hashlib.sha256(content).hexdigest()
                entries[path]["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
        return Reply(list(entries.values()))

    def _branch(self, request: Request, repo_id: str, name: str) -> Reply:
        repository = self._at(repo_id)
        if name in repository.branches:
            raise Refusal(409, "BranchExists")
        start = repository.at(request.json.get("startingPoint") or "main")
        repository.branches[name] = [start.sha]
        return Reply({})

    def _tag(self, request: Request, repo_id: str, revision: str) -> Reply:
        repository = self._at(repo_id)
        name = request.json["tag"]
        if name in repository.tags:
            raise Refusal(409, "TagExists")
        repository.tags[name] = repository.at(revision).sha
        return Reply({})

    def _preupload(self, request: Request, repo_id: str, revision: str) -> Reply:
        present = self._at(repo_id).at(revision).files
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if in_store(base64.b64decode(file["sample"])) else "regular",
                "shouldIgnore": False,
                "oid": blob_id(present[file["path"]]) if file["path"] in present else None,
            }
            for file in request.json["files"]
        ]
        return Reply({"files": files})

    def _batch(self, request: Request, repo_id: str) -> Reply:
        self._at(repo_id)
        objects = []
        for wanted in request.json["objects"]:
            href = f"{self.endpoint}/store/{repo_id}/{wanted['oid']}"
            new = wanted["oid"] not in self.store
            objects.append({**wanted, **({"actions": {"upload": {"href": href}}} if new else {})})
        return Reply({"transfer": "basic", "objects": objects})

    def _store(self, request: Request, repo_id: str, sha256: str) -> Reply:
        if hashlib.sha256(request.body).hexdigest() != sha256:
            raise Refusal(400, "BadContent", "What arrived is not what was announced.")
        self.store[sha256] = request.body
        return Reply(b"")

    def _stored(self, request: Request, repo_id: str, sha256: str) -> Reply:
        content = self.store[sha256]
        if asked := re.fullmatch(r"bytes=(\d+)-", request.headers.get("range", "")):
            start = int(asked[1])
            last, size = len(content) - 1, len(content)
            return Reply(content[start:], 206, {"Content-Range": f"bytes {start}-{last}/{size}"})
        return Reply(content)

    def _commit(self, request: Request, repo_id: str, revision: str) -> Reply:
        repository = self._at(repo_id)
        if revision not in repository.branches:
            raise Refusal(404, "RevisionNotFound")
        files, message = dict(repository.at(revision).files), ""
        for line in request.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            match operation["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in self.store:
                        raise Refusal(400, "MissingObject", f"{value['path']} was not uploaded.")
                    files[value["path"]] = self.store[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
                case unknown:
                    self.unknown_requests.append(f"commit operation {unknown}")
                    raise Refusal(400, "UnknownOperation")
        sha = repository.add(revision, message, files).sha
        return Reply({"commitOid": sha, "commitUrl": f"{self.endpoint}/{repo_id}/commit/{sha}"})

    def _file(self, request: Request, repo_id: str, revision: str, path: str) -> Reply:
        commit = self._at(repo_id).at(revision)
        if path not in commit.files:
            raise Refusal(404, "EntryNotFound", **{"X-Repo-Commit": commit.sha})
        content = commit.files[path]
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{blob_id(content)}"'}
        if not in_store(content):
            return Reply(content, headers=headers)
        sha256 = hashlib.sha256(content).hexdigest()
        # Under its other name this machine is another host, so clients send no token.
        elsewhere = self.endpoint.replace("127.0.0.1", "localhost")
        headers |= {
            "X-Linked-ETag": f'"{sha256}"',
            "X-Linked-Size": str(len(content)),
            "Location": f"{elsewhere}/store/{repo_id}/{sha256}",
        }
        return Reply(b"", 302, headers)

    def _new(self, repo_id: str, private: bool = False) -> Repository:
        first = Commit(blob_id(repo_id.encode()), "initial commit", {})
        return self._repositories.setdefault(repo_id, Repository(first, private))

    def _at(self, repo_id: str) -> Repository:
        if repo_id not in self._repositories:
            raise Refusal(404, "RepoNotFound")
        return self._repositories[repo_id]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the body waits until the headers are acknowledged

    def _respond(self) -> None:
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length", 0))
        cut = self.server.hub.is_cut(self.command, url.path)
        if cut and length:
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(length)
        request = Request(self.command, url.path, parse_qs(url.query), headers, body)
        try:
            reply = self.server.hub.answer(request)
        except Exception:  # send a 4xx, because clients retry lost connections many times
            self.server.hub.unknown_requests.append(f"{self.command} {url.path}")
            reply = Reply({"error": traceback.format_exc()}, 400)
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in {**reply.headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if cut:
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _respond  # noqa: N815

    def log_message(self, *args: object) -> None:
        """Log nothing, to keep the output of tests short."""
