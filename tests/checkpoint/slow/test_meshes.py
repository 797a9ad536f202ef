"""Checkpoints on meshes of several processes: each process reads what its devices hold, once."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import moe_jax
from tests.helpers import cpu_flags
from tests.helpers.checkpoint_helpers import read_weights, same_bits, write_checkpoint

ROOT = Path(__file__).parents[3]


def run(folder, output, axes) -> list[dict]:
    """Returns the printed counts of each process of `load_on_mesh.py`: two, with two devices each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": cpu_flags.of_devices(2), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.helpers.load_on_mesh", folder, output, json.dumps(axes), coordinator, "2"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = [subprocess.Popen([*command, str(i)], env=environment, **pipes) for i in range(2)]
    try:
        printed = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, printed, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in printed]


@pytest.mark.thorough
def test_two_processes_read_only_their_own_slices(tmp_path):
    """The two save the original weights, and generate the tokens of a process alone."""
    write_checkpoint(tmp_path / "in", num_experts=8)
    total = sum(tensor.nbytes for tensor in read_weights(tmp_path / "in").values())
    counts = run(tmp_path / "in", tmp_path / "out", dict(fsdp=2, expert=2))
    assert same_bits(read_weights(tmp_path / "out" / "hf"), read_weights(tmp_path / "in"))
    alone = moe_jax.from_pretrained(tmp_path / "in", dtype=jnp.float32, progress=False)
    expected = moe_jax.generate(alone, [[1, 2, 3], [4]], max_new_tokens=5)
    for process in counts:
        assert process["read"] == process["held"] < 0.75 * total
        assert process["generated"] == expected
