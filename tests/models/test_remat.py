"""The values of the option `remat`, and what recomputed layers do not compute again."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.models.remat import layers_and_parts, remat_option
from tests.helpers import tiny


@pytest.mark.parametrize(
    "remat, found",
    [
        (22, (22, ())),
        (np.int32(1), (1, ())),
        ("22", (22, ())),
        ("router", (0, ("router",))),
        ("3,experts,attention", (3, ("attention", "experts"))),
        (True, None),
        (-1, None),
        ("-1", None),
        ("3,", None),
        ("attention,3", None),
        ("heads", None),
        ("auto", None),
        (1.0, None),
    ],
)
def test_numbers_of_layers_and_parts(remat, found):
    assert layers_and_parts(remat) == found
    if found is not None:
        assert layers_and_parts(remat_option(*found)) == found


@pytest.mark.parametrize(
    "part, primitive, fewer",
    [
        ("router", "top_k", 1),
        # q k^T is needed for the gradients in XLA; p v is not.
        ("attention", "dot_general", 1),
        ("experts", "remat_opt", 1),
    ],
)
def test_a_kept_part_is_not_computed_again(part, primitive, fewer):
    recomputing, keeping = (_primitives(remat) for remat in (True, part))
    assert recomputing[primitive] - keeping[primitive] >= fewer


def _primitives(remat) -> collections.Counter:
    """Returns the number of each primitive in the gradient of a model."""
    graph, params = nnx.split(tiny.model())
    found: collections.Counter = collections.Counter()

    def count(jaxpr):
        for equation in jaxpr.eqns:
            found[equation.primitive.name] += 1
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda a: hasattr(a, "eqns")):
                if hasattr(inner, "eqns"):
                    count(inner)

    def loss(params):
        return nnx.merge(graph, params)(jnp.ones((1, 4), int), remat=remat).logits.sum()

    count(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    return found
