"""run_layers equals lax.scan, with every gradient, and allocates stacked results without filling them with zeros."""

import re
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from moe_jax.layers.passes import LayerArrays, Layers, run_layers
from moe_jax.parallel.fsdp import LayerGather
from tests.helpers import seeds
from tests.helpers.h200 import kernels_beside_copies, needs_compiler, run_script

LAYERS, WIDTH = 3, 8


def layer(shared, per_layer, x, parameters, _=None):
    """Reads everything that a layer may, integers too, and returns a differentiable and an integer result with x."""
    angle, shift = shared
    index, window = per_layer
    h = jnp.tanh(x @ parameters["w"] + index * jnp.cos(angle)) + parameters["bias"]
    h = jnp.roll(h, shift, axis=0) * (1 if window is None else window)
    return x + h, (jnp.square(h).sum(axis=0), jnp.argmax(h, axis=1))


def make_inputs(window=False, rng=None):
    rng = rng or seeds.rng()
    parameters = {
        "w": jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH))),
        "bias": jnp.asarray(rng.normal(size=(LAYERS, WIDTH))),
    }
    per_layer = jnp.arange(LAYERS), jnp.asarray(rng.integers(1, 5, LAYERS)) if window else None
    shared = jnp.asarray(rng.normal(size=(5, 1))), jnp.int32(2)
    return shared, per_layer, jnp.asarray(rng.normal(size=(5, WIDTH))), parameters


def run(shared, per_layer, x, parameters, **remat):
    return run_layers(Layers(layer, **remat), LayerArrays(shared, per_layer, parameters), x)


def scanned(shared, per_layer, x, parameters):
    return jax.lax.scan(lambda x, xs: layer(shared, xs[0], x, xs[1]), x, (per_layer, parameters))


def loss(run, inputs):
    weights = np.random.default_rng(0).normal(size=(LAYERS, WIDTH))

    def of(x, parameters):
        x, (squares, largest) = run(*inputs[:2], x, parameters)
        return jnp.sin(x).sum() + (weights * squares).sum(), (x, squares, largest)

    return of


@pytest.mark.parametrize("remat", [False, "offload"])
def test_carry(remat):
    """So that the gradient of a layer does not need all of it, or none."""

    def body(shared, per_layer, carry, w, _=None):
        x, same, total, count = carry
        return (x + jnp.sin(w), same, total + jnp.square(w).sum() + same, count + 1), ()

    def run(parameters, start):
        return run_layers(Layers(body, remat=remat), LayerArrays((), (), parameters), (*start, jnp.int32(0)))[0]

    def value(parameters, start):
        x, _, total, _ = run(parameters, start)
        return jnp.sin(x).sum() * total

    with jax.enable_x64(True):
        rng = seeds.rng()
        w, start = jnp.asarray(rng.normal(size=(LAYERS, 4))), tuple(jnp.asarray(rng.normal(size=n)) for n in (4, (), ()))
        found = jax.jit(jax.grad(value, (0, 1)))(w, start)

        @jax.jit
        @partial(jax.grad, argnums=(0, 1))
        def expected(w, start):
            x, same, total = start
            return jnp.sin(x + jnp.sin(w).sum(axis=0)).sum() * (total + jnp.square(w).sum() + LAYERS * same)

        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12), found, expected(w, start))


@pytest.fixture(scope="module")
def expected_of_scan():
    """Inputs with windows, and `lax.scan`'s results and gradients for them."""
    with jax.enable_x64(True):
        inputs = make_inputs(window=True, rng=seeds.rng(__name__))
        return inputs, with_gradients(scanned, inputs)


def with_gradients(run, inputs):
    """Returns x, what the layers returned, and the gradients of x and of the parameters."""
    return jax.jit(jax.grad(loss(run, inputs), (0, 1), has_aux=True))(*inputs[2:])


@pytest.mark.parametrize(
    ("remat", "num_kept"),
    [(False, 0), (True, 0), (True, 2), ("offload", 2), *(pytest.param(True, n, marks=pytest.mark.thorough) for n in (1, 9))],
)
def test_equals_scan(expected_of_scan, remat, num_kept):
    """Values and gradients equal `lax.scan`'s, no matter which layers keep their residuals."""
    inputs, (expected, results) = expected_of_scan
    with jax.enable_x64(True):
        gradients, found = with_gradients(partial(run, remat=remat, num_kept=num_kept), inputs)
    jax.tree.map(np.testing.assert_array_equal, found, results)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), gradients, expected)


