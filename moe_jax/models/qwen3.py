"""Qwen3 (Yang et al., 2025, https://arxiv.org/abs/2505.09388): grouped-query attention and a dense feed-forward block."""

from flax import nnx

from moe_jax.config import Mixer, Qwen3Config
from moe_jax.layers.attention import Attention
from moe_jax.models.decoder import Decoder


class Qwen3(Decoder):
    """A Qwen3 language model; arguments and calls as `Decoder`."""

    config: Qwen3Config

    def _mixer(self, mixer: Mixer, *, stack: tuple[int, ...], param_dtype, rngs: nnx.Rngs) -> Attention:
        return Attention(self.config, stack=stack, param_dtype=param_dtype, rngs=rngs)
