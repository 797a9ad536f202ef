"""A model's parameters as the step program reads them: each layer's matrices as separate arrays, experts in their stacks.

The step runs layers one by one. XLA would copy a layer's matrices out of a stack in each step: they are copied out once.
Experts, nearly all of a sparse model's bytes, stay in place, because their kernels read a layer inside a stack.
"""

from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from moe_jax.config import ModelConfig, RouterRule
from moe_jax.kernels.backends import ENVIRONMENT_VARIABLE, is_mosaic_allowed
from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.layers.lora import Adapter, Frozen, has_adapters, wider_head
from moe_jax.layers.moe import Experts, is_expert_matrix
from moe_jax.layers.paged import LayerPages
from moe_jax.layers.quantised import Quantised, is_quantised
from moe_jax.models.decoder import Decoder
from moe_jax.serving.adapters import LayerFactors


class ServedModel(NamedTuple):
    """All of a model except its arrays; hashable, and equal for models that differ only in their arrays."""

    config: ModelConfig
    dtype: Any
    frame: nnx.GraphDef
    """Embedding, last norm and vocabulary projection."""
    stages: tuple[nnx.GraphDef, ...]
    """The stages of layers; with drafts also the drafting module."""
    strict: bool = False
    """True: steps run `strict.strict_layers`."""
    precision: Precision | None = None
    """The precision of the experts' matmuls."""
    mesh: Mesh | None = None
    """The mesh of an engine on several devices."""
    unfused: str | None = None
    """The reason why steps run the modules on any device (`unfused_reason`); None: there is none."""


class Weights(NamedTuple):
    """A model's arrays, in the model's dtype (the arrays that choose experts keep their own)."""

    frame: nnx.State
    layers: tuple[nnx.State, ...]
    """Each layer's arrays, without its experts."""
    experts: tuple[nnx.State, ...]
    """Each stage's experts, stacked; empty for a dense stage."""
    adapters: tuple[LayerFactors, ...] = ()
    """Each layer's part of the table of adapters; empty without a table."""


LayerWeights = tuple[nnx.State, nnx.State, Int[Array, ""]]
"""One layer's arrays, its stage's experts, and its place in their stack."""


ComputedLayers = tuple[Float[Array, "tokens hidden"], list[LayerPages], list[Int[Array, "tokens k"]]]
"""Hidden states after the last norm, each layer's pages, and the experts of each MoE layer."""


def take_apart(
    model: Decoder, *, drafts: int = 0, take_over: bool = False, mesh: Mesh | None = None, strict: bool = False
) -> tuple[ServedModel, Weights]:
    """Returns the model's parts. Layers' arrays are copies; experts, and arrays around the layers, are the model's own.

    Quantised experts stay quantised; all other matrices are dequantised. Adapters are prepared by `with_ready_adapters`.

    Args:
      drafts: 1 includes the first multi-token prediction module as the last layer.
      take_over: deletes each stack once its layers are copied, unless its dtype was changed. The model is unusable afterwards.
      mesh: the mesh of an engine on several devices.
      strict: as in `ServedModel`.
    """
    unfused, model = unfused_reason(model), with_ready_adapters(model)
    modules = {"embed_tokens": model.embed_tokens, "norm": model.norm}
    if not model.config.tie_word_embeddings:
        modules["lm_head"] = model.lm_head
    frame_graph, frame = nnx.split(nnx.Dict(modules))
    graphs, layers, experts = [], [], []
    for stage in list(model.stages)[: len(model.config.stages) + drafts]:
        graph, *states = nnx.split(stage, lambda path, _: is_expert_matrix(path), ...)
        matrices, others = (in_dtype(state, model.dtype) for state in states)
        others = _dequantised(others)
        graphs.append(graph)
        layers += _cut(others, take_over=take_over)
        experts.append(matrices)
    options: dict[str, Any] = dict(strict=strict, precision=model.precision, mesh=mesh, unfused=unfused)
    served = ServedModel(model.config, model.dtype, frame_graph, tuple(graphs), **options)
    return served, Weights(_dequantised(in_dtype(frame, model.dtype)), tuple(layers), tuple(experts))


