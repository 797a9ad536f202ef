"""Adapters by name in one batch: each row has the tokens and log-probabilities of the model with its adapter alone."""

import contextlib
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.adapters import LoraSettings, add_lora, save_adapter
from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.layers.lora import has_adapters
from moe_jax.serving.engine import Engine
from moe_jax.serving.request import EngineLimits, SamplingOptions
from tests.helpers import seeds
from tests.helpers.adapted_models import randomise, small_model

LIMITS = EngineLimits(
    max_sequences=4,
    max_tokens_per_step=128,
    max_chunks_per_step=4,
    max_length=192,
    num_pages=20,
    max_adapters=2,
    max_adapter_rank=8,
)
OPTIONS = SamplingOptions(max_new_tokens=3, ignore_eos=True, logprobs=0)
RANKS = {"french": 4, "code": 8, "other": 2}


@pytest.fixture(scope="module", params=["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.thorough)])
def base(request):
    return small_model(request.param)


@pytest.fixture(scope="module")
def adapted(base):
    """The base with each adapter alone, by name; None: without one."""
    return {None: base} | {name: with_adapter(base, rank) for name, rank in RANKS.items()}


@pytest.fixture(scope="module")
def folders(adapted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for name in RANKS:
        save_adapter(adapted[name], folder / name)
    return {name: str(folder / name) for name in RANKS}


@pytest.fixture(scope="module")
def shared(base):
    with contextlib.closing(Engine(base, limits=LIMITS, lazy=True)) as engine:
        yield engine


@pytest.fixture
def engine(shared):
    yield shared
    for adapter in shared.adapters:
        shared.unload_adapter(adapter.name)


def with_adapter(base, rank, targets=("attention",)):
    model = nnx.clone(base)
    add_lora(model, LoraSettings(rank=rank, alpha=3 * rank, targets=targets), rngs=nnx.Rngs(0))
    randomise(model)
    return model


def prompt_of(model, length):
    return seeds.rng().integers(0, model.config.vocab_size, length).tolist()


def check(engine, adapted, names, lengths=(3, 20, 70)):
    """Compares requests of one batch with the models. Two rows, as most tests have, share a program of the engine."""
    prompts = [prompt_of(engine, lengths[i % len(lengths)]) for i in range(len(names))]
    options = [replace(OPTIONS, adapter=name) for name in names]
    found = [one for (one,) in engine.generate(prompts, options)]
    for name, prompt, one in zip(names, prompts, found, strict=True):
        row = np.zeros((1, 80), np.int32)
        row[0, : len(prompt) + len(one.tokens)] = prompt + one.tokens
        scores = np.asarray(log_probs(*nnx.split(adapted[name]), row))[len(prompt) - 1 :][: len(one.tokens)]
        assert one.tokens == scores.argmax(-1).tolist(), name
        np.testing.assert_allclose(one.logprobs, scores.max(-1), atol=1e-4)


@partial(jax.jit, static_argnums=0)
def log_probs(graph, state, tokens):
    return jax.nn.log_softmax(nnx.merge(graph, state)(tokens).logits[0].astype(jnp.float32))


def test_a_batch_mixes_adapters_and_the_model_alone(engine, adapted, folders):
    engine.load_adapter("french", folders["french"])
    engine.load_adapter("code", adapted["code"])
    assert [(each.name, each.source) for each in engine.adapters] == [("code", "a model"), ("french", folders["french"])]
    check(engine, adapted, [None, "french", "code", "french"])
    check(engine, adapted, [None, None])


def test_no_prefix_is_shared_across_adapters(engine, adapted, folders):
    """One prompt of a full page: each adapter finds only its own page, also after it was loaded again."""
    prompt = prompt_of(engine, PAGE_SIZE + 4)

    def cached(name):
        ((one,),) = engine.generate([prompt], replace(OPTIONS, adapter=name, max_new_tokens=1))
        return one.cached_tokens

    engine.load_adapter("french", folders["french"])
    engine.load_adapter("code", folders["code"])
    assert [cached(name) for name in (None, "french", "code")] == [0, 0, 0]
    assert [cached(name) for name in (None, "french", "code")] == [PAGE_SIZE] * 3
    engine.load_adapter("french", folders["french"])
    assert [cached(name) for name in ("french", "code", "french")] == [0, PAGE_SIZE, PAGE_SIZE]


def test_a_reload_changes_later_requests(engine, adapted, folders):
    engine.load_adapter("french", folders["french"])
    check(engine, adapted, ["french"] * 2)
    engine.load_adapter("french", folders["other"])
    check(engine, {"french": adapted["other"]}, ["french"] * 2)
    engine.unload_adapter("french")
    with pytest.raises(ValueError, match="adapter 'french' is not loaded; loaded are: none"):
        engine.submit([1], replace(OPTIONS, adapter="french"))
    with pytest.raises(ValueError, match="adapter 'french' is not loaded"):
        engine.unload_adapter("french")


def test_the_least_recently_used_adapter_leaves(engine, adapted, folders):
    for name in ("french", "code"):
        engine.load_adapter(name, folders[name])
    check(engine, adapted, ["french"] * 2)
    engine.load_adapter("other", folders["other"])
    assert [each.name for each in engine.adapters] == ["french", "other"]
    check(engine, adapted, ["french", "other"])


def test_requests_keep_the_adapter_that_they_began_with(engine, adapted, folders):
    """A paused engine holds a request of each place: no adapter can be loaded until one has ended."""
    for name in ("french", "code"):
        engine.load_adapter(name, folders[name])
    engine.pause()
    try:
        prompt = prompt_of(engine, 9)
        handles = [engine.submit(prompt, replace(OPTIONS, adapter=name)) for name in ("french", "code")]
        engine.unload_adapter("french")
        with pytest.raises(RuntimeError, match="adapter 'other' finds no place: running requests use all 2 adapters"):
            engine.load_adapter("other", folders["other"])
        assert [each.name for each in engine.adapters] == ["code"]
    finally:
        engine.resume()
    for handle, name in zip(handles, ("french", "code"), strict=True):
        row = np.zeros((1, 80), np.int32)
        row[0, : len(prompt)] = prompt
        first = np.asarray(log_probs(*nnx.split(adapted[name]), row))[len(prompt) - 1].argmax()
        assert handle.result()[0].tokens[0] == first
    engine.load_adapter("other", folders["other"])
    check(engine, adapted, ["other", "code"])


def test_adapters_survive_sleep_and_new_weights(engine, base, adapted, folders):
    engine.load_adapter("code", folders["code"])
    engine.sleep()
    engine.update(base)
    check(engine, adapted, ["code", None])


def test_wrong_adapters_change_nothing(engine, base, adapted, folders, tmp_path):
    engine.load_adapter("code", folders["code"])
    of_experts = with_adapter(base, 4, targets=("attention", "experts"))
    save_adapter(of_experts, tmp_path / "experts")
    for adapter, message in (
        (tmp_path / "experts", "changes experts, but an adapter among several may change only attention: serve it alone"),
        (of_experts, "the model's adapter changes experts"),
        (with_adapter(base, 9), "has rank 9, above max_adapter_rank=8"),
        (base, "the model's adapter changes no matrix"),
        (tmp_path, "has no adapter_config.json"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            engine.load_adapter("code", adapter)
    with pytest.raises(ValueError, match="name must be a text, not empty; got ''"):
        engine.load_adapter("", folders["code"])
    with pytest.raises(ValueError, match="adapter 'Code' is not loaded; loaded are: 'code'"):
        engine.generate([[1]], replace(OPTIONS, adapter="Code"))
    with pytest.raises(ValueError, match="adapter must be None or a name; got 3"):
        engine.generate([[1]], replace(OPTIONS, adapter=3))
    check(engine, adapted, ["code"] * 2)


def test_engines_that_cannot_mix_adapters(base, adapted):
    assert has_adapters(adapted["code"])
    with pytest.raises(ValueError, match="max_adapters=2 does not support a model that has an adapter of its own: merge it"):
        Engine(adapted["code"], limits=LIMITS)
    with pytest.raises(ValueError, match="max_adapters=2 does not support strict=True"):
        Engine(base, limits=LIMITS, strict=True)
    with contextlib.closing(Engine(base, limits=replace(LIMITS, max_adapters=0), lazy=True)) as engine:
        with pytest.raises(ValueError, match="load_adapter needs an engine with EngineLimits"):
            engine.load_adapter("code", adapted["code"])
        with pytest.raises(ValueError, match="adapter 'code' needs an engine with EngineLimits"):
            engine.submit([1], replace(OPTIONS, adapter="code"))
