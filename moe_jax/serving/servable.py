"""Refuses models that the engine cannot serve, before anything is made for them."""

from typing import Any

import jax
from flax import nnx

from moe_jax.config import ModelConfig
from moe_jax.generation.speculative import check_drafts
from moe_jax.layers.lora import has_adapters
from moe_jax.layers.moe import Experts
from moe_jax.layers.quantised import FP8_BLOCK, BlockScaled
from moe_jax.models.decoder import Decoder
from moe_jax.models.inputs import refuse_deleted
from moe_jax.parallel.pipeline.chunks import refuse_chunks
from moe_jax.serving.limits import EngineLimits


def check_servable(model: Decoder, limits: EngineLimits, *, drafts: int, strict: bool) -> None:
    """Checks that an engine of these limits can serve the model; arguments as of `Engine`.

    Raises:
      ValueError: it cannot; the message says what is in the way.
    """
    check_model(model)
    if not isinstance(limits, EngineLimits):
        raise ValueError(f"limits must be EngineLimits; got {limits!r}")
    check_config(model.config)
    if model.precision and not _has_experts_in_fp8(model):
        raise ValueError(
            "an engine with precision 'fp8' would round the experts' weights in every step: load the model with weights='fp8'"
        )
    if model.precision and model.precision.dense:
        raise ValueError(
            f"an engine computes dense matrices in the model's dtype, not in FP8; got dense={model.precision.dense!r}: take "
            "set_precision('fp8')"
        )
    devices = {device for leaf in jax.tree.leaves(nnx.state(model)) for device in leaf.sharding.device_set}
    if len(devices) > 1:
        _check_several(model, len(devices), drafts=drafts, strict=strict)
    check_drafting(drafts, model.config, limits)
    if strict:
        from moe_jax.serving.strict import check_strict  # imports Pallas Mosaic GPU

        check_strict(model)
        if drafts:
            raise ValueError(f"strict=True needs drafts=0; got drafts={drafts}")


def check_model(model: Any) -> None:
    """Refuses values that are no model, such as its folder, and a model whose arrays were deleted.

    Raises:
      ValueError: it is none, or its arrays were deleted.
    """
    if not isinstance(model, Decoder):
        # Without its repr: a state of the model's arrays is easily given in its place.
        raise ValueError(f"model must be a Decoder, as moe_jax.from_pretrained(folder) returns; got {type(model).__name__}")
    refuse_deleted(nnx.state(model))


def check_config(config: ModelConfig) -> None:
    """Refuses an architecture that no engine can serve, before weights are read.

    Raises:
      ValueError: positions scale with the longest text of a batch, or layers are recurrent or of a repeated pattern.
    """
    if (reason := config.mixer_refusal("an engine", has_sinks=False)) is not None:
        raise ValueError(f"{reason}; generate without an engine (moe_jax.generate)")
    if any(len(stage.body) > 1 for stage in config.stages):
        raise ValueError("an engine needs stages of equal layers; this model repeats a pattern of several kinds")
    if config.rope_parameters.rope_type == "dynamic":
        raise ValueError(
            'rope type "dynamic" gives all tokens of a batch the frequencies of the longest sequence; an engine cannot serve it'
        )


def check_drafting(drafts: int, config: ModelConfig, limits: EngineLimits) -> None:
    """Checks that an engine of these limits can draft.

    Raises:
      ValueError: drafts are neither 0 nor 1, the model has no module that drafts, or a step no room for drafts.
    """
    if drafts not in (0, 1):
        raise ValueError(f"drafts must be 0 or 1; got {drafts!r}")
    if drafts:
        check_drafts(config)
        if limits.max_tokens_per_step < 2 * limits.max_sequences:
            raise ValueError(
                f"with drafts max_tokens_per_step must be at least twice max_sequences; "
                f"got {limits.max_tokens_per_step} and {limits.max_sequences}"
            )


def _check_several(model: Decoder, num_devices: int, *, drafts: int, strict: bool) -> None:
    refuse_chunks(nnx.state(model, nnx.Param), "an engine")
    if any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(nnx.state(model))):
        raise ValueError("an engine computes in one process; the model lies on devices of several")
    options = {"drafts": bool(drafts), "strict": strict, "adapters": has_adapters(model)}
    if wrong := [name for name, is_set in options.items() if is_set]:
        raise ValueError(f"an engine on several devices has no {' and no '.join(wrong)}; the model lies on {num_devices}")


def _has_experts_in_fp8(model: Decoder) -> bool:
    experts = [module for _, module in nnx.iter_modules(model) if isinstance(module, Experts)]
    matrices = [variable.get_value() for each in experts for variable in (each.gate_up_proj, each.down_proj)]
    return all(isinstance(each, BlockScaled) and each.block == FP8_BLOCK for each in matrices)
