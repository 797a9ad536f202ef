"""`moe-jax launch` over hosts that are really apart: they train, are lost, refuse and resume."""

import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moe_jax.runtime.processes import no_answer
from moe_jax.train.metrics import read_records

PROGRAM = [sys.executable, "-m", "moe_jax.cli"]
SECONDS = 300
OPTIONS = "--seq-len 32 --batch-size 12 --warmup-steps 1 --learning-rate 1e-3 --dtype float32 --checkpoint-every 100".split()
CONNECT = [sys.executable, "-c", "from moe_jax.parallel import initialize_processes; initialize_processes()"]


def launch(hosts, names, command, folder, environment, hosts_of_job=None, before=None, **firsts):
    """Starts the launcher on each host; the log of each is FOLDER/NAME.log."""
    of_job = f"--hosts {hosts_of_job or len(names)} --coordinator {names[0]}:12355 --processes 1 --cpu-devices 1"
    folder.mkdir(exist_ok=True)
    for i, name in enumerate(names):
        options = f"{of_job} --host {i} --connect-seconds 60".split()
        words = [*(before or {}).get(name, []), *PROGRAM, "launch", *options, "--", *command]
        yield hosts.start(name, words, folder / f"{name}.log", firsts.get(name, ":"), env=environment)


def finetune(folder, output, steps, devices):
    paths = f"finetune --model {folder}/model --data {folder}/texts --output {output} --mesh.fsdp {devices} --steps {steps}"
    return [*PROGRAM, *paths.split(), *OPTIONS]


def wait_for_step(output, step, processes):
    deadline = time.monotonic() + SECONDS
    while len(read_records(output / "metrics.jsonl")) < step and time.monotonic() < deadline:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)


def test_three_hosts_train_and_two_resume(hosts, folder, environment, tmp_path):
    """One of three hosts has its clock an hour ahead, and another a slow link."""
    hosts.slow_down("node2")
    # Only the calendar: a host's clock since its start is its own anyway. Python cannot sleep then, so the first host is first.
    late = {"node1": ["env", "FAKETIME_DONT_FAKE_MONOTONIC=1", "faketime", "-f", "+1h"]}
    output, steps = tmp_path / "run", 40
    starting = launch(hosts, hosts.names, finetune(folder, output, steps, 3), tmp_path / "three", environment, before=late)
    three = [next(starting)]
    while no_answer("10.77.0.1:12355", 1.0):
        assert three[0].poll() is None
    three += starting
    wait_for_step(output, 3, three)
    three[2].send_signal(signal.SIGTERM)
    assert [process.wait(SECONDS) for process in three] == [143] * 3, logs(tmp_path / "three")
    trained = read_records(output / "metrics.jsonl")
    assert 3 <= len(trained) < steps
    two = [*launch(hosts, hosts.names[:2], finetune(folder, output, steps, 2), tmp_path / "two", environment)]
    assert [process.wait(SECONDS) for process in two] == [0, 0], logs(tmp_path / "two")
    alone = finetune(folder, tmp_path / "alone", steps, 1)
    assert hosts.start("node0", alone, tmp_path / "alone.log", env=environment).wait(SECONDS) == 0
    found, expected = read_records(output / "metrics.jsonl"), read_records(tmp_path / "alone" / "metrics.jsonl")
    assert found[: len(trained)] == trained and len(found) == steps
    np.testing.assert_allclose(*([record["loss"] for record in records] for records in (found, expected)), rtol=1e-3)


@pytest.mark.parametrize("lost", ["node1", "node0"])
@pytest.mark.parametrize("way", ["stop", "lose"])
def test_a_host_that_dies_ends_the_others_and_is_named(hosts, folder, environment, tmp_path, way, lost):
    names = hosts.names[:2]
    processes = [*launch(hosts, names, finetune(folder, tmp_path / "run", 100_000, 2), tmp_path / "logs", environment)]
    wait_for_step(tmp_path / "run", 2, processes)
    began = time.monotonic()
    getattr(hosts, way)(lost)
    (other,) = (i for i, name in enumerate(names) if name != lost)
    assert processes[other].wait(SECONDS) != 0
    seconds = time.monotonic() - began
    print(f"{way} {lost}: {names[other]} ended after {seconds:.0f} s")
    assert seconds < 60
    hosts.stop(lost)
    hosts.join(lost)
    log = (tmp_path / "logs" / f"{names[other]}.log").read_text()
    # JAX aborts at once when the connection to process 0 breaks.
    names_it = f"process 0 at {lost}:12355 does not answer" if (way, lost) == ("stop", "node0") else f"on host {lost}: silent"
    assert names_it in log, log[-5000:]


def test_a_host_that_fails_is_named_at_once(hosts, environment, tmp_path):
    program = "from moe_jax.parallel import initialize_processes as join; import time; join()\n"
    program += "import jax; from moe_jax.runtime.processes import leave; time.sleep(3)\n"
    program += "if jax.process_index() == 1: raise KeyError('mine')\ntime.sleep(12); leave(5)"
    first, second = launch(hosts, hosts.names[:2], [sys.executable, "-c", program], tmp_path / "logs", environment)
    assert (first.wait(SECONDS), second.wait(SECONDS)) == (5, 1)
    assert "process 1 on host node1: ended with status 1" in (tmp_path / "logs" / "node0.log").read_text()


def test_ports_in_use_or_without_an_answer_are_named(hosts, environment, tmp_path):
    """The first host cannot listen. Its port is free again then, and the other host finds nobody there."""
    taken = "import socket, time; s = socket.create_server(('', 12355)); time.sleep(600)"
    listener = hosts.start("node0", [sys.executable, "-c", taken], tmp_path / "taken.log")
    time.sleep(2)
    (first,) = launch(hosts, hosts.names[:1], CONNECT, tmp_path / "logs", environment, hosts_of_job=2)
    assert first.wait(SECONDS) == 1
    listener.kill()
    listener.wait()
    _, second = launch(hosts, hosts.names[:2], CONNECT, tmp_path / "logs", environment, node0="exit 0")
    assert second.wait(SECONDS) == 1
    assert "process 0 cannot listen at node0:12355: another program does" in (tmp_path / "logs" / "node0.log").read_text()
    log = (tmp_path / "logs" / "node1.log").read_text()
    assert "node1 has had no answer from process 0 at node0:12355 for 60 s" in log, log


def test_a_folder_that_is_not_shared_is_refused(hosts, folder, environment, tmp_path):
    output = tmp_path / "own" / "run"
    output.parent.mkdir()
    command = finetune(folder, output, 2, 2)
    own = f"mount -t tmpfs tmpfs {output.parent}"
    processes = [*launch(hosts, hosts.names[:2], command, tmp_path / "logs", environment, node1=own)]
    assert [process.wait(SECONDS) for process in processes] == [2, 2], logs(tmp_path / "logs")
    for name in hosts.names[:2]:
        expected = f"processes [1] of 2 do not see the folder {output} of process 0"
        assert expected in (tmp_path / "logs" / f"{name}.log").read_text()


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
