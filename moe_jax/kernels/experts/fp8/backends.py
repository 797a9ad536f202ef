"""Chooses the implementation of the FP8 matmuls, beside that of the sums and outer products that stay in bf16.

Every module of MODULES offers the names that `xla` describes: `rows_of_tokens`, `gated_matmul`, `grouped_matmul`,
`gated_matmul_backward`, `matmul_of_tokens` and `ROW_ALIGNMENT`. Kernels also have `refusal` and `is_native`, as those of
`experts.backends`.
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
from moe_jax.kernels.experts.fp8.quantise import refusal

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

    The matmuls run on the kernels of the same name, and on "xla" where there are none. The choice is logged once.

    Raises:
        ValueError: what `resolve_backend` raises, or experts that FP8 does not take.
    """
    if (reason := refusal(dtype, hidden, inter)) is not None:
        raise ValueError(f"precision: FP8 does not take these experts: {reason}")
    sums = resolve_backend(name, dtype, hidden, inter)
    matmuls = sums if sums in MODULES else "xla"
    _announce(matmuls, sums)
    return Fp8Backend(sums, matmuls)


def implementation(matmuls: str) -> ModuleType:
    """Returns the module of `Fp8Backend.matmuls`."""
    return MODULES[matmuls]


@functools.cache
def _announce(matmuls: str, sums: str) -> None:
    """Logs each choice once a process."""
    _logger.info("MoE experts multiply in FP8 on backend %r, all other matmuls on %r", matmuls, sums)
