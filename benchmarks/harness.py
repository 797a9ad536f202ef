"""Options, timing, memory and rows: what all scripts of this folder share.

A script has cases. A case is a dataclass whose fields are the options of the command line and whose `results` measures:

    python benchmarks/attention.py                                  # the first case
    python benchmarks/attention.py paged --heads 16                 # another one
    python benchmarks/attention.py paged --small                    # sizes for a CPU, as a smoke test
    python benchmarks/attention.py paged --output results.jsonl     # also appends each row as a line of JSON

Rows are printed as soon as they are measured. A line of JSON also has the date, the device, the versions and the command. If a
row has a `failure`, the other measurements continue, and the process exits with 1 at its end.
"""

import collections
import dataclasses
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.profiler import ProfileData

PACKAGES = ("jax", "jaxlib", "torch", "triton", "transformers", "trl", "sonic-moe", "quack-kernels", "tokamax")
FACTS = ("date", "versions", "command", "case")
"""Keys of a line of JSON that `main` adds to each row. It adds the device too, unless the row names one."""

GIB = 2**30


@dataclass(kw_only=True)
class Case:
    """A measurement and its options."""

    small: bool = False  # sizes for a CPU, as a smoke test
    output: Path | None = None  # a file: appends a line of JSON for each row

    SMALL: ClassVar[dict[str, Any]] = {}
    """Values of options with `--small`, unless the command line names them."""
    COLUMNS: ClassVar[tuple[str, ...]] = ()
    """Keys of a row that are printed; all of them if empty."""
    HAS_CHILDREN: ClassVar[bool] = False
    """True for a case that measures in processes of its own: it must not occupy the device's memory."""

    def start(self) -> None:
        """Prepares the process before it looks at its devices; refuses options that do not fit."""

    def results(self) -> Iterator[dict[str, Any]]:
        """Yields a row for each measurement."""
        raise NotImplementedError


def one_of(names) -> Any:
    """Returns the type of an option that is one of these names."""
    return Literal[tuple(names)]


def parse(arguments: list[str], description: str | None, cases: dict[str, type[Case]]) -> tuple[str, Case]:
    """Returns the case that the arguments name, or the first one, with its options."""
    name = arguments[0] if arguments and arguments[0] in cases else next(iter(cases))
    arguments = arguments[1:] if arguments and arguments[0] in cases else arguments
    of_case = cases[name]
    for field in dataclasses.fields(of_case):
        if field.type == bool | None:  # A switch with a third value, its absence.
            option = field.name.replace("_", "-")
            words = {f"--{option}": (f"--{option}", "True"), f"--no-{option}": (f"--{option}", "False")}
            arguments = [word for each in arguments for word in words.get(each, (each,))]
    default = of_case(**of_case.SMALL, small=True) if "--small" in arguments else of_case()
    prog = f"python {sys.argv[0]} {'|'.join(cases)}"
    return name, tyro.cli(of_case, args=arguments, default=default, description=description, prog=prog)


def main(description: str | None, cases: dict[str, type[Case]]) -> None:
    """Runs the case that the command line names, prints its rows, and with `--output` also appends them to a file."""
    name, case = parse(sys.argv[1:], description, cases)
    case.start()
    facts = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "versions": {package: found for package in PACKAGES if (found := _version(package))},
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "case": name,
    }
    device = {} if case.HAS_CHILDREN else {"device": jax.devices()[0].device_kind}
    is_first = case.HAS_CHILDREN or jax.process_index() == 0
    versions = ", ".join(f"{package} {found}" for package, found in facts["versions"].items())
    if is_first:
        print(f"{facts['date']}: {facts['command']}\n{', '.join([*device.values(), versions])}", flush=True)
    widths: dict[str, int] = {}
    failed = False
    for row in case.results():
        failed |= "failure" in row
        if not is_first:
            continue
        columns = case.COLUMNS or tuple(key for key in row if key not in ("failure", "note", "device"))
        widths = _show(row, columns, widths)
        if case.output is not None:
            with case.output.open("a") as file:
                file.write(json.dumps(facts | device | row, default=str) + "\n")
    if failed:
        sys.exit(1)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _show(row: dict, columns: tuple[str, ...], widths: dict[str, int]) -> dict[str, int]:
    """Prints a row, after titles if `widths` are of other columns; returns the widths of its columns."""
    cells = {name: _text(row.get(name)) for name in columns}
    if tuple(widths) != columns:
        widths = {name: max(len(name), len(cell) + 4 * isinstance(row.get(name), str), 9) for name, cell in cells.items()}
        print("\n" + " ".join(f"{name:>{width}}" for name, width in widths.items()))
    line = " ".join(f"{cell:>{widths[name]}}" for name, cell in cells.items())
    print("  ".join([line, *(str(row[key]) for key in ("note", "failure") if row.get(key))]), flush=True)
    return widths


