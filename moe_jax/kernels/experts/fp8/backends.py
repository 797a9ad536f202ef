"""Chooses the implementation of the FP8 matmuls, beside that of the sums and outer products that stay in bf16.

Every module of MODULES offers the names that `xla` describes: `rows_of_tokens`, `gated_matmul`, `grouped_matmul`,
`gated_matmul_backward` and `ROW_ALIGNMENT`. Kernels also have `refusal` and `is_native`, as those of `experts.backends`.
"""

import functools
import logging
import math
from types import ModuleType
from typing import NamedTuple

import jax.numpy as jnp

from moe_jax.kernels.experts import backends
from moe_jax.kernels.experts.choose_backend import resolve_backend
from moe_jax.kernels.experts.fp8 import mosaic, xla
from moe_jax.kernels.experts.fp8.quantise import GROUP

MODULES: dict[str, ModuleType] = {"xla": xla, "mosaic": mosaic}
"""The implementations by name."""

_logger = logging.getLogger(__name__)


class Fp8Backend(NamedTuple):
    """The backends of one call, by name."""

    sums: str
    """The backend of `experts.backends` that gathers, combines and computes the weights' gradients."""
    matmuls: str
    """The implementation of the FP8 matmuls."""

    @property
    def row_alignment(self) -> int:
        """The row_alignment of plans for both."""
        return math.lcm(backends.implementation(self.sums).ROW_ALIGNMENT, implementation(self.matmuls).ROW_ALIGNMENT)


def resolve_fp8_backend(name: str | None, dtype: jnp.dtype, hidden: int, inter: int) -> Fp8Backend:
    """Returns the backends for a name as `resolve_backend` takes it.

    The matmuls run on the kernels of the same name where these take the sizes, else on "xla". The
    choice is logged once.

    Raises:
        ValueError: what `resolve_backend` raises, or experts that FP8 does not take.
    """
    if (reason := refusal(dtype, hidden, inter)) is not None:
        raise ValueError(f"precision: FP8 does not take these experts: {reason}")
    sums = resolve_backend(name, dtype, hidden, inter)
    if sums != "mosaic":
        reason = f"the backend is {sums!r}"
    else:
        reason = mosaic.refusal(dtype, hidden, inter)
    matmuls = "mosaic" if reason is None else "xla"
    _announce(matmuls, reason)
    return Fp8Backend(sums, matmuls)


def refusal(dtype: jnp.dtype, hidden: int, inter: int) -> str | None:
    """Returns why such experts cannot be computed in FP8, and what would be right; None if they can."""
    if dtype != jnp.bfloat16:
        return f"x is {jnp.dtype(dtype).name}; it must be bfloat16"
    for name, size in (("hidden", hidden), ("inter", inter)):
        if size % GROUP or not size:
            return f"{name} is {size}; it must be a multiple of {GROUP}, the numbers that share a scale"
    return None


def implementation(matmuls: str) -> ModuleType:
    """Returns the module of `Fp8Backend.matmuls`."""
    return MODULES[matmuls]


@functools.cache
def _announce(matmuls: str, reason: str | None) -> None:
    """Logs each choice once a process."""
    _logger.info("MoE experts multiply in FP8 on backend %r%s", matmuls, f"; 'mosaic' not: {reason}" if reason else "")
