"""Strict steps compiled for an H200 spill no registers, and XLA multiplies and sums nothing in them."""

import re

import pytest
from h200 import needs_compiler, run_script
from test_step_kernels import SCRIPT

pytestmark = needs_compiler

COMPILED = (
    SCRIPT.split("def kernels")[0]
    .replace("served.append(apart[0])", "served.append(apart[0]._replace(strict=True))")
    .replace("def compiled(layers, rows):", "def compiled(layers, shape):")
    .replace("shape = StepShape(rows, 0, 0, MAX_PAGES)", "")
)

SUMS = r"""
for shape in (StepShape(int(sys.argv[1]), 0, 0, MAX_PAGES), StepShape(16, 1024, 4, MAX_PAGES)):
    text = compiled(2, shape).as_text()
    print("sums:", re.findall(r"= (?:bf16|f32)\S* (?:dot|reduce)\(|__cublas\S+|__triton_gemm", text))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("rows", [1, 256])
def test_strict_steps(rows):
    report = run_script(COMPILED + SUMS, rows)
    assert re.findall(r"sums: (.*)", report) == ["[]"] * 2
    assert set(re.findall(r"(\d+) bytes spill stores", report)) == {"0"}
