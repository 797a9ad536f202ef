"""The way of a pipeline's micro-batches to its layers: the embedding, and dense first layers, as DeepSeek-V3 has them.

Rank r computes the dense layers of micro-batches g p + r. They run before the first tick, and again, with their backward pass,
behind the last tick: the ranks share the work evenly. Their outputs lie on every rank during the step, for all micro-batches,
as the outputs' gradients do. Without dense layers the first rank embeds each micro-batch in the tick where it enters.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from moe_jax.models.forward import Carry, run_stage
from moe_jax.train.batch import Batch
from moe_jax.train.micro_batch import MicroBatchPasses


@dataclass(frozen=True)
class Front:
    """The passes of all micro-batches of a step before the pipeline's layers, inside `jax.shard_map` over `pipe`."""

    micro: MicroBatchPasses
    stacked: Batch

    def forward(self) -> Float[Array, "micro_batches batch seq hidden"] | None:
        """Computes the dense layers of all micro-batches; returns the outputs on every rank, None without such layers."""
        if not self._num_stages:
            return None

        def run(batch: Batch) -> Array:
            return self._run(self.micro.params, self.micro.enter(batch).carry.x, batch)

        outputs = lax.all_gather(lax.map(run, self._of_rank), "pipe", axis=1)
        return outputs.reshape(-1, *outputs.shape[2:])[: len(self.stacked["tokens"])]

    def backward(self, dx: Float[Array, "micro_batches batch seq hidden"], gradients: nnx.State) -> nnx.State:
        """Adds the gradients of dense layers and embedding to `gradients`.

        Args:
          dx: the gradients of what entered the pipeline, on the first rank; zeros on the others.
        """
        if not self._num_stages:
            tokens, dx = (x.reshape(-1, *x.shape[2:]) for x in (self.stacked["tokens"], dx))
            return self.micro.embedding(tokens, dx, gradients)
        layers, outside = self._split(self.micro.params)

        def add(sums: nnx.State, of_micro_batch: tuple[Batch, Array]) -> tuple[nnx.State, Array]:
            batch, dy = of_micro_batch

            def run(layers: nnx.State, x) -> Array:
                return self._run(nnx.merge_state(layers, outside), x, batch)

            own, dx = jax.vjp(run, layers, self.micro.enter(batch).carry.x)[1](dy)
            return jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, own), dx

        ranks = lax.axis_size("pipe")
        filled = jnp.pad(dx, [(0, -len(dx) % ranks), *[(0, 0)] * (dx.ndim - 1)])
        dy = lax.psum_scatter(filled.reshape(-1, ranks, *dx.shape[1:]), "pipe", scatter_dimension=1, tiled=False)
        sums, of_others = self._split(gradients)
        sums, dx = lax.scan(add, sums, (self._of_rank, dy))
        tokens, dx = (x.reshape(-1, *x.shape[2:]) for x in (self._of_rank["tokens"], dx))
        return self.micro.embedding(tokens, dx, nnx.merge_state(sums, of_others))

    def _run(self, params: nnx.State, x: Float[Array, "batch seq hidden"], batch: Batch) -> Float[Array, "batch seq hidden"]:
        """Runs the dense layers on a micro-batch."""
        model, entered, carry = self.micro.model(params), self.micro.enter(batch), Carry(x, None)
        for number in range(self._num_stages):
            of_stage = entered.per_layer[number]
            carry, _ = run_stage(model.stages[number], number, entered.inputs, of_stage, carry, self.micro.execution)
        return carry.x

    @property
    def _of_rank(self) -> Batch:
        """The micro-batches of the rank, stacked. The last one stands in for those that fill up an incomplete group."""
        ranks, last = lax.axis_size("pipe"), len(self.stacked["tokens"]) - 1
        own = jnp.minimum(jnp.arange(last // ranks + 1) * ranks + lax.axis_index("pipe"), last)
        return {name: x[own] for name, x in self.stacked.items()}

    @property
    def _num_stages(self) -> int:
        return self.micro.num_stages - 1

    def _split(self, tree: nnx.State) -> tuple[nnx.State, nnx.State]:
        """Splits a tree of parameters into the dense layers, and everything else."""
        layers, others = nnx.split_state(tree, lambda path, _: path[0] == "stages" and path[1] < self._num_stages, ...)
        return layers, others
