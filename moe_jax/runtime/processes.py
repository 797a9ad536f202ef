"""One program in several processes, mostly one for each GPU: how they find each other before JAX starts.

Who started them says how: `moe-jax launch` and people by environment variables (or arguments), Slurm, Open MPI and Kubernetes
by what they give each process, which JAX itself knows to read (https://docs.jax.dev/en/latest/multi_process.html).
"""

import hashlib
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge
from jax.experimental import multihost_utils

from moe_jax.runtime.environment import COORDINATOR, LOCAL_DEVICE_IDS, NUM_PROCESSES, PROCESS_ID

VISIBLE_DEVICES = "jax_cuda_visible_devices", "jax_rocm_visible_devices"
"""Settings of JAX: numbers of GPUs, or "all"."""


def initialize_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
) -> None:
    """Connects the processes of a job, so that `jax.devices()` are those of all. A second time it does nothing, and alone
    nothing but hide GPUs that are not this process's.

    To be called before anything that asks JAX for devices. What is not given is taken from the environment variables
    MOE_JAX_COORDINATOR, MOE_JAX_NUM_PROCESSES, MOE_JAX_PROCESS_ID and MOE_JAX_LOCAL_DEVICE_IDS ("0,1"); where none of them is
    set, a step of Slurm, `mpirun` of Open MPI or an indexed Job of Kubernetes is recognised. From then on a process that ends
    by an exception leaves at once: at a normal exit JAX would wait for the others, while these wait for it.

    Args:
      coordinator: "host:port", where process 0 is to listen.
      num_processes: how many there are; 1 needs neither coordinator nor process_id.
      process_id: which of them this one is, from 0.
      local_device_ids: which of the GPUs that are visible here are this process's. Default: all; under Slurm and Open MPI the
        one whose number is that of the process on its host.

    Raises:
      ValueError: half of these are given, or one of them makes no sense; nothing has been started then.
      RuntimeError: JAX's backends run already, or the processes do not find each other.
    """
    if jax.distributed.is_initialized():
        return
    arguments = arguments_by_hand(os.environ, coordinator, num_processes, process_id, local_device_ids)
    if arguments is None:
        arguments = arguments_of_cluster(os.environ)
    if arguments is None:
        return
    if arguments.get("num_processes") == 1:
        if arguments["local_device_ids"] is not None:
            _use_gpus_alone(arguments["local_device_ids"])
        return
    try:
        jax.distributed.initialize(**arguments)
    except RuntimeError as error:
        raise RuntimeError(f"initialize_processes: {error}") from error
    sys.excepthook = _leave_after_exception


def use_one_gpu() -> None:
    """Hides from JAX all GPUs of this process but its first, for programs of one device.

    JAX takes memory on all that it sees, and where it sees several our kernels are not taken outside `jax.shard_map`. Where JAX
    runs already nothing is hidden.
    """
    if not xla_bridge.backends_are_initialized():
        for name in VISIBLE_DEVICES:
            visible = jax.config.values[name]
            jax.config.update(name, "0" if visible == "all" else visible.split(",")[0])


def arguments_by_hand(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
) -> dict[str, Any] | None:
    """What `jax.distributed.initialize` is to be given, by arguments and environment variables; None if there are none.

    Raises:
      ValueError: half of them are there, or one of them makes no sense.
    """
    coordinator = environment.get(COORDINATOR) if coordinator is None else coordinator
    num_processes = _integer(environment, NUM_PROCESSES) if num_processes is None else num_processes
    process_id = _integer(environment, PROCESS_ID) if process_id is None else process_id
    local_device_ids = _integers(environment, LOCAL_DEVICE_IDS) if local_device_ids is None else local_device_ids
    if all(value is None for value in (coordinator, num_processes, process_id, local_device_ids)):
        return None
    problems = []
    if num_processes != 1:
        given = {COORDINATOR: coordinator, NUM_PROCESSES: num_processes, PROCESS_ID: process_id}
        problems += [f"{name} is missing" for name, value in given.items() if value is None]
    if coordinator is not None and not _is_address(coordinator):
        problems.append(f"{COORDINATOR}={coordinator!r} must be host:port")
    if num_processes is not None and num_processes < 1:
        problems.append(f"{NUM_PROCESSES}={num_processes} must be at least 1")
    elif num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        problems.append(f"{PROCESS_ID}={process_id} must be from 0 to {num_processes - 1}")
    ids = list(local_device_ids or ())
    if local_device_ids is not None and (not ids or min(ids) < 0 or len({*ids}) < len(ids)):
        problems.append(f"{LOCAL_DEVICE_IDS}={ids} must be different numbers from 0 on")
    if problems:
        raise ValueError("processes by hand (environment variables, or arguments of the same names): " + "; ".join(problems))
    return {
        "coordinator_address": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
        "local_device_ids": local_device_ids,
        # Within a job of Slurm JAX would take local_device_ids from there.
        "cluster_detection_method": "deactivate",
    }


def arguments_of_cluster(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The same where Slurm, Open MPI or Kubernetes started this process as one of several: JAX finds the rest. None elsewhere.

    Raises:
      ValueError: a package that JAX needs for it is not installed.
    """
    # In the interactive step of `salloc` SLURM_NTASKS is the whole job's, and nobody else runs.
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    slurm = {"SLURM_STEP_NODELIST", "SLURM_PROCID"} <= environment.keys() and int(tasks) > 1
    if slurm or int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        # JAX takes the GPU with the process's number on its host, which does not exist where the cluster shows it one alone.
        one_gpu = len(environment.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1 and environment.get("CUDA_VISIBLE_DEVICES")
        return {"local_device_ids": [0]} if one_gpu else {}
    # Every pod has the first variable; those of an indexed Job, JobSet's among them, have the second.
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        if importlib.util.find_spec("kubernetes") is None:
            raise ValueError(
                f"a Kubernetes job needs the package kubernetes: pip install 'jax[k8s]'; or set {COORDINATOR}, "
                f"{NUM_PROCESSES} and {PROCESS_ID} ({NUM_PROCESSES}=1 alone for a single process)"
            )
        return {}
    return None


def is_first_process() -> bool:
    """Whether this process is the one that writes logs and files."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until all processes are at the barrier of this name; alone it does nothing."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"moe_jax {name}")


def require_shared(folder: str | Path) -> None:
    """Makes the folder, and sees to it that all processes of the job have the same one; alone it only makes it.

    Raises:
      ValueError: on some processes it is another folder of the same name; all processes raise it, and no folder is made.
    """
    folder = Path(folder).expanduser().resolve()
    mark = folder / f".shared-{int(multihost_utils.broadcast_one_to_all(np.uint32(time.time_ns() % 2**32)))}"
    is_made_here = is_first_process() and not folder.exists()
    if is_first_process():
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    barrier("mark made")
    found = np.atleast_1d(multihost_utils.process_allgather(np.asarray(mark.exists())))
    if is_first_process():
        mark.unlink()
    if not found.all():
        if is_made_here:
            folder.rmdir()
        raise ValueError(
            f"processes {np.flatnonzero(~found).tolist()} of {jax.process_count()} do not see the folder {folder} of process "
            "0: it must lie on a file system that all hosts share"
        )


def texts_of_all(text: str) -> list[str]:
    """The texts that all processes have, in their order; all call it together."""
    own = np.frombuffer(text.encode(), np.uint8)
    lengths = np.atleast_1d(multihost_utils.process_allgather(np.asarray(len(own))))
    # In steps: each width is a program to compile.
    width = -(-lengths.max() // 4096) * 4096
    padded = multihost_utils.process_allgather(np.pad(own, (0, width - len(own))))
    return [row[:length].tobytes().decode() for row, length in zip(np.atleast_2d(padded), lengths, strict=True)]


def unlike_the_first(text: str) -> list[int]:
    """The processes whose text is another than that of process 0."""
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)
    digests = np.atleast_2d(multihost_utils.process_allgather(digest))
    return np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()


def leave(status: int) -> None:
    """Ends the program with an exit status; as one of several processes at once, without JAX's wait for the others."""
    if not jax.distributed.is_initialized():
        raise SystemExit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _use_gpus_alone(local_device_ids: Sequence[int]) -> None:
    """Hides the other GPUs from JAX, as `jax.distributed.initialize` does in a job of several processes."""
    ids = ",".join(map(str, local_device_ids))
    if all(jax.config.values[name] == ids for name in VISIBLE_DEVICES):
        return
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            f"initialize_processes: it must be called before anything that asks JAX for devices; these run already, and not on "
            f"the GPUs {ids} alone"
        )
    for name in VISIBLE_DEVICES:
        jax.config.update(name, ids)


def _leave_after_exception(kind, error, trace) -> None:
    traceback.print_exception(kind, error, trace)
    leave(130 if kind is KeyboardInterrupt else 1)


def _integer(environment: Mapping[str, str], name: str) -> int | None:
    numbers = _integers(environment, name)
    if numbers is not None and len(numbers) != 1:
        raise ValueError(f"the environment variable {name}={environment[name]!r} must be one integer")
    return None if numbers is None else numbers[0]


def _integers(environment: Mapping[str, str], name: str) -> list[int] | None:
    if name not in environment:
        return None
    try:
        return [int(number) for number in environment[name].split(",")]
    except ValueError:
        raise ValueError(f"the environment variable {name}={environment[name]!r} must be integers") from None


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 2**16
