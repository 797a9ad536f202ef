"""Refuses transfers that would hang in a branch which only some ranks of a pipeline take.

A `ppermute` is one transfer of all devices. The ranks in other branches never take part in it, and those in this one wait for
ever. Collectives with groups are transfers inside each group. They hang only if a group has several ranks of the pipeline.
"""

from collections.abc import Callable, Iterator

import jax
from jax.extend import core

NO_COPIES = {"xla_gpu_copy_insertion_use_region_analysis": True}
"""Options of `jax.jit` with which XLA copies no arrays that pass through a branch unchanged. Without them it copied all
products of experts twice a tick, in a program of ZB-V compiled for two H200s."""

OF_ALL_DEVICES = ("ppermute", "pbroadcast", "psend", "precv")
"""Primitives without groups, and those that begin so (`ppermute_start`)."""

WITH_GROUPS = ("psum", "pmax", "pmin", "all_gather", "all_to_all", "ragged_all_to_all", "reduce_scatter", "unreduced")
"""Primitives whose groups lie along the axes that they name."""


def checked_branch(branch: Callable, *arguments) -> Callable:
    """Returns the function, traced for arguments like these, inside `jax.shard_map`.

    Raises:
      ValueError: the function has a `ppermute`, or a collective over `pipe`.
    """
    traced, shapes = jax.make_jaxpr(branch, return_shape=True)(*arguments)
    for equation in _equations(traced.jaxpr):
        name = equation.primitive.name
        axes = equation.params.get("axes", equation.params.get("axis_name", ()))
        if name.startswith(OF_ALL_DEVICES):
            raise ValueError(
                f"a pass has the transfer {name} over {_text(axes)}, which waits for all devices, and ranks of the pipe are in "
                "different branches: take a transfer with groups, as all_to_all or all_gather, or uniform ticks"
            )
        if name.startswith(WITH_GROUPS) and "pipe" in ((axes,) if isinstance(axes, str) else axes):
            raise ValueError(
                f"a pass has the transfer {name} over pipe, whose ranks are in different branches: reduce outside the passes"
            )
    structure = jax.tree.structure(shapes)
    return lambda *arguments: jax.tree.unflatten(structure, core.jaxpr_as_fun(traced)(*jax.tree.leaves(arguments)))


def _equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Returns the equations of a program, and of the programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, core.ClosedJaxpr):
                    yield from _equations(inner.jaxpr)
                elif isinstance(inner, core.Jaxpr):
                    yield from _equations(inner)


def _text(axes) -> str:
    return axes if isinstance(axes, str) else " and ".join(map(str, axes))
