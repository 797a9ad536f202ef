"""The layers of a step of Qwen3 and Qwen3-MoE on Hopper, with the fewest kernels: `kernels.decode` between matmuls.

A residual sum is fused with the following norm: a layer starts from its normed input, and ends with the next layer's norm. A
matmul is `project_tokens` where that is faster, and XLA's for one token or few columns (`kernels.decode.project`).

| kernels of a layer | what they compute |
|---|---|
| a matmul, heads_to_pages | partial sums of q, k and v; heads normed and rotated, keys and values in their pages |
| paged_attention, merge_splits | attention to the pages; its second kernel where keys are split |
| a matmul, add_splits | partial sums of the output; x + attention, and its norm |
| a matmul, route_rows, plan_rows | partial sums of the router's logits; the choice; rows of experts |
| place_rows | tokens of these rows, and rows of tokens, if there are more than 64 |
| gated_matmul, grouped_matmul, add_experts | experts; x + the sum over choices, and the next norm |

With chunks of prompts and more than MOST_PLANNED_TOKENS tokens, all matmuls except the router's write whole sums in the model's
dtype. chunk_heads_to_pages then replaces heads_to_pages, and XLA places the rows of experts.

If devices split the experts, `group` gathers the tokens' rows before the router's matmul, and returns rows before add_experts.

With strict bits a token's bits depend only on the tokens of its own sequence. Decoding rows, chunks of prompts and whole
sequences run the same functions, for any number of tokens. Every sum has a fixed order, and rounding happens at fixed places.
So matmuls (`kernels.strict.matmul`), norms, heads, gates, the router's choice and the sum over experts are kernels. XLA only
moves data, makes the tables of rope, and subtracts a logarithm from a logit.

| strict bits: rounded to the model's dtype | kept in f32 |
|---|---|
| q, k and v; a head's norm; its rotation; attention | the matmuls' sums, until their reader has added or normed them |
| the matmul after attention, x + attention; each norm | the router's logits, probabilities and weights |
| the gate's product; each expert's output; their sum, x + the sum | logits of the vocabulary |
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import ModelConfig
from moe_jax.kernels.decode.add_norm import AddedNorm, ExpertRows, add_experts, add_splits
from moe_jax.kernels.decode.experts import MOST_PLANNED_TOKENS, expert_rows, expert_rows_in_fp8
from moe_jax.kernels.decode.heads import HEAD_DIM, HeadNorms, NewTokens, chunk_heads_to_pages, heads_to_pages
from moe_jax.kernels.decode.project import project as project_in_splits
from moe_jax.kernels.decode.route import TokenChoices, route_rows
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.fp8 import mosaic as fp8_mosaic
from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS
from moe_jax.kernels.strict.matmul import matmul, matmul_in_parts
from moe_jax.kernels.strict.rows import gated_silu, norm_rows
from moe_jax.layers.attention import Attention
from moe_jax.layers.fp8 import codes_of
from moe_jax.layers.linear import RMSNorm, rms_norm
from moe_jax.layers.lora import has_adapters
from moe_jax.layers.mlp import MLP
from moe_jax.layers.moe import MoE
from moe_jax.layers.paged import LayerPages, PagedAttend
from moe_jax.layers.quantised import is_quantised
from moe_jax.layers.rope import RopeTables, fixed_frequencies, tables_of
from moe_jax.models.decoder import Decoder
from moe_jax.serving import group
from moe_jax.serving.adapters import TOGETHER, RowAdapters
from moe_jax.serving.placement import splits_experts
from moe_jax.serving.weights import ComputedLayers, LayerWeights, ServedModel, layer_module, unlike_qwen3


def refusal(config: ModelConfig, dtype: Any, tokens: int, *, in_fp8: bool = False) -> str | None:
    """Returns the reason why these kernels do not support a model, with the remedy; None if they do.

    Args:
      in_fp8: experts multiply in FP8.
    """
    spec, heads = config.experts, config.mixer
    if (reason := unlike_qwen3(config)) is not None:
        return reason
    if in_fp8 and tokens > MOST_PLANNED_TOKENS:
        return f"it supports at most {MOST_PLANNED_TOKENS} tokens of experts in FP8; got {tokens}"
    if {heads.key_dim, heads.value_dim, heads.rotary_dim} != {HEAD_DIM}:
        return f"head_dim must be {HEAD_DIM}; got {heads.key_dim}"
    if config.hidden_size % WARPGROUP_THREADS:
        return f"hidden_size must be a multiple of {WARPGROUP_THREADS}; got {config.hidden_size}"
    if spec is not None and spec.num_experts % WARPGROUP_THREADS:
        return f"the number of experts must be a multiple of {WARPGROUP_THREADS}; got {spec.num_experts}"
    inter = spec.moe_intermediate_size if spec else HEAD_DIM
    return (fp8_mosaic if in_fp8 else mosaic).refusal(dtype, config.hidden_size, inter)


def fused_layers(
    served: ServedModel,
    layers: list[tuple[int, LayerWeights]],
    final_norm: RMSNorm,
    x: Float[Array, "tokens hidden"],
    rope: RopeTables,
    attends: list[PagedAttend],
    valid: Bool[Array, "tokens"],
    adapters: Sequence[RowAdapters | None],
) -> ComputedLayers:
    """Runs the layers on any number of tokens of each row.

    Args:
      layers: each layer's stage and weights (`weights.layers_of`).
      attends: each layer's attention, with its pages.
      valid: tokens that count; other tokens' hidden states are meaningless.
      adapters: each layer's adapters of the tokens; None: no token has one.

    If the devices of `served.mesh` split the experts, each calls this inside `jax.shard_map`, with its own tokens (`group`).
    """
    cos, sin = rope.cos[0], rope.sin[0]
    new = NewTokens(jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1), *attends[0].places)
    norms = [layer["input_layernorm"]["weight"][...] for _, (layer, _, _) in layers]
    first_norm = norm_rows(x, norms[0], eps=final_norm.eps) if served.strict else rms_norm(x, norms[0], final_norm.eps)
    state = AddedNorm(x, first_norm)
    if splits_experts(served.mesh):
        valid = group.gathered(valid)
    written, experts = [], []
    next_norms = [*norms[1:], final_norm.weight[...]]
    for (stage, of_layer), attend, next_norm, of_rows in zip(layers, attends, next_norms, adapters, strict=True):
        state, pages, chosen = _layer(served, stage, of_layer, state, new, attend, valid, next_norm, of_rows)
        written.append(pages)
        experts += [] if chosen is None else [chosen]
    return state.normed, written, experts


def check_strict(model: Decoder) -> None:
    """Refuses a model that the strict layers do not compute.

    Raises:
      ValueError: the model is not Qwen3 or Qwen3-MoE, or has biases or sizes that the kernels do not support. Or it has
        adapters, quantised weights, or a precision.
    """
    reason = strict_refusal(model.config, model.dtype)
    if model.precision is not None:
        reason = "it multiplies in FP8; use precision 'bf16'"
    if reason is None and has_adapters(model):
        reason = "it has adapters; merge them first (adapters.merge_adapter)"
    if reason is None and is_quantised(nnx.state(model)):
        reason = "its weights are quantised; load it with weights='whole'"
    if reason is not None:
        raise ValueError(f"strict bits are not computed for this model: {reason}")


def strict_refusal(config: ModelConfig, dtype: Any) -> str | None:
    """Returns the reason why strict layers do not support a model, with the remedy; None if they do."""
    if (reason := config.mixer_refusal("strict computation") or refusal(config, dtype, 1)) is not None:
        return reason
    if config.rope_parameters.rope_type == "dynamic":
        return 'with rope type "dynamic" all tokens of a batch get the frequencies of the longest sequence'
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
    """Runs the layers on any number of tokens; other arguments as in `fused_layers`."""
    served = served._replace(strict=True)
    in_splits = [dataclasses.replace(attend, fixed_splits=True) for attend in attends]
    rope, no_adapters = _rope(served.config, positions[None]), [None] * len(layers)
    return fused_layers(served, layers, final_norm, x, rope, in_splits, valid, no_adapters)


def _rope(config: ModelConfig, positions: Int[Array, "1 tokens"]) -> RopeTables:
    # Else XLA might compute the frequencies at compile time or at run time, with different bits.
    with jax.ensure_compile_time_eval():
        fixed = fixed_frequencies(config.rope_parameters, HEAD_DIM, config.max_position_embeddings)
    return tables_of(positions, *fixed)


# Jitted, so that layers which differ only in their arrays are traced once.
@partial(jax.jit, static_argnums=(0, 1))
def _layer(
    served: ServedModel,
    stage: int,
    weights: LayerWeights,
    state: AddedNorm,
    new: NewTokens,
    attend: PagedAttend,
    valid: Bool[Array, " all_tokens"],
    next_norm: Float[Array, "hidden"],
    adapters: RowAdapters | None,
) -> tuple[AddedNorm, LayerPages, Int[Array, "tokens k"] | None]:
    """Returns the residual stream after the layer, its next norm, the layer's pages, and its tokens' experts."""
    layer, in_f32 = layer_module(served, stage, weights), matmul_in_parts if served.strict else project_in_splits
    project = in_f32 if served.strict or len(state.x) <= MOST_PLANNED_TOKENS else _project
    attended, pages = _attended(layer.self_attn, state.normed, new, attend, project, adapters)
    norm = layer.post_attention_layernorm
    state = add_splits(state.x, attended, norm.weight[...], eps=norm.eps)
    if isinstance(layer.mlp, MoE):
        k = layer.mlp.router.num_experts_per_tok
        choice, outputs = _experts(layer.mlp, state.normed, valid, in_f32, is_split=splits_experts(served.mesh))
        return add_experts(state.x, outputs, next_norm, eps=norm.eps, k=k), pages, choice.experts[:, :k]
    act = _strict_act(layer.mlp, state.normed) if served.strict else layer.mlp.act(state.normed)
    return add_splits(state.x, project(act, layer.mlp.down_proj.weight[...]), next_norm, eps=norm.eps), pages, None


Project = Callable[..., Float[Array, "splits tokens out"]]
"""(x, *weights) -> x W^T as partial sums in f32, or as one sum in x's dtype; W stacks the weights' rows."""


def _project(x: Float[Array, "tokens in"], *weights: Float[Array, "_ in"]) -> Float[Array, "1 tokens out"]:
    return (x @ jnp.concatenate(weights).T)[None]


def _attended(
    attention: Attention,
    normed: Float[Array, "tokens hidden"],
    new: NewTokens,
    attend: PagedAttend,
    project: Project,
    adapters: RowAdapters | None,
) -> tuple[Float[Array, "splits tokens hidden"], LayerPages]:
    def projected(x: Float[Array, "tokens in"], names: tuple[str, ...]) -> Float[Array, "splits tokens out"]:
        splits = project(x, *(getattr(attention, name).weight[...] for name in names))
        # Added to one of the partial sums: a further sum would copy them all.
        return splits if adapters is None else splits.at[0].add(adapters.part(" ".join(names), x, splits.dtype))

    splits = projected(normed, TOGETHER)
    assert attention.q_norm is not None and attention.k_norm is not None  # `refusal`
    norms = HeadNorms(attention.q_norm.weight[...], attention.k_norm.weight[...])
    if splits.dtype == normed.dtype:
        q, *pages = chunk_heads_to_pages(splits[0], norms, new, *attend.pages, eps=attention.q_norm.eps)
    else:
        q, *pages = heads_to_pages(splits, norms, new, *attend.pages, eps=attention.q_norm.eps)
    out = attend.read(q, tuple(pages), scale=HEAD_DIM**-0.5)
    return projected(out.reshape(len(out), -1), ("o_proj",)), tuple(pages)


def _experts(
    moe: MoE, normed: Float[Array, "tokens hidden"], valid: Bool[Array, " all_tokens"], project: Project, *, is_split: bool
) -> tuple[TokenChoices, ExpertRows]:
    k, experts = moe.router.num_experts_per_tok, moe.experts
    if is_split:
        normed = group.gathered(normed)
    logits = project(normed, moe.router.weight[...])
    choice = route_rows(logits, valid, k=k, divide_by_sum=moe.router.rule.norm_topk_prob)
    assert experts.place is not None  # `layer_module` reads experts in their stacks
    place = experts.place[...]
    if experts.precision is None:
        weights, num_held = (experts.gate_up_proj[...], experts.down_proj[...]), experts.down_proj.shape[1]
        if not is_split:
            return choice, expert_rows(normed, *weights, choice, place, k=k)
        outputs = expert_rows(normed, *weights, group.held_first(choice, num_held), place, k=k)
        return group.returned(outputs, choice, num_held, k)
    gate_up, down = codes_of(experts.gate_up_proj.get_value()), codes_of(experts.down_proj.get_value())
    assert gate_up is not None and down is not None  # the engine accepts no other experts with a precision
    return choice, expert_rows_in_fp8(normed, gate_up, down, choice, place, k=k)


def _strict_act(mlp: MLP, normed: Float[Array, "tokens hidden"]) -> Float[Array, "tokens inter"]:
    h = matmul(normed, mlp.gate_proj.weight[...], mlp.up_proj.weight[...])
    return gated_silu(h, dtype=normed.dtype)
