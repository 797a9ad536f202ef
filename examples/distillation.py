"""Distil a large model into a small one with a loss of your own: copy this file and edit it.

    python examples/distillation.py --teacher Qwen/Qwen3-8B --student Qwen/Qwen3-0.6B --data chats.jsonl --output runs/student

The student learns the labels, and to be as sure of each as the teacher. The teacher gives one number for a label, so that no
logits of a whole vocabulary are kept:

    loss = mean over labels of  -log p_student + weight * (log p_student - log p_teacher)^2

The teacher's numbers are one more array of the batch. A preference loss (DPO) gets its reference model's numbers in the same
way. Both models need the same tokenizer.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

import moe_jax
from moe_jax import train


@dataclass
class Settings:
    """Command-line options."""

    teacher: str
    student: str
    data: str
    output: str
    weight: float = 0.1
    steps: int = 200
    batch_size: int = 8
    seq_len: int = 1024
    learning_rate: float = 1e-5


def main(settings: Settings) -> None:
    """Loads both models, trains the student, saves it."""
    compute_dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    teacher = moe_jax.from_pretrained(settings.teacher, dtype=compute_dtype)
    student = moe_jax.from_pretrained(settings.student, dtype=compute_dtype, param_dtype=jnp.float32, mtp=False)
    tokenizer = moe_jax.load_tokenizer(settings.student)
    documents = train.open_documents(settings.data)
    batches = train.batches(documents, tokenizer, seq_len=settings.seq_len, batch_size=settings.batch_size)
    # The batch carries the teacher's answers. A loss that used the teacher's weights would compile them in as constants.
    log_probs_of_teacher = nnx.jit(train.log_probs)

    def distillation(model, batch):
        log_probs = train.log_probs(model, batch)
        distances = jnp.square(log_probs - batch["teacher_log_probs"])
        sums = -log_probs.sum(), distances.sum()
        cross_entropy, distance = (summed / batch["num_labels"] for summed in train.sum_over_devices(model, sums))
        return cross_entropy + settings.weight * distance, {"cross_entropy": cross_entropy, "distance": distance}

    schedule = train.warmup_cosine(settings.learning_rate, steps=settings.steps, warmup_steps=settings.steps // 10)
    optimizer = train.make_optimizer(schedule)
    graph, state = nnx.graphdef(student), train.init_state(student, optimizer)
    train_step = train.make_train_step(graph, optimizer, schedule=schedule, loss=distillation)
    for step in range(1, settings.steps + 1):
        batch = train.put_batch(next(batches), state.params)
        batch["teacher_log_probs"] = log_probs_of_teacher(teacher, batch)
        state, metrics = train_step(state, batch)
        print(f"step {step}: cross-entropy {metrics['cross_entropy']:.4f}, distance {metrics['distance']:.4f}")
    trained = nnx.merge(graph, state.params, state.expert_bias)
    moe_jax.save_pretrained(trained, settings.output, tokenizer_from=settings.student)
    print(f"wrote {settings.output}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
