"""The layers of Qwen3 and Qwen3-MoE in which a token's bits depend on the tokens of its own sequence alone.

Decoding rows, chunks of prompts and whole sequences run the same functions, for any number of tokens. Every sum has one order,
and every rounding one place: matmuls, norms, heads, gates, the router's choice and the sum over experts are kernels. XLA only
moves data, makes the tables of rope, and subtracts a logarithm from a logit.

| rounded to the model's dtype | kept in f32 |
|---|---|
| q, k and v; a head's norm; its rotation; attention | the matmuls' sums, until their reader has added or normed them |
| the matmul behind attention, x + attention; each norm | the router's logits, probabilities and weights |
| the gate's product; each expert's output; their sum, x + the sum | logits of the vocabulary |
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import ModelConfig
from moe_jax.kernels.decode.heads import HEAD_DIM
from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS
from moe_jax.layers.lora import has_adapters
from moe_jax.layers.norm import RMSNorm
from moe_jax.layers.paged import PagedAttend
from moe_jax.layers.quantised import is_quantised
from moe_jax.layers.rope import RopeTables, fixed_frequencies, tables_of
from moe_jax.models.decoder import Decoder
from moe_jax.serving import fused
from moe_jax.serving.batch import ComputedLayers
from moe_jax.serving.weights import LayerWeights, ServedModel

f32 = jnp.float32


def check_strict(model: Decoder) -> None:
    """Refuses a model that these layers do not compute.

    Raises:
      ValueError: the model is not Qwen3 or Qwen3-MoE, or has biases or sizes that the kernels do not take. Or it has adapters,
        quantised weights, or a precision.
    """
    reason = model.config.mixer_refusal("strict computation") or refusal(model.config, model.dtype)
    if model.precision is not None:
        reason = "it multiplies in FP8; take precision 'bf16'"
    if reason is None and has_adapters(model):
        reason = "it has adapters; merge them first (adapters.merge_adapter)"
    if reason is None and is_quantised(nnx.state(model)):
        reason = "its weights are quantised; load it with weights='whole'"
    if reason is not None:
        raise ValueError(f"strict bits are not computed for this model: {reason}")


def refusal(config: ModelConfig, dtype: Any) -> str | None:
    """Returns the reason why these layers are not computed, with what would be; None where they are."""
    reason = fused.refusal(config, dtype, 1)
    if reason is not None:
        return reason
    if config.rope_parameters.rope_type == "dynamic":
        return 'rope type "dynamic" gives all tokens of a batch the frequencies of the longest sequence'
    has_mlp = len(config.moe_layers) < config.num_hidden_layers
    sizes = {"vocab_size": config.vocab_size} | ({"intermediate_size": config.intermediate_size} if has_mlp else {})
    for name, size in sizes.items():
        if size % WARPGROUP_THREADS:
            return f"{name} must be a multiple of {WARPGROUP_THREADS}; got {size}"
    return None


def strict_layers(
    served: ServedModel,
    layers: list[tuple[int, LayerWeights]],
    final_norm: RMSNorm,
    x: Float[Array, "tokens hidden"],
    positions: Int[Array, "tokens"],
    attends: list[PagedAttend],
    valid: Bool[Array, "tokens"],
) -> ComputedLayers:
    """Runs the layers on any number of tokens; other arguments as of `fused_layers`."""
    served = served._replace(strict=True)
    in_splits = [dataclasses.replace(attend, fixed_splits=True) for attend in attends]
    return fused.fused_layers(served, layers, final_norm, x, _rope(served.config, positions[None]), in_splits, valid)


def _rope(config: ModelConfig, positions: Int[Array, "1 tokens"]) -> RopeTables:
    # A program would compute frequencies before it runs or while it runs, with other bits.
    with jax.ensure_compile_time_eval():
        fixed = fixed_frequencies(config.rope_parameters, HEAD_DIM, config.max_position_embeddings)
    return tables_of(positions, *fixed)
