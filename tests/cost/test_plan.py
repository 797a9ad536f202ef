"""`moe-jax plan`: tries every mesh, lists the meshes that fit, the fastest first, and refuses bad input in one line."""

import json
import math
import re
import subprocess
import sysconfig
from dataclasses import astuple, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.cli import main
from moe_jax.commands.plan import PlanCommand
from moe_jax.config import HUB_IDS, NAMED_CONFIGS, config_to_dict
from moe_jax.cost import PlannedStep, predict
from moe_jax.cost.machine import GPUS
from moe_jax.cost.plan import MICRO_BATCHES, chunk_counts, meshes, plan, rank
from moe_jax.cost.plan_table import KINDS, flags, format_plan, how_to_train
from moe_jax.parallel.choices import MeshShape
from moe_jax.recipes.finetuning.settings import FinetuneSettings

DEEPSEEK = NAMED_CONFIGS["deepseek-v3"]
QWEN = NAMED_CONFIGS["qwen3-30b-a3b"]


@given(st.integers(1, 200))
def test_meshes_are_all_shapes_once(devices):
    shapes = [astuple(mesh) for mesh in meshes(devices)]
    assert len(shapes) == len(set(shapes)) and all(math.prod(shape) == devices for shape in shapes)
    # Powers of primes are dealt out to five axes independently.
    expected, rest = 1, devices
    for prime in range(2, devices + 1):
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        expected *= math.comb(power + 4, 4)
    assert len(shapes) == expected


def test_the_fastest_stands_first_and_all_that_run_are_there():
    """A plan with "offload" appears only if the same step with remat alone does not fit."""
    predictions = plan(QWEN, 8, rows=32, sequence_length=4096)
    seconds = [rank(prediction) for prediction in predictions]
    assert seconds == sorted(seconds)
    assert {prediction.step.mesh for prediction in predictions} == set(meshes(8))
    assert {prediction.step.remat for prediction in predictions} == {True, False, "offload"}
    assert {prediction.step.rows * 4096 / 8 for prediction in predictions} == {32 * 4096 / 8}
    assert all(not predict(replace(p.step, remat=True)).fits for p in predictions if p.step.remat == "offload")
    parts = [part for parts in KINDS.values() for part in parts]
    assert sorted(parts) == sorted(predictions[0].seconds)


def test_each_mesh_keeps_the_residuals_of_as_many_layers_as_fit():
    fitting = [p for p in plan(QWEN, 4, rows=32, sequence_length=4096, hops="copies") if p.fits and p.step.mesh.pipe == 1]
    assert len(fitting) == len({p.step.mesh for p in fitting})
    some = [p for p in fitting if 0 < p.step.num_kept < 48]
    assert some
    for best in some:
        more, fewer = (predict(replace(best.step, num_kept=best.step.num_kept + n)) for n in (1, -1))
        assert not more.fits and fewer.step_seconds > best.step_seconds > more.step_seconds
        assert f"--remat {best.step.num_kept}" in flags(best.step)


def test_kept_layers_lie_between_none_and_all():
    run = PlannedStep(QWEN, MeshShape(fsdp=4), 32, 4096, hops="copies")
    none, one, most, every = (predict(replace(run, num_kept=number)) for number in (0, 1, 47, 48))
    whole = predict(replace(run, remat=False))
    # The residuals of one layer take the place of those that are computed again.
    assert one.memory_bytes == pytest.approx(none.memory_bytes, rel=2e-3)
    assert (every.memory_bytes, every.step_seconds) == (whole.memory_bytes, whole.step_seconds)
    # The second loop gathers its first layer unhidden, so a single kept layer gains nothing.
    assert none.step_seconds > most.step_seconds > every.step_seconds
    assert most.memory_bytes < every.memory_bytes


def test_layer_inputs_go_to_the_host_only_if_nothing_else_fits(capsys):
    command = "plan qwen3-30b-a3b --devices 4 --rows 1 --seq-len 1048576 --param-dtype bfloat16 --moment-dtype bfloat16".split()
    main(command)
    printed = capsys.readouterr().out
    assert "; and 48 of the host's memory for each GPU" in printed and "--offload" in printed
    with pytest.raises(SystemExit) as status:
        main([*command, "--remat", "yes"])
    assert "Nothing fits" in capsys.readouterr().out and status.value.code == 1


@pytest.mark.parametrize(
    "layers, ranks, chunks", [(48, 4, [1, 2, 3, 4, 6]), (48, 32, []), (94, 32, [1, 3]), (61, 1, [1]), (2, 4, [])]
)
def test_chunks_leave_few_places_without_a_layer(layers, ranks, chunks):
    assert chunk_counts(replace(QWEN, num_hidden_layers=layers), ranks) == chunks


