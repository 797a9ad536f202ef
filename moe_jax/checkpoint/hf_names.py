"""Maps Hugging Face tensors to parts of parameters: one table for loading, saving and comparing gradients.

The hub stores each layer and each expert apart, in files that every inference engine reads. The model holds layers stacked
along a leading axis and experts fused (docs/design.md, "Parameters"). No tensor is transposed: bytes move, nothing else.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from moe_jax.config import DeepseekV3Config, ModelConfig, Stage
from moe_jax.parallel.layout import lies_in_chunks
from moe_jax.parallel.pipeline.restack import take_layer

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class HfTensor:
    """The tensor `name` of a checkpoint: it has `shape` and is `parameters[path][index]`; index () is the whole parameter.

    The index of a stacked parameter begins with the layer's place in its stage. A tensor that is not `trained` has no gradient.
    A `copy` repeats a tensor of another name: it is written, and not read.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple
    index: Index = ()
    trained: bool = True
    copy: bool = False


def hf_tensors(config: ModelConfig) -> list[HfTensor]:
    """Returns every tensor of a checkpoint as the hub stores it, in the model's order, each expert's projections apart."""
    vocab, hidden = config.vocab_size, config.hidden_size
    tensors = [HfTensor("model.embed_tokens.weight", (vocab, hidden), ("embed_tokens", "weight"))]
    for s, stage in enumerate(config.stages):
        for layer, path, row in _rows(stage, ("stages", s)):
            tensors += _layer(config, layer, stage.sparse, path, row)
    for s, stage in enumerate(config.mtp_stages, start=len(config.stages)):
        tensors += _predictor(config, stage, ("stages", s))
    tensors.append(HfTensor("model.norm.weight", (hidden,), ("norm", "weight")))
    if not config.tie_word_embeddings:
        tensors.append(HfTensor("lm_head.weight", (vocab, hidden), ("lm_head", "weight")))
    return tensors


def fused_tensors(config: ModelConfig) -> list[HfTensor]:
    """Returns the tensors that a checkpoint with fused experts has in place of the per-expert tensors."""
    layers: list[tuple[tuple, Stage]] = [(("stages", s), stage) for s, stage in enumerate(config.stages)]
    layers += [(("stages", len(layers) + k, "block"), stage) for k, stage in enumerate(config.mtp_stages)]
    tensors = []
    for path, stage in layers:
        for layer, of_layer, row in _rows(stage, path) if stage.sparse else ():
            for name, shape in _expert_shapes(config).items():
                hf_name = f"model.layers.{layer}.mlp.experts.{name}"
                tensors.append(HfTensor(hf_name, shape, (*of_layer, "mlp", "experts", name), (row,)))
    return tensors


