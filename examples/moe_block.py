"""Our MoE block inside somebody else's Flax NNX model and optax loop: a small classifier of noisy points.

python examples/moe_block.py --steps 200
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

from moe_jax.layers import MoE, load_balancing_loss


@dataclass
class Settings:
    """Command-line options."""

    steps: int = 200
    seed: int = 0


class Classifier(nnx.Module):
    """Your own model: two linear layers, and a MoE between them."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Linear(2, 32, rngs=rngs)
        self.moe = MoE(32, 64, num_experts=8, num_experts_per_tok=2, stddev=0.2, rngs=rngs)
        self.head = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, points):
        """points [batch, 2] -> (logits [batch, 4], the routing, for the balancing loss)."""
        x = nnx.gelu(self.embed(points))
        y, routing = self.moe(x)
        return self.head(x + y), routing


def loss_fn(model, points, labels):
    """Cross entropy, and 0.01 of the load-balancing loss, which keeps all experts in use."""
    logits, routing = model(points)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    loss = cross_entropy + 0.01 * load_balancing_loss(routing)
    return loss, (jnp.mean(logits.argmax(-1) == labels), routing.sums.expert_load)


def main(settings: Settings) -> float:
    """Trains, and returns the last accuracy."""
    model = Classifier(nnx.Rngs(settings.seed))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, key):
        points = jax.random.uniform(key, (512, 2), minval=-1.0, maxval=1.0)
        labels = (points[:, 0] * points[:, 1] > 0).astype(jnp.int32) + 2 * (jnp.abs(points).sum(-1) > 1)
        (_, found), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, points, labels)
        optimizer.update(model, grads)
        return found

    accuracy = jnp.zeros(())
    for step in range(1, settings.steps + 1):
        accuracy, load = train_step(model, optimizer, jax.random.fold_in(jax.random.key(settings.seed), step))
        if step % 50 == 0 or step == settings.steps:
            print(f"step {step}: accuracy {float(accuracy):.3f}, tokens per expert {load.tolist()}")
    return float(accuracy)


if __name__ == "__main__":
    main(tyro.cli(Settings))