def test_a_pipe_stands_first_only_if_faster_by_the_models_error():
    predictions = [p for p in plan(QWEN, 8, rows=64, sequence_length=4096, remat=True, moment_dtype="bfloat16") if p.fits]
    first = next(n for n, p in enumerate(predictions) if p.step.mesh.pipe > 1)
    pipe, behind = predictions[first], predictions[first + 1 :]
    assert all(p.step_seconds <= 1.05 * pipe.step_seconds for p in predictions[:first])
    assert all(p.step_seconds >= 1.05 * pipe.step_seconds for p in behind if p.step.mesh.pipe == 1)
    assert any(p.step_seconds > pipe.step_seconds for p in predictions[:first])


def test_each_mesh_has_its_fastest_number_of_micro_batches():
    found = {(p.step.mesh, p.step.remat): p for p in plan(QWEN, 4, rows=32, sequence_length=4096, moment_dtype="bfloat16")}
    for (mesh, _), best in found.items():
        assert best.step.gradient_accumulation in [number * mesh.pipe for number in MICRO_BATCHES]
        if mesh.expert > 1 or not best.fits:
            continue
        for factor in (1, 2, 4, 8):
            micro_batches = factor * mesh.pipe
            if 32 % (micro_batches * mesh.data * mesh.fsdp) == 0:
                other = predict(replace(best.step, gradient_accumulation=micro_batches))
                assert not other.fits or other.step_seconds >= best.step_seconds


def test_the_table_marks_pipes_and_prints_how_to_train_them(tmp_path, capsys):
    script = tmp_path / "train.sbatch"
    main(f"plan qwen3-235b-a22b --devices 64 --param-dtype bfloat16 --remat yes --limit 200 --sbatch {script}".split())
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if re.match(r" *\d+ ", line)]
    (head,) = (line for line in printed.splitlines() if line.startswith("pipe chunks"))
    assert head.endswith(" never run") and {len(line) for line in (head, *rows)} == {len(head)} and len(head) <= 120
    assert {int(line.split()[0]) > 1 for line in rows} == {True, False}
    assert all(line.split()[-1] == ("hosts+pipe" if int(line.split()[0]) > 1 else "hosts") for line in rows)
    first = "The first needs what was never run on GPUs: a run over several hosts, a pipeline on more than four GPUs.\n"
    assert first in printed
    pipe, chunks, data, fsdp, expert, context, micro_batches = rows[0].split()[:7]
    assert int(pipe) > 1 and "micro-batches" in printed
    (command, behind) = printed.split("moe-jax finetune ")[1].split(" ...", 1)
    assert command.startswith(f"--mesh.pipe {pipe} ") and f" --pipe-chunks {chunks} " in command
    assert f" --gradient-accumulation {micro_batches} " in command
    assert behind.startswith("\n") and "the fastest without a pipe" not in printed and command in script.read_text()


def test_pipes_of_up_to_four_gpus_of_a_host_ran(capsys):
    for devices, mark in ((4, "-"), (8, "pipe")):
        main(f"plan qwen3-30b-a3b --devices {devices} --moment-dtype bfloat16 --remat yes --limit 200".split())
        printed = capsys.readouterr().out
        marks = {line.split()[-1] for line in printed.splitlines() if re.match(r" *[2-8] ", line)}
        assert marks == {mark} and ("The first needs" in printed) == (devices == 8 and "--mesh.pipe" in printed)


def test_a_schedule_of_pipes():
    """Meshes that the schedule refuses are left out, and others do not change. Weight tickets need experts in one call."""
    plain, narrow, wide = (
        {prediction.step.mesh: prediction for prediction in plan(QWEN, 4, rows=32, sequence_length=4096, remat=True, **options)}
        for options in ({}, {"pipe_schedule": "zb-h1"}, {"pipe_schedule": "zb-h1", "capacity_factor": 2.0})
    )
    split = MeshShape(pipe=2, expert=2)
    assert split in plain and split not in narrow and wide.keys() - narrow.keys() == {split}
    assert all(prediction == plain[mesh] for mesh, prediction in narrow.items() if mesh.pipe == 1)
    assert "--pipe-chunks 1 --pipe-schedule zb-h1" in flags(narrow[MeshShape(pipe=4)].step)


