"""An engine on several devices gives each request the tokens that it has on one, whichever device computes it."""

import dataclasses
import json
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.cli import main
from moe_jax.config import config_to_dict
from moe_jax.serving import Engine, EngineLimits, SamplingOptions
from tests.helpers import tiny
from tests.helpers.adapted_models import with_adapters
from tests.helpers.meshes import laid_out
from tests.serving.slow.test_strict import ONE_LAYER

LIMITS = EngineLimits(
    max_sequences=2, max_tokens_per_step=64, max_chunks_per_step=2, max_length=256, num_pages=6, max_waiting=20
)
PLAIN = SamplingOptions(max_new_tokens=9, ignore_eos=True)


def prompts_of(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(3, 128, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def model():
    return tiny.model()


@pytest.fixture(scope="module")
def engine(model):
    """Each of two devices has two of the four experts. The model's own mesh divides them in another way."""
    engine = Engine(laid_out(model, fsdp=2), limits=LIMITS, keep_experts=True)
    yield engine
    stats = engine.stats()
    assert stats.owned_pages == stats.running == stats.waiting == 0
    assert stats.free_pages + stats.cached_pages == 2 * (LIMITS.num_pages - 1)
    engine.close()


# In CI `test_replicas.test_groups` compares devices that split the experts with one device.
@pytest.mark.thorough
def test_all_options_equal_one_device(model, engine):
    """Draws, penalties, log-probabilities, experts; each device has requests of its own, and other programs are not needed."""
    alone = Engine(model, limits=LIMITS, keep_experts=True)
    prompts = prompts_of(70, 5, 130, 9, 64, 40)
    options = [
        PLAIN,
        dataclasses.replace(PLAIN, temperature=1.0, seed=1, n=2),
        dataclasses.replace(PLAIN, prompt_logprobs=2, return_experts=True),
        dataclasses.replace(PLAIN, presence_penalty=0.5, logit_bias={7: 3.0}, logprobs=2),
        dataclasses.replace(PLAIN, temperature=0.7, top_p=0.9, seed=2, repetition_penalty=1.3),
        dataclasses.replace(PLAIN, return_experts=True, prompt_logprobs=0),
    ]
    compiled = []
    listen = lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        found = engine.generate(prompts, options)
    finally:
        jax._src.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
    for ours, expected in zip(sum(found, []), sum(alone.generate(prompts, options), []), strict=True):
        assert ours.tokens == expected.tokens
        assert (ours.prompt_logprobs is None) == (expected.prompt_logprobs is None)
        for one, wanted in zip(ours.prompt_logprobs or [], expected.prompt_logprobs or [], strict=True):
            assert one == (wanted if wanted is None else pytest.approx(wanted, abs=1e-4))
        if expected.experts is not None:
            np.testing.assert_array_equal(np.sort(ours.experts), np.sort(expected.experts))
    alone.close()


@pytest.mark.thorough
def test_pages_run_out_on_each_device(model, engine):
    """Two sequences of four pages do not fit into five: the younger one waits, and begins again."""
    prompts, before = prompts_of(*range(118, 122)), engine.stats().num_preemptions
    found = engine.generate(prompts, dataclasses.replace(PLAIN, max_new_tokens=80))
    assert [one.tokens for (one,) in found] == moe_jax.generate(model, prompts, max_new_tokens=80)
    assert engine.stats().num_preemptions >= before + 2


@pytest.mark.thorough
def test_strict_bits(interpreted_on_several):
    """Each device has a quarter of the experts, and prompts and new tokens have the bits of one device."""
    model = moe_jax.from_config(ONE_LAYER, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    sizes = dict(max_sequences=1, max_tokens_per_step=8, max_chunks_per_step=2, max_length=128, num_pages=8, max_waiting=40)
    drawn = dict(temperature=1.0, seed=3, logprobs=0, prompt_logprobs=0)
    prompts, found = prompts_of(5, 11, 3), []
    for of_one in (model, laid_out(model, expert=4)):
        with closing(Engine(of_one, limits=EngineLimits(**sizes), strict=True, lazy=True)) as engine:
            answers = engine.generate(prompts, dataclasses.replace(PLAIN, max_new_tokens=3, **drawn))
            found.append([(one.tokens, one.logprobs, one.prompt_logprobs) for (one,) in answers])
    assert found[0] == found[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make, sizes",
    [
        # Two of six devices hold half of the experts each.
        (tiny.model, dict(data=2, fsdp=3)),
        (tiny.deepseek, dict(fsdp=2, context=4)),
    ],
    ids=["six devices", "deepseek"],
)
def test_other_models_and_meshes(make, sizes):
    model, prompts = make(), prompts_of(70, 3, 20, 130, 64, 7)
    engine = Engine(laid_out(model, **sizes), limits=LIMITS)
    found = engine.generate(prompts, PLAIN)
    engine.close()
    assert [one.tokens for (one,) in found] == moe_jax.generate(model, prompts, max_new_tokens=9)


def test_options_of_one_device_are_refused(model):
    on_two = laid_out(model, fsdp=2)
    with pytest.raises(ValueError, match="max_adapters=1 does not support a model on several devices: use replicas on one"):
        Engine(on_two, limits=dataclasses.replace(LIMITS, max_adapters=1))
    with pytest.raises(ValueError, match="an engine on several devices does not support drafts; the model is on 2"):
        Engine(laid_out(tiny.deepseek(mtp=1), fsdp=2), limits=LIMITS, drafts=1)
    with pytest.raises(ValueError, match="does not support adapters; the model is on 2"):
        Engine(with_adapters(laid_out(tiny.model(), fsdp=2), targets=("attention",)), limits=LIMITS)
    with pytest.raises(ValueError, match="an engine has no pipe yet"):
        Engine(laid_out(model, pipe=2), limits=LIMITS)


@pytest.mark.thorough
def test_bench(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(tiny.dense().config)))
    load = "--concurrency 2 --requests-each 1 --prompt-tokens 8 --new-tokens 3 --max-sequences 1 --max-tokens-per-step 8"
    sizes = "--max-length 64 --num-pages 4 --dtype float32 --devices 2"
    main(["bench", "--random-weights", str(tmp_path), *load.split(), *sizes.split()])
    assert "2 x cpu, prompts of 8 tokens" in capsys.readouterr().out


def test_serve_refuses_devices(tmp_path, capsys):
    moe_jax.save_pretrained(tiny.deepseek(mtp=1), tmp_path / "drafting")
    tiny.tokenizer().save_pretrained(tmp_path / "drafting")
    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path / "drafting"), "--drafts", "--devices", "2"])
    assert "--drafts: use --devices 1; got 2" in capsys.readouterr().err
