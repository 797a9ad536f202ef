"""Sums up the CPU time of each test: a run prints the slowest, and those that are too slow for their folder.

CPU time of a test and of the processes it waited for is the same on a busy machine as on a quiet one; seconds of waiting
are not in it.
"""

import os
from pathlib import Path

import pytest

QUICK = 3.0
"""CPU seconds above which a test belongs in a folder `slow`: `make fast` runs all others."""

PRINTED = 10

_seconds: dict[str, float] = {}
_before = 0.0


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of the child processes that it has waited for."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


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
    return report


def pytest_runtest_logreport(report):
    """Adds up the phases of each test, in the process that the workers report to."""
    # The report of a worker that died has no times.
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0) + getattr(report, "cpu_seconds", 0)


def is_quick(name: str) -> bool:
    """Returns whether `make fast` runs the file of a test."""
    return not {"slow", "eight_devices"} & set(Path(name.split("::")[0]).parts)


def pytest_terminal_summary(terminalreporter):
    """Prints the slowest tests, and tests outside the folders `slow` that took too long."""
    slowest = sorted(_seconds, key=_seconds.get, reverse=True)
    too_slow = [name for name in slowest if _seconds[name] > QUICK and is_quick(name)]
    terminalreporter.write_line(f"{sum(_seconds.values()):.0f} CPU seconds in tests")
    if len(slowest) > PRINTED:
        print_seconds(terminalreporter, "slowest tests", slowest[:PRINTED])
    if too_slow:
        print_seconds(
            terminalreporter, f"over {QUICK:.0f} CPU seconds, and not in a folder `slow` (a first run compiles)", too_slow
        )


def print_seconds(terminalreporter, title: str, names: list[str]) -> None:
    terminalreporter.section(title)
    for name in names:
        terminalreporter.write_line(f"{_seconds[name]:6.1f} s  {name}")
