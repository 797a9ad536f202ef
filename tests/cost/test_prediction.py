"""What predictions must obey whatever the machine: parts add up, splitting divides, nothing gets faster by more work."""

from dataclasses import replace

import jax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from moe_jax.config import NAMED_CONFIGS, Qwen3Config, Qwen3MoeConfig
from moe_jax.cost import Run, predict
from moe_jax.flops import num_parameters, training_flops_per_token
from moe_jax.models.auto import from_config
from moe_jax.parallel import ExpertParallel, Parallelism, ShardedParameters
from moe_jax.parallel.expert.mlp import _plan
from moe_jax.parallel.machine import H200
from moe_jax.parallel.mesh import MESH_AXES, MeshShape

QWEN = NAMED_CONFIGS["qwen3-30b-a3b"]
MIXED = Qwen3MoeConfig(num_hidden_layers=4, mlp_only_layers=(0,), num_experts=12, num_experts_per_tok=3, vocab_size=1024)
SIZES = st.sampled_from((1, 2, 3, 4, 8))
MESHES = st.builds(MeshShape, data=SIZES, fsdp=SIZES, expert=SIZES, context=SIZES)


@settings(deadline=None, max_examples=40)
@given(mesh=MESHES, rows=st.sampled_from((8, 24, 192)), length=st.sampled_from((96, 4096)))
def test_runs_are_those_that_a_training_step_takes(mesh, rows, length):
    """The step's own checks, on a mesh without devices."""
    abstract = AbstractMesh((mesh.data, mesh.fsdp, mesh.expert, mesh.context), MESH_AXES)

    def check():
        Parallelism(abstract).check_batch(rows)
        ShardedParameters.of(shapes(), abstract, dtype="bfloat16", token_axes=MESH_AXES)
        assert mesh.context == 1 or length % (2 * mesh.context) == 0

    assert accepts(lambda: Run(MIXED, mesh, rows, length)) == accepts(check)


def accepts(check) -> bool:
    try:
        check()
    except (ValueError, AssertionError):
        return False
    return True


def shapes() -> nnx.State:
    return nnx.state(nnx.eval_shape(lambda: from_config(MIXED, rngs=nnx.Rngs(0))), nnx.Param)


@pytest.mark.parametrize("config", [QWEN, MIXED, Qwen3Config(num_hidden_layers=2)], ids=["sparse", "mixed", "dense"])
def test_parts_add_up(config):
    prediction = predict(Run(config, MeshShape(data=2, fsdp=2, expert=2), 8, 4096))
    assert all(seconds >= 0 for seconds in prediction.seconds.values())
    assert all(size >= 0 for size in prediction.bytes.values())
    assert prediction.tokens_per_second == 4096 / prediction.step_seconds
    assert prediction.flops_per_second / prediction.tokens_per_second == pytest.approx(training_flops_per_token(config, 4096))
    assert prediction.fits == (prediction.memory_bytes <= H200.memory)
    assert (prediction.seconds["exchange"] > 0) == bool(config.moe_layers)


def test_one_device_keeps_everything_and_meets_nobody():
    prediction = predict(Run(QWEN, MeshShape(), 1, 4096))
    travels = {prediction.seconds[part] for part in ("exchange", "context", "gathers", "once a step")}
    assert travels == {0} and prediction.hidden_seconds == 0
    assert prediction.bytes["parameters"] == 4 * num_parameters(QWEN) and prediction.bytes["moments"] == 8 * num_parameters(
        QWEN
    )
    assert prediction.bytes["gradients"] == 2 * num_parameters(QWEN) and not prediction.fits


@pytest.mark.parametrize("axis, divides", [("data", False), ("fsdp", True), ("expert", True), ("context", True)])
def test_every_axis_but_data_divides_the_state(axis, divides):
    one, many = (predict(Run(QWEN, MeshShape(**{axis: ways}), 8, 4096)).bytes["moments"] for ways in (1, 8))
    # Norms and routers stay whole.
    assert many == pytest.approx(one / 8 if divides else one, rel=0.01)


