"""Settings of a model's execution: recomputation, forced routing, and how a call is spread over devices."""

from dataclasses import dataclass, replace
from typing import Self

from moe_jax.config import ModelConfig
from moe_jax.layers.passes import Remat
from moe_jax.layers.spread import ONE_DEVICE, OneDevice
from moe_jax.models.remat import KEPT_PARTS, KeptPart, layers_and_parts


@dataclass(frozen=True)
class Execution:
    """Defaults of a model's calls, in `Decoder.execution`. A train step sets them, so that objectives need not pass them.

    Attributes:
      remat: recompute each layer in the backward pass and keep only its input; "offload" keeps it in the host's memory.
      num_kept: with `remat`, the last layers keep all their residuals instead. MTP modules are the last layers,
        and a repeat of a stage's body keeps all of its layers or none.
      keep: with `remat`, the other layers keep these parts of their residuals.
      balanced_routing: deal tokens to experts in turn and ignore the router's choice. For benchmarks only.
      spread: how the call is spread over devices; inside `jax.shard_map` a `parallel.Spread`.
    """

    remat: Remat = False
    num_kept: int = 0
    keep: tuple[KeptPart, ...] = ()
    balanced_routing: bool = False
    spread: OneDevice = ONE_DEVICE

    def with_remat(self, remat: Remat | int | str) -> Self:
        """Returns a copy with another `remat`; a number n recomputes all layers but the last n, and none if there are fewer.

        A string adds parts of residuals (`models.remat.KeptPart`) that the recomputed layers keep: "12,router,attention".

        Raises:
          ValueError: a negative number, an unknown or repeated part, or a value of another kind.
        """
        # True is an int too, and equal to 1.
        if isinstance(remat, bool) or (isinstance(remat, str) and remat == "offload"):
            return replace(self, remat=remat if isinstance(remat, bool) else "offload", num_kept=0, keep=())
        if (kept := layers_and_parts(remat)) is None:
            raise ValueError(
                "remat must be True, False, 'offload' or a number of layers that keep their residuals, with any parts that the "
                f"other layers keep, as in '12,{','.join(KEPT_PARTS)}'; got {remat!r}"
            )
        return replace(self, remat=True, num_kept=kept[0], keep=kept[1])

    def of_stage(self, config: ModelConfig, number: int) -> Self:
        """Returns the execution settings of one stage, where `num_kept` counts repeats of the stage's body."""
        if not self.num_kept:
            return self
        stage, *later = config.all_stages[number:]
        kept = (self.num_kept - sum(stage.num_layers for stage in later)) // len(stage.body)
        return replace(self, num_kept=min(max(kept, 0), stage.repeats))
