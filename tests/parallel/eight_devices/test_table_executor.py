"""Schedules that run from a table: value, aux, statistics and every gradient of a step equal one device's."""

from dataclasses import replace

import pytest
from flax import nnx

from moe_jax.parallel import ExpertParallel, Parallelism
from moe_jax.parallel.sequence.attention import ContextParallel
from moe_jax.train import make_optimizer, make_train_step
from moe_jax.train.pipelined import check_branches, schedule_of
from tests.helpers import tiny
from tests.helpers.meshes import mesh_of
from tests.helpers.train_steps import weighted
from tests.parallel.eight_devices.test_pipelined import compare, tied, with_layers

CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}


ONE_ROUND = dict(capacity_factor=2)
"""Two devices' experts compute all tokens in one call of the kernels."""


def parallelism_of(name, transport="all_to_all", method="all_gather", capacity_factor=1.25, **sizes):
    mesh = mesh_of(**sizes)
    settings = ExpertParallel(transport=transport, capacity_factor=capacity_factor), ContextParallel(method=method)
    return Parallelism(mesh, *settings, pipe_chunks=CHUNKS.get(name, 1), pipe_schedule=name)


@pytest.mark.parametrize(
    "name, make_model, layers, sizes, micro_batches, remat",
    [
        ("zb-v", tiny.dense, 3, dict(pipe=2), 4, False),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("1f1b", tiny.biased_model, 3, dict(pipe=2, fsdp=2, context=2), 4, False),
                ("1f1b", tiny.model, 4, dict(pipe=4, expert=2), 2, True),
                ("interleaved", tiny.model, 7, dict(pipe=4, data=2), 4, False),
                ("zb-h1", tiny.model, 4, dict(pipe=4), 8, True),
                ("zb-h1", tiny.model, 3, dict(pipe=2, expert=2, data=2, transport="gather", **ONE_ROUND), 2, False),
                ("zb-v", tied, 4, dict(pipe=2), 4, True),
                ("zb-v", tiny.biased_model, 8, dict(pipe=4), 8, True),
                ("zb-v", tiny.biased_model, 3, dict(pipe=2, expert=2, **ONE_ROUND), 4, False),
                ("dualpipe", tiny.biased_model, 3, dict(pipe=4), 8, False),
                ("dualpipe", tiny.model, 4, dict(pipe=2, fsdp=2, context=2), 4, False),
                ("dualpipe", tiny.model, 3, dict(pipe=2, expert=2, **ONE_ROUND), 4, True),
                ("dualpipe-v", tiny.model, 7, dict(pipe=4), 8, False),
                ("dualpipe-v", tiny.model, 4, dict(pipe=2, expert=2), 4, True),
                ("uniform-w", tiny.model, 3, dict(pipe=2, expert=2, **ONE_ROUND), 4, True),
            )
        ),
    ],
)
def test_gradients(name, make_model, layers, sizes, micro_batches, remat):
    compare(with_layers(make_model, layers), layers, parallelism_of(name, **sizes), micro_batches, remat)


@pytest.mark.thorough
@pytest.mark.parametrize("name, sizes", [("dualpipe", dict(pipe=2)), ("zb-v", dict(pipe=2, data=2))])
def test_dense_first_layers_and_further_tokens(name, sizes):
    """The pipe holds the four layers with experts, of five, and labels have weights."""
    compare(tiny.deepseek(mtp=1, layers=5), 4, parallelism_of(name, **sizes), 4, True, prepare=weighted)


def step_of(name, micro_batches=4, remat=True, **settings):
    options = dict(gradient_accumulation=micro_batches, remat=remat, parallelism=parallelism_of(name, **settings))
    make_train_step(nnx.graphdef(tiny.model()), make_optimizer(1e-3), **options)


@pytest.mark.parametrize(
    "refused, message",
    [
        (dict(name="1f1b", transport="pairwise", pipe=2, expert=2), "the transport 'pairwise' would wait for ranks that never"),
        (dict(name="dualpipe", method="ring", pipe=2, context=2), "the method 'ring' would wait for ranks that never send"),
        (dict(name="zb-h1", pipe=2, fsdp=2), "'zb-h1' divides the backward pass, for which each rank must hold whole matrices"),
        (dict(name="uniform-w", pipe=2, fsdp=2), "fsdp of this mesh split them: use 'uniform'"),
        (dict(name="zb-v", pipe=2, expert=2, fsdp=2), "fsdp, expert of this mesh split them: use '1f1b', 'interleaved', 'dua"),
        (
            dict(name="zb-h1", pipe=2, expert=2),
            "use '1f1b', .*, or let experts compute in one call .weight tickets hold the operands of one call",
        ),
        (dict(name="uniform-w", pipe=2, expert=2, transport="pairwise", **ONE_ROUND), "expert of this mesh split them: use"),
        (dict(name="dualpipe", pipe=2, micro_batches=2), "micro_batches must be at least 2 \\* ranks = 4 for DualPipe; got 2"),
        (dict(name="dualpipe", pipe=3), "pipe_schedule='dualpipe' needs an even number of ranks, for it starts at both"),
        (
            dict(name="1f1b", pipe=2, remat="offload"),
            "remat='offload' needs pipe_schedule='uniform': slots of '1f1b' stay in the GPU's memory",
        ),
        (dict(name="1f1b", data=2), "pipe_schedule='1f1b' needs several devices along the mesh axis pipe"),
        (dict(name="gpipe", pipe=2), "pipe_schedule='gpipe' must be one of uniform, uniform-w, 1f1b, interleaved, zb-h1, zb-v"),
    ],
)
def test_refusals(refused, message):
    with pytest.raises(ValueError, match=message):
        step_of(**refused)


def test_refused_chunks():
    with pytest.raises(ValueError, match="pipe_schedule='zb-v' needs pipe_chunks=2; got 1"):
        Parallelism(mesh_of(pipe=2), pipe_schedule="zb-v")


def test_divided_where_matrices_are_whole():
    """DualPipe divides its backward passes, unless the mesh splits matrices, or experts that compute in several calls."""
    for sizes, kinds in (
        (dict(pipe=4, data=2), "FBbW"),
        (dict(pipe=4, fsdp=2), "FB"),
        (dict(pipe=4, expert=2), "FB"),
        (dict(pipe=4, expert=2, **ONE_ROUND), "FBbW"),
    ):
        schedule = schedule_of(parallelism_of("dualpipe", **sizes), 8)
        assert {part.kind for slots in schedule.ranks for slot in slots for part in slot} == set(kinds)


def test_refused_copies(monkeypatch):
    """Peer-to-peer copies are refused inside the layers alone: hops of the pipe itself are the same on all ranks."""
    monkeypatch.setattr("moe_jax.parallel.parallelism.check_hops", lambda hops, mesh: None)
    check_branches(replace(parallelism_of("dualpipe", pipe=2, data=2), hops="copies"))
    with pytest.raises(ValueError, match="hops='copies' inside the layers would wait for ranks that never send"):
        check_branches(replace(parallelism_of("dualpipe", pipe=2, fsdp=2), hops="copies"))
