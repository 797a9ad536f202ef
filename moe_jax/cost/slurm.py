"""Writes a batch script for Slurm that runs `moe-jax finetune` with one process for each GPU."""

import math
import os
from pathlib import Path

from moe_jax.cost import PlannedStep
from moe_jax.cost.plan_table import flags

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=finetune
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}
#SBATCH --gres=gpu:{gpus}
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail
# Fill in these paths. All hosts must see the same files under them.
MODEL=/shared/models/my-model      # a folder with config.json and weights
DATA=/shared/data/chats.jsonl
OUTPUT=/shared/runs/mine
source /shared/moe_jax/.venv/bin/activate

# Every process would ask the hub otherwise; download once beforehand: hf download NAME --local-dir "$MODEL"
export HF_HOME=/shared/huggingface HF_HUB_OFFLINE=1

status=0
srun --kill-on-bad-exit=1 moe-jax finetune --model "$MODEL" --data "$DATA" --output "$OUTPUT" \\
  {flags} || status=$?
# 143: Slurm has sent SIGTERM before the end of the time, and the run has saved. The next job goes on from there.
if [ "$status" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""


def write_batch_script(path: Path, step: PlannedStep, gpus_of_host: int) -> None:
    """Writes the script that trains on the mesh of `step`; the file is complete or absent.

    Raises:
      ValueError: `path` is a folder, or its folder does not exist, or the step needs attention other than by the ring.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--sbatch {path}: give a file in a folder that exists")
    if step.mesh.context > 1 and step.context_method != "ring":
        raise ValueError(f"--sbatch: moe-jax finetune splits sequences by the ring alone; this run takes {step.context_method}")
    gpus = min(gpus_of_host, step.mesh.size)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(SCRIPT.format(nodes=math.ceil(step.mesh.size / gpus), gpus=gpus, flags=flags(step)))
    os.replace(temporary, path)
