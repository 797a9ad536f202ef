"""In programs compiled for four H200s, copies from GPU to GPU overlap the kernels that do not need their data."""

import re

import pytest

from tests.helpers.h200 import kernels_beside_copies, needs_compiler, run_script

COMPILED = """
from moe_jax.parallel import ContextParallel, ExpertParallel, context_attention, expert_parallel_mlp
from moe_jax.parallel.collectives.hops import COPIES, MANY_AT_ONCE

def on_four(f, axis, spec, *shapes):
    mesh = make_mesh(4, axis)
    place = NamedSharding(mesh, spec)
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))
        print(program.lower(*arguments).compile(compiler_options=COPIES | MANY_AT_ONCE).as_text())
"""

RING = """
def attend(q, k, v):
    return context_attention(q, k, v, scale=128**-0.5, parallel=ContextParallel(hops="copies"))

q, kv = (((1, 32768, heads, 128), bf16) for heads in (32, 8))
on_four(attend, "context", PartitionSpec(None, "context"), q, kv, kv)
"""

EXPERTS = """
settings = ExpertParallel(transport="pairwise", capacity_factor=4, group_size=int(sys.argv[1]))

def layer(*arguments):
    return expert_parallel_mlp(*arguments, settings)[0]

tokens, matrices = ((32768, 2048), bf16), [((128, 1536, 2048), bf16), ((128, 2048, 768), bf16)]
on_four(layer, "expert", PartitionSpec("expert"), tokens, *matrices, ((32768, 8), f32), ((32768, 8), i32))
"""


TRAINED_EXPERTS = """
from moe_jax.layers.passes import LayerArrays, Layers
from moe_jax.layers.passes import run_layers
from moe_jax.parallel.fsdp import LayerGather

settings = ExpertParallel(transport="pairwise", capacity_factor=4, group_size=1)

def body(shared, per_layer, x, w, _):
    return x + expert_parallel_mlp(x, *w, *shared, settings)[0], ()

def gradients(x, gate_up, down, *choices):
    def loss(w):
        gather = LayerGather(((), ()), bf16, "copies")
        return run_layers(Layers(body, gather, True), LayerArrays(choices, (), w), x)[0].astype(f32).sum()
    return jax.grad(loss)((gate_up[None].repeat(3, 0), down[None].repeat(3, 0)))[0][0]

tokens, matrices = ((32768, 2048), bf16), [((128, 1536, 2048), bf16), ((128, 2048, 768), bf16)]
on_four(gradients, "expert", PartitionSpec("expert"), tokens, *matrices, ((32768, 8), f32), ((32768, 8), i32))
"""


@needs_compiler
@pytest.mark.thorough
def test_ring_attention():
    """Keys arrive while a device attends to its own."""
    assert kernels_beside_copies(run_script(COMPILED + RING)) == [1] * 6


@needs_compiler
@pytest.mark.thorough
def test_pairwise_exchange():
    """Tokens and choices of others arrive while a device computes its own.

    The outputs of the others, in one step, return during the device's own down pass.
    """
    beside = kernels_beside_copies(run_script(COMPILED + EXPERTS, 3))
    assert len(beside) == 9 and all(beside)


@needs_compiler
@pytest.mark.thorough
def test_outputs_travel_home_beside_the_next_step():
    """Three devices' tokens arrive, and the outputs of each leave, during other kernels: three a step, at last one."""
    beside = kernels_beside_copies(run_script(COMPILED + EXPERTS, 1))
    assert len(beside) == 6 and all(beside)


@pytest.mark.thorough
@needs_compiler
def test_backward_with_remat():
    """In a layer's backward pass with remat: tokens, gradients of outputs, gradients of tokens, each during kernels."""
    computations = re.split(r"\n(?=%|ENTRY)", run_script(COMPILED + TRAINED_EXPERTS))
    (backward,) = [c for c in computations if "gated_matmul_backward" in c and "collective-permute-start(" in c]
    beside = kernels_beside_copies(backward)
    assert len(beside) == 9 and all(beside)
    starts = [line for line in backward.splitlines() if "collective-permute-start(" in line]
    assert ["/backward/jvp()/" in line for line in starts] == [True] * 3 + [False] * 6
