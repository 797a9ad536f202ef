"""expert_parallel_mlp: further rounds, residuals, dropping, low precision, meshes of several axes, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moe_jax.kernels.experts.activation import Activation
from moe_jax.kernels.experts.call import TokenPart
from moe_jax.kernels.experts.deferred import add_expert_products, expert_products_like
from moe_jax.kernels.experts.weights import Accumulators, ExpertWeights, Matrix
from moe_jax.kernels.low_rank import LowRank
from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.lora import Adapter, freeze
from moe_jax.layers.moe import Experts, MoE
from moe_jax.parallel import ExpertParallel, expert_parallel_mlp
from moe_jax.parallel.expert import experts_of_devices
from moe_jax.parallel.expert.settings import first_capacity, further_capacity
from moe_jax.parallel.spread import Spread
from tests.helpers import oracle, seeds
from tests.helpers.expert_layer import (
    EXPERTS,
    HIDDEN,
    TOKENS,
    K,
    arrays,
    assert_equal,
    direction,
    on_a_mesh,
    on_one_device,
    results_of,
    routing,
    sharded,
)
from tests.helpers.meshes import make_mesh, relative_error


@pytest.mark.parametrize("transport", ["all_to_all", "pairwise"])
def test_residuals(transport):
    """The residuals fit an even routing and hold no weight twice.

    The rows of h follow capacity_factor * T * K; the worst routing has n * T * K.
    """
    devices, tokens, k, hidden, experts, factor = 8, 4096, 8, 64, 64, 1.25
    f = sharded(ExpertParallel(transport=transport, capacity_factor=factor), make_mesh(expert=devices))
    weights = (experts, 2 * hidden, hidden), (experts, hidden, hidden)
    shapes = (devices * tokens, hidden), *weights, (devices * tokens, k)
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    chosen = jax.ShapeDtypeStruct((devices * tokens, k), jnp.int32)
    pullback = jax.eval_shape(lambda *a: jax.vjp(lambda *b: f(*b, a[-1]), *a[:-1])[1], *types, chosen)
    shapes = [leaf.shape for leaf in jax.tree.leaves(pullback)]
    assert [shapes.count(shape) for shape in weights] == [1, 1]
    h_rows = sum(shape[0] for shape in shapes if shape[1:] == (2 * hidden,)) / devices
    assert factor * tokens * k <= h_rows <= factor * tokens * k + devices


@pytest.mark.thorough
@pytest.mark.parametrize("transport, factors", [("pairwise", "its own"), ("gather", "all")])
def test_low_rank_changes(transport, factors, rng):
    """Changes of frozen experts, in the first and in further rounds; a device has its own experts' factors, or all."""
    mesh, settings = make_mesh(expert=4), ExpertParallel(transport=transport)
    x, *matrices, weights = arrays()
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32)  # noqa: E731
    changes = [LowRank(normal(EXPERTS, 2, w.shape[2]), normal(EXPERTS, w.shape[1], 2)) for w in matrices]

    def layer(x, weights, changes, matrices, ids):
        operands = ExpertWeights(*(Matrix(w, change=of_w) for w, of_w in zip(matrices, changes, strict=True)), frozen=True)
        y, exchange = experts_of_devices(TokenPart(x, weights, ids), operands, settings)
        return y, exchange.num_rounds[None]

    tokens, experts = P("expert"), P("expert")
    specs = tokens, tokens, experts if factors == "its own" else P(), experts, tokens
    sharded_layer = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=(tokens, tokens))

    def reference(x, weights, changes, matrices, ids):
        changed = [w + jnp.matmul(*reversed(of_w)) for w, of_w in zip(matrices, changes, strict=True)]
        return oracle.experts_mlp(x, *changed, weights, ids), jnp.zeros(1)

    @functools.partial(jax.jit, static_argnums=0)
    def run(f, ids, dy):
        y, pullback, rounds = jax.vjp(lambda *a: f(*a, matrices, ids), x, weights, changes, has_aux=True)
        return jax.tree.leaves((y, pullback(dy))), rounds

    for name, several in (("even", False), ("one expert takes all", True)):
        found, rounds = run(sharded_layer, routing(name), direction())
        assert (rounds[0] > 1) == several
        for actual, wanted in zip(found, run(reference, routing(name), direction())[0], strict=True):
            assert relative_error(actual, wanted) < 1e-5


