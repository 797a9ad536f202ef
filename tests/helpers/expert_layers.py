"""Layers of experts under routings that are hard for a kernel, and comparisons of their results."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.kernels.experts.call import TokenPart, experts
from moe_jax.kernels.experts.deferred import add_expert_products, expert_products_like
from moe_jax.kernels.experts.fp8.quantise import GROUP, InFp8
from moe_jax.kernels.experts.weights import Accumulators, ExpertWeights, Matrix
from moe_jax.kernels.low_rank import LowRank
from tests.helpers import oracle

ARRAYS = ("y", "x", "w_gate_up", "w_down", "weights")
"""What `with_gradients` gives: the result, and the gradients."""

ROUTINGS = ["random", "one_takes_all", "half_empty", "some_nobody"]
"""The routings of `choose` where experts have rows."""

SUM_ERROR_IN_FP8 = 2**-10 if jax.default_backend() == "gpu" else 0.0
"""The part of a sum of FP8 products that may be lost. Hopper's tensor cores keep about 14 bits of the largest product
(DeepSeek-V3's report, section 3.3.2); a CPU adds in f32."""

SMALL = 37, 4, 2, 128, 128
"""Tokens, experts, k, hidden, inter: where one size is as good as another, what is traced for it serves several tests."""


class Adapter(NamedTuple):
    """The changes of both matrices."""

    gate_up: LowRank
    down: LowRank


class Form(NamedTuple):
    """The fields of `ExpertWeights` without values; copies are a pair of `InFp8`."""

    layer: jax.Array | None = None
    gradient: Any = None
    frozen: bool = False
    adapter: Adapter | tuple[None, None] = (None, None)
    copies: tuple[InFp8 | None, InFp8 | None] = (None, None)

    def of(self, w_gate_up, w_down):
        """Returns arrays (or None if there are copies) in this form."""
        of_both = zip((w_gate_up, w_down), self.copies, self.adapter, strict=True)
        return ExpertWeights(*(Matrix(*each) for each in of_both), self.layer, self.gradient, self.frozen)


def compute(x, w_gate_up, w_down, weights, chosen, form=Form(), **options):  # noqa: B008
    """Computes a layer whose tokens are one part."""
    return experts([TokenPart(x, weights, chosen)], form.of(w_gate_up, w_down), **options)[0]


def adapted(x, w_gate_up, w_down, weights, chosen, adapter, **options):
    """Computes a layer of frozen matrices with low-rank changes."""
    return compute(x, w_gate_up, w_down, weights, chosen, Form(adapter=adapter, frozen=True), **options)


def choose(rng, routing, tokens, experts, k):
    if routing == "random":
        return np.argsort(rng.random((tokens, experts)), axis=1)[:, :k]
    if routing == "one_takes_all":
        return np.full((tokens, k), experts - 1)
    if routing == "half_empty":
        return rng.integers(0, max(experts // 2, 1), (tokens, k))
    return rng.integers(-1, experts + 1, (tokens, k)) if routing == "some_nobody" else np.full((tokens, k), experts)


def chosen_so_often(counts, tokens):
    """[tokens, 1]: the next counts[e] tokens choose expert e, the tokens left over choose nobody; one shape for all counts."""
    chosen = np.repeat(np.arange(len(counts)), counts)
    return jnp.asarray(np.pad(chosen, (0, tokens - chosen.size), constant_values=-1)[:, None], jnp.int32)


def make_layer(rng, routing, tokens, experts, k, hidden, inter, dtype=jnp.bfloat16):
    x, w_gate_up, w_down = (
        jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, dtype)
        for shape in ((tokens, hidden), (experts, 2 * inter, hidden), (experts, hidden, inter))
    )
    weights = jnp.asarray(rng.random((tokens, k)), jnp.float32)
    return x, w_gate_up, w_down, weights, jnp.asarray(choose(rng, routing, tokens, experts, k), jnp.int32)


def types_of(tokens, experts, k, hidden, inter):
    """Returns the types of the arguments of `experts_mlp` in bf16."""
    arrays = [(tokens, hidden), (experts, 2 * inter, hidden), (experts, hidden, inter)]
    routing = [jax.ShapeDtypeStruct((tokens, k), dtype) for dtype in (jnp.float32, jnp.int32)]
    return *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in arrays), *routing


def few_bits(weights):
    """Rounded so that their products with rows in bf16 are exact in f32.

    XLA fuses a product and a sum into one rounding for some numbers of tokens and not for others on CPUs.
    """
    return weights.astype(jnp.bfloat16).astype(jnp.float32)


def with_gradients(f, layer, dy):
    """Computes y and the gradients of the arrays, in one program: each operation alone would be compiled too."""

    @jax.jit
    def run(arrays, chosen, dy):
        y, pullback = jax.vjp(lambda *a: f(*a, chosen), *arrays)
        return y, *pullback(dy.astype(y.dtype))

    *arrays, chosen = layer
    return run(arrays, chosen, dy)


def gradients_by_accumulators(backend, layer, dy, **options):
    """Returns y, dx, the gradients of the weights of choices, and of both matrices, added to zeros in f32."""
    x, w_gate_up, w_down, weights, chosen = layer
    zeros = Accumulators(*(jnp.zeros(w.shape, jnp.float32) for w in (w_gate_up, w_down)))

    def f(x, weights, sums):
        return compute(x, w_gate_up, w_down, weights, chosen, Form(gradient=sums), backend=backend, **options)

    y, pullback = jax.vjp(f, x, weights, zeros)
    dx, d_weights, sums = pullback(dy)
    return y, dx, d_weights, sums.gate_up, sums.down


def gradients_in_a_stack(backend, layer, dy):
    """Returns what `gradients_by_accumulators` returns, of a layer between two others, and the others' sums.

    The others' weights are NaN, and their sums -1 and 1.
    """
    x, w_gate_up, w_down, weights, chosen = layer
    stacks = [jnp.stack([jnp.full_like(w, jnp.nan), w, jnp.full_like(w, jnp.nan)]) for w in (w_gate_up, w_down)]
    before = [jnp.stack([jnp.full(w.shape, i, jnp.float32) for i in (-1, 0, 1)]) for w in (w_gate_up, w_down)]

    def f(x, weights, sums, place):
        return compute(x, *stacks, weights, chosen, Form(place, Accumulators(*sums)), backend=backend)

    y, pullback = jax.vjp(f, x, weights, before, jnp.int32(1))
    dx, d_weights, sums, _ = pullback(dy)
    return (y, dx, d_weights, *(after[1] for after in sums)), [after[::2] for after in sums]


def gradients_by_tickets(backend, layer, dy, **options):
    """Returns what `gradients_by_accumulators` returns, with the matrices' gradients multiplied out later."""
    x, w_gate_up, w_down, weights, chosen = layer
    like = jax.eval_shape(
        lambda x: expert_products_like(x, len(w_down), weights.shape[1], w_down.shape[-1], backend=backend, **options), x
    )
    ticket = jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), like)

    def f(x, weights, ticket):
        return compute(x, w_gate_up, w_down, weights, chosen, Form(gradient=ticket), backend=backend, **options)

    y, pullback = jax.vjp(f, x, weights, ticket)
    dx, d_weights, products = pullback(dy)
    zeros = tuple(jnp.zeros(w.shape, jnp.float32) for w in (w_gate_up, w_down))
    return y, dx, d_weights, *add_expert_products(products, zeros, backend=backend)


