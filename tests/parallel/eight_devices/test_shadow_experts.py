"""Shadow experts change the device that computes a choice, not results or gradients; a hot expert needs fewer rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.parallel import ExpertParallel
from moe_jax.parallel.collectives.hops import sum_to_all
from tests.helpers import seeds
from tests.helpers.expert_layer import (
    ARGUMENTS,
    EXPERTS,
    ROUTINGS,
    TOKENS,
    K,
    arrays,
    assert_equal,
    direction,
    on_a_mesh,
    on_one_device,
    reference,
    results_of,
    routing,
    sharded,
)
from tests.helpers.meshes import make_mesh, relative_error, value_and_gradients


def shadowing(slots, **settings):
    """Makes copies free: these tests have few tokens."""
    return ExpertParallel(shadow_experts=slots, flops_per_byte=0.0, **settings)


def test_equals_one_device():
    """Results equal one device's under each routing, and are the same bits in two runs.

    One round is enough for hot experts, which need several without shadows (`test_expert_parallel_transports`).
    """
    run = on_a_mesh(shadowing(3, transport="all_to_all"), make_mesh(expert=4))
    chosen = {}
    for name in ROUTINGS:
        results, exchange = run(arrays(), direction(), routing(name))
        shadows = exchange.num_shadows
        assert_equal(results, on_one_device(name))
        assert not exchange.num_dropped.any() and (shadows == shadows[0]).all()
        chosen[name] = int(shadows[0])
        if name in ("one expert takes all", "one device takes all"):
            assert exchange.num_rounds[0] == 1
    # Two of the device's four experts have work in the first case, and one in the second.
    assert chosen["one device takes all"] == 2 and chosen["one expert takes all"] == 1
    assert chosen["few experts take most"] > 0
    for a, b in zip(results, run(arrays(), direction(), routing(name))[0], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_nothing_moves_if_it_does_not_pay():
    """No routing of 640 tokens is worth 2580 rows of two bytes."""
    layer = jax.jit(sharded(ExpertParallel(shadow_experts=1), make_mesh(expert=8)))
    for name in ROUTINGS:
        assert not layer(*arrays(jnp.bfloat16), routing(name))[1].num_shadows.any()


@pytest.mark.thorough
def test_groups_choose_separately():
    """With data=2, the first group's tokens all go to one expert, and the second group's evenly to all experts.

    The weights are replicated over `data`.
    """
    run = on_a_mesh(shadowing(2, transport="gather"), make_mesh(data=2, expert=2), check_vma=False)
    alternating = jnp.arange(TOKENS * K, dtype=jnp.int32).reshape(TOKENS, K) % EXPERTS
    chosen = alternating.at[: TOKENS // 2].set(EXPERTS - 1)
    results, exchange = run(arrays(), direction(), chosen)
    assert exchange.num_shadows.tolist() == [1, 1, 0, 0]
    assert_equal(results, results_of(chosen))


@pytest.mark.thorough
def test_bf16_stays_near_f32():
    """Copies of f32 weights travel in bf16, the dtype of their use."""
    run = on_a_mesh(shadowing(2), make_mesh(expert=4))
    x, w_gate_up, w_down, topk_weights = arrays(jnp.bfloat16)
    low = x, w_gate_up.astype(jnp.float32), w_down, topk_weights
    exact = [a.astype(jnp.float32) for a in low]
    expected, _ = value_and_gradients(reference, exact, direction(), routing("few experts take most"))
    results, exchange = run(low, direction(), routing("few experts take most"))
    assert (exchange.num_shadows == 2).all()
    assert [a.dtype for a in results] == [jnp.bfloat16, *(a.dtype for a in low)]
    for argument, actual, wanted in zip(("y", *ARGUMENTS), results, expected, strict=True):
        assert relative_error(actual, wanted) < 2e-2, argument


def test_choices_of_shadows_are_not_dropped():
    """64 tokens from a device to a device fit. 160 tokens choose one expert, so the others would be dropped."""
    settings = shadowing(1, transport="all_to_all", drop="position", capacity_factor=0.01)
    y, exchange = jax.jit(sharded(settings, make_mesh(expert=4)))(*arrays(), routing("one expert takes all"))
    assert not exchange.num_dropped.any() and (exchange.num_shadows == 1).all()
    assert relative_error(y, on_one_device("one expert takes all")[0]) < 1e-5


def test_residuals():
    """The residuals are the copies and their rows, and hold no weight twice."""
    devices, tokens, k, hidden, experts, slots = 8, 4096, 8, 64, 64, 2
    weights = (experts, 2 * hidden, hidden), (experts, hidden, hidden)
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((devices * tokens, hidden), *weights, (devices * tokens, k))]
    chosen = jax.ShapeDtypeStruct((devices * tokens, k), jnp.int32)

    def residuals(settings):
        f = sharded(settings, make_mesh(expert=devices))
        pullback = jax.eval_shape(lambda *a: jax.vjp(lambda *b: f(*b, a[-1]), *a[:-1])[1], *types, chosen)
        return [leaf.shape for leaf in jax.tree.leaves(pullback)]

    without, shapes = residuals(ExpertParallel()), residuals(ExpertParallel(shadow_experts=slots))
    assert [shapes.count(shape) for shape in weights] == [1, 1]
    copies = [(devices * slots, *shape[1:]) for shape in weights]
    assert [shapes.count(shape) for shape in copies] == [1, 1]

    def h_rows(shapes):
        return sum(shape[0] for shape in shapes if shape[1:] == (2 * hidden,)) / devices

    assert h_rows(shapes) - h_rows(without) == slots * tokens


def test_sum_to_all_rounds_once():
    of_devices = jnp.asarray(seeds.rng().normal(size=(8, 5, 3)), jnp.bfloat16)
    everywhere = jax.shard_map(
        lambda x: sum_to_all(x, "expert"), mesh=make_mesh(expert=8), in_specs=P("expert"), out_specs=P("expert")
    )
    expected = sum(of_devices.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(everywhere(of_devices), jnp.broadcast_to(expected, (8, 5, 3)))


def test_vmap_is_refused():
    """The gradients of the shared weights would count once for each batch."""
    x, w_gate_up, w_down, topk_weights = arrays()
    layer = sharded(shadowing(1), make_mesh(expert=4))
    twice = [jnp.stack([a, a]) for a in (x, topk_weights, routing("even"))]

    def of_all(w_gate_up, w_down):
        return jax.vmap(lambda x, *routed: layer(x, w_gate_up, w_down, *routed)[0])(*twice).sum()

    for f in (of_all, jax.grad(of_all)):
        with pytest.raises(
            NotImplementedError, match="shadow_experts under jax.vmap: .* pass the tokens of all batches in one call"
        ):
            jax.eval_shape(f, w_gate_up, w_down)


def test_too_many_shadows():
    with pytest.raises(ValueError, match="shadow_experts must be at most the 16 experts; got 17"):
        sharded(shadowing(17), make_mesh(expert=4))(*arrays(), routing("even"))
