"""Connects the processes of one job (usually one for each GPU) before JAX starts.

`moe-jax launch` and users identify a process by environment variables or arguments. Slurm, Open MPI and Kubernetes set their
own variables, which JAX reads (https://docs.jax.dev/en/latest/multi_process.html).
"""

import hashlib
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import distributed, xla_bridge
from jax.experimental import multihost_utils

from moe_jax.runtime import neighbors
from moe_jax.runtime.environment import CONNECT_SECONDS, COORDINATOR, LOCAL_DEVICE_IDS, NUM_PROCESSES, PROCESS_ID

HEARTBEAT_SECONDS = 60
"""A host that falls silent ends the job in half a minute to a minute. JAX's default is 100."""

VISIBLE_DEVICES = "jax_cuda_visible_devices", "jax_rocm_visible_devices"
"""Options of JAX that list the visible GPUs by number, or are "all"."""


def initialize_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
) -> None:
    """Connects the processes of a job, so that `jax.devices()` lists the devices of all processes.

    Call it before anything that asks JAX for devices. A second call does nothing. In a job of one process it only hides the
    GPUs that are not this process's.

    Arguments that are None are read from the environment variables MOE_JAX_COORDINATOR, MOE_JAX_NUM_PROCESSES,
    MOE_JAX_PROCESS_ID and MOE_JAX_LOCAL_DEVICE_IDS ("0,1"). If none of these is set, it recognises a step of Slurm, `mpirun` of
    Open MPI, or an indexed Job of Kubernetes.

    From then on a process that ends by an exception exits at once. At a normal exit JAX would wait for the other processes,
    while they wait for this one. A host that falls silent is named in the logs of the others (`runtime.neighbors`).

    The processes wait for each other for MOE_JAX_CONNECT_SECONDS, 300 by default.

    Args:
      coordinator: "host:port" on which process 0 listens.
      num_processes: number of processes; with 1, neither coordinator nor process_id is needed.
      process_id: number of this process, from 0.
      local_device_ids: numbers of this process's GPUs among the visible GPUs. Default: all. Under Slurm and Open MPI: the GPU
        whose number equals the number of the process on its host.

    Raises:
      ValueError: only some of these are given, or one of them is invalid; nothing has been started then.
      RuntimeError: JAX's backends already run, or the processes do not find each other.
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
    seconds = _integer(os.environ, CONNECT_SECONDS)
    _connect(arguments, 300 if seconds is None else seconds)
    sys.excepthook = _leave_after_exception
    neighbors.watch(distributed.global_state.client, jax.process_index())


def use_one_gpu() -> None:
    """Hides all GPUs except this process's first from JAX, for programs of one device.

    JAX allocates memory on every visible GPU, and our kernels run outside `jax.shard_map` only if a single GPU is visible. If
    JAX's backends already run, nothing is hidden.
    """
    if not xla_bridge.backends_are_initialized():
        for name in VISIBLE_DEVICES:
            visible = jax.config.values[name]
            jax.config.update(name, "0" if visible == "all" else visible.split(",")[0])


def keep_programs() -> None:
    """Makes JAX keep compiled programs in the user's cache folder, so that the same command starts quickly the next time.

    For commands of one process. In a job, processes exchange autotuning results: one that compiles might wait for one that
    found the program in its cache.
    """
    for name, value in settings_of_cache(os.environ, jax.config.values["jax_compilation_cache_dir"]).items():
        jax.config.update(name, value)


def settings_of_cache(environment: Mapping[str, str], folder: str | None) -> dict[str, Any]:
    """Returns the options of JAX's cache of compiled programs that the user has not set.

    Returns none of them if a folder is set already ("" turns the cache off) or the default folder is not writable.
    """
    home = Path(environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "moe_jax" / "xla"
    # JAX creates the folder. If it could not, it would warn at each program. `Path.exists` raises PermissionError in another
    # user's home.
    exists = next(path for path in (home, *home.parents) if os.path.exists(path))
    if folder is not None or not home.is_absolute() or not os.access(exists, os.W_OK):
        return {}
    options = {
        "jax_compilation_cache_dir": str(home),
        # By default programs that compile in less than a second are not cached: nearly all of a small model's.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        # 8 GB. Without a size limit JAX does not lock, and a process may read a file that another has half written.
        "jax_compilation_cache_max_size": 8 * 10**9,
    }
    return {name: value for name, value in options.items() if name.upper() not in environment}


def imitate_devices(count: int) -> None:
    """Makes the CPU appear as `count` devices, to try a mesh on a machine without GPUs.

    Does nothing if JAX_NUM_CPU_DEVICES has another number or JAX's backends already run. GPUs are not affected.
    """
    if not xla_bridge.backends_are_initialized() and jax.config.values["jax_num_cpu_devices"] < 0:
        jax.config.update("jax_num_cpu_devices", count)


def arguments_by_hand(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
) -> dict[str, Any] | None:
    """Returns the arguments for `jax.distributed.initialize` from our arguments and environment variables; None if none is set.

    Raises:
      ValueError: only some of them are given, or one of them is invalid.
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
        problems.append(f"{LOCAL_DEVICE_IDS}={ids} must be distinct numbers of at least 0")
    if problems:
        raise ValueError("processes by hand (environment variables, or arguments of the same names): " + "; ".join(problems))
    return {
        "coordinator_address": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
        "local_device_ids": local_device_ids,
        # Else JAX would read local_device_ids from Slurm inside a Slurm job.
        "cluster_detection_method": "deactivate",
    }


