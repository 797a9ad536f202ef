"""What every Hopper kernel of ours shares: how it is launched, in how many blocks, and how operands lie in shared memory."""

from collections.abc import Callable

import jax
import jax.extend
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.varying import vary_as, varying_axes

SWIZZLED_COLUMNS = 64
"""Columns of a 16-bit operand in one row of the widest swizzle, 128 bytes."""

WARPGROUP_THREADS = 128

BLOCKS_PER_CORE = 2
"""Blocks of a persistent kernel: one after the other on a core, or side by side where it has room for both.

With one, a kernel that finds some cores taken by a collective ends as late as the blocks that waited for it, and a collective
that finds all cores taken begins at the kernel's end.
"""

INTERPRETED_BLOCKS = 2
"""Blocks in the interpreter: enough for two to run at once and for each to take several tiles."""


def launch(
    name: str,
    body: Callable,
    outputs: list[jax.ShapeDtypeStruct],
    scratch: list,
    *,
    warpgroups: int,
    in_place: bool = False,
    blocks_per_core: int = BLOCKS_PER_CORE,
) -> Callable:
    """A persistent kernel: `body(*input references, *output references, *scratch references)` in each warpgroup of a block.

    Functions that launch a kernel are jitted: a program that calls one again with the same shapes traces and lowers it once.

    With `in_place` there are no outputs: the body changes the last input, which is the result, in the same memory unless
    something else reads that input later. Input and result must not be slices of different arrays (docs/kernels.md).
    """

    def kernel(*references):
        pl.run_scoped(lambda *buffers: body(*references, *buffers), *scratch, collective_axes="warpgroup")

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

    def run_in_place(*inputs):
        changed = jax.new_ref(inputs[-1])
        run(*inputs[:-1], changed)
        return [jax.freeze(changed)]

    call = call_varying(run_in_place if in_place else run)

    def call_in_32_bits(*inputs):
        # With jax_enable_x64 a kernel's indices, Python's numbers among them, would be of two widths.
        with jax.enable_x64(False):
            return call(*inputs)

    return call_in_32_bits


def call_varying(run: Callable) -> Callable:
    """A kernel's call whose results vary inside `shard_map` as its inputs do, where JAX types them as equal on all devices.

    The body is traced with inputs that do not vary: JAX turns these types off inside a kernel, and a loop that carries what it
    read from an input would change its type.
    """

    def call(*inputs):
        if not varying_axes(inputs):
            return run(*inputs)
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs]
        traced, tree = jax.make_jaxpr(run, return_shape=True)(*types)
        results = jax.extend.core.jaxpr_as_fun(traced)(*inputs)
        return vary_as(jax.tree.unflatten(jax.tree.structure(tree), results), inputs)

    return call


def operand_transforms(dtype: jnp.dtype, columns: int = SWIZZLED_COLUMNS) -> tuple:
    """How a tile of `columns` columns lies in shared memory so that wgmma and TMA read it without bank conflicts."""
    bytes_per_row = columns * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(bytes_per_row * 8)
    # mypy takes both for abstract classes.
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def wgmma_registers(accumulator, a, b, staging) -> None:
    """accumulator += a b, a being an array; the interpreter multiplies references only, for it a goes through `staging`."""
    if staging is not None:
        staging[...] = a
        plgpu.commit_smem()
        a = staging
    plgpu.wgmma(accumulator, a, b)


def grid_size(blocks_per_core: int = BLOCKS_PER_CORE) -> int:
    """Blocks of a persistent kernel."""
    if is_interpreted():
        return INTERPRETED_BLOCKS
    target = jax.sharding.get_abstract_mesh().abstract_device
    return blocks_per_core * (target.num_cores if target is not None else _default_device().core_count)


def is_interpreted() -> bool:
    """Whether JAX's GPU interpreter runs the kernels: where the target is a CPU."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    return (target if target is not None else _default_device()).platform == "cpu"


def interpret() -> plgpu.InterpretGPUParams | bool:
    """The `interpret` argument of a kernel; interpreted kernels are checked for races."""
    return plgpu.InterpretGPUParams(detect_races=True) if is_interpreted() else False


def compute_capability() -> str | None:
    """ "9.0" for Hopper; None where the target is no NVIDIA GPU."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None:
        return "9.0" if "H100" in target.device_kind or "H200" in target.device_kind else None
    return getattr(_default_device(), "compute_capability", None)


def _default_device() -> jax.Device:
    """Of this process: the one that `jax.default_device` names, else the first."""
    chosen = jax.config.jax_default_device
    if chosen is None or isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen
