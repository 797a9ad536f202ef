"""A table compiled for two H200s: no branch copies the slots or the sums that pass through it."""

import re

import pytest
from h200 import needs_compiler, run_script

SCRIPT = """
from pathlib import Path
import moe_jax
sys.path.insert(0, str(Path(moe_jax.__file__).parents[1] / "tests"))
import pipelines
from toy_pipeline import toy_passes
from moe_jax.kernels.varying import vary_as
from moe_jax.parallel.pipeline.table import lockstep_table
from moe_jax.parallel.pipeline.table_executor import run_table

LONG, name = 2**20, sys.argv[1]
table = lockstep_table(pipelines.MAKE[name](2, 1, 4))
chunks = 2 if name == "dualpipe" else 1

def local(weights, inputs):
    own, inputs = vary_as((weights, inputs), jax.lax.axis_index("pipe"))
    totals = jnp.zeros(()), jnp.zeros_like(own), jnp.zeros_like(inputs)
    value, *gradients = run_table(toy_passes(own, inputs, lambda x: x), table, totals)
    return value, gradients

mesh = make_mesh(2, "pipe")
whole, split = PartitionSpec(), PartitionSpec("pipe")
shapes = [((2 * chunks, LONG), split), ((4, LONG), whole)]
arguments = [jax.ShapeDtypeStruct(shape, f32, sharding=NamedSharding(mesh, spec)) for shape, spec in shapes]
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(split, whole), out_specs=(whole, [split, split])))
    print(program.lower(*arguments).compile().as_text())
"""


@needs_compiler
@pytest.mark.parametrize("name", ["dualpipe", "zb-h1"])
def test_branches_copy_nothing(name):
    """DualPipe on two ranks keeps one product at a time, the case in which XLA copied."""
    computations = re.split(r"\n(?=%|ENTRY)", run_script(SCRIPT, name))
    assert any(" conditional(" in computation for computation in computations)
    large = re.compile(r"f32\[[\d,]*1048576\]\S* (copy|copy-start)\(")
    branches = [c for c in computations if c.startswith("%region_")]
    assert branches and not [line for c in branches for line in c.splitlines() if large.search(line)]
