"""The life of an engine: its weights are updated, donated or asleep, a device fails, and it leaves no memory at its end."""

import gc
import threading
import time
import weakref
from contextlib import closing
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.serving import device
from moe_jax.serving.engine import Engine
from moe_jax.serving.loop import QueueFull
from moe_jax.serving.request import EngineLimits, SamplingOptions
from tests.helpers import compilations, served, tiny

LIMITS = EngineLimits(
    max_sequences=2, max_tokens_per_step=64, max_chunks_per_step=2, max_length=256, num_pages=8, max_waiting=7
)
FREE = SamplingOptions(ignore_eos=True)
PROMPT = [1, 2, 3] * 30


@pytest.fixture(scope="module")
def model():
    sizes = dict(num_hidden_layers=1, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    return moe_jax.from_config(moe_jax.Qwen3MoeConfig(**tiny.QWEN3 | sizes), dtype=jnp.float32, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def shared(model):
    with closing(Engine(model, limits=LIMITS, keep_experts=True, lazy=True)) as engine:
        yield engine


@pytest.fixture
def own(model):
    """A model with arrays of its own, which a test may delete; `nnx.clone` would share them."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(jnp.copy, state))


@pytest.fixture
def engine(shared, own):
    """An engine with the weights of `own`."""
    shared.update(own)
    yield shared
    stats = shared.stats()
    assert stats.owned_pages == stats.running == stats.waiting == 0 and not shared.failed


def donated(model):
    """Returns a model of the same numbers, in other arrays; the model's own are deleted, as by a step of training."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.jit(partial(jax.tree.map, jnp.copy), donate_argnums=0)(state))


def tokens_of(engine, new=5):
    return engine.generate([PROMPT], replace(FREE, max_new_tokens=new))[0][0].tokens


def refuses(engine, message, calls=("submit", "generate")):
    """Checks that calls of an engine raise this error."""
    arguments = {"submit": [PROMPT], "generate": [[PROMPT]]}
    for name in calls:
        with pytest.raises(RuntimeError, match=message):
            getattr(engine, name)(*arguments.get(name, []))


def test_new_weights_take_over(engine, own):
    """Nothing of the old weights' cache is found again."""
    options = replace(FREE, max_new_tokens=4)
    ((before,),) = engine.generate([PROMPT], options)
    other = nnx.clone(own)
    other.lm_head.weight[...] = other.lm_head.weight[...][::-1]
    engine.update(other)
    ((found,),) = engine.generate([PROMPT], options)
    with pytest.raises(ValueError, match="the new weights must be .*: num_hidden_layers is 2; the engine has 1"):
        engine.update(tiny.model())
    assert (found.weights_version, found.cached_tokens) == (before.weights_version + 1, 0)
    assert found.tokens == moe_jax.generate(other, PROMPT, max_new_tokens=4) != before.tokens


def test_gaps_are_left_when_ready_and_after_an_update(engine, own, monkeypatch):
    of_engine = engine._loop.device
    monkeypatch.setattr(device, "leave_gaps", lambda of_device: [of_device])
    for renew in (lambda: engine._loop.call(of_engine.warm_up), lambda: engine.update(own)):
        of_engine._gaps = []
        renew()
        assert of_engine._gaps == list(of_engine.placement.devices)
    # They have no memory to free.
    of_engine._gaps = []


def test_a_full_queue_refuses_and_a_pause_holds(engine):
    engine.pause()
    handles = [engine.submit(PROMPT, SamplingOptions(max_new_tokens=2)) for _ in range(9)]
    with pytest.raises(QueueFull, match="9 sequences run or wait"):
        engine.submit(PROMPT)
    assert all(completion is None for handle in handles for completion in handle.completions)
    engine.resume()
    assert all(len(handle.result()[0].tokens) <= 2 for handle in handles)


def test_an_interrupted_call_aborts_its_requests(engine, monkeypatch):
    def interrupt(handles):
        assert len(handles) == len(engine._loop._open) == 6
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_jax.serving.engine.as_completed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT] * 6, replace(FREE, max_new_tokens=100))
    assert served.comes_true(lambda: not engine._loop._open)


