"""Spread: how one call of a model is spread over devices, for code inside `jax.shard_map`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels.experts.call import TokenPart
from moe_jax.kernels.experts.routing import int32_ids
from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.balance import Sequences
from moe_jax.layers.spread import ONE_DEVICE as ONE_DEVICE
from moe_jax.layers.spread import Exchange, OneDevice, Sums, check_experts
from moe_jax.parallel.expert import ExpertParallel, experts_of_devices
from moe_jax.parallel.expert.settings import plan_exchange
from moe_jax.parallel.fsdp import LayerGather
from moe_jax.parallel.mesh import axis_size
from moe_jax.parallel.sequence.attention import ContextParallel


@dataclass(frozen=True)
class Spread(OneDevice):
    """Describes how one model call is distributed over devices, inside `jax.shard_map`. `Spread()` means one device.

    Attributes:
      expert: how tokens travel to the experts of other devices; None: every device holds all experts.
      context: how the sequences are split over devices; None: every device holds whole sequences.
      layer_gathers: how each stage's parameters are gathered a layer at a time (`ShardedParameters.layers`); None: whole.
      mesh_axes: the mesh axes along which devices hold different tokens. Sums over the batch are sums along these axes.
    """

    expert: ExpertParallel | None = None
    context: ContextParallel | None = None
    layer_gathers: Sequence[LayerGather | None] | None = None
    mesh_axes: tuple[str, ...] = ()

    def sum(self, values: Sums) -> Sums:
        """Sums every array of `values` over the devices of `mesh_axes` (psum); unchanged without axes."""
        return jax.lax.psum(values, self.mesh_axes) if self.mesh_axes else values

    def gather(self, stage: int) -> LayerGather | None:
        """Returns the `LayerGather` of a stage's layers, by index in `Decoder.stages`; None if parameters are replicated."""
        return None if self.layer_gathers is None else self.layer_gathers[stage]

    def experts(
        self, experts: Any, x: Float[Array, "tokens hidden"], routing: Any, valid: Any = None
    ) -> tuple[Float[Array, "tokens hidden"], Exchange | None]:
        """Computes the experts with expert parallelism; arguments as `OneDevice.experts`, inside `jax.shard_map`.

        Raises:
          ValueError: the devices of the axis together do not hold the router's number of experts. Also a combination in
            `parallel.expert.mlp.REFUSED`.
          NameError: outside `shard_map` or in one whose mesh lacks the axis.
        """
        if self.expert is None:
            return super().experts(experts, x, routing, valid)
        axis_name = self.expert.axis_name
        check_experts(experts, routing, axis_size(axis_name), f"with axis_name={axis_name!r}")
        chosen = routing.experts
        if valid is not None:
            is_valid = valid.valid if isinstance(valid, Sequences) else valid
            chosen = jnp.where(is_valid[:, None], int32_ids(chosen, len(routing.sums.expert_load)), -1)
        part, options = TokenPart(x, routing.weights, chosen), dict(precision=experts.precision, activation=experts.activation)
        y, exchange = experts_of_devices(part, experts.operands, self.expert, **options)
        # Typed as varying like the tokens, even if devices agree: a sum over the mesh needs one type for all its terms.
        return y, vary_as(exchange, x)

    def products_like(self, experts: Any, x: Float[Array, "tokens hidden"]) -> Any:
        """Returns arrays like the operands of the gradients of this device's experts, for the tokens of one exchange."""
        if self.expert is None or (devices := axis_size(self.expert.axis_name)) == 1:
            return super().products_like(experts, x)
        plan = plan_exchange(len(x), experts.num_experts_per_tok, devices, experts.down_proj.shape[-3], self.expert)
        received = jnp.zeros((plan.received(len(x)), x.shape[1]), x.dtype)
        return experts.products_like(received, devices * plan.first.pairs)
