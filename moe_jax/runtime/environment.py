"""The one place for settings of XLA and NCCL: what `moe-jax`, and with it the launcher, sets in the environment.

A setting stands here if a measurement of ours needed it; what users set themselves wins. Tried on four H200s of one host with
jax 0.11.2, without gain, and so left alone (docs/performance.md, docs/scaling.md):

    XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true    these collectives are asynchronous without it
    XLA_FLAGS=--xla_gpu_use_memcpy_local_p2p=true
    32 channels of NCCL

What one program needs is an option of its compilation (`parallel.hops`), and no setting here: XLA ends a process whose
XLA_FLAGS name a flag that it does not know.

Where a machine does not allow NVLink multicast, its user sets NCCL_NVLS_ENABLE=0; all our figures are with it.
"""

from collections.abc import MutableMapping

COORDINATOR = "MOE_JAX_COORDINATOR"
NUM_PROCESSES = "MOE_JAX_NUM_PROCESSES"
PROCESS_ID = "MOE_JAX_PROCESS_ID"
LOCAL_DEVICE_IDS = "MOE_JAX_LOCAL_DEVICE_IDS"
"""The variables that say which process of a job this one is (`parallel.processes`)."""

DEFAULTS = {
    # JAX takes 75 % of a GPU otherwise: too little for a 30 B model with its gradients on one, or its training on four.
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
}


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Sets what is not set; it counts for backends of JAX that start afterwards."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
