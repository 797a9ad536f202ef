"""Multi-token prediction: modules after a model's last layer; module k predicts the token k + 1 positions later.

DeepSeek-V3 (2024, https://arxiv.org/abs/2412.19437), section 2.2. Embedding and vocabulary projection are the model's own. The
paper writes [hidden; embedding]; the published weights of `eh_proj` expect the embedding first. (DeepSeek's README_WEIGHTS.md
names the parts; vLLM's deepseek_mtp.py and SGLang's deepseek_nextn.py concatenate [enorm(embedding), hnorm(hidden)]). There the
hidden state is the model's after its last norm. Here every module reads and returns the hidden state after the last norm, which
the vocabulary projection reads.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.config import ModelConfig
from moe_jax.layers.attend import Attend
from moe_jax.layers.linear import Linear, RMSNorm
from moe_jax.models.forward import LayerInputs, LayerOutput
from moe_jax.parallel.spread import Spread


class PredictorState(NamedTuple):
    """The carry through an MTP module: its input, and its output hidden states."""

    hidden: Float[Array, "batch seq hidden"]
    """h_{k-1}, the hidden states of the model or the module before; h_k in the output."""
    embedded: Float[Array, "batch seq hidden"]
    """Embeddings of the tokens k positions later; unchanged in the output."""


class TokenPredictor(nnx.Module):
    """Module k: h_k[i] = norm(block(eh_proj [enorm(embedding of token i + k); hnorm(h_{k-1}[i])])), at the position of i.

    Args:
      block: a decoder layer with `forward.DecoderLayer`'s call signature.
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

    def __call__(self, state: PredictorState, inputs: LayerInputs, attend: Attend, spread: Spread) -> LayerOutput:
        """Applies the module; the output's x is a `PredictorState`."""
        joined = jnp.concatenate([self.enorm(state.embedded), self.hnorm(state.hidden)], axis=-1)
        out = self.block(self.eh_proj(joined), inputs, attend, spread)
        return out._replace(x=PredictorState(self.norm(out.x), state.embedded))
