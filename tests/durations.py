"""Records the CPU time of each test, and marks tests as slow that `durations.json` lists.

CPU time of a test and of the processes it waited for says the same on a busy machine as on a quiet one; seconds of waiting
are not in it. `python tests/durations.py` writes the table anew from `.cache/durations.json`, where each run leaves what it
measured.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / ".cache" / "durations.json"
TABLE = Path(__file__).parent / "durations.json"

SLOW = 1.0
"""CPU seconds from which a test is slow: `make fast` leaves it out."""

STAYS_SLOW = 0.05
"""CPU seconds from which a listed test stays listed: tests that have a sibling in `make fast` may be listed by hand."""

UNLISTED = 3.0
"""CPU seconds from which a run names a test that is neither in the table nor marked."""

_seconds: dict[str, float] = {}
_listed: set[str] = set()
_before = 0.0


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of the child processes that it has waited for."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def pytest_collection_modifyitems(items):
    """Tests that the table lists are slow, unless they are their kernel's smoke test."""
    slow = json.loads(TABLE.read_text())
    for item in items:
        if item.nodeid in slow and not item.get_closest_marker("smoke"):
            item.add_marker("slow")


def pytest_runtest_logstart():
    """A test begins."""
    global _before
    _before = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A phase of a test has ended: its report carries the CPU time since the last one."""
    global _before
    report = yield
    now = cpu_seconds()
    report.cpu_seconds, _before = now - _before, now
    report.is_listed = any(item.get_closest_marker(name) for name in ("slow", "smoke", "thorough"))
    return report


def pytest_runtest_logreport(report):
    """Adds up the phases of each test, in the process that the workers report to."""
    # The report of a worker that died has no times.
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0) + getattr(report, "cpu_seconds", 0)
    if getattr(report, "is_listed", True):
        _listed.add(report.nodeid)


def pytest_terminal_summary(terminalreporter):
    """Keeps the times, and names slow tests that the table does not list."""
    MEASURED.parent.mkdir(exist_ok=True)
    before = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    MEASURED.write_text(json.dumps(before | {name: round(each, 2) for name, each in _seconds.items()}, indent=0) + "\n")
    terminalreporter.write_line(f"{sum(_seconds.values()):.0f} CPU seconds in tests")
    unlisted = {name: each for name, each in _seconds.items() if each > UNLISTED and name not in _listed}
    if unlisted:
        terminalreporter.section("slow tests that tests/durations.json does not list: `python tests/durations.py` adds them")
        for name, each in sorted(unlisted.items(), key=lambda pair: -pair[1]):
            terminalreporter.write_line(f"{each:6.1f} s  {name}")


def write_table() -> None:
    """Writes the slow tests among the tests measured here; entries of tests measured elsewhere stay."""
    measured = json.loads(MEASURED.read_text())
    listed = json.loads(TABLE.read_text())
    seconds, tests = listed | measured, collected()
    limits = {name: STAYS_SLOW if name in listed else SLOW for name in seconds}
    slow = {name: round(each, 1) for name, each in seconds.items() if name in tests and each >= limits[name]}
    TABLE.write_text(json.dumps(dict(sorted(slow.items())), indent=0) + "\n")


def collected() -> set[str]:
    """Returns the ids of all tests. A test that was renamed, or has other parameters now, leaves the table."""
    tests: set[str] = set()
    for folder in ("tests", "tests/parallel/eight_devices"):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", folder]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTEST_ADDOPTS": "-m ''"}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        tests |= {line for line in run.stdout.splitlines() if "::" in line}
    return tests


if __name__ == "__main__":
    write_table()
