"""The one place for settings of XLA and NCCL: what `moe-jax`, and with it the launcher, sets in the environment.

A setting stands here if a measurement of ours needed it; what users set themselves wins. Tried on four H200s of one host with
jax 0.11.2, without effect on speed, and so left alone (docs/performance.md, docs/scaling.md):

    XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true    these collectives are asynchronous without it
    XLA_FLAGS=--xla_gpu_use_memcpy_local_p2p=true
    32 channels of NCCL

PEER_HOPS made the ring of attention 10 to 20 % faster and, with MANY_HOPS, the exchange `pairwise` the fastest of all. They are
for one process that has all GPUs, and XLA ends a process that names a flag it does not know: users set them in XLA_FLAGS
themselves. The exchange's default and `moe-jax plan` read them there.

Where a machine does not allow NVLink multicast, its user sets NCCL_NVLS_ENABLE=0; all our figures are with it.
"""

from collections.abc import Mapping, MutableMapping

DEFAULTS = {
    # JAX takes 75 % of a GPU otherwise: too little for a 30 B model with its gradients on one, or its training on four.
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
}


PEER_HOPS = "--xla_gpu_collective_permute_mode=peer"
"""A flag of XLA's: in one process a `ppermute` is a copy from GPU to GPU, and no kernel of NCCL's, which takes cores."""

MANY_HOPS = "--xla_gpu_experimental_parallel_collective_overlap_limit=8"
"""Another: XLA may begin so many collectives before the first has ended; else only one runs beside computation."""


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Sets what is not set; it counts for backends of JAX that start afterwards."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


def hops_are_copied(environment: Mapping[str, str]) -> bool:
    """Whether XLA is told to copy what a ring passes on, where one process has all GPUs."""
    return PEER_HOPS in environment.get("XLA_FLAGS", "").split()
