"""Serves the page that follows a run, and the lines of the run's files. It only reads, and needs neither JAX nor packages."""

import ipaddress
import json
import os
import threading
import time
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from moe_jax.pages.document import document

FILES = "metrics", "expert_load", "samples"
"""The JSON Lines files of a run, a record for each step."""

NUMBERS = "first", "count"

SIGNS = ".lock", "settings.json", "metrics.jsonl"
"""Files by which a run's folder is known. The first exists before the run reads its data."""

MOST_BYTES = 4 << 20
"""Bytes of lines in one answer. A single longer line is sent whole."""


class RunServer(ThreadingHTTPServer):
    """A server of one run's folder, at `url`; `serve_forever` runs it.

    - `/` is the page, and `/run` describes the run: its settings, the size of each file, and the time since the last step.
    - `/lines?file=metrics&first=7&count=100` has lines of a file, as many of them as `MOST_BYTES` allow.

    Args:
      folder: the output folder of a run, which may have written nothing yet.
      host: the address to listen on.
      port: the port to listen on; 0 chooses a free one.

    Raises:
      FileNotFoundError: there is no such folder, or it belongs to no run.
      OSError: the address is in use, or does not belong to this machine.
    """

    daemon_threads = True

    def __init__(self, folder: str | Path, host: str = "127.0.0.1", port: int = 0):
        self.folder = Path(folder).expanduser()
        if not any((self.folder / name).exists() for name in SIGNS):
            raise FileNotFoundError(
                f"{folder} is not the output folder of a run: it has none of {', '.join(SIGNS)}. Give the --output of "
                "moe-jax finetune, prefer or grpo"
            )
        self.lines = {name: GrowingLines(self.folder / f"{name}.jsonl") for name in FILES}
        try:
            super().__init__((host, port), _Answer)
        except OSError as error:
            raise OSError(f"the page cannot be served on {host}:{port}: {error.strerror or error}") from error
        self.url = f"http://{host}:{self.server_port}"
        local = "localhost", "127.0.0.1", "[::1]", host
        # Else any web page could read the run: its name may be rebound to this address by DNS.
        self.hosts = frozenset(local) if ipaddress.ip_address(str(self.server_address[0])).is_loopback else None

    def run(self) -> dict[str, Any]:
        """Returns the contents of `/run`."""
        try:
            settings = json.loads((self.folder / "settings.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            settings = None
        try:
            idle = max(0.0, time.time() - (self.folder / "metrics.jsonl").stat().st_mtime)
        except OSError:
            idle = None
        files = {name: lines.update() for name, lines in self.lines.items()}
        return {"name": self.folder.resolve().name, "settings": settings, "idle": idle, "files": files}


class GrowingLines:
    """The complete lines of a file that grows, or that a resumed run replaces. Keeps only where each line ends."""

    def __init__(self, file: Path):
        self.file, self._lock = file, threading.Lock()
        self._version, self._ends = 0, array("Q", [0])

    def update(self) -> tuple[int, int]:
        """Finds the lines since the last call. Returns the file's version, and the number of its lines; 0 without a file."""
        with self._lock:
            try:
                with self.file.open("rb") as stream:
                    status = os.fstat(stream.fileno())
                    if status.st_ino != self._version or status.st_size < self._ends[-1]:
                        self._version, self._ends = status.st_ino, array("Q", [0])
                    place = stream.seek(self._ends[-1])
                    for line in stream:
                        place += len(line)
                        # A last line without an end is still being written.
                        if line.endswith(b"\n"):
                            self._ends.append(place)
            except FileNotFoundError:
                self._version, self._ends = 0, array("Q", [0])
            return self._version, len(self._ends) - 1

    def read(self, first: int, count: int) -> bytes:
        """Returns up to `count` lines from number `first` on, as many as `MOST_BYTES` allow; none beyond the last."""
        _, number = self.update()
        ends, last = self._ends, min(first + count, number)
        if not 0 <= first < last:
            return b""
        while last > first + 1 and ends[last] - ends[first] > MOST_BYTES:
            last = first + (last - first) // 2
        with self.file.open("rb") as stream:
            stream.seek(ends[first])
            return stream.read(ends[last] - ends[first])


class _Answer(BaseHTTPRequestHandler):
    server: RunServer

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(address.query).items()}
        host = self.headers.get("Host", "").lower()
        if self.server.hosts is not None and not {host, host.rpartition(":")[0]} & self.server.hosts:
            self.send_error(403, "this server answers only to localhost")
        elif address.path == "/":
            self._send(*document("run"))
        elif address.path == "/run":
            self._send(json.dumps(self.server.run()).encode(), {"Content-Type": "application/json"})
        elif (
            address.path == "/lines" and query.get("file") in FILES and all(query.get(name, "").isdecimal() for name in NUMBERS)
        ):
            first, count = (int(query[name]) for name in NUMBERS)
            self._send(self.server.lines[query["file"]].read(first, count), {"Content-Type": "application/x-ndjson"})
        else:
            self.send_error(404)

    def _send(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in (headers | {"Content-Length": str(len(body)), "Cache-Control": "no-store"}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing: a page asks every two seconds."""