def _text(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    return " ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)


def reason(error: Exception) -> str:
    """Returns the type and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:160]


def in_a_process(
    script: str | Path, name: str, case: Case, *, timeout: float | None = None, **variables: str
) -> tuple[list[dict], str]:
    """Runs a case in a process of its own; returns its rows, and how the process ended if it failed, else "".

    Args:
        variables: variables of the process's environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.jsonl"
        command = [sys.executable, str(script), name, *arguments_of(dataclasses.replace(case, output=output))]
        try:
            child = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ | variables)
            last = "".join(child.stderr.strip().splitlines()[-1:])
            problem = f"ended with status {child.returncode}: {last}"[:160] if child.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"not done in {timeout:.0f} s"
        rows = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    return [{key: value for key, value in row.items() if key not in FACTS} for row in rows], problem


def arguments_of(case: Case) -> list[str]:
    """Returns the command line of a case."""
    arguments = []
    for field in dataclasses.fields(case):
        value, option = getattr(case, field.name), field.name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            arguments += [f"--{option}", *map(str, value if isinstance(value, tuple) else [value])]
    return arguments


def median_ms(f: Callable, arguments: tuple, launches: int, *, groups: int = 5, warm_up: int = 3) -> float:
    """Returns the milliseconds of a call: the median of groups of `launches` calls between two synchronisations."""
    for _ in range(warm_up):
        jax.block_until_ready(f(*arguments))
    seconds = []
    for _ in range(groups):
        began = time.perf_counter()
        for _ in range(launches):
            result = f(*arguments)
        jax.block_until_ready(result)
        seconds.append((time.perf_counter() - began) / launches)
    return 1e3 * statistics.median(seconds)


def median_s(call: Callable, repeats: int, *, warm_up: int = 1) -> float:
    """Returns the median seconds of calls, one after the other, after some that are not counted."""
    return statistics.median([timed(call)[0] for _ in range(warm_up + repeats)][warm_up:])


def timed(call: Callable) -> tuple[float, Any]:
    """Returns the seconds of a call until its result is ready, and the result."""
    began = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - began, result


def microseconds_of_kernels(launch: Callable, result: Callable, calls: int = 3) -> collections.Counter[str]:
    """Returns the time of a step's kernels by name, by the profiler. `result` returns what launches leave."""

    def run() -> None:
        for _ in range(calls):
            launch()
        jax.block_until_ready(result())

    microseconds = collections.Counter[str]()
    for events in events_of_gpus(run)[:1]:
        for event in events:
            microseconds[re.sub(r"[._]\d+$", "", event.name)[:60]] += event.duration_ns / 1e3 / calls
    return microseconds


def events_of_gpus(run: Callable) -> list[list[Any]]:
    """Returns the kernels and copies that each GPU executes during a call, as events of the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        planes = [plane for file in Path(folder).rglob("*.xplane.pb") for plane in ProfileData.from_file(str(file)).planes]
    of_gpus = sorted((plane for plane in planes if plane.name.startswith("/device:GPU:")), key=lambda plane: plane.name)
    return [[event for line in gpu.lines if line.name.startswith("Stream") for event in line.events] for gpu in of_gpus]


def compiled(function: Callable, *arguments, **options) -> tuple[jax.stages.Compiled, float]:
    """Returns the compiled program, and the seconds of tracing and compiling it. Options are as for `jax.jit`."""
    began = time.perf_counter()
    program = jax.jit(function, **options).lower(*arguments).compile()
    return program, time.perf_counter() - began


def program_gib(program: jax.stages.Compiled) -> float | None:
    """Returns the GiB of arguments, results and temporaries by the compiler's account; None if it has none."""
    found = program.memory_analysis()
    if found is None:
        return None
    total = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return (total - found.alias_size_in_bytes) / GIB


def peak_gib() -> float:
    """Returns the largest memory in use so far on the first device of this process; 0 on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / GIB


@jax.jit
def relative_error(found, expected):
    """Returns |found - expected| / |expected| in the Frobenius norm, in f32."""
    found, expected = (a.astype(jnp.float32).reshape(-1) for a in (found, expected))
    return jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
