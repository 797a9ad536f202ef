"""What `moe-jax launch` does: starts a program once for each GPU of this host, and ends it as one.

Each process gets what `parallel.processes.initialize_processes` reads, and its lines are printed behind its number. The first
process that fails ends the others, which would wait for it; its status is the launcher's.
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
"""Lines of a library that say that all is well, many times for each process; no setting silences them."""


@dataclass(frozen=True)
class LaunchSettings:
    """Start a program once for each GPU of this host, as one job.

    moe-jax launch -- moe-jax finetune --mesh.expert 4 --model Qwen/Qwen3-30B-A3B --data chats.jsonl --output runs/mine

    Without GPUs, to try things:

    moe-jax launch --processes 2 --cpu-devices 4 -- python my_training.py

    On the second of two hosts:

    moe-jax launch --hosts 2 --host 1 --coordinator node0:12355 -- ...

    A program of your own calls moe_jax.parallel.initialize_processes() first. Slurm's srun and mpirun start the processes
    themselves: docs/scaling.md.

    Args:
      command: the program and its arguments, behind --.
      processes: how many to start here; they share the GPUs evenly. Default: one for each visible GPU.
      cpu_devices: run on CPU, each process with so many devices: to try things without GPUs.
      hosts: on how many hosts the same is started.
      host: which of them this one is, from 0.
      coordinator: with several hosts, "host:port" of host 0, a port that is free there. Default: one of this host's own.
      grace_seconds: how long the others may take to end when a process has failed, before they are killed.
      save_seconds: the same when the launcher was told to end by a signal: what a checkpoint takes.
    """

    command: tyro.conf.Positional[tuple[str, ...]]
    processes: int | None = None
    cpu_devices: int | None = None
    hosts: int = 1
    host: int = 0
    coordinator: str | None = None
    grace_seconds: float = 30.0
    save_seconds: float = 600.0


def launch(settings: LaunchSettings) -> int:
    """Runs the job; returns 0, or the status of the first process that failed, 128 + n where signal n ended it.

    SIGINT, SIGTERM and SIGHUP are passed on, unless they are ignored here; what does not end by them within `save_seconds`, or
    `grace_seconds` after another process has failed, is killed.

    Raises:
      ValueError: settings that make no sense; nothing has been started then.
      FileNotFoundError: there is no such program.
    """
    environments = process_environments(settings, os.environ)
    first = settings.host * len(environments)
    ended: queue.Queue[tuple[int, int]] = queue.Queue()
    job = _Job()
    # What is ignored stays so: under nohup a job outlives its terminal.
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
                print(f"moe-jax launch: process {rank} {reason}", file=sys.stderr, flush=True)
                job.end(signal.SIGTERM, settings.grace_seconds)
    finally:
        job.kill()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status


def process_environments(settings: LaunchSettings, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each process of this host.

    Raises:
      ValueError: settings that make no sense, or no GPU and no `cpu_devices`.
    """
    gpus = 0 if settings.cpu_devices is not None else _num_gpus(environment)
    count = gpus if settings.processes is None else settings.processes
    problems = _problems(settings, count, gpus)
    if problems:
        raise ValueError("launch: " + "; ".join(problems))
    common = {"PYTHONUNBUFFERED": "1", **environment}
    xla.set_defaults(common)
    common[xla.NUM_PROCESSES] = str(settings.hosts * count)
    if settings.coordinator is None:
        common[xla.COORDINATOR] = _free_address()
        # Nobody outside has to reach a job of one host.
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
    """The running processes, each the leader of a group of its own, so that what it starts ends with it."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen] = []
        self.timers: list[threading.Timer] = []

    def start(self, rank: int, command: tuple[str, ...], variables: dict[str, str], ended: queue.Queue) -> None:
        """Starts one process; (rank, its status) goes into `ended` when it has ended and all of its output is printed."""
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
                # A program that left its group may hold the pipe open for ever.
                reader.join(timeout=10)
            ended.put((rank, status))

        for thread in (*readers, threading.Thread(target=wait, daemon=True)):
            thread.start()

    def end(self, number: int, seconds: float) -> None:
        """Passes a signal on, and kills what still runs after so many seconds."""
        for process in self.running:
            if process.poll() is None:
                _signal_group(process, number)
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

    def kill(self) -> None:
        """Ends all that still runs."""
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
            # The kernel may give a signal to any thread, which does not wake this one, where Python handles it.
            return ended.get(timeout=SECONDS_UNTIL_A_SIGNAL_IS_SEEN)
        except queue.Empty:
            pass


def _print_lines(rank: int, source: IO[bytes], target: IO[str]) -> None:
    """Whole lines as they come, each behind the number of its process; of a progress bar its last state."""
    with source:
        for line in source:
            text = line.decode(errors="replace").rstrip().rpartition("\r")[2]
            if CHATTER.fullmatch(text):
                continue
            target.write(f"[{rank}] {text}\n")
            target.flush()


def _problems(settings: LaunchSettings, count: int, gpus: int) -> list[str]:
    problems = []
    if not settings.command:
        problems.append("no program; name it behind --")
    if settings.cpu_devices is not None and settings.cpu_devices < 1:
        problems.append(f"cpu_devices={settings.cpu_devices} must be at least 1")
    if settings.cpu_devices is not None and settings.processes is None:
        problems.append("cpu_devices needs processes: how many to start")
    elif settings.cpu_devices is None and not gpus:
        problems.append("no GPU is visible here; give processes and cpu_devices to run on CPU")
    elif count < 1:
        problems.append(f"processes={count} must be at least 1")
    elif gpus % count:
        problems.append(f"processes={count} cannot share {gpus} GPUs evenly")
    if settings.hosts < 1 or not 0 <= settings.host < settings.hosts:
        problems.append(f"host={settings.host} must be from 0 to hosts - 1, and hosts={settings.hosts} at least 1")
    if settings.hosts > 1 and settings.coordinator is None:
        problems.append("several hosts need coordinator: host:port of host 0")
    for name in ("grace_seconds", "save_seconds"):
        if getattr(settings, name) < 0:
            problems.append(f"{name}={getattr(settings, name)} must not be negative")
    return problems


def _num_gpus(environment: Mapping[str, str]) -> int:
    """GPUs that a process started here would see; JAX is not asked, since it would take them."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        # CUDA takes the names before the first that names no GPU: "-1" is how people hide all.
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