def first_difference(new: tuple[ServedModel, Weights], own: tuple[ServedModel, Weights]) -> str:
    """Returns a clause that names the first difference between a model and the engine's own, apart from array values."""
    found, wanted = _described(*new), _described(*own)
    for name in found | wanted:
        if found.get(name) != wanted.get(name):
            return f"{name} is {found.get(name, 'absent')}; the engine has {wanted.get(name, 'none')}"
    return "its modules have other settings"


def frame_of(served: ServedModel, weights: Weights) -> Any:
    """Returns the modules around the layers, by name."""
    return nnx.merge(served.frame, weights.frame)


def head_of(frame: Any) -> Float[Array, "vocab columns"]:
    """Returns the matrix of the vocabulary projection; wider than the hidden states if it has an adapter."""
    return (frame["lm_head"] if "lm_head" in frame else frame["embed_tokens"]).weight[...]


def layers_of(served: ServedModel, weights: Weights) -> list[tuple[int, LayerWeights]]:
    """Returns each layer's stage and weights, in the model's order."""
    return [
        (stage, (weights.layers[of_stage.first_layer + place], weights.experts[stage], jnp.int32(place)))
        for stage, of_stage in enumerate(served.config.stages)
        for place in range(of_stage.num_layers)
    ]


def layer_module(served: ServedModel, stage: int, weights: LayerWeights) -> Any:
    """Returns the module of a layer of this stage. The drafting module comes after the model's stages."""
    layer, experts, place = weights
    block = nnx.merge(served.stages[stage], experts, layer)
    for _, module in nnx.iter_modules(block):
        if isinstance(module, Experts):
            module.read_in_stack(place)
    return block


def logits_of(
    hidden: Float[Array, "rows hidden"], head: Float[Array, "vocab hidden"], *, strict: bool
) -> Float[Array, "rows vocab"]:
    """Returns f32 logits; with `strict` a row's bits do not depend on the number of rows."""
    head = head.astype(hidden.dtype)
    if strict:
        # Imports Pallas Mosaic GPU, a second of CPU time that other engines save.
        from moe_jax.kernels.strict.matmul import matmul

        return matmul(hidden, head)
    return jnp.einsum("rd,vd->rv", hidden, head, preferred_element_type=jnp.float32)


def with_ready_adapters(model: Decoder) -> Decoder:
    """Returns the model with factors in its dtype, the scale in b; it shares all other arrays. Without adapters, the model.

    Each layer rounds a and scale * b to its dtype in every call, so that results are the same. With an adapter of the head, the
    copy made by `lora.wider_head` replaces the matrix.
    """
    if not has_adapters(model):
        return model
    twin = nnx.merge(*nnx.split(model))
    if not model.config.tie_word_embeddings and twin.lm_head.lora is not None:
        twin.lm_head.weight = Frozen(wider_head(twin.lm_head.lora, twin.lm_head.weight[...]))
    for table in twin.tables.values():
        if table.token_rows is not None:
            table.weight = Frozen(table.token_rows.put(table.weight[...]))
            del table.token_rows
    for _, module in nnx.iter_modules(twin):
        if isinstance(module, Adapter):
            a, b = module.factors
            # New variables: the twin's are the model's own.
            module.a, module.b = nnx.LoRAParam(a.astype(model.dtype)), nnx.LoRAParam(b.astype(model.dtype))
            # They are attributes of the graph: models whose adapters differ only in them can then share an engine.
            module.scale, module.dropout = 1.0, 0.0
    return twin


