"""Arguments that do not fit are refused: the error names the argument, what would be right and what was found."""

import jax.numpy as jnp
import pytest

from moe_jax import kernels
from moe_jax.kernels.experts.routing import plan_of_few
from tests.helpers import seeds
from tests.helpers.expert_gradients import accumulating, make_inputs


@pytest.mark.parametrize(
    "position, shape, message",
    [
        (0, (5, 8, 1), r"x must have shape \[tokens, hidden\]; got \[5, 8, 1\]"),
        (1, (4, 8, 9), r"w_gate_up must .* \[experts, 2\*inter, hidden\] with experts=4, .*, hidden=8; got \[4, 8, 9\]"),
        (2, (4, 7, 4), r"w_down must .* \[experts, hidden, inter\] with hidden=8; got \[4, 7, 4\]"),
        (3, (5, 3), r"topk_weights must .* \[tokens, k\] with tokens=5, k=2; got \[5, 3\]"),
        (4, (6, 2), r"topk_experts must .* \[tokens, k\] with tokens=5; got \[6, 2\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(position, shape, message):
    inputs = list(make_inputs(seeds.rng(), 5, 4, 2, 8, 4, dtype=jnp.float32))
    inputs[position] = jnp.zeros(shape, inputs[position].dtype)
    with pytest.raises(ValueError, match=message):
        kernels.experts_mlp(*inputs)


def test_shapes_that_do_not_fit_the_plan_are_named():
    x, w_gate_up, w_down, weights, chosen = make_inputs(seeds.rng(), 5, 4, 2, 8, 4, dtype=jnp.float32)
    rows = kernels.plan(chosen, 4)
    with pytest.raises(ValueError, match=r"x must .* with tokens=5; got \[4, 8\]"):
        kernels.gate_up(x[:4], w_gate_up, rows)
    with pytest.raises(ValueError, match=r"w_gate_up must .* with experts=4, hidden=8; got \[3, 8, 8\]"):
        kernels.gate_up(x, w_gate_up[:3], rows)
    with pytest.raises(ValueError, match=r"act must .* with rows=10; got \[5, 8\]"):
        kernels.down(x, w_down, weights, rows)


def test_differentiable_halves_refuse_plan_of_few():
    """`gate_up` and `down` have gradients."""
    x, w_gate_up, w_down, weights, chosen = make_inputs(seeds.rng(), 1, 3, 2, 8, 4, dtype=jnp.float32)
    rows = plan_of_few(chosen, 3, 1)
    with pytest.raises(ValueError, match=r"plan must come from plan.* plan_of_few"):
        kernels.gate_up(x, w_gate_up, rows, backend="xla")
    with pytest.raises(ValueError, match=r"plan must come from plan.* plan_of_few"):
        kernels.down(jnp.zeros((rows.num_rows, 4)), w_down, weights, rows, backend="xla")


def test_other_bad_arguments_are_named():
    inputs = make_inputs(seeds.rng(), 5, 4, 2, 8, 4, dtype=jnp.float32)
    with pytest.raises(ValueError, match="hidden and inter must be at least 1; got 8 and 0"):
        kernels.experts_mlp(inputs[0], inputs[1][:, :0], inputs[2][:, :, :0], *inputs[3:])
    with pytest.raises(ValueError, match="x must have a floating dtype; got int32"):
        kernels.experts_mlp(inputs[0].astype(jnp.int32), *inputs[1:])
    with pytest.raises(ValueError, match="topk_experts must have an integer dtype; got float32"):
        kernels.experts_mlp(*inputs[:4], inputs[4].astype(jnp.float32))
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1 or None; got 0"):
        kernels.experts_mlp(*inputs, chunk_tokens=0)
    totals = jnp.zeros_like(inputs[1]), jnp.zeros_like(inputs[2])
    with pytest.raises(ValueError, match=r"accumulators\.gate_up must have dtype float32, in which .* summed; got bfloat16"):
        accumulating(*inputs, (totals[0].astype(jnp.bfloat16), totals[1]))
    with pytest.raises(ValueError, match=r"accumulators\.down must .* with experts=4, hidden=8, inter=4; got \[3, 8, 4\]"):
        accumulating(*inputs, (totals[0], totals[1][:3]))
    with pytest.raises(ValueError, match=r"accumulators must be two arrays, of .* shape; got \[4, 8, 8\], None"):
        accumulating(*inputs, (totals[0], None))
    with pytest.raises(TypeError, match="argument"):
        accumulating(*inputs, (*totals, False, None, totals[0]))
    with pytest.raises(ValueError, match="argument backend: unknown backend 'cuda'; choose one of 'mosaic', 'triton', 'xla'"):
        kernels.experts_mlp(*inputs, backend="cuda")
