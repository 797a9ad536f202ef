"""Matmuls of rows sorted by expert with each expert's own weights, one module per backend.

Every backend module offers what `xla` describes: `grouped_matmul`, `grouped_outer`, their fusions with the gated activation
`gated_matmul` and `gated_matmul_backward`, `rows_of_tokens`, `refusal`, `is_native` and `ROW_ALIGNMENT`.
"""

from types import ModuleType

from moe_jax.kernels.grouped_matmul import mosaic, triton, xla

MODULES = {"mosaic": mosaic, "triton": triton, "xla": xla}
"""By name, the fastest first where it runs."""


def implementation(backend: str) -> ModuleType:
    """The module of a backend that `resolve_backend` returned."""
    return MODULES[backend]
