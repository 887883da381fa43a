"""A Hub on loopback: the part of the Hugging Face Hub's protocol that publishing and loading a model needs.

Repositories live in memory. Two tokens are known, one may write and one only read; faults are switched on by name:

    with hub() as server:
        environment = {**os.environ, **server.environment(home, token="hf_writes")}
        server.breaks_at = "upload"  # the connection drops in the middle of the next large files

What it answers was compared with what huggingface_hub 1.33 and 2.4 send; large files go by git-lfs, not by Xet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from huggingface_hub import ModelCardData

TOKENS = {"hf_writes": "write", "hf_reads": "read"}
USER = "user"
PART = 64 * 1024  # bytes; larger files are asked for in parts of this size
REPO_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


@dataclass
class Repository:
    """What was committed: the text of small files, the hash of large ones."""

    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    large: dict[str, str] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: ["initial commit"])

    @property
    def head(self) -> str:
        return hashlib.sha1(f"{self.commits}".encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """The server and its state."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.requests: list[str] = []
        self.breaks_at = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """The variables that send huggingface_hub here; to be set before it is imported."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": token or "",
        }

    def content(self, name: str, path: str) -> bytes:
        """What a download of a file gives."""
        repository = self.repositories[name]
        return self.objects[repository.large[path]] if path in repository.large else repository.files[path]

    def paths(self, name: str) -> list[str]:
        repository = self.repositories[name]
        return sorted([*repository.files, *repository.large])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is none of our business."""


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: Any = None, code: str = "", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        self.send_response(status)
        headers.setdefault("Content-Length", str(len(content)))
        if code:
            headers["X-Error-Code"] = code
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int, message: str, code: str = "") -> None:
        self.answer(status, {"error": message}, code, X_Error_Message=message)

    def hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(2)
        self.close_connection = True

    @property
    def role(self) -> str | None:
        """What the request's token allows; None without one, "unknown" for one that was not given out."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return TOKENS.get(token, "unknown") if token else None

    def body(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is not None:
            return self.rfile.read(int(length))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def do(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        for pattern, method in ROUTES:
            if (match := re.fullmatch(pattern, f"{self.command} {path}")) is not None:
                getattr(self, method)(*match.groups())
                return
        self.body() if self.command in ("POST", "PUT") else None
        self.refuse(404, f"no such page: {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = do  # noqa: N815, the names that http.server calls

    # Accounts and repositories

    def whoami(self) -> None:
        if self.role in (None, "unknown"):
            self.refuse(401, "Invalid credentials in Authorization header")
        else:
            self.answer(200, {"type": "user", "name": USER, "auth": {"accessToken": {"role": self.role}}, "orgs": []})

    def may_write(self, name: str) -> bool:
        if self.role in (None, "unknown"):
            self.refuse(401, "Invalid username or password.")
        elif self.role == "read" or not name.startswith(f"{USER}/"):
            self.refuse(403, f'You don\'t have the rights to write to "{name}".')
        elif name not in self.server.repositories:
            self.refuse(404, "Repository not found", "RepoNotFound")
        else:
            return True
        return False

    def may_read(self, name: str) -> bool:
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and self.role in (None, "unknown")):
            self.refuse(401 if self.role is None else 404, "Repository not found", "RepoNotFound")
            return False
        return True

    def create(self) -> None:
        wanted = json.loads(self.body())
        name = f"{wanted.get('organization') or USER}/{wanted['name']}"
        if self.role in (None, "unknown"):
            self.refuse(401, "Invalid username or password.")
        elif self.role == "read" or not name.startswith(f"{USER}/"):
            self.refuse(403, f'You don\'t have the rights to create a model under the namespace "{name}"')
        elif name in self.server.repositories:
            self.answer(409, {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"})
        else:
            private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
            self.server.repositories[name] = Repository(private)
            self.answer(200, {"url": f"{self.server.url}/{name}", "name": name})

    def info(self, name: str) -> None:
        if not self.may_read(name):
            return
        repository = self.server.repositories[name]
        files = [{"rfilename": path} for path in self.server.paths(name)]
        self.answer(
            200, {"id": name, "sha": repository.head, "private": repository.private, "siblings": files, "tags": []}
        )

    def tree(self, name: str, folder: str | None) -> None:
        if not self.may_read(name):
            return
        repository = self.server.repositories[name]
        entries: list[dict[str, Any]] = []
        for path in self.server.paths(name):
            if folder and not path.startswith(folder + "/"):
                continue
            content = self.server.content(name, path)
            entry = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
            if path in repository.large:
                entry["lfs"] = {"oid": repository.large[path], "size": len(content), "pointerSize": 130}
            entries.append(entry)
        entries += [
            {"type": "directory", "path": parent, "oid": "0" * 40, "size": 0}
            for parent in sorted({path.rpartition("/")[0] for path in self.server.paths(name)} - {""})
        ]
        self.answer(200, entries)

    # Upload

    def validate(self) -> None:
        self.answer(*validation(json.loads(self.body())["content"]))

    def preupload(self, name: str, _revision: str) -> None:
        files = json.loads(self.body())["files"]
        if not self.may_write(name):
            return
        known = self.server.repositories[name].files
        self.answer(
            200,
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if is_large(file["path"], file["size"]) else "regular",
                        "shouldIgnore": False,
                        "oid": git_hash(known[file["path"]]) if file["path"] in known else None,
                    }
                    for file in files
                ],
                "commitOid": self.server.repositories[name].head,
            },
        )

    def batch(self, name: str) -> None:
        wanted = json.loads(self.body())["objects"]
        if not self.may_write(name):
            return
        objects: list[dict[str, Any]] = []
        for each in wanted:
            oid, size = each["oid"], each["size"]
            entry = {"oid": oid, "size": size}
            if oid not in self.server.objects:
                upload: dict[str, Any] = {"href": f"{self.server.url}/lfs/{oid}"}
                if size > PART:
                    numbers = range(1, -(-size // PART) + 1)
                    parts = {f"{number:05}": f"{self.server.url}/lfs/{oid}/{number}" for number in numbers}
                    upload["header"] = {"chunk_size": str(PART), **parts}
                entry["actions"] = {"upload": upload, "verify": {"href": f"{self.server.url}/verify/{oid}"}}
            objects.append(entry)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, oid: str, part: str | None) -> None:
        if self.server.breaks_at == "upload" and part in (None, "2"):
            self.rfile.read(1)
            self.hang_up()
            return
        content = self.body()
        if part is None:
            self.server.objects[oid] = content
        else:
            self.server.parts[oid, int(part)] = content
        self.answer(200, ETag=f'"{hashlib.md5(content).hexdigest()}"')

    def complete(self, oid: str) -> None:
        numbers = [part["partNumber"] for part in json.loads(self.body())["parts"]]
        self.server.objects[oid] = b"".join(self.server.parts.pop((oid, number)) for number in numbers)
        self.answer(200)

    def verify(self, oid: str) -> None:
        self.body()
        if hashlib.sha256(self.server.objects.get(oid, b"")).hexdigest() == oid:
            self.answer(200)
        else:
            self.refuse(422, "the object differs from its hash")

    def commit(self, name: str, _revision: str) -> None:
        lines = [json.loads(line) for line in self.body().splitlines()]
        if self.server.breaks_at == "commit":
            self.hang_up()
            return
        if not self.may_write(name):
            return
        repository = self.server.repositories[name]
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "header":
                repository.commits.append(value["summary"])
            elif key == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                repository.large[value["path"]] = value["oid"]
        url = f"{self.server.url}/{name}/commit/{repository.head}"
        self.answer(200, {"success": True, "commitOid": repository.head, "commitUrl": url})

    # Download

    def resolve(self, name: str, _revision: str, path: str) -> None:
        if not self.may_read(name):
            return
        repository = self.server.repositories[name]
        if path not in self.server.paths(name):
            self.refuse(404, "Entry not found", "EntryNotFound")
            return
        content = self.server.content(name, path)
        etag = repository.large.get(path) or git_hash(content)
        start, status = 0, 200
        if (wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) is not None:
            start, status = int(wanted[1]), 206
        headers = {"ETag": f'"{etag}"', "X_Repo_Commit": repository.head, "X_Linked_Size": str(len(content))}
        self.answer(status, content[start:], **headers)


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    (r"GET /api/whoami-v2", "whoami"),
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate"),
    (rf"POST /api/models/{NAME}/preupload/([^/]+)", "preupload"),
    (rf"POST /api/models/{NAME}/commit/([^/]+)", "commit"),
    (rf"GET /api/models/{NAME}/tree/[^/]+(?:/(.+))?", "tree"),
    (rf"GET /api/models/{NAME}(?:/revision/[^/]+)?", "info"),
    (rf"POST /{NAME}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /lfs/([0-9a-f]{64})(?:/(\d+))?", "upload"),
    (r"POST /lfs/([0-9a-f]{64})", "complete"),
    (r"POST /verify/([0-9a-f]{64})", "verify"),
    (rf"(?:GET|HEAD) /{NAME}/resolve/([^/]+)/(.+)", "resolve"),
]


def is_large(path: str, size: int) -> bool:
    return path.endswith((".safetensors", ".bin", ".pt", ".png")) or size > 1_000_000


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def validation(card: str) -> tuple[int, dict[str, Any]]:
    """What the Hub says of a card: the complaints that its published specification gives reason for."""
    found = re.match(r"\s*---\r?\n(.*?)\r?\n---\r?\n", card, re.DOTALL)
    if found is None:
        return 200, {"warnings": [{"message": "empty or missing yaml metadata in repo card"}], "errors": []}
    errors: list[str] = []
    try:
        data = yaml.safe_load(found[1]) or {}
        ModelCardData(**{key.replace("-", "_"): value for key, value in data.items()}, ignore_metadata_errors=False)
    except (yaml.YAMLError, TypeError) as error:
        return 400, {"warnings": [], "errors": [{"message": " ".join(str(error).split())}]}
    for key, plural in [("base_model", False), ("datasets", True), ("tags", True), ("language", False)]:
        value = data.get(key, [])
        if plural and not isinstance(value, list):
            errors.append(f'"{key}" must be an array')
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str) for each in values):
            errors.append(f'"{key}" must be strings')
        elif key in ("base_model", "datasets"):
            errors += [f'"{key}" with value "{each}" is not valid' for each in values if not REPO_NAME.fullmatch(each)]
    if "license" in data and not re.fullmatch(r"[a-z0-9.-]+", str(data["license"])):
        errors.append('"license" must be one of the known identifiers')
    for model in data.get("model-index", []):
        for result in model.get("results", []):
            if not {"task", "dataset", "metrics"} <= set(result):
                errors.append('"model-index[0].results[0]" needs task, dataset and metrics')
    return 400 if errors else 200, {"warnings": [], "errors": [{"message": error} for error in errors]}


@contextmanager
def hub() -> Iterator[Hub]:
    """Run the server until the block ends."""
    with Hub() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