@jax.custom_vjp
def times(x, w, total):
    """Computes x w; the gradient to w is added to total."""
    return x @ w


times.defvjp(lambda x, w, total: (x @ w, (x, w, total)), lambda kept, dy: (dy @ kept[1].T, None, kept[2] + kept[0].T @ dy))


@pytest.mark.parametrize(("checkpointed", "remat"), [(True, {}), (False, {"remat": True, "num_kept": 2})])
def test_accumulators(checkpointed, remat):
    """Accumulators grow by the gradients, in their own memory, also where two loops add to one stack."""

    def body(_, w, x, parameters, total):
        y = x @ w if total is None else times(x, w, total)
        return x + jnp.tanh(y) * parameters, None

    body = jax.checkpoint(body) if checkpointed else body
    rng = seeds.rng()
    w, totals = (jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)), jnp.float32) for _ in range(2))
    x, parameters = jnp.asarray(rng.normal(size=(5, WIDTH))), jnp.asarray(rng.normal(size=(LAYERS, WIDTH)))

    def loss(x, parameters, w, totals):
        return jnp.sin(run_layers(Layers(body, **remat), LayerArrays(None, w, parameters, totals), x)[0]).sum()

    def scanned(x, parameters, w):
        return jnp.sin(jax.lax.scan(lambda x, xs: body(None, xs[0], x, xs[1], None), x, (w, parameters))[0]).sum()

    run = jax.jit(jax.grad(loss, (0, 1, 3)), donate_argnums=3).lower(x, parameters, w, totals).compile()
    expected = jax.jit(jax.grad(scanned, (0, 1, 2)))(x, parameters, w)
    before = np.asarray(totals)
    actual = run(x, parameters, w, totals)
    for one, other in zip((*actual[:2], actual[2] - before), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    array = re.escape(f"f32[{LAYERS},{WIDTH},{WIDTH}]")
    assert run.memory_analysis().alias_size_in_bytes == totals.nbytes
    assert not re.search(rf"= {array}\S* copy\(", run.as_text()) and not re.search(rf"= {array}\S* broadcast\(", run.as_text())


@dataclass(frozen=True)
class RecordingGather(LayerGather):
    """Moves nothing; writes down the layer of every call, which it reads from the numbers themselves."""

    calls: list = field(default_factory=list, compare=False)

    def record(self, name, leaves, first=0):
        self.calls.append((name, int(leaves[0]) - first))
        return leaves

    def start_gather(self, parts):
        return self.record("start_gather", self.split(parts)[0])

    def finish_gather(self, arriving):
        return self.record("finish_gather", arriving)

    def barrier(self, computed, arriving):
        self.calls.append("barrier")
        return computed, arriving

    def start_scatter(self, gradients):
        return self.record("start_scatter", gradients, first=1)

    def finish_scatter(self, arriving, like):
        return self.record("finish_scatter", arriving, first=1)


@pytest.mark.parametrize("remat", [False, True])
def test_the_schedule(remat):
    """Each turn starts its transfers, computes, and then waits for them: the table at the top of `layers.passes`.

    Without jit the loops run in Python. w[l] is l and its gradient l + 1, so that each call shows its layer; -1 is zeros.
    """
    gather = RecordingGather((((-1, ("fsdp",)),),), jnp.dtype(jnp.float32))

    def record(name, index):
        if not isinstance(index, jax.core.Tracer):
            gather.calls.append((name, int(index)))

    @jax.custom_vjp
    def layer(x, w, index):
        record("layer", index)
        return x + w * (index + 1)

    def with_residuals(x, w, index):
        return layer(x, w, index), index

    def gradients(index, dx):
        record("gradients", index)
        return dx, dx * (index + 1), None

    layer.defvjp(with_residuals, gradients)

    def body(shared, index, x, w, _):
        return layer(x, w, index), ()

    def run(w):
        return run_layers(Layers(body, gather, remat), LayerArrays((), jnp.arange(3), w), jnp.float32(0))[0]

    with jax.disable_jit():
        gradient = jax.grad(run)(jnp.arange(3, dtype=jnp.float32))
    np.testing.assert_array_equal(gradient, [1, 2, 3])

    def forward(i, following):
        return [("start_gather", following), ("layer", i), "barrier", ("finish_gather", following)]

    def backward(i, below, above):
        again = [("layer", i), "barrier"] if remat else []
        sent, received = (
            [("start_gather", below), ("start_scatter", above)],
            [("finish_scatter", above), ("finish_gather", below)],
        )
        return [*sent, *again, ("gradients", i), "barrier", *received]

    assert gather.calls == [
        *[("start_gather", 0), ("finish_gather", 0), *forward(0, 1), *forward(1, 2), *forward(2, 2)],
        *[("start_gather", 2), ("finish_gather", 2), *backward(2, 1, -1), *backward(1, 0, 2), *backward(0, 0, 1)],
        *[("start_scatter", 0), ("finish_scatter", 0)],
    ]


def test_residuals():
    """Weights and arrays that all layers read are not stored again: the residuals of a layer are h, its tanh and x."""
    inputs = make_inputs()
    _, pullback, _ = jax.vjp(loss(run, inputs), *inputs[2:], has_aux=True)
    stacked = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape[:1] == (LAYERS,)]
    weights = [leaf for leaf in stacked if leaf.shape == (LAYERS, WIDTH, WIDTH)]
    assert len(weights) == 1
    assert not any(leaf.shape == (LAYERS, 5, 1) for leaf in stacked)


