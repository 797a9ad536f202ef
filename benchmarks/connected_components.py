"""Tries transfers by peer-to-peer copies in branches and across processes, with and without cliques of connected components.

    python benchmarks/connected_components.py                         # all cases that the GPUs of this host allow
    python benchmarks/connected_components.py --small --seconds 20    # a few cases on CPU devices, as a smoke test

Each case is a job of its own with a time limit, because a deadlock is a possible result. A job has one or two processes with
one or two devices each, in a mesh of `pipe` and `expert`. Rows of `pipe` lie in different processes if there are two. With one
device a row, a transfer along `expert` is a rank's transfer to itself. "either branch" computes with the transfer on ranks of
`pipe` 0 and of `pipe` 1 in different branches of a `cond`; "one branch" has it on ranks of `pipe` 0 alone.

"permutes" counts `collective-permute` in the compiled program, for XLA may remove a transfer to oneself. "by" comes from a
profile: NCCL's kernels, or copies. With the option a clique has the ranks that send to each other, by default all ranks.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.profiler import ProfileData
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moe_jax.commands.launch import LaunchCommand, process_environments
from moe_jax.parallel import initialize_processes
from moe_jax.parallel.collectives.hops import COPIES

OPTION = "xla_gpu_collective_permute_connected_components"
TRANSFERS = ("expert", "pipe", "expert, one branch", "expert, either branch", "pipe, either branch")
SIZE = 1 << 20
"""Numbers in a rank's message."""

AT_ONCE = 5
"""Jobs that run at the same time: nearly all of a job's time is its start."""


class Case(NamedTuple):
    """A job: processes, devices of each, a transfer of `TRANSFERS`, and the option's value."""

    processes: int
    devices: int
    transfer: str
    option: bool


def main() -> None:
    """Prints a row for each case as soon as it and all before it have ended; with --worker runs a process of a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few cases, on CPU devices")
    parser.add_argument("--seconds", type=float, default=60, help="after which a job hangs")
    parser.add_argument("--worker", choices=TRANSFERS, help=argparse.SUPPRESS)
    parser.add_argument("--option", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.option)
        return
    gpus = 0 if args.small else number_of_gpus()
    sizes = [(1, 2), (2, 1)] + ([(1, 4), (2, 2)] if gpus >= 4 else [])
    transfers = TRANSFERS[1:3] if args.small else TRANSFERS
    cases = [Case(*size, transfer, option) for size in sizes for transfer in transfers for option in (False, True)]
    print(f"| processes x {'GPUs' if gpus else 'CPU devices'} | transfer | connected components | permutes | by | result |")
    print("|---|---|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(AT_ONCE if gpus else 1) as pool:
        for case, found in zip(cases, pool.map(lambda case: result_of(case, gpus, args.seconds), cases), strict=True):
            option = "yes" if case.option else "no"
            print(f"| {case.processes} x {case.devices} | {case.transfer} | {option} | {found} |", flush=True)


def number_of_gpus() -> int:
    """Returns the number of this host's GPUs; 0 without any."""
    try:
        return len(process_environments(LaunchCommand(command=("true",)), os.environ))
    except ValueError:
        return 0


def result_of(case: Case, gpus: int, seconds: float) -> str:
    """Runs a case; returns the last three columns of its row."""
    launch = [sys.executable, "-m", "moe_jax.cli", "launch", "--grace-seconds", "5", "--save-seconds", "5"]
    launch += ["--processes", str(case.processes), *([] if gpus else ["--cpu-devices", str(case.devices)])]
    command = [*launch, "--", sys.executable, __file__, "--worker", case.transfer, *(["--option"] if case.option else [])]
    # Jobs share the GPUs, so none may take most of their memory. A GPU hidden from a job starts no context in it.
    shown = ",".join(map(str, range(case.processes * case.devices)))
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | ({"CUDA_VISIBLE_DEVICES": shown} if gpus else {})
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, ended = job.communicate(timeout=seconds)[0], True
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGTERM)
        output, ended = job.communicate()[0], False
    permutes = "/".join(sorted(set(re.findall(r"PERMUTES (\d+)", output))))
    by = "/".join(sorted(set(re.findall(r"BY (\w+)", output))))
    results = re.findall(r"RESULT (ok|wrong values)", output)
    if len(results) == case.processes:
        result = "wrong values" if "wrong values" in results else "ok"
    elif not ended:
        result = f"hang (over {seconds:.0f} s)"
    else:
        errors = [line for line in output.splitlines() if re.search(r"Error|INTERNAL|Check failed|FATAL|^F\d{4}", line)]
        result = (errors or output.splitlines() or ["no output"])[0].replace("|", "/")[:200]
    return f"{permutes} | {by} | {result}"


def work(transfer: str, option: bool) -> None:
    """Runs one transfer twice in this process of the job, compares the values, and profiles the third run."""
    initialize_processes()
    devices = np.array(jax.devices()).reshape(2, -1)
    mesh = Mesh(devices, ("pipe", "expert"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(("pipe", "expert"))
    options = COPIES | ({OPTION: True} if option else {})
    run = jax.jit(jax.shard_map(function_of(transfer), mesh=mesh, in_specs=spec, out_specs=spec), compiler_options=options)
    numbers, sharding = np.arange(1, devices.size + 1, dtype=np.float32), NamedSharding(mesh, spec)
    values = np.broadcast_to(numbers[:, None], (devices.size, SIZE))
    x = jax.make_array_from_callback(values.shape, sharding, values.__getitem__)
    compiled = run.lower(x).compile()
    print("PERMUTES", len(re.findall(r" collective-permute(?:-start)?\(", compiled.as_text() or "")), flush=True)
    wanted = expected(transfer, numbers.reshape(devices.shape)).ravel()
    for _ in range(2):
        y = jax.block_until_ready(compiled(x))
    right = all((np.asarray(part.data) == wanted[part.index[0], None]).all() for part in y.addressable_shards)
    print("RESULT", "ok" if right else "wrong values", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(x))
        planes = [plane for file in Path(folder).rglob("*.xplane.pb") for plane in ProfileData.from_file(str(file)).planes]
        lines = [line for plane in planes if "gpu" in plane.name.lower() for line in plane.lines]
        names = {event.name.lower() for line in lines for event in line.events}
    kinds = {"nccl": "nccl", "memcpy": "copies"}
    print("BY", next((by for name, by in kinds.items() if any(name in event for event in names)), "unknown"), flush=True)


def function_of(transfer: str) -> Callable:
    """Returns the function of one rank."""
    axis, _, branch = transfer.partition(", ")

    def hop(x):
        ranks = lax.axis_size(axis)
        return lax.ppermute(x, axis, [(i, (i + 1) % ranks) for i in range(ranks)])

    def of_rank(x):
        if not branch:
            return hop(x)
        # Different computations around the transfers, or XLA would take them out of the branches as one.
        other = (lambda x: x + 7) if branch == "one branch" else (lambda x: hop(x + 7))
        return lax.cond(lax.axis_index("pipe") == 0, lambda x: hop(x) * 5, other, x)

    return of_rank


def expected(transfer: str, numbers: np.ndarray) -> np.ndarray:
    """Returns the results of all ranks, if a transfer in one branch meets the one in another."""
    axis, _, branch = transfer.partition(", ")
    sent = numbers if not branch else np.stack([numbers[0], numbers[1] + 7])
    arrived = np.roll(sent, 1, axis=("pipe", "expert").index(axis))
    if branch == "one branch":
        arrived[1] = sent[1]
    return arrived if not branch else np.stack([arrived[0] * 5, arrived[1]])


if __name__ == "__main__":
    main()
