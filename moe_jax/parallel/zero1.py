"""ZeRO, stage 1: the optimizer's moments and the masters are split over the mesh axis `data`; parameters stay whole there.

Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054. Each device along `data` updates its own part of every parameter:

    gradients     summed over `data` once a step by a reduce-scatter: each device receives the sum of its part
    update        moments, masters and gradients of the part; only the sum of the gradients' squares travels
    parameters    the updated parts are gathered once a step, in the parameters' dtype

`parallel.layout` chooses the axis of an array that `data` splits. An array without such an axis stays whole, and its gradients
are summed on every device. The functions here work on global arrays under `jax.jit`, outside `jax.shard_map`.
"""

import jax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from moe_jax.kernels.precision import widened
from moe_jax.parallel.layout import data_axis, optimizer_spec, parameter_path, parameter_spec
from moe_jax.parallel.parallelism import Parallelism


def optimizer_mesh(parallelism: Parallelism | None) -> Mesh | None:
    """Returns the mesh if ZeRO-1 splits the optimizer state over its `data` axis; None otherwise."""
    return parallelism.mesh if parallelism is not None and parallelism.splits_optimizer else None


def optimizer_shardings(params: PyTree, mesh: Mesh) -> PyTree:
    """Returns the `Sharding` of each parameter's moments and master under ZeRO-1.

    Raises:
      ValueError: `data` divides no axis of any parameter.
    """
    paths = [(parameter_path(path), p.shape) for path, p in jax.tree.leaves_with_path(params)]
    if all(data_axis(path, shape, mesh) is None for path, shape in paths):
        raise ValueError(
            f"shard_optimizer=True: data={mesh.shape['data']} divides no axis of any parameter that is left to split; use a "
            "divisor of the number of layers, or a power of two"
        )
    return _by_path(params, lambda path, p: NamedSharding(mesh, optimizer_spec(path, p.shape, mesh)))


def to_parts(tree: PyTree, mesh: Mesh) -> PyTree:
    """Shards arrays (by parameter path) like the optimizer state: each device keeps its slice along `data`."""
    return lax.with_sharding_constraint(tree, optimizer_shardings(tree, mesh))


def to_whole(params: PyTree, mesh: Mesh) -> PyTree:
    """All-gathers updated parameters over `data`, back to the model's sharding."""
    # Constrained to parts first. Otherwise XLA may gather the masters instead, with twice the bytes.
    params = to_parts(params, mesh)
    shardings = _by_path(params, lambda path, p: NamedSharding(mesh, parameter_spec(path, p.shape, mesh)))
    return lax.with_sharding_constraint(params, shardings)


def sum_to_parts(contributions: nnx.State, mesh: Mesh) -> nnx.State:
    """Reduce-scatters gradients over `data` in f32, to the optimizer state's sharding.

    Args:
      contributions: [data, ...] for each parameter [...]. The devices along `data` hold one gradient each
        (`train.on_devices(..., stack_over_data=True)`).
    """

    def sum_own(stacked: nnx.State) -> nnx.State:
        return _by_path(stacked, lambda path, g: _sum(widened(g[0]), axes[path]))

    axes = {
        parameter_path(path): data_axis(parameter_path(path), g.shape[1:], mesh)
        for path, g in jax.tree.leaves_with_path(contributions)
    }
    return jax.shard_map(
        sum_own,
        mesh=mesh,
        in_specs=(stacked_specs(_by_path(contributions, lambda path, g: parameter_spec(path, g.shape[1:], mesh))),),
        out_specs=_by_path(contributions, lambda path, g: optimizer_spec(path, g.shape[1:], mesh)),
    )(contributions)


def stacked_specs(specs: nnx.State) -> nnx.State:
    """Returns the PartitionSpecs of stacked gradients [data, ...] for parameters with these specs."""
    return jax.tree.map(lambda spec: PartitionSpec("data", *spec), specs)


def _sum(gradient: jax.Array, axis: int | None) -> jax.Array:
    if axis is None:
        return lax.psum(gradient, "data")
    return lax.psum_scatter(gradient, "data", scatter_dimension=axis, tiled=True)


def _by_path(tree: PyTree, f) -> PyTree:
    return jax.tree.map_with_path(lambda path, leaf: f(parameter_path(path), leaf), tree)