def arguments_of_cluster(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the arguments for `jax.distributed.initialize` in a job of several processes by Slurm, Open MPI or Kubernetes.

    JAX finds the arguments that are missing here. Returns None outside such a job.

    Raises:
      ValueError: a package that JAX needs in such a job is not installed.
    """
    # In the interactive step of `salloc`, SLURM_NTASKS counts the tasks of the whole job, although only one process runs.
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    slurm = {"SLURM_STEP_NODELIST", "SLURM_PROCID"} <= environment.keys() and int(tasks) > 1
    if slurm or int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        # JAX uses the GPU with the process's local number. That GPU does not exist if each process sees only one.
        one_gpu = len(environment.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1 and environment.get("CUDA_VISIBLE_DEVICES")
        return {"local_device_ids": [0]} if one_gpu else {}
    # Every pod has the first variable; pods of an indexed Job (also of a JobSet) have the second.
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        if importlib.util.find_spec("kubernetes") is None:
            raise ValueError(
                f"a Kubernetes job needs the package kubernetes: pip install 'jax[k8s]'; or set {COORDINATOR}, "
                f"{NUM_PROCESSES} and {PROCESS_ID} ({NUM_PROCESSES}=1 alone for a single process)"
            )
        return {}
    return None


def is_first_process() -> bool:
    """Returns True if this is the process that writes logs and files."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until all processes reach the barrier of this name; does nothing in a job of one process."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"moe_jax {name}")


def require_shared(folder: str | Path) -> None:
    """Makes the folder, and checks that all processes of the job see the same folder.

    Raises:
      ValueError: some processes see another folder of the same name. All processes raise it, and no folder is made.
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
            "0: it must be on a file system that all hosts share"
        )


def texts_of_all(text: str) -> list[str]:
    """Returns the texts of all processes, in process order. All processes must call it together."""
    own = np.frombuffer(text.encode(), np.uint8)
    lengths = np.atleast_1d(multihost_utils.process_allgather(np.asarray(len(own))))
    # Widths are rounded up: JAX compiles a program for each width.
    width = -(-lengths.max() // 4096) * 4096
    padded = multihost_utils.process_allgather(np.pad(own, (0, width - len(own))))
    return [row[:length].tobytes().decode() for row, length in zip(np.atleast_2d(padded), lengths, strict=True)]


def unlike_the_first(text: str) -> list[int]:
    """Returns the numbers of the processes whose text differs from the text of process 0."""
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)
    digests = np.atleast_2d(multihost_utils.process_allgather(digest))
    return np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()


def leave(status: int) -> None:
    """Exits with `status`. In a job of several processes it exits at once, without JAX's wait for the others."""
    if not jax.distributed.is_initialized():
        raise SystemExit(status)
    if status not in (0, 128 + signal.SIGTERM):
        neighbors.report_end(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _connect(arguments: dict[str, Any], seconds: int) -> None:
    """Connects this process. Without the errors here JAX would abort with a stack trace that names no host.

    Raises:
      RuntimeError: process 0 cannot listen, or nobody answers there; or JAX's backends already run.
    """
    address, is_first = arguments.get("coordinator_address"), arguments.get("process_id") == 0
    if address is not None and not is_first:
        _wait_for_answer(address, seconds)
    # If the other program has only the port of IPv4, JAX would listen on IPv6, and no host would find it.
    if address is not None and is_first and not no_answer(address, 1.0):
        raise RuntimeError(f"initialize_processes: process 0 cannot listen at {address}: another program does")
    advice = "does each host run the command, with its own number of the same number of hosts?"
    text = f"initialize_processes: not all processes have connected in {seconds} s; {advice}"
    late = threading.Timer(seconds, print, args=(text,), kwargs={"file": sys.stderr, "flush": True})
    late.daemon = True
    late.start()
    try:
        # JAX aborts a little after the line above.
        jax.distributed.initialize(**arguments, initialization_timeout=seconds + 2, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except RuntimeError as error:
        raise RuntimeError(f"initialize_processes: {error}") from error
    finally:
        late.cancel()


def _wait_for_answer(address: str, seconds: float) -> None:
    """Waits until process 0 listens: its host may start later than this one."""
    deadline = time.monotonic() + seconds
    while reason := no_answer(address, max(1.0, deadline - time.monotonic())):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"initialize_processes: {socket.gethostname()} has had no answer from process 0 at {address} for "
                f"{seconds} s ({reason}): does the first host run, and is this port open?"
            )
        time.sleep(1.0)


def no_answer(address: str, seconds: float) -> str:
    """Returns the reason why nobody listens at "host:port", or "" if somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError as error:
        return str(error)
    return ""


def _use_gpus_alone(local_device_ids: Sequence[int]) -> None:
    """Hides all other GPUs from JAX, as `jax.distributed.initialize` does in a job of several processes."""
    ids = ",".join(map(str, local_device_ids))
    if all(jax.config.values[name] == ids for name in VISIBLE_DEVICES):
        return
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            f"initialize_processes must be called before anything that asks JAX for devices; JAX runs already, and not on "
            f"the GPUs {ids} alone"
        )
    for name in VISIBLE_DEVICES:
        jax.config.update(name, ids)


def _leave_after_exception(kind, error, trace) -> None:
    traceback.print_exception(kind, error, trace)
    # Most errors of XLA here are connections that another process's end has broken.
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
        neighbors.wait_for_a_name()
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
