"""Rules for predictions on any machine: parts add up, splitting divides, more work makes nothing faster."""

import functools
import math
from dataclasses import replace

import jax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from moe_jax.config import NAMED_CONFIGS, DeepseekV3Config, Qwen3Config, Qwen3MoeConfig
from moe_jax.cost import PlannedStep, predict
from moe_jax.cost.flops import num_parameters, training_flops_per_token
from moe_jax.cost.layer import attention_seconds, layer_seconds
from moe_jax.cost.machine import H200
from moe_jax.cost.plan_table import flags
from moe_jax.cost.travel import context_seconds, gather_seconds
from moe_jax.models.auto import from_config
from moe_jax.parallel import Parallelism, ShardedParameters
from moe_jax.parallel.choices import MESH_AXES, MeshShape
from moe_jax.train import make_optimizer

QWEN = NAMED_CONFIGS["qwen3-30b-a3b"]
DEEPSEEK = NAMED_CONFIGS["deepseek-v3"]
LITE = NAMED_CONFIGS["deepseek-v2-lite"]
MIXED = Qwen3MoeConfig(num_hidden_layers=4, mlp_only_layers=(0,), num_experts=12, num_experts_per_tok=3, vocab_size=1024)
SIZES = st.sampled_from((1, 2, 3, 4, 8))
LATENT = DeepseekV3Config(num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=12, n_group=4, num_experts_per_tok=3)
MESHES = st.builds(MeshShape, data=SIZES, fsdp=SIZES, expert=SIZES, context=SIZES)


@settings(deadline=None, max_examples=60)
@given(
    config=st.sampled_from((MIXED, LATENT)), mesh=MESHES, rows=st.sampled_from((8, 24, 192)), length=st.sampled_from((96, 4096))
)
def test_a_plan_accepts_the_runs_that_a_training_step_accepts(config, mesh, rows, length):
    """The step's own checks, on a mesh without devices."""
    abstract = AbstractMesh((1, mesh.data, mesh.fsdp, mesh.expert, mesh.context), MESH_AXES)

    def check():
        Parallelism(abstract).check_batch(rows)
        ShardedParameters.of(shapes(config), abstract, dtype="bfloat16", token_axes=MESH_AXES)
        assert mesh.context == 1 or length % (2 * mesh.context) == 0

    assert accepts(lambda: PlannedStep(config, mesh, rows, length)) == accepts(check)


def accepts(check) -> bool:
    try:
        check()
    except (ValueError, AssertionError):
        return False
    return True


@functools.cache
def shapes(config) -> nnx.State:
    return nnx.state(nnx.eval_shape(lambda: from_config(config, rngs=nnx.Rngs(0))), nnx.Param)


@pytest.mark.parametrize(
    "config",
    [QWEN, MIXED, Qwen3Config(num_hidden_layers=2), DEEPSEEK, LITE],
    ids=["sparse", "mixed", "dense", "deepseek-v3", "deepseek-v2"],
)
def test_parts_add_up(config):
    prediction = predict(PlannedStep(config, MeshShape(data=2, fsdp=2, expert=2), 8, 4096))
    assert all(seconds >= 0 for seconds in prediction.seconds.values())
    assert all(size >= 0 for size in prediction.bytes.values())
    assert prediction.tokens_per_second == 4096 / prediction.step_seconds
    assert prediction.flops_per_second / prediction.tokens_per_second == pytest.approx(training_flops_per_token(config, 4096))
    assert prediction.fits == (prediction.memory_bytes <= H200.memory)
    assert (prediction.seconds["exchange"] > 0) == bool(config.moe_layers)


