"""Settings of a model's execution: recomputation, forced routing, and how a call is spread over devices."""

from dataclasses import dataclass

from moe_jax.layers.passes import Remat
from moe_jax.layers.spread import ONE_DEVICE, OneDevice


@dataclass(frozen=True)
class Execution:
    """Defaults of a model's calls, in `Decoder.execution`. A train step sets them, so that objectives need not pass them.

    Attributes:
      remat: recompute each layer in the backward pass and keep only its input; "offload" keeps it in the host's memory.
      balanced_routing: deal tokens to experts in turn and ignore the router's choice. For benchmarks only.
      spread: how the call is spread over devices; inside `jax.shard_map` a `parallel.Spread`.
    """

    remat: Remat = False
    balanced_routing: bool = False
    spread: OneDevice = ONE_DEVICE
