"""The MoE block: chunks of tokens, leading axes, replayed ids, and how many experts it must be given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from moe_jax.layers import moe
from moe_jax.layers.moe import Experts, MoE
from moe_jax.parallel import ExpertParallel, Spread
from tests.helpers import seeds, shapes

SPLIT = Spread(expert=ExpertParallel())


def test_chunks_of_tokens(monkeypatch):
    """More than two chunks of tokens are computed one chunk at a time."""
    block = MoE(8, 16, 4, 2, rngs=nnx.Rngs(0))
    x = jnp.asarray(seeds.rng().normal(size=(17, 8)), jnp.float32)
    expected = jax.jit(lambda x: block(x)[0])(x)
    monkeypatch.setattr(moe, "EXPERT_CHUNK_TOKENS", 8)
    np.testing.assert_allclose(jax.jit(lambda x: block(x)[0])(x), expected, rtol=1e-5, atol=1e-6)
    assert ["scan" in str(jax.make_jaxpr(lambda x: block(x)[0])(x[:tokens])) for tokens in (16, 17)] == [False, True]


def output_over_two_devices(block, **options):
    """Returns the type of the block's result if each of two devices holds the block's experts."""
    mesh = AbstractMesh((2,), ("expert",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(lambda x: block(x, **options)[0], mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    return jax.eval_shape(f, jax.ShapeDtypeStruct((6, 8), jnp.float32))


def test_number_of_experts_is_checked():
    """Split experts need `spread.expert`; whole ones must not have it."""
    whole, half = (MoE(8, 16, 4, 2, rngs=nnx.Rngs(0)) for _ in range(2))
    half.experts = Experts(8, 16, 2, rngs=nnx.Rngs(0))
    assert output_over_two_devices(whole).shape == (6, 8)
    assert output_over_two_devices(half, spread=SPLIT).shape == (6, 8)
    with pytest.raises(ValueError, match="among 4 experts; without spread.expert, the devices hold 1 x 2: spread.expert must"):
        output_over_two_devices(half)
    with pytest.raises(
        ValueError, match="among 4 experts; with axis_name='expert', the devices hold 2 x 4: spread.expert must"
    ):
        output_over_two_devices(whole, spread=SPLIT)


def test_leading_axes_of_x_come_back():
    block = MoE(8, 16, 4, 2, shared_intermediate_size=8, rngs=nnx.Rngs(0))
    rng = seeds.rng()
    x, valid = jnp.asarray(rng.normal(size=(2, 3, 8)), jnp.float32), jnp.asarray(rng.random((2, 3)) < 0.5)
    y, routing = block(x, valid)
    of_tokens, expected = block(x.reshape(6, 8), valid.reshape(6))
    # Every number but 0 means a valid token, which counts once.
    with shapes.unchecked():
        of_integers = block(x, 2 * valid.astype(jnp.int32))[1]
    jax.tree.map(np.testing.assert_array_equal, of_integers, routing)
    np.testing.assert_array_equal(y, of_tokens.reshape(2, 3, 8))
    jax.tree.map(np.testing.assert_array_equal, routing, expected)
    # The routing's own experts replay it, with x's leading axes or with one axis of tokens.
    for replay in (routing.experts, routing.experts.reshape(2, 3, 2)):
        np.testing.assert_array_equal(block(x, valid, expert_ids=replay)[0], y)


def test_a_replayed_id_of_minus_one_goes_nowhere():
    """A token whose ids are all -1 has y = 0. One id next to -1 has the whole weight."""
    block, x = MoE(8, 16, 4, 2, rngs=nnx.Rngs(0)), jnp.asarray(seeds.rng().normal(size=(3, 8)), jnp.float32)
    y, routing = jax.jit(lambda x: block(x, expert_ids=jnp.asarray([[2, -1], [-1, -1], [-1, 2]], jnp.int8)))(x)
    alone = jax.jit(lambda x: block.experts(x, jnp.ones((3, 1)), jnp.full((3, 1), 2)))(x)
    np.testing.assert_allclose(y[::2], alone[::2], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(y[1], 0)
    np.testing.assert_array_equal(routing.sums.expert_load, [0, 0, 2, 0])


def test_arguments_that_do_not_fit_are_named():
    block = MoE(8, 16, 4, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., hidden\] with hidden=8; got \[2, 3, 4\]"):
        block(jnp.ones((2, 3, 4)))
    with pytest.raises(ValueError, match=r"valid must have shape \[2, 3\] for this x; got \[3, 2\]"):
        block(jnp.ones((2, 3, 8)), jnp.ones((3, 2), bool))
    with pytest.raises(ValueError, match=r"expert_ids must have shape \[2, 3, 2\] for this x; got \[2, 3\]"):
        block(jnp.ones((2, 3, 8)), expert_ids=jnp.ones((2, 3), int))