@pytest.mark.parametrize("config", [QWEN, MIXED, DEEPSEEK, LITE], ids=["sparse", "mixed", "deepseek-v3", "deepseek-v2"])
def test_a_step_has_the_flops_of_its_model(config):
    """Memory takes no time here, and every rate is 1 FLOP/s. The experts differ a little: not all of their tiles are filled."""
    rates = ("dense_matmul", "experts_matmul", "experts_d_act", "attention_forward", "attention_backward", "vocabulary")
    machine = replace(H200, hbm=math.inf, top_k=0, sort=0, experts_overhead=0, layer_overhead=0, **dict.fromkeys(rates, 1.0))
    machine = replace(machine, attention_backward_wide=1.0)
    run = PlannedStep(config, MeshShape(), 64, 4096, remat=False)
    seconds = predict(run, machine).seconds
    # Attention's backward pass recomputes the scores.
    mixer, pairs = config.mixer, sum(run.attended) * config.num_attention_heads
    scores = (8 * mixer.key_dim + 6 * mixer.value_dim) - 6 * (mixer.key_dim + mixer.value_dim)
    router = 6 * len(config.routed_layers) * config.hidden_size * config.experts.num_experts
    expected = training_flops_per_token(config, 4096) + scores * pairs - router
    assert sum(seconds.values()) / run.tokens == pytest.approx(expected, rel=0.02)
    exact = {name: seconds[name] for name in ("projections", "attention", "loss")}
    experts = 18 * len(config.routed_layers) * config.num_experts_per_tok * config.hidden_size * config.moe_intermediate_size
    assert sum(exact.values()) / run.tokens == pytest.approx(expected - experts, rel=1e-9)


def test_an_mtp_module_costs_one_more_layer_and_loss():
    run = PlannedStep(DEEPSEEK, MeshShape(fsdp=8, expert=8), 64, 4096)
    plain = replace(run, config=DEEPSEEK.without_mtp())
    found, without = predict(run), predict(plain)
    assert found.seconds["loss"] == 2 * without.seconds["loss"]
    for part in ("experts", "attention", "exchange"):
        of_layers = DEEPSEEK.num_hidden_layers if part == "attention" else len(DEEPSEEK.moe_layers)
        assert found.seconds[part] == pytest.approx((1 + 1 / of_layers) * without.seconds[part])
    # A module adds the projection of two hidden states to one.
    of_layer, of_module = (layer_seconds(run, stage, H200)["projections"].forward for stage in (1, 2))
    assert of_module - of_layer == pytest.approx(2 * run.tokens * 2 * 7168**2 / H200.dense_matmul)
    assert found.memory_bytes > without.memory_bytes


def test_a_stage_gathers_one_more_layer_than_it_has():
    """The first gather runs before the loop, where nothing hides it. The last one is not used."""
    run = PlannedStep(QWEN, MeshShape(fsdp=8), 8, 4096)
    needed = sum(passes.travel for passes in gather_seconds(run, 0, H200))
    found = predict(run, replace(H200, hidden=0.0)).seconds["gathers"]
    assert found == pytest.approx(49 * needed)


def test_hidden_copies_still_cost_their_memory_traffic():
    """Counts in units of the part of a matrix that one of four devices is sent. Forward, it arrives and is copied into its
    place next to the device's own."""
    run = PlannedStep(QWEN, MeshShape(fsdp=4), 32, 4096, hops="copies")
    forward, backward = gather_seconds(run, 0, H200)
    size = sum(2 * p.used_size / p.layers for p in run.parameters if p.in_stage and p.gather_axes)
    assert forward.memory == pytest.approx(3.5 * size / H200.hbm)
    # The matrix is gathered again; gradients are cut out, sent, and read for the sum, which is written.
    assert backward.memory - forward.memory == pytest.approx(4.25 * size / H200.hbm)
    assert backward.travel == pytest.approx(2 * forward.travel)
    found = predict(run)
    assert found.seconds["gathers"] == pytest.approx(48 * (forward.memory + backward.memory) + forward.travel + backward.travel)
    # With too little computation to overlap, the copies are not hidden.
    assert predict(replace(run, rows=4, sequence_length=64)).seconds["gathers"] > found.seconds["gathers"]


def test_one_device_keeps_everything_and_sends_nothing():
    prediction = predict(PlannedStep(QWEN, MeshShape(), 1, 4096))
    travels = {prediction.seconds[part] for part in ("exchange", "context", "gathers", "once a step")}
    assert travels == {0} and prediction.hidden_seconds == 0
    assert prediction.bytes["parameters"] == 4 * num_parameters(QWEN) and prediction.bytes["moments"] == 8 * num_parameters(
        QWEN
    )
    assert prediction.bytes["gradients"] == 2 * num_parameters(QWEN) and not prediction.fits


@pytest.mark.parametrize(
    "axis, divides", [("pipe", True), ("data", False), ("fsdp", True), ("expert", True), ("context", True)]
)
def test_every_axis_but_data_divides_the_state(axis, divides):
    one, many = (predict(PlannedStep(QWEN, MeshShape(**{axis: ways}), 8, 4096)).bytes["moments"] for ways in (1, 8))
    # Norms and routers stay whole.
    assert many == pytest.approx(one / 8 if divides else one, rel=0.01)


