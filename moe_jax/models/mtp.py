"""Multi-token prediction: modules behind a model's last layer, of which module k predicts the token k + 1 places on.

DeepSeek-V3 (2024, https://arxiv.org/abs/2412.19437), section 2.2. Embedding and vocabulary projection are the model's own. The
paper writes [hidden; embedding]; the published weights of `eh_proj` take the embedding first (DeepSeek's README_WEIGHTS.md
names the parts; vLLM's deepseek_mtp.py and SGLang's deepseek_nextn.py concatenate [enorm(embedding), hnorm(hidden)]). There the
hidden state is the model's after its last norm, and so it is here for every module: what the projection is applied to.
"""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.config import ModelConfig
from moe_jax.layers.attend import Attend
from moe_jax.layers.linear import Linear
from moe_jax.layers.norm import RMSNorm


class TokenPredictor(nnx.Module):
    """Module k: h_k[i] = norm(block(eh_proj [enorm(embedding of token i + k); hnorm(h_{k-1}[i])])), at the position of i.

    Args:
      block: a decoder layer, called as `decoder_layer.DecoderLayer` is.
    """

    def __init__(
        self,
        config: ModelConfig,
        block: nnx.Module,
        *,
        stack: tuple[int, ...] = (),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        norm = partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, stack=stack, param_dtype=param_dtype)
        self.enorm = norm()
        self.hnorm = norm()
        self.eh_proj = Linear(
            2 * config.hidden_size,
            config.hidden_size,
            stddev=config.initializer_range,
            stack=stack,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.block = block
        self.norm = norm()

    def __call__(
        self, x: tuple[Float[Array, "batch seq hidden"], Float[Array, "batch seq hidden"]], cos, sin, attend: Attend, *others
    ):
        """From (h_{k-1}, the embeddings) to ((h_k, the embeddings), the cache that `attend` gave, the routing or None)."""
        hidden, embedded = x
        joined = jnp.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1)
        out, memory, routing = self.block(self.eh_proj(joined), cos, sin, attend, *others)
        return (self.norm(out), embedded), memory, routing
