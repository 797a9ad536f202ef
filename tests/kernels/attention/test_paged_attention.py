"""Paged attention equals attention to contiguous keys, in any order of pages."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries, paged_attention
from tests.helpers.lowered import lowered_for_h200, num_kernels

SCALE = 0.2


def test_lowers_under_a_mesh_with_explicit_axes():
    """Latents without a window, on the mesh that `jax.make_mesh` makes."""
    q, latents = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 16, 192), (9, 1, PAGE_SIZE, 192)))
    queries = PagedQueries(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((5,), (4,), (4, 2))))
    f = partial(paged_attention, scale=SCALE, value_dim=128, single_query_rows=4)
    assert num_kernels(lowered_for_h200(lambda q, latents, queries: f(q, latents, None, queries), q, latents, queries)) == 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"values": None, "value_dim": 64}, "128, 256 or 512 columns of values and 64 behind them; got 64 and 0"),
        ({"values": None, "value_dim": 128, "width": 160}, "got 128 and 32"),
        ({"values": None, "value_dim": 128, "width": 192, "heads": 67}, "equal tiles of at most 64; got 67"),
        ({"values": None, "value_dim": 128, "width": 192, "kv_heads": 2}, "one key head; got 2"),
        ({"dtype": jnp.float32}, "must all be bfloat16 or all float16; got float32"),
        ({"heads": 65}, "at most 64 query heads; got 65"),
        ({"width": 96}, "key_dim must be 64 or 128; got 96"),
    ],
)
def test_the_kernel_refuses(change, message):
    given = {"width": 64, "heads": 4, "kv_heads": 1, "dtype": jnp.bfloat16, **change}
    pages = jnp.zeros((3, given["kv_heads"], PAGE_SIZE, given["width"]), given["dtype"])
    q = jnp.zeros((2, given["heads"], given["width"]), given["dtype"])
    queries = PagedQueries(jnp.array([0, 1, 2]), jnp.array([1, 1]), jnp.zeros((2, 1), jnp.int32))
    options = {name: change[name] for name in ("value_dim",) if name in change}
    values = None if "values" in change else pages
    with pytest.raises(ValueError, match=message):
        paged_attention(q, pages, values, queries, scale=SCALE, backend="mosaic", **options)
    by_default = jax.eval_shape(partial(paged_attention, scale=SCALE, **options), q, pages, values, queries)
    assert by_default.shape[:2] == q.shape[:2]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"keys": (3, 3, 64, 8)}, "heads a multiple of kv_heads"),
        ({"keys": (3, 2, 32, 8)}, "a page must hold 64 tokens"),
        ({"values": (2, 2, 64, 8)}, "values must have the pages, heads and tokens of keys"),
        ({"values": None}, "either values or value_dim must be given"),
        ({"values": None, "value_dim": 9}, "value_dim must be from 1 to the width of the keys, 8; got 9"),
        ({"first": 3}, r"first_query must be \[rows \+ 1\]"),
        ({"table": (1, 4)}, "page_table must have 3 rows"),
        ({"single_query_rows": 3}, "single_query_rows must be from 0 to 2 with 3 rows and 5 tokens; got 3"),
        ({"window": 0}, "window must be at least 1 or None; got 0"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
    ],
)
def test_refusals(change, message):
    given = {"keys": (3, 2, 64, 8), "values": (3, 2, 64, 8), "first": 4, "table": (3, 4), **change}
    values = None if given["values"] is None else jnp.zeros(given["values"])
    first, num_keys, table = (jnp.zeros(shape, jnp.int32) for shape in (given["first"], 3, given["table"]))
    options = {name: change[name] for name in ("value_dim", "single_query_rows", "window", "backend") if name in change}
    with pytest.raises(ValueError, match=message):
        paged_attention(
            jnp.zeros((5, 4, 8)), jnp.zeros(given["keys"]), values, PagedQueries(first, num_keys, table), scale=1.0, **options
        )
