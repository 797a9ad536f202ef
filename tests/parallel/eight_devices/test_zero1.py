"""ZeRO, stage 1: with the optimizer's state in parts over `data`, training gives the same results as with the whole state."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.parallel import Parallelism, make_mesh
from moe_jax.parallel.zero1 import sum_to_parts, to_parts
from moe_jax.train import apply_gradients, init_state, make_optimizer, make_train_step
from moe_jax.train.rebalance import move_experts
from tests.helpers import seeds, tiny
from tests.helpers.h200 import needs_compiler, run_script
from tests.helpers.meshes import laid_out, mesh_of, relative_error
from tests.helpers.train_steps import make_batch, train


def both(**sizes):
    """Parallelism on a mesh of some of the devices, without the option and with it."""
    mesh = mesh_of(**sizes)
    return Parallelism(mesh), Parallelism(mesh, shard_optimizer=True)


def own_bytes(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def assert_close(ours, theirs, tolerance):
    for (path, x), y in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert relative_error(x, y) <= tolerance, jax.tree_util.keystr(path)


# In CI `test_parallelism.test_two_steps` trains with such a state.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "sizes, options",
    [
        ({"data": 2, "fsdp": 2}, {"gradient_accumulation": 2, "make_model": tiny.dense}),
        (
            {"data": 2, "expert": 2, "context": 2},
            {"make_model": partial(tiny.deepseek, mtp=1), "mtp_loss_coef": 0.3, "remat": "offload"},
        ),
    ],
    ids=["data-fsdp-accumulated", "deepseek-mtp"],
)
def test_two_steps(sizes, options):
    """Losses, gradients (moments after one step) and parameters after two steps equal the whole state's, clip included."""
    batch, (plain, split) = make_batch(seeds.rng()), both(**sizes)
    # With a smaller eps AdamW makes whole steps of a gradient's noise where it is near 0.
    options |= {"optimizer": make_optimizer(1e-2, eps=1e-3, max_grad_norm=0.1)}
    expected, expected_metrics = train(batch, plain, **options)
    state, metrics = train(batch, split, **options)
    for ours, theirs in zip(metrics, expected_metrics, strict=True):
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
        assert theirs["grad_norm"] > 0.1
    assert_close(state.params, expected.params, 1e-6)
    assert_close(state.opt_state, expected.opt_state, 1e-6)
    assert [x.sharding for x in jax.tree.leaves(state.params)] == [x.sharding for x in jax.tree.leaves(expected.params)]
    # Each array of this model has an axis that data divides. The count of steps is whole.
    assert own_bytes(state.opt_state) - 4 == (own_bytes(expected.opt_state) - 4) / sizes["data"]


@pytest.mark.thorough
def test_bf16_parameters():
    """The sum over `data` is not rounded to bf16, as it is with the whole state: gradients differ by that rounding alone."""
    batch, (plain, split) = make_batch(seeds.rng()), both(data=4)
    options = dict(steps=1, make_model=partial(tiny.dense, param_dtype=jnp.bfloat16))
    expected, (expected_metrics,) = train(batch, plain, **options)
    state, (metrics,) = train(batch, split, **options)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6)
    assert_close(state.opt_state, expected.opt_state, 2**-7)
    assert own_bytes(state.low_halves) == own_bytes(expected.low_halves) / 4
    assert own_bytes(state.params) == own_bytes(expected.params)