def test_a_block_with_adapters(rng):
    """A block with another activation, its experts split and all adapters on each device, equals the block on one device."""
    moe = MoE(16, 12, 8, 2, activation=Activation(alpha=1.702, limit=0.02, offset=1.0), rngs=nnx.Rngs(0))
    moe.experts.gate_up_lora = Adapter((8, 2, 16), (8, 24, 2), scale=1.0, rngs=nnx.Rngs(1))
    moe.experts.down_lora = Adapter((8, 2, 12), (8, 16, 2), scale=0.5, rngs=nnx.Rngs(2))
    for lora in (moe.experts.gate_up_lora, moe.experts.down_lora):
        lora.b[...] = jnp.asarray(rng.normal(size=lora.b.shape), jnp.float32)
    freeze(moe)
    graph, state = nnx.split(moe)
    x = jnp.asarray(rng.normal(size=(32, 16)), jnp.float32)

    def spec(path, _):
        return P("expert") if path[-1] in ("gate_up_proj", "down_proj") else P()

    def of_device(state, x):
        return nnx.merge(graph, state)(x, spread=Spread(ExpertParallel()))[0]

    flat = nnx.to_flat_state(state)
    specs = nnx.from_flat_state([(path, variable.replace(spec(path, variable))) for path, variable in flat])
    split = jax.shard_map(of_device, mesh=make_mesh(expert=4), in_specs=(specs, P("expert")), out_specs=P("expert"))
    assert relative_error(jax.jit(split)(state, x), nnx.jit(moe)(x)[0]) < 1e-6


@pytest.mark.thorough
def test_accumulators():
    """Sums of gradients grow by the weights' gradients, in the first and in further rounds, inside a stack of two layers."""
    mesh, settings = make_mesh(expert=4), ExpertParallel(transport="pairwise")
    x, w_gate_up, w_down, weights = arrays()
    stacks = [jnp.stack([jnp.full_like(w, jnp.nan), w]) for w in (w_gate_up, w_down)]

    def layer(x, weights, sums, stacks, ids):
        accumulators = Accumulators(*sums, in_stack=True)
        matrices = ExpertWeights.of(*stacks, layer=jnp.int32(1), gradient=accumulators)
        y, exchange = experts_of_devices(TokenPart(x, weights, ids), matrices, settings)
        return y, exchange.num_rounds[None]

    tokens, experts = P("expert"), P(None, "expert")
    specs = tokens, tokens, experts, experts, tokens
    sharded_layer = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=(tokens, tokens))

    @jax.jit
    def run(ids, dy):
        y, pullback, rounds = jax.vjp(lambda *a: sharded_layer(*a, stacks, ids), x, weights, before, has_aux=True)
        return y, pullback(dy), rounds

    before = [jnp.full_like(stack, 2.0) for stack in stacks]
    for name, several in (("even", False), ("one expert takes all", True)):
        y, (dx, dweights, sums), rounds = run(routing(name), direction())
        assert (rounds[0] > 1) == several
        assert_equal((y, dx, *(after[1] - 2 for after in sums), dweights), on_one_device(name))
        assert all((after[0] == 2).all() for after in sums)


ONE_CALL = dict(
    gather=ExpertParallel(transport="gather", capacity_factor=4),
    all_to_all=ExpertParallel(transport="all_to_all", capacity_factor=4),
    drop=ExpertParallel(transport="all_to_all", capacity_factor=0.5, drop="probability"),
    drop_of_gather=ExpertParallel(transport="gather", capacity_factor=0.5, drop="probability"),
)
"""Settings with which one call computes everything that four devices' experts compute."""


