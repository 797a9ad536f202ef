"""Memory of a layer of experts: its residuals, and a compiled program's memory in addition to its arguments."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax import kernels
from tests.helpers import seeds
from tests.helpers.expert_gradients import accumulating, make_inputs


def test_keeps_h_but_nothing_of_tokens_times_k_times_hidden():
    inputs = make_inputs(seeds.rng(), 32, 4, 2, 64, 4, dtype=jnp.float32)
    *arrays, chosen = inputs
    _, vjp = jax.vjp(lambda *a: kernels.experts_mlp(*a, chosen), *arrays)
    shapes = [leaf.shape for leaf in jax.tree.leaves(vjp)]
    assert (64, 8) in shapes  # h: 32 tokens * 2 choices, 2 * inter
    assert not any(np.prod(shape) >= 64 * 64 and shape[0] == 64 for shape in shapes if shape)


def test_memory_does_not_grow_with_experts_times_rows():
    """128 experts, 8192 rows: the compiled temporaries stay within a few copies of the rows."""
    tokens, experts, k, hidden, inter = 1024, 128, 8, 64, 32
    shapes = [(tokens, hidden), (experts, 2 * inter, hidden), (experts, hidden, inter), (tokens, k)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    chosen = jax.ShapeDtypeStruct((tokens, k), jnp.int32)
    # On a GPU the workspace of its matmul library would be counted too.
    with jax.default_device(jax.devices("cpu")[0]):
        compiled = jax.jit(lambda *a: kernels.experts_mlp(*a)).lower(*arrays, chosen).compile()
    rows_bytes = tokens * k * hidden * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 12 * rows_bytes


def test_accumulators_take_no_memory_but_their_own():
    """The compiled loop over micro-batches works on the arrays that it is given, and copies none."""
    tokens, experts, k, hidden, inter = 64, 6, 2, 32, 64

    def after_all(totals, weights, batches):
        def after(totals, batch):
            def loss(totals):
                x, *routing = batch
                y = accumulating(x, *weights, *routing, totals, chunk_tokens=16)
                return y.astype(jnp.float32).sum()

            return jax.grad(loss)(totals), None

        return jax.lax.scan(after, totals, batches)[0]

    shapes = (experts, 2 * inter, hidden), (experts, hidden, inter)
    weights, totals = (tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes) for dtype in (jnp.bfloat16, jnp.float32))
    of_tokens = (hidden, jnp.bfloat16), (k, jnp.float32), (k, jnp.int32)
    batches = tuple(jax.ShapeDtypeStruct((3, tokens, width), dtype) for width, dtype in of_tokens)
    with jax.default_device(jax.devices("cpu")[0]):
        compiled = jax.jit(after_all, donate_argnums=0).lower(totals, weights, batches).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == sum(4 * math.prod(shape) for shape in shapes)
    for shape in shapes:
        array = re.escape(f"f32[{','.join(map(str, shape))}]")
        assert re.search(rf"= {array}\S* fusion\(", compiled.as_text()), "something of this shape is computed"
        assert not re.search(rf"= {array}\S* copy\(", compiled.as_text())
