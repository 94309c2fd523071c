"""A server on this machine that stands in for the Hugging Face Hub."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FakeHub:
    """The datasets by name: files by path, of each commit.

    `requests` are the paths of file contents asked for.
    """

    def __init__(self):
        self.datasets = {}
        self.requests = []
        self.broken = set()
        """Paths whose contents cannot be read, as if the network failed."""

    def add(self, name, files):
        """Add a commit with these files, the newest of the dataset, and return its hash."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.datasets.setdefault(name, {})[commit] = files
        return commit

    def find(self, name, revision):
        """Return the commit of a revision and its files, or None."""
        commits = self.datasets.get(name, {})
        if revision == "main":
            revision = next(reversed(commits), None)
        return (revision, commits[revision]) if revision in commits else None


_DATASET = re.compile("/api/datasets/([^/]+/[^/]+)(?:/revision/([^/]+))?")
_TREE = re.compile("/api/datasets/([^/]+/[^/]+)/tree/([^/]+)/?(.*)")
_FILE = re.compile("/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def reply(self, status, content=b"", **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def missing(self, code):
        self.reply(404, b"{}", X_Error_Code=code, X_Error_Message="not found")

    def do_GET(self):
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        for pattern, answer in ((_TREE, self.tree), (_FILE, self.file), (_DATASET, self.dataset)):
            if match := pattern.fullmatch(path):
                name, revision, *rest = match.groups()
                found = hub.find(name, revision or "main")
                if name not in hub.datasets:
                    return self.missing("RepoNotFound")
                if found is None:
                    return self.missing("RevisionNotFound")
                return answer(*found, *rest)
        return self.missing("EntryNotFound")

    do_HEAD = do_GET

    def dataset(self, commit, files):
        name = _DATASET.match(unquote(urlsplit(self.path).path))[1]
        content = {
            "id": name,
            "sha": commit,
            "siblings": [{"rfilename": path} for path in files],
        }
        self.reply(200, json.dumps(content).encode(), Content_Type="application/json")

    def tree(self, commit, files, folder):
        below = f"{folder}/" if folder else ""
        entries = {}
        for path, content in files.items():
            if not path.startswith(below):
                continue
            first, is_deeper, _ = path[len(below) :].partition("/")
            entry = {"type": "file", "path": path, "size": len(content)}
            if is_deeper and "recursive=true" not in self.path.lower():
                entry = {"type": "directory", "path": below + first, "size": 0}
            oid = hashlib.sha1(entry["path"].encode()).hexdigest()
            entries[entry["path"]] = entry | {"oid": oid}
        content = json.dumps(list(entries.values())).encode()
        self.reply(200, content, Content_Type="application/json")

    def file(self, commit, files, path):
        if path not in files:
            return self.missing("EntryNotFound")
        content = files[path]
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X_Repo_Commit": commit,
            "Accept_Ranges": "bytes",
        }
        if self.command == "GET":
            self.server.hub.requests.append(path)
            if path in self.server.hub.broken:
                return self.reply(400, b"{}")  # an error that the library does not retry
        bounds = re.fullmatch("bytes=([0-9]+)-([0-9]*)", self.headers.get("Range") or "")
        if not bounds:
            return self.reply(200, content, **headers)
        part = content[int(bounds[1]) : int(bounds[2]) + 1 if bounds[2] else None]
        end = int(bounds[1]) + len(part) - 1
        return self.reply(
            206, part, Content_Range=f"bytes {bounds[1]}-{end}/{len(content)}", **headers
        )


@contextmanager
def serve():
    """Yield a FakeHub and the address that HF_ENDPOINT must be set to."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = FakeHub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
