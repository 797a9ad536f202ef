"""Greedy generation equals transformers token for token, in batches of unequal prompts; options and bad input."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hf_reference import load_ours, reference
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import moe_jax
from moe_jax.config import NAMED_CONFIGS
from moe_jax.generation import devices


@pytest.mark.parametrize(
    "model_type, overrides",
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 4, "tie_word_embeddings": True}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
        ("deepseek_v3", {"first_k_dense_replace": 1}),
    ],
    ids=["moe", "moe-sliding-mixed", "dense-sliding", "deepseek"],
)
def test_greedy_equals_transformers_token_for_token(model_type, overrides):
    rng = np.random.default_rng()
    theirs = reference(model_type, int(rng.integers(2**31)), **overrides)
    prompts = [rng.integers(1, 97, length).tolist() for length in (3, 9, 1)]
    ours = moe_jax.generate(load_ours(theirs), prompts, max_new_tokens=12)
    for prompt, new in zip(prompts, ours, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert new == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "name, module", [("qwen3-30b-a3b", "generate"), ("deepseek-v3", "generate"), ("deepseek-v3", "speculative")]
)
def test_on_an_h200_the_prompt_alone_takes_the_fused_kernel(name, module, monkeypatch):
    """Also in the cache of a module that drafts."""
    attention, shapes = importlib.import_module("moe_jax.kernels.attention"), []

    def recorded(q, k, v, **options):
        shapes.append((q.shape, k.shape[1]))
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), None

    monkeypatch.setattr(attention, "flash_attention", recorded)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.delenv("MOE_JAX_BACKEND", raising=False)
    config = NAMED_CONFIGS[name]
    model = nnx.eval_shape(lambda: moe_jax.from_config(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    decode = importlib.import_module(f"moe_jax.generation.{module}")._decode
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1, 1), devices.AXES, axis_types=(AxisType.Auto,) * 2, abstract_device=device)
    prompts = [jax.ShapeDtypeStruct((2, 192), jnp.int32)] * 2
    with jax.sharding.use_abstract_mesh(mesh):
        program = devices.program(decode, (8, 0.0, None, None, ()), mesh)
        jax.eval_shape(partial(program, *nnx.split(model, nnx.Param, ...)), *prompts, jax.ShapeDtypeStruct((), jnp.uint32))
    stages = len(config.stages) + (module == "speculative")
    assert shapes == [((2, 192, config.num_attention_heads, config.key_dim), 192)] * stages


def test_a_sequence_ends_with_its_eos_while_the_others_go_on():
    model = load_ours(reference("qwen3_moe", 11))
    prompts = [[5, 6, 7], [8]]
    free = moe_jax.generate(model, prompts, max_new_tokens=10)
    end = free[0][2]
    stopped = moe_jax.generate(model, prompts, max_new_tokens=10, eos_token_id=[end, 96])
    for before, after in zip(free, stopped, strict=True):
        cut = next((i + 1 for i, token in enumerate(before) if token in (end, 96)), 10)
        assert after == before[:cut]
    assert len(stopped[0]) <= 3


def test_sampling_is_reproducible_by_its_seed_and_independent_of_the_prompts_after_it():
    model = load_ours(reference("qwen3_moe", 12))
    options = dict(max_new_tokens=16, temperature=1.0, top_k=50, top_p=0.95)
    one = moe_jax.generate(model, [[1, 2], [3]], seed=1, **options)
    assert one == moe_jax.generate(model, [[1, 2], [3]], seed=1, **options)
    assert one != moe_jax.generate(model, [[1, 2], [3]], seed=2, **options)
    ends = one[0][3]
    with_end = moe_jax.generate(model, [[1, 2], [3]], seed=1, eos_token_id=ends, **options)
    assert with_end == moe_jax.generate(model, [[1, 2], [3]], seed=np.int32(1), eos_token_id=np.int64(ends), **options)
    assert moe_jax.generate(model, [[1, 2], [9, 9, 9]], seed=1, **options)[0] == one[0]


def test_one_flat_prompt_gives_one_flat_list():
    model = load_ours(reference("qwen3", 13))
    assert moe_jax.generate(model, [1, 2, 3], max_new_tokens=4) == moe_jax.generate(model, [[1, 2, 3]], max_new_tokens=4)[0]
    assert moe_jax.generate(model, np.array([[1, 2, 3]]), max_new_tokens=1)[0] == moe_jax.generate(
        model, [jnp.int32(1), jnp.int32(2), jnp.int32(3)], max_new_tokens=1
    )


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([[1], []], {}, "at least one prompt of at least one token"),
        ([], {}, "at least one prompt"),
        ([[1, 97]], {}, "prompt 0 holds 97; token ids are integers from 0 to 96"),
        ([[1.5]], {}, "prompt 0 holds 1.5"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1; got 0"),
        ([[1]], {"temperature": -1.0}, "temperature must be 0 or more; got -1.0"),
        ([[1]], {"top_k": 0}, "top_k must be at least 1; got 0"),
        ([[1]], {"top_p": 0.0, "eos_token_id": 97}, r"top_p must lie in \(0, 1\]; got 0.0; eos_token_id 97 is outside"),
    ],
)
def test_bad_input_is_named(prompt, options, message):
    with pytest.raises(ValueError, match=message):
        moe_jax.generate(load_ours(reference("qwen3", 14)), prompt, **options)
