"""Processes of rewards and their parent."""

import subprocess
import sys
import time

from tests.helpers import some_rewards

SCRIPT = """
import os, sys, threading
from moe_jax.reinforcement import score
from tests.helpers.groups import group

print("the script runs", flush=True)
row = {"prompt": "?", "answer": sys.argv[1]}
threading.Thread(target=score, args=([group(row=row)], [sys.argv[2]]), daemon=True).start()
sys.stdin.read(1)
os.kill(os.getpid(), 9)
"""


def test_a_call_that_hangs_ends_with_its_killed_parent(tmp_path):
    script, note = tmp_path / "script.py", tmp_path / "processes"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(note), f"{some_rewards.__name__}:hangs"]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not (note.exists() and note.read_text().endswith("\n")):
        time.sleep(0.05)
    processes = note.read_text().split()
    assert len(processes) == 2 and all(map(some_rewards.is_running, processes))
    output, _ = parent.communicate("x")
    assert output.count("the script runs") == 1, "a process must not run the user's script again"
    while any(map(some_rewards.is_running, processes)):
        time.sleep(0.05)