def test_experts_before_a_pipe_are_refused():
    """A pipe holds a model's last layers of one kind: only dense layers may come before them."""
    config = replace(QWEN, num_hidden_layers=4, mlp_only_layers=(1,))
    with pytest.raises(ValueError, match="this model has 3 runs of layers, and experts before the last"):
        PlannedStep(config, MeshShape(pipe=2), 8, 4096, gradient_accumulation=4)


def test_a_long_sequence_is_split():
    predictions = plan(QWEN, 8, rows=1, sequence_length=2**20, context_method="all_gather")
    assert {prediction.step.mesh.context for prediction in predictions} == {8}


def test_the_program_prints_the_table_and_how_to_train_so(capsys):
    main("plan qwen3-30b-a3b --devices 4 --rows 32 --param-dtype bfloat16 --moment-dtype bfloat16 --limit 3".split())
    printed = capsys.readouterr().out
    fitting = [p for p in plan(QWEN, 4, rows=32, sequence_length=4096, moment_dtype="bfloat16", hops="copies") if p.fits]
    assert printed.count(" s ") == 3 and f"and {len(fitting) - 3} more that fit" in printed
    assert f"{fitting[0].step_seconds:.3f} s" in printed
    assert f"moe-jax finetune {flags(fitting[0].step)} ..." in printed
    assert "--batch-size 32 --seq-len 4096 " in printed and " --param-dtype bfloat16 --moment-dtype bfloat16 " in printed


def test_long_numbers_widen_their_columns(capsys):
    with pytest.raises(SystemExit):
        main("plan qwen3-30b-a3b --devices 8 --seq-len 1000000000 --remat yes".split())
    head, row = (line for line in capsys.readouterr().out.splitlines() if line.endswith((" -", "never run")))
    # "3.1 s" has a space, and so has the title "never run".
    assert len(row.split()) == len(head.split()) and len(row) == len(head)


@pytest.mark.parametrize(
    "config, devices, rows, remedy",
    [
        (QWEN, 1, 1, "Parameters, moments and gradients alone are 398: use more than 4 devices, or bf16 parameters and "),
        (DEEPSEEK, 96, 96, "Parameters, moments and gradients alone are 278, for 96 devices do not divide the model's matr"),
        (QWEN, 4, 1, "262144 tokens a GPU are too many: use fewer or shorter rows, or more devices."),
    ],
)
def test_if_nothing_fits_the_smallest_is_named_with_a_remedy(config, devices, rows, remedy):
    length = 2**20 if "too many" in remedy else 4096
    printed = format_plan(plan(config, devices, rows=rows, sequence_length=length, remat=True), 10)
    assert printed.startswith("Nothing fits: the smallest needs ")
    assert f" GiB, more than the 132 of an NVIDIA H200. {remedy}" in printed


@pytest.mark.parametrize("devices", [256, pytest.param(2048, marks=pytest.mark.thorough)])
def test_deepseek_v3_trains_on_whole_clusters(devices):
    """Each of 683e9 parameters takes 14 bytes. With few devices along `expert`, tokens do not cross the network."""
    fitting = [p for p in plan(DEEPSEEK, devices, rows=8 * devices, sequence_length=4096, remat=True) if p.fits]
    best, smallest = fitting[0].step, min(p.memory_bytes for p in fitting)
    assert best.mesh.expert in (4, 8) and best.mesh.context == 1
    assert 150e12 < fitting[0].flops_per_second < 400e12
    assert smallest > 14 * 683e9 / devices


def test_the_batch_may_be_named_as_finetune_names_it(capsys):
    printed = []
    for names in ("--rows 8 --sequence-length 1024", "--batch-size 8 --seq-len 1024"):
        main(f"plan qwen3-30b-a3b --devices 4 --moment-dtype bfloat16 {names}".split())
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "8 x 1024 tokens" in printed[0]


def test_hops_are_copies_on_one_host_by_default(capsys):
    """One process has the GPUs of one host alone."""
    options = "--sequence-length 262144 --remat yes --limit 1"
    for devices, asked, hops in ((8, "", "copies"), (8, "--hops nccl", "nccl"), (16, "--rows 2", "nccl")):
        main(f"plan qwen3-30b-a3b --devices {devices} {options} {asked}".split())
        assert f"--hops {hops}" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["all_gather", "ulysses"])
def test_attention_outside_finetune_gets_no_command(method):
    """`finetune` does not compute these methods, so the plan prints the `make_train_step` options."""
    run = PlannedStep(QWEN, MeshShape(expert=2, context=2), 2, 4096, context_method=method)
    printed = how_to_train(run)
    assert f"make_train_step with Parallelism(mesh, context=ContextParallel(method='{method}'))" in printed
    assert how_to_train(replace(run, mesh=MeshShape(expert=4), rows=4)).startswith("moe-jax finetune --mesh.expert 4 ")


