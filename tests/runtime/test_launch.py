"""The launcher gives each process its place in the job, marks the lines of each, and ends all processes together."""

import fcntl
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from moe_jax.commands.launch import LaunchCommand, launch, process_environments

SHOW = "import os; print(*(os.environ.get(f'MOE_JAX_{n}') for n in ('PROCESS_ID', 'NUM_PROCESSES', 'LOCAL_DEVICE_IDS')))"


def settings(source: str, **options) -> LaunchCommand:
    return LaunchCommand((sys.executable, "-c", source), **{"processes": 3, "cpu_devices": 2, **options})


def test_each_process_knows_its_place_and_its_lines_are_marked(capfd):
    source = SHOW + "; import sys; print('to stderr', file=sys.stderr); print(os.environ['JAX_NUM_CPU_DEVICES'], end='')"
    assert launch(settings(source)) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(f"[{i}] {text}" for i in range(3) for text in ("2", f"{i} 3 None"))
    assert sorted(err.splitlines()) == [f"[{i}] to stderr" for i in range(3)]


def test_the_first_failure_ends_the_others_and_is_the_status(capfd):
    source = "import os, sys, time; sys.exit(7) if os.environ['MOE_JAX_PROCESS_ID'] == '1' else time.sleep(600)"
    began = time.monotonic()
    assert launch(settings(source)) == 7
    assert time.monotonic() - began < 60
    assert "moe-jax launch: process 1 failed with status 7" in capfd.readouterr().err


CONNECTED = """
import sys, time
import jax
from moe_jax.parallel import initialize_processes
from moe_jax.runtime.processes import barrier, require_shared, texts_of_all, unlike_the_first

initialize_processes()
initialize_processes()
assert jax.device_count() == 4 and jax.local_device_count() == 2
require_shared(sys.argv[1])
try:
    require_shared(f"{sys.argv[1]}/{jax.process_index()}")
except ValueError as error:
    print(error)
assert unlike_the_first("same") == [] and unlike_the_first(f"{jax.process_index()}") == [1]
assert texts_of_all("long" * 5000 * jax.process_index()) == ["", "long" * 5000]
if jax.process_index() == 1:
    raise KeyError("in the middle")
try:
    barrier("never reached by all")
finally:
    # The loss of the connection may reach this process before the launcher has seen the other's end.
    time.sleep(600)
"""


