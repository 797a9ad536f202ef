"""In a program compiled for an H200, kernels read and write a layer's experts inside their stack, for any index."""

import re

from tests.helpers.h200 import needs_compiler, run_script

TRAIN = """

from moe_jax.kernels.experts.call import TokenPart, experts as compute
from moe_jax.kernels.experts.weights import Accumulators, ExpertWeights

LAYERS, EXPERTS, HIDDEN, INTER = 4, 32, 512, 256

def gradients(x, gate_up, down, weights, experts, sums, first):
    "The layers `first` and `first + 1` add to their sums: `first` is known on the device alone."
    def turn(i, sums):
        def loss(sums):
            matrices = ExpertWeights.of(gate_up, down, layer=first + i, gradient=Accumulators(*sums, in_stack=True))
            return compute([TokenPart(x, weights, experts)], matrices)[0].astype(f32).sum()
        return jax.grad(loss)(sums)
    return jax.lax.fori_loop(0, 2, turn, sums)

stacks = (LAYERS, EXPERTS, 2 * INTER, HIDDEN), (LAYERS, EXPERTS, HIDDEN, INTER)
mesh = make_mesh(1, "x")
everywhere = NamedSharding(mesh, PartitionSpec())
array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    arguments = [array((1024, HIDDEN), bf16), *(array(s, bf16) for s in stacks), array((1024, 4), f32), array((1024, 4), i32)]
    arguments += [tuple(array(s, f32) for s in stacks), array((), i32)]
    print(jax.jit(gradients, donate_argnums=5).lower(*arguments).compile().as_text())
"""


@needs_compiler
def test_no_matrix_is_copied():
    """XLA alone would copy both matrices and their sums, out of the stack and back."""
    program = run_script(TRAIN)
    made = re.findall(r"= \(?(?:bf16|f32)\[(?:\d+,)*(?:512,512|512,256)\]\S* (\S+?)\(", program)
    assert "custom-call" in made or "fusion" in made, "the sums are made by kernels"
    assert not {"copy", "dynamic-update-slice", "dynamic-slice"} & set(made)
    assert not re.search(r"= \(?(?:bf16|f32)\[(?:1,)?32,(?:512,512|512,256)\]", program), "no matrices of one layer"
