"""Inside `jax.shard_map` an array's type says over which mesh axes the devices may hold different values of it (it *varies*).

A function with a custom gradient must type its results and gradients as varying. Otherwise the sum of a replicated argument's
gradient over the devices is left out. If all arguments are first cast to vary alike, that sum is the gradient of the cast.
Under `check_vma=False`, and outside `shard_map`, nothing varies and these functions do nothing.
"""

import jax


def vary_alike(arguments):
    """Casts each of the arguments (a pytree) to vary over every axis over which one of them varies."""
    return vary_as(arguments, arguments)


def vary_as(results, inputs):
    """Casts each of the results (a pytree) to vary over at least the axes over which a leaf of `inputs` varies."""
    axes = varying_axes(inputs)

    def cast(result):
        missing = tuple(sorted(axes - varying_axes(result)))
        return jax.lax.pcast(result, missing, to="varying") if missing else result

    return jax.tree.map(cast, results)


def refuse_explicit_axes(**arrays: jax.typing.ArrayLike) -> None:
    """Refuses arrays that are split over mesh axes of type Explicit, for which JAX asks for the layout of every result.

    Raises:
        ValueError: one of the arrays is split over such an axis.
    """
    for name, array in arrays.items():
        spec = jax.typeof(array).sharding.spec
        if any(axis is not None for axis in spec):
            raise ValueError(
                f"{name} is split as {spec} over mesh axes of type Explicit, which jax.make_mesh makes by default; take a mesh "
                "of moe_jax.parallel.make_mesh or one with axis_types=(AxisType.Auto, ...), or call this inside jax.shard_map"
            )


def varying_axes(arrays) -> frozenset[str]:
    """Returns the mesh axes over which a leaf of `arrays` varies."""
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(arrays)))
