"""A training step over meshes of eight devices equals one device's, metrics included."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.models.remat import KEPT_PARTS
from moe_jax.parallel import ExpertParallel, Parallelism, make_mesh
from moe_jax.train import log_probs, make_evaluation, make_optimizer, put_batch, sum_over_devices
from tests.helpers import seeds, tiny
from tests.helpers.meshes import relative_error
from tests.helpers.train_steps import ROWS, SEQ, make_batch, train

ALL_PARTS = ",".join(KEPT_PARTS)
PAIRWISE = ExpertParallel(transport="pairwise", capacity_factor=4)


def test_two_steps():
    """Latents travel around a ring; layers keep parts; each device has its part of AdamW's state, over `data` too."""
    parallelism = Parallelism(make_mesh(data=2, expert=2, context=2), PAIRWISE, shard_optimizer=True)
    options = {"make_model": partial(tiny.deepseek, layers=2), "remat": ALL_PARTS}
    # With a smaller eps AdamW makes whole steps of a gradient's noise where it is near 0.
    check_two_steps(parallelism, options | {"optimizer": make_optimizer(1e-2, eps=1e-3, max_grad_norm=0.1)})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sizes, options",
    [
        ({"fsdp": 2, "expert": 4}, {"remat": 1}),
        ({"data": 2, "fsdp": 2, "context": 2}, {"gradient_accumulation": 2, "remat": False}),
        (
            {"fsdp": 2, "expert": 2, "context": 2},
            {"make_model": partial(tiny.deepseek, mtp=1), "mtp_loss_coef": 0.3, "remat": "offload"},
        ),
    ],
    ids=["moe-keeping-a-layer", "moe-data-fsdp-context", "deepseek-mtp-offload"],
)
def test_two_steps_with_other_options(sizes, options):
    check_two_steps(Parallelism(make_mesh(**sizes)), options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sizes, options",
    [
        ({"fsdp": 2, "expert": 2, "context": 2}, {"make_model": partial(tiny.deepseek, mtp=1)}),
        ({"data": 2, "fsdp": 2, "context": 2}, {"remat": "offload"}),
        ({"expert": 4, "context": 2}, {"remat": False}),
    ],
)
def test_overlapping_micro_batches(sizes, options):
    """Micro-batches that overlap change nothing."""
    check_two_steps(
        Parallelism(make_mesh(**sizes), PAIRWISE, overlap_micro_batches=True), {"gradient_accumulation": 2, **options}
    )


@pytest.mark.thorough
@pytest.mark.parametrize("sizes, micro_batches", [({"expert": 4, "context": 2}, 2), ({"data": 2, "fsdp": 2, "context": 2}, 1)])
def test_kept_parts_have_the_bits_of_recomputed_ones(sizes, micro_batches):
    batch, parallelism = make_batch(seeds.rng()), Parallelism(make_mesh(**sizes), PAIRWISE)
    kept, recomputed = (
        train(batch, parallelism, remat=remat, gradient_accumulation=micro_batches) for remat in (ALL_PARTS, True)
    )
    jax.tree.map(np.testing.assert_array_equal, kept, recomputed)


def check_two_steps(parallelism, options):
    """Two steps on a mesh equal two steps on one device."""
    batch = make_batch(seeds.rng())
    expected, expected_metrics = train(batch, **options)
    state, metrics = train(batch, parallelism, **options)
    # The second step inherits f32's noise through AdamW, as the parameters below do.
    for ours, theirs, rtol in zip(metrics, expected_metrics, (1e-5, 1e-3), strict=True):
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=rtol, atol=1e-7, err_msg=name)
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(state.params), jax.tree.leaves(expected.params), strict=True):
        # AdamW divides a gradient by its own size: if that is near 0, the noise of f32 moves the weight by a whole step.
        assert relative_error(ours, theirs) < 1e-3, jax.tree_util.keystr(path)
    for ours, theirs in zip(jax.tree.leaves(state.expert_bias), jax.tree.leaves(expected.expert_bias), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.ptp(ours) > 0
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 1]
    assert all(isinstance(x.sharding, NamedSharding) for x in moments)
    axes = ("fsdp", "expert", "context", *(("data",) if parallelism.shard_optimizer else ()))
    ways = np.prod([parallelism.mesh.shape[name] for name in axes])
    assert sum(x.addressable_shards[0].data.size for x in moments) < 1.2 * sum(x.size for x in moments) / ways


