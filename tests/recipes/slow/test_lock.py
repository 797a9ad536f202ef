"""Two runs never write into one output folder at once, and a run that is over, or dead, is in nobody's way."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest

from moe_jax.recipes import finetune
from moe_jax.recipes.run.folder import output_lock
from moe_jax.train.metrics import MetricsWriter
from tests.helpers import tiny

HOLDER = """
import fcntl, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("process 7 on elsewhere", file=lock, flush=True)
print("held", flush=True)
time.sleep(600)
"""


def test_the_holder_is_named_until_it_is_killed(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / ".lock")], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(BlockingIOError, match=f"^{tmp_path} is in use by another run, process 7 on elsewhere: wait"):
        with output_lock(tmp_path):
            pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with output_lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_nested_runs_are_refused(tmp_path, monkeypatch, steps_that_learn_nothing):
    """A run within a run is refused; a run after another is not."""
    settings = tiny.settings(tmp_path, steps=1, warmup_steps=0)
    write, refused = MetricsWriter.write, []

    def write_and_start_another(self, record, of_layers):
        write(self, record, of_layers)
        with pytest.raises(BlockingIOError, match=f"run is in use by another run, process {os.getpid()} on ") as error:
            finetune(settings, model=tiny.dense(), tokenizer=tiny.tokenizer())
        refused.append(error)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "write", write_and_start_another)
        finetune(settings, model=tiny.dense(), tokenizer=tiny.tokenizer())
    assert len(refused) == 1
    # A run that fails lets go of the folder too, though its exception is kept, as in a notebook.
    monkeypatch.setattr(sys.modules["moe_jax.recipes.run.model"], "init_state", None)
    with pytest.raises(TypeError) as error:
        finetune(settings, model=tiny.dense(), tokenizer=tiny.tokenizer())
    monkeypatch.undo()
    assert finetune(settings, model=tiny.dense(), tokenizer=tiny.tokenizer()).step == 1 and error.traceback


def test_without_locks_a_run_goes_on_with_a_warning(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with output_lock(tmp_path):
        assert caplog.messages == [
            f"{tmp_path} cannot be locked (No locks available): nothing keeps two runs from writing there at once"
        ]
