"""Writes the table of docs/models.md, the verification card of each family, from the outcomes of its tests.

JAX_PLATFORMS=cpu python -m tests.helpers.models_page
"""

import datetime
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import jax
import peft
import torch
import transformers

import moe_jax
from moe_jax.config import NAMED_CONFIGS
from moe_jax.config.families import FAMILIES
from moe_jax.serving.weights import lacking_parts

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
TESTS = "tests/models/slow/test_families.py", "tests/parallel/eight_devices/test_families_mesh.py"
"""Each file runs in a process of its own: one has eight devices."""
COLUMNS = {
    "logits": ("test_logits_and_gradients_equal_those_of_transformers",),
    "gradients": ("test_logits_and_gradients_equal_those_of_transformers",),
    "adapters": ("test_an_adapter_comes_back_and_peft_reads_it", "test_the_files_of_peft_are_read"),
    "generate": ("test_cached_tokens_are_those_of_one_pass",),
    "export": ("test_files_equal_those_of_transformers",),
    "meshes": ("test_a_step_is_that_of_one_device",),
    "engine": ("test_an_engine_runs_the_modules",),
}
"""The tests that a family must pass for a "yes" in each column."""
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)


def run_tests() -> dict[str, dict[str, bool]]:
    """Runs the tests, and returns {model_type: {test: passed}}."""
    passed: dict[str, dict[str, bool]] = defaultdict(dict)
    for file in TESTS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            command = [sys.executable, "-m", "pytest", "-q", "-k", "not forgotten", f"--junitxml={report}", file]
            # On the command line the empty -m would look like a path, and a process for eight devices has paths of these alone.
            subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTEST_ADDOPTS": "-m ''"})
            for case in ElementTree.parse(report).iter("testcase"):
                test, model_type = re.fullmatch(r"(\w+)\[(\w+).*\]", case.get("name")).groups()
                passed[model_type][test] = len(case) == 0 or {child.tag for child in case} <= {"system-out", "system-err"}
    return passed


def table(passed: dict[str, dict[str, bool]]) -> str:
    """Returns the rows of the page, one for each family, and a line with date and versions."""
    rows = [f"| model_type | published models | {' | '.join(COLUMNS)} | parts that the engine's fused layers lack |"]
    rows.append("|---" * (len(COLUMNS) + 3) + "|")
    for family in FAMILIES:
        named = {name: config for name, config in NAMED_CONFIGS.items() if config.model_type == family.model_type}
        of_family = passed.get(family.model_type, {})
        cells = ["yes" if all(of_family.get(test) for test in tests) else "no" for tests in COLUMNS.values()]
        lacks = (lacking_parts(next(iter(named.values()))) or "").partition(": ")[2]
        cells[-1] = "no" if cells[-1] == "no" else "by modules" if lacks else "fused"
        rows.append(f"| {family.model_type} | {', '.join(named)} | {' | '.join(cells)} | {lacks} |")
    modules = (moe_jax, jax, transformers, peft, torch)
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in modules)
    return "\n".join([*rows, "", f"Made {datetime.datetime.now(datetime.UTC):%Y-%m-%d} with {versions}, on CPUs.", ""])


def main() -> None:
    passed, page = run_tests(), PAGE.read_text()
    PAGE.write_text(TABLE.sub(lambda _: table(passed), page))


if __name__ == "__main__":
    main()