@pytest.mark.parametrize("name", [pytest.param(how, marks=[pytest.mark.thorough] * (how != "drop")) for how in ONE_CALL])
def test_tickets(name):
    """Operands that are multiplied later give the gradients of the weights, and all others are the same bits."""
    mesh, settings, inter = make_mesh(expert=4), ONE_CALL[name], arrays()[2].shape[2]
    module = nnx.eval_shape(lambda: Experts(HIDDEN, inter, EXPERTS // 4, num_experts_per_tok=K, rngs=nnx.Rngs(0)))

    def with_gradients(x, w_gate_up, w_down, weights, ids, dy):
        like = jax.eval_shape(lambda x: vary_as(Spread(settings).products_like(module, x), x), x)
        ticket = vary_as(jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), like), x)

        def layer(x, weights, ticket):
            given = ExpertWeights.of(w_gate_up, w_down, gradient=ticket)
            return experts_of_devices(TokenPart(x, weights, ids), given, settings)[0]

        y, pullback = jax.vjp(layer, x, weights, ticket)
        dx, dweights, products = pullback(dy)
        zeros = jnp.zeros_like(w_gate_up), jnp.zeros_like(w_down)
        return y, dx, *add_expert_products(products, zeros), dweights

    specs = (P("expert"),) * 6, (P("expert"),) * 5
    run, undivided = (
        jax.jit(jax.shard_map(with_gradients, mesh=mesh, in_specs=specs[0], out_specs=specs[1])),
        on_a_mesh(settings, mesh),
    )
    for ids in map(routing, ("even", "one expert takes all", "ids twice in a row and out of range")):
        results, (expected, _) = run(*arrays(), ids, direction()), undivided(arrays(), direction(), ids)
        for actual, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize(
    "several", [dict(), dict(transport="pairwise", capacity_factor=4), dict(capacity_factor=4, shadow_experts=1)]
)
def test_tickets_of_several_calls_are_refused(several):
    settings, mesh = ExpertParallel(**several), make_mesh(expert=4)

    def layer(x, w_gate_up, w_down, weights, ids):
        ticket = expert_products_like(x, len(w_down), K, w_down.shape[2])
        given = ExpertWeights.of(w_gate_up, w_down, gradient=ticket)
        return experts_of_devices(TokenPart(x, weights, ids), given, settings)[0]

    with pytest.raises(ValueError, match="weight tickets hold the operands of one call of the kernels: use drop, or"):
        jax.eval_shape(jax.shard_map(layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")), *arrays(), routing("even"))


@pytest.mark.parametrize(
    "drop, transport",
    [
        ("probability", "all_to_all"),
        pytest.param("position", "pairwise", marks=pytest.mark.thorough),
        pytest.param("position", "gather", marks=pytest.mark.thorough),
    ],
)
def test_drop(drop, transport):
    devices, factor = 4, 0.5
    run = on_a_mesh(ExpertParallel(transport=transport, drop=drop, capacity_factor=factor), make_mesh(expert=devices))
    for name in ("even", "few experts take most", "ids twice in a row and out of range"):
        ids, dropped = ids_after_drop(np.asarray(routing(name)), np.asarray(arrays()[3]), devices, factor, drop)
        results, exchange = run(arrays(), direction(), routing(name))
        np.testing.assert_array_equal(exchange.num_dropped, dropped)
        assert sum(dropped) > 0 and (exchange.num_rounds == 1).all()
        assert_equal(results, results_of(jnp.asarray(ids)))


def ids_after_drop(chosen, weights, devices, factor, drop):
    """Returns the ids with -1 for dropped choices, and each device's number of dropped choices, computed in loops."""
    tokens = TOKENS // devices
    slots, pairs = first_capacity(tokens, K, EXPERTS, devices, factor)
    ids, dropped = chosen.copy(), []
    for device in range(devices):
        dropped.append(0)
        own = range(device * tokens, (device + 1) * tokens)
        for to in range(devices):
            there = {t: [k for k in range(K) if chosen[t, k] // (EXPERTS // devices) == to] for t in own}
            line = [t for t in own if there[t]]
            if drop == "probability":
                line.sort(key=lambda t: -weights[t, there[t]].sum())
            queued, choices = 0, 0
            for t in line:
                queued, choices = queued + 1, choices + len(there[t])
                if queued > slots or choices > pairs:
                    ids[t, there[t]] = -1
                    dropped[-1] += len(there[t])
    return ids, dropped


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_rounds_of_each_group(check_vma):
    """Each group of devices runs the number of rounds that its longest queue needs.

    With data=2, the tokens of one group all go to one expert, and the other group's tokens to both devices alternately. The
    weights are replicated over `data`.
    """
    tokens = TOKENS // 4
    first = first_capacity(tokens, K, EXPERTS, 2, 0.01)
    assert first == further_capacity(first, K) == (64, 64 * K)
    settings = ExpertParallel(transport="all_to_all", capacity_factor=0.01)
    run = on_a_mesh(settings, make_mesh(data=2, expert=2), check_vma=check_vma)
    alternating = routing("even") % (EXPERTS // 2) + EXPERTS // 2 * (jnp.arange(TOKENS) % 2)[:, None]
    chosen = alternating.at[: TOKENS // 2].set(EXPERTS - 1)
    results, exchange = run(arrays(), direction(), chosen)
    owner = np.asarray(chosen).reshape(2, 2, tokens, K) // (EXPERTS // 2)
    longest = [max((of_group == to).any(axis=2).sum(axis=1).max() for to in range(2)) for of_group in owner]
    assert longest == [tokens, tokens // 2]
    expected = [[1 + -(-(queue - 64) // 64)] * 2 for queue in longest]
    np.testing.assert_array_equal(np.asarray(exchange.num_rounds).reshape(2, 2), expected)
    assert expected[0] != expected[1]
    assert_equal(results, results_of(chosen))


@pytest.mark.thorough
def test_uint8_ids_of_256_experts():
    x, w_gate_up, w_down, weights = arrays()
    w_gate_up, w_down = (jnp.tile(w, (256 // EXPERTS, 1, 1)) for w in (w_gate_up, w_down))
    chosen = jnp.asarray(seeds.rng().integers(0, 256, (TOKENS, K)), jnp.uint8)
    y, _ = jax.jit(sharded(ExpertParallel(), make_mesh(expert=4)))(x, w_gate_up, w_down, weights, chosen)
    assert relative_error(y, oracle.experts_mlp(x, w_gate_up, w_down, weights, chosen.astype(jnp.int32))) < 1e-5


def test_one_device_and_no_tokens():
    run = on_a_mesh(ExpertParallel(), make_mesh(expert=1))
    assert_equal(run(arrays(), direction(), routing("even"))[0], on_one_device("even"))
    none = [a[:0] if a.shape[0] == TOKENS else a for a in arrays()]
    results, _ = on_a_mesh(ExpertParallel(), make_mesh(expert=4))(none, direction()[:0], routing("even")[:0])
    assert results[0].shape == (0, HIDDEN) and not any(gradient.any() for gradient in results[1:])


def test_error_outside_shard_map():
    with pytest.raises(NameError, match="no mesh axis 'expert' here; call it inside a jax.shard_map over that axis"):
        expert_parallel_mlp(*arrays(), routing("even"), ExpertParallel())


def test_shape_errors():
    run = on_a_mesh(ExpertParallel(), make_mesh(expert=4))
    x, w_gate_up, w_down, weights = arrays()
    with pytest.raises(ValueError, match=r"w_gate_up must .* \[local_experts, 2\*inter, hidden\] .* got \[4, 7, 8\]"):
        run((x, w_gate_up[:, :7], w_down, weights), direction(), routing("even"))
    with pytest.raises(ValueError, match="topk_experts must have an integer dtype; got float32"):
        run(arrays(), direction(), routing("even").astype(jnp.float32))
