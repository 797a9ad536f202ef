"""A model of recurrent and attention layers, defined outside the package: one stage whose body is a pattern of kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.checkpoint.hf_names import export
from moe_jax.cost.flops import forward_flops_per_token
from moe_jax.cost.planned_step import PlannedStep
from moe_jax.generation.speculative import DraftSource, check_drafts
from moe_jax.layers.cache import cache_rows, init_cache
from moe_jax.models.layers_in_pipe import layers_of_stacks
from moe_jax.parallel.choices import MeshShape
from moe_jax.parallel.sequence.attention import ContextParallel
from moe_jax.serving import Engine
from moe_jax.serving.fused import check_strict
from moe_jax.train.rebalance import move_experts
from tests.helpers.toy_hybrid import hybrid, parameters_of_layer, plain_logits


@pytest.fixture(scope="module")
def model():
    return hybrid()


def test_two_periods_are_one_stage_stacked_by_place(model):
    (stage,) = model.config.stages
    assert (stage.repeats, len(stage.body), stage.num_layers) == (2, 3, 6)
    (kinds,) = [[type(layer.self_attn).__name__ for layer in body.places] for body in model.stages]
    assert kinds == ["Recurrence", "Recurrence", "Attention"]
    assert {leaf.shape[0] for leaf in jax.tree.leaves(nnx.state(model.stages))} == {2}


def test_logits_routing_and_gradients_are_those_of_plain_loops(model, rng):
    """The routing is in the order of the layers: replayed, under remat, it changes no logits."""
    tokens, segments = rng.integers(0, 264, (1, 7)), np.array([[0, 1, 1, 2, 2, 2, 2]])
    direction = jnp.asarray((segments != 0)[..., None] * rng.normal(size=(1, 7, 264)), jnp.float32)
    graph, params = nnx.split(model)
    routed = jax.jit(lambda params: nnx.merge(graph, params)(tokens, segment_ids=segments))(params)
    assert routed.expert_ids.shape == (6, 1, 7, 2)

    def ours(params):
        model = nnx.merge(graph, params)
        logits = model(tokens, segment_ids=segments, expert_ids=routed.expert_ids, remat=True).logits
        return jnp.sum(logits * direction), logits

    def plain(params):
        logits = plain_logits(nnx.to_pure_dict(params), model.config, tokens[0], segments[0])[None]
        return jnp.sum(logits * direction), logits

    (found, logits), (expected, wanted) = (jax.jit(jax.grad(f, has_aux=True))(params) for f in (ours, plain))
    np.testing.assert_allclose(logits, routed.logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits[0, 1:], wanted[0, 1:], rtol=2e-4, atol=2e-4)
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        # In f32 a router's gradient is a difference of large numbers: one draw of thousands lost 1.5e-3.
        assert np.abs(a - b).max() < 5e-3 * np.abs(b).max(), jax.tree_util.keystr(path)


def test_a_cache_holds_each_kind_of_layer_as_it_is(model):
    cache = init_cache(model.config, 3, 10, jnp.bfloat16)
    assert [(a.shape, a.dtype) for a in cache.kept] == [((2, 3, 10, 1, 8), jnp.bfloat16)] * 2
    assert [(a.shape, a.dtype) for a in cache.states] == [((4, 3, 2, 8, 8), jnp.float32)]
    assert cache_rows(model.config) == [0, 1, 0, 2, 3, 1]


def test_a_segment_ends_between_two_calls_too(model, rng):
    """A state does not pass into the next document, whether this begins in the same call or in the next."""
    tokens, positions = rng.integers(0, 264, (1, 6)), np.array([[0, 1, 0, 1, 2, 3]])
    segments = np.array([[1, 1, 2, 2, 2, 2]])
    call = jax.jit(lambda *arrays, cache=None: model(*arrays, cache=cache))
    whole, cache = call(tokens, positions, segments).logits, init_cache(model.config, 1, 6, jnp.float32)
    for part in (slice(2), slice(2, 4), slice(4, 6)):
        output = call(tokens[:, part], positions[:, part], segments[:, part], cache=cache)
        np.testing.assert_allclose(output.logits, whole[:, part], rtol=1e-4, atol=1e-4)
        cache = output.cache


def test_exported_tensors_are_named_by_layer(model):
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    tensors, params = dict(export(model.config, flat)), nnx.to_pure_dict(nnx.state(model))
    for layer in range(6):
        attention = parameters_of_layer(params, model.config, layer)["self_attn"]
        prefix = f"model.layers.{layer}.self_attn."
        assert {name for name in tensors if name.startswith(prefix)} == {f"{prefix}{name}.weight" for name in attention}
        for name, arrays in attention.items():
            np.testing.assert_array_equal(tensors[f"{prefix}{name}.weight"], arrays["weight"])


def test_flops_are_the_sum_over_the_layers_mixers(model):
    """Twice as many tokens attend to twice as many keys in two of six layers; a state costs the same at any length."""
    attention, recurrence = model.config.mixer, model.config.layer_mixers[0]
    short, long = (forward_flops_per_token(model.config, length) for length in (8, 16))
    assert long - short == 2 * attention.flops(4) and recurrence.flops(4) == recurrence.flops(8) > 0


def test_the_layers_of_a_bodys_places_take_turns():
    lengths = {("stages", 0): 2, ("stages", 1, "places", 0): 2, ("stages", 1, "places", 1): 2, ("stages", 2): 1}
    places = layers_of_stacks(lengths)
    found = {stack: list(range(7))[place] for stack, place in places.items()}
    assert list(found.values()) == [[0, 1], [2, 4], [3, 5], [6]] and list(found) == list(lengths)


@pytest.mark.thorough
def test_experts_that_change_places_change_no_logits(rng):
    model, tokens = hybrid(), rng.integers(0, 264, (2, 5))
    graph, params = nnx.split(model)
    call = jax.jit(lambda params: nnx.merge(graph, params)(tokens))
    before, orders = call(params), rng.permuted(np.tile(np.arange(4), (6, 1)), axis=1)
    after = call(move_experts(params, model.config, orders))
    np.testing.assert_allclose(after.logits, before.logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(after.expert_load, np.take_along_axis(np.asarray(before.expert_load), orders, axis=1))


def test_lora_reaches_the_matrices_of_every_kind(rng):
    model = hybrid()
    add_lora(model, LoraSettings(targets=("attention",)), rngs=nnx.Rngs(0))
    adapted = {path[3:-1] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert adapted == {
        (place, "self_attn", name, "lora")
        for place in range(3)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", *(() if place == 2 else ("decay_proj",)))
    }


@pytest.mark.parametrize(
    "work, call",
    [
        ("an engine", lambda model: Engine(model)),
        ("strict computation", lambda model: check_strict(model)),
        ("taking back a draft", lambda model: check_drafts(model.config, DraftSource("lookup", 3))),
        ("attention over devices", lambda model: model.enter([[1]], context=ContextParallel())),
        ("the cost model", lambda model: PlannedStep(model.config, MeshShape(), 1, 8)),
    ],
)
def test_work_that_needs_keys_of_all_layers_is_refused(model, work, call):
    message = rf"{work} needs the keys .* 4 of 6 layers \(first: layer 0, gated linear recurrence\)"
    with pytest.raises(ValueError, match=message):
        call(model)
