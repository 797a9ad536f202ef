"""Maps Hugging Face tensors to parts of parameters: one table for loading, saving and comparing gradients.

The hub stores each layer and each expert apart, in files that every inference engine reads. The model holds layers stacked
along a leading axis and experts fused (docs/design.md, "Parameters"). Bytes are only copied, except that
gpt-oss stores the experts' matrices transposed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from moe_jax.config import ModelConfig
from moe_jax.layers.matrices import declaration_of
from moe_jax.models.auto import abstract_parameters
from moe_jax.parallel.layout import lies_in_chunks
from moe_jax.parallel.pipeline.chunks import take_layer

Index = tuple[int | slice | None, ...]
"""None: the tensor has an axis of size 1 that the parameter lacks."""


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint: `name` holds parameters[path][index]; index () is the whole parameter.

    The index of a stacked parameter begins with the layer's row. A tensor that is not `trained` has no gradient.
    A `copy` repeats a tensor of another name: it is written but not read. A tensor of all experts may be `transposed`,
    [experts, in, out], or have gate and up `in_turn` along its outputs (`in_model`, `in_file`).
    """

    name: str
    shape: tuple[int, ...]
    path: tuple
    index: Index = ()
    trained: bool = True
    copy: bool = False
    transposed: bool = False
    in_turn: bool = False

    def in_model(self, array: np.ndarray) -> np.ndarray:
        """Returns an array of the file as the parameter holds it: [experts, out, in] with all gates before the ups."""
        array = array.swapaxes(1, 2) if self.transposed else array
        return np.concatenate([array[:, ::2], array[:, 1::2]], axis=1) if self.in_turn else array

    def in_file(self, array: np.ndarray) -> np.ndarray:
        """Inverts `in_model`."""
        if self.in_turn:
            array = np.stack(np.split(array, 2, axis=1), axis=2).reshape(array.shape)
        return array.swapaxes(1, 2) if self.transposed else array


_ORDER = (
    *("input_layernorm", "enorm", "hnorm", "eh_proj", "block", "self_attn", "post_attention_layernorm", "mlp", "norm"),
    *("q_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj", "q_norm", "k_norm"),
    *("kv_a_layernorm", "q_a_layernorm", "router", "shared_experts", "experts", "gate_proj", "up_proj", "gate_up_proj"),
    *("down_proj", "weight", "bias", "expert_bias"),
)
"""The order of a layer's parameters in files, by the names of their paths; other names follow."""

MTP_NORM = "norm.weight"
"""The norm of a multi-token prediction module, by its path in the module."""


def hf_tensors(config: ModelConfig) -> list[HfTensor]:
    """Returns every tensor of a hub checkpoint in the model's order, with each expert's projections as separate tensors."""
    shapes = {path: leaf.shape for path, leaf in abstract_parameters(config).items() if path[0] != "stages"}
    embedding, norm = ("embed_tokens", "weight"), ("norm", "weight")
    head = embedding if config.tie_word_embeddings else ("lm_head", "weight")
    tensors = [HfTensor("model.embed_tokens.weight", shapes[embedding], embedding)]
    for layer, own in _layers(config):
        prefix = f"model.layers.{layer}."
        tensors_of_layer = [tensor for parameter in own for tensor in _tensors(config, prefix, *parameter)]
        if layer >= config.num_hidden_layers:
            # A multi-token prediction module (`models.mtp`) repeats the embedding and the head.
            first = HfTensor(f"{prefix}embed_tokens.weight", shapes[embedding], embedding, copy=True)
            last = HfTensor(f"{prefix}shared_head.head.weight", shapes[head], head, copy=True)
            tensors_of_layer = [first, *tensors_of_layer, last]
        tensors += tensors_of_layer
    tensors.append(HfTensor("model.norm.weight", shapes[norm], norm))
    return tensors if head == embedding else [*tensors, HfTensor("lm_head.weight", shapes[head], head)]


def fused_tensors(config: ModelConfig) -> list[HfTensor]:
    """Returns the tensors that replace the per-expert tensors in a checkpoint with fused experts."""
    if config.fused_experts:
        return []  # `hf_tensors` has them
    return [
        HfTensor(f"model.layers.{layer}.{hub_name(config, 'mlp.experts')}.{path[-1]}", leaf.shape[1:], path, (row,))
        for layer, own in _layers(config)
        for path, row, leaf in own
        if declaration_of(path, leaf.shape).role == "experts"
    ]


