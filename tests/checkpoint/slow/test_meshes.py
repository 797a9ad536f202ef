"""Checkpoints on meshes of several devices and several processes: each process reads what its devices hold, once."""

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
from tests.helpers.checkpoint_helpers import read_weights, same_bits, write_checkpoint, write_fp8

ROOT = Path(__file__).parents[3]


def run(folder, output, axes, *, processes: int, devices: int) -> list[dict]:
    """Returns the printed counts of each process of `load_on_mesh.py`; together they have `devices` devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": cpu_flags.of_devices(devices // processes),
        "PYTHONPATH": str(ROOT),
    }
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.helpers.load_on_mesh",
                folder,
                output,
                json.dumps(axes),
                coordinator,
                str(processes),
                str(i),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    try:
        printed = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, printed, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in printed]


def stored_bytes(folder) -> int:
    return sum(tensor.nbytes for tensor in read_weights(folder).values())


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(dict(data=2, fsdp=2, expert=2), marks=pytest.mark.thorough),
        pytest.param(dict(fsdp=8), marks=pytest.mark.thorough),
    ],
    ids=["data fsdp expert", "fsdp"],
)
def test_eight_devices_read_every_byte_once(tmp_path, axes):
    write_checkpoint(tmp_path / "in", mlp_only_layers=[1], attention_bias=True)
    (counts,) = run(tmp_path / "in", tmp_path / "out", axes, processes=1, devices=8)
    assert same_bits(read_weights(tmp_path / "out" / "hf"), read_weights(tmp_path / "in"))
    assert counts["held"] == stored_bytes(tmp_path / "in")
    # The script loads twice: onto the mesh, and onto one device to compare.
    assert counts["read"] == 2 * counts["held"]


@pytest.mark.thorough
def test_two_processes_read_only_their_own_slices(tmp_path):
    """The two save the original weights, and generate the tokens of a process alone."""
    write_checkpoint(tmp_path / "in", num_experts=8)
    total = stored_bytes(tmp_path / "in")
    counts = run(tmp_path / "in", tmp_path / "out", dict(fsdp=2, expert=2), processes=2, devices=4)
    assert same_bits(read_weights(tmp_path / "out" / "hf"), read_weights(tmp_path / "in"))
    alone = moe_jax.from_pretrained(tmp_path / "in", dtype=jnp.float32, progress=False)
    expected = moe_jax.generate(alone, [[1, 2, 3], [4]], max_new_tokens=5)
    for process in counts:
        assert process["read"] == process["held"] < 0.75 * total
        assert process["generated"] == expected


@pytest.mark.thorough
def test_fp8_parts_are_cut_anywhere_in_their_blocks(tmp_path):
    """The script compares them with a whole load. Every byte is read once, though two devices hold it.

    tests/parallel/eight_devices/test_fp8_inference.py loads such parts on eight devices.
    """
    write_fp8(tmp_path / "in", moe_intermediate_size=96, num_hidden_layers=1)
    (counts,) = run(tmp_path / "in", tmp_path / "out", dict(data=2, fsdp=4, expert=2), processes=1, devices=16)
    assert counts["read"] == 2 * counts["held"]
