"""Fused layers compute what the model's modules compute, and name the models that they do not support."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters.load import Stack
from moe_jax.adapters.names import targets_of
from moe_jax.config import NAMED_CONFIGS, Qwen3MoeConfig
from moe_jax.config.families import Ernie45MoeConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig
from moe_jax.config.sigmoid_families import Dots1Config, Glm4MoeConfig, HYV3Config, MiniMaxM2Config, SolarOpenConfig
from moe_jax.kernels.attention.paged import paged_attention
from moe_jax.kernels.decode import experts
from moe_jax.layers import paged
from moe_jax.layers.lora import Frozen
from moe_jax.layers.moe import EXPERT_MATRICES, Experts
from moe_jax.layers.quantised import BlockScaled
from moe_jax.serving import fused
from moe_jax.serving import step as step_module
from moe_jax.serving.adapters import factors_of, sites_of
from moe_jax.serving.engine import Engine
from moe_jax.serving.fused import refusal
from moe_jax.serving.request import EngineLimits, SamplingOptions
from moe_jax.serving.step import StepShape, empty_rows, initial_state, packed, step
from moe_jax.serving.weights import take_apart, unfused_reason

CONFIG = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=128,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    mlp_only_layers=(0,),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    use_sliding_window=True,
    sliding_window=40,
    max_window_layers=1,
)
"""The second layer has a window."""


ONE_LAYER = replace(CONFIG, num_hidden_layers=1, mlp_only_layers=(), max_window_layers=0)
"""The second layer of CONFIG, which has experts and a window."""


SIZES = dict(
    vocab_size=64, hidden_size=128, intermediate_size=128, moe_intermediate_size=128, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=128, num_experts=20, num_experts_per_tok=3,
)  # fmt: skip
FAMILIES = {
    "mixtral": MixtralConfig(**SIZES | dict(num_experts=8, num_experts_per_tok=2), sliding_window=40),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=256),
    "olmoe": OlmoeConfig(**SIZES),
    "glm4_moe": Glm4MoeConfig(**SIZES, attention_bias=True, first_k_dense_replace=0, routed_scaling_factor=1.8),
    "dots1": Dots1Config(**SIZES, first_k_dense_replace=0, n_shared_experts=2, norm_topk_prob=True),
    "minimax_m2": MiniMaxM2Config(**SIZES, partial_rotary_factor=0.5),
    "ernie4_5_moe": Ernie45MoeConfig(**SIZES, moe_layer_start_index=0),
    "solar_open": SolarOpenConfig(**SIZES, partial_rotary_factor=0.25),
    "hy_v3": HYV3Config(**SIZES, first_k_dense_replace=0),
}
"""One layer of each family that fused layers run, with as few experts as the interpreter needs for its time."""


def _model(seed, in_fp8, config=CONFIG):
    made = moe_jax.from_config(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(seed))
    if config.model_type in FAMILIES:
        # Biases of zeros, and norms of ones, would hide one that is not read. Wide logits choose alike after rounding.
        rng = np.random.default_rng(seed)
        for path, variable in nnx.to_flat_state(nnx.state(made)):
            std = 0.5 if path[-2:] == ("router", "weight") else 0.1
            variable.set_value(variable[...] + jnp.asarray(std * rng.normal(size=variable.shape), variable.dtype))
    if in_fp8:
        for _, module in nnx.iter_modules(made):
            if isinstance(module, Experts):
                for name in EXPERT_MATRICES:
                    setattr(module, name, Frozen(BlockScaled.fp8(getattr(module, name)[...], jnp.bfloat16)))
        made.set_precision("fp8")
    return made


def _with_table(model, weights):
    """Returns the weights with a table of two random adapters, of ranks 2 and 4."""
    rng, sites = np.random.default_rng(0), [sites_of(layer) for layer in weights.layers]
    attention = [target for target in targets_of(model) if target.kind == "attention"]
    adapters = []
    for rank in (2, 4):
        likes = [Stack.zeros(target, rank) for target in attention]
        stacks = [Stack(like.target, *(rng.normal(size=factor.shape) * 0.1 for factor in (like.a, like.b))) for like in likes]
        adapters.append(factors_of(stacks, model.config, sites, max_rank=4))
    table = jax.tree.map(lambda *factors: jnp.asarray(np.stack(factors), jnp.bfloat16), *adapters)
    return weights._replace(adapters=tuple(table))


@pytest.mark.parametrize("in_fp8", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["bf16", "fp8"])
def test_equal_modules(monkeypatch, in_fp8):
    """One model for all runs: of many, some have a token to which two experts are equal up to rounding."""
    check_step(monkeypatch, _model(0, in_fp8, ONE_LAYER), adapted=False)


@pytest.mark.parametrize(
    "family", [name if name == "glm4_moe" else pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES]
)
def test_families_equal_modules(monkeypatch, family):
    """With adapters in the table, whose part is added to queries and keys before biases, norms and rope."""
    check_step(monkeypatch, _model(0, False, FAMILIES[family]), adapted=True)


def check_step(monkeypatch, model, adapted):
    """Compares a decoding step of fused layers with one of the model's modules."""
    served, weights = take_apart(model)
    weights = _with_table(model, weights) if adapted else weights
    shape = StepShape(3, 0, 0, 2, adapted=adapted)
    rows = empty_rows(shape)
    if adapted:
        rows.adapters[:] = 1, -1, -1
    # The last row is padding.
    rows.decode_slots[:2], rows.decode_positions[:2], rows.decode_pages[:2] = (1, 0), (0, 64), (3, 2)
    results = []
    for fuses in (False, True):
        monkeypatch.setattr(step_module, "_fuses", lambda served, batch, fuses=fuses: fuses)
        state = initial_state(served, num_pages=4, num_slots=2, max_pages=2, keep_experts=True)
        keys = jnp.asarray(np.random.default_rng(0).normal(size=state.pages[0][0].shape), jnp.bfloat16)
        own = by_neighbors(keys) if fuses and served.config.mixer.interleaved else keys
        state = state._replace(pages=[(own, keys)], page_table=state.page_table.at[0, 0].set(1))
        results.append(jax.jit(partial(step, served, shape))(weights, state, packed([rows])))
    (state, output), (fused_state, fused_output) = results
    np.testing.assert_allclose(fused_output.logits[:2], output.logits[:2], rtol=0.03, atol=0.03)
    assert np.abs(output.logits[:2]).max() > 0.3
    (keys, values), fused_pages = state.pages[0], fused_state.pages[0]
    keys = by_neighbors(keys) if served.config.mixer.interleaved else keys
    for a, b in zip((keys, values), fused_pages, strict=True):
        np.testing.assert_allclose(np.asarray(a[1:], np.float32), np.asarray(b[1:], np.float32), rtol=0.02, atol=0.03)
    np.testing.assert_array_equal(fused_state.experts[3, 0], state.experts[3, 0])


