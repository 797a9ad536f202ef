"""The sparse feed-forward block: a router, experts of which each token uses k, and experts that all tokens share."""

import functools
import math
import operator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.experts.internal import Accumulators, experts_mlp_accumulating
from moe_jax.kernels.experts.routing import int32_ids
from moe_jax.kernels.varying import vary_as
from moe_jax.layers.balance import Sequences
from moe_jax.layers.linear import normal_parameter
from moe_jax.layers.mlp import MLP
from moe_jax.layers.router import Router, Routing
from moe_jax.parallel.expert import ExpertParallel, expert_parallel_mlp
from moe_jax.parallel.mesh import axis_size

EXPERT_CHUNK_TOKENS = 65536
"""Of more than twice as many tokens the experts compute so many at a time: as fast, and what is made of them is bounded."""


class MoE(nnx.Module):
    """y[t] = sum_k weights[t, k] * down_e(silu(gate_e x[t]) * up_e x[t]) with e = experts[t, k]. Dropless.

    Args:
      router: chooses experts and weights; default: `Router`, with `norm_topk_prob`.
      shared_intermediate_size: of the shared experts together, which are one dense block whose output is added; 0: none.

    Usable by itself in any Flax NNX model:

        moe = MoE(512, 256, num_experts=16, num_experts_per_tok=4, rngs=nnx.Rngs(0))
        y, routing = moe(x)                                   # x [..., 512], as [batch, seq, 512]
        loss = task_loss(y) + 0.01 * load_balancing_loss(routing)

    examples/moe_block.py and, over several devices, examples/moe_block_sharded.py are whole programs.
    """

    def __init__(
        self,
        hidden_size: int,
        moe_intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        norm_topk_prob: bool = True,
        router: Router | None = None,
        shared_intermediate_size: int = 0,
        stddev: float = 0.02,
        stack: tuple[int, ...] = (),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = dict(stddev=stddev, stack=stack, param_dtype=param_dtype, rngs=rngs)
        if router is None:
            router = Router(hidden_size, num_experts, num_experts_per_tok, norm_topk_prob=norm_topk_prob, **options)
        self.router = router
        self.experts = Experts(hidden_size, moe_intermediate_size, num_experts, **options)
        self.shared_experts = MLP(hidden_size, shared_intermediate_size, **options) if shared_intermediate_size else None

    def __call__(
        self,
        x: Float[Array, "*batch hidden"],
        valid: Bool[Array, "*batch"] | None = None,
        *,
        expert_ids: Int[Array, "*batch k"] | None = None,
        force_balanced: bool = False,
        expert_parallel: ExpertParallel | None = None,
        sequences: Sequences | None = None,
    ) -> tuple[Float[Array, "*batch hidden"], Routing]:
        """Returns y in x's dtype and the routing of x's tokens in one row; other arguments as in `Router`.

        `valid` and `expert_ids` have the leading axes of x, or one axis of all tokens, as `routing.experts` has.

        With `expert_parallel` the call stands inside a `jax.shard_map` over its axis: x are this device's tokens, the router
        is whole, `experts` holds this device's part of the experts, and the routing's sums are of this device's tokens. Tokens
        that are not valid go to no expert there and leave the room to the others; their y is that of the shared experts alone.

        Raises:
          ValueError: an x whose last axis is not the block's hidden size, a `valid` or `expert_ids` that does not fit x, or
            `experts` that are not as many as the router's, on all devices of the axis together.
          NameError: with `expert_parallel`, outside `shard_map` or in one whose mesh lacks the axis.
        """
        hidden = self.experts.gate_up_proj.shape[-1]
        if x.ndim == 0 or x.shape[-1] != hidden:
            raise ValueError(f"x must have shape [..., hidden] with hidden={hidden}; got {list(x.shape)}")
        leading, x = x.shape[:-1], x.reshape(-1, hidden)
        if valid is not None:
            valid = _of_tokens("valid", valid, leading, ()) != 0
        if expert_ids is not None:
            expert_ids = _of_tokens("expert_ids", expert_ids, leading, (self.router.num_experts_per_tok,))
        routing = self.router(x, valid, expert_ids=expert_ids, force_balanced=force_balanced, sequences=sequences)
        self._check_experts(len(routing.expert_load), expert_parallel)
        if expert_parallel is None:
            y = self.experts(x, routing.weights, routing.experts)
        else:
            weights = self.experts.gate_up_proj[...], self.experts.down_proj[...]
            experts = routing.experts
            if valid is not None:
                experts = jnp.where(valid[:, None], int32_ids(experts, len(routing.expert_load)), -1)
            y, exchange = expert_parallel_mlp(x, *weights, routing.weights, experts, expert_parallel)
            # As the tokens vary over the mesh, also what devices agree on: a sum over the mesh takes one type of all.
            routing = routing._replace(**vary_as(exchange, x)._asdict())
        if self.shared_experts is not None:
            y = y + self.shared_experts(x)
        return y.reshape(*leading, hidden), routing

    def _check_experts(self, num_experts: int, expert_parallel: ExpertParallel | None) -> None:
        if expert_parallel is not None and self.experts.totals is not None:
            raise ValueError("gradient totals are for experts that lie on one device; these are split over several")
        devices = 1 if expert_parallel is None else axis_size(expert_parallel.axis_name)
        held = self.experts.gate_up_proj.shape[-3]
        # Choices of experts that nobody holds would add nothing, and nothing would say so.
        if devices * held != num_experts:
            how = "without expert_parallel" if expert_parallel is None else f"with axis_name={expert_parallel.axis_name!r}"
            raise ValueError(
                f"the router chooses among {num_experts} experts; {how}, {devices} x {held} are there: expert_parallel must "
                "name the mesh axis over which the experts are split, and be None where each device holds them all"
            )


def _of_tokens(name: str, array: Array, leading: tuple[int, ...], own_axes: tuple[int, ...]) -> Array:
    """The array with one axis of tokens in place of `leading`, the leading axes of x."""
    tokens = (math.prod(leading),)
    if array.shape not in (leading + own_axes, tokens + own_axes):
        raise ValueError(f"{name} must have shape {[*leading, *own_axes]} for this x; got {list(array.shape)}")
    return array.reshape(tokens + own_axes)


class GradientTotal(nnx.Variable):
    """What the gradient of a weight is added to; its own gradient is the sum (`kernels.experts.internal.Accumulators`)."""


class WeightWithTotal(nnx.Variable):
    """A weight that has a `GradientTotal` and no gradient of its own."""


def add_expert_gradients_to(model: nnx.Module, totals: nnx.State) -> None:
    """`Experts.add_gradients_to` for all experts of a model; `totals` are laid out as the model's parameters.

    For a model that has just been put together for one call, inside the function that is differentiated in `totals`.
    """
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Experts):
            of_module: Any = functools.reduce(operator.getitem, path, totals)
            module.add_gradients_to(of_module["gate_up_proj"][...], of_module["down_proj"][...])


