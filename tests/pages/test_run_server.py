"""The server of a run's page has the lines of a run as they are written, and answers only to this machine."""

import contextlib
import json
import threading

import httpx
import pytest

from moe_jax.pages import run_server
from moe_jax.pages.run_server import GrowingLines, RunServer
from moe_jax.train.metrics import MetricsWriter


@contextlib.contextmanager
def watched(folder):
    with RunServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / ".lock").touch()
    return tmp_path


def test_steps_arrive_as_a_run_writes_them(folder):
    with watched(folder) as server:
        run = httpx.get(f"{server.url}/run").json()
        assert run["settings"] is None and run["idle"] is None
        assert run["files"] == {"metrics": [0, 0], "expert_load": [0, 0], "samples": [0, 0]}
        (folder / "settings.json").write_text(json.dumps({"model": "org/model", "steps": 9}))
        writer = MetricsWriter(folder, resumed_step=0)
        for step in (1, 2, 3):
            writer.write({"step": step, "loss": 1 / step}, {"expert_load": [[step, 1]]})
        run = httpx.get(f"{server.url}/run").json()
        assert run["settings"]["steps"] == 9 and run["idle"] < 60
        assert [number for _, number in run["files"].values()] == [3, 3, 0]
        text = httpx.get(f"{server.url}/lines?file=metrics&first=1&count=9").text
        assert [json.loads(line)["step"] for line in text.splitlines()] == [2, 3]
        assert httpx.get(f"{server.url}/lines?file=expert_load&first=2&count=1").json() == {"step": 3, "expert_load": [[3, 1]]}


def test_only_whole_lines_count_and_a_resumed_run_is_new(folder):
    lines = GrowingLines(folder / "metrics.jsonl")
    lines.file.write_text('{"step": 1}\n{"step"')
    first, number = lines.update()
    assert number == 1 and lines.read(0, 9) == b'{"step": 1}\n' and lines.read(1, 9) == b""
    with lines.file.open("a") as stream:
        stream.write(': 2}\n{"step": 3}\n')
    assert lines.update() == (first, 3) and lines.read(1, 1) == b'{"step": 2}\n'
    MetricsWriter(folder, resumed_step=1)
    second, number = lines.update()
    assert second != first and number == 1


def test_an_answer_is_limited_but_has_at_least_a_line(folder, monkeypatch):
    monkeypatch.setattr(run_server, "MOST_BYTES", 10)
    lines = GrowingLines(folder / "samples.jsonl")
    lines.file.write_text("1234\n" * 5 + "long " * 9 + "\n")
    assert lines.read(0, 6) == b"1234\n" and lines.read(0, 2) == b"1234\n1234\n" and len(lines.read(5, 1)) == 46


def test_a_folder_without_a_run_is_refused(tmp_path):
    for wrong in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="is not the output folder of a run: it has none of .lock, settings.json"):
            RunServer(wrong)


def test_other_names_and_paths_are_refused(folder):
    """A web page could rebind its own name to this address, and then read the run."""
    (folder / "secret").write_text("x")
    with watched(folder) as server:
        page = httpx.get(server.url)
        assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
        assert httpx.get(server.url, headers={"Host": f"localhost:{server.server_port}"}).status_code == 200
        assert httpx.get(f"{server.url}/run", headers={"Host": f"evil.example:{server.server_port}"}).status_code == 403
        for path in ("secret", "lines?file=secret&first=0&count=1", "lines?file=metrics&first=-1&count=1", "%2e%2e/secret"):
            assert httpx.get(f"{server.url}/{path}").status_code == 404, path
