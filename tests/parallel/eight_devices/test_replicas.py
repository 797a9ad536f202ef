"""An engine with replicas, on some of eight devices: an engine on one device draws the same tokens."""

import gc
import json
from contextlib import closing
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.cli import main
from moe_jax.config import config_to_dict
from moe_jax.layers.quantised import BlockScaled, FourBits
from moe_jax.serving import Engine, EngineLimits, SamplingOptions
from tests.helpers import seeds, tiny
from tests.helpers.adapted_models import with_adapters
from tests.helpers.meshes import laid_out
from tests.helpers.served import comes_true
from tests.serving.slow.test_adapted_engine import with_matrices_in

LIMITS = EngineLimits(
    max_sequences=2, max_tokens_per_step=24, max_chunks_per_step=2, max_length=128, num_pages=8, max_waiting=40, replicas=2
)
ONE_AT_A_TIME = replace(LIMITS, max_sequences=1, max_chunks_per_step=1)
"""Limits with the fewest programs: each is compiled for each device."""
DRAWN = SamplingOptions(max_new_tokens=7, temperature=1.0, seed=3, ignore_eos=True, logprobs=0, prompt_logprobs=0)


def prompts_of(model, *lengths):
    rng = seeds.rng()
    return [rng.integers(3, model.config.vocab_size, length).tolist() for length in lengths]


def both(model, options=DRAWN, lengths=(3, 70, 20, 1, 30, 12), limits=LIMITS, **settings):
    """Returns the completions of an engine on one device and of one with replicas. Each replica had some requests."""
    prompts, found = prompts_of(model, *lengths), []
    for replicas in (1, 2):
        with closing(Engine(model, limits=replace(limits, replicas=replicas), lazy=True, **settings)) as engine:
            found.append(sum(engine.generate(prompts, options), []))
            assert all(stats.num_tokens for stats in engine.stats_of_devices().values())
            assert engine.stats().owned_pages == engine.stats().running == engine.stats().waiting == 0
    return found


def check_tokens(one, several):
    for wanted, found in zip(one, several, strict=True):
        assert found.tokens == wanted.tokens
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)


def check_experts(one, several):
    for wanted, found in zip(one, several, strict=True):
        np.testing.assert_array_equal(np.sort(found.experts), np.sort(wanted.experts))


@pytest.mark.thorough
def test_tokens_experts_and_continuations():
    one, several = both(tiny.model(), replace(DRAWN, n=2, return_experts=True), keep_experts=True)
    check_tokens(one, several)
    check_experts(one, several)


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["lookup", "module", "adapter", "fp8", "nf4"])
def test_drafts_adapters_and_forms_of_weights(form):
    drafts = {"lookup": "lookup:2", "module": 1}.get(form, 0)
    if form in ("fp8", "nf4"):
        quantise = BlockScaled.fp8 if form == "fp8" else FourBits.nf4
        model = with_matrices_in(tiny.model_for_fp8(dtype=jnp.float32), lambda w: quantise(w, jnp.float32))
    else:
        model = tiny.deepseek(mtp=1) if drafts == 1 else tiny.model()
    if form == "adapter":
        with_adapters(model, targets=("attention", "experts"))
    check_tokens(*both(model, replace(DRAWN, prompt_logprobs=None), drafts=drafts))


@pytest.mark.thorough
def test_adapters_by_name():
    """Each device has the table, and drafts from the text check drafts with the row's adapter."""
    base = tiny.dense()
    adapted = with_adapters(nnx.clone(base), targets=("attention",))
    prompts = prompts_of(base, 3, 20, 9, 12)
    expected = [moe_jax.generate(model, prompts, max_new_tokens=7) for model in (base, adapted)]
    limits = replace(LIMITS, max_sequences=1, replicas=2, max_adapters=1, max_adapter_rank=6)
    with closing(Engine(base, limits=limits, drafts="lookup:2", lazy=True)) as engine:
        engine.load_adapter("french", adapted)
        options = [SamplingOptions(max_new_tokens=7, ignore_eos=True, adapter=name) for name in (None, "french")]
        found = engine.generate(prompts * 2, [each for each in options for _ in prompts])
        assert [one.tokens for (one,) in found] == expected[0] + expected[1]


