"""The devices of one call of a model, as seen by layers: `OneDevice` here; `parallel.Spread` overrides it for a mesh."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from jaxtyping import Array, Float, Int

Sums = TypeVar("Sums")


class Exchange(NamedTuple):
    """Statistics of one expert dispatch on this device; they differ between devices until summed."""

    num_dropped: Int[Array, ""]
    """Choices of this device's tokens that no expert computed, because a buffer was full; 0 unless `drop` is set."""
    num_rounds: Int[Array, ""]
    """Rounds of the exchange: 1 plus the further rounds. All devices of the axis have the same number."""
    num_shadows: Int[Array, ""]
    """Experts that were copied to all devices of the axis; 0 unless `shadow_experts` is set.

    All devices have the same number, although its type under `check_vma` allows it to vary.
    """


@dataclass(frozen=True)
class OneDevice:
    """The single-device case of `parallel.Spread`, which overrides it and documents the attributes."""

    expert: Any = field(default=None, init=False)
    context: Any = field(default=None, init=False)
    layer_gathers: Any = field(default=None, init=False)
    mesh_axes: tuple[str, ...] = field(default=(), init=False)

    def sum(self, values: Sums) -> Sums:
        """Sums every array of `values` over the devices of `mesh_axes`; returns `values` unchanged on one device."""
        return values

    def gather(self, stage: int) -> Any:
        """Returns the `LayerGather` of a stage's layers, by index in `Decoder.stages`; None if parameters are replicated."""
        return None

    def experts(
        self, experts: Any, x: Float[Array, "tokens hidden"], routing: Any, valid: Any = None
    ) -> tuple[Float[Array, "tokens hidden"], Exchange | None]:
        """Computes each token's weighted sum of experts, and statistics of the dispatch to other devices.

        Args:
          experts: the `layers.Experts` of this device.
          routing: the `layers.Routing` of the tokens, to the experts of all devices.
          valid: as in `MoE`. On several devices a token that is not valid uses no expert.

        Raises:
          ValueError: the devices together do not hold the router's number of experts.
        """
        check_experts(experts, routing, 1, "without spread.expert")
        return experts(x, routing.weights, routing.experts), None

    def products_like(self, experts: Any, x: Float[Array, "tokens hidden"]) -> Any:
        """Returns arrays like the operands of the gradients of this device's experts, for each device's tokens like x."""
        return experts.products_like(x)


ONE_DEVICE = OneDevice()
"""A call on one device, which holds everything."""


def check_experts(experts: Any, routing: Any, devices: int, how: str) -> None:
    """Checks that the experts of all devices together are as many as the router has.

    Raises:
      ValueError: the numbers differ. `how` describes how the devices share the experts.
    """
    num_experts, held = len(routing.sums.expert_load), experts.gate_up_proj.shape[-3]
    if devices * held != num_experts:
        raise ValueError(
            f"the router chooses among {num_experts} experts; {how}, the devices hold {devices} x {held}: spread.expert "
            "must name the mesh axis over which the experts are split, and be None where each device holds them all"
        )
