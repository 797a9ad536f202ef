"""Train a model on preferences (DPO) with an adapter, in your own loop: copy this file and edit it.

    python examples/dpo.py --model Qwen/Qwen3-30B-A3B --data pairs.jsonl --output runs/preferred

A line of the data has a prompt and two answers, {"prompt": ..., "chosen": ..., "rejected": ...}, as texts or messages. The
reference is the same model with its adapter off, so that memory holds the weights once. `moe-jax prefer` adds resuming and
metrics files.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

import moe_jax
from moe_jax import adapters, preferences, train


@dataclass
class Settings:
    """Command-line options."""

    model: str
    data: str
    output: str
    beta: float = 0.1
    rank: int = 32
    steps: int = 200
    batch_size: int = 8
    seq_len: int = 2048
    learning_rate: float = 1e-5


def main(settings: Settings) -> None:
    """Loads the model, trains an adapter, saves it."""
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    model = moe_jax.from_pretrained(settings.model, dtype=dtype, mtp=False)
    print(adapters.add_lora(model, adapters.LoraSettings(rank=settings.rank), rngs=nnx.Rngs(0)))

    data = preferences.open_preferences(settings.data)
    tokenizer = moe_jax.load_tokenizer(settings.model)
    # Both answers of a pair are in one row, with as many pairs as the row holds.
    batches = preferences.preference_batches(data, tokenizer, seq_len=settings.seq_len, batch_size=settings.batch_size)

    schedule = train.warmup_cosine(settings.learning_rate, steps=settings.steps, warmup_steps=settings.steps // 10)
    optimizer = train.make_optimizer(schedule, weight_decay=0.0)
    objective = preferences.Preference(preferences.PreferenceSettings("dpo", beta=settings.beta))
    graph, state = nnx.graphdef(model), train.init_state(model, optimizer)
    train_step = train.make_train_step(graph, optimizer, objective, schedule=schedule)
    for step in range(1, settings.steps + 1):
        state, metrics = train_step(state, train.put_batch(next(batches), state.params))
        rewards = f"margin {metrics['reward_margin']:.3f}, accuracy {metrics['reward_accuracy']:.2f}"
        print(f"step {step}: loss {metrics['loss']:.4f}, {rewards}")
    batches.close()

    adapters.save_adapter(nnx.merge(graph, state.params, state.fixed), settings.output)
    print(f"wrote {settings.output}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