def test_sum_to_parts():
    mesh = both(data=4, fsdp=2)[0].mesh
    shapes = {("norm", "weight"): (6,), ("lm_head", "weight"): (16, 3), ("embed_tokens", "weight"): (6, 8)}
    specs = {("norm", "weight"): (None,), ("lm_head", "weight"): ("fsdp", None), ("embed_tokens", "weight"): ("fsdp", None)}
    found = {("norm", "weight"): P(None), ("lm_head", "weight"): P(("fsdp", "data"), None)}
    found[("embed_tokens", "weight")] = P("fsdp", "data")
    rng = seeds.rng()
    arrays = {path: rng.normal(size=(4, *shape)).astype(np.float32) for path, shape in shapes.items()}
    placed = {path: jax.device_put(x, NamedSharding(mesh, P("data", *specs[path]))) for path, x in arrays.items()}
    sums = jax.jit(partial(sum_to_parts, mesh=mesh))({module: {name: x} for (module, name), x in placed.items()})
    for (module, name), x in arrays.items():
        np.testing.assert_allclose(sums[module][name], x.sum(0), rtol=1e-5, atol=1e-6)
        assert sums[module][name].sharding.is_equivalent_to(NamedSharding(mesh, found[module, name]), x.ndim - 1), module


def test_compiled_update():
    """Each part's gradients are reduce-scattered, AdamW works on parts, and each parameter is gathered once."""
    mesh = make_mesh(data=8)
    parallelism, optimizer = Parallelism(mesh, shard_optimizer=True), make_optimizer(1e-2)
    state = init_state(laid_out(tiny.dense(), data=8), optimizer, parallelism)
    contributions = jax.tree.map(lambda p: jnp.ones((8, *p.shape)), state.params)
    contributions = jax.device_put(contributions, NamedSharding(mesh, P("data")))

    def update(state, contributions):
        return apply_gradients(optimizer, state, sum_to_parts(contributions, mesh), parallelism)

    out = jax.tree.map(lambda x: x.sharding, state)
    program = jax.jit(update, donate_argnums=0, out_shardings=out).lower(state, contributions).compile()
    text = program.as_text()
    whole = [x.shape for x in jax.tree.leaves(state.params)]
    gathered = [shape for shape in shapes_of("all-gather", text) if shape in whole]
    assert sorted(gathered) == sorted(whole)
    assert not [shape for shape in shapes_of("all-reduce", text) if shape]
    assert len(shapes_of("reduce-scatter", text)) == len(whole)
    # The square root of AdamW.
    parts = [x.addressable_shards[0].data.shape for x in jax.tree.leaves(to_parts_of(state.params, mesh))]
    assert sorted(shapes_of("sqrt", text))[-len(parts) :] == sorted(parts)
    # Donated: parameters, moments and masters are updated in place.
    assert program.memory_analysis().alias_size_in_bytes >= own_bytes(state)


UPDATE_ON_FOUR = """
from functools import partial
import optax
from moe_jax.parallel.choices import MESH_AXES
from moe_jax.parallel.layout import optimizer_spec, parameter_spec
from moe_jax.parallel import Parallelism
from moe_jax.parallel.zero1 import sum_to_parts
from moe_jax.train import TrainState, apply_gradients

devices = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x4x1").devices
mesh = Mesh(np.array(devices).reshape(1, 2, 2, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 5)
path, shape, optimizer = ("lm_head", "weight"), (4096, 2048), optax.adamw(1e-5)

def tree(shape, dtype, spec):
    return {"lm_head": {"weight": jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))}}

whole, part = parameter_spec(path, shape, mesh), optimizer_spec(path, shape, mesh)
masters = tree(shape, f32, part)
place = NamedSharding(mesh, PartitionSpec())
moments = jax.tree.map(
    lambda x: masters["lm_head"]["weight"] if x.ndim else jax.ShapeDtypeStruct((), x.dtype, sharding=place),
    jax.eval_shape(optimizer.init, masters),
)
step = jax.ShapeDtypeStruct((), i32, sharding=place)
state = TrainState(step, tree(shape, bf16, whole), moments, tree(shape, jnp.int16, part))
gradients = tree((2, *shape), f32, PartitionSpec("data", *whole))

def update(state, gradients):
    return apply_gradients(optimizer, state, sum_to_parts(gradients, mesh), Parallelism(mesh, shard_optimizer=True))

out = jax.tree.map(lambda x: x.sharding, state)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    print(jax.jit(update, donate_argnums=0, out_shardings=out).lower(state, gradients).compile().as_text())
"""


