"""The metrics of a preference loss on examples that a model is not trained on."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.preferences.objective import Preference
from moe_jax.train.batch import Batch
from moe_jax.train.on_devices import on_devices
from moe_jax.train.state import TrainState

MEASURED = "loss", "reward_margin", "reward_accuracy"


def make_preference_evaluation(
    graphdef: nnx.GraphDef, objective: Preference, batches: Sequence[Batch]
) -> Callable[[TrainState], dict[str, float]]:
    """Returns evaluate(state): means of loss, margin and accuracy, as "eval_loss" and so on.

    Each batch counts by its number of examples.
    """
    compute = jax.jit(on_devices(objective, graphdef))

    def evaluate(state: TrainState) -> dict[str, float]:
        total, sums = 0.0, dict.fromkeys(MEASURED, 0.0)
        for batch in batches:
            prepared = objective.prepare(batch, jnp.ones(()))
            value, parts = jax.device_get(compute(state.params, state.fixed, prepared))
            found, examples = objective.metrics(value, parts, jnp.ones(())), float(prepared["num_examples"])
            total += examples
            sums = {name: sums[name] + examples * float(found[name]) for name in MEASURED if name in found}
        return {f"eval_{name}": summed / total for name, summed in sums.items()}

    return evaluate