@pytest.mark.parametrize("num_recomputed", [1, 2])
def test_recomputation_of_one_layer_waits_for_its_gradient(num_recomputed):
    """XLA unrolls a loop of one layer, and would recompute it during the passes of later layers. A longer loop waits anyway."""
    inputs = make_inputs()
    value = loss(partial(run, remat=True, num_kept=LAYERS - num_recomputed), inputs)
    gradient = jax.make_jaxpr(jax.grad(value, has_aux=True))(*inputs[2:])
    assert str(gradient).count("optimization_barrier") == (num_recomputed == 1)


@pytest.mark.parametrize("devices", [1, 2])
def test_gradients_are_written_once(devices):
    """One device, and each device of a shard_map, allocates; no zeros of a stacked gradient's shape are made."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    inputs = make_inputs()
    value = lambda *a: loss(run, inputs)(*a)[0]  # noqa: E731
    if devices > 1:
        value = jax.shard_map(value, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), inputs[2:])
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(jax.grad(lambda *a: value(*a), (1,))).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    shape = f"tensor<{LAYERS}x{WIDTH}x{WIDTH}xf32>"
    assert any("AllocateBuffer" in line and line.rstrip().endswith(shape) for line in text.splitlines())
    assert not any("broadcast_in_dim" in line and line.rstrip().endswith(shape) for line in text.splitlines())


GATHERED = """
from moe_jax.layers.passes import LayerArrays, Layers
from moe_jax.layers.passes import run_layers
from moe_jax.parallel.fsdp import LayerGather
from moe_jax.parallel.collectives.hops import COPIES, MANY_AT_ONCE

mesh = make_mesh(4, "fsdp")
gather = LayerGather((((-3, ("fsdp",)),),) * 2, bf16, "copies")
has_gradient, remat = sys.argv[1] != "value", sys.argv[1] == "remat"

def body(shared, per_layer, x, w, _):
    return x + kernels.experts_mlp(x, *w, *shared, backend="mosaic"), ()

def local(w, x, weights, chosen):
    def loss(w):
        return run_layers(Layers(body, gather, remat), LayerArrays((weights, chosen), (), w), x)[0].astype(f32).sum()
    return jax.grad(loss)(w) if has_gradient else loss(w)[None]

split, of_layers = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")
specs = of_layers, split, split, split
f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=of_layers if has_gradient else split)
place = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
w = place((3, 8, 1024, 512), bf16, of_layers), place((3, 8, 512, 512), bf16, of_layers)
tokens = place((4096, 512), bf16, split), place((4096, 2), f32, split), place((4096, 2), i32, split)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    print(jax.jit(f).lower(w, *tokens).compile(COPIES | MANY_AT_ONCE).as_text())
"""


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(
    "what, loops",
    [
        ("value", 1),
        ("gradient", 2),
        ("remat", 2),
    ],
)
def test_copies_hide_behind_kernels(what, loops):
    """In the program of four H200s, between the start of each copy in a loop over layers and the wait for it a kernel runs."""
    computations = re.split(r"\n(?=%|ENTRY)", run_script(GATHERED, what))
    loops_that_copy = [c for c in computations if "collective-permute-start(" in c and not c.startswith("ENTRY")]
    assert len(loops_that_copy) == loops
    for loop in loops_that_copy:
        beside = kernels_beside_copies(loop)
        assert len(beside) >= 3 and all(beside)
