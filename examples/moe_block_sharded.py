"""Our MoE block in your own model on several devices: experts and tokens split over a mesh, the same losses as on one.

    python examples/moe_block_sharded.py                      # 8 devices made of a CPU
    python examples/moe_block_sharded.py --no-fake-devices    # all GPUs of this machine

Each device holds its part of the experts and of the batch; all other parameters are whole on every device. Tokens travel to
their experts inside `moe(x, spread=...)`. Sums over the batch are `psum`s, as in any `jax.shard_map`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.layers import MoE, load_balancing_loss
from moe_jax.parallel import ExpertParallel, Spread, make_mesh


@dataclass
class Settings:
    """Command-line options."""

    steps: int = 20
    fake_devices: bool = True


class Classifier(nnx.Module):
    """Your own model: two linear layers, and a MoE between them."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Linear(2, 32, rngs=rngs)
        self.moe = MoE(32, 64, num_experts=16, num_experts_per_tok=2, stddev=0.2, rngs=rngs)
        self.head = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, points):
        """points [batch, 2] -> (logits [batch, 4], the routing, for the balancing loss)."""
        x = nnx.gelu(self.embed(points))
        y, routing = self.moe(x, spread=Spread(expert=ExpertParallel(axis_name="expert")))
        return self.head(x + y), routing


def loss_fn(model, points, labels):
    """Inside `shard_map`: this device's points, the loss of all."""
    logits, routing = model(points)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return jax.lax.pmean(cross_entropy, "expert") + 0.01 * load_balancing_loss(routing, mesh_axes="expert")


def train(num_devices: int, steps: int) -> list[float]:
    """Trains on `num_devices` devices and returns the loss of each step."""
    mesh = make_mesh(expert=num_devices, devices=jax.devices()[:num_devices])
    graph, params = nnx.split(Classifier(nnx.Rngs(0)), nnx.Param)
    # By path: what belongs to `experts` is split along its first axis, all else is whole everywhere.
    specs = jax.tree.map_with_path(lambda path, _: P("expert") if "['experts']" in jax.tree_util.keystr(path) else P(), params)
    params = jax.tree.map(lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec)), params, specs)
    optimizer = optax.adam(3e-3)

    def local_loss(params, points, labels):
        return loss_fn(nnx.merge(graph, params), points, labels)

    loss_of_mesh = jax.shard_map(local_loss, mesh=mesh, in_specs=(specs, P("expert"), P("expert")), out_specs=P())

    @jax.jit
    def train_step(params, opt_state, key):
        points = jax.random.uniform(key, (512, 2), minval=-1.0, maxval=1.0)
        labels = (points[:, 0] * points[:, 1] > 0).astype(jnp.int32) + 2 * (jnp.abs(points).sum(-1) > 1)
        loss, grads = jax.value_and_grad(loss_of_mesh)(params, points, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = optimizer.init(params), []
    for step in range(1, steps + 1):
        params, opt_state, loss = train_step(params, opt_state, jax.random.key(step))
        losses.append(float(loss))
    return losses


def main(settings: Settings) -> None:
    """Trains on one device and on all."""
    if settings.fake_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
    for num_devices in (1, jax.device_count()):
        losses = train(num_devices, settings.steps)
        print(f"{num_devices} device(s): loss {losses[0]:.5f} at step 1, {losses[-1]:.5f} at step {settings.steps}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