def test_options_are_printed_where_they_have_an_effect():
    copies = PlannedStep(QWEN, MeshShape(expert=4), 32, 4096, hops="copies", capacity_factor=4.0)
    assert "--capacity-factor 4 --hops copies" in flags(copies)
    assert "--hops copies" in flags(replace(copies, mesh=MeshShape(fsdp=4)))
    assert "--hops" not in flags(replace(copies, mesh=MeshShape()))
    in_parts = PlannedStep(QWEN, MeshShape(data=2), 2, 4096, shard_optimizer=True)
    assert flags(in_parts).endswith(" --shard-optimizer")
    assert "--shard-optimizer" not in flags(replace(in_parts, mesh=MeshShape(fsdp=2)))


def test_the_program_plans_an_optimizer_in_parts(capsys):
    main("plan qwen3-0.6b --devices 8 --hops nccl --limit 1 --shard-optimizer".split())
    printed = capsys.readouterr().out
    assert "--mesh.data 8" in printed and "--shard-optimizer ..." in printed
    whole = predict(PlannedStep(NAMED_CONFIGS["qwen3-0.6b"], MeshShape(data=8), 64, 4096)).bytes["moments"]
    assert f"moments {whole / 8 / 2**30:.1f}" in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("deepseek-v3 --devices 16 --hops copies", "hops='copies' needs all devices in one process, and a host has 8"),
        ("gpt --devices 4", "no config 'gpt'; give a folder with a config.json, a hub id, or one of qwen3-0.6b"),
        ("qwen3-30b-a3b --devices 0", "devices=0 must be at least 1"),
        ("qwen3-30b-a3b --devices 12", "devices=12 must be a multiple of 8, the GPUs of a host, or less than that"),
        ("qwen3-30b-a3b --devices 8 --hosts-of 0", "hosts_of=0 must be at least 1"),
        ("qwen3-30b-a3b --devices 4 --rows 0", "rows=0 must be an integer of at least 1"),
        ("qwen3-30b-a3b --devices 4 --rows 1 --sequence-length 4097", "must be a multiple of 2 * mesh.context = 8"),
        ("qwen3-30b-a3b --devices 4 --seq-len 1", "--seq-len must be at least 2, as in `moe-jax finetune`; got 1"),
        ("qwen3-30b-a3b --devices 4 --gpu h2", "no GPU 'h2'; choose one of h200, b200, h100"),
        ("qwen3-30b-a3b --devices 4 --memory 0", "memory=0.0 must be a number of GiB above 0"),
        ("qwen3-0.6b --devices 1 --memory 24", "--memory 24 alone tells nothing of a GPU's speed: name one with --gpu. In"),
        ("qwen3-30b-a3b --devices 4 --limit 0", "limit must be at least 1; got 0"),
    ],
)
def test_bad_input_is_one_line_and_status_two(capsys, arguments, message):
    with pytest.raises(SystemExit) as status:
        main(["plan", *arguments.split()])
    error = capsys.readouterr().err
    assert status.value.code == 2 and message in error and error.count("\n") == 1


def test_every_flag_is_one_that_finetune_knows():
    text = flags(plan(QWEN, 8, rows=8, sequence_length=4096, remat=False)[0].step)
    names = [word.removeprefix("--").removeprefix("no-") for word in text.split() if word.startswith("--")]
    known = {name.replace("_", "-") for name in FinetuneSettings.__dataclass_fields__}
    assert all(name.split(".")[0] in known for name in names)


def test_other_gpus_have_their_own_rates_and_memory(capsys):
    """Only GPUs of other architectures than Hopper are predicted too fast; all but the H200 are scaled."""
    printed = {}
    for gpu in ("h200", "h100", "a100", "b200"):
        main(f"plan qwen3-8b --devices 8 --remat yes --limit 1 --gpu {gpu}".split())
        printed[gpu] = capsys.readouterr().out
    assert "8 x NVIDIA A100 80 GB, 64 x 4096 tokens" in printed["a100"]
    assert "A job may use 75.0 of a GPU's 79 GiB; 5% is kept back for CUDA and NCCL." in printed["a100"]
    assert ["scaled by data sheets" in text for text in printed.values()] == [False, True, True, True]
    assert ["a step takes longer than this" in text for text in printed.values()] == [False, False, True, True]
    seconds = [
        plan(NAMED_CONFIGS["qwen3-8b"], 8, rows=64, sequence_length=4096, remat=True, machine=GPUS[gpu])[0].step_seconds
        for gpu in printed
    ]
    assert seconds[3] < seconds[0] < seconds[1] < seconds[2] < 4 * seconds[0]


