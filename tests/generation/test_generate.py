"""Greedy generation equals transformers token for token, in batches of unequal prompts; options and bad input."""

import importlib
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import moe_jax
from moe_jax.config import NAMED_CONFIGS
from moe_jax.generation import devices
from moe_jax.generation.request import DecodeOptions, check_memory
from moe_jax.generation.speculative import draft_source
from moe_jax.kernels.attention.mosaic import flash
from tests.helpers import seeds
from tests.helpers.hf_reference import load_ours, reference


@pytest.fixture(scope="module")
def loaded():
    model = load_ours(reference("qwen3", 13))
    model.config = replace(model.config, pad_token_id=0)
    return model


@pytest.fixture
def model(loaded):
    """A copy, whose config a test may change."""
    return nnx.clone(loaded)


@pytest.mark.parametrize(
    "model_type, overrides",
    [
        pytest.param("qwen3_moe", {}, marks=pytest.mark.thorough),
        pytest.param(
            "qwen3_moe",
            {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 4, "tie_word_embeddings": True},
            marks=pytest.mark.thorough,
        ),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
        ("deepseek_v3", {"first_k_dense_replace": 1}),
    ],
    ids=["moe", "moe-sliding-mixed", "dense-sliding", "deepseek"],
)
def test_greedy_equals_transformers_token_for_token(model_type, overrides):
    rng = seeds.rng()
    theirs = reference(model_type, int(rng.integers(2**31)), **overrides)
    prompts = [rng.integers(1, 97, length).tolist() for length in (3, 9, 1)]
    ours = moe_jax.generate(load_ours(theirs), prompts, max_new_tokens=12)
    for prompt, new in zip(prompts, ours, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert new == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "name, module",
    [
        ("qwen3-30b-a3b", "generate"),
        pytest.param("deepseek-v3", "generate", marks=pytest.mark.thorough),
        ("deepseek-v3", "speculative"),
    ],
)
def test_on_an_h200_the_prompt_alone_takes_the_fused_kernel(name, module, monkeypatch):
    """Covers the cache of a module that drafts too."""
    shapes = []

    def recorded(q, k, v, **options):
        shapes.append((q.shape, k.shape[1]))
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), None

    monkeypatch.setattr(flash, "flash_attention", recorded)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.delenv("MOE_JAX_BACKEND", raising=False)
    config = NAMED_CONFIGS[name]
    model = nnx.eval_shape(lambda: moe_jax.from_config(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    decode = importlib.import_module(f"moe_jax.generation.{module}")._decode
    if module == "speculative":
        decode = partial(decode, draft_source("module"))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1, 1), devices.AXES, axis_types=(AxisType.Auto,) * 2, abstract_device=device)
    prompts = [jax.ShapeDtypeStruct((2, 192), jnp.int32)] * 2
    with jax.sharding.use_abstract_mesh(mesh):
        program = devices.program(decode, DecodeOptions(8, 0.0, None, None, ()), mesh)
        jax.eval_shape(partial(program, *nnx.split(model, nnx.Param, ...)), *prompts, jax.ShapeDtypeStruct((), jnp.uint32))
    stages = len(config.stages) + (module == "speculative")
    assert shapes == [((2, 192, config.num_attention_heads, config.mixer.key_dim), 192)] * stages


def test_a_sequence_ends_at_its_eos_while_others_go_on(model):
    prompts = [[5, 6, 7], [8]]
    free = moe_jax.generate(model, prompts, max_new_tokens=4)
    end = free[0][2]
    stopped = moe_jax.generate(model, prompts, max_new_tokens=4, eos_token_id=[end, 96])
    for before, after in zip(free, stopped, strict=True):
        cut = next((i + 1 for i, token in enumerate(before) if token in (end, 96)), 4)
        assert after == before[:cut]
    assert len(stopped[0]) <= 3


def test_sampling_is_reproducible_by_its_seed(model):
    """The draw of a prompt does not depend on the prompts after it."""
    options = dict(max_new_tokens=16, temperature=1.0, top_k=50, top_p=0.95)
    one = moe_jax.generate(model, [[1, 2], [3]], seed=1, **options)
    assert one == moe_jax.generate(model, [[1, 2], [3]], seed=1, **options)
    assert one != moe_jax.generate(model, [[1, 2], [3]], seed=2, **options)
    ends = one[0][3]
    with_end = moe_jax.generate(model, [[1, 2], [3]], seed=1, eos_token_id=ends, **options)
    assert with_end == moe_jax.generate(model, [[1, 2], [3]], seed=np.int32(1), eos_token_id=np.int64(ends), **options)
    assert moe_jax.generate(model, [[1, 2], [9, 9, 9]], seed=1, **options)[0] == one[0]


