"""A prompt into an empty cache attends to itself, by the fused kernel; later tokens see the cache: both as without one."""

import importlib
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import moe_jax
from moe_jax.config import NAMED_CONFIGS
from moe_jax.kernels.attention.mosaic import flash
from moe_jax.layers.cache import init_cache
from tests.helpers import seeds
from tests.helpers.lowered import num_kernels

# The package exports the function under the module's name.
attention = importlib.import_module("moe_jax.kernels.attention.api")

DEVICE = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
H200 = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=DEVICE)

SHARED = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, initializer_range=0.2)
QWEN3 = dict(SHARED, num_attention_heads=2, num_key_value_heads=1, head_dim=64, use_sliding_window=True, sliding_window=5)
LATENT = dict(q_lora_rank=20, kv_lora_rank=12, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
CONFIGS = {
    "qwen3": moe_jax.Qwen3Config(**QWEN3, max_window_layers=1),
    "qwen3_moe": moe_jax.Qwen3MoeConfig(**QWEN3, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "deepseek_v3": moe_jax.DeepseekV3Config(
        **SHARED | LATENT, num_attention_heads=2, num_key_value_heads=2, first_k_dense_replace=2, num_nextn_predict_layers=0
    ),
}
"""Two layers each, with heads as wide as the fused kernel takes them; DeepSeek's are dense, and Qwen3's have windows."""


def prompts(config, batch, seq):
    """(tokens, positions, segment ids) of prompts of unequal lengths, padded on the left."""
    rng = seeds.rng()
    segment_ids = jnp.asarray(np.arange(seq) >= np.linspace(0, seq // 3, batch, dtype=int)[:, None], jnp.int32)
    tokens = jnp.asarray(rng.integers(1, config.vocab_size, (batch, seq)), jnp.int32)
    return tokens, jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0), segment_ids


def jitted(model):
    """The forward pass, which takes the cache as an argument."""
    graph, state = nnx.split(model)
    return jax.jit(lambda *arrays, **options: nnx.merge(graph, state)(*arrays, **options))


def with_tokens(cache):
    """Returns the cache as one that may hold tokens, so that nothing is known while compiling."""
    return replace(cache, written=jnp.int32(0))


def relative_error(found, expected, segment_ids):
    """Returns the relative error over the tokens that are no padding."""
    found, expected = (np.where(segment_ids[..., None] != 0, a, 0).astype(np.float32) for a in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    "model_type, calls", [("qwen3", (23, 17)), pytest.param("qwen3_moe", (39, 1), marks=pytest.mark.thorough)]
)
def test_cached_calls_equal_one_forward(model_type, calls):
    """DeepSeek's are in test_latent_attention."""
    config = CONFIGS[model_type]
    run, arrays = jitted(moe_jax.from_config(config, rngs=nnx.Rngs(seeds.integer()))), prompts(config, 3, 40)
    whole, cache, logits, done = run(*arrays), init_cache(config, 3, 44, jnp.float32), [], 0
    assert cache.is_empty and cache.length == 0
    for count in calls:
        tokens = slice(done, done + count)
        # The same experts: rounding may choose others.
        output = run(*(a[:, tokens] for a in arrays), cache=cache, expert_ids=whole.expert_ids[:, :, tokens])
        logits.append(output.logits)
        cache, done = output.cache, done + count
        assert not cache.is_empty and cache.length == done
    assert relative_error(jnp.concatenate(logits, axis=1), whole.logits, arrays[2]) < 2e-5
    assert not any(of_all[:, :, done:].any() for of_all in cache.kept)


def test_no_room_is_refused():
    """Prompts that do not fit the cache are refused."""
    config = CONFIGS["qwen3"]
    model = nnx.eval_shape(lambda: moe_jax.from_config(config, rngs=nnx.Rngs(0)))
    cache = init_cache(config, 2, 8, jnp.float32)
    for batch, seq in ((3, 7), (2, 9)):
        with pytest.raises(ValueError, match=rf"room for \(sequences, tokens\) = \(2, 8\); got tokens \({batch}, {seq}\)"):
            model(*prompts(config, batch, seq), cache=cache)


@pytest.mark.thorough
def test_fused_prompt(monkeypatch):
    """In JAX's GPU interpreter: prompts padded on the left, values of another width than the keys."""
    config = replace(CONFIGS["deepseek_v3"], num_hidden_layers=1, first_k_dense_replace=1)
    model = moe_jax.from_config(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(seeds.integer()))
    arrays = prompts(config, 2, 140)
    cache = init_cache(config, 2, 150, jnp.bfloat16)
    plain = jitted(model)(*arrays, cache=cache)
    fused_attention, calls = flash.flash_attention, []
    monkeypatch.setattr(attention, "_reason_against_fused", lambda: None)
    monkeypatch.setattr(flash, "flash_attention", lambda *a, **options: calls.append(1) or fused_attention(*a, **options))
    fused = jitted(model)(*arrays, cache=cache)
    assert calls
    assert relative_error(fused.logits, plain.logits, arrays[2]) < 2e-2


@pytest.mark.parametrize(
    "name, change",
    [
        ("qwen3-0.6b", {}),
        pytest.param("qwen3-30b-a3b", {"use_sliding_window": True}, marks=pytest.mark.thorough),
        pytest.param("deepseek-v3", {}, marks=pytest.mark.thorough),
    ],
)
def test_prompt_on_an_h200(name, change, monkeypatch):
    """The prompt has 5000 tokens, no multiple of a block; the cache has room for 5500."""
    monkeypatch.setattr(attention, "QUERY_CHUNK", 1250)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.delenv("MOE_JAX_BACKEND", raising=False)
    config = replace(NAMED_CONFIGS[name].without_mtp(), **change)
    graph, state = nnx.split(nnx.eval_shape(lambda: moe_jax.from_config(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))

    def prefill(state, tokens, positions, segment_ids, cache):
        states = nnx.merge(graph, state).hidden_states(tokens, positions, segment_ids, cache=cache)
        return states.hidden[:, -1], states.cache

    def lower(change):
        cache = jax.eval_shape(lambda: change(init_cache(config, 2, 5500, jnp.bfloat16)))
        with jax.sharding.use_abstract_mesh(H200):
            traced = jax.jit(prefill).trace(state, *[jax.ShapeDtypeStruct((2, 5000), jnp.int32)] * 3, cache)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    def has_scores(text):
        """Returns whether an array has two axes of queries or keys: prompt, padded prompt, chunk, or the cache's rows."""
        shapes = (shape.split("x") for shape in set(re.findall(r"tensor<(\d+(?:x\d+)*)x", text)))
        return any(sum(length in ("5000", "5120", "1250", "5500") for length in shape) > 1 for shape in shapes)

    empty, filled = lower(lambda cache: cache), lower(with_tokens)
    assert has_scores(filled) and not has_scores(empty)
    # The other kernels are the experts'.
    assert num_kernels(empty) == num_kernels(filled) + len(config.stages)
