"""A stand-in for the Hugging Face Hub on this machine, so that pushing and pulling can be tested.

It speaks as much of the Hub's HTTP interface as `push_to_hub`, `from_pretrained`, `upload_folder`
and `snapshot_download` use, for models alone, and keeps its repositories in memory.
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
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopback"
USER = "user"

_REPO = r"(?P<repo_id>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
_ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/validate-yaml", "validate_card"),
    ("POST", r"/api/repos/create", "create"),
    ("GET", rf"/api/models/{_REPO}(?:/revision/{_REVISION})?", "info"),
    ("GET", rf"/api/models/{_REPO}/tree/{_REVISION}(?:/(?P<folder>.+))?", "tree"),
    ("POST", rf"/api/models/{_REPO}/preupload/{_REVISION}", "preupload"),
    ("POST", rf"/api/models/{_REPO}/commit/{_REVISION}", "commit"),
    ("GET", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "file"),
]


class Commit(NamedTuple):
    """One state of a repository: its files by path."""

    sha: str
    message: str
    files: dict[str, bytes]


class Reply(NamedTuple):
    """What the Hub answers: JSON unless it is bytes."""

    body: Any
    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012  nobody writes to it


class Refusal(Exception):  # noqa: N818  an answer, not a fault
    """A 4xx answer; `code` is what huggingface_hub turns into an exception class."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.reply = Reply({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code})


def blob_id(content: bytes) -> str:
    """git's name for a file's content; huggingface_hub skips files whose name has not changed."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class LoopbackHub:
    """`with LoopbackHub() as hub`: serves on 127.0.0.1 until the end of the block.

    `unknown_requests` lists what a client asked for and this class does not know.
    """

    def __enter__(self) -> Self:
        self.unknown_requests: list[str] = []
        self._commits: dict[str, list[Commit]] = {}
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
        """Environment of a client process that has never run before: each access has empty caches.

        huggingface_hub reads it when it is imported, hence only in a process of its own.
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

    def files(self, repo_id: str) -> dict[str, bytes]:
        """The newest files of a repository."""
        return self._commits[repo_id][-1].files

    def commits(self, repo_id: str) -> list[Commit]:
        """All states of a repository, the oldest (empty) first."""
        return self._commits[repo_id]

    def answer(self, method: str, path: str, body: bytes, authorization: str | None) -> Reply:
        """Answer one request."""
        if method == "POST" and authorization != f"Bearer {TOKEN}":
            return Refusal(401, "Unauthorized").reply
        for route_method, pattern, name in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and route_method == method.replace("HEAD", "GET"):
                groups = {key: unquote(value) for key, value in match.groupdict().items() if value}
                try:
                    with self._lock:
                        return getattr(self, f"_{name}")(body=body, **groups)
                except Refusal as refusal:
                    return refusal.reply
        self.unknown_requests.append(f"{method} {path}")
        return Refusal(404, "UnknownRequest").reply

    def _whoami(self, body: bytes) -> Reply:
        token = {"role": "write", "displayName": "loopback"}
        return Reply({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": token}})

    def _validate_card(self, body: bytes) -> Reply:
        return Reply({"errors": [], "warnings": []})

    def _create(self, body: bytes) -> Reply:
        wanted = json.loads(body)
        repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
        status = 409 if repo_id in self._commits else 200
        self._commits.setdefault(repo_id, [Commit(blob_id(repo_id.encode()), "initial commit", {})])
        return Reply({"url": f"{self.endpoint}/{repo_id}", "id": repo_id}, status)

    def _info(self, body: bytes, repo_id: str, revision: str = "main") -> Reply:
        commit = self._at(repo_id, revision)
        siblings = [{"rfilename": path} for path in commit.files]
        return Reply({"id": repo_id, "sha": commit.sha, "private": False, "siblings": siblings})

    def _tree(self, body: bytes, repo_id: str, revision: str, folder: str = "") -> Reply:
        prefix = folder and f"{folder}/"
        files = self._at(repo_id, revision).files
        inside = {path: content for path, content in files.items() if path.startswith(prefix)}
        if folder and not inside:
            raise Refusal(404, "EntryNotFound")
        return Reply(
            [
                {"type": "file", "path": path, "oid": blob_id(content), "size": len(content)}
                for path, content in inside.items()
            ]
        )

    def _preupload(self, body: bytes, repo_id: str, revision: str) -> Reply:
        present = self._at(repo_id, revision).files
        # "regular" has every file travel inside the commit, also with hf_xet installed.
        return Reply(
            {
                "files": [
                    {
                        "path": path,
                        "uploadMode": "regular",
                        "shouldIgnore": False,
                        "oid": blob_id(present[path]) if path in present else None,
                    }
                    for path in (file["path"] for file in json.loads(body)["files"])
                ]
            }
        )

    def _commit(self, body: bytes, repo_id: str, revision: str) -> Reply:
        head = self._at(repo_id, revision)
        files, message = dict(head.files), ""
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            match operation["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "deletedFile":
                    del files[value["path"]]
                case unknown:
                    self.unknown_requests.append(f"commit operation {unknown}")
                    raise Refusal(400, "UnknownOperation")
        sha = blob_id(head.sha.encode() + body)
        self._commits[repo_id].append(Commit(sha, message, files))
        return Reply({"commitOid": sha, "commitUrl": f"{self.endpoint}/{repo_id}/commit/{sha}"})

    def _file(self, body: bytes, repo_id: str, revision: str, path: str) -> Reply:
        commit = self._at(repo_id, revision)
        if path not in commit.files:
            raise Refusal(404, "EntryNotFound")
        content = commit.files[path]
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{blob_id(content)}"'}
        return Reply(content, headers=headers)

    def _at(self, repo_id: str, revision: str) -> Commit:
        """The commit of a sha, or the newest one, which is `main`; there are no other branches."""
        if repo_id not in self._commits:
            raise Refusal(404, "RepoNotFound")
        commits = self._commits[repo_id]
        if revision == "main":
            return commits[-1]
        for commit in commits:
            if commit.sha == revision:
                return commit
        raise Refusal(404, "RevisionNotFound")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(self.path).path
        try:
            reply = self.server.hub.answer(
                self.command, path, body, self.headers.get("Authorization")
            )
        except Exception:  # a 4xx reaches the client at once, a lost connection after many retries
            self.server.hub.unknown_requests.append(f"{self.command} {path}")
            reply = Reply({"error": traceback.format_exc()}, 400)
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in {**reply.headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _respond  # noqa: N815

    def log_message(self, *args: object) -> None:
        """Keep the test's output free of one line per request."""
