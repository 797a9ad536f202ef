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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import ModelConfig, Qwen3Config
from moe_jax.kernels.decode.add_norm import AddedNorm, ExpertRows, add_experts, add_splits
from moe_jax.kernels.decode.experts import expert_rows
from moe_jax.kernels.decode.heads import HEAD_DIM, HeadNorms, NewTokens, heads_to_pages
from moe_jax.kernels.decode.route import TokenChoices, route_rows
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.routing import plan
from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS
from moe_jax.kernels.strict.matmul import matmul
from moe_jax.kernels.strict.rows import gated_silu, norm_rows
from moe_jax.layers.attention import Attention
from moe_jax.layers.lora import Adapter
from moe_jax.layers.mlp import MLP
from moe_jax.layers.moe import MoE
from moe_jax.layers.norm import RMSNorm
from moe_jax.layers.paged import LayerPages, PagedAttend
from moe_jax.layers.rope import RopeTables, fixed_frequencies, tables_of
from moe_jax.models.decoder import Decoder
from moe_jax.serving import fused
from moe_jax.serving.fused import ComputedLayers
from moe_jax.serving.weights import LayerWeights, ServedModel, layer_module

f32 = jnp.float32


def check_strict(model: Decoder) -> None:
    """Refuses a model that these layers do not compute.

    Raises:
      ValueError: the model is not Qwen3 or Qwen3-MoE, or has windows, biases, adapters or sizes that the kernels do not take.
    """
    reason = refusal(model.config, model.dtype)
    if reason is None and any(isinstance(module, Adapter) for _, module in nnx.iter_modules(model)):
        reason = "it has adapters; merge them first (adapters.merge_adapter)"
    if reason is not None:
        raise ValueError(f"strict bits are not computed for this model: {reason}")


def refusal(config: ModelConfig, dtype: Any) -> str | None:
    """Returns the reason why these layers are not computed, with what would be; None where they are."""
    reason = fused.refusal(config, dtype, 1)
    if reason is not None:
        return reason
    assert isinstance(config, Qwen3Config)
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
    """Runs the layers on any number of tokens; other arguments as of `fused.fused_layers`."""
    cos, sin = (table[0] for table in _rope(served.config, positions[None]))
    new = NewTokens(jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1), *attends[0].places)
    norms = [of_layer.layer["input_layernorm"]["weight"][...] for _, of_layer in layers]
    state = AddedNorm(x, norm_rows(x, norms[0], eps=final_norm.eps))
    written, experts = [], []
    for (stage, of_layer), attend, next_norm in zip(layers, attends, [*norms[1:], final_norm.weight[...]], strict=True):
        state, pages, chosen = _layer(served, stage, of_layer, state, new, attend, valid, next_norm)
        written.append(pages)
        experts += [] if chosen is None else [chosen]
    return ComputedLayers(state.normed, written, experts)


def _rope(config: ModelConfig, positions: Int[Array, "1 tokens"]) -> RopeTables:
    # A program would compute frequencies before it runs or while it runs, with other bits.
    with jax.ensure_compile_time_eval():
        fixed = fixed_frequencies(config.rope_parameters, HEAD_DIM, config.max_position_embeddings)
    return tables_of(positions, *fixed)


# Jitted, so that layers which differ in their arrays alone are traced once.
@partial(jax.jit, static_argnums=(0, 1))
def _layer(
    served: ServedModel,
    stage: int,
    weights: LayerWeights,
    state: AddedNorm,
    new: NewTokens,
    attend: PagedAttend,
    valid: Bool[Array, "tokens"],
    next_norm: Float[Array, "hidden"],
) -> tuple[AddedNorm, LayerPages, Int[Array, "tokens k"] | None]:
    """Returns the residual stream behind the layer and its next norm, the layer's pages, and its tokens' experts."""
    layer = layer_module(served, stage, weights)
    attended, pages = _attended(layer.self_attn, state.normed, new, attend)
    norm = layer.post_attention_layernorm
    state = add_splits(state.x, attended[None], norm.weight[...], eps=norm.eps)
    if isinstance(layer.mlp, MoE):
        choice, outputs = _experts(layer.mlp, state.normed, valid)
        k = layer.mlp.router.num_experts_per_tok
        return add_experts(state.x, outputs, next_norm, eps=norm.eps, k=k), pages, choice.experts[:, :k]
    return add_splits(state.x, _mlp(layer.mlp, state.normed)[None], next_norm, eps=norm.eps), pages, None


def _attended(
    attention: Attention, normed: Float[Array, "tokens hidden"], new: NewTokens, attend: PagedAttend
) -> tuple[Float[Array, "tokens hidden"], LayerPages]:
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    heads = matmul(normed, *(projection.weight[...] for projection in projections), out_dtype=f32)
    norms = HeadNorms(attention.q_norm.weight[...], attention.k_norm.weight[...])
    q, *pages = heads_to_pages(heads[None], norms, new, *attend.pages, eps=attention.q_norm.eps)
    out = _attention(q, tuple(pages), attend)
    return matmul(out.reshape(len(out), -1), attention.o_proj.weight[...], out_dtype=f32), tuple(pages)


def _attention(
    q: Float[Array, "tokens heads head_dim"], pages: LayerPages, attend: PagedAttend
) -> Float[Array, "tokens heads head_dim"]:
    return dataclasses.replace(attend, fixed_splits=True).read(q, pages, scale=HEAD_DIM**-0.5)


def _mlp(mlp: MLP, normed: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
    h = matmul(normed, mlp.gate_proj.weight[...], mlp.up_proj.weight[...], out_dtype=f32)
    return matmul(gated_silu(h, dtype=normed.dtype), mlp.down_proj.weight[...], out_dtype=f32)


def _experts(moe: MoE, normed: Float[Array, "tokens hidden"], valid: Bool[Array, "tokens"]) -> tuple[TokenChoices, ExpertRows]:
    k, experts = moe.router.num_experts_per_tok, moe.experts
    logits = matmul(normed, moe.router.weight[...], out_dtype=f32)
    choice = route_rows(logits[None], valid, k=k, divide_by_sum=moe.router.norm_topk_prob)
    w_gate_up, w_down = experts.gate_up_proj[...], experts.down_proj[...]
    assert experts.place is not None  # `layer_module` reads experts in their stacks
    layer = experts.place[...]
    if len(normed) <= fused.MOST_TOKENS:
        return choice, expert_rows(normed, w_gate_up, w_down, choice, layer, k=k)
    of_rows = dataclasses.replace(plan(choice.experts[:, :k], logits.shape[1], mosaic.ROW_ALIGNMENT), layer=layer)
    _, act = mosaic.gated_matmul(normed, w_gate_up, of_rows, source_of_row=of_rows.token_of_row, keep_h=False)
    rows = mosaic.grouped_matmul(act, w_down, of_rows)
    return choice, ExpertRows(rows, choice.weights, choice.experts, None, None, of_rows.row_of_pair)
