"""Run by test_meshes.py in several processes: loads onto a mesh, writes the model back, prints what was read and generated.

Arguments: checkpoint folder, output folder, mesh axes as JSON, coordinator address, number of processes, this process.
"""

import json
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

warnings.simplefilter("error")
folder, output, axes, coordinator, processes, process = sys.argv[1:]
jax.distributed.initialize(coordinator, int(processes), int(process))

from moe_jax.checkpoint import hf_load, streaming  # noqa: E402  (jax.distributed must come before anything that asks for devices)
from moe_jax.checkpoint.hf_save import save_pretrained  # noqa: E402
from moe_jax.checkpoint.orbax_params import load_orbax, save_orbax  # noqa: E402
from moe_jax.generation import generate  # noqa: E402
from moe_jax.parallel import make_mesh, parameter_sharding  # noqa: E402

read, copy = [0], streaming._copy


def counted_copy(stored, source, target):
    read[0] += target.nbytes
    copy(stored, source, target)


streaming._copy = counted_copy
mesh = make_mesh(**json.loads(axes))
model = hf_load.from_pretrained(folder, dtype=jnp.float32, mesh=mesh)
held = 0
for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    array = leaf.get_value()
    assert array.sharding == parameter_sharding(path, array.shape, mesh), path
    held += sum({str(shard.index): shard.data.nbytes for shard in array.addressable_shards}.values())
save_pretrained(model, Path(output) / "hf", max_shard_bytes=9000)
save_orbax(model, Path(output) / "orbax")
again = load_orbax(Path(output) / "orbax", dtype=jnp.float32, mesh=mesh)
for (_, a), (_, b) in zip(nnx.to_flat_state(nnx.state(model)), nnx.to_flat_state(nnx.state(again)), strict=True):
    for x, y in zip(a.get_value().addressable_shards, b.get_value().addressable_shards, strict=True):
        np.testing.assert_array_equal(x.data, y.data)
generated = generate(model, [[1, 2, 3], [4]], max_new_tokens=5)
print(json.dumps({"read": read[0], "held": held, "generated": generated}))
