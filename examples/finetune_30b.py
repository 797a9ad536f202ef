"""Fine-tune all parameters of Qwen3-30B-A3B on all GPUs of a job: bf16 compute, f32 masters, everything sharded.

    python examples/finetune_30b.py --model Qwen/Qwen3-30B-A3B --data chats.jsonl --output runs/30b
    python examples/finetune_30b.py --random-weights --tokenizer Qwen/Qwen3-30B-A3B --data texts --output runs/try --steps 20
    moe-jax launch -- python examples/finetune_30b.py ...      # a process for each GPU; more hosts: docs/scaling.md

In one process that has all GPUs each layer's matrices are gathered by copies while another layer computes; several processes
send tokens to experts instead, since NCCL's gathers hide less (docs/scaling.md).

Parameters with their masters and AdamW's moments take 8 bytes a parameter with moments in bf16 (four GPUs of 141 GB). With
moments in f32 they take 12 (eight GPUs). The same command continues an interrupted run from the last checkpoint, on the same
number of GPUs: this number sets the batch and the dtype of the moments, and a run keeps both.
"""

import math
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import tyro

import moe_jax
from moe_jax.config import NAMED_CONFIGS
from moe_jax.models.random_weights import random_model
from moe_jax.parallel import MeshShape, initialize_processes, make_mesh


@dataclass
class Settings:
    """Command-line options."""

    data: str
    output: str
    model: str = "Qwen/Qwen3-30B-A3B"
    tokenizer: str | None = None
    random_weights: bool = False
    steps: int = 1000
    seq_len: int = 4096
    rows_per_gpu: int = 8
    learning_rate: float = 1e-5


def main(settings: Settings) -> None:
    """Trains; the model is written to `output`/model as a Hugging Face folder."""
    initialize_processes()
    gpus = jax.device_count()
    # Tokens travel to experts inside a host, and of few devices; all else is gathered.
    expert = 1 if jax.process_count() == 1 else math.gcd(gpus, 4)
    mesh = MeshShape(fsdp=gpus // expert, expert=expert)
    finetune_settings = moe_jax.recipes.FinetuneSettings(
        model=settings.model,
        tokenizer=settings.tokenizer,
        data=settings.data,
        output=settings.output,
        seq_len=settings.seq_len,
        batch_size=settings.rows_per_gpu * gpus,
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        param_dtype="bfloat16",
        moment_dtype="float32" if gpus >= 8 else "bfloat16",
        mesh=mesh,
        capacity_factor=float(expert),
    )
    model = None
    if settings.random_weights:
        model = random_model(NAMED_CONFIGS["qwen3-30b-a3b"], jnp.bfloat16, mesh=make_mesh(**asdict(mesh)))
    result = moe_jax.recipes.finetune(finetune_settings, model=model)
    if result.step < settings.steps:
        raise SystemExit(143)  # told to stop, and saved: the same command resumes from there
    moe_jax.save_pretrained(result.model, f"{settings.output}/model", tokenizer_from=settings.tokenizer or settings.model)


if __name__ == "__main__":
    main(tyro.cli(Settings))
