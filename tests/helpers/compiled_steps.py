"""Steps around the kernels of the experts, as whole programs. Their operations one by one would be hundreds of programs."""

import jax
import numpy as np

from moe_jax.kernels.experts import routing, separate_vjps
from moe_jax.kernels.experts.fp8 import quantise

plan = jax.jit(routing.plan, static_argnums=(1, 2, 3))
plan_of_few = jax.jit(routing.plan_of_few, static_argnums=(1, 2))
quantise_matrices, quantise_rows = map(jax.jit, (quantise.quantise_matrices, quantise.quantise_rows))
dequantised_rows, weight_of_row = map(jax.jit, (quantise.dequantised_rows, separate_vjps.weight_of_row))


def whole(f):
    """Returns f whose every call compiles one program. Other arguments than arrays are not traced."""

    def call(*arguments, **options):
        leaves, tree = jax.tree.flatten((arguments, options))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

        def program(arrays):
            traced = dict(zip(places, arrays, strict=True))
            arguments, options = jax.tree.unflatten(tree, [traced.get(i, leaf) for i, leaf in enumerate(leaves)])
            return f(*arguments, **options)

        return jax.jit(program)([leaves[i] for i in places])

    return call
