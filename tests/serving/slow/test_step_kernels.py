"""Steps compiled for H200s without one.

A decoding step takes at most 13 kernels a layer, one with chunks 23, with both 26. None copies pages or experts, or spills
registers. Steps of four devices run kernels there too.
"""

import re

import pytest

from tests.helpers.h200 import needs_compiler, run_script

pytestmark = needs_compiler

SCRIPT = """
import re
from flax import nnx
import moe_jax
from moe_jax.config import NAMED_CONFIGS
from moe_jax.layers.lora import Frozen
from moe_jax.layers.quantised import BlockScaled
from moe_jax.layers.moe import EXPERT_MATRICES
from moe_jax.serving.step import initial_state, step
from moe_jax.serving.step import StepShape, empty_rows, packed
from moe_jax.serving.weights import take_apart

MAX_PAGES, OUTSIDE = 640, ("parameter", "get-tuple-element", "bitcast", "tuple", "constant")

def compiled(layers, rows, chunk_tokens):
    config, served = NAMED_CONFIGS[name].without_mtp().with_layers(layers), []

    def weights():
        model = moe_jax.from_config(config, dtype=bf16, rngs=nnx.Rngs(0))
        if in_fp8:
            experts = model.stages[0].mlp.experts
            for name in EXPERT_MATRICES:
                setattr(experts, name, Frozen(BlockScaled.fp8(getattr(experts, name)[...], bf16)))
            model.set_precision("fp8")
        apart = take_apart(model)
        served.append(apart[0]._replace(strict=strict))
        return apart[1]

    mesh = make_mesh(1, "x")
    place = NamedSharding(mesh, PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        weights = jax.eval_shape(weights)
        state = jax.eval_shape(lambda: initial_state(served[0], num_pages=1024, num_slots=256, max_pages=MAX_PAGES))
        shape = StepShape(rows, chunk_tokens, min(chunk_tokens, 8), MAX_PAGES)
        arguments = weights, state, jax.ShapeDtypeStruct(packed([empty_rows(shape)]).shape, i32)
        on_gpu = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments)
        return jax.jit(lambda *a: step(served[0], shape, *a), donate_argnums=1).lower(*on_gpu).compile()

def kernels(program):
    entry = program.as_text().split("ENTRY")[1]
    names = re.findall(r"^ +(?:ROOT )?%[\\w.-]+ = .*? ([\\w-]+)\\(", entry, re.M)
    return len([name for name in names if name not in OUTSIDE])

name, rows, chunk_tokens, *options = sys.argv[1:]
rows, chunk_tokens, in_fp8, strict = int(rows), int(chunk_tokens), *(option == "True" for option in options)
one, two = compiled(1, rows, chunk_tokens), compiled(2, rows, chunk_tokens)
# Attention's partial results of strict steps may fill more.
assert strict or two.memory_analysis().temp_size_in_bytes < 300e6, two.memory_analysis()
print("kernels a layer:", kernels(two) - kernels(one))
print("sums by XLA:", re.findall(r"= (?:bf16|f32)\\S* (?:dot|reduce)\\(|__cublas\\S+|__triton_gemm", two.as_text()))
"""


QWEN, GLM, MIXTRAL = "qwen3-30b-a3b", "glm-4.5-air", "mixtral-8x7b"
CASES = [(QWEN, 16, 0, False, False, 12)]
THOROUGH = [
    *((QWEN, rows, 0, False, False, 12) for rows in (1, 64, 256)),
    # Experts in FP8 have one more, which rounds the tokens, and two that gather more than 64 tokens.
    *((QWEN, rows, 0, True, False, 13 if rows <= 64 else 15) for rows in (1, 16, 64, 256)),
    # Attention adds two for groups of 4 or 12 heads, biases add one, a shared expert three, and 8 experts two.
    (GLM, 16, 0, False, False, 18),
    (MIXTRAL, 16, 0, False, False, 16),
    # Attention of decoding rows next to chunks takes two more, and a merge if keys of few rows are split.
    *((QWEN, rows, 1024, False, False, most) for rows, most in ((0, 23), (8, 26), (256, 25))),
    *((QWEN, *sizes, False, True, most) for *sizes, most in ((1, 0, 12), (64, 0, 12), (256, 0, 13), (16, 1024, 26))),
]


