"""`moe-jax launch`: starts a program once for each GPU of this host, as one job.

Each process gets the variables that `runtime.processes.initialize_processes` reads. Its output is printed line by line,
prefixed by its number. If a process fails, the launcher ends the others, which would wait for it, and exits with its status.
"""

import itertools
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

import tyro

from moe_jax.runtime import environment as xla

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SECONDS_UNTIL_A_SIGNAL_IS_SEEN = 1.0

CHATTER = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\..*")
"""Status lines of a library, many for each process; no setting silences them."""


@dataclass(frozen=True)
class LaunchCommand:
    """Start a program once for each GPU of this host, as one job.

    moe-jax launch -- moe-jax finetune --mesh.expert 4 --model Qwen/Qwen3-30B-A3B --data chats.jsonl --output runs/mine

    Without GPUs, to try it:

    moe-jax launch --processes 2 --cpu-devices 4 -- python my_training.py

    On the second of two hosts:

    moe-jax launch --hosts 2 --host 1 --coordinator node0:12355 -- ...

    A program of your own calls moe_jax.parallel.initialize_processes() first. Slurm's srun and mpirun start the processes
    themselves: docs/scaling.md.

    Args:
      command: the program and its arguments, after --.
      processes: number of processes on this host; they share the GPUs evenly. Default: one for each visible GPU.
      cpu_devices: number of CPU devices of each process, to try a job without GPUs.
      hosts: number of hosts of the job; the same command is started on each.
      host: number of this host, from 0.
      coordinator: with several hosts, "host:port" of host 0, with a free port. Default: a free port of this host.
      connect_seconds: seconds that the processes of all hosts wait for each other at the start.
      grace_seconds: seconds after a process has failed before the others are killed.
      save_seconds: seconds after a signal to the launcher before all are killed; enough to save a checkpoint.
    """

    command: tyro.conf.Positional[tuple[str, ...]]
    processes: int | None = None
    cpu_devices: int | None = None
    hosts: int = 1
    host: int = 0
    coordinator: str | None = None
    connect_seconds: int = 300
    grace_seconds: float = 30.0
    save_seconds: float = 600.0

    def run(self) -> None:
        """Runs the job, and exits with its status unless that is 0."""
        if status := launch(self):
            raise SystemExit(status)


def launch(settings: LaunchCommand) -> int:
    """Runs the job; returns 0, or the status of the first process that failed (128 + n if signal n ended it).

    SIGINT, SIGTERM and SIGHUP are passed on, unless this process ignores them. A process that still runs `save_seconds` after
    the signal is killed, as is one that still runs `grace_seconds` after another process failed.

    Raises:
      ValueError: the settings are invalid; nothing has been started then.
      FileNotFoundError: the program does not exist.
    """
    environments = process_environments(settings, os.environ)
    first = settings.host * len(environments)
    ended: queue.Queue[tuple[int, int]] = queue.Queue()
    job = _Job()
    # An ignored signal stays ignored: under nohup a job outlives its terminal.
    caught = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]

    def pass_on(number, _):
        job.end(number, settings.save_seconds)

    handlers = {number: signal.signal(number, pass_on) for number in caught}
    try:
        for rank, variables in enumerate(environments, start=first):
            job.start(rank, settings.command, variables, ended)
        status = 0
        for _ in environments:
            rank, returned = _wait_for_one(ended)
            if returned and not status:
                status = 128 - returned if returned < 0 else returned
                reason = f"was ended by {signal.Signals(-returned).name}" if returned < 0 else f"failed with status {returned}"
                print(f"moe-jax launch: process {rank} {reason}{_first_host(settings)}", file=sys.stderr, flush=True)
                job.end(signal.SIGTERM, settings.grace_seconds)
    finally:
        job.kill()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status


def _first_host(settings: LaunchCommand) -> str:
    """Returns a remark if the first host is gone: JAX then aborts all other processes at once, and does not give the reason."""
    if settings.host == 0 or settings.coordinator is None:
        return ""
    # JAX is imported here, and the launcher needs it only now.
    from moe_jax.runtime.processes import no_answer

    reason = no_answer(settings.coordinator, 5.0)
    return f"; process 0 at {settings.coordinator} does not answer: {reason}" if reason else ""


