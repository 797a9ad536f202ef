"""Models with random frozen weights in FP8 or in 4 bits, of which no matrix is ever whole."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.config import ModelConfig
from moe_jax.layers.lora import Frozen
from moe_jax.layers.moe import EXPERT_MATRICES
from moe_jax.layers.quantised import NF4_BLOCK, BlockScaled, FourBits, Quantised
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder

FORMS = ("whole", "fp8", "nf4")


def random_model_in_form(config: ModelConfig, form: str) -> Decoder:
    """Returns a model of bfloat16 parameters; matrices of layers are in FP8 (as hub files have them), or experts in NF4."""
    abstract = nnx.eval_shape(lambda: from_config(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    flat = []
    for i, (path, leaf) in enumerate(nnx.to_flat_state(state)):
        key, names = jax.random.key(i), [str(part) for part in path]
        if quantise := _quantised_form(names, leaf.shape, form):
            flat.append((path, Frozen(quantise(key, leaf.shape, config.initializer_range))))
        elif any("norm" in name for name in names):
            flat.append((path, leaf.replace(jnp.ones(leaf.shape, leaf.dtype))))
        else:
            flat.append((path, leaf.replace(_by_layers(key, leaf.shape, partial(_normal, config.initializer_range)))))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _quantised_form(names: list[str], shape: tuple[int, ...], form: str):
    if form == "nf4" and names[-1] in EXPERT_MATRICES:
        return _nf4
    is_matrix = len(shape) >= 3 and "stages" in names and not any("router" in n or "norm" in n or "gate" == n for n in names)
    return _fp8 if form == "fp8" and is_matrix and min(shape[-2:]) >= 128 else None


def _normal(stddev: float, key, shape):
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.asarray(stddev, jnp.bfloat16)


def _by_layers(key, shape, draw):
    if len(shape) < 3:
        return jax.jit(draw, static_argnums=1)(key, tuple(shape))
    return jax.jit(lambda keys: jax.lax.map(lambda key: draw(key, tuple(shape[1:])), keys))(jax.random.split(key, shape[0]))


def _fp8(key, shape, stddev: float) -> Quantised:
    codes = _by_layers(key, shape, lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16).astype(jnp.float8_e4m3fn))
    blocks = (*shape[:-2], *(-(-size // 128) for size in shape[-2:]))
    return BlockScaled(codes, jnp.full(blocks, stddev, jnp.float32), jnp.dtype(jnp.bfloat16))


def _nf4(key, shape, stddev: float) -> Quantised:
    codes = _by_layers(key, (*shape[:-1], shape[-1] // 2), lambda key, shape: jax.random.bits(key, shape, np.uint8))
    scales = jnp.full((*shape[:-1], shape[-1] // NF4_BLOCK), 2 * stddev, jnp.float32)
    return FourBits(codes, scales, jnp.dtype(jnp.bfloat16))