@needs_compiler
@pytest.mark.thorough
def test_update_on_h200s():
    """Gradients are summed by a reduce-scatter in f32, and parameters travel in bf16."""
    text = run_script(UPDATE_ON_FOUR)
    assert re.search(r"f32\[1024,2048\]\S* reduce-scatter", text)
    assert re.search(r"bf16\[1024,2048\]\S*\), bf16\[2048,2048\]\S*\) all-gather-start\(", text)
    assert "all-reduce" not in text and text.count(" all-gather-start(") == 1


def to_parts_of(params, mesh):
    return jax.jit(partial(to_parts, mesh=mesh))(params)


def shapes_of(operation, text):
    """The shapes of all results of an HLO operation in a compiled program, a combined one's each."""
    results = re.findall(rf"= (\(?[^=]*?) {operation}(?:-start)?\(", text)
    return [
        tuple(int(n) for n in dims.split(",") if n) for result in results for dims in re.findall(r"\w+\[([\d,]*)\]", result)
    ]


def test_labelled_optimizers():
    """Moments are split wherever an optimizer keeps them; arrays of other shapes, as Adafactor's, are whole."""
    _, parallelism = both(data=2, fsdp=2)
    model = laid_out(tiny.model(), data=2, fsdp=2)

    def matrices_or_vectors(params):
        return jax.tree.map(lambda p: "matrix" if p.ndim > 2 else "other", params)

    labelled = optax.multi_transform({"matrix": optax.adam(1e-2), "other": optax.adam(1e-3)}, matrices_or_vectors)
    moments = jax.tree.leaves(init_state(model, labelled, parallelism).opt_state)
    assert sum(x.addressable_shards[0].data.size for x in moments) < 0.3 * sum(x.size for x in moments)
    init_state(model, optax.adafactor(1e-2, min_dim_size_to_factor=4), parallelism)


def test_experts_change_places():
    optimizer, (_, parallelism) = make_optimizer(1e-2), both(data=2, expert=2)
    model = laid_out(tiny.model(), data=2, expert=2)
    state = init_state(model, optimizer, parallelism)
    state = jax.tree.map(
        lambda x: jax.device_put(jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), x.sharding) if x.ndim else x, state
    )
    before, orders = jax.device_get(state.opt_state), np.asarray([[2, 0, 3, 1], [1, 3, 0, 2]])
    layouts = [x.sharding for x in jax.tree.leaves(state)]
    moved = move_experts(state, model.config, orders)
    assert [x.sharding for x in jax.tree.leaves(moved)] == layouts
    for path, x in jax.tree.leaves_with_path(before):
        if "experts" in (name := jax.tree_util.keystr(path)):
            found = dict(jax.tree.leaves_with_path(moved.opt_state))[path]
            np.testing.assert_array_equal(found, np.stack([x[i][order] for i, order in enumerate(orders)]), err_msg=name)


def test_state_of_another_layout_is_refused():
    plain, split = both(data=2)
    with pytest.raises(ValueError, match=r"make the state with init_state\(model, optimizer, parallelism\)"):
        step = make_train_step(nnx.graphdef(tiny.model()), optax.adam(1e-2), parallelism=split)
        step(init_state(laid_out(tiny.model(), data=2), optax.adam(1e-2), plain), make_batch(seeds.rng()))


def test_nothing_to_split_is_refused():
    parallelism = both(data=7)[1]
    with pytest.raises(ValueError, match="shard_optimizer=True: data=7 divides no axis of any parameter that is left to split"):
        init_state(laid_out(tiny.model(), data=7), optax.adam(1e-2), parallelism)


def test_one_device_along_data():
    """The option changes nothing, so that a program may name it for any mesh."""
    plain, split = both(fsdp=2)
    assert not split.splits_optimizer
    states = [init_state(laid_out(tiny.model(), fsdp=2), optax.adam(1e-2), parallelism) for parallelism in (plain, split)]
    layouts = [[x.sharding for x in jax.tree.leaves(state)] for state in states]
    assert layouts[0] == layouts[1]
