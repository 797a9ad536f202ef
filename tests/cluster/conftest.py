"""Hosts that are really apart: network namespaces of this machine, each with an address and a name of its own."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import moe_jax
from tests.helpers import cpu_flags, tiny

ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0"


def pytest_collection_modifyitems(items):
    """Nothing here runs as a part of `make test`: it needs root, and changes the machine's network."""
    reason = None
    if "MOE_JAX_CLUSTER_TEST" not in os.environ:
        reason = "make cluster-test runs it"
    elif os.geteuid() != 0:
        reason = "network namespaces need root"
    elif missing := [name for name in ("ip", "tc", "faketime", "slurmctld", "slurmd", "munged") if shutil.which(name) is None]:
        reason = f"not installed: {', '.join(missing)}"
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def hosts() -> Iterator["Hosts"]:
    """Three hosts."""
    made = Hosts(3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder that all hosts share, with a model and texts."""
    path = tmp_path_factory.mktemp("shared")
    tiny.tokenizer().save_pretrained(path / "tokenizer")
    moe_jax.save_pretrained(tiny.dense(), path / "model", tokenizer_from=path / "tokenizer")
    tiny.write_texts(path / "texts")
    return path


@pytest.fixture(scope="module")
def environment(folder) -> dict[str, str]:
    """The variables of processes with one CPU device, which compile each program once."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "helpers" / "torchless")))
    cache = dict(JAX_COMPILATION_CACHE_DIR=str(folder / "programs"), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    cpu = dict(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1", OMP_NUM_THREADS="1", NPROC="16", XLA_FLAGS=cpu_flags.UNOPTIMISED)
    return {**os.environ, "PYTHONPATH": paths, **cache, **cpu}


class Hosts:
    """Hosts node0, node1, ... with addresses 10.77.0.1, 10.77.0.2, ... on one bridge; this machine is 10.77.0.254."""

    def __init__(self, count: int):
        self.names = [f"node{i}" for i in range(count)]
        self.started: list[subprocess.Popen] = []
        ip("link add moe type bridge")
        ip(f"addr add {NETWORK}.254/24 dev moe")
        ip("link set moe up")
        for i, name in enumerate(self.names):
            files = Path("/etc/netns", name)
            files.mkdir(parents=True)
            lines = [f"{NETWORK}.{j + 1} {other}" for j, other in enumerate(self.names)]
            (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{NETWORK}.254 head", *lines, ""]))
            ip(f"netns add {name}")
            ip(f"link add moe{i} type veth peer name eth0 netns {name}")
            ip(f"link set moe{i} master moe up")
            ip(f"-n {name} addr add {NETWORK}.{i + 1}/24 dev eth0")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set eth0 up")

    def start(self, name: str, command: list[str], log: Path, first: str = ":", **options) -> subprocess.Popen:
        """Starts a command on a host after the shell's line `first`, with mounts of its own; both streams go into `log`."""
        line = f'hostname "$0" && {first} && exec "$@"'
        inside = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", line, name]
        with log.open("a") as output:
            self.started.append(subprocess.Popen([*inside, *command], stdout=output, stderr=output, **options))
        return self.started[-1]

    def slow_down(self, name: str) -> None:
        """Delays what a host sends; on kernels without netem it only limits the rate."""
        netem = f"tc -n {name} qdisc add dev eth0 root netem delay 20ms rate 20mbit"
        if subprocess.run(netem.split(), capture_output=True).returncode:
            subprocess.run(f"tc -n {name} qdisc add dev eth0 root tbf rate 20mbit burst 16kb latency 500ms".split(), check=True)

    def join(self, name: str) -> None:
        """Puts the cable of a host back."""
        ip(f"-n {name} link set eth0 up")

    def lose(self, name: str) -> None:
        """Pulls the cable of a host: no packet leaves it, so nobody learns that its connections are gone."""
        ip(f"-n {name} link set eth0 down")

    def stop(self, name: str, number: int = signal.SIGKILL) -> None:
        """Ends all processes of a host."""
        for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
            os.kill(int(pid), number)

    def close(self) -> None:
        for name in self.names:
            self.stop(name)
        for process in self.started:
            process.wait()
        for i, name in enumerate(self.names):
            ip(f"link del moe{i}")
            ip(f"netns del {name}")
            shutil.rmtree(Path("/etc/netns", name))
        ip("link del moe")


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)
