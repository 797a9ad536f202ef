"""Calls Triton kernels from JAX, checks the packages that this needs, and chooses the kernels' tiles.

The packages `triton` and `jax_triton` are optional: nothing here imports them before a kernel is used.
"""

import functools
import importlib
import inspect
import os
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moe_jax.kernels import backends
from moe_jax.kernels.shapes import vary_as


@dataclass(frozen=True)
class Tile:
    """Sizes of one Triton program: rows x columns, summed in slices of `step`, with its warps and stages."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    """The number of steps whose operands are in shared memory or in flight."""


class KernelCall(NamedTuple):
    """The arguments of a Triton kernel: inputs, outputs, and constants by name."""

    inputs: tuple
    """Arrays, and integers, which are run-time arguments: another value does not recompile the kernel."""
    outputs: list[jax.ShapeDtypeStruct]
    programs: int
    """The number of programs that run the kernel."""
    constants: dict[str, Any]
    name: str
    """The kernel's name in profiles."""
    in_place: int | None = None
    """The index of an input, preceded only by arrays, that is changed and returned as the only output.

    The kernel then leaves its argument for the output unused. The result takes the input's memory, unless something else reads
    the input later.
    """


def launch(kernel, call: KernelCall, tile: Tile) -> list[Array]:
    """Runs a `@triton.jit` function and returns its outputs."""
    inputs, outputs, programs, constants, name, in_place = call
    if programs == 0:
        return [jnp.zeros(output.shape, output.dtype) for output in outputs]
    major, minor = capability() or (0, 0)
    run = triton_call()
    arguments, changed = list(inputs), None
    version_arguments: dict[str, Any]
    if "out_type" in inspect.signature(run).parameters:
        version_arguments = {"out_type": outputs, "backend_options": {"enable_fp_fusion": True}}
        if in_place is not None:
            # An array changed in place is passed once, so the argument for the output gets another array.
            arguments[in_place] = changed = jax.new_ref(inputs[in_place])
            arguments.append(inputs[0])
            version_arguments["out_type"] = []
    else:
        # jax_triton before 0.4 fuses by default, and passes an array changed in place again as the output.
        version_arguments = {"out_shape": outputs}
        if in_place is not None:
            version_arguments["input_output_aliases"] = {in_place: 0}
    results = run(
        *arguments,
        kernel=kernel,
        grid=(programs,),
        name=name,
        num_warps=tile.warps,
        num_stages=tile.stages,
        compute_capability=10 * major + minor,
        **version_arguments,
        **constants,
    )
    if changed is not None:
        results = [jax.freeze(changed)]
    # jax_triton types its results as equal on all devices.
    return vary_as(results, [a for a in inputs if not isinstance(a, int)])


def triton_call() -> Callable:
    """Imports and returns `jax_triton.triton_call`."""
    reason = missing_packages()
    if reason is not None:
        raise ImportError(reason)
    return importlib.import_module("jax_triton").triton_call


def capability() -> tuple[int, int] | None:
    """Returns the GPU's compute capability, (9, 0) for Hopper; None if the target is not an NVIDIA GPU."""
    version = re.fullmatch(r"(\d+)\.(\d+)", backends.compute_capability() or "")
    return (int(version[1]), int(version[2])) if version else None


@functools.cache
def missing_packages() -> str | None:
    """Returns why jax-triton cannot be used and what to install; None if it can."""
    cache = os.environ.get("TRITON_CACHE_DIR")
    try:
        importlib.import_module("triton")
        library = importlib.import_module("jax_triton")
    except ImportError as error:
        return f"jax-triton cannot be imported ({error}); pip install jax-triton triton"
    # jax_triton empties the variable; other users of Triton, such as torch.compile, could then compile nothing.
    if cache is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = cache
    # jax_triton accepts an unknown Triton, and replaces the compiler with a class without members.
    compiler = getattr(getattr(library, "triton_lib", None), "cb", None)
    if isinstance(compiler, types.SimpleNamespace):
        return "jax-triton does not know this version of Triton; pip install --upgrade triton, or take jax-triton==0.3.1"
    if not hasattr(importlib.import_module("jaxlib.gpu_triton"), "TritonKernel"):
        return "jax-triton calls JAX's CUDA plugin, which is not installed; pip install jax[cuda13]"
    return None


def row_tile(rows_per_expert: float, columns: int, dtype: jnp.dtype) -> Tile:
    """Returns the tile of a matmul by rows.

    At 64 rows a matmul takes as long as reading its weights, so lower tiles would gain nothing. Triton also uses other
    instructions for them, which may round differently: the bits of a row would depend on the number of other rows.
    """
    if dtype == jnp.float32:
        return F32_TILE
    few = rows_per_expert <= 64
    if has_large_tiles():
        return Tile(64, 128, 64, 4, 4) if few else Tile(128, 256 if columns % 256 == 0 else 128, 64, 8, 4)
    return Tile(64, 128, 32, 4, 4) if few else Tile(128, 128, 32, 8, 4)


def gated_backward_tile(dtype: jnp.dtype) -> Tile:
    """Returns one tile for any number of rows, because the tile determines the order of the sum over a row's columns."""
    if dtype == jnp.float32:
        return F32_TILE
    return Tile(128, 128, 64, 8, 4) if has_large_tiles() else Tile(128, 128, 32, 8, 3)


def expert_tile(columns: int, dtype: jnp.dtype, *, gathers: bool) -> Tile:
    """Returns the tile for weight gradients (`outer`), where `step` counts rows.

    If rows are gathered, Triton loads their indices two steps before the rows: three of the five stages hold operands.
    """
    if dtype == jnp.float32:
        return F32_TILE
    stages = 5 if gathers else 3
    if has_large_tiles():
        return Tile(128, 256 if columns % 256 == 0 else 128, 64, 8, stages)
    return Tile(128, 128, 32, 8, stages)


F32_TILE = Tile(64, 64, 32, 4, 2)
"""f32 uses the ordinary units: tensor cores would round its operands to TF32."""


def has_large_tiles() -> bool:
    """Returns True on Hopper and Blackwell servers: 227 KiB of shared memory, and accumulators for 128 x 256 tiles."""
    return capability() in ((9, 0), (10, 0), (10, 3))
