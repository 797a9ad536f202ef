"""Arrays of one call of `expert_parallel_mlp` on one device: those with gradients, the experts' weights, and the choices."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.experts.fp8.passes import QuantisedExperts
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices
from moe_jax.kernels.experts.fused_vjp import Matrices
from moe_jax.parallel.expert.routes import Queues


class ExpertInputs(NamedTuple):
    """The arrays that get gradients."""

    x: Float[Array, "tokens hidden"]
    w_gate_up: Float[Array, "local_experts 2*inter hidden"] | None
    w_down: Float[Array, "local_experts hidden inter"] | None
    """Both weights are None where `Choices.held` has them."""
    weights: Float[Array, "tokens k"]
    """The weight of each choice."""
    sums: Matrices | None = None
    """The sums to which the gradients of `Choices.held` are added; None where the experts' weights are inputs, or frozen."""


class HeldExperts(NamedTuple):
    """The weights of this device's experts, as `experts_mlp_of_parts` takes them."""

    w_gate_up: Float[Array, "*layers local_experts 2*inter hidden"] | QuantisedMatrices
    w_down: Float[Array, "*layers local_experts hidden inter"] | QuantisedMatrices
    layer: Int[Array, ""] | None
    """The layer of the call, if the weights are stacks of layers (`kernels.experts.internal.Accumulators`)."""

    @property
    def is_in_fp8(self) -> bool:
        """True for weights that are nothing but their FP8 values and scales."""
        return isinstance(self.w_gate_up, QuantisedMatrices)

    @property
    def arrays(self) -> Matrices:
        """Arrays of the weights' shapes."""
        matrices = self.w_gate_up, self.w_down
        return Matrices(*(w.values if isinstance(w, QuantisedMatrices) else w for w in matrices))

    @property
    def num_experts(self) -> int:
        """The number of this device's experts."""
        return self.arrays.down.shape[-3]


def held_experts(inputs: ExpertInputs, held: HeldExperts | None) -> HeldExperts:
    """Returns the weights of this device's experts: `held`, or those among the inputs if it is None."""
    if held is not None:
        return held
    assert inputs.w_gate_up is not None and inputs.w_down is not None
    return HeldExperts(inputs.w_gate_up, inputs.w_down, None)


class Choices(NamedTuple):
    """The arrays without gradients: the expert of each choice, the round that computes it, and weights that are no inputs."""

    rounds: Int[Array, ""]
    """The number of further rounds."""
    queues: Queues
    is_first: Bool[Array, "tokens k"]
    """True for a choice that the first round computes."""
    experts: Int[Array, "tokens k"]
    """Ids among all experts; -1 for a choice that the exchange does not compute."""
    held: HeldExperts | None
    """The experts' weights, where their gradients are added to `ExpertInputs.sums` or where they are frozen."""
    quantised: QuantisedExperts | None
    """The values of the experts' weights in FP8, where they are `RoundedWeights`."""