def test_by_default_a_device_has_32768_tokens(capsys):
    """Hosts are named where there are several."""
    for devices, length, named in (
        (1, 4096, ", 8 x 4096"),
        (8, 2**20, ", 1 x 1048576"),
        (16, 4096, " in hosts of 8, 128 x 4096"),
    ):
        main(f"plan qwen3-0.6b --devices {devices} --seq-len {length} --remat yes --limit 1".split())
        assert f"{devices} x NVIDIA H200{named}" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", GPUS)
def test_data_sheets_are_plausible(gpu):
    """No GPU has the name of another; experts in FP8 run on Hopper alone, in the proportion of bfloat16."""
    machine = GPUS[gpu]
    assert [other.name for other in GPUS.values()].count(machine.name) == 1
    assert 20 < machine.memory / 2**30 < 180 and 0.05 < machine.dense_matmul / GPUS["h200"].dense_matmul < 2.5
    assert (machine.experts_fp8 is not None) == (gpu in ("h200", "h100", "h20"))
    if machine.experts_fp8:
        assert machine.experts_fp8.down / GPUS["h200"].experts_fp8.down == machine.dense_matmul / GPUS["h200"].dense_matmul


def test_a_small_model_fits_one_small_gpu_and_memory_decides(capsys):
    command = "plan qwen3-0.6b --devices 1 --rows 4 --seq-len 2048 --gpu rtx4090"
    main(command.split())
    assert "Train it with: moe-jax finetune --batch-size 4 --seq-len 2048 --param-dtype float32" in capsys.readouterr().out
    with pytest.raises(SystemExit) as status:
        main(f"{command} --memory 0.5".split())
    printed = capsys.readouterr().out
    assert "more than the 0.5 of an NVIDIA RTX 4090 with 0.5 GiB" in printed and status.value.code == 1


def test_a_model_is_named_by_its_hub_id(monkeypatch, tmp_path, capsys):
    """The hub is asked only for models whose shape has no name here, and for no weights."""
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(replace(QWEN, num_hidden_layers=2))))
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: asked.append((name, options)) or tmp_path)
    printed = []
    for name in ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b", "me/small"):
        main(f"plan {name} --devices 4 --moment-dtype bfloat16 --remat yes --limit 1".split())
        printed.append(capsys.readouterr().out.removeprefix(f"{name}, "))
    assert printed[0] == printed[1] != printed[2]
    ((name, options),) = asked
    assert name == "me/small" and "*.safetensors" not in options["allow_patterns"]
    assert set(HUB_IDS.values()) == set(NAMED_CONFIGS)


def test_the_defaults_are_those_of_finetune():
    ours = {field.name: field.default for field in fields(PlanCommand)}
    theirs = {field.name: field.default for field in fields(FinetuneSettings)}
    names = {"param_dtype", "moment_dtype", "capacity_factor", "hops", "shard_optimizer"}
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
    assert ours["sequence_length"] == theirs["seq_len"]


def test_the_batch_script(tmp_path, capsys):
    """The script has the options of docs/many_gpus.md, and bash can parse it. Bad options write no file."""
    script = tmp_path / "train.sbatch"
    main(f"plan qwen3-30b-a3b --devices 16 --remat yes --limit 1 --sbatch {script}".split())
    flags_printed = capsys.readouterr().out.split("moe-jax finetune ")[-1].split(" ...")[0]
    text = script.read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n" in text and f'\n  {flags_printed} "$@" || status=$?\n' in text
    in_docs = (Path(__file__).parents[2] / "docs" / "many_gpus.md").read_text()
    in_docs = in_docs.replace("--nodes=4", "--nodes=2").replace("/shared/moe_jax/.venv/bin", sysconfig.get_path("scripts"))
    assert text in in_docs.replace("--mesh.fsdp 8 --mesh.expert 4 ...", flags_printed)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    main(f"plan qwen3-30b-a3b --devices 4 --moment-dtype bfloat16 --limit 1 --sbatch {script}".split())
    assert "--hops copies" in (text := script.read_text()) and "--ntasks-per-node=1\n#SBATCH --gres=gpu:4\n" in text
    before = set(tmp_path.iterdir())
    for arguments, message in (("--sbatch missing/x", "give a file"), ("--gpu h200 --memory 8 --sbatch x", "nothing fits")):
        with pytest.raises(SystemExit):
            main(f"plan qwen3-30b-a3b --devices 16 --remat yes {arguments}".split())
        assert message in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == before
