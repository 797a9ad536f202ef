"""Spread: the parts of one call of a model that lie on other devices, for code inside `jax.shard_map`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax

from moe_jax.parallel.expert import ExpertParallel
from moe_jax.parallel.fsdp import LayerGather
from moe_jax.parallel.sequence.attention import ContextParallel

Sums = TypeVar("Sums")


@dataclass(frozen=True)
class Spread:
    """The parts of a call that lie on other devices. `Spread()` is a call on one device.

    Attributes:
      expert: how tokens travel to the experts of other devices; None: every device holds all experts.
      context: how the sequences are split over devices; None: every device holds whole sequences.
      layer_gathers: how each stage's parameters are gathered a layer at a time (`ShardedParameters.layers`); None: whole.
      mesh_axes: the mesh axes along which devices hold different tokens. Sums over the batch are sums along these.
    """

    expert: ExpertParallel | None = None
    context: ContextParallel | None = None
    layer_gathers: Sequence[LayerGather | None] | None = None
    mesh_axes: tuple[str, ...] = ()

    def sum(self, values: Sums) -> Sums:
        """Sums every array of `values` over the devices of `mesh_axes`; returns `values` unchanged on one device."""
        return jax.lax.psum(values, self.mesh_axes) if self.mesh_axes else values


ONE_DEVICE = Spread()
"""A call on one device, which holds everything."""
