"""A MoE layer over a mesh and on one device, and routings that make its exchange difficult."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from moe_jax.parallel import expert_parallel_mlp
from tests.helpers import oracle
from tests.helpers.meshes import relative_error, value_and_gradients

TOKENS, EXPERTS, K, HIDDEN, INTER = 640, 16, 3, 8, 4
"""Sizes of all devices together."""

ARGUMENTS = ("x", "w_gate_up", "w_down", "topk_weights")


@functools.cache
def arrays(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = (TOKENS, HIDDEN), (EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER)
    x, w_gate_up, w_down = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return x, w_gate_up, w_down, jnp.asarray(rng.random((TOKENS, K)), jnp.float32)


@functools.cache
def direction():
    return jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, HIDDEN)), jnp.float32)


def routing(name):
    rng = np.random.default_rng(2)
    chosen = np.array([rng.permutation(EXPERTS)[:K] for _ in range(TOKENS)])
    if name == "one expert takes all":
        chosen[:] = EXPERTS - 1
    elif name == "one device takes all":
        chosen %= EXPERTS // 8
    elif name == "devices without tokens":
        chosen = chosen % (EXPERTS // 2) + EXPERTS // 4
    elif name == "few experts take most":
        popularity = 1 / np.arange(1, EXPERTS + 1) ** 1.5
        chosen = np.array([rng.choice(EXPERTS, K, replace=False, p=popularity / popularity.sum()) for _ in range(TOKENS)])
    elif name == "one device's tokens go to one other":
        chosen[: TOKENS // 8] = EXPERTS - 1
    elif name == "ids twice in a row and out of range":
        chosen[::3, 1] = chosen[::3, 0]
        chosen[1::5, 2], chosen[2::5, 0], chosen[::7, 1], chosen[::11] = -1, EXPERTS, 2**31 - 1, -(2**31)
    return jnp.asarray(chosen, jnp.int32)


ROUTINGS = (
    "even",
    "one expert takes all",
    "one device takes all",
    "devices without tokens",
    "few experts take most",
    "one device's tokens go to one other",
    "ids twice in a row and out of range",
)


def reference(*arguments):
    return oracle.experts_mlp(*arguments), None


with_reference = jax.jit(functools.partial(value_and_gradients, reference))


def results_of(chosen):
    """Returns the result and the gradients of one device for these ids."""
    return with_reference(arrays(), direction(), chosen)[0]


@functools.cache
def on_one_device(name):
    return results_of(routing(name))


@functools.cache
def on_a_mesh(settings, mesh, **options):
    """Returns the jitted layer over `mesh` with its gradients: (arrays, direction, ids) -> (results, Exchange of [devices])."""
    return jax.jit(functools.partial(value_and_gradients, sharded(settings, mesh, **options)))


def sharded(settings, mesh, *, check_vma=True):
    """Returns the layer with tokens split over all axes of the mesh, and experts over `expert`."""

    def layer(*a):
        y, exchange = expert_parallel_mlp(*a, settings)
        # Each count becomes an array of one number a device.
        return y, jax.tree.map(lambda number: jnp.asarray(number)[None], exchange)

    tokens, experts = P(mesh.axis_names), P("expert")
    specs = (tokens, experts, experts, tokens, tokens)
    return jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=(tokens, tokens), check_vma=check_vma)


def assert_equals_one_device(settings, mesh, names):
    """Outputs and gradients equal one device's under each routing, and are the same bits in two runs."""
    run = on_a_mesh(settings, mesh)
    for name in names:
        results, exchange = run(arrays(), direction(), routing(name))
        assert_equal(results, on_one_device(name))
        assert not exchange.num_dropped.any() and not exchange.num_shadows.any()
        assert len(set(map(int, exchange.num_rounds))) == 1
        if name == "even":
            assert exchange.num_rounds[0] == 1
        if name == "one expert takes all":
            assert exchange.num_rounds[0] > 1
            for a, b in zip(results, run(arrays(), direction(), routing(name))[0], strict=True):
                np.testing.assert_array_equal(a, b)


def assert_equal(results, expected, tolerance=1e-5):
    for name, actual, wanted in zip(("y", *ARGUMENTS), results, expected, strict=True):
        assert actual.shape == wanted.shape and actual.dtype == wanted.dtype, name
        assert relative_error(actual, wanted) < tolerance, name