def test_an_engine_sleeps_while_its_model_is_trained(engine, own):
    """Memory is freed, requests are refused, and the update starts with empty pages and compiles nothing."""
    options = replace(FREE, max_new_tokens=5, return_experts=True, presence_penalty=1.0)
    (expected,) = engine.generate([PROMPT], options)[0]
    engine.pause()
    handle = engine.submit(PROMPT, options)
    with pytest.raises(RuntimeError, match="sleeps only without requests; 1 sequences run or wait"):
        engine.sleep()
    engine.resume()
    assert handle.result()[0].cached_tokens == 64
    pages = sum(array.nbytes for array in jax.tree.leaves(engine._loop.device.state))
    before = live_bytes()
    for _ in range(2):
        for _ in range(2):
            engine.sleep()
        # The engine had weights of layers of its own too.
        assert live_bytes() < before - 0.9 * pages
        engine.drop_prefixes()
        refuses(engine, "the engine sleeps: call engine.update")
        own, version = donated(own), engine.stats().weights_version
        with compilations.counted() as compiled:
            engine.update(own)
            (found,) = engine.generate([PROMPT], options)[0]
        assert not compiled and found.tokens == expected.tokens
        np.testing.assert_array_equal(found.experts, expected.experts)
        assert (found.weights_version, found.cached_tokens) == (version + 1, 0)
    engine.sleep()
    with pytest.raises(ValueError, match="the new weights must be .*: num_hidden_layers is 2; the engine has 1"):
        engine.update(tiny.model())
    refuses(engine, "the engine sleeps")
    engine.update(own)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_training_step_that_donates_the_model(engine, own, monkeypatch, meanwhile):
    """Requests that run are told, later ones too, and an update revives the engine; also if a step was just being started."""
    before, trained, launch = tokens_of(engine), [], engine._loop.device.launch

    def launch_after_donation(plans):
        if not trained:
            trained.append(donated(own))
        return launch(plans)

    engine.pause()
    running = [engine.submit(PROMPT, SamplingOptions(max_new_tokens=100)) for _ in range(3)]
    if meanwhile:
        monkeypatch.setattr(engine._loop.device, "launch", launch_after_donation)
    else:
        trained.append(donated(own))
    engine.resume()
    for handle in running:
        with pytest.raises(RuntimeError, match="most likely because a training step donated them: call engine.update"):
            handle.result()
    refuses(engine, "call engine.update")
    with pytest.raises(ValueError, match="model has arrays that were deleted"):
        engine.update(own)
    assert not engine.failed and engine.stats().owned_pages == 0
    engine.update(trained[0])
    assert tokens_of(engine) == before


def test_a_training_step_in_a_pause(engine, own):
    """Requests that run continue after the update."""
    expected = tokens_of(engine, new=60)
    handle = engine.submit(PROMPT, replace(FREE, max_new_tokens=60))
    next(handle.events())
    engine.pause()
    engine.update(donated(own))
    engine.resume()
    assert handle.result()[0].tokens == expected


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_engines_in_a_row_free_their_memory(model):
    """An old engine has its variable until the new one is made; objects of the user's that nobody holds are freed too."""

    class Cycle:
        def __init__(self):
            self.itself = self

    before, engine = live_bytes(), None
    for _ in range(2):
        cycle, old = weakref.ref(Cycle()), engine and weakref.ref(engine)
        engine = Engine(model, limits=LIMITS, keep_experts=True, lazy=True)
        handle = engine.submit(PROMPT, SamplingOptions(max_new_tokens=2))
        assert live_bytes() > before
        handle.result()
        engine.close()
        # The engine and its handle are still there.
        assert live_bytes() == before and cycle() is None and (old is None or old() is None)


def test_an_engine_that_nobody_holds_ends(model):
    """Once its requests have ended: their handles hold it."""
    before, engine = live_bytes(), Engine(model, limits=LIMITS, keep_experts=True, lazy=True)
    handle = engine.submit(PROMPT, replace(FREE, max_new_tokens=5))
    thread = engine._loop._thread
    del engine
    gc.collect()
    assert len(handle.result()[0].tokens) == 5
    del handle
    assert served.comes_true(lambda: live_bytes() == before and not thread.is_alive())


def test_an_engine_is_closed_while_it_sleeps(model):
    before, engine = live_bytes(), Engine(model, limits=LIMITS, lazy=True)
    engine.sleep()
    engine.close()
    assert live_bytes() == before


def test_a_lazy_engine_compiles_what_requests_need(model, caplog):
    caplog.set_level("INFO", "moe_jax")
    engine = Engine(model, limits=LIMITS, keep_experts=True, lazy=True)
    assert "each of 4 programs is compiled when a request first needs it" in caplog.text
    assert "compiled program" not in caplog.text
    assert len(tokens_of(engine, new=3)) == 3
    told = [line for line in caplog.messages if line.startswith("compiled program")]
    assert len(told) == len(engine._loop.device._programs) == 2
    for _ in range(2):
        engine.close()
    refuses(engine, "the engine is closed", ("submit", "generate", "pause"))
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.update(model)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.owned_pages, stats.num_tokens) == (0, 0, 0, 3)
    assert engine.capacity == 9 and not engine.failed


def test_a_failed_device_ends_everything(model, monkeypatch):
    """Requests that run and that wait, an abort and a call that come meanwhile, later requests, and `close`."""
    engine = Engine(model, limits=LIMITS, lazy=True)
    failing, may_fail = threading.Event(), threading.Event()

    def fail(plans):
        failing.set()
        may_fail.wait(30)
        raise ValueError("a defect")

    monkeypatch.setattr(engine._loop.device, "launch", fail)
    engine.pause()
    handles = [engine.submit(PROMPT) for _ in range(5)]
    assert not engine.failed
    engine.resume()
    assert failing.wait(30)
    handles[1].abort()
    handles[4].abort()
    caller = threading.Thread(target=engine.pause, daemon=True)
    caller.start()
    time.sleep(0.1)
    may_fail.set()
    message = "the engine failed: ValueError: a defect"
    for handle in handles:
        with pytest.raises(RuntimeError, match=message):
            handle.result()
    caller.join(30)
    assert engine.failed and not caller.is_alive()
    refuses(engine, message, ("submit", "generate", "resume"))
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
