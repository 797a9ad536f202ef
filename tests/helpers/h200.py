"""Programs compiled for an H200 without one, by the compiler in JAX's CUDA plugin."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import h200_outputs

ROOT = Path(__file__).parents[2]

COMPILER = Path(sys.prefix) / "cuda-compiler"
"""Where `make cuda-compiler` puts JAX's CUDA plugin on a machine without a GPU: in the environment JAX would look for one."""


def is_installed(plugin):
    return importlib.util.find_spec("jax_plugins") is not None and importlib.util.find_spec(f"jax_plugins.{plugin}") is not None


needs_compiler = pytest.mark.skipif(
    not COMPILER.exists() and not is_installed("xla_cuda13") and not is_installed("xla_cuda12"),
    reason="needs the compiler in JAX's CUDA plugin, with or without a GPU: `make cuda-compiler` installs it",
)

COMMON = """
import sys
import jax, numpy as np
from tests.helpers import h200_outputs, h200_programs
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from moe_jax import kernels
from moe_jax.kernels.attention.mosaic.flash import flash_attention

h200_programs.install()
h200_outputs.list_files_at_exit()

H200 = '''
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: 13 minor: 0 }
dnn_version_info { major: 9 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132  fpus_per_core: 128  threads_per_warp: 32  threads_per_core_limit: 2048  threads_per_block_limit: 1024
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_core: 233472  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  device_memory_size: 150754820096  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
}
'''

def make_mesh(devices, axis):
    "So many H200s of one host."
    devices = topologies.get_topology_desc("", "cuda", target_config=H200, topology=f"1x{devices}x1").devices
    return Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,))

def compile(f, *shapes, donate=()):
    "Compiles f for arguments of these (shape, dtype)."
    mesh = make_mesh(1, "x")
    place = NamedSharding(mesh, PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        types = [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]
        return jax.jit(f, donate_argnums=donate).lower(*types).compile()

bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
"""


def run_script(script, *arguments):
    """Returns the output of a script, with `COMMON` before it, in a process of its own that can compile for an H200.

    The output of an earlier run is taken if nothing that the script reads has changed since.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        # The plugin looks for libraries that are needed to run kernels alone.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(COMPILER), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", COMMON + script, *map(str, arguments)]
    return h200_outputs.output_of(command, environment, COMPILER, lambda environment: run(command, environment))


def run(command, environment):
    """Returns the output of a process that must succeed."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def kernels_beside_copies(computation):
    """Returns, for each copy of a compiled computation, the number of our kernels between its start and the wait for it."""
    lines = computation.splitlines()
    kernels = [i for i, line in enumerate(lines) if "mosaic_gpu" in line and "custom-call(" in line]
    starts = {name: i for i, line in enumerate(lines) if (name := started_copy(line))}
    waits = {match[1]: i for i, line in enumerate(lines) if (match := re.search(r" collective-permute-done\(%(\S+?)\)", line))}
    assert starts.keys() == waits.keys()
    return [sum(starts[name] < i < waits[name] for i in kernels) for name in starts]


def started_copy(line):
    """Returns the name of the copy that a line starts, or None. Of long lines the expression alone takes seconds."""
    match = re.search(r"%(\S+) = .* collective-permute-start\(", line) if " collective-permute-start(" in line else None
    return match and match[1]


def scopes_beside_copies(program, scopes):
    """Pairs for the copies that loops of a compiled program start: (the copy's scope, the scopes of overlapping kernels).

    A kernel that reads or writes a part of a stack is in a computation of its own, which a fusion calls.
    """
    computations = {c.split(" ")[0].lstrip("%"): c for c in re.split(r"\n(?=%|ENTRY)", program)}
    kernels = {name for name, c in computations.items() if name.startswith("dynamic-slice-fusion") and "mosaic_gpu" in c}

    def scope_of(text):
        names = re.findall(r'op_name="([^"]*)"', text)
        return next((scope for scope in scopes if any(f"/{scope}/" in name for name in names)), None)

    found, in_flight = {}, set()
    for name, computation in computations.items():
        for line in computation.splitlines() if not name.startswith("ENTRY") else ():
            called = re.search(r" fusion\(.* calls=%([\w.-]+)", line) if " fusion(" in line else None
            if start := started_copy(line):
                found[start] = (scope_of(line), set())
                in_flight.add(start)
            elif wait := re.search(r" collective-permute-done\(%(\S+?)\)", line):
                in_flight.discard(wait[1])
            elif ("mosaic_gpu" in line and "custom-call(" in line) or (called and called[1] in kernels):
                for copy in in_flight:
                    found[copy][1].add(scope_of(computations[called[1]] if called else line))
    return list(found.values())
