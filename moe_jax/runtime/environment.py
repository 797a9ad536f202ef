"""Environment variables that `moe-jax` and its launcher set (no other file sets any), and how a shell starts our programs.

A setting is here only if a measurement or a clean console needed it. Users' own values take precedence. These gained nothing on
four H200s of one host with jax 0.11.2 (docs/log/parallel.md, docs/scaling.md):

    XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true    these collectives are asynchronous without it
    XLA_FLAGS=--xla_gpu_use_memcpy_local_p2p=true
    32 channels of NCCL

Settings for a single program are compiler options of that program (`parallel.collectives.hops`), not settings here: XLA ends a
process if XLA_FLAGS has an unknown flag.

On a machine without NVLink multicast, users set NCCL_NVLS_ENABLE=0; all our measurements were made with it.
"""

import os
import shlex
import shutil
import sysconfig
from collections.abc import MutableMapping
from pathlib import Path

COORDINATOR = "MOE_JAX_COORDINATOR"
NUM_PROCESSES = "MOE_JAX_NUM_PROCESSES"
PROCESS_ID = "MOE_JAX_PROCESS_ID"
LOCAL_DEVICE_IDS = "MOE_JAX_LOCAL_DEVICE_IDS"
CONNECT_SECONDS = "MOE_JAX_CONNECT_SECONDS"
"""Variables that identify this process within its job, and how long it waits for the others (`runtime.processes`)."""

DEFAULTS = {
    # JAX's default is 75 % of a GPU: too little for a 30 B model and its gradients on one GPU, or its training on four.
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    # Without torch, which nothing here needs, transformers would print in every command that it found no PyTorch.
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Sets each default that is not set yet; it takes effect for JAX backends that start afterwards."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


def program(name: str = "moe-jax") -> str:
    """Returns the name or path by which a shell in the current folder starts a program of this Python's environment.

    If PATH finds no such program or another environment's, it is the path.
    """
    script, found = Path(sysconfig.get_path("scripts"), name), shutil.which(name)
    if not script.is_file() or (found is not None and os.path.samefile(found, script)):
        return name
    return shlex.quote(str(script.relative_to(Path.cwd()) if Path.cwd() in script.parent.parents else script))