@settings(deadline=None, max_examples=30)
@given(
    mesh=st.sampled_from([MeshShape(fsdp=8), MeshShape(expert=8), MeshShape(2, 2, 2, 2), MeshShape(context=16)]),
    remat=st.booleans(),
    load=st.floats(1, 8),
    length=st.sampled_from((4096, 32768)),
)
def test_more_work_never_takes_less(mesh, remat, load, length):
    run = Run(QWEN, mesh, 8 * mesh.size, length, remat=remat)
    base = predict(run)
    assert predict(replace(run, rows=2 * run.rows)).step_seconds > base.step_seconds
    assert predict(replace(run, expert_load_imbalance=load)).step_seconds >= base.step_seconds
    assert predict(run, replace(H200, gpus_of_host=1)).step_seconds >= base.step_seconds
    assert predict(run, replace(H200, hidden=0.0)).step_seconds >= base.step_seconds
    again, kept = (predict(replace(run, remat=remat)) for remat in (True, False))
    assert again.bytes["activations"] < kept.bytes["activations"]
    assert again.seconds["experts"] > kept.seconds["experts"]


@pytest.mark.parametrize("devices", [2, 4, 8, 32])
@pytest.mark.parametrize("rows", [1, 16])
def test_the_exchange_is_the_one_that_the_layer_would_make(devices, rows):
    run = Run(QWEN, MeshShape(expert=devices), rows * devices, 1024)
    plan = _plan(run.tokens, 8, devices, 128 // devices, ExpertParallel(), None)
    assert (plan.transport == "gather") == run.gathers_tokens
    assert run.received == devices * plan.first.tokens and run.room == devices * plan.first.pairs


def test_all_gather_holds_the_keys_of_all_devices():
    ring, gathered = (
        predict(Run(QWEN, MeshShape(context=8), 1, 2**20, context_method=method)).memory_bytes
        for method in ("ring", "all_gather")
    )
    # bf16 and f32, keys and values of four heads, for six devices more.
    assert gathered - ring == (2 + 4) * 2 * 4 * 128 * 6 * 2**20 / 8


def test_further_rounds_cost_from_the_capacity_on():
    run = Run(QWEN, MeshShape(expert=8), 64, 4096)
    exchange = [predict(replace(run, expert_load_imbalance=load)).seconds["exchange"] for load in (1.0, 1.25, 1.26, 2.6)]
    assert exchange[0] == exchange[1] < exchange[2] < exchange[3]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rows": 0}, "rows=0 must be an integer of at least 1"),
        ({"rows": 3}, "3 rows cannot be dealt out to data x fsdp x expert = 2 devices"),
        ({"mesh": MeshShape(expert=3), "rows": 3}, "128 experts cannot be dealt out to mesh.expert=3 devices"),
        ({"mesh": MeshShape(context=3)}, "sequence_length=4096 must be a multiple of 2 . mesh.context = 6"),
        ({"mesh": MeshShape(context=8), "context_method": "ulysses"}, "divide 32 heads and 4 key heads"),
        ({"moment_dtype": "float16"}, "moment_dtype='float16' must be one of bfloat16, float32"),
        ({"keys_per_token": 5000.0}, "keys_per_token=5000.0 must be above 0, and at most sequence_length"),
        ({"expert_load_imbalance": float("nan")}, "expert_load_imbalance=nan must be a number of at least 1"),
    ],
)
def test_what_cannot_run_is_refused(options, message):
    arguments = {"config": QWEN, "mesh": MeshShape(fsdp=2), "rows": 2, "sequence_length": 4096} | options
    with pytest.raises(ValueError, match=message):
        Run(**arguments)


def test_asking_takes_no_memory_for_parameters():
    before = len(jax.live_arrays())
    predict(Run(NAMED_CONFIGS["qwen3-235b-a22b"], MeshShape(fsdp=64), 64, 4096))
    assert len(jax.live_arrays()) == before