@pytest.mark.parametrize("param_dtype", ["bfloat16", "float32"])
def test_optimizer_state_split_over_data(param_dtype):
    """ZeRO, stage 1, divides moments and the masters' other halves, and the update. Whole parameters stay."""
    run = PlannedStep(QWEN, MeshShape(data=4, fsdp=2), 8, 4096, param_dtype=param_dtype)
    whole, parts = predict(run), predict(replace(run, shard_optimizer=True))
    # All 48 layers, the vocabulary and the norms are divided by four.
    assert parts.bytes["moments"] == whole.bytes["moments"] / 4
    own, in_params = whole.bytes["moments"] / 8, 2 if param_dtype == "bfloat16" else 4
    assert parts.bytes["parameters"] == in_params * own + (4 - in_params) * own / 4
    assert parts.bytes["gradients"] == whole.bytes["gradients"]
    assert parts.seconds["optimizer"] == pytest.approx(whole.seconds["optimizer"] / 4)
    # A reduce-scatter in f32 and a gather in the parameters' dtype, in place of a reduce-scatter and a gather in f32.
    if param_dtype == "bfloat16":
        assert parts.seconds["once a step"] < whole.seconds["once a step"]
    one = replace(run, mesh=MeshShape(fsdp=8))
    assert predict(replace(one, shard_optimizer=True)).bytes == predict(one).bytes


def test_arrays_that_data_does_not_divide_stay_whole():
    run = PlannedStep(MIXED, MeshShape(data=3), 3, 4096, shard_optimizer=True)
    whole = [p for p in run.parameters if p.updated_size == p.own_size]
    assert 0 < len(whole) < len(run.parameters)
    assert all(p.updated_size in (p.own_size, p.own_size / 3) for p in run.parameters)


@settings(deadline=None, max_examples=40)
@given(
    config=st.sampled_from((QWEN, DEEPSEEK)),
    mesh=st.sampled_from([MeshShape(fsdp=8), MeshShape(expert=8), MeshShape(1, 2, 2, 2, 2), MeshShape(context=16)]),
    remat=st.sampled_from([False, True, "offload"]),
    load=st.floats(1, 8),
    length=st.sampled_from((4096, 32768)),
)
def test_more_work_never_takes_less(config, mesh, remat, load, length):
    run = PlannedStep(config, mesh, 8 * mesh.size, length, remat=remat)
    base = predict(run)
    assert predict(replace(run, rows=2 * run.rows)).step_seconds > base.step_seconds
    assert predict(replace(run, expert_load_imbalance=load)).step_seconds >= base.step_seconds
    assert predict(run, replace(H200, gpus_of_host=1)).step_seconds >= base.step_seconds
    assert predict(run, replace(H200, hidden=0.0)).step_seconds >= base.step_seconds
    again, kept = predict(replace(run, remat=remat or True)), predict(replace(run, remat=False))
    assert again.bytes["activations"] < kept.bytes["activations"]
    assert again.seconds["experts"] > kept.seconds["experts"]
    assert (again.host_bytes > 0) == (remat == "offload")


def test_all_gather_holds_the_keys_of_all_devices():
    ring, gathered = (
        predict(PlannedStep(QWEN, MeshShape(context=8), 1, 2**20, context_method=method)).memory_bytes
        for method in ("ring", "all_gather")
    )
    # bf16 and f32, keys and values of four heads, for six devices more.
    assert gathered - ring == (2 + 4) * 2 * 4 * 128 * 6 * 2**20 / 8


LINKS_ALONE = replace(H200, hbm=math.inf, dense_matmul=math.inf, latency=0.0)


@pytest.mark.parametrize("config, elements", [(QWEN, 2 * 4 * 128), (DEEPSEEK, 512 + 64)])
def test_bytes_of_a_token_round_the_ring(config, elements):
    """Keys and values, or the latents that they are made of, travel in bf16 in both passes; their gradients travel in f32."""
    run = PlannedStep(config, MeshShape(context=8), 1, 2**18)
    found = context_seconds(run, attention(run), LINKS_ALONE)
    forward = 7 * 2 * elements * run.tokens / H200.ring_hop
    assert found == pytest.approx((forward, forward, 3 * forward))


