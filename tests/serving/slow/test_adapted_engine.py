"""An engine computes with a separate adapter: tokens and log-probabilities equal `generate` and the model."""

import contextlib
import logging
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.adapters.merge import with_zero_changes
from moe_jax.kernels.experts import mosaic
from moe_jax.layers.lora import Frozen, freeze
from moe_jax.layers.moe import EXPERT_MATRICES, Experts
from moe_jax.layers.quantised import INT4_VALUES, BlockScaled, FourBits
from moe_jax.serving.engine import Engine
from moe_jax.serving.request import EngineLimits, SamplingOptions
from tests.helpers import seeds, tiny
from tests.helpers.adapted_models import randomise, small_model, with_adapters

LIMITS = EngineLimits(max_sequences=2, max_tokens_per_step=16, max_chunks_per_step=2, max_length=64, num_pages=6)
OPTIONS = SamplingOptions(max_new_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)


def prompts_of(model):
    rng = seeds.rng()
    return [rng.integers(0, model.config.vocab_size, length).tolist() for length in (3, 20)]


def check(engine, model):
    """Compares two requests of an engine with `generate`, and their log-probabilities with the model's own."""
    prompts, found = answers(engine, model)
    tokens = moe_jax.generate(model, prompts, max_new_tokens=OPTIONS.max_new_tokens)
    assert [one.tokens for one in found] == tokens
    assert errors(prompts, found, model).max() < 2e-3


def answers(engine, model):
    prompts = prompts_of(model)
    return prompts, [found for (found,) in engine.generate(prompts, OPTIONS)]


def errors(prompts, found, model):
    """The differences of log-probabilities of answers and prompts from the model's own."""
    rows = [prompt + one.tokens for prompt, one in zip(prompts, found, strict=True)]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, own in zip(tokens, rows, strict=True):
        row[: len(own)] = own
    expected = np.asarray(log_probs(nnx.graphdef(model), nnx.state(model), tokens))
    differences = []
    for row, prompt, one in zip(expected, prompts, found, strict=True):
        own = [scores[token] for scores, token in zip(one.prompt_logprobs[1:], prompt[1:], strict=True)] + one.logprobs
        differences.append(np.abs(np.array(own) - row[: len(own)]))
    return np.concatenate(differences)


@partial(jax.jit, static_argnums=0)
def log_probs(graph, state, tokens):
    logits = nnx.merge(graph, state)(tokens).logits.astype(jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]


def with_matrices_in(model, quantise):
    """Freezes a model, and quantises its experts."""
    freeze(model)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Experts):
            for name in EXPERT_MATRICES:
                setattr(module, name, Frozen(quantise(getattr(module, name)[...])))
    return model


def add_random_adapters(model, **settings):
    add_lora(model, LoraSettings(rank=6, alpha=9.0, **settings), rngs=nnx.Rngs(0))
    randomise(model)
    return model


@pytest.fixture(scope="module")
def model():
    """Adapters of all matrices, and of the vocabulary's tables."""
    every = ("attention", "experts", "router", "embedding", "head")
    return with_adapters(small_model("qwen3_moe", tie_word_embeddings=False), targets=every)


@pytest.mark.thorough
def test_whole_weights(model, caplog):
    """New factors take over with `update`, and another scale, here zero; another rank is refused."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(caplog.at_level(logging.INFO, "moe_jax"))
        engine = stack.enter_context(contextlib.closing(Engine(model, limits=replace(LIMITS, max_sequences=1), lazy=True)))
        assert "without the fused kernels: the model has adapters, which stay separate from its weights" in caplog.text
        check(engine, model)
        other = nnx.clone(model)
        randomise(other)
        engine.update(other)
        check(engine, other)
        engine.update(with_zero_changes(other))
        assert errors(*answers(engine, other), other).max() > 0.1
        other_rank = small_model("qwen3_moe", tie_word_embeddings=False)
        with pytest.raises(ValueError, match="with an adapter of the same targets and ranks if that has one: .*lora"):
            engine.update(with_adapters(other_rank, rank=2))


NF4, INT4 = FourBits.nf4, lambda w, dtype: FourBits(*_int4(w), dtype, INT4_VALUES, 64)


def _int4(w):
    blocks = w.reshape(*w.shape[:-1], -1, 64)
    scales = jnp.abs(blocks).max(axis=-1) / 7
    codes = (jnp.round(blocks / scales[..., None]) + 8).astype(jnp.uint8).reshape(w.shape)
    return codes[..., ::2] << 4 | codes[..., 1::2], scales


@pytest.mark.thorough
@pytest.mark.parametrize(
    "quantise, targets", [(NF4, {}), (INT4, {}), (BlockScaled.fp8, {}), (NF4, {"targets": ("attention",)})]
)
def test_quantised_weights(quantise, targets):
    """Experts are made whole in each step; two layers, so that each finds its own codes. Some experts have no adapter."""
    base = tiny.model_for_fp8(dtype=jnp.float32)
    model = add_random_adapters(with_matrices_in(base, lambda w: quantise(w, jnp.float32)), **targets)
    with contextlib.closing(Engine(model, limits=LIMITS)) as engine:
        check(engine, model)
        (module,) = [module for _, module in nnx.iter_modules(model) if isinstance(module, Experts)]
        assert not isinstance(module.gate_up_proj.get_value(), jax.Array)


@pytest.mark.thorough
def test_experts_in_fp8():
    """Matrices multiply in FP8 inside the stack of layers, and the changes in bf16, which flips close choices."""
    model = add_random_adapters(with_matrices_in(tiny.model_for_fp8(), lambda w: BlockScaled.fp8(w, jnp.bfloat16)))
    model.set_precision("fp8")
    with contextlib.closing(Engine(model, limits=LIMITS)) as engine:
        given = answers(engine, model)
    of_model, of_base = (errors(*given, other).mean() for other in (model, with_zero_changes(model)))
    assert 3 * of_model < of_base


@pytest.mark.gpu
@pytest.mark.skipif(not mosaic.is_native(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("form", ["whole", "nf4", "fp8"])
def test_hopper_kernels(form):
    """In sizes that all kernels take; "fp8" multiplies so."""
    sizes = dict(vocab_size=256, hidden_size=256, head_dim=128, num_experts=128, num_experts_per_tok=4)
    config = moe_jax.Qwen3MoeConfig(**tiny.QWEN3 | sizes, moe_intermediate_size=128, norm_topk_prob=True)
    model = moe_jax.from_config(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    if form != "whole":
        model = with_matrices_in(model, lambda w: (NF4 if form == "nf4" else BlockScaled.fp8)(w, jnp.bfloat16))
    model.set_precision("fp8" if form == "fp8" else None)
    add_random_adapters(model)
    with contextlib.closing(Engine(model, limits=LIMITS)) as engine:
        given = answers(engine, model)
    of_model, of_base = (errors(*given, other).mean() for other in (model, with_zero_changes(model)))
    assert 3 * of_model < of_base and of_model < 0.1


@pytest.mark.thorough
def test_latent_attention():
    model = with_adapters(small_model("deepseek_v3"))
    with contextlib.closing(Engine(model, limits=LIMITS)) as engine:
        check(engine, model)


def test_strict_bits_are_refused():
    made = moe_jax.from_config(
        moe_jax.Qwen3Config(**tiny.QWEN3 | dict(vocab_size=256, hidden_size=128, intermediate_size=128, head_dim=128)),
        dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )
    with pytest.raises(ValueError, match="strict bits are not computed for this model: it has adapters; merge them first"):
        Engine(add_random_adapters(made), limits=LIMITS, strict=True)
