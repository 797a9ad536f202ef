"""The layers of a step on Hopper, with the fewest kernels: `kernels.decode` between matmuls.

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

Qwen3 has these alone. Shared experts, biases, one norm for all heads, and numbers of experts that are no multiple of 128 add
XLA's kernels.

With chunks of prompts and more than MOST_PLANNED_TOKENS tokens, all matmuls except the router's write whole sums in the model's
dtype. chunk_heads_to_pages then replaces heads_to_pages, and XLA places the rows of experts.

If devices split the experts, `group` gathers the tokens' rows before the router's matmul, and returns rows before add_experts.

With strict bits a token's bits depend only on the tokens of its own sequence. Decoding rows, chunks of prompts and whole
sequences run the same functions, for any number of tokens. Every sum has a fixed order, and rounding happens at fixed places.
So matmuls (`kernels.strict.matmul`), norms, heads, gates, the router's choice and the sum over experts are kernels. XLA only
moves data, makes the tables of rope, and subtracts a logarithm from a logit. If all heads have one norm, it also adds the
partial sums of q, k and v, in order.

| strict bits: rounded to the model's dtype | kept in f32 |
|---|---|
| q, k and v; a head's norm; its rotation; attention | the matmuls' sums, until their reader has added or normed them |
| the matmul after attention, x + attention; each norm | the router's logits, probabilities and weights |
| the gate's product; each routed expert's output | the output of shared experts, and the sigmoid of their gate |
| the sum over experts, x + the sum | logits of the vocabulary |
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import HeadsSpec, ModelConfig
from moe_jax.kernels.decode.add_norm import AddedNorm, ExpertRows, SharedRows, add_experts, add_splits
from moe_jax.kernels.decode.experts import MOST_PLANNED_TOKENS, expert_rows, expert_rows_in_fp8
from moe_jax.kernels.decode.heads import HEAD_DIM, PIECE, HeadNorms, NewTokens, chunk_heads_to_pages, heads_to_pages
from moe_jax.kernels.decode.project import project as project_in_splits
from moe_jax.kernels.decode.route import TokenChoices, route_rows
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.fp8 import mosaic as fp8_mosaic
from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS
from moe_jax.kernels.split_matmul import WIDTHS
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
from moe_jax.serving.weights import ComputedLayers, LayerWeights, ServedModel, lacking_parts, layer_module


def refusal(config: ModelConfig, dtype: Any, tokens: int, *, in_fp8: bool = False) -> str | None:
    """Returns the reason why these kernels do not support a model, with the remedy; None if they do.

    Args:
      in_fp8: experts multiply in FP8.
    """
    spec, heads = config.experts, config.mixer
    if (reason := lacking_parts(config)) is not None:
        return reason
    if in_fp8 and tokens > MOST_PLANNED_TOKENS:
        return f"it supports at most {MOST_PLANNED_TOKENS} tokens of experts in FP8; got {tokens}"
    if {heads.key_dim, heads.value_dim} != {HEAD_DIM}:
        return f"head_dim must be {HEAD_DIM}; got {heads.key_dim}"
    if config.hidden_size % WARPGROUP_THREADS:
        return f"hidden_size must be a multiple of {WARPGROUP_THREADS}; got {config.hidden_size}"
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
    new = NewTokens(*tables_of_heads(rope, served.config.mixer), *attends[0].places)
    norms: list[Any] = [layer["input_layernorm"]["weight"][...] for _, (layer, _, _) in layers]
    state = AddedNorm(x, _normed(served, x, norms[0]))
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
      ValueError: the model has parts or sizes that the kernels do not support. Or it has adapters, quantised weights, or a
        precision.
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
    has_mlp, spec = len(config.moe_layers) < config.num_hidden_layers, config.experts
    sizes = [("vocab_size", config.vocab_size, WARPGROUP_THREADS)]
    sizes += [("intermediate_size", config.intermediate_size, WARPGROUP_THREADS)] if has_mlp else []
    if spec is not None:
        sizes += [("the width of all shared experts", spec.shared_intermediate_size, WARPGROUP_THREADS)]
        sizes += [("the number of experts", spec.num_experts, WIDTHS[-1])]
    return next((f"{name} must be a multiple of {of}; got {size}" for name, size, of in sizes if size % of), None)


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
        fixed = fixed_frequencies(config.rope_parameters, config.rotary_dim, config.max_position_embeddings)
    return tables_of(positions, *fixed)


def tables_of_heads(rope: RopeTables, heads: HeadsSpec) -> tuple[Float[Array, "tokens 128"], Float[Array, "tokens 128"]]:
    """Returns cos and sin of `NewTokens`."""
    cos, sin = rope.cos[0], rope.sin[0]
    if heads.interleaved:
        cos, sin = jnp.repeat(cos, 2, axis=-1), jnp.stack([-sin, sin], axis=-1).reshape(len(sin), -1)
    else:
        cos, sin = jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)
    if not (fill := HEAD_DIM - heads.rotary_dim):
        return cos, sin
    rest = (0, 0), (0, fill)
    return jnp.pad(cos, rest, constant_values=1), jnp.pad(sin, rest)


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
    attended, pages = _attended(served, layer.self_attn, state.normed, new, attend, project, adapters)
    norm = layer.post_attention_layernorm
    state = add_splits(state.x, attended, norm.weight[...], eps=norm.eps)
    if isinstance(layer.mlp, MoE):
        k = layer.mlp.router.num_experts_per_tok
        choice, outputs = _experts(layer.mlp, state.normed, valid, in_f32, is_split=splits_experts(served.mesh))
        shared = _shared(served, layer.mlp, state.normed, project)
        return add_experts(state.x, outputs, next_norm, shared, eps=norm.eps, k=k), pages, choice.experts[:, :k]
    act = _act(served, layer.mlp, state.normed)
    return add_splits(state.x, project(act, layer.mlp.down_proj.weight[...]), next_norm, eps=norm.eps), pages, None


Project = Callable[..., Float[Array, "splits tokens out"]]
"""(x, *weights) -> x W^T as partial sums in f32, or as one sum in x's dtype; W stacks the weights' rows."""


def _project(x: Float[Array, "tokens in"], *weights: Float[Array, "_ in"]) -> Float[Array, "1 tokens out"]:
    return (x @ jnp.concatenate(weights).T)[None]


def _attended(
    served: ServedModel,
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

    splits, heads = projected(normed, TOGETHER), attention.mixer
    bias = jnp.concatenate([getattr(attention, name).bias[...] for name in TOGETHER]) if heads.biases else None
    norms = HeadNorms()
    if heads.joint_norms:
        splits, bias = _jointly_normed(served, attention, splits, bias), None
    elif attention.q_norm is not None and attention.k_norm is not None:
        norms = HeadNorms(attention.q_norm.weight[...], attention.k_norm.weight[...])
    distance = 1 if heads.interleaved else heads.rotary_dim // 2
    options: dict[str, Any] = dict(eps=served.config.rms_norm_eps, distance=distance)
    if splits.dtype == normed.dtype and distance % PIECE == 0:
        projections = splits[0] if bias is None else splits[0] + bias.astype(splits.dtype)
        q, *pages = chunk_heads_to_pages(projections, norms, new, *attend.pages, **options)
    else:
        q, *pages = heads_to_pages(splits, norms._replace(bias=bias), new, *attend.pages, dtype=normed.dtype, **options)
    out = attend.read(q, tuple(pages), scale=HEAD_DIM**-0.5)
    return projected(out.reshape(len(out), -1), ("o_proj",)), tuple(pages)


def _jointly_normed(
    served: ServedModel, attention: Any, splits: Float[Array, "splits tokens columns"], bias: Float[Array, "columns"] | None
) -> Float[Array, "1 tokens columns"]:
    """Returns the sum, with one norm of all query heads and one of all key heads."""
    # In order, as kernels add.
    total = sum(splits[1:], start=splits[0])
    total = (total if bias is None else total + bias.astype(total.dtype)).astype(served.dtype)
    num_q, num_k = (len(norm.weight) for norm in (attention.q_norm, attention.k_norm))
    q, k, v = jnp.split(total, (num_q, num_q + num_k), axis=-1)
    q, k = (_normed(served, x, norm.weight[...]) for x, norm in ((q, attention.q_norm), (k, attention.k_norm)))
    return jnp.concatenate([q, k, v], axis=-1).astype(splits.dtype)[None]


def _normed(
    served: ServedModel, x: Float[Array, "tokens columns"], weight: Float[Array, "columns"]
) -> Float[Array, "tokens columns"]:
    eps = served.config.rms_norm_eps
    return norm_rows(x, weight, eps=eps) if served.strict else rms_norm(x, weight, eps)


def _experts(
    moe: MoE, normed: Float[Array, "tokens hidden"], valid: Bool[Array, " all_tokens"], project: Project, *, is_split: bool
) -> tuple[TokenChoices, ExpertRows]:
    k, experts = moe.router.num_experts_per_tok, moe.experts
    if is_split:
        normed = group.gathered(normed)
    logits = project(normed, moe.router.weight[...])
    bias = None if moe.router.expert_bias is None else moe.router.expert_bias[...]
    choice = route_rows(logits, valid, bias, k=k, rule=moe.router.rule)
    assert experts.place is not None  # `layer_module` reads experts in their stacks
    place = experts.place[...]
    if experts.precision is None:
        weights, num_held = (experts.gate_up_proj[...], experts.down_proj[...]), experts.down_proj.shape[1]
        if not is_split:
            return choice, expert_rows(normed, *weights, choice, place, k=k)
        held = group.held_first(choice, num_held)
        outputs = expert_rows(normed, *weights, held, place, k=k, parts=group.size())
        return group.returned(outputs, choice, num_held, k)
    gate_up, down = codes_of(experts.gate_up_proj.get_value()), codes_of(experts.down_proj.get_value())
    assert gate_up is not None and down is not None  # the engine accepts no other experts with a precision
    return choice, expert_rows_in_fp8(normed, gate_up, down, choice, place, k=k)


def _shared(served: ServedModel, moe: MoE, normed: Float[Array, "tokens hidden"], project: Project) -> SharedRows | None:
    if moe.shared_experts is None:
        return None
    splits = project(_act(served, moe.shared_experts, normed), moe.shared_experts.down_proj.weight[...])
    gate = moe.shared_expert_gate
    return SharedRows(splits) if gate is None else SharedRows(splits, normed, gate.weight[0])


def _act(served: ServedModel, mlp: MLP, normed: Float[Array, "tokens hidden"]) -> Float[Array, "tokens inter"]:
    if not served.strict:
        return mlp.act(normed)
    h = matmul(normed, mlp.gate_proj.weight[...], mlp.up_proj.weight[...])
    return gated_silu(h, dtype=normed.dtype)
