"""The batch script of `moe-jax plan --sbatch` is submitted as it is, preempted, requeued by itself, and resumes bit for bit."""

import socket
import subprocess
import time

import pytest

from moe_jax.cli import main
from moe_jax.train.metrics import read_records

SECONDS = 600
CONFIGURATION = """\
ClusterName=moe
SlurmctldHost={head}({network}.254)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=120
SelectType=select/cons_tres
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
NodeName=node[0-1] NodeAddr={network}.[1-2] CPUs=16 RealMemory=1000 Gres=gpu:1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL PriorityTier=2
"""


@pytest.fixture(scope="module")
def slurm(hosts, folder, environment):
    """A controller on this machine and a daemon on two hosts, each with one device that is called a GPU."""
    place, here = folder / "slurm", socket.gethostname()
    for path in (place, place / "state", place / "node0", place / "node1"):
        path.mkdir()
    text = CONFIGURATION.format(head=here, network="10.77.0", folder=place)
    (place / "slurm.conf").write_text(text)
    # Nothing is confined; without this line slurmd looks for a file system that a namespace's /sys lacks.
    (place / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (place / "gres.conf").write_text("NodeName=node[0-1] Name=gpu File=/dev/null\n")
    variables = environment | {"SLURM_CONF": str(place / "slurm.conf")}
    subprocess.run(["mungekey", "--create", "--keyfile", place / "munge.key"], check=True)
    munged = ["munged", "--foreground", "--force", *(f"--{name}={place}/munge.{end}" for name, end in MUNGE.items())]
    daemons = [subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL) for command in (munged, ["slurmctld", "-D"])]
    for name in ("node0", "node1"):
        hosts.start(name, ["slurmd", "-D"], place / f"{name}.out", env=variables)
    try:
        wait_for(lambda: asked(variables, "sinfo -h -o %T") == "idle", lambda: (place / "slurmctld.log").read_text())
        yield variables
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


MUNGE = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}


def test_the_batch_script_resumes_bit_for_bit(slurm, folder, tmp_path):
    script = tmp_path / "train.sbatch"
    main(f"plan {folder}/model --devices 2 --hosts-of 1 --rows 8 --seq-len 32 --remat yes --sbatch {script}".split())
    steps = 1000
    options = f"--model {folder}/model --data {folder}/texts --steps {steps} --dtype float32 --checkpoint-every 500".split()

    def submit(output):
        words = ["sbatch", "--parsable", script, *options, "--output", output]
        return subprocess.run(words, env=slurm, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    def state(job):
        return asked(slurm, f"scontrol show job {job} --oneliner").partition("JobState=")[2].partition(" ")[0]

    def log(job):
        return (tmp_path / f"finetune-{job}.log").read_text()

    def steps_of(output):
        return len(read_records(output / "metrics.jsonl"))

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    job = submit(whole)
    wait_for(lambda: state(job) == "COMPLETED", lambda: log(job))
    job = submit(parts)
    wait_for(lambda: steps_of(parts) >= 20, lambda: log(job))
    urgent = subprocess.run(
        ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--wrap", "sleep 1"],
        env=slurm, cwd=tmp_path, check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    wait_for(lambda: state(urgent) == "COMPLETED", lambda: log(job))
    preempted = steps_of(parts)
    assert 20 <= preempted < steps and f"stopped after step {preempted} and saved" in log(job)
    # Near the end of its time the job gets SIGTERM, saves, and requeues itself.
    wait_for(lambda: steps_of(parts) >= preempted + 20, lambda: log(job))
    asked(slurm, f"scontrol update JobId={job} TimeLimit=5")
    wait_for(lambda: log(job).count("and saved") == 2, lambda: log(job))
    asked(slurm, f"scontrol update JobId={job} TimeLimit=60")
    wait_for(lambda: state(job) == "COMPLETED", lambda: log(job))
    print(log(job))
    assert "Restarts=2 " in asked(slurm, f"scontrol show job {job} --oneliner")
    assert numbers(whole) == numbers(parts) and len(numbers(parts)) == steps
    first, second = ((output / "model" / "model.safetensors").read_bytes() for output in (whole, parts))
    assert first == second


def numbers(output):
    return [[record[name] for name in ("step", "loss", "grad_norm")] for record in read_records(output / "metrics.jsonl")]


def wait_for(condition, log):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, log()
        time.sleep(0.2)


def asked(variables, command: str) -> str:
    return subprocess.run(command.split(), env=variables, capture_output=True, text=True).stdout.strip()