def by_neighbors(keys):
    """Orders rotary pairs as fused layers do. The modules' keys have all first numbers of pairs, then all second ones."""
    return keys.reshape(*keys.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(keys.shape)


@pytest.mark.parametrize(
    "most_planned_tokens, config",
    [
        (64, replace(CONFIG, mlp_only_layers=(0, 1))),
        *(pytest.param(most, CONFIG, marks=pytest.mark.thorough) for most in (64, 256)),
        pytest.param(64, FAMILIES["glm4_moe"], marks=pytest.mark.thorough),
    ],
    ids=["many tokens", "many tokens, with experts", "few tokens, with experts", "many tokens of glm4_moe"],
)
def test_chunks_equal_modules(monkeypatch, most_planned_tokens, config):
    """A decoding row next to two chunks and padding, which attention computes by kernels of their own."""
    monkeypatch.setattr(fused, "MOST_PLANNED_TOKENS", most_planned_tokens)
    monkeypatch.setattr(experts, "MOST_PLANNED_TOKENS", most_planned_tokens)
    config = replace(config, num_attention_heads=8)
    model = _model(0, in_fp8=False, config=config)
    served, weights = take_apart(model)
    weights, shape = _with_table(model, weights), StepShape(1, 64, 2, 2, adapted=True)
    rows = empty_rows(shape)
    rows.adapters[:] = -1, 1, 0
    rows.decode_slots[:], rows.decode_positions[:] = 0, 5
    rows.chunk_slots[:], rows.chunk_starts[:], rows.chunk_counts[:] = (1, 2), (60, 0), (20, 30)
    rows.chunk_tokens[:50], rows.chunk_tables[:] = np.arange(50), [[2, 3], [4, 0]]
    results = []
    for fuses in (False, True):
        monkeypatch.setattr(step_module, "_fuses", lambda served, batch, fuses=fuses: fuses)
        attention = partial(paged_attention, backend="mosaic" if fuses else "xla")
        monkeypatch.setattr(paged, "paged_attention", attention)
        state = initial_state(served, num_pages=5, num_slots=3, max_pages=2)
        keys = jnp.asarray(np.random.default_rng(0).normal(size=state.pages[0][0].shape), jnp.bfloat16)
        state = state._replace(pages=[(keys, keys)] * config.num_hidden_layers, page_table=state.page_table.at[0, 0].set(1))
        state, output = jax.jit(partial(step, served, shape))(weights, state, packed([rows]))
        results.append((output.logits, [pages[1:] for of_layer in state.pages for pages in of_layer]))
    (logits, pages), (fused_logits, fused_pages) = results
    np.testing.assert_allclose(fused_logits, logits, rtol=0.03, atol=0.03 * max(1, np.abs(logits).max()))
    for a, b in zip(pages, fused_pages, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0.02, atol=0.03)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "in_fp8, config",
    [(True, CONFIG), (False, FAMILIES["glm4_moe"]), (False, FAMILIES["qwen2_moe"])],
    ids=["Qwen3-MoE in fp8", "glm4_moe", "qwen2_moe"],
)
def test_tokens_of_an_engine(monkeypatch, in_fp8, config):
    """Greedy tokens equal the modules', also after an update. Always the same models: two logits may be nearly equal."""
    options = SamplingOptions(max_new_tokens=3, ignore_eos=True, logprobs=0)
    prompts = [[7, 3, 50], [11, 60, 2, 30, 5]]
    limits = EngineLimits(max_sequences=2, max_tokens_per_step=32, max_chunks_per_step=2, max_length=64, num_pages=4)
    runs = []
    for fuses in (False, True):
        monkeypatch.setattr(
            step_module, "_fuses", lambda _, batch, fuses=fuses: fuses and len(batch.outputs) == len(batch.tokens)
        )
        engine = Engine(_model(0, in_fp8, config), limits=limits, lazy=True)
        found = engine.generate(prompts, options)
        engine.update(_model(1, in_fp8, config))
        runs.append([completion for (completion,) in found + engine.generate(prompts, options)])
        engine.close()
    for of_modules, of_fused in zip(*runs, strict=True):
        assert of_modules.tokens == of_fused.tokens
        np.testing.assert_allclose(of_fused.logprobs, of_modules.logprobs, atol=0.05)


