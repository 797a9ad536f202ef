"""`moe-jax watch` serves the page until Ctrl-C, and refuses other folders with one line."""

import contextlib
import signal
import subprocess
import sys

import httpx
import pytest

from moe_jax.cli import main


@contextlib.contextmanager
def watch(folder):
    program = [sys.executable, "-m", "moe_jax.cli", "watch", str(folder), "--port", "0"]
    # A shell lets its background jobs ignore Ctrl-C, and a job of tests would hand that on.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_the_page_is_served_until_ctrl_c(tmp_path):
    (tmp_path / "settings.json").write_text('{"steps": 9}')
    with watch(tmp_path) as process:
        address = process.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        assert httpx.get(f"{address}/run").json()["settings"] == {"steps": 9}
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0 and process.stderr.read() == ""


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["watch", str(tmp_path), "--port", "0"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"moe-jax: {tmp_path} is not the output folder of a run")
