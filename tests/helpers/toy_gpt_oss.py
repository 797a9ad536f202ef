"""A family of its own, as a user would add it: gpt-oss's sinks, biases, windows and limited activation, without YaRN and MXFP4.

The router's bias, which no other family has, is left out.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.config import Qwen3MoeConfig
from moe_jax.kernels import Activation
from moe_jax.layers.moe import Experts, MoE
from moe_jax.models.auto import Qwen3Moe

LIMITED = Activation(alpha=1.702, limit=7.0, offset=1.0)


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(Qwen3MoeConfig):
    """Qwen3-MoE's fields and the type of each layer; attention has biases and sinks, and no norms of heads."""

    model_type = "toy_gpt_oss"
    architecture = "ToyGptOssForCausalLM"

    @classmethod
    def read_dialects(cls, given, problems):
        layer_types = given.get("layer_types")
        super().read_dialects(given, problems)
        given["layer_types"] = layer_types

    def write_dialect(self, values):
        layer_types = values["layer_types"]
        super().write_dialect(values)
        values["layer_types"] = layer_types

    @property
    def mixer(self):
        return replace(super().mixer, biases=True, head_norms=False, sinks=True)


class BiasedExperts(Experts):
    """Experts with a bias for each matrix."""

    def __init__(self, hidden_size, inter, num_experts, *, stack, param_dtype, **options):
        super().__init__(hidden_size, inter, num_experts, stack=stack, param_dtype=param_dtype, **options)
        self.gate_up_bias = nnx.Param(jnp.zeros((*stack, num_experts, 2 * inter), param_dtype))
        self.down_bias = nnx.Param(jnp.zeros((*stack, num_experts, hidden_size), param_dtype))

    @property
    def operands(self):
        weights = super().operands
        gate_up = replace(weights.gate_up, bias=self.gate_up_bias[...])
        return replace(weights, gate_up=gate_up, down=replace(weights.down, bias=self.down_bias[...]))


class GptOss(Qwen3Moe):
    """The model: its experts are `BiasedExperts`."""

    def _experts(self, **options):
        config, options = self.config, options | {"stddev": self.config.initializer_range, "activation": LIMITED}
        sizes = config.hidden_size, config.moe_intermediate_size, config.num_experts
        moe = MoE(*sizes, config.num_experts_per_tok, **options)
        moe.experts = BiasedExperts(*sizes, num_experts_per_tok=config.num_experts_per_tok, **options)
        return moe


def parameters_of(theirs):
    """Returns our parameters with transformers' values, as a dictionary of dictionaries; also of its gradients."""

    def stacked(name, convert=lambda a: a):
        return np.stack([convert(theirs[f"model.layers.{i}.{name}"]) for i in range(layers)])

    def in_halves(a):
        """Gate and up alternate in transformers."""
        return np.concatenate([a[..., ::2], a[..., 1::2]], axis=-1)

    layers = 1 + max(int(name.split(".")[2]) for name in theirs if name.startswith("model.layers."))
    attention = {
        name: {"weight": stacked(f"self_attn.{name}.weight"), "bias": stacked(f"self_attn.{name}.bias")}
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    experts = {
        "gate_up_proj": stacked("mlp.experts.gate_up_proj", lambda a: in_halves(a).swapaxes(1, 2)),
        "gate_up_bias": stacked("mlp.experts.gate_up_proj_bias", in_halves),
        "down_proj": stacked("mlp.experts.down_proj", lambda a: a.swapaxes(1, 2)),
        "down_bias": stacked("mlp.experts.down_proj_bias"),
    }
    stage = {
        "input_layernorm": {"weight": stacked("input_layernorm.weight")},
        "post_attention_layernorm": {"weight": stacked("post_attention_layernorm.weight")},
        "self_attn": attention | {"sinks": stacked("self_attn.sinks")},
        "mlp": {"router": {"weight": stacked("mlp.router.weight")}, "experts": experts},
    }
    whole = {name: {"weight": theirs[f"{prefix}{name}.weight"]} for prefix, name in
             (("model.", "embed_tokens"), ("model.", "norm"), ("", "lm_head"))}  # fmt: skip
    return whole | {"stages": {0: stage}}
