"""Matmuls of rows sorted by expert with each expert's own weights, one file per backend.

Every backend module offers the same two functions, described in `xla`: `grouped_matmul` and `grouped_outer`.
"""

from types import ModuleType

from moe_jax.kernels.grouped_matmul import xla


def implementation(backend: str) -> ModuleType:
    """The module of a backend that `resolve_backend` returned."""
    return {"xla": xla}[backend]
