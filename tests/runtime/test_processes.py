"""The launcher of the processes is found before anything starts, and incomplete settings are refused."""

import importlib.util
import os
import socket
from pathlib import Path

import jax
import pytest
from jax._src import xla_bridge

from moe_jax.parallel import initialize_processes
from moe_jax.runtime.processes import (
    VISIBLE_DEVICES,
    arguments_by_hand,
    arguments_of_cluster,
    leave,
    settings_of_cache,
    use_one_gpu,
)

BY_HAND = {"MOE_JAX_COORDINATOR": "node0:1234", "MOE_JAX_NUM_PROCESSES": "4", "MOE_JAX_PROCESS_ID": "3"}
SLURM = {"SLURM_JOB_ID": "9", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def test_a_single_process_starts_nothing():
    assert arguments_by_hand({}) is None and arguments_of_cluster({}) is None
    initialize_processes(num_processes=1)
    assert not jax.distributed.is_initialized()


def test_a_port_in_use_and_one_without_an_answer_are_named(monkeypatch):
    monkeypatch.setenv("MOE_JAX_CONNECT_SECONDS", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=f"process 0 cannot listen at {address}: another program does"):
            initialize_processes(address, 2, 0)
    with pytest.raises(RuntimeError, match=f"no answer from process 0 at {address} for 0 s .*refused"):
        initialize_processes(address, 2, 1)
    assert not jax.distributed.is_initialized()


def test_a_single_process_keeps_to_its_gpus(monkeypatch):
    monkeypatch.setenv("MOE_JAX_NUM_PROCESSES", "1")
    monkeypatch.setenv("MOE_JAX_LOCAL_DEVICE_IDS", "2,3")
    before = {name: jax.config.values[name] for name in VISIBLE_DEVICES}
    jax.devices()
    with pytest.raises(RuntimeError, match="before anything that asks JAX for devices; .* not on the GPUs 2,3 alone"):
        initialize_processes()
    assert {name: jax.config.values[name] for name in VISIBLE_DEVICES} == before
    try:
        monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
        initialize_processes()
        assert {jax.config.values[name] for name in VISIBLE_DEVICES} == {"2,3"}
        monkeypatch.undo()
        # A second call does nothing.
        initialize_processes(num_processes=1, local_device_ids=[2, 3])
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_use_one_gpu_keeps_the_first_gpu_of_the_process(monkeypatch):
    """Once JAX has started its backends, nothing changes."""
    before = {name: jax.config.values[name] for name in VISIBLE_DEVICES}
    jax.devices()
    use_one_gpu()
    assert {name: jax.config.values[name] for name in VISIBLE_DEVICES} == before
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    try:
        for visible, first in (("all", "0"), ("2,3", "2")):
            for name in VISIBLE_DEVICES:
                jax.config.update(name, visible)
            use_one_gpu()
            assert {jax.config.values[name] for name in VISIBLE_DEVICES} == {first}
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_settings_come_from_environment_or_arguments():
    arguments = arguments_by_hand({**BY_HAND, "MOE_JAX_LOCAL_DEVICE_IDS": "2,3"})
    assert arguments == {
        "coordinator_address": "node0:1234", "num_processes": 4, "process_id": 3, "local_device_ids": [2, 3],
        "cluster_detection_method": "deactivate",
    }  # fmt: skip
    assert arguments_by_hand({}, "node0:1234", 4, 3, [2, 3]) == arguments
    assert arguments_by_hand(BY_HAND, process_id=0)["process_id"] == 0
    assert arguments_by_hand({"MOE_JAX_NUM_PROCESSES": "1"})["num_processes"] == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"MOE_JAX_COORDINATOR": None}, "MOE_JAX_COORDINATOR is missing"),
        (
            {"MOE_JAX_NUM_PROCESSES": None, "MOE_JAX_PROCESS_ID": None},
            "NUM_PROCESSES is missing; MOE_JAX_PROCESS_ID is missing",
        ),
        ({"MOE_JAX_COORDINATOR": "node0"}, "MOE_JAX_COORDINATOR='node0' must be host:port"),
        ({"MOE_JAX_COORDINATOR": "node0:99999"}, "must be host:port"),
        ({"MOE_JAX_NUM_PROCESSES": "0"}, "MOE_JAX_NUM_PROCESSES=0 must be at least 1"),
        ({"MOE_JAX_NUM_PROCESSES": "four"}, "MOE_JAX_NUM_PROCESSES='four' must be integers"),
        ({"MOE_JAX_PROCESS_ID": "1,2"}, "MOE_JAX_PROCESS_ID='1,2' must be one integer"),
        ({"MOE_JAX_PROCESS_ID": "4"}, "MOE_JAX_PROCESS_ID=4 must be from 0 to 3"),
        ({"MOE_JAX_LOCAL_DEVICE_IDS": "1,1"}, r"MOE_JAX_LOCAL_DEVICE_IDS=\[1, 1\] must be distinct numbers"),
    ],
)
def test_half_of_the_settings_are_refused(changes, message):
    environment = {name: value for name, value in {**BY_HAND, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        arguments_by_hand(environment)


def test_slurm_and_open_mpi_are_left_to_jax():
    assert arguments_of_cluster(SLURM) == {}
    assert arguments_of_cluster({"OMPI_COMM_WORLD_SIZE": "2"}) == {}
    assert arguments_of_cluster({"OMPI_COMM_WORLD_SIZE": "1"}) is None
    # A shell in a job, and a step of one task, are alone.
    assert arguments_of_cluster({name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS")}) is None
    assert arguments_of_cluster({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_a_process_that_sees_one_gpu_alone_takes_it():
    assert arguments_of_cluster({**SLURM, "CUDA_VISIBLE_DEVICES": "3"}) == {"local_device_ids": [0]}
    assert arguments_of_cluster({**SLURM, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == {}


def test_kubernetes_needs_an_indexed_job_and_its_package(monkeypatch):
    assert arguments_of_cluster(POD) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package kubernetes: pip install 'jax\[k8s\]'"):
        arguments_of_cluster({**POD, "JOB_COMPLETION_INDEX": "0"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert arguments_of_cluster({**POD, "JOB_COMPLETION_INDEX": "0"}) == {}


def test_initializing_after_jax_began_is_refused():
    jax.devices()
    with pytest.raises(RuntimeError, match="initialize_processes: .*before"):
        initialize_processes("localhost:1234", 2, 0)


def test_a_single_process_leaves_with_its_status():
    with pytest.raises(SystemExit) as status:
        leave(3)
    assert status.value.code == 3


def test_programs_are_kept_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = settings_of_cache({}, None)
    assert found["jax_compilation_cache_dir"] == str(tmp_path / ".cache" / "moe_jax" / "xla")
    of_xdg = settings_of_cache({"XDG_CACHE_HOME": str(tmp_path / "xdg")}, None)
    assert of_xdg["jax_compilation_cache_dir"] == str(tmp_path / "xdg" / "moe_jax" / "xla")
    # A small model's programs compile in less than a second each. With a size JAX locks the folder.
    assert found["jax_persistent_cache_min_compile_time_secs"] == 0
    assert found["jax_compilation_cache_max_size"] > 1e9 and found.keys() <= jax.config.values.keys()
    # JAX makes the folder once there is a program.
    assert not list(tmp_path.iterdir())


def test_settings_of_the_users_cache_stay(tmp_path, monkeypatch):
    smallest = {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "5"}
    assert "jax_persistent_cache_min_compile_time_secs" not in settings_of_cache(smallest, None)
    assert settings_of_cache({}, "/scratch/programs") == settings_of_cache({}, "") == {}
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert settings_of_cache({"XDG_CACHE_HOME": str(tmp_path)}, None) == {}


def test_a_cache_folder_that_cannot_be_looked_into_is_left_alone(tmp_path, monkeypatch):
    """Containers often run as a user without rights in HOME."""
    closed, stat = tmp_path / "closed", os.stat
    closed.mkdir()

    def denied(path, **options):
        if closed in Path(path).parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr("os.stat", denied)
    monkeypatch.setattr("os.access", lambda path, mode: path != closed)
    assert settings_of_cache({"XDG_CACHE_HOME": str(closed / "cache")}, None) == {}