def export(config: ModelConfig, flat_params: Mapping[tuple, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (hub name, array on the host) for each tensor of `hf_tensors(config)`, from parameters by path.

    Args:
      flat_params: arrays or `nnx.Variable`s by path, as in `dict(nnx.to_flat_state(nnx.state(model)))`, or a mapping of the
        same structure, such as gradients. Layers may be split into a pipeline's chunks. Parameters that are not trained may be
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
            block = layer_on_host(tensor.path, flat_params[tensor.path], tensor.index[:1])
        yield tensor.name, tensor.in_file(block[tensor.index[1:]])


def _layers(config: ModelConfig) -> Iterator[tuple[int, list[tuple[tuple, int, nnx.Variable]]]]:
    """Yields each layer's index and its parameters: their paths, its row in them, and the stacked parameters themselves."""

    def place(parameter: tuple[tuple, nnx.Variable]) -> list[int]:
        return [_ORDER.index(name) if name in _ORDER else len(_ORDER) for name in _inside_layer(parameter[0])]

    for number, stage in enumerate(config.all_stages):
        of_stage = [item for item in abstract_parameters(config).items() if item[0][:2] == ("stages", number)]
        of_stage.sort(key=place)
        places = len(stage.body)
        for i, layer in enumerate(stage.layers):
            own = [item for item in of_stage if places == 1 or item[0][2:4] == ("places", i % places)]
            yield layer, [(path, i // places, leaf) for path, leaf in own]


def _inside_layer(path: tuple) -> tuple:
    """Returns the part of a parameter's path inside its layer, without the layer's place in a `LayerPattern`."""
    return path[4:] if path[2] == "places" else path[2:]


def hub_name(config: ModelConfig, name: str) -> str:
    """Returns the checkpoint's name, inside a layer, of a parameter or module with this path inside a layer."""
    for own, hub in config.hub_names.items():
        name = name.replace(own, hub)
    return "shared_head.norm.weight" if name == MTP_NORM else name


def _tensors(config: ModelConfig, prefix: str, path: tuple, row: int, leaf: nnx.Variable) -> Iterator[HfTensor]:
    """Yields the tensors of one layer's parameter; gate_up_proj of experts holds gate rows first, then up rows."""
    own = ".".join(map(str, _inside_layer(path))).removeprefix("block.")
    if config.fused_experts and "experts" in path:
        (experts, *outputs), in_turn = leaf.shape[1:], path[-1].startswith("gate_up_proj")
        yield HfTensor(
            prefix + own, (experts, *outputs[::-1]), path, (row,), transposed=len(outputs) > 1, in_turn=in_turn
        )  # fmt: skip
        return
    if declaration_of(path, leaf.shape).role != "experts":
        name, shape = hub_name(config, own), leaf.shape[1:]
        index: Index = (row,)
        if name.endswith(config.hub_rows):
            shape, index = (1, *shape), (row, None)
        yield HfTensor(prefix + name, shape, path, index, trained=isinstance(leaf, nnx.Param))
        return
    experts, rows, columns = leaf.shape[1:]
    parts: dict[str, Index] = {"down_proj": ()}
    if path[-1] == "gate_up_proj":
        rows //= 2
        parts = {"gate_proj": (slice(0, rows),), "up_proj": (slice(rows, 2 * rows),)}
    for e in range(experts):
        for name, part in parts.items():
            own = hub_name(config, f"mlp.experts.{e}.{name}.weight")
            yield HfTensor(prefix + own, (rows, columns), path, (row, e, *part))


def layer_on_host(path: tuple, leaf: Any, layer: Index) -> np.ndarray:
    """Copies one layer, (row,), of a stacked parameter to the host, or with () a whole parameter that is not stacked."""
    array = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
    if layer and lies_in_chunks(path, array.shape):
        array = take_layer(jnp.asarray(array), layer[0])
    elif layer:
        # A traced index compiles once for all layers; a Python integer in array[...] would compile once for each layer.
        array = _take_layer(array, layer[0]) if isinstance(array, jax.Array) else array[layer]
    return host_array(array)


def host_array(array: Any) -> np.ndarray:
    """Copies an array to the host of each process. All processes call it for an array whose parts they share."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


@jax.jit
def _take_layer(array: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
