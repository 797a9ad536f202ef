"""The softmax of a page's scores, one page after the other, as the kernels of paged attention compute it in registers."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.attention.mosaic.consumer import LOWEST
from moe_jax.kernels.attention.mosaic.warpgroups import ROWS, broadcast_columns
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS


class RowSums(NamedTuple):
    """The sums over the pages so far, for each row."""

    row_max: Any
    """In base 2."""
    row_sum: Any

    def inverse(self) -> Any:
        """Returns the factor of the result; 0 for a row that has seen no key."""
        return jnp.where(self.row_sum > 0, 1 / self.row_sum, 0.0)

    def lse(self) -> Any:
        """Returns the logarithm in base 2; -inf for a row that has seen no key."""
        return self.row_max + jnp.log2(self.row_sum)


class PageWeights(NamedTuple):
    """The weights of a page's keys."""

    p: Any
    rescale: Any
    """The factor of the result so far."""
    sums: RowSums


class Scoring(NamedTuple):
    """The rules of all rows: the scale of scores in base 2, the queries' heads, and the window, None if there is none."""

    scale_log2: float
    group: int
    """Rows of one query, which follow each other."""
    window: Any

    def weigh(self, s: Any, sums: RowSums, last_key: Any) -> PageWeights:
        """Adds a page's scores; the first query sees the keys up to `last_key` of this page, the next one a key more."""
        row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
        column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
        last_key_of_row = last_key + lax.div(row, jnp.int32(self.group))
        seen = column <= last_key_of_row
        if self.window is not None:
            seen &= column > last_key_of_row - self.window
        s = jnp.where(seen, s, -jnp.inf)
        row_max = jnp.maximum(sums.row_max, s.max(axis=1) * self.scale_log2)
        p = jnp.exp2(s * self.scale_log2 - broadcast_columns(row_max, s.shape))
        rescale = jnp.exp2(sums.row_max - row_max)
        return PageWeights(p, rescale, RowSums(row_max, sums.row_sum * rescale + p.sum(axis=1)))


def no_keys() -> RowSums:
    """Returns the sums over no page."""
    return RowSums(
        plgpu.layout_cast(jnp.full(WGMMA_ROWS, LOWEST, jnp.float32), ROWS),
        plgpu.layout_cast(jnp.zeros(WGMMA_ROWS, jnp.float32), ROWS),
    )
