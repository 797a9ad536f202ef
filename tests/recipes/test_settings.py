"""Settings that make no sense are refused, all of them at once."""

from typing import get_args

import pytest

from moe_jax.adapters.settings import LoraSettings
from moe_jax.kernels.experts.fp8.precision import RECIPES
from moe_jax.models.precision import PrecisionName
from moe_jax.parallel.choices import MeshShape
from tests.helpers.tiny import settings


def test_all_wrong_settings_are_named_at_once(tmp_path):
    wrong = dict(steps=0, batch_size=-3, dtype="int8", learning_rate=0.0, data_format="csv", shadow_experts=-1)
    with pytest.raises(ValueError) as error:
        settings(tmp_path, **wrong, capacity_factor=0)
    for name, value in (wrong | {"capacity_factor": 0}).items():
        assert f"{name}={value!r}" in str(error.value)
    with pytest.raises(ValueError, match="batch_size=4 must be a multiple of gradient_accumulation=3"):
        settings(tmp_path, gradient_accumulation=3)
    with pytest.raises(ValueError, match="offload=0 must be True or False; remat='yes' must be True, False, 'auto' or an int"):
        settings(tmp_path, remat="yes", offload=0)
    with pytest.raises(ValueError, match="remat=-1 must be True, False, 'auto' or an integer of at least 0, with any parts"):
        settings(tmp_path, remat=-1)
    with pytest.raises(ValueError, match="offload=True and remat=3 exclude each other"):
        settings(tmp_path, remat=3, offload=True)
    with pytest.raises(ValueError, match="remat=3 needs a mesh without pipe: give remat=True or remat=False"):
        settings(tmp_path, remat=3, mesh=MeshShape(pipe=2), gradient_accumulation=2)
    with pytest.raises(ValueError, match="offload=True needs remat"):
        settings(tmp_path, offload=True, remat=False)
    for name in ("data", "eval_data"):
        with pytest.raises(ValueError, match=f"output='.*texts/run' must be outside of {name}='.*texts', or"):
            settings(tmp_path, **{name: str(tmp_path / "texts"), "output": str(tmp_path / "texts" / "run")})
    with pytest.raises(ValueError, match="warmup_steps=31 must not exceed steps=30"):
        settings(tmp_path, warmup_steps=31)


@pytest.mark.parametrize("name", ["model", "tokenizer"])
def test_a_model_that_the_run_would_replace_is_refused(tmp_path, name):
    for place in ("run/model", "run/model/base", "run", "run/initial"):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / "link").symlink_to(tmp_path / "run" / "model")
    for place in ("run/model", "run/model/base", "run", "link"):
        with pytest.raises(ValueError, match=f"{name}='.*{place}' must be outside of output='.*run', where the run writes its"):
            settings(tmp_path, **{name: str(tmp_path / place)})
    settings(tmp_path, **{name: str(tmp_path / "run" / "initial")})


def test_precisions(tmp_path):
    with pytest.raises(ValueError, match="precision='int8' must be one of 'bf16', 'fp8', 'fp8_kept'"):
        settings(tmp_path, precision="int8")
    with pytest.raises(ValueError, match="precision='fp8' needs dtype='bfloat16'"):
        settings(tmp_path, precision="fp8")
    options = dict(precision="fp8", dtype="bfloat16")
    pipe = dict(mesh=MeshShape(pipe=2), gradient_accumulation=2)
    with pytest.raises(ValueError, match="precision='fp8' needs pipe_schedule='uniform': 'zb-h1' holds operands in bf16"):
        settings(tmp_path, **options, **pipe, pipe_schedule="zb-h1")
    settings(tmp_path, **options, **pipe)
    settings(tmp_path, **options, mesh=MeshShape(expert=2))
    with pytest.raises(ValueError, match="round the frozen experts again in each pass: give weights='fp8'"):
        settings(tmp_path, **options, lora=LoraSettings(rank=4))
    settings(tmp_path, **options, lora=LoraSettings(rank=4), weights="fp8")
    with pytest.raises(ValueError, match="tokens_in_fp8=True needs experts that multiply in FP8: .*; got 'bf16'"):
        settings(tmp_path, tokens_in_fp8=True, mesh=MeshShape(expert=2))
    settings(tmp_path, **options, tokens_in_fp8=True, mesh=MeshShape(expert=2))
    settings(tmp_path, **options, fp8_dense=("attention", "mlp"))
    with pytest.raises(ValueError, match="fp8_dense='head' must be one of 'attention', 'shared_experts', 'mlp'"):
        settings(tmp_path, **options, fp8_dense=("head",))
    with pytest.raises(ValueError, match=r"fp8_dense='mlp' must be a tuple of groups, as \('attention',\)"):
        settings(tmp_path, **options, fp8_dense="mlp")
    with pytest.raises(ValueError, match="fp8_dense needs experts in FP8: give precision='fp8'"):
        settings(tmp_path, fp8_dense=("attention",))
    assert get_args(PrecisionName) == RECIPES