def process_environments(settings: LaunchCommand, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the environment variables of each process to start on this host.

    Raises:
      ValueError: the settings are invalid, or there is neither a GPU nor `cpu_devices`.
    """
    gpus = 0 if settings.cpu_devices is not None else _num_gpus(environment)
    count = gpus if settings.processes is None else settings.processes
    problems = _problems(settings, count, gpus)
    if problems:
        raise ValueError("launch: " + "; ".join(problems))
    common = {"PYTHONUNBUFFERED": "1", **environment}
    xla.set_defaults(common)
    common[xla.CONNECT_SECONDS] = str(settings.connect_seconds)
    common[xla.NUM_PROCESSES] = str(settings.hosts * count)
    if settings.coordinator is None:
        common[xla.COORDINATOR] = _free_address()
        # A job of one host needs no connections from outside.
        common["JAX_COORDINATOR_BIND_ADDRESS"] = common[xla.COORDINATOR]
    else:
        common[xla.COORDINATOR] = settings.coordinator
    if settings.cpu_devices is not None:
        common |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(settings.cpu_devices)}
    each = []
    for i in range(count):
        own = {xla.PROCESS_ID: str(settings.host * count + i)}
        if gpus:
            own[xla.LOCAL_DEVICE_IDS] = ",".join(map(str, range(i * gpus // count, (i + 1) * gpus // count)))
        each.append(common | own)
    return each


class _Job:
    """The running processes, each the leader of its own process group, so that its children end with it."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen] = []
        self.timers: list[threading.Timer] = []

    def start(self, rank: int, command: tuple[str, ...], variables: dict[str, str], ended: queue.Queue) -> None:
        """Starts one process; puts (rank, status) into `ended` when it has ended and all its output is printed."""
        process = subprocess.Popen(
            command,
            env=variables,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.running.append(process)
        streams = (process.stdout, sys.stdout), (process.stderr, sys.stderr)
        readers = [threading.Thread(target=_print_lines, args=(rank, *pair), daemon=True) for pair in streams]

        def wait() -> None:
            status = process.wait()
            _signal_group(process, signal.SIGKILL)
            for reader in readers:
                # A program that left its group may hold the pipe open forever.
                reader.join(timeout=10)
            ended.put((rank, status))

        for thread in (*readers, threading.Thread(target=wait, daemon=True)):
            thread.start()

    def end(self, number: int, seconds: float) -> None:
        """Passes a signal on, and kills every process that still runs after `seconds`."""
        for process in self.running:
            if process.poll() is None:
                _signal_group(process, number)
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

    def kill(self) -> None:
        """Kills every process that still runs."""
        for process in self.running:
            if process.poll() is None:
                _signal_group(process, signal.SIGKILL)
        for timer in self.timers:
            timer.cancel()


def _signal_group(process: subprocess.Popen, number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def _wait_for_one(ended: queue.Queue[tuple[int, int]]) -> tuple[int, int]:
    while True:
        try:
            # Python handles signals in this thread, but the kernel may deliver one to another: without a timeout it would wait.
            return ended.get(timeout=SECONDS_UNTIL_A_SIGNAL_IS_SEEN)
        except queue.Empty:
            pass


def _print_lines(rank: int, source: IO[bytes], target: IO[str]) -> None:
    """Prints whole lines as they come, each after the number of its process; only the last state of a progress bar."""
    with source:
        for line in source:
            text = line.decode(errors="replace").rstrip().rpartition("\r")[2]
            if CHATTER.fullmatch(text):
                continue
            target.write(f"[{rank}] {text}\n")
            target.flush()


def _problems(settings: LaunchCommand, count: int, gpus: int) -> list[str]:
    problems = []
    if not settings.command:
        problems.append("the program is missing; name it behind --")
    if settings.cpu_devices is not None and settings.cpu_devices < 1:
        problems.append(f"cpu_devices={settings.cpu_devices} must be at least 1")
    if settings.cpu_devices is not None and settings.processes is None:
        problems.append("cpu_devices needs processes, the number of processes to start")
    elif settings.cpu_devices is None and not gpus:
        problems.append("no GPU is visible here; give processes and cpu_devices to run on CPU")
    elif count < 1:
        problems.append(f"processes={count} must be at least 1")
    elif gpus % count:
        problems.append(f"processes={count} cannot share {gpus} GPUs evenly")
    if settings.hosts < 1 or not 0 <= settings.host < settings.hosts:
        problems.append(f"host={settings.host} must be from 0 to hosts - 1, and hosts={settings.hosts} at least 1")
    if settings.hosts > 1 and settings.coordinator is None:
        problems.append("several hosts need coordinator, the host:port of host 0")
    if settings.connect_seconds < 1:
        problems.append(f"connect_seconds={settings.connect_seconds} must be at least 1")
    for name in ("grace_seconds", "save_seconds"):
        if getattr(settings, name) < 0:
            problems.append(f"{name}={getattr(settings, name)} must not be negative")
    return problems


def _num_gpus(environment: Mapping[str, str]) -> int:
    """Returns the number of GPUs that a process started here would see. JAX is not asked: it would allocate them."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        # CUDA uses the names before the first invalid one; people write "-1" to hide all GPUs.
        names = map(str.strip, environment["CUDA_VISIBLE_DEVICES"].split(","))
        return len(list(itertools.takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names)))
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return 0
    return len([line for line in listed.stdout.splitlines() if line.startswith("GPU ")]) if listed.returncode == 0 else 0


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
