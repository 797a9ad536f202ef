"""Arrays of one call of `expert_parallel_mlp` on one device: those with gradients, the experts' weights, and the choices."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.experts.weights import ExpertWeights
from moe_jax.parallel.expert.routes import Queues


class ExpertInputs(NamedTuple):
    """The arrays that get gradients."""

    x: Float[Array, "tokens hidden"]
    trained: ExpertWeights
    """`ExpertWeights.trained` of this device's experts."""
    weights: Float[Array, "tokens k"]
    """The weight of each choice."""


class Choices(NamedTuple):
    """The arrays without gradients: the expert of each choice, the round that computes it, and weights that are no inputs."""

    rounds: Int[Array, ""]
    """The number of further rounds."""
    queues: Queues
    is_first: Bool[Array, "tokens k"]
    """True for a choice that the first round computes."""
    experts: Int[Array, "tokens k"]
    """Ids among all experts; -1 for a choice that the exchange does not compute."""
    held: ExpertWeights
    """`ExpertWeights.held` of this device's experts."""
