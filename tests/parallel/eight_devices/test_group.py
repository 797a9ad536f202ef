"""The experts of a fused layer, split over some of eight devices: each token has the rows, and the sum, of one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.config import RouterRule
from moe_jax.kernels.decode import experts
from moe_jax.kernels.decode.add_norm import ExpertRows, add_experts
from moe_jax.kernels.decode.experts import expert_rows
from moe_jax.kernels.decode.route import TokenChoices, route_rows
from moe_jax.serving import group
from tests.helpers.meshes import make_mesh

EXPERTS, K, HIDDEN, INTER, LAYERS = 128, 2, 128, 64, 2


def choices(rng, tokens):
    """Returns random choices. The third token is padding, so it has none."""
    chosen = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(tokens)])
    chosen[2] = EXPERTS
    ids = np.zeros((tokens, EXPERTS), np.int32)
    ids[:, :K] = chosen
    is_chosen = np.any(chosen[:, :, None] == np.arange(EXPERTS), axis=1).astype(np.int32)
    return TokenChoices(jnp.asarray(rng.random((tokens, EXPERTS)), jnp.float32), jnp.asarray(ids), jnp.asarray(is_chosen))


@pytest.mark.parametrize("form", ["pairs", "blocks", "places", "rows"])
def test_each_token_gets_its_rows(rng, form):
    """In each form of a device's results, whose rows are the numbers of their expert and token here."""
    devices, tokens = 4, 12
    held, choice = EXPERTS // devices, choices(rng, tokens)

    def computed(choice):
        ids, first = choice.experts[:, :K], held * jax.lax.axis_index("expert")
        expert, token = jnp.meshgrid(jnp.arange(held + 1), jnp.arange(tokens), indexing="ij")
        rows = jnp.where(expert < held, jnp.stack([first + expert, token]), -1).reshape(2, -1).T.astype(jnp.float32)
        place = jnp.minimum(ids, held) * tokens + jnp.arange(tokens)[:, None]
        if form == "pairs":
            return ExpertRows(rows[place.ravel()], choice.weights, choice.experts, None, None)
        if form == "rows":
            return ExpertRows(rows, choice.weights, choice.experts, None, None, place)
        of_token = jnp.broadcast_to(jnp.arange(tokens)[:, None], (tokens, EXPERTS)) if form == "places" else None
        return ExpertRows(rows, choice.weights, choice.experts, tokens * jnp.arange(held + 1), of_token)

    def on_device(choice):
        choice = TokenChoices(*map(group.gathered, choice))
        own, found = group.returned(computed(group.held_first(choice, held)), choice, held, K)
        return own, found.rows[found.row_of_pair]

    run = jax.shard_map(on_device, mesh=make_mesh(expert=devices), in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    own, found = jax.jit(run)(choice)
    jax.tree.map(np.testing.assert_array_equal, own, choice)
    valid = np.arange(tokens) != 2
    assert np.array_equal(found[valid, :, 0], choice.experts[valid, :K])
    assert np.array_equal(found[valid, :, 1], np.repeat(np.arange(tokens), K).reshape(tokens, K)[valid])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("devices", "tokens", "most_planned"),
    [(2, 2, 256), (4, 24, 256), (2, 72, 256), (4, 72, 64)],
    ids=["pairs", "one block for all tokens", "places by a kernel", "places by XLA"],
)
def test_bits_of_one_device(rng, monkeypatch, interpreted_on_several, devices, tokens, most_planned):
    monkeypatch.setattr(experts, "MOST_PLANNED_TOKENS", most_planned)
    x, gate_up, down, norm = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
        for shape in ((tokens, HIDDEN), (LAYERS, EXPERTS, 2 * INTER, HIDDEN), (LAYERS, EXPERTS, HIDDEN, INTER), (HIDDEN,))
    )
    logits, valid = jnp.asarray(rng.normal(size=(1, tokens, EXPERTS)), jnp.float32), jnp.arange(tokens) != 1
    choose = partial(route_rows, k=K, rule=RouterRule(norm_topk_prob=True))
    layer = jnp.int32(1)

    @jax.jit
    def alone(x, gate_up, down):
        outputs = expert_rows(x, gate_up, down, choose(logits, valid), layer, k=K)
        return add_experts(x, outputs, norm, eps=1e-6, k=K)

    def on_device(x, gate_up, down):
        choice, held = choose(logits, valid), down.shape[1]
        outputs = expert_rows(group.gathered(x), gate_up, down, group.held_first(choice, held), layer, k=K, parts=devices)
        return add_experts(x, group.returned(outputs, choice, held, K)[1], norm, eps=1e-6, k=K)

    specs = P("expert"), P(None, "expert"), P(None, "expert")
    run = jax.shard_map(on_device, mesh=make_mesh(expert=devices), in_specs=specs, out_specs=P("expert"), check_vma=False)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(run)(x, gate_up, down), alone(x, gate_up, down))
