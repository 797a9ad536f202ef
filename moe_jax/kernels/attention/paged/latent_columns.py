"""Latents and their queries in shared memory, cut into the columns that one matmul of the kernel reads."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.attention.mosaic.warpgroups import operand
from moe_jax.kernels.hopper.pipeline import CONSUMERS, WGMMA_ROWS

ROTARY_COLUMNS = 64
"""Columns behind the values. A page's p, 64 rows of 64 keys, fits into their place."""

PART_COLUMNS = 128
"""Columns of a matmul of the outputs. With 512 threads ptxas compiles no instruction of 256 columns, whatever registers a
warpgroup gets later."""


class LatentColumns(NamedTuple):
    """Rows of latents or queries in shared memory, by the columns that are read together."""

    values: Any
    """The columns of values: [.., 2 warpgroups of the outputs, parts, 64, part's columns]."""
    rotary: Any
    """The columns behind them; once scores are computed, p."""

    @classmethod
    def allocate(cls, value_dim: int, dtype: jnp.dtype, *slots: int) -> "LatentColumns":
        """Allocates 64 rows in each slot."""
        parts = operand(*slots, *value_parts(value_dim), dtype=dtype)
        return cls(parts, operand(*slots, WGMMA_ROWS, ROTARY_COLUMNS, dtype=dtype))

    def copy(self, source, rows: int, barrier) -> None:
        """Starts the copies of the first `rows` rows."""
        *_, parts, _, width = self.values.shape
        for part, (warpgroup, own) in enumerate(np.ndindex(CONSUMERS, parts)):
            columns = pl.ds(part * width, width)
            plgpu.copy_gmem_to_smem(source.at[:, columns], self.values.at[warpgroup, own, pl.ds(0, rows)], barrier)
        columns = pl.ds(CONSUMERS * parts * width, ROTARY_COLUMNS)
        plgpu.copy_gmem_to_smem(source.at[:, columns], self.rotary.at[pl.ds(0, rows)], barrier)

    def slot(self, slot) -> "LatentColumns":
        """Returns one of several slots."""
        return LatentColumns(self.values.at[slot], self.rotary.at[slot])


def value_parts(value_dim: int) -> tuple[int, int, int, int]:
    """Returns the shape of the columns of values."""
    width = min(PART_COLUMNS, value_dim // CONSUMERS)
    return CONSUMERS, value_dim // CONSUMERS // width, WGMMA_ROWS, width