@pytest.mark.thorough
@pytest.mark.parametrize("make_model", [tiny.model, tiny.deepseek])
def test_evaluation_loss(make_model):
    """On a mesh, in turn and two batches at a time, as on one device; of three batches the last is alone."""
    rng = seeds.rng()
    batches = [make_batch(rng) for _ in range(3)]

    def evaluate(parallelism=None):
        state, _ = train(batches[0], parallelism, steps=0, make_model=make_model)
        evaluation = make_evaluation(nnx.graphdef(make_model()), parallelism=parallelism)
        return evaluation(state, [put_batch(batch, state.params, parallelism) for batch in batches])

    expected = evaluate()
    for overlap in (None, True):
        parallelism = Parallelism(make_mesh(fsdp=2, expert=2, context=2), overlap_micro_batches=overlap)
        np.testing.assert_allclose(evaluate(parallelism), expected, rtol=1e-5)


def test_compiler_options(monkeypatch):
    monkeypatch.setattr(Parallelism, "compiler_options", {"xla_no_such_option": "1"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        train(make_batch(seeds.rng()), Parallelism(make_mesh(fsdp=8)), make_model=tiny.dense)


@pytest.mark.thorough
def test_num_rounds_and_num_shadows():
    """Every token chooses experts 0 and 1: the busiest device has less work only if both are shadowed."""

    def make_model():
        model = tiny.model()
        weight = model.stages[0].mlp.router.weight
        weight.set_value(jnp.zeros_like(weight))
        return model

    parallelism = Parallelism(make_mesh(expert=4, context=2), ExpertParallel(shadow_experts=3, flops_per_byte=0.0))
    batch = make_batch(seeds.rng())
    _, [metrics] = train(batch, parallelism, steps=1, make_model=make_model, gradient_accumulation=2)
    for name, value in (("num_shadows", 2), ("num_rounds", 1)):
        assert metrics[name].tolist() == [value, value] and metrics[name].dtype == jnp.float32


def test_uneven_rows_are_refused():
    batch = {name: array[:6] for name, array in make_batch(seeds.rng()).items()}
    with pytest.raises(
        ValueError, match=r"6 rows cannot be divided among data=2 x fsdp=4 x expert=1; it must be a multiple of 8"
    ):
        train(batch, Parallelism(make_mesh(data=2, fsdp=4)), make_model=tiny.dense)


def test_rows_without_parallelism():
    mesh = make_mesh(data=2, fsdp=4)
    params = {"w": jax.device_put(jnp.zeros(8), NamedSharding(mesh, PartitionSpec()))}
    for rows, of_a_device in ((8, 1), (4, 2), (6, 3), (3, 3)):
        tokens = put_batch({"tokens": np.zeros((rows, SEQ), np.int32)}, params)["tokens"]
        assert tokens.addressable_shards[0].data.shape == (of_a_device, SEQ)


def test_names_of_preferences_are_free_for_an_own_loss():
    """Only in a batch of preferences, which has "example", are such arrays of rows: elsewhere `context` splits their tokens."""
    parallelism = Parallelism(make_mesh(data=4, context=2))
    params = {"w": jax.device_put(jnp.zeros(8), NamedSharding(parallelism.mesh, PartitionSpec()))}
    tokens = np.arange(ROWS * SEQ, dtype=np.int32).reshape(ROWS, SEQ)
    own = {"tokens": tokens, "reference_log_probs": tokens}
    parts = [array.addressable_shards[0].data for array in put_batch(own, params, parallelism).values()]
    np.testing.assert_array_equal(*parts, strict=True)
    assert parts[0].shape == (ROWS // 4, SEQ // 2)
    of_preferences = put_batch(own | {"example": tokens[:, :3]}, params, parallelism)
    assert of_preferences["reference_log_probs"].addressable_shards[0].data.shape == (ROWS // 4, SEQ)


@pytest.mark.thorough
def test_own_loss():
    def loss(model, batch):
        found = batch["weight"][:, None] * log_probs(model, batch)
        summed, labels = sum_over_devices(model, found.sum()), batch["num_labels"]
        return -summed / labels, {"labels": labels}

    rng = seeds.rng()
    batch = make_batch(rng) | {"weight": rng.normal(size=ROWS).astype(np.float32)}
    options = dict(loss=loss, steps=1, make_model=tiny.dense)
    parallelism = Parallelism(make_mesh(fsdp=2, expert=2, context=2))
    expected, (expected_metrics,) = train(batch, **options)
    state, (metrics,) = train(batch, parallelism, **options)
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    for ours, theirs in zip(*(jax.tree.leaves(s.opt_state) for s in (state, expected)), strict=True):
        assert relative_error(ours, theirs) < 1e-4
    with pytest.raises(ValueError, match=r"its value differs along data, expert, fsdp: sum it over them with"):
        train(batch, parallelism, **options | {"loss": lambda model, batch: (batch["weight"].sum(), {})})
