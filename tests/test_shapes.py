"""Shapes and dtypes of the package's arrays are compared with jaxtyping's annotations in every call."""

import sys

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts.activation import activated
from tests.helpers import shapes

WRONG = jaxtyping.TypeCheckError


@jaxtyping.jaxtyped(typechecker=shapes.check)
def project(
    h: Float[Array, "rows 2*inter"],
    w: Float[Array, "inter hidden"],
    expert: Int[Array, "rows"] | str | None = None,
    *,
    result=None,
) -> tuple[Float[Array, "rows hidden"], Int[Array, ""]]:
    """Returns zeros of the right shapes, or the given result."""
    if h.size == 0:
        raise ValueError("h is empty")
    return (jnp.zeros((len(h), w.shape[-1]), h.dtype), jnp.int32(0)) if result is None else result


H, W = jnp.ones((3, 8)), jnp.ones((4, 5))


def test_right_calls_pass():
    """Options, NumPy's arrays and tracers are arguments like others."""
    for expert in (None, "all", jnp.zeros(3, jnp.int32), np.zeros(3, np.int64)):
        assert project(H, W, expert=expert)[0].shape == (3, 5)
    assert jax.eval_shape(project, H.astype(jnp.bfloat16), W.astype(jnp.bfloat16))[0].shape == (3, 5)
    assert jax.vmap(project, (0, None))(jnp.ones((2, 3, 8)), W)[0].shape == (2, 3, 5)


@pytest.mark.parametrize(
    "name, h, w, options",
    [
        pytest.param("h", jnp.ones(8), W, {}, id="number of axes"),
        pytest.param("h", H.astype(jnp.int32), W, {}, id="dtype"),
        pytest.param("h", jnp.ones((3, 9)), W, {}, id="expression"),
        pytest.param("expert", H, W, {"expert": jnp.zeros(4, jnp.int32)}, id="axis of two arguments"),
        pytest.param("expert", H, W, {"expert": jnp.zeros(3)}, id="dtype in a union"),
        pytest.param("return", H, W, {"result": (jnp.ones((3, 4)), jnp.int32(0))}, id="axis of the result"),
        pytest.param("return", H, W, {"result": (jnp.ones((3, 5)), jnp.float32(0))}, id="dtype of the result"),
        pytest.param("return", H, W, {"result": (jnp.ones((3, 5)),)}, id="number of results"),
    ],
)
def test_wrong_arrays_are_refused(name, h, w, options):
    """Each kind of difference is seen, also in a call that is traced."""
    for call in (project, jax.jit(project), lambda *a, **o: jax.eval_shape(project, *a, **o)):
        with pytest.raises(WRONG) as error:
            call(h, w, **options)
        assert str(error.value.__cause__).startswith(f"{name} is ")


def test_own_errors_come_first():
    """The error of a function is raised even if another argument does not fit."""
    with pytest.raises(ValueError, match="h is empty"):
        project(jnp.ones((0, 8)), jnp.ones(3))


def test_unchecked_calls():
    """Nothing is compared within the context, and everything after it."""
    with shapes.unchecked():
        project(H, jnp.ones((3, 5)))
    with pytest.raises(WRONG):
        project(H, jnp.ones((3, 5)))


def test_gradients_of_integers_pass():
    """The gradient of an array of integers is no array of integers."""
    placeholder = np.zeros(3, jax.dtypes.float0)
    assert project(H, W, placeholder)[0].shape == (3, 5)


def test_package_is_checked():
    """A function of the package that computes with any number of axes refuses the wrong one."""
    assert activated(jnp.ones((3, 8))).shape == (3, 4)
    with pytest.raises(WRONG):
        activated(jnp.ones((2, 4, 8)))


def test_no_module_is_left_out():
    """No module of the package was imported before the hook that decorates its functions."""
    package = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "moe_jax"}
    assert "moe_jax.kernels.experts.activation" in package and shapes.is_checked("moe_jax.kernels.experts.activation")
    unchecked = {name for name, module in package.items() if type(module.__loader__).__module__ != "jaxtyping._import_hook"}
    assert not [name for name in unchecked if shapes.is_checked(name)]
