"""Predictions of pipes and of micro-batches that overlap: seconds by the formulas of ticks, bytes by slots."""

from dataclasses import replace

import pytest

from moe_jax.config import NAMED_CONFIGS, Qwen3MoeConfig
from moe_jax.cost import PlannedStep, predict
from moe_jax.cost.flops import num_parameters
from moe_jax.cost.layer import vocabulary_seconds
from moe_jax.cost.machine import H200, SHEETS, ring_hop_seconds, scaled
from moe_jax.cost.step import HIDDEN_EXCHANGE, stage_seconds
from moe_jax.parallel.choices import MeshShape

QWEN = NAMED_CONFIGS["qwen3-30b-a3b"]
LARGE = NAMED_CONFIGS["qwen3-235b-a22b"]
DEEPSEEK = NAMED_CONFIGS["deepseek-v3"]
LAYERS = ("experts", "projections", "attention", "elementwise", "kept", "overhead", "exchange", "context", "gathers")
ONE_HOST = {"hops": "copies", "capacity_factor": 8.0, "moment_dtype": "bfloat16"}


def of(config, mesh, rows, micro_batches, chunks, **options) -> PlannedStep:
    return PlannedStep(config, mesh, rows, 4096, gradient_accumulation=micro_batches, pipe_chunks=chunks, **options)


