"""Chooses the implementation of the FP8 matmuls, and of the sums and outer products that stay in bf16.

Every implementation offers the names that `xla` describes: `matrices_in_both_orders`, `rows_of_tokens`, `rows_of_rounded`,
`gated_matmul`, `kept_h`, `grouped_matmul`, `gated_matmul_backward`, `matmul_of_tokens` and `ROW_ALIGNMENT`. Kernels also have
`refusal` and `is_native`, as in `kernels.backends`.
"""

import functools
import logging
import math
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import jax.numpy as jnp

from moe_jax.kernels import backends
from moe_jax.kernels.backends import is_named, resolve_backend
from moe_jax.kernels.experts.fp8.precision import Kept, Precision
from moe_jax.kernels.experts.fp8.quantise import refusal

_logger = logging.getLogger(__name__)


class Fp8Options(NamedTuple):
    """Static options of one FP8 call: backend names, and the precision in which h is kept."""

    sums: str
    """The backend of `kernels.backends` that gathers, combines and computes the weights' gradients."""
    matmuls: str
    """The implementation of the FP8 matmuls."""
    kept: Kept = "bf16"

    @property
    def row_alignment(self) -> int:
        """The row alignment that satisfies both backends."""
        return math.lcm(backends.implementation(self.sums).ROW_ALIGNMENT, implementation(self.matmuls).ROW_ALIGNMENT)


def resolve_fp8_backend(
    name: str | None, dtype: jnp.dtype, hidden: int, inter: int, precision: Precision | None = None
) -> Fp8Options:
    """Returns the backends for an FP8 call, from a name as in `resolve_backend`.

    The matmuls run on the kernels of the same name. Without a name they run on "xla" if the kernels refuse. The choice is
    logged once.

    Raises:
        ValueError: as in `resolve_backend`, experts that FP8 does not support, or a named backend without FP8 here. Also a
            `precision` of another type.
    """
    if not isinstance(precision, Precision | None):
        raise ValueError(f"precision must be None or a Precision, as Precision(); got {precision!r}")
    if (reason := refusal(dtype, hidden, inter)) is not None:
        raise ValueError(f"precision: FP8 does not support these experts: {reason}")
    sums = matmuls = resolve_backend(name, dtype, hidden, inter)
    reason = None if sums == "xla" else implementation(sums).refusal(dtype, hidden, inter)
    if reason is not None:
        if is_named(name):
            raise ValueError(f"precision: backend {sums!r} has no FP8 here: {reason}")
        matmuls = "xla"
    _announce(matmuls, sums, reason)
    return Fp8Options(sums, matmuls, "bf16" if precision is None else precision.kept)


@functools.cache
def implementation(matmuls: str) -> ModuleType:
    """Imports and returns the module of `Fp8Options.matmuls`, on first use."""
    return import_module(f"moe_jax.kernels.experts.fp8.{matmuls}")


@functools.cache
def _announce(matmuls: str, sums: str, reason: str | None) -> None:
    """Logs each choice once a process."""
    notes = "" if reason is None else f"; {sums!r} not: {reason}"
    if matmuls == "triton":
        notes = "; the gradient of the activation, which 'triton' lacks in FP8, on 'xla'"
    _logger.info("MoE experts multiply in FP8 on backend %r, all other matmuls on %r%s", matmuls, sums, notes)