def test_one_flat_prompt_gives_one_flat_list(model):
    assert moe_jax.generate(model, [1, 2, 3], max_new_tokens=4) == moe_jax.generate(model, [[1, 2, 3]], max_new_tokens=4)[0]
    assert moe_jax.generate(model, np.array([[1, 2, 3]]), max_new_tokens=4)[0] == moe_jax.generate(
        model, [jnp.int32(1), jnp.int32(2), jnp.int32(3)], max_new_tokens=4
    )


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([[1], []], {}, "at least one prompt of at least one token"),
        ([], {}, "at least one prompt"),
        ([[1, 97]], {}, "prompt 0 holds 97; token ids are integers from 0 to 96"),
        ([[1.5]], {}, "prompt 0 holds 1.5"),
        ("import os", {}, r"got the text 'import os': moe_jax.complete\(model, 'import os'\) takes text"),
        (["a", "b"], {}, r"got a list of texts: moe_jax.complete\(model, \['a', ...\]\) takes texts"),
        ([{"role": "user", "content": "a"}], {}, r"got messages: moe_jax.chat\(model, messages\) takes them"),
        ([[{"role": "user", "content": "a"}]], {}, r"got messages: moe_jax.chat\(model, messages\) takes them"),
        (np.array(["a"]), {}, r"got a list of texts: moe_jax.complete\(model, \['a', ...\]\) takes texts"),
        ({"input_ids": [[1]]}, {}, r"got a dict: generate\(model, encoded\['input_ids'\]\) takes"),
        (
            {"input_ids": [[1]], "attention_mask": [[1]]},
            {},
            r"encoded\['input_ids'\], attention_mask=encoded\['attention_mask'\]\)",
        ),
        (1, {}, "prompt_tokens must be a list of integers, or a list of such lists; got 1"),
        ([[0, 1], [2, 3]], {}, "begin with the padding token 0 in 1 of 2 rows.*pass the tokenizer's attention_mask"),
        (np.array([[2, 1], [3, 0]]), {}, "end with the padding token 0 in 1 of 2 rows.*pass attention_mask=np.ones_like"),
        ([[0, 0, 1]], {}, "begin with the padding token 0 in 1 of 1 rows"),
        ([[1, 0, 0], [2, 0, 0, 0]], {}, "end with the padding token 0 in 2 of 2 rows"),
        ([[1, 2]], {"attention_mask": [[1]]}, r"must have prompt_tokens' shape; got rows of \[1\] for \[2\] tokens"),
        ([[1, 2, 3]], {"attention_mask": [[1, 0, 1]]}, r"one run of ones in each row.*row 0 is \[1, 0, 1\]"),
        ([[1, 2]], {"attention_mask": [[0, 0]]}, r"one run of ones in each row.*row 0 is \[0, 0\]"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be an integer, at least 1; got 0"),
        (
            [[1]],
            {"max_new_tokens": 10**12},
            r"max_new_tokens=1000000000000: the cache of 1000000000001 tokens .* GiB, and a device",
        ),
        ([[1]], {"max_new_tokens": 1.5}, "max_new_tokens must be an integer, at least 1; got 1.5"),
        (
            [[1]],
            {"top_k": 2.5, "temperature": "1"},
            "temperature must be a number, 0 or more; got '1'; top_k must be an integer",
        ),
        ([[1]], {"overlap_prefill": "no"}, "overlap_prefill must be True or False; got 'no'"),
        ([[1]], {"temperature": -1.0}, "temperature must be a number, 0 or more; got -1.0"),
        ([[1]], {"top_k": 0}, "top_k must be an integer, at least 1; got 0"),
        ([[1]], {"top_p": 0.0, "eos_token_id": 97}, r"top_p must be a number in \(0, 1\]; got 0.0; eos_token_id 97 is outside"),
    ],
)
def test_bad_input_is_named(model, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        moe_jax.generate(model, prompt, **options)


def test_the_eos_token_stands_in_for_a_missing_padding_token(model):
    """With a padding token in the config, a prompt may begin with an end token."""
    model.config = replace(model.config, pad_token_id=None, eos_token_id=(5, 6))
    with pytest.raises(ValueError, match="begin with the padding token 6 in 1 of 2 rows"):
        moe_jax.generate(model, [[6, 1], [2, 3]], max_new_tokens=1)
    model.config = replace(model.config, pad_token_id=0)
    assert len(moe_jax.generate(model, [[6, 1], [2, 3]], max_new_tokens=1)) == 2


def test_padding_under_a_mask_changes_nothing_on_either_side(model):
    expected = moe_jax.generate(model, [[5, 6, 7], [8]], max_new_tokens=4)
    for padded, mask in ([[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]]), ([[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]]):
        assert moe_jax.generate(model, np.array(padded), attention_mask=np.array(mask), max_new_tokens=4) == expected
    meant = moe_jax.generate(model, [[5, 6], [8, 0]], attention_mask=np.ones((2, 2), int), max_new_tokens=4)
    assert meant[1] == moe_jax.generate(model, [8, 0], max_new_tokens=4)


def test_a_cache_larger_than_the_memory_is_refused(model, monkeypatch):
    """Devices share the prompts; each keeps rotated keys and values of all layers, for the longest prompt."""
    config, prompts = model.config, [[1], [2, 3], [4]]
    numbers = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    options = dict(dtype="float32", devices=2)
    monkeypatch.setattr("moe_jax.generation.request.os.sysconf", {"SC_PHYS_PAGES": 2 * 10 * numbers, "SC_PAGE_SIZE": 4}.get)
    check_memory(config, prompts, 8, **options)
    with pytest.raises(ValueError, match="max_new_tokens=9: the cache of 11 tokens for each of 2 prompts needs 0.0 GiB"):
        check_memory(config, prompts, 9, **options)


def test_exceeding_max_position_embeddings_warns_once(model, caplog):
    model.config = replace(model.config, max_position_embeddings=5)
    for _ in range(2):
        moe_jax.generate(model, [1, 2, 3], max_new_tokens=4)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert (
        "a prompt of 3 tokens and max_new_tokens=4 make 7, more than the model's max_position_embeddings of 5" in record.message
    )


def test_a_terminal_shows_once_that_a_program_compiles(model, capsys, monkeypatch):
    monkeypatch.setattr(devices, "_announced", set())
    capsys.readouterr()
    moe_jax.generate(model, [1, 2, 3], max_new_tokens=4)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(devices, "_announced", set())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for prompt in ([1, 2, 3], [4, 5]):
        moe_jax.generate(model, prompt, max_new_tokens=4)
    assert capsys.readouterr().err == "compiling for a prompt of at most 64 tokens ...\n"