REFUSED = {
    "this deepseek_v3: latent attention, groups of experts": NAMED_CONFIGS["deepseek-v3"],
    "this hunyuan_v1_moe: norms after rope": NAMED_CONFIGS["hunyuan-a13b"],
    "this olmoe: clipped queries": replace(FAMILIES["olmoe"], clip_qkv=1.0),
    "head_dim must be 128": replace(CONFIG, head_dim=64),
    "this qwen3_moe: a bias after attention": replace(CONFIG, attention_bias=True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason):
    assert reason in (refusal(REFUSED[reason], jnp.bfloat16, 4) or "")


def test_taken():
    assert refusal(CONFIG, jnp.bfloat16, 256) is None
    assert refusal(CONFIG, jnp.bfloat16, 256, in_fp8=True) is None
    narrow = replace(CONFIG, moe_intermediate_size=64)
    assert refusal(narrow, jnp.bfloat16, 256) is None
    assert "inter is 64" in (refusal(narrow, jnp.bfloat16, 256, in_fp8=True) or "")
    assert refusal(CONFIG, jnp.bfloat16, 8192) is None
    assert "at most 256 tokens" in (refusal(CONFIG, jnp.bfloat16, 257, in_fp8=True) or "")


@pytest.mark.parametrize("named, is_taken", [(None, True), ("mosaic", True), ("xla", False), ("triton", False)])
def test_a_named_backend(monkeypatch, named, is_taken):
    """Steps run the modules where the user chose another backend."""
    monkeypatch.delenv("MOE_JAX_BACKEND", raising=False)
    if named is not None:
        monkeypatch.setenv("MOE_JAX_BACKEND", named)
    model = nnx.eval_shape(lambda: moe_jax.from_config(CONFIG, rngs=nnx.Rngs(0)))
    assert (unfused_reason(model) is None) == is_taken