@pytest.mark.parametrize(
    "mesh, rows, micro_batches, chunks, remat, tflops",
    [
        (MeshShape(pipe=4), 32, 8, 6, True, 345),
        (MeshShape(pipe=4), 32, 16, 6, False, 390),
        (MeshShape(pipe=2, expert=2), 32, 8, 8, False, 384),
        (MeshShape(pipe=4, expert=2), 64, 8, 6, True, 342),
        (MeshShape(pipe=8), 64, 16, 6, False, 398),
        (MeshShape(pipe=4, expert=2), 64, 16, 6, False, 381),
    ],
)
def test_a_pipe_takes_the_time_of_its_ticks(mesh, rows, micro_batches, chunks, remat, tflops):
    """By hand: (m v + p - 1) ticks of l layers and two hops, the loss of m / p micro-batches, and AdamW and sums over p.

    That leaves out sums of gradients in f32, and two things which take up to 4 %: the first gather of each chunk, and embedded
    tokens and outputs on their way between ranks.
    """
    step = of(QWEN, mesh, rows, micro_batches, chunks, remat=remat, **ONE_HOST)
    found, ranks = predict(step), mesh.pipe
    both = stage_seconds(step, 0, 10**6, H200)
    layer = (sum(both.forward.values()) + sum(both.backward.values())) / 10**6
    hop = ring_hop_seconds(H200, 2 * step.tokens * 2048, ("pipe",), mesh, copied=True)
    loss = vocabulary_seconds(step.tokens, QWEN.vocab_size, 2048, H200).total(False)
    alone = predict(
        replace(step, mesh=replace(mesh, pipe=1), rows=rows // micro_batches, gradient_accumulation=1, pipe_chunks=1)
    )
    seconds = (micro_batches * chunks + ranks - 1) * (step.layers_of_chunk * layer + 2 * hop)
    seconds += (micro_batches * loss + alone.seconds["optimizer"] + alone.seconds["once a step"]) / ranks
    assert found.flops_per_second * found.step_seconds / seconds == pytest.approx(tflops * 1e12, rel=0.003)
    assert seconds < found.step_seconds - found.seconds["sums"] < 1.04 * seconds
    without = {part: found.seconds[part] for part in ("sums", "gathers", "hops")}
    assert found.step_seconds - sum(without.values()) < seconds


@pytest.mark.parametrize("ranks, chunks, micro_batches", [(2, 1, 4), (4, 6, 8), (8, 3, 32), (4, 2, 4)])
def test_the_bubble_is_that_of_interleaved_1f1b(ranks, chunks, micro_batches):
    """(p - 1)(F + B) / v, of m (F + B) that a rank computes."""
    seconds = predict(of(QWEN, MeshShape(pipe=ranks), 32, micro_batches, chunks)).seconds
    passes = sum(seconds[part] for part in LAYERS)
    assert seconds["bubble"] == pytest.approx((ranks - 1) / (chunks * micro_batches) * passes)


def test_places_without_a_layer_and_holes_are_idle():
    """94 layers in 96 places; 5 micro-batches where 8 would take as long."""
    config = replace(QWEN, num_hidden_layers=94)
    full, padded = (predict(of(replace(QWEN, num_hidden_layers=n), MeshShape(pipe=8), 40, 8, 4)) for n in (96, 94))
    ticks = ("bubble", "hops", *LAYERS)
    assert sum(padded.seconds[part] for part in ticks) == pytest.approx(sum(full.seconds[part] for part in ticks))
    assert padded.seconds["attention"] == pytest.approx(94 / 96 * full.seconds["attention"])
    few = predict(of(config, MeshShape(pipe=8), 40, 5, 4, capacity_factor=8.0))
    assert few.seconds["bubble"] > padded.seconds["bubble"]


@pytest.mark.parametrize("ranks, chunks", [(4, 1), (4, 3), (8, 6), (2, 8)])
def test_a_rank_keeps_the_inputs_of_its_slots(ranks, chunks):
    """(1 + 1 / v) L inputs of a micro-batch, for any p, and two chunks: a slot for no pass, and a copy of one."""
    step = of(QWEN, MeshShape(pipe=ranks), 8 * ranks, 8 * ranks, chunks)
    assert step.slots == (chunks + 1) * ranks
    assert predict(step).bytes["activations"] == pytest.approx((1 + (1 + 2 / ranks) / chunks) * 48 * 4096 * 2048 * 2)


def test_offloaded_slots():
    """The slots, also for passes that do not exist, are in host memory; a chunk comes back before it computes."""
    step = of(QWEN, MeshShape(pipe=4), 32, 32, 3)
    kept, moved = predict(step), predict(replace(step, remat="offload"))
    of_chunk = 4 * step.tokens * 2048 * 2
    assert moved.host_bytes == (step.slots + 1) * of_chunk and kept.host_bytes == 0
    assert kept.bytes["activations"] - moved.bytes["activations"] == (step.slots + 1) * of_chunk
    # 12 layers of 32 micro-batches come back, in place of two copies within the GPU's memory.
    of_layer = of_chunk / 4
    back, within = of_layer / H200.host_link, 4 * of_layer / H200.hbm
    assert moved.seconds["kept"] - kept.seconds["kept"] == pytest.approx(12 * 32 * (back - within))


def test_weights_put_off():
    """The bubble is shorter by p - 1 passes W; p - 1 chunks keep 82 KiB a token and layer (docs/schedules.md)."""
    step = of(QWEN, MeshShape(pipe=4), 32, 32, 3, remat=False)
    plain, put_off = predict(step), predict(replace(step, pipe_schedule="uniform-w"))
    weights = plain.seconds["bubble"] - put_off.seconds["bubble"]
    chunk = stage_seconds(step, 0, step.layers_of_chunk, H200)
    assert 0.3 < weights / 3 / sum(chunk.backward.values()) < 0.55
    assert put_off.bytes["activations"] - plain.bytes["activations"] == 3 * 4 * step.tokens * 82.25 * 1024
    assert {part for part in plain.seconds if plain.seconds[part] != put_off.seconds[part]} == {"bubble"}


@pytest.mark.parametrize(
    "schedule, chunks, seconds, gib, error",
    [
        ("uniform", 2, 0.579, 37.5, 0.04),
        ("1f1b", 1, 0.763, 37.3, 0.04),
        ("dualpipe-v", 2, 0.649, 46.3, 0.10),
        ("dualpipe", 1, 0.668, 62.7, 0.14),
    ],
)
def test_schedules_from_a_table(schedule, chunks, seconds, gib, error):
    """docs/log/parallel.md, "Schedules from a table": two H100, whose rates are scaled from the H200's."""
    run = of(replace(QWEN, num_hidden_layers=8), MeshShape(pipe=2), 16, 8, chunks, hops="copies", moment_dtype="bfloat16")
    found = predict(replace(run, pipe_schedule=schedule), scaled(SHEETS["h100"]))
    assert seconds * (1 - error) < found.step_seconds < seconds
    assert found.memory_bytes / 2**30 == pytest.approx(gib, rel=0.09)


def test_a_pipe_divides_the_state_and_sums_in_f32():
    one, piped = predict(of(QWEN, MeshShape(), 8, 1, 1)), predict(of(QWEN, MeshShape(pipe=4), 8, 4, 1))
    for part in ("parameters", "moments"):
        assert piped.bytes[part] == pytest.approx(one.bytes[part] / 4, rel=1e-6)
    vocabulary = 2 * QWEN.vocab_size * QWEN.hidden_size
    # The sums of the two tables are whole on each rank.
    assert piped.bytes["gradients"] == pytest.approx(4 * ((num_parameters(QWEN) - vocabulary) / 4 + vocabulary), rel=1e-4)
    assert piped.seconds["optimizer"] == pytest.approx(one.seconds["optimizer"] / 4 * 32 / 28, rel=1e-6)


def test_more_places_than_layers_are_stored():
    padded = of(replace(QWEN, num_hidden_layers=47), MeshShape(pipe=4), 8, 4, 3)
    stored = {p.path[-1]: p for p in padded.parameters if p.in_stage}
    assert {p.layers for p in stored.values()} == {12}


def test_overlap_hides_an_exchange_over_nccl_alone():
    for hops, share in HIDDEN_EXCHANGE.items():
        step = of(QWEN, MeshShape(expert=2), 16, 4, 1, hops=hops, capacity_factor=2.0)
        together, in_turn = (predict(replace(step, overlap_micro_batches=overlap)) for overlap in (True, False))
        # Three pairs of passes overlap in four micro-batches.
        assert together.seconds["exchange"] == pytest.approx((1 - share * 3 / 4) * in_turn.seconds["exchange"])
        assert together.seconds["bubble"] == pytest.approx(0, abs=1e-12)
        same = ("experts", "attention", "gathers", "loss")
        assert [together.seconds[part] for part in same] == pytest.approx([in_turn.seconds[part] for part in same])


def test_exchanges_between_hosts_are_not_hidden():
    step = of(QWEN, MeshShape(expert=16), 64, 4, 1)
    together, in_turn = (predict(replace(step, overlap_micro_batches=overlap)) for overlap in (True, False))
    assert step.joins_passes and together.seconds["exchange"] == pytest.approx(in_turn.seconds["exchange"])


def test_micro_batches_overlap_by_default_where_training_does():
    with_experts = of(QWEN, MeshShape(expert=4), 16, 4, 1)
    assert with_experts.joins_passes and not replace(with_experts, remat=False).joins_passes
    assert not replace(with_experts, overlap_micro_batches=False).joins_passes
    assert not replace(with_experts, gradient_accumulation=1, overlap_micro_batches=True).joins_passes
    assert not of(QWEN, MeshShape(fsdp=4), 16, 4, 1).joins_passes


def test_gradient_accumulation_repeats_the_layers():
    whole = predict(of(QWEN, MeshShape(fsdp=4), 4, 1, 1))
    four = predict(of(QWEN, MeshShape(fsdp=4), 16, 4, 1))
    for part in ("experts", "attention", "gathers", "loss", "once a step"):
        assert four.seconds[part] == pytest.approx(4 * whole.seconds[part])
    assert whole.seconds["sums"] == 0 < four.seconds["sums"]
    # Sums of f32 in addition to the gradients of a micro-batch; AdamW reads the sums twice.
    own = sum(p.own_size for p in whole.step.parameters)
    assert four.bytes["gradients"] - whole.bytes["gradients"] == 4 * own
    assert four.seconds["optimizer"] - whole.seconds["optimizer"] == pytest.approx(2 * 2 * own / H200.hbm)
    assert four.tokens_per_second == 4 * 4096 / four.step_seconds


def test_hops_of_a_pipe_go_at_the_rate_of_the_slowest_link():
    """Two hops a pass, and per micro-batch four times all but one part of the hidden states."""
    step = of(LARGE, MeshShape(pipe=4, expert=8), 256, 8, 2)
    machine = replace(H200, latency=0.0, host_latency=0.0)
    size = 2 * step.tokens * LARGE.hidden_size
    passes = 8 * 2 + 3
    assert predict(step, machine).seconds["hops"] == pytest.approx((2 * passes + 4 * 8 * 3 / 4) * size / H200.between_hosts)
    inside = replace(machine, gpus_of_host=32)
    assert predict(step, inside).seconds["hops"] == pytest.approx((2 * passes + 4 * 8 * 3 / 4) * size / H200.ring_hop)


def test_layers_of_another_kind_are_split_by_rows():
    """DeepSeek-V3's dense layers and its module: a rank has its part of the rows, gathers once a step and adds whole sums."""
    plain = DEEPSEEK.without_mtp()
    run = of(plain, MeshShape(pipe=2, expert=8), 128, 8, 1)
    sparse_alone = replace(plain, num_hidden_layers=58, first_k_dense_replace=0)
    whole, without = predict(run), predict(replace(run, config=sparse_alone))
    dense = stage_seconds(run.outside_pipe, 0, 3, H200)
    of_a_micro_batch = dense.forward["attention"] + dense.backward["attention"]
    assert run.outside_pipe.tokens == run.tokens // 2
    assert whole.seconds["attention"] - without.seconds["attention"] == pytest.approx(8 * of_a_micro_batch)
    assert whole.seconds["gathers"] == pytest.approx(without.seconds["gathers"])
    of_dense = sum(p.used_size for p in run.parameters if p.in_stage and p.path[1] == 0)
    assert whole.bytes["gradients"] - without.bytes["gradients"] == 4 * of_dense
    module = predict(replace(run, config=DEEPSEEK))
    assert module.seconds["loss"] == pytest.approx(2 * whole.seconds["loss"])
    assert module.seconds["exchange"] > whole.seconds["exchange"] and module.memory_bytes > whole.memory_bytes


def test_experts_that_stay_in_place_are_added_in_the_kernel():
    """Else every micro-batch would read and write all sums: 8 bytes a parameter."""
    inside = predict(of(QWEN, MeshShape(pipe=4), 64, 4, 1))
    travelling = predict(of(QWEN, MeshShape(pipe=4, fsdp=2), 128, 4, 1))
    experts = 128 * 3 * 2048 * 768 * 12
    assert inside.seconds["sums"] < 0.5 * 4 * 8 * experts / H200.hbm
    assert travelling.seconds["sums"] > 4 * 8 * experts / 2 / H200.hbm


def test_the_last_stage_is_the_pipe():
    mixed = Qwen3MoeConfig(
        num_hidden_layers=9, mlp_only_layers=(0, 1, 2, 3, 4), num_experts=8, num_experts_per_tok=2, vocab_size=512
    )
    step = of(mixed, MeshShape(pipe=2), 8, 2, 1)
    assert step.stages[step.joined_stage].num_layers == 4 and step.layers_of_chunk == 2
    assert all(seconds >= 0 for seconds in predict(step).seconds.values())
    assert all(size >= 0 for size in predict(step).bytes.values())