def test_overlapping_micro_batches_need_several_and_a_mesh(tmp_path):
    needs = "overlap_micro_batches=True needs gradient_accumulation of at least 2 and a mesh of several devices"
    for options in ({}, {"gradient_accumulation": 2}, {"mesh": MeshShape(expert=2)}):
        with pytest.raises(ValueError, match=needs):
            settings(tmp_path, overlap_micro_batches=True, **options)
    settings(tmp_path, overlap_micro_batches=True, gradient_accumulation=2, mesh=MeshShape(expert=2))
    with pytest.raises(ValueError, match="overlap_micro_batches='no' must be True, False or None"):
        settings(tmp_path, overlap_micro_batches="no")


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(gradient_accumulation=1), "mesh.pipe=2 needs a gradient_accumulation of 2 or more: with one micro-batch all"),
        (dict(pipe_schedule="zb-v"), "pipe_schedule='zb-v' needs pipe_chunks=2; got 1"),
        (
            dict(pipe_schedule="dualpipe", gradient_accumulation=2),
            "pipe_schedule='dualpipe': micro_batches must be at least 2 ",
        ),
        (dict(pipe_schedule="uniform-w", mesh=MeshShape(pipe=2, fsdp=2)), "fsdp of this mesh split them: use 'uniform'"),
        (
            dict(pipe_schedule="zb-h1", mesh=MeshShape(pipe=2, expert=2)),
            "expert of this mesh split them: use '1f1b', .*, or let experts compute in one call .weight tickets hold the "
            "operands of one call of the kernels: use drop, or a capacity_factor of at least the number of devices, with",
        ),
        (
            dict(pipe_schedule="uniform-w", mesh=MeshShape(pipe=2, expert=2), capacity_factor=2.0, shadow_experts=1),
            "with transport 'all_to_all' or 'gather' .hops='nccl'. and shadow_experts=0",
        ),
        (
            dict(pipe_schedule="uniform-w", mesh=MeshShape(pipe=2, expert=2), capacity_factor=2.0, hops="copies"),
            "with transport 'all_to_all' or 'gather' .hops='nccl'. and shadow_experts=0",
        ),
        (
            dict(pipe_schedule="1f1b", offload=True),
            "offload=True needs pipe_schedule='uniform': slots of '1f1b' stay in the GPU",
        ),
        (dict(pipe_schedule="1f1b", mesh=MeshShape()), "pipe_schedule='1f1b' needs several devices along the mesh axis pipe"),
        (dict(rebalance_every=3), "rebalance_every=3 needs a mesh without pipe: experts cannot change places in one yet"),
        (dict(pipe_chunks=0), "pipe_chunks=0 must be an integer of at least 1"),
        (dict(pipe_chunks=2, mesh=MeshShape(fsdp=2)), "pipe_chunks=2 needs a mesh.pipe of 2 or more"),
    ],
)
def test_what_a_pipe_cannot_do_is_refused(tmp_path, changes, message):
    fits = dict(mesh=MeshShape(pipe=2, fsdp=2), gradient_accumulation=2, pipe_chunks=1)
    settings(tmp_path, **fits)
    if "eval_data" in changes:
        changes = changes | {"eval_data": str(tmp_path)}
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **fits | changes)


def test_rows_are_not_dealt_out_to_the_ranks_of_a_pipe(tmp_path):
    settings(tmp_path, mesh=MeshShape(pipe=4, fsdp=2), batch_size=4, gradient_accumulation=2)
    with pytest.raises(ValueError, match="a micro-batch of 1 rows cannot be divided among data x fsdp x expert = 2 devices"):
        settings(tmp_path, mesh=MeshShape(pipe=4, fsdp=2), batch_size=4, gradient_accumulation=4)


def test_epochs_take_the_place_of_steps(tmp_path):
    with pytest.raises(ValueError, match="epochs=2 and steps=30 exclude each other"):
        settings(tmp_path, epochs=2)
    with pytest.raises(ValueError, match="epochs=0 must be a number greater than 0"):
        settings(tmp_path, epochs=0, steps=1000)


def test_a_chat_template_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="chat_template='none.jinja' is no file; give a Jinja file, or one of chatml, deepseek-v3, "
    ):
        settings(tmp_path, chat_template="none.jinja")


def test_forced_routing_excludes_rebalancing(tmp_path):
    with pytest.raises(ValueError, match="rebalance_every needs the router's own choices"):
        settings(tmp_path, rebalance_every=1, force_balanced_routing=True)


def test_a_missing_package_is_named_before_anything_happens(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tensorboard=True needs the package tensorboardX"):
        settings(tmp_path, tensorboard=True)