@pytest.mark.parametrize(
    "name, rows, chunk_tokens, in_fp8, strict, most",
    [*CASES, *(pytest.param(*case, marks=pytest.mark.thorough) for case in THOROUGH)],
)
def test_kernels_of_a_layer(name, rows, chunk_tokens, in_fp8, strict, most):
    """XLA multiplies and sums nothing in a strict step."""
    report = run_script(SCRIPT, name, rows, chunk_tokens, in_fp8, strict)
    assert int(re.findall(r"kernels a layer: (\d+)", report)[0]) <= most
    assert set(re.findall(r"(\d+) bytes spill stores", report)) == {"0"}
    assert not strict or re.findall(r"sums by XLA: (.*)", report) == ["[]"]


SEVERAL = """
import re
from dataclasses import replace
from flax import nnx
import moe_jax
from moe_jax.config import NAMED_CONFIGS
from moe_jax.parallel.layout import parameter_path
from moe_jax.layers.moe import is_expert_matrix
from moe_jax.serving.placement import ROWS, on_each, rows_like
from moe_jax.serving.step import initial_state, step
from moe_jax.serving.step import StepShape, empty_rows, packed
from moe_jax.serving.weights import take_apart

config, served = replace(NAMED_CONFIGS["qwen3-30b-a3b"], num_hidden_layers=1), []
mesh = Mesh(make_mesh(4, "x").devices.reshape(1, 4), ("fsdp", "expert"), axis_types=(AxisType.Auto,) * 2)

def weights():
    apart = take_apart(moe_jax.from_config(config, dtype=bf16, rngs=nnx.Rngs(0)), mesh=mesh)
    served.append(apart[0])
    return apart[1]

def placed(path, array):
    spec = PartitionSpec(None, "expert") if is_expert_matrix(parameter_path(path)) else PartitionSpec()
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))

with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    weights = jax.tree.map_with_path(placed, jax.eval_shape(weights))
    state = jax.eval_shape(lambda: initial_state(served[0], num_pages=4096, num_slots=1024, max_pages=64))
    state = jax.tree.map(lambda array: rows_like(array, mesh), state)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, weights), ROWS, ROWS
    for shape in (StepShape(16, 0, 0, 64), StepShape(256, 1024, 8, 64)):
        upload = rows_like(jax.ShapeDtypeStruct(packed([empty_rows(shape)]).shape, i32), mesh)
        program = jax.jit(on_each(mesh, lambda *arrays: step(served[0], shape, *arrays), specs), donate_argnums=1)
        program = program.lower(weights, state, upload).compile()
        print("kernels:", program.as_text().count("mosaic_gpu"), "temporary:", program.memory_analysis().temp_size_in_bytes)
        print("collectives:", re.findall(r"= .*? (all-[a-z-]+?|collective-[a-z-]+?)(?:-start)?\\(", program.as_text()))
"""


@pytest.mark.thorough
def test_kernels_of_four_devices():
    """Attention reads pages by a kernel, and experts multiply by theirs; neither pages nor weights are copied.

    A fused layer gathers rows, with the tokens that count, and returns others.
    """
    report = run_script(SEVERAL)
    found = re.findall(r"kernels: (\d+) temporary: (\d+)", report)
    assert len(found) == 2
    assert re.findall(r"collectives: (.*)", report)[0] == "['all-gather', 'all-to-all', 'all-to-all-done']"
    assert all(int(kernels) >= 4 and int(temporary) < 300e6 for kernels, temporary in found)