def test_bytes_of_a_token_with_ulysses():
    """Queries and results; latents to all devices, and their gradients back."""
    run = PlannedStep(DEEPSEEK, MeshShape(context=8), 1, 2**18, context_method="ulysses")
    found = context_seconds(run, attention(run), LINKS_ALONE)
    to_heads = 7 / 8 * 2 * 128 * (192 + 128) * run.tokens / H200.all_to_all
    latents = 7 * 2 * (512 + 64) * run.tokens
    assert found.forward == found.again == pytest.approx(to_heads + latents / H200.all_gather)
    assert found.backward == pytest.approx(to_heads + latents / H200.all_to_all)


def test_every_device_of_a_ring_expands_every_latent():
    """docs/context_parallel.md: a tenth of causal attention's FLOPs at 8192 tokens a device, with any number of devices."""
    run = PlannedStep(DEEPSEEK, MeshShape(context=8), 1, 8 * 8192)
    compute = replace(H200, hbm=math.inf, ring_hop=math.inf, latency=0.0)
    found = context_seconds(run, attention(run), compute).forward * H200.dense_matmul
    assert found == pytest.approx(7 * 2 * run.tokens * 512 * 128 * (128 + 128))
    of_own_tokens_too = 8 / 7 * found
    assert of_own_tokens_too / (attention(run).forward * H200.attention_forward) == pytest.approx(0.1, abs=0.001)


def attention(run: PlannedStep):
    return attention_seconds(run.tokens, run.attended[0], run.mixer, H200)


def test_copies_hide_behind_attention_if_it_takes_longer():
    few, many = (PlannedStep(QWEN, MeshShape(context=8), 1, length, hops="copies") for length in (8 * 64, 2**18))
    machine = replace(H200, hbm=math.inf)
    assert context_seconds(many, attention(many), machine) == (0, 0, 0)
    hops = 7 * 2 * 2 * 4 * 128 * few.tokens / H200.ring_hop_copied + H200.latency
    assert context_seconds(few, attention(few), machine).forward == pytest.approx(hops - attention(few).forward / 8)
    assert predict(few).step_seconds < predict(replace(few, hops="nccl")).step_seconds


def test_copies_are_refused_where_no_process_has_all_gpus():
    run = PlannedStep(QWEN, MeshShape(fsdp=2, context=8), 2, 4096, hops="copies")
    with pytest.raises(
        ValueError, match="needs all devices in one process, and a host has 8; the mesh has 16: use hops='nccl'"
    ):
        predict(run)
    assert predict(run, replace(H200, gpus_of_host=16)).seconds["context"] > 0


def test_the_ring_expands_the_keys_of_one_device():
    """`all_gather` holds the keys of all devices in bf16 and f32: latents of six more devices, keys and values of seven."""
    ring, gathered = (
        predict(PlannedStep(DEEPSEEK, MeshShape(context=8), 1, 2**18, context_method=method)).memory_bytes
        for method in ("ring", "all_gather")
    )
    assert gathered - ring == (2 + 4) * (6 * 576 + 7 * 128 * (192 + 128)) * 2**18 / 8


