"""Counts what adapters would train and move, from a model's config alone."""

from typing import NamedTuple

from flax import nnx

from moe_jax.adapters.add import add_lora
from moe_jax.adapters.settings import LoraSettings
from moe_jax.adapters.summary import LoraSummary
from moe_jax.adapters.targets import targets_of
from moe_jax.config import ModelConfig
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder


class PlannedLora(NamedTuple):
    """The adapters that a model would get."""

    summary: LoraSummary
    moved_elements: int
    """Elements of rows that all adapters read and write in the forward pass of one token: inputs, and sums with outputs."""


def planned_lora(config: ModelConfig, settings: LoraSettings, *, in_fp8: bool = False) -> PlannedLora:
    """Returns what `add_lora` would add to a model of this config. No array is made.

    Args:
      in_fp8: the experts' own products are in FP8. Their rows are then rounded, and the products added, in passes of their own.

    Raises:
      ValueError: as `add_lora`.
    """
    found: list[PlannedLora] = []

    def adapted() -> Decoder:
        model = from_config(config, rngs=nnx.Rngs(0))
        summary = add_lora(model, settings, rngs=nnx.Rngs(0))
        found.append(PlannedLora(summary, _moved_elements(model, in_fp8)))
        return model

    nnx.eval_shape(adapted)
    return found[0]


def _moved_elements(model: Decoder, in_fp8: bool) -> int:
    active, moved = model.config.experts.num_experts_per_tok if model.config.experts else 1, 0
    for target in targets_of(model):
        if target.found is not None:
            layers, *_, num_out, num_in = target.shape
            of_row = num_in + 2 * num_out
            if target.kind == "experts":
                # Rounding reads 2 bytes and writes 1; a product is read, and its sum with the change written.
                of_row = active * (of_row + (3 * num_in // 2 + 2 * num_out if in_fp8 else 0))
            moved += layers * of_row
    return moved
