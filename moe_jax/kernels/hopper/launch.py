"""Launches a Hopper kernel of persistent thread blocks, with named scratch and inputs; lays out operands for wgmma."""

import functools
import logging
import types
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.extend
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from moe_jax.kernels import backends
from moe_jax.kernels.hopper.interpreter import INTERPRETED_BLOCKS, interpret, is_interpreted
from moe_jax.kernels.shapes import vary_as, varying_axes

_logger = logging.getLogger(__name__)

SLOW_JAX = ("0.12.0", "0.12.0.1")
"""Versions that assemble Hopper kernels with nvJitLink. It ignores `setmaxnreg`, so accumulators spill and wgmma serializes."""

SWIZZLED_COLUMNS = 64
"""Columns of a 16-bit operand in one row of the widest swizzle, 128 bytes."""

WARPGROUP_THREADS = 128

BLOCKS_PER_CORE = 2
"""Thread blocks of a persistent kernel per core. They run in turn, or concurrently if the core has room for both. With one
block per core, a kernel that finds some cores occupied by a collective ends only when the blocks that waited for them end. A
collective that finds all cores occupied starts at the kernel's end.
"""


@jax.tree_util.register_pytree_node_class
class Named(types.SimpleNamespace):
    """A pytree with named fields, for the inputs, scratch or loop state of a kernel.

    Scratch is allocated in this order. Swizzled buffers come first: each starts at a multiple of 1024 bytes.
    """

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """Returns the values, and the names."""
        return tuple(vars(self).values()), tuple(vars(self))

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: tuple[Any, ...]) -> Self:
        """Inverts `tree_flatten`."""
        return cls(**dict(zip(names, values, strict=True)))


def launch(
    name: str,
    body: Callable,
    outputs: list[jax.ShapeDtypeStruct],
    scratch: list,
    *,
    warpgroups: int,
    in_place: int = 0,
    blocks_per_core: int = BLOCKS_PER_CORE,
) -> Callable:
    """Builds a persistent kernel as a function of arrays; `body(*inputs, *outputs, *scratch)` runs in each warpgroup.

    An input may be a pytree of arrays, and an entry of `scratch` a pytree of scratch types, such as `Named`. The body gets the
    same pytree of references. None stays None. Scratch is allocated in the order given.

    Functions that launch a kernel are jitted: a program that calls one again with the same shapes traces and lowers it once.

    Args:
        name: the kernel's name in profiles.
        in_place: the number of last inputs (arrays) that the body changes. They are returned after the outputs, in the same
            memory unless something else reads such an input later. Input and result must not be slices of different arrays
            (docs/kernels.md). Nor may another input be a slice: XLA would fuse the kernel with it, and lose the aliasing. A
            barrier prevents both.
    """

    if not is_interpreted():
        _warn_of_slow_jax(jax.__version__)

    def run_flat(tree, *arrays):
        def kernel(*references):
            inputs = jax.tree.unflatten(tree, references[: len(arrays)])
            output_references = references[len(arrays) :]
            pl.run_scoped(lambda *buffers: body(*inputs, *output_references, *buffers), *scratch, collective_axes="warpgroup")

        kernel.__name__ = name
        run = plgpu.kernel(
            kernel,
            out_type=outputs,
            grid=(grid_size(blocks_per_core),),
            grid_names=("block",),
            num_threads=warpgroups,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
            interpret=interpret(),
        )
        if not in_place:
            return run(*arrays)
        changed = [jax.new_ref(array) for array in arrays[-in_place:]]
        results = run(*arrays[:-in_place], *changed)
        return [*(results or ()), *map(jax.freeze, changed)]

    def call(*inputs: Any):
        arrays, tree = jax.tree.flatten(inputs)
        # With jax_enable_x64 a kernel's indices would have two widths, because Python integers become 64 bits.
        with jax.enable_x64(False):
            return call_varying(lambda *arrays: run_flat(tree, *arrays))(*arrays)

    return call


@functools.cache
def _warn_of_slow_jax(version: str) -> None:
    if version in SLOW_JAX:
        _logger.warning("jax %s makes most Hopper kernels 2 to 6 times slower than 0.11.2 does: see docs/versions.md", version)


def call_varying(run: Callable) -> Callable:
    """Returns `run`, a kernel of arrays, with results that vary over its inputs' mesh axes inside `shard_map`.

    JAX types a kernel's results as equal on all devices. The body is traced with inputs that do not vary. Inside a
    kernel JAX does not track such types, so a loop that carries values read from a varying input would change its type.
    """

    def call(*inputs):
        if not varying_axes(inputs):
            return run(*inputs)
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs]
        traced, tree = jax.make_jaxpr(run, return_shape=True)(*types)
        results = jax.extend.core.jaxpr_as_fun(traced)(*inputs)
        return vary_as(jax.tree.unflatten(jax.tree.structure(tree), results), inputs)

    return call


def grid_size(blocks_per_core: int = BLOCKS_PER_CORE) -> int:
    """Returns the number of thread blocks of a persistent kernel."""
    return INTERPRETED_BLOCKS if is_interpreted() else blocks_per_core * backends.num_cores()


def store(reference, value, *, optimized: bool = False) -> None:
    """Stores `reference[...] = value`; unless `optimized`, skips JAX's check that the store is fast.

    JAX from 0.12 refuses a store whose threads share banks of shared memory or write parts of a sector. Earlier JAX accepts it,
    and has no such argument. From 0.12 on a plain store also reads the old values: then JAX may find no layouts.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(reference, value, optimized=optimized)
    else:
        reference[...] = value


def operand_transforms(dtype: DTypeLike, columns: int = SWIZZLED_COLUMNS) -> tuple:
    """Returns the swizzled shared-memory layout of wgmma and TMA operands with `columns` columns."""
    bytes_per_row = columns * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(bytes_per_row * 8)
    # mypy considers both classes abstract.
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
