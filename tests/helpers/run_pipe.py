"""The training run of test_pipe_finetune, also as a process of its own that ends itself by SIGKILL.

Arguments: data folder, output folder, the step in which the process dies, and "step" or "save".
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from moe_jax.checkpoint.training import TrainingCheckpoints
from moe_jax.models.random_weights import random_model
from moe_jax.parallel.choices import MeshShape
from moe_jax.recipes import FinetuneSettings, finetune
from tests.helpers import tiny
from tests.helpers.meshes import mesh_of


def run(
    data: Path,
    output: Path,
    mesh: jax.sharding.Mesh | None,
    chunks: int = 1,
    stop_after: int | None = None,
    make_model=tiny.biased_model,
    **changes,
):
    """Trains three layers, as `make_model` has them, for 6 steps, or resumes up to them. `held_out` is next to the data."""
    if "pipe_schedule" in changes:
        changes |= dict(mesh=MeshShape(pipe=mesh.shape["pipe"]), pipe_chunks=chunks)
    settings = FinetuneSettings(
        model="none", data=str(data), output=str(output), seq_len=16, batch_size=8, gradient_accumulation=4, steps=6,
        learning_rate=1e-2, warmup_steps=2, checkpoint_every=2, dtype="float32", seed=7,
        eval_data=str(data.parent / "held_out"), eval_every=2, eval_batches=3, **changes,
    )  # fmt: skip
    config = replace(make_model().config, num_hidden_layers=3)
    model = random_model(config, jnp.float32, param_dtype=settings.param_dtype, mesh=mesh, pipe_chunks=chunks)
    return finetune(settings, model=model, tokenizer=tiny.tokenizer(), stop_after=stop_after)


def die(*_) -> None:
    """Ends this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    data, output, step, where = sys.argv[1:]
    if where == "step":
        loop = sys.modules["moe_jax.recipes.run.loop"]
        record_of_step = loop.record_of_step
        loop.record_of_step = lambda number, *rest: die() if number == int(step) else record_of_step(number, *rest)
    else:
        save = TrainingCheckpoints.save

        def save_and_die(self, number, *rest):
            save(self, number, *rest)
            if number == int(step):
                die()

        TrainingCheckpoints.save = save_and_die
    run(Path(data), Path(output), mesh_of(pipe=2))
