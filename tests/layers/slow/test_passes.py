"""Passes over layers that are joined compute what they compute apart, and hide each other's transfers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.layers.loops import run_joined, run_loops, run_pass, run_together
from moe_jax.layers.passes import WHOLE_LAYER, LayerArrays, Layers, backward_loop, forward_loop
from tests.helpers import seeds
from tests.helpers.h200 import needs_compiler, run_script, scopes_beside_copies

LAYERS, WIDTH = 3, 8


def body(shared, index, x, w, _):
    h = jnp.tanh(x @ w + shared * index)
    return x + h, jnp.square(h).sum()


def a_stack(rng, layers=LAYERS):
    """Returns layers, their arrays, and an input."""
    w = jnp.asarray(rng.normal(size=(layers, WIDTH, WIDTH)), jnp.float32)
    arrays = LayerArrays(jnp.float32(0.3), jnp.arange(layers), w)
    return Layers(body, WHOLE_LAYER, True), arrays, jnp.asarray(rng.normal(size=(5, WIDTH)), jnp.float32)


def test_joined_loops_compute_what_each_computes_alone():
    rng = seeds.rng()
    layers, arrays, x = a_stack(rng)
    other = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    dx, dy = jnp.ones_like(x), jnp.ones(LAYERS)

    def apart(x, other):
        (before,) = run_loops(forward_loop(layers, arrays, x))
        (forward,) = run_loops(forward_loop(layers, arrays, other))
        (backward,) = run_loops(backward_loop(layers, arrays, before.saved, dx, dy))
        return forward[:2], backward

    def joined(x, other):
        (before,) = run_loops(forward_loop(layers, arrays, x))
        forward, backward = run_loops(forward_loop(layers, arrays, other), backward_loop(layers, arrays, before.saved, dx, dy))
        return forward[:2], backward

    jax.tree.map(np.testing.assert_array_equal, jax.jit(joined)(x, other), jax.jit(apart)(x, other))


def test_gradients_are_added_to_sums_in_their_memory():
    """Sums have a dtype of their own, and the compiled program has no second array of their size."""
    layers, arrays, x = a_stack(seeds.rng())
    arrays = arrays._replace(parameters=arrays.parameters.astype(jnp.bfloat16))
    x = x.astype(jnp.bfloat16)
    layers = layers._replace(body=lambda *a: jax.tree.map(lambda v: v.astype(jnp.bfloat16), body(*a)))

    def gradients(sums, x):
        (run,) = run_loops(forward_loop(layers, arrays, x))
        backward = backward_loop(layers, arrays, run.saved, jnp.ones_like(x), jnp.ones_like(run.y), sums)
        return run_loops(backward)[0].parameters

    sums = jnp.full(arrays.parameters.shape, 2.0, jnp.float32)
    run = jax.jit(gradients, donate_argnums=0).lower(sums, x).compile()
    alone = jax.jit(gradients)(None, x)
    assert alone.dtype == jnp.bfloat16
    np.testing.assert_array_equal(run(sums, x), 2.0 + alone.astype(jnp.float32))
    shape = re.escape(f"f32[{LAYERS},{WIDTH},{WIDTH}]")
    assert run.memory_analysis().alias_size_in_bytes == sums.nbytes
    assert not re.search(rf"= {shape}\S* copy\(", run.as_text())


def test_loops_of_different_lengths_are_refused():
    rng = seeds.rng()
    loops = [forward_loop(*a_stack(rng, layers=layers)) for layers in (2, 3)]
    with pytest.raises(ValueError, match="equal numbers of turns; got 2, 3"):
        run_loops(*loops)


def test_passes_of_several_stages_are_joined_at_one():
    """Stages of 2 and 3 layers: upwards and downwards, joined at the stage of 3."""
    rng = seeds.rng()
    stages = [a_stack(rng, layers=2), a_stack(rng, layers=3)]

    def upwards(x):
        for layers, arrays, _ in stages:
            x = (yield forward_loop(layers, arrays, x)).x
        return x

    def downwards(x):
        for layers, arrays, _ in reversed(stages):
            x = (yield forward_loop(layers, arrays, x)).x
        return -x

    x = stages[0][2]
    up, down = run_joined((upwards(x), 1), (downwards(x), 0))
    np.testing.assert_allclose(up, run_pass(upwards(x)), rtol=1e-6)
    np.testing.assert_allclose(down, run_pass(downwards(x)), rtol=1e-6)
    for found, alone in zip(run_together(upwards(x), upwards(2 * x)), (x, 2 * x), strict=True):
        np.testing.assert_allclose(found, run_pass(upwards(alone)), rtol=1e-6)


JOINED = """
from flax import nnx
import moe_jax
from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.loops import run_loops
from moe_jax.layers.passes import backward_loop, forward_loop
from moe_jax.models.execution import Execution
from moe_jax.models.forward import Carry, PerLayer, layer_inputs, stage_layers
from moe_jax.parallel import ExpertParallel
from moe_jax.parallel.collectives.hops import COPIES, MANY_AT_ONCE
from moe_jax.parallel.fsdp import LayerGather
from moe_jax.parallel.spread import Spread

