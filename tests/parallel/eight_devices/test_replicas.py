"""An engine with replicas, on some of eight devices: an engine on one device draws the same tokens."""

import gc
import json
import threading
from contextlib import closing
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moe_jax
from moe_jax.cli import main
from moe_jax.config import config_to_dict
from moe_jax.layers.quantised import BlockScaled, FourBits
from moe_jax.reinforcement.policy import Policy
from moe_jax.reinforcement.settings import PolicySettings
from moe_jax.serving import Engine, EngineLimits, SamplingOptions
from moe_jax.serving.device import Device
from tests.helpers import seeds, tiny
from tests.helpers.adapted_models import with_adapters
from tests.helpers.meshes import laid_out
from tests.helpers.served import comes_true
from tests.serving.slow.test_adapted_engine import with_matrices_in
from tests.serving.slow.test_strict import ONE_LAYER

LIMITS = EngineLimits(
    max_sequences=2, max_tokens_per_step=24, max_chunks_per_step=2, max_length=128, num_pages=8, max_waiting=40, replicas=2
)
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


def test_tokens_experts_and_continuations():
    # One sequence at a time needs a program less, on each of three devices.
    limits = replace(LIMITS, max_sequences=1)
    one, several = both(tiny.model(), replace(DRAWN, n=2, return_experts=True), limits=limits, keep_experts=True)
    check_tokens(one, several)
    for wanted, found in zip(one, several, strict=True):
        np.testing.assert_array_equal(np.sort(found.experts), np.sort(wanted.experts))


@pytest.mark.thorough
def test_strict_bits(monkeypatch):
    """No bit of a token depends on its device, or on the requests there."""
    launch, lock = Device.launch, threading.Lock()

    def launch_alone(device, plans):
        # The interpreter of kernels has one shared memory for all devices.
        with lock:
            draw = launch(device, plans)
            launched = draw()
            jax.block_until_ready((launched.first, launched.scores and launched.scores[1], device.state))
        return draw

    monkeypatch.setattr(Device, "launch", launch_alone)
    model = moe_jax.from_config(ONE_LAYER, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    limits = replace(LIMITS, max_sequences=1, max_tokens_per_step=8)
    one, several = both(model, replace(DRAWN, max_new_tokens=3), (5, 11, 3), limits, strict=True)
    assert [(each.tokens, each.logprobs, each.prompt_logprobs) for each in several] == [
        (each.tokens, each.logprobs, each.prompt_logprobs) for each in one
    ]


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
    with closing(Engine(model, limits=replace(LIMITS, max_sequences=1), lazy=True)) as engine:
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
    model = tiny.model()
    prompts = prompts_of(model, 3, 20, 9, 12)
    other = nnx.clone(model)
    other.lm_head.weight[...] = other.lm_head.weight[...][::-1]
    with closing(Engine(laid_out(model, expert=2), limits=replace(LIMITS, max_sequences=1), lazy=True)) as engine:
        assert greedy(engine, prompts) == moe_jax.generate(model, prompts, max_new_tokens=7)
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


def test_a_failed_device(monkeypatch):
    """Its requests name it, and the other device answers as before."""
    model = tiny.dense()
    prompts = prompts_of(model, 3, 20, 9, 12)
    expected = moe_jax.generate(model, prompts, max_new_tokens=7)
    with closing(Engine(model, limits=LIMITS, lazy=True)) as engine:

        def fail(plans):
            raise ValueError("a defect")

        monkeypatch.setattr(engine._loop.loops[1].device, "launch", fail)
        handles = [engine.submit(prompt, SamplingOptions(max_new_tokens=7, ignore_eos=True)) for prompt in prompts]
        failed = 0
        for handle, tokens in zip(handles, expected, strict=True):
            try:
                assert handle.result()[0].tokens == tokens
            except RuntimeError as error:
                assert str(error) == f"the engine's device {jax.devices()[1]} failed: ValueError: a defect"
                failed += 1
        assert 0 < failed <= LIMITS.max_sequences and not engine.failed
        assert engine.generate(prompts[:1])[0][0].tokens[:7] == expected[0]


def test_an_engine_that_nobody_holds_ends():
    engine = Engine(tiny.dense(), limits=LIMITS, lazy=True)
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


@pytest.mark.thorough
def test_a_policy_draws_on_all_devices():
    """It learns on one. A policy on one device draws the same answers before and after an update."""
    prompts = [(key, {"prompt": text}) for key, text in enumerate(["a b c d e", "what was ", "1 2 3 4 5"])]
    settings, limits = PolicySettings(samples=4, max_new_tokens=6), replace(LIMITS, max_length=32, max_tokens_per_step=32)
    found = []
    for replicas in (1, 2):
        policy = Policy(
            tiny.model(),
            optax.sgd(0.1),
            settings,
            tokenizer=tiny.tokenizer(),
            limits=replace(limits, replicas=replicas),
            rows=4,
        )
        with closing(policy):
            for step in range(2):
                groups = sorted(policy.sample(prompts, step=step, seed=0), key=lambda group: group.key)
                found.append([(each.seed, each.tokens.tolist()) for group in groups for each in group.samples])
                rewards = [[[np.mean(each.tokens < 128)] for each in group.samples] for group in groups]
                policy.update([replace(group, rewards=np.array(own)) for group, own in zip(groups, rewards, strict=True)])
            assert all(stats.num_tokens for stats in policy.engine.stats_of_devices().values())
    assert found[:2] == found[2:]