def test_loads_above_the_capacity_cost_further_rounds():
    run = PlannedStep(QWEN, MeshShape(expert=8), 64, 4096)
    exchange = [predict(replace(run, expert_load_imbalance=load)).seconds["exchange"] for load in (1.0, 1.25, 1.26, 2.6)]
    assert exchange[0] == exchange[1] < exchange[2] < exchange[3]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rows": 0}, "rows=0 must be an integer of at least 1"),
        ({"rows": 3}, "3 rows cannot be divided among data x fsdp x expert = 2 devices"),
        ({"mesh": MeshShape(expert=3), "rows": 3}, "128 experts cannot be divided among mesh.expert=3 devices"),
        ({"mesh": MeshShape(context=3)}, "sequence_length=4096 must be a multiple of 2 . mesh.context = 6"),
        ({"mesh": MeshShape(context=8), "context_method": "ulysses"}, "divide 32 heads and 4 key heads"),
        ({"hops": "peer"}, "hops='peer' must be one of nccl, copies"),
        (
            {"config": DEEPSEEK, "mesh": MeshShape(expert=3), "rows": 3},
            "256 experts cannot be divided among mesh.expert=3 devices",
        ),
        ({"moment_dtype": "float16"}, "moment_dtype='float16' must be one of bfloat16, float32"),
        ({"keys_per_token": 5000.0}, "keys_per_token=5000.0 must be above 0, and at most sequence_length"),
        ({"gradient_accumulation": 0}, "gradient_accumulation=0 must be an integer of at least 1"),
        ({"rows": 3, "gradient_accumulation": 2}, "3 rows must be a multiple of gradient_accumulation=2"),
        ({"gradient_accumulation": 2}, "a micro-batch of 1 rows cannot be divided among data x fsdp x expert = 2 devices"),
        ({"pipe_chunks": 2}, "pipe_chunks=2 needs a mesh.pipe of at least 2: one rank computes its layers in one chunk"),
        (
            {"mesh": MeshShape(pipe=8), "pipe_chunks": 7},
            "48 layers do not reach the last of 7 chunks on pipe=8",
        ),
        ({"pipe_schedule": "1f1b"}, "pipe_schedule='1f1b' needs several devices along the mesh axis pipe"),
        ({"mesh": MeshShape(pipe=2), "pipe_schedule": "zb-v"}, "pipe_schedule='zb-v' needs pipe_chunks=2; got 1"),
        (
            {"mesh": MeshShape(pipe=2), "pipe_schedule": "1f1b", "remat": "offload"},
            "remat='offload' needs pipe_schedule='uniform': slots of '1f1b' stay in the GPU's memory",
        ),
        (
            {"mesh": MeshShape(pipe=2, fsdp=2), "pipe_schedule": "1f1b", "hops": "copies"},
            "pipe_schedule='1f1b' needs hops='nccl' where fsdp, expert or context have several devices",
        ),
        ({"mesh": MeshShape(pipe=2, fsdp=2), "pipe_schedule": "uniform-w"}, "fsdp of this mesh split them: use 'uniform'"),
        ({"num_kept": -1}, "num_kept=-1 must be an integer of at least 0"),
        ({"num_kept": 2, "remat": "offload"}, "num_kept=2 needs remat=True, and a mesh without pipe"),
        ({"keep": ("router",), "remat": False}, r"keep=\('router',\) needs remat=True, and a mesh without pipe"),
        ({"num_kept": 2, "mesh": MeshShape(pipe=2)}, "num_kept=2 needs remat=True, and a mesh without pipe"),
        ({"mesh": MeshShape(pipe=3)}, "the 8192 tokens of a micro-batch must be a multiple of mesh.pipe=3"),
        (
            {"config": DEEPSEEK, "mesh": MeshShape(pipe=4)},
            "a micro-batch has 2 rows on a rank of the pipe, not a multiple of mesh.pipe=4: layers of another kind",
        ),
        ({"expert_load_imbalance": float("nan")}, "expert_load_imbalance=nan must be a number of at least 1"),
    ],
)
def test_impossible_steps_are_refused(options, message):
    arguments = {"config": QWEN, "mesh": MeshShape(fsdp=2), "rows": 2, "sequence_length": 4096} | options
    with pytest.raises(ValueError, match=message):
        PlannedStep(**arguments)


def test_asking_takes_no_memory_for_parameters():
    before = len(jax.live_arrays())
    predict(PlannedStep(NAMED_CONFIGS["qwen3-235b-a22b"], MeshShape(fsdp=64), 64, 4096))
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_moments_are_those_of_the_optimizer(optimizer):
    """The predicted number equals the state of `make_optimizer`, without its count of steps."""
    config = replace(NAMED_CONFIGS["qwen3-30b-a3b"], num_hidden_layers=2)
    params = nnx.eval_shape(lambda: nnx.state(from_config(config, rngs=nnx.Rngs(0)), nnx.Param))
    state = jax.eval_shape(make_optimizer(1e-3, name=optimizer).init, params)
    step = PlannedStep(config, MeshShape(), 8, 4096, optimizer=optimizer)
    assert 4 * (sum(x.size for x in jax.tree.leaves(state)) - 1) == round(predict(step).bytes["moments"])


def test_muon_takes_longer_and_less_memory():
    config, mesh = NAMED_CONFIGS["qwen3-30b-a3b"], MeshShape(fsdp=8)
    adamw, muon = (predict(PlannedStep(config, mesh, 64, 4096, optimizer=name)) for name in ("adamw", "muon"))
    assert muon.bytes["moments"] < 0.6 * adamw.bytes["moments"]
    assert muon.seconds["optimizer"] > 2 * adamw.seconds["optimizer"]
    assert "--optimizer muon" in flags(muon.step) and "--optimizer" not in flags(adamw.step)