def export(config: ModelConfig, flat_params: Mapping[tuple, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (hub name, array on the host) for each tensor of `hf_tensors(config)`, from parameters by path.

    Args:
      flat_params: arrays or `nnx.Variable`s by path, as in `dict(nnx.to_flat_state(nnx.state(model)))`, or a mapping of the
        same structure, such as gradients. Layers may lie in the chunks of a pipeline. Parameters that are not trained may be
        absent, and are then left out. Arrays may be sharded; all processes must call this together.

    One layer of one parameter at a time is copied to the host, and the yielded arrays are views of that copy. A tensor with
    copies is yielded under each of its names.
    """
    held: tuple[tuple, Index] | None = None
    block = np.empty(0)
    for tensor in hf_tensors(config):
        if not tensor.trained and tensor.path not in flat_params:
            continue
        if held != (tensor.path, tensor.index[:1]):
            held = (tensor.path, tensor.index[:1])
            del block  # frees the previous layer before the next is fetched
            block = _to_host(tensor.path, flat_params[tensor.path], tensor.index[:1])
        yield tensor.name, block[tensor.index[1:]]


def _rows(stage: Stage, path: tuple) -> Iterator[tuple[int, tuple, int]]:
    """Yields (layer, the path of its place in the body, its row in the parameters there) for the stage at `path`."""
    places = len(stage.body)
    for i, layer in enumerate(stage.layers):
        yield layer, path if places == 1 else (*path, "places", i % places), i // places


def _predictor(config: ModelConfig, stage: Stage, path: tuple) -> Iterator[HfTensor]:
    """Yields the tensors of a `models.mtp` module: its layer, its own matrices, and copies of the embedding and the head."""
    prefix, hidden, shape = f"model.layers.{stage.first_layer}.", config.hidden_size, (config.vocab_size, config.hidden_size)
    yield HfTensor(f"{prefix}embed_tokens.weight", shape, ("embed_tokens", "weight"), copy=True)
    yield HfTensor(f"{prefix}enorm.weight", (hidden,), (*path, "enorm", "weight"), (0,))
    yield HfTensor(f"{prefix}hnorm.weight", (hidden,), (*path, "hnorm", "weight"), (0,))
    yield HfTensor(f"{prefix}eh_proj.weight", (hidden, 2 * hidden), (*path, "eh_proj", "weight"), (0,))
    yield from _layer(config, stage.first_layer, stage.sparse, (*path, "block"), 0)
    yield HfTensor(f"{prefix}shared_head.norm.weight", (hidden,), (*path, "norm", "weight"), (0,))
    head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    yield HfTensor(f"{prefix}shared_head.head.weight", shape, (head, "weight"), copy=True)


def _layer(config: ModelConfig, layer: int, sparse: bool, path: tuple, row: int) -> Iterator[HfTensor]:
    """Yields the tensors of a layer, which is row `row` of the parameters at `path`."""
    prefix = f"model.layers.{layer}."
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    attention = _latent_attention(config) if isinstance(config, DeepseekV3Config) else _attention(config)
    shapes |= {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes["post_attention_layernorm.weight"] = (hidden,)
    if not sparse:
        shapes |= {f"mlp.{name}": shape for name, shape in _feed_forward(hidden, config.intermediate_size).items()}
    for name, shape in shapes.items():
        yield HfTensor(prefix + name, shape, (*path, *name.split(".")), (row,))
    if sparse:
        yield from _experts(config, prefix + "mlp.", (*path, "mlp"), row)


def _attention(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of `layers.attention`."""
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    projections: dict[str, tuple[int, ...]] = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    biased = tuple(projections) if config.attention_bias else ()
    return _linears(projections, biased) | {"q_norm.weight": (head,), "k_norm.weight": (head,)}


def _latent_attention(config: DeepseekV3Config) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of `layers.latent_attention`."""
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries = heads * config.key_dim
    projections: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (rank + config.qk_rope_head_dim, hidden),
        "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), rank),
        "o_proj": (hidden, heads * config.v_head_dim),
    }
    norms: dict[str, tuple[int, ...]] = {"kv_a_layernorm.weight": (rank,)}
    if config.q_lora_rank is None:
        projections["q_proj"] = (queries, hidden)
    else:
        projections |= {"q_a_proj": (config.q_lora_rank, hidden), "q_b_proj": (queries, config.q_lora_rank)}
        norms["q_a_layernorm.weight"] = (config.q_lora_rank,)
    biased = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if config.attention_bias else ()
    return _linears(projections, biased) | norms


def _linears(shapes: Mapping[str, tuple[int, ...]], biased: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights, and of the biases of `biased` projections."""
    tensors: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = shape
        if name in biased:
            tensors[f"{name}.bias"] = shape[:1]
    return tensors


def _feed_forward(hidden: int, inter: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of `layers.mlp`."""
    return _linears({"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}, ())


def _experts(config: Any, prefix: str, path: tuple, row: int) -> Iterator[HfTensor]:
    """Yields the router (`gate` on the hub) and the experts; gate_up_proj holds gate rows first, then up rows."""
    inter, hidden = config.moe_intermediate_size, config.hidden_size
    yield HfTensor(f"{prefix}gate.weight", (config.num_experts, hidden), (*path, "router", "weight"), (row,))
    if isinstance(config, DeepseekV3Config):
        yield from _beside_experts(config, prefix, path, row)
    halves = {"gate_proj": slice(0, inter), "up_proj": slice(inter, 2 * inter)}
    for e in range(config.num_experts):
        for name, rows in halves.items():
            hf_name = f"{prefix}experts.{e}.{name}.weight"
            yield HfTensor(hf_name, (inter, hidden), (*path, "experts", "gate_up_proj"), (row, e, rows))
    for e in range(config.num_experts):
        hf_name = f"{prefix}experts.{e}.down_proj.weight"
        yield HfTensor(hf_name, (hidden, inter), (*path, "experts", "down_proj"), (row, e))


def _beside_experts(config: DeepseekV3Config, prefix: str, path: tuple, row: int) -> Iterator[HfTensor]:
    """Yields the expert bias and the shared experts of DeepSeek's layers."""
    if config.has_expert_bias:
        name, place = f"{prefix}gate.e_score_correction_bias", (*path, "router", "expert_bias")
        yield HfTensor(name, (config.num_experts,), place, (row,), trained=False)
    if config.n_shared_experts:
        shared = _feed_forward(config.hidden_size, config.n_shared_experts * config.moe_intermediate_size)
        for name, shape in shared.items():
            yield HfTensor(f"{prefix}shared_experts.{name}", shape, (*path, "shared_experts", *name.split(".")), (row,))


def _expert_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of one layer's fused expert weights."""
    experts, inter, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
    return {"gate_up_proj": (experts, 2 * inter, hidden), "down_proj": (experts, hidden, inter)}


def _to_host(path: tuple, leaf: Any, layer: Index) -> np.ndarray:
    """Copies one layer, (row,), of a stacked parameter to the host, or with () a whole parameter that is not stacked."""
    array = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
    if layer and lies_in_chunks(path, array.shape):
        array = take_layer(jnp.asarray(array), layer[0])
    elif layer:
        # A traced index compiles once for all layers; a Python integer in array[...] would compile once for each layer.
        array = _take_layer(array, layer[0]) if isinstance(array, jax.Array) else array[layer]
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


@jax.jit
def _take_layer(array: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