layers, rows, seq = 2, 2, 4096
config = moe_jax.Qwen3MoeConfig(
    vocab_size=256, hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=())
graph, shapes = nnx.split(nnx.eval_shape(lambda: moe_jax.from_config(config, dtype=bf16, rngs=nnx.Rngs(0)).stages[0]))
mesh = make_mesh(2, "expert")
gather = LayerGather(((),) * len(jax.tree.leaves(shapes)), bf16, "copies")
execution = Execution(True, spread=Spread(ExpertParallel(transport="pairwise", capacity_factor=2), None, [gather], ("expert",)))

def stage(parameters, segments):
    inputs = layer_inputs(config, None, segments, segments != 0)
    return stage_layers(nnx.merge(graph, parameters), 0, inputs, PerLayer(jnp.arange(layers)), execution)

def zeros_of_gradient(a):
    floats = jnp.issubdtype(a.dtype, jnp.inexact)
    return vary_as(jnp.zeros(a.shape, a.dtype), a) if floats else np.zeros(a.shape, jax.dtypes.float0)

def both(parameters, sums, x, segments, saved, dx, of_saved):
    parameters = jax.tree.map(lambda a: vary_as(a, x), parameters)
    forward = forward_loop(*stage(parameters, segments), Carry(x, None))
    dy = jax.tree.map(zeros_of_gradient, jax.eval_shape(lambda: run_loops(forward)[0].y))
    backward = backward_loop(*stage(parameters, of_saved), Carry(saved, None), Carry(dx, None), dy, sums)
    up, down = run_loops(forward, backward)
    return up.x.x, up.saved.x, down.dx.x, down.parameters

def place(shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

def parameter(path, a):
    return place(a.shape, bf16, None, "expert") if "experts" in jax.tree_util.keystr(path) else place(a.shape, bf16)

def sum_of(p):
    "Each device has sums of its own, those of whole matrices too."
    layers, first, *rest = p.shape
    whole = p.sharding.spec == PartitionSpec()
    return place((layers, 2 * first if whole else first, *rest), f32, None, "expert")

parameters = jax.tree.map_with_path(parameter, shapes)
tokens, ids = place((2 * rows, seq, 2048), bf16, "expert"), place((2 * rows, seq), i32, "expert")
saved = place((layers, *tokens.shape), bf16, None, "expert")
arguments = parameters, jax.tree.map(sum_of, parameters), tokens, ids, saved, tokens, ids
specs = jax.tree.map(lambda a: a.sharding.spec, arguments)
out_specs = specs[2], specs[4], specs[5], specs[1]
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    f = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=out_specs), donate_argnums=1)
    print(f.lower(*arguments).compile(compiler_options=COPIES | MANY_AT_ONCE).as_text())
"""


@needs_compiler
@pytest.mark.thorough
def test_exchange_hides_behind_the_other_pass():
    """Two layers of Qwen3-30B-A3B on two H200s, 8192 tokens each: in the joined loop every copy overlaps a kernel.

    Tokens forward and again, outputs on their way home, and gradients of tokens have a kernel of the other pass.
    """
    program = run_script(JOINED)
    beside = scopes_beside_copies(program, ("forward", "backward"))
    assert len(beside) == 7 and all(kernels for _, kernels in beside)
    other = {"forward": "backward", "backward": "forward"}
    assert sum(other.get(scope) in kernels for scope, kernels in beside) >= 4
    # There is no second stack of the experts' matrices or of their sums, and no copy of one layer's sums.
    assert not re.search(r"ROOT \S+ = f32\[1,64,\d+,\d+\]\S* dynamic-slice\(", program)
    assert not re.search(r"= (bf16|f32)\[2,64,\d+,\d+\]\S* copy\(", program)
