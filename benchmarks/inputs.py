"""Random models and batches that several scripts measure, at published sizes or small enough for a CPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.config import NAMED_CONFIGS, ModelConfig
from moe_jax.layers.lora import Frozen
from moe_jax.layers.moe import EXPERT_MATRICES
from moe_jax.layers.quantised import NF4_BLOCK, BlockScaled, FourBits, Quantised
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder

FORMS = ("whole", "fp8", "nf4")

LATENT = dict(
    q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_group=4, topk_group=2,
    initializer_range=0.1,
)  # fmt: skip


def config_of(name: str, *, small: bool = False, layers: int | None = None, in_fp8: bool = False) -> ModelConfig:
    """Returns a published config, or a small one of its architecture with two layers.

    Args:
        in_fp8: sizes are multiples of 128, which share a scale in FP8.
    """
    config = NAMED_CONFIGS[name]
    if small:
        hidden, inter = (128, 128) if in_fp8 else (64, 32)
        sizes = dict(vocab_size=512, hidden_size=hidden, intermediate_size=128, num_attention_heads=4)
        sizes |= {field: size for field, size in dict(num_key_value_heads=2, head_dim=16).items() if hasattr(config, field)}
        if hasattr(config, "kv_lora_rank"):
            sizes |= LATENT | dict(num_key_value_heads=4)
        if config.experts:
            number = "n_routed_experts" if hasattr(config, "n_routed_experts") else "num_experts"
            sizes |= {number: 16, "moe_intermediate_size": inter, "num_experts_per_tok": 4}
        config = replace(config.with_layers(2), **sizes)
    return config if layers is None else config.with_layers(layers)


def random_rows(rows: int, seq: int, vocab_size: int, *, packed: bool = False) -> dict[str, np.ndarray]:
    """Returns rows of random tokens without padding: one document each, or about five if packed."""
    rng, shape = np.random.default_rng(0), (rows, seq)
    starts = rng.random(shape) < (4 / seq if packed else 0)
    starts[:, 0] = True
    index = np.arange(seq)
    tokens = rng.integers(0, vocab_size, shape)
    return {
        "tokens": tokens.astype(np.int32),
        "labels": np.roll(tokens, -1, axis=1).astype(np.int32),
        "loss_mask": np.ones(shape, np.int32),
        "positions": (index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)).astype(np.int32),
        "segment_ids": starts.cumsum(axis=1).astype(np.int32),
    }


def random_model_in_form(config: ModelConfig, form: str) -> Decoder:
    """Returns a model of bfloat16 parameters with frozen matrices, which are never whole.

    Matrices of layers are in FP8, as hub files have them, or experts in NF4.
    """
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
