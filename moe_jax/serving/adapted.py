"""Adapters in an engine: factors as steps read them, and the reasons why a model's steps run its modules."""

from flax import nnx
from jaxtyping import Array, Float

from moe_jax.kernels.experts.choose_backend import ENVIRONMENT_VARIABLE, is_mosaic_allowed
from moe_jax.layers.lora import Adapter, Frozen, beside_head, has_adapters, wider_head
from moe_jax.layers.quantised import is_quantised
from moe_jax.models.decoder import Decoder


def with_ready_adapters(model: Decoder) -> Decoder:
    """Returns the model with factors in its dtype, the scale in b; it shares all other arrays. Without adapters, the model.

    Each layer rounds a and scale * b to its dtype in every call, so that results are the same. With an adapter of the head the
    copy that `lora.wider_head` makes takes the matrix's place.
    """
    if not has_adapters(model):
        return model
    twin = nnx.merge(*nnx.split(model))
    if not model.config.tie_word_embeddings and twin.lm_head.lora is not None:
        twin.lm_head.weight = Frozen(wider_head(twin.lm_head.lora, twin.lm_head.weight[...]))
    for _, module in nnx.iter_modules(twin):
        if isinstance(module, Adapter):
            a, b = module.factors
            # New variables: the twin's are the model's own.
            module.a, module.b = nnx.LoRAParam(a.astype(model.dtype)), nnx.LoRAParam(b.astype(model.dtype))
            # Attributes of the graph: models whose adapters differ in them alone take turns in one engine.
            module.scale, module.dropout = 1.0, 0.0
    return twin


def behind_norm(frame: nnx.Dict, hidden: Float[Array, "tokens hidden"]) -> Float[Array, "tokens columns"]:
    """Returns the hidden states as the head's matrix takes them: wider, if the head has an adapter."""
    adapter = frame["lm_head"].lora if "lm_head" in frame else None
    return hidden if adapter is None else beside_head(adapter, hidden)


def unfused_reason(model: Decoder) -> str | None:
    """Returns the reason why steps of this model run its modules, whatever the device; None if there is none."""
    if not is_mosaic_allowed():
        return f"{ENVIRONMENT_VARIABLE} names another backend than 'mosaic', of which the fused kernels are"
    if has_adapters(model):
        return "an adapter lies beside the weights"
    if model.precision is None and is_quantised(nnx.state(model)):
        return "quantised experts are made whole in every step"
    return None