def test_a_failing_process_does_not_wait_for_the_others(tmp_path, capfd, monkeypatch):
    """Both processes are connected when one of them fails."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = (sys.executable, "-c", CONNECTED, str(tmp_path / "folder"))
    # Without `initialize_processes`' care JAX would wait for five minutes.
    began = time.monotonic()
    assert launch(LaunchCommand(command, processes=2, cpu_devices=2, grace_seconds=1)) == 1
    assert time.monotonic() - began < 200
    out, err = capfd.readouterr()
    assert "[1] KeyError: 'in the middle'" in err and "process 1 failed with status 1" in err
    for rank in range(2):
        assert f"[{rank}] processes [1] of 2 do not see the folder {tmp_path}/folder/{rank} of process 0" in out
    assert not any((tmp_path / "folder").iterdir())


def test_a_process_that_does_not_end_is_killed_with_its_children(tmp_path):
    # The process ignores SIGTERM, as JAX's do, and so does its child.
    child = (
        f"import fcntl, time; file = open(r'{tmp_path}/child', 'w'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('locked', file=file, flush=True); time.sleep(3600)"
    )
    source = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['MOE_JAX_PROCESS_ID'] == '0':\n"
        f"    subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)\n"
        f"while not os.path.exists(r'{tmp_path}/child') or not os.path.getsize(r'{tmp_path}/child'): time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert launch(settings(source, processes=2, grace_seconds=0.2)) == 128 + signal.SIGKILL
    with open(tmp_path / "child") as file:
        # The lock is held as long as the child lives. A process id also exists for a dead child that no parent waited for.
        fcntl.flock(file, fcntl.LOCK_EX)


@pytest.mark.parametrize(
    "send",
    [lambda number: os.kill(os.getpid(), number), lambda number: signal.pthread_kill(threading.get_ident(), number)],
    ids=["to the process", "to a thread that does not handle it"],
)
def test_signals_are_passed_on(send, tmp_path, capfd):
    source = (
        "import os, pathlib, signal, sys, time\n"
        # The first process that ends has the others told once more, while they may still be printing.
        "def stop(*_): signal.signal(signal.SIGTERM, signal.SIG_IGN); print('told to stop'); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['MOE_JAX_PROCESS_ID']).touch(); time.sleep(600)"
    )
    before = signal.getsignal(signal.SIGTERM)
    ended = threading.Event()

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2 and not ended.wait(0.01):
            pass
        if not ended.is_set():
            send(signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert launch(settings(source, processes=2)) == 3
    finally:
        ended.set()
        thread.join()
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] told to stop", "[1] told to stop"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_after_a_signal_a_process_has_time_to_save(capfd):
    """`grace_seconds`, the time after a neighbour's failure, does not apply."""
    source = (
        "import signal, sys, time\n"
        "def save(*_): time.sleep(0.5); print('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); print('ready')\n"
        "import os; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    )
    assert launch(settings(source, processes=1, grace_seconds=0.0, save_seconds=300.0)) == 0
    assert "saved" in capfd.readouterr().out
    assert launch(settings(source, processes=1, save_seconds=0.1)) == 128 + signal.SIGKILL


def test_ignored_signals_stay_ignored():
    """As under nohup."""
    source = "import signal, sys; sys.exit(signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch(settings(source, processes=1)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_gpus_are_shared_out_evenly_and_the_users_settings_win():
    environment = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}
    each = process_environments(LaunchCommand(("x",)), environment)
    assert [variables["MOE_JAX_LOCAL_DEVICE_IDS"] for variables in each] == ["0", "1", "2", "3"]
    assert each[0]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == ".5" and "JAX_PLATFORMS" not in each[0]
    pairs = process_environments(LaunchCommand(("x",), processes=2), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert [variables["MOE_JAX_LOCAL_DEVICE_IDS"] for variables in pairs] == ["0,1", "2,3"]
    assert pairs[0]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.95"
    assert pairs[0]["MOE_JAX_COORDINATOR"] == pairs[1]["JAX_COORDINATOR_BIND_ADDRESS"]


def test_several_hosts_number_their_processes_on():
    command = LaunchCommand(("x",), hosts=3, host=1, coordinator="node0:1234")
    each = process_environments(command, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert [variables["MOE_JAX_PROCESS_ID"] for variables in each] == ["2", "3"]
    assert {variables["MOE_JAX_NUM_PROCESSES"] for variables in each} == {"6"}
    assert each[0]["MOE_JAX_COORDINATOR"] == "node0:1234" and "JAX_COORDINATOR_BIND_ADDRESS" not in each[0]


def test_settings_that_make_no_sense_are_refused():
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    for options, environment, message in (
        ({"command": ()}, gpus, "the program is missing; name it behind --"),
        ({"processes": 3}, gpus, "processes=3 cannot share 4 GPUs evenly"),
        ({"processes": 0}, gpus, "processes=0 must be at least 1"),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "no GPU is visible here; give processes and cpu_devices"),
        ({}, {"CUDA_VISIBLE_DEVICES": "-1"}, "no GPU is visible here; give processes and cpu_devices"),
        ({"cpu_devices": 2}, {}, "cpu_devices needs processes"),
        ({"processes": 1, "cpu_devices": 0}, {}, "cpu_devices=0 must be at least 1"),
        ({"hosts": 2}, gpus, "several hosts need coordinator, the host:port of host 0"),
        ({"hosts": 2, "host": 2, "coordinator": "a:1"}, gpus, "host=2 must be from 0 to hosts - 1"),
        ({"connect_seconds": 0}, gpus, "connect_seconds=0 must be at least 1"),
        ({"grace_seconds": -1}, gpus, "grace_seconds=-1 must not be negative"),
        ({"save_seconds": -1}, gpus, "save_seconds=-1 must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            process_environments(LaunchCommand(**{"command": ("x",), **options}), environment)


def test_a_library_s_chatter_is_left_out_and_its_errors_are_not(capfd):
    ready = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    lost = "[Gloo] Rank 0 lost its connection"
    launch(LaunchCommand((sys.executable, "-c", f"print({ready!r}); print({lost!r})"), processes=1, cpu_devices=1))
    assert capfd.readouterr().out == f"[0] {lost}\n"
