"""Fine-tune a Qwen3-MoE in your own loop: copy this file and edit it.

    python examples/finetune.py --model Qwen/Qwen3-30B-A3B --data chats.jsonl --output runs/mine

The loop is plain JAX and optax on moe_jax's pieces. `moe_jax.recipes.finetune` adds resuming and metrics files.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

import moe_jax
from moe_jax import train
from moe_jax.models.execution import Execution


@dataclass
class Settings:
    """Command-line options."""

    model: str
    data: str
    output: str
    steps: int = 100
    batch_size: int = 8
    seq_len: int = 2048
    learning_rate: float = 1e-5
    aux_loss_coef: float = 0.001


def main(settings: Settings) -> None:
    """Loads, trains, saves."""
    compute_dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    # f32 weights under bf16 compute: the weights are their own master copy.
    model = moe_jax.from_pretrained(settings.model, dtype=compute_dtype, param_dtype=jnp.float32)
    model.execution = Execution(remat=True)
    tokenizer = train.load_tokenizer(settings.model)
    documents = train.open_documents(settings.data)
    batches = train.batches(documents, tokenizer, seq_len=settings.seq_len, batch_size=settings.batch_size)

    schedule = train.warmup_cosine(settings.learning_rate, steps=settings.steps, warmup_steps=settings.steps // 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))

    # Split once: the graph is static, and the arrays pass through plain jax.jit. What is not trained stays as it is.
    graph, params, *others = nnx.split(model, nnx.Param, ...)
    opt_state = optimizer.init(params)

    def loss_fn(params, batch):
        weights = train.LossWeights(aux_loss_coef=settings.aux_loss_coef)
        return train.loss(nnx.merge(graph, params, *others), batch, weights)

    def train_step(params, opt_state, batch):
        (_, parts), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, parts

    train_step = jax.jit(train_step, donate_argnums=(0, 1))
    for step in range(1, settings.steps + 1):
        params, opt_state, parts = train_step(params, opt_state, next(batches))
        loss = float(parts.cross_entropy / parts.num_labels)
        load = parts.router.expert_load
        busiest = float(jnp.max(load / jnp.mean(load, axis=1, keepdims=True)))
        print(f"step {step}: loss {loss:.4f}, aux loss {float(parts.aux_loss):.3f}, busiest expert {busiest:.2f} x the mean")

    trained = nnx.merge(graph, params, *others)
    moe_jax.save_pretrained(trained, settings.output, tokenizer_from=settings.model)
    print(f"wrote {settings.output}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