def unfused_reason(model: Decoder) -> str | None:
    """Returns the reason why steps of this model run its modules on any device; None if there is none."""
    if not is_mosaic_allowed():
        return f"{ENVIRONMENT_VARIABLE} selects a backend other than 'mosaic', which the fused kernels need"
    if has_adapters(model):
        return "the model has adapters, which stay separate from its weights"
    if model.precision is None and is_quantised(nnx.state(model)):
        return "quantised experts are dequantised in every step"
    if model.precision is not None and model.config.mixer.interleaved:
        return "the modules, which compute long steps with experts in FP8, keep rotary pairs of neighbors in another order"
    return lacking_parts(model.config)


def lacking_parts(config: ModelConfig) -> str | None:
    """Returns the reason why fused layers cannot run a model, its parts that they lack; None if there are none."""
    heads, experts = config.mixer, config.experts
    rule = RouterRule() if experts is None else experts.rule
    parts = {
        "latent attention": heads.latent_value_dim is not None,
        "norms after rope": heads.norms_after_rope,
        "a bias after attention": heads.biases and heads.output_bias,
        "attention sinks": heads.sinks,
        "clipped queries": heads.clip is not None,
        "groups of experts": rule.groups_per_token < rule.num_groups,
        "biases of the router's logits": rule.linear_bias,
        "a norm after the experts": experts is not None and experts.output_norm,
        "biases of experts": experts is not None and experts.biases,
        "another activation": experts is not None and Activation(*experts.activation) != SILU,
    }
    found = ", ".join(part for part, has_part in parts.items() if has_part)
    return f"the fused layers lack parts of this {config.model_type}: {found}" if found else None


def _described(served: ServedModel, weights: Weights) -> dict[str, Any]:
    """Returns the config's fields, dtype, precision, the adapter's places, and the form of each array, by name."""
    config = served.config
    named = {"architecture": config.architecture} | {field.name: getattr(config, field.name) for field in fields(config)}
    forms = {}
    for path, variable in jax.tree.leaves_with_path(weights, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        arrays = (f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(variable))
        kinds = [
            type(each).__name__
            for each in (variable, variable.get_value())
            if not isinstance(each, Array | jax.ShapeDtypeStruct)
        ]
        forms[jax.tree_util.keystr(path, simple=True, separator=".")] = " ".join([*kinds, *arrays])
    adapted = {".".join(name.split(".")[-3:-1]) for name, form in forms.items() if form.startswith("LoRAParam")}
    # Before the forms: an adapter also changes the forms of its matrices.
    named |= {"dtype": served.dtype, "precision": served.precision, "adapter": ", ".join(sorted(adapted)) or "none"}
    return named | forms


def _cut(stacked: nnx.State, *, take_over: bool) -> list[nnx.State]:
    """Returns the state of each layer of a stage."""
    leaves, tree = jax.tree.flatten(stacked)
    # One stack at a time: two copies of a dense model of 61 GiB would leave no room for pages on any GPU.
    cut = []
    for leaf in leaves:
        cut.append(_slices(leaf))
        if take_over:
            leaf.delete()
    return [jax.tree.unflatten(tree, of_layer) for of_layer in zip(*cut, strict=True)]


@jax.jit
def _slices(stack: Array) -> list[Array]:
    return [stack[i] for i in range(stack.shape[0])]


def _dequantised(state: nnx.State) -> nnx.State:
    """Returns the state with quantised matrices dequantised, because every step reads them."""

    def whole(leaf: Any) -> Any:
        return leaf[...] if isinstance(leaf, Quantised) else leaf

    return jax.tree.map(whole, state, is_leaf=lambda leaf: isinstance(leaf, Quantised))


def in_dtype(state: nnx.State, dtype: Any) -> nnx.State:
    """Returns the state with its parameters as `dtype`. Quantised ones and expert biases keep their dtype."""
    parameters, others = nnx.split_state(state, (nnx.Param, Frozen), ...)

    def cast(leaf: Any) -> Any:
        return leaf if isinstance(leaf, Quantised) or leaf.dtype == dtype else leaf.astype(dtype)

    return nnx.merge_state(jax.tree.map(cast, parameters, is_leaf=lambda leaf: isinstance(leaf, Quantised)), others)