def test_new_weights_and_sleep():
    """Each device gets them, keeps them when a training step donates the model's, and frees all its own in a sleep."""
    model, before = tiny.dense(), live_bytes()
    prompts = prompts_of(model, 3, 20, 9, 12)
    other = nnx.clone(model)
    other.lm_head.weight[...] = other.lm_head.weight[...][::-1]
    expected = moe_jax.generate(other, prompts, max_new_tokens=7)
    with closing(Engine(model, limits=ONE_AT_A_TIME, lazy=True)) as engine:
        assert greedy(engine, prompts) == moe_jax.generate(model, prompts, max_new_tokens=7)
        engine.update(other)
        assert greedy(engine, prompts) == expected
        assert [stats.weights_version for stats in engine.stats_of_devices().values()] == [1, 1]
        with pytest.raises(ValueError, match="the new weights must be .*: architecture is"):
            engine.update(tiny.model())
        for _ in range(2):
            engine.sleep()
            trained = donated(other)
            assert live_bytes(of_device=1) < 1e5
            engine.update(other := trained)
            assert greedy(engine, prompts) == expected
        own = [array for array in jax.live_arrays() if array.devices() == {jax.devices()[1]}]
        assert own
    del own, other, trained
    assert live_bytes() <= before


def test_groups(monkeypatch):
    """Two replicas of two devices, which split the experts. If one fails, its requests name its devices."""
    model, options = tiny.model(), replace(DRAWN, n=2, return_experts=True)
    prompts = prompts_of(model, 3, 50, 9, 12)
    with closing(Engine(model, limits=replace(ONE_AT_A_TIME, replicas=1), keep_experts=True, lazy=True)) as engine:
        expected = sum(engine.generate(prompts, options), [])
    other = nnx.clone(model)
    other.lm_head.weight[...] = other.lm_head.weight[...][::-1]
    with closing(Engine(laid_out(model, expert=2), limits=ONE_AT_A_TIME, keep_experts=True, lazy=True)) as engine:
        found = sum(engine.generate(prompts, options), [])
        check_tokens(expected, found)
        check_experts(expected, found)
        engine.update(laid_out(other, fsdp=2))
        assert greedy(engine, prompts) == moe_jax.generate(other, prompts, max_new_tokens=7)
        device, names = engine._loop.loops[1].device, ", ".join(map(str, jax.devices()[2:4]))
        assert [*engine.stats_of_devices()][1] == device.placement.name == names
        assert device.served.mesh.devices.ravel().tolist() == jax.devices()[2:4]
        monkeypatch.setattr(device, "launch", lambda plans: 1 / 0)
        with pytest.raises(RuntimeError, match=f"one of the engine's devices {names} failed: ZeroDivisionError"):
            engine.generate(prompts)


def greedy(engine, prompts):
    completions = engine.generate(prompts, SamplingOptions(max_new_tokens=7, ignore_eos=True))
    assert all(stats.num_tokens for stats in engine.stats_of_devices().values())
    return [one.tokens for (one,) in completions]


def live_bytes(of_device=None):
    gc.collect()
    arrays = jax.live_arrays()
    return sum(a.nbytes for a in arrays if of_device is None or a.devices() == {jax.devices()[of_device]})


def donated(model):
    """Returns a model of the same numbers, in other arrays; the model's own are deleted, as by a step of training."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.jit(partial(jax.tree.map, jnp.copy), donate_argnums=0)(state))


def test_an_engine_that_nobody_holds_ends():
    engine = Engine(tiny.dense(), limits=ONE_AT_A_TIME, lazy=True)
    handle, loops = engine.submit([5, 6, 7]), engine._loop.loops
    del engine
    assert handle.result()
    del handle
    assert comes_true(lambda: gc.collect() is not None and not any(loop._thread.is_alive() for loop in loops))


def test_refusals(tmp_path, capsys):
    model = tiny.model()
    with pytest.raises(ValueError, match="replicas must be at most 8: this process has 8 devices; got 9"):
        Engine(model, limits=replace(LIMITS, replicas=9))
    with pytest.raises(ValueError, match="replicas must be at most 2 for replicas of 3 devices: this process has 8 devices"):
        Engine(laid_out(model, fsdp=3), limits=replace(LIMITS, replicas=4))
    with pytest.raises(ValueError, match="an engine on several devices does not support drafts; the model is on 2"):
        Engine(laid_out(model, fsdp=2), limits=LIMITS, drafts="lookup:2")
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(tiny.dense().config)))
    for options, message in (
        ("--replicas 9", "--replicas must be at most 8, the visible devices; got 9"),
        ("--replicas 3 --devices-per-replica 4", "--replicas must be at most 2, the visible devices, for 4 each; got 3"),
    ):
        with pytest.raises(SystemExit):
            main(["bench", "--random-weights", str(tmp_path), *options.split()])
        assert message in capsys.readouterr().err


@pytest.mark.thorough
def test_bench(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(tiny.dense().config)))
    load = "--concurrency 4 --requests-each 1 --prompt-tokens 8 --new-tokens 3 --max-sequences 2 --max-tokens-per-step 8"
    sizes = "--max-length 64 --num-pages 4 --dtype float32 --replicas 2 --lazy"
    main(["bench", "--random-weights", str(tmp_path), *load.split(), *sizes.split()])
    assert "2 x cpu, prompts of 8 tokens" in capsys.readouterr().out
