"""`dispatch` brings the right tokens, and `combine` is its transpose."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.parallel.expert import TRANSPORTS, combine
from tests.helpers.exchange_cases import DEVICES, FEATURES, TOKENS, assert_exchanges, assert_gpu_collective, route_of
from tests.helpers.meshes import make_mesh


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tokens_arrive_and_return(transport):
    assert_exchanges(transport)


def test_bf16_rows_are_summed_in_f32():
    """1 and three times 2^-8: in bf16 each addition would be lost."""

    def local(rows):
        nobody = jnp.zeros((TOKENS, 1), jnp.int32)
        return combine(rows, route_of(nobody), "expert", "gather")

    rows = jnp.full((DEVICES, DEVICES * TOKENS, FEATURES), 2.0**-8, jnp.bfloat16).at[0].set(1)
    f = jax.shard_map(local, mesh=make_mesh(expert=DEVICES), in_specs=P("expert"), out_specs=P("expert"))
    summed = jax.jit(f)(rows.reshape(-1, FEATURES))
    assert summed.dtype == jnp.float32 and (summed == 1 + 3 * 2.0**-8).all()


def test_pairwise_collective_on_gpu():
    assert_gpu_collective("pairwise", "collective_permute")
