"""Every benchmark runs with `--small`, and every command of the pages and of the scripts themselves is one that they accept."""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from moe_jax.kernels.experts import mosaic

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks"
OTHERS = {"harness", "inputs", "moe_layer_peers", "results"}
"""Files of the folder that measure nothing."""
SCRIPTS = {path.stem for path in FOLDER.glob("*.py")} - OTHERS
RECORDS = {"log"}
"""The folder of measurements, some by scripts that have gone."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if not RECORDS & {page.name, page.parent.name}]

COMMAND = re.compile(r"python benchmarks/(\w+)\.py([^`]*?)(?:`| *\n(?!--)| +#|$)")


@pytest.fixture(autouse=True)
def scripts_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    # `moe_layer tables` replaces both.
    monkeypatch.setenv("MOE_JAX_TILES", "")
    monkeypatch.setattr(mosaic, "choose_tile", mosaic.choose_tile)


def results_of(monkeypatch, tmp_path, command):
    """Runs a benchmark in this process; returns the lines of JSON that it writes."""
    script, *options = command.split()
    module = importlib.import_module(script)
    output = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *options, "--small", "--output", str(output)])
    module.main(module.__doc__, module.CASES)
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize(
    ("command", "measured"),
    [
        ("attention paged --kinds decoding", {"us", "tb_per_s", "error"}),
        pytest.param("engine steps --cases 2x8", {"step_ms", "device_ms"}, marks=pytest.mark.thorough),
        ("experts ragged", {"forward_ms", "both_ms", "tflops", "error"}),
        ("few_tokens --tokens 2 --precisions bf16 --layers 1", {"us_a_layer", "floor_us", "error"}),
        pytest.param(
            "grpo",
            {"sample_s", "again_s", "update_s", "wake_s", "tokens_per_s", "compiled", "steady_steps"},
            marks=pytest.mark.thorough,
        ),
        ("moe_layer --here --systems xla", {"fwd_ms", "fwd_bwd_tflops", "kept_mib", "differences"}),
        pytest.param(
            "training_step --routings own --layers 1",
            {"seconds", "tflops_per_gpu", "compile_seconds", "of_ceiling"},
            marks=pytest.mark.thorough,
        ),
        pytest.param("whole_model --here --layers 1", {"forward_s", "backward_s"}, marks=pytest.mark.thorough),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_small_case(monkeypatch, tmp_path, command, measured):
    script = importlib.import_module(command.split()[0])
    monkeypatch.setattr(script, "WARM_UP_SECONDS", 0.0, raising=False)
    rows = results_of(monkeypatch, tmp_path, command)
    assert measured <= set().union(*rows)
    assert {"date", "versions", "command", "case", "device"} <= rows[0].keys()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        "attention",
        "attention paged --kinds windows prompts",
        "attention prefill",
        "engine --load 3 4 2 --prefix 4 2 --count-experts --update --kernels",
        "engine --precision fp8 --cases 2x8",
        "engine --cases 2x8 --adapters 2 --adapter-rank 2 --grammar",
        "engine strict",
        "engine replicas",
        "engine generate",
        "engine first",
        "experts dense",
        "experts sums",
        "few_tokens",
        "grpo curve",
        "grpo --lora-rank 4 --modes exact inexact",
        "grpo --modes exact inexact --prompts 1 --prompt 3 --new 2",
        "moe_layer tables",
        "quality",
        "training_step --lora-rank 4 --routings balanced",
        "training_step dpo",
        "whole_model dense --here",
    ],
)
def test_another_case(monkeypatch, tmp_path, command):
    assert results_of(monkeypatch, tmp_path, command)


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["lora", "balance"])
def test_a_picture(monkeypatch, tmp_path, case):
    assert results_of(monkeypatch, tmp_path, f"quality {case} --folder {tmp_path} --plot {tmp_path}/curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.mark.thorough
def test_children_report_to_their_parent(monkeypatch, tmp_path):
    rows = results_of(monkeypatch, tmp_path, "moe_layer --systems xla tokamax")
    assert [row["system"] for row in rows] == ["dense matmul", "xla", "tokamax"]
    assert rows[1]["of_ceiling"] > 0 and "fwd_ms" not in rows[2] and rows[2]["note"]


def test_a_failure_ends_with_status_1(monkeypatch, capsys, tmp_path):
    harness = importlib.import_module("harness")

    class Failing(harness.Case):
        def results(self):
            yield {"what": "first", "ms": 1.5, "failure": "differs"}
            yield {"what": "second", "ms": 2.0}

    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(SystemExit) as ended:
        harness.main(None, {"only": Failing})
    assert ended.value.code == 1
    assert [line.split() for line in capsys.readouterr().out.splitlines()[-3:]] == [
        ["what", "ms"],
        ["first", "1.5", "differs"],
        ["second", "2"],
    ]


def test_a_switch_has_three_values():
    harness, script = (importlib.import_module(name) for name in ("harness", "training_step"))
    for arguments, wanted in (([], None), (["--overlap"], True), (["--no-overlap"], False)):
        assert harness.parse(arguments, None, script.CASES)[1].overlap is wanted


def test_a_process_of_its_own_gets_all_options():
    harness, script = (importlib.import_module(name) for name in ("harness", "training_step"))
    case = script.Step(overlap=False, mesh=("fsdp=2", "expert=2"), remat=False, lora_rank=4)
    assert harness.parse(["step", *harness.arguments_of(case)], None, script.CASES) == ("step", case)


def test_options_of_the_command_line_win_over_small_ones():
    harness, attention = (importlib.import_module(name) for name in ("harness", "attention"))
    name, case = harness.parse(["paged", "--small", "--heads", "8"], None, attention.CASES)
    assert (name, case.heads, case.kv_heads, case.head_dim) == ("paged", 8, 2, 128)
    assert harness.parse(["--launches", "3"], None, attention.CASES)[0] == "training"


def commands():
    """Yields (file, script, arguments) of each command in the pages and in the scripts' docstrings."""
    for path in [*PAGES, *sorted(FOLDER.glob("*.py"))]:
        for script, arguments in COMMAND.findall(re.sub(r"\\+\n *", "", path.read_text())):
            yield path.name, script, shlex.split(arguments)


def test_commands_name_scripts_and_their_options():
    harness = importlib.import_module("harness")
    found = [command for command in commands() if command[1] not in OTHERS]
    assert {script for _, script, _ in found} == SCRIPTS
    for file, script, arguments in found:
        cases = importlib.import_module(script).CASES
        try:
            harness.parse(arguments, None, cases)
        except SystemExit:
            pytest.fail(f"{file}: `python benchmarks/{script}.py {' '.join(arguments)}` is refused")


def test_pages_name_scripts_that_exist():
    for page in PAGES:
        names = set(re.findall(r"benchmarks/(\w+)\.py", page.read_text())) - OTHERS
        assert names <= SCRIPTS, f"{page.name} names benchmarks that do not exist: {names - SCRIPTS}"