class Experts(nnx.Module):
    """The experts' weights, fused as in transformers: gate_up_proj [E, 2I, D] (gate rows first) and down_proj [E, D, I]."""

    gate_up_total: GradientTotal | None = None
    down_total: GradientTotal | None = None

    def __init__(
        self,
        hidden_size: int,
        moe_intermediate_size: int,
        num_experts: int,
        *,
        stddev: float = 0.02,
        stack: tuple[int, ...] = (),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        gate_up_shape = (*stack, num_experts, 2 * moe_intermediate_size, hidden_size)
        down_shape = (*stack, num_experts, hidden_size, moe_intermediate_size)
        self.gate_up_proj: nnx.Variable = normal_parameter(gate_up_shape, stddev, param_dtype, rngs)
        self.down_proj: nnx.Variable = normal_parameter(down_shape, stddev, param_dtype, rngs)

    def __call__(
        self, x: Float[Array, "tokens hidden"], weights: Float[Array, "tokens k"], experts: Int[Array, "tokens k"]
    ) -> Float[Array, "tokens hidden"]:
        """The weighted sum of the chosen experts' outputs (`kernels.experts_mlp`)."""
        matrices, chunk = (
            (self.gate_up_proj[...], self.down_proj[...]),
            EXPERT_CHUNK_TOKENS if len(x) > 2 * EXPERT_CHUNK_TOKENS else None,
        )
        accumulators = None if self.totals is None else Accumulators(*self.totals, in_stack=True)
        return experts_mlp_accumulating(x, *matrices, weights, experts, accumulators, chunk_tokens=chunk)

    def add_gradients_to(self, gate_up: Array, down: Array) -> None:
        """From here on the weights have no gradients: those are added to these f32 arrays of the weights' shapes."""
        self.gate_up_proj, self.down_proj = WeightWithTotal(self.gate_up_proj[...]), WeightWithTotal(self.down_proj[...])
        self.gate_up_total, self.down_total = GradientTotal(gate_up), GradientTotal(down)

    @property
    def totals(self) -> tuple[Array, Array] | None:
        """What `add_gradients_to` was given."""
        if self.gate_up_total is None or self.down_total is None:
            return None
        return self.gate_up_total[...], self.down_total[...]
