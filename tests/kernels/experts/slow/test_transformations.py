"""The experts under JAX's transformations: further derivatives, scan, remat, vmap, and meshes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax import kernels
from moe_jax.kernels.experts.activation import activated
from tests.helpers import oracle, seeds
from tests.helpers.expert_gradients import compare, make_inputs
from tests.helpers.expert_layers import Form, compute


@pytest.mark.thorough
def test_products_with_the_hessian_are_those_of_the_oracle():
    def halves(x, w_gate_up, w_down, weights, chosen):
        rows = kernels.plan(chosen, w_gate_up.shape[0])
        h = kernels.gate_up(x, w_gate_up, rows, backend="xla")
        return kernels.down(activated(h), w_down, weights, rows, backend="xla")

    @partial(jax.jit, static_argnums=0)
    def product(f, arrays, direction, chosen):
        return jax.jvp(jax.grad(lambda *a: jnp.sin(f(*a, chosen)).sum(), argnums=(0, 1, 2, 3)), arrays, direction)[1]

    with jax.enable_x64(True):
        (*arrays, chosen), (*direction, _) = (make_inputs(seeds.rng(), 33, 5, 2, 8, 4) for _ in range(2))
        expected = product(oracle.experts_mlp, tuple(arrays), tuple(direction), chosen)
        for f in (halves, partial(kernels.experts_mlp, backend="xla")):
            for actual, wanted in zip(product(f, tuple(arrays), tuple(direction), chosen), expected, strict=True):
                np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-9 * float(jnp.abs(wanted).max()))


def test_forward_mode_and_second_gradients_are_refused():
    """The docstring of `experts_mlp` promises this."""
    *arrays, chosen = make_inputs(seeds.rng(), 5, 4, 2, 8, 4, dtype=jnp.float32)

    def total(x):
        return kernels.experts_mlp(x, *arrays[1:], chosen, backend="xla").sum()

    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(total, arrays[:1], arrays[:1])
    with pytest.raises(ValueError):
        jax.grad(lambda x: jax.grad(total)(x).sum())(arrays[0])
    promised = " ".join(kernels.experts_mlp.__doc__.split())
    assert "`jax.jvp` of this function is a TypeError" in promised and "a gradient of its gradient a ValueError" in promised


def test_runs_under_scan_remat_and_vmap():
    inputs = make_inputs(seeds.rng(), 10, 4, 2, 8, 4, dtype=jnp.float32)
    *_, weights, chosen = inputs

    def stacked(x, w_gate_up, w_down):
        def body(x, _):
            return x + kernels.experts_mlp(x, w_gate_up, w_down, weights, chosen), None

        return jax.lax.scan(jax.checkpoint(body), x, None, length=2)[0].sum()

    assert np.isfinite(jax.jit(jax.grad(stacked, argnums=1))(*inputs[:3])).all()
    batched = jax.jit(jax.vmap(lambda x: kernels.experts_mlp(x, *inputs[1:])))(jnp.stack([inputs[0], 2 * inputs[0]]))
    np.testing.assert_allclose(batched[0], jax.jit(kernels.experts_mlp)(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sharding", ["shard_map", "gspmd"])
def test_runs_on_a_mesh(sharding):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    inputs = make_inputs(seeds.rng(), 24, 4, 2, 8, 4, dtype=jnp.float32)
    specs = (P("data"), P(), P(), P("data"), P("data"))
    if sharding == "gspmd":
        on_mesh = jax.jit(kernels.experts_mlp, in_shardings=[NamedSharding(mesh, spec) for spec in specs])
    else:
        on_mesh = jax.shard_map(kernels.experts_mlp, mesh=mesh, in_specs=specs, out_specs=P("data"))
    compare(on_mesh, oracle.experts_mlp, inputs, 1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_no_tokens_on_a_mesh(frozen):
    *arrays, chosen = make_inputs(seeds.rng(), 0, 4, 2, 8, 4, dtype=jnp.float32)
    specs = (P("data"), P(), P(), P("data"), P("data"))

    def total(x, w_gate_up, w_down, weights):
        layer = partial(compute, form=Form(frozen=frozen), backend="xla")
        mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
        on_mesh = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("data"))
        return jnp.sum(on_mesh(x, w_gate_up, w_down, weights, chosen))

    gradients = jax.eval_shape(jax.grad(total, argnums=(0, 1, 2, 3)), *arrays)
    assert [a.shape for a in gradients] == [a.shape for a in arrays]


def test_a_shard_map_may_leave_axes_of_its_mesh_to_the_compiler():
    mesh = AbstractMesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    inputs = make_inputs(seeds.rng(), 24, 4, 2, 8, 4, dtype=jnp.float32)
    specs = (P("expert"), P(), P(), P("expert"), P("expert"))

    def of_all(*arguments):
        on_mesh = jax.shard_map(
            kernels.experts_mlp, mesh=mesh, in_specs=specs, out_specs=P("expert"), axis_names={"expert"}, check_vma=True
        )
        return jnp.sum(on_mesh(*arguments))

    gradients = jax.eval_shape(jax.jit(jax.grad(of_all, argnums=(0, 1, 2, 3))), *inputs)
    assert [a.shape for a in gradients] == [a.shape for a in inputs[:4]]


def test_mesh_axes_along_which_jax_asks_for_layouts_are_refused():
    x, *others = make_inputs(seeds.rng(), 5, 4, 2, 8, 4, dtype=jnp.float32)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    x, chosen = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, others[-1]))
    with pytest.raises(ValueError, match=r"x is split as P\('data', None\) over mesh axes of type Explicit.*make_mesh"):
        kernels.experts_mlp(x, *others)
    with pytest.raises(ValueError, match="topk_experts is split"):
        kernels.plan(chosen, 4)
    in_parts = jax.shard_map(kernels.experts_mlp, mesh=mesh, in_specs=(P("data"), *[P()] * 4), out_specs=P("data"))
    np.testing.assert_allclose(in_parts(x, *others), kernels.experts_mlp(np.asarray(x), *others), rtol=1e-5, atol=1e-5)