def exact_with_gradients(layer, dy):
    """Computes y and the gradients by the definition, in f64."""
    *arrays, chosen = layer
    with jax.enable_x64(True):
        return with_gradients(oracle.experts_mlp, (*(a.astype(jnp.float64) for a in arrays), chosen), dy)


def assert_as_near_as(actuals, others, layer, dy, few):
    """Each array at most 1.5 times as far from f64 as the other's.

    Of a handful of numbers the two errors are two draws of the same noise: these are within `few`, of the size of the terms
    where numbers are sums that may cancel.
    """
    exact = exact_with_gradients(layer, dy)
    for name, actual, other, expected in zip(ARRAYS, actuals, others, exact, strict=True):
        assert actual.shape == expected.shape and actual.dtype == other.dtype, name
        if expected.size > 100:
            assert relative_error(actual, expected) <= 1.5 * relative_error(other, expected) + 1e-6, name
        else:
            size = np.linalg.norm(terms_of_weights(layer, dy) if name == "weights" else expected)
            assert np.linalg.norm(np.asarray(actual, np.float64) - np.asarray(expected)) <= few * size, name


def terms_of_weights(layer, dy):
    """[tokens, k, hidden] what the gradient of a weight is the sum of, in f64: dy times the output of that expert."""
    *arrays, weights, chosen = layer
    with jax.enable_x64(True):
        x, w_gate_up, w_down = (a.astype(jnp.float64) for a in arrays)
        of_choice = jax.jit(lambda e: oracle.experts_mlp(x, w_gate_up, w_down, jnp.ones((*x.shape[:1], 1)), e[:, None]))
        alone = [of_choice(e) for e in np.asarray(chosen).T]
        return np.stack(alone, axis=1) * np.asarray(dy, np.float64)[:, None]


def rows_with_a_pair(p):
    """True for the rows of tokens: others are left unwritten, or filled."""
    return (np.asarray(p.token_of_row) < p.row_of_pair.shape[0]) & (np.arange(p.num_rows) < p.offsets[-1])


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-300)


@jax.jit
def dequantised_matrices(w):
    """Returns values * scales in f32, [..., n, k]."""
    scales = jnp.repeat(jnp.repeat(w.scales, GROUP, axis=-2), GROUP, axis=-1)
    return w.values.astype(jnp.float32) * scales
