"""routing.plan against NumPy, and its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.kernels.experts import routing
from moe_jax.kernels.experts.routing import int32_ids
from tests.helpers.compiled_steps import plan, plan_of_few

SIZES = st.sampled_from([(1, 1, 1), (7, 9, 5), (40, 3, 2)])
"""Tokens, experts, k: few, since each is compiled."""


@pytest.fixture(params=["pairs compared", "pairs counted", "pairs sorted"], scope="module")
def all_ways(request):
    """Few pairs are compared with each other, more are counted in blocks, many are sorted; here few take each way."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "pairs compared":
            patch.setattr(routing, "PAIRS_TO_COMPARE", -1)
            patch.setattr(routing, "PAIRS_TO_COUNT", -1 if request.param == "pairs sorted" else 2**16)
            patch.setattr(routing, "PAIRS_OF_A_BLOCK", 4)
        for each in (plan, plan_of_few):
            each.clear_cache()
        yield
    for each in (plan, plan_of_few):
        each.clear_cache()


@pytest.mark.usefixtures("all_ways")
@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 2**32 - 1))
def test_plan_is_the_stable_sort_and_aligned_rows_keep_its_order(sizes, seed):
    """Ids range from -1 to E. Both ends are out of range, and their pairs come last."""
    tokens, num_experts, k = sizes
    experts = np.random.default_rng(seed).integers(-1, num_experts + 1, (tokens, k))
    result = jax.tree.map(np.asarray, plan(jnp.asarray(experts), num_experts))
    check_aligned(experts, result, jax.tree.map(np.asarray, plan(jnp.asarray(experts), num_experts, 64)), 64)

    key = np.where((experts < 0) | (experts >= num_experts), num_experts, experts).reshape(-1)
    order = np.argsort(key, kind="stable")
    np.testing.assert_array_equal(result.pair_of_row, order)
    np.testing.assert_array_equal(result.token_of_row, order // k)
    np.testing.assert_array_equal(result.expert_of_row, key[order])
    np.testing.assert_array_equal(result.pair_of_row[result.row_of_pair.reshape(-1)], np.arange(tokens * k))
    assert result.row_of_pair.shape == (tokens, k)
    counts = np.bincount(key, minlength=num_experts + 1)[:num_experts]
    np.testing.assert_array_equal(result.offsets, np.concatenate([[0], np.cumsum(counts)]))
    assert (result.num_rows, result.num_experts) == (tokens * k, num_experts)


def test_plan_of_no_tokens():
    experts = np.zeros((0, 2), np.int32)
    dense, aligned = (jax.tree.map(np.asarray, plan(jnp.asarray(experts), 4, alignment)) for alignment in (1, 64))
    assert dense.num_rows == 0 and not dense.offsets.any()
    check_aligned(experts, dense, aligned, 64)


def check_aligned(experts, dense, result, alignment):
    """Every pair has one row, in the order of the dense plan."""
    (tokens, k), num_experts = experts.shape, dense.num_experts
    has_pair = result.pair_of_row < tokens * k
    np.testing.assert_array_equal(result.pair_of_row[has_pair], dense.pair_of_row)
    np.testing.assert_array_equal(result.expert_of_row[has_pair], dense.expert_of_row)
    np.testing.assert_array_equal(result.pair_of_row[result.row_of_pair.reshape(-1)], np.arange(tokens * k))
    np.testing.assert_array_equal(result.token_of_row, np.where(has_pair, result.pair_of_row // k, tokens))
    assert (result.expert_of_row[~has_pair] == num_experts).all()
    counts = np.diff(dense.offsets)
    np.testing.assert_array_equal(np.diff(result.offsets), -(-counts // alignment) * alignment)
    np.testing.assert_array_equal(result.ends, result.offsets[:-1] + counts)
    for expert in range(num_experts):
        own = result.row_of_pair[experts == expert]
        assert ((result.offsets[expert] <= own) & (own < result.offsets[expert + 1])).all()
    assert result.num_rows % alignment == 0
    assert result.num_rows >= result.offsets[-1] + (alignment if alignment > 1 and tokens else 0)


@settings(max_examples=20, deadline=None)
@given(max_pairs=st.sampled_from([1, 40, 200]), seed=st.integers(0, 2**32 - 1))
def test_pairs_beyond_max_pairs_count_as_out_of_range(max_pairs, seed):
    """The plan equals a plan of the first max_pairs pairs in expert order, with rows for no other pairs."""
    tokens, k, num_experts, alignment = 30, 3, 5, 64
    experts = np.random.default_rng(seed).integers(-1, num_experts + 1, (tokens, k))
    whole = jax.tree.map(np.asarray, plan(jnp.asarray(experts), num_experts))
    kept = experts.copy().reshape(-1)
    kept[whole.pair_of_row[max_pairs:]] = num_experts
    wanted = jax.tree.map(np.asarray, plan(jnp.asarray(kept.reshape(tokens, k)), num_experts, alignment))
    result = jax.tree.map(np.asarray, plan(jnp.asarray(experts), num_experts, alignment, max_pairs))

    np.testing.assert_array_equal(result.offsets, wanted.offsets)
    np.testing.assert_array_equal(result.ends, wanted.ends)
    computed = result.offsets[-1]
    for name in ("pair_of_row", "token_of_row", "expert_of_row"):
        np.testing.assert_array_equal(getattr(result, name)[:computed], getattr(wanted, name)[:computed])
    is_nobody = wanted.row_of_pair >= computed
    np.testing.assert_array_equal(np.where(is_nobody, -1, result.row_of_pair), np.where(is_nobody, -1, wanted.row_of_pair))
    assert (result.row_of_pair[is_nobody] >= computed).all() and (result.row_of_pair < result.num_rows).all()
    most = min(max_pairs, tokens * k)
    assert most <= result.num_rows <= most + 1 + (min(num_experts, most) + 2) * (alignment - 1)


@pytest.mark.usefixtures("all_ways")
@settings(max_examples=15, deadline=None)
@given(sizes=st.sampled_from([(1, 6, 3), (64, 3, 2)]), seed=st.integers(0, 2**32 - 1))
def test_plan_of_few_gives_each_token_a_row_in_every_block(sizes, seed):
    """A block has 64 rows and belongs to one chosen expert."""
    (tokens, num_experts, k), alignment = sizes, 64
    experts = np.random.default_rng(seed).integers(-1, num_experts + 1, (tokens, k))
    result = jax.tree.map(np.asarray, plan_of_few(jnp.asarray(experts), num_experts, alignment))

    is_chosen = np.isin(np.arange(num_experts), experts)
    np.testing.assert_array_equal(result.offsets, np.cumsum([0, *(alignment * is_chosen)]))
    np.testing.assert_array_equal(result.ends, result.offsets[:-1] + tokens * is_chosen)
    owner = np.where((experts < 0) | (experts >= num_experts), num_experts, experts)
    token = np.arange(tokens)[:, None]
    np.testing.assert_array_equal(result.row_of_pair, result.offsets[owner] + token)
    rows = result.row_of_pair
    np.testing.assert_array_equal(result.expert_of_row[rows], owner)
    np.testing.assert_array_equal(result.token_of_row[rows], np.broadcast_to(token, rows.shape))
    np.testing.assert_array_equal(result.row_of_pair.reshape(-1)[result.pair_of_row[rows]], rows)
    others = np.setdiff1d(np.arange(result.num_rows), rows)
    for name, nobody in (("expert_of_row", num_experts), ("token_of_row", tokens), ("pair_of_row", tokens * k)):
        assert (getattr(result, name)[others] == nobody).all()
    assert result.num_rows % alignment == 0 and result.num_rows >= result.offsets[-1] + alignment


def test_plan_under_jit_and_vmap(rng):
    experts = rng.integers(0, 6, (3, 11, 2)).astype(np.int32)
    batched = jax.vmap(lambda e: plan(e, 6))(experts)
    for i in range(3):
        alone = jax.jit(plan, static_argnums=1)(experts[i], 6)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b), batched, alone)


def test_plan_refuses():
    with pytest.raises(ValueError, match=r"integer array.*float32\[3, 2\]"):
        plan(jnp.zeros((3, 2)), 4)
    with pytest.raises(ValueError, match=r"\[tokens, k\]; got int32\[3\]"):
        plan(jnp.zeros(3, jnp.int32), 4)
    with pytest.raises(ValueError, match="num_experts must be at least 1; got 0"):
        plan(jnp.zeros((3, 2), jnp.int32), 0)
    with pytest.raises(ValueError, match="row_alignment must be at least 1; got 0"):
        plan(jnp.zeros((3, 2), jnp.int32), 4, 0)
    with pytest.raises(ValueError, match="max_pairs must be at least 1; got 0"):
        plan(jnp.zeros((3, 2), jnp.int32), 4, max_pairs=0)


def test_plan_of_few_refuses():
    for tokens, k in ((0, 2), (65, 2), (5, 0)):
        with pytest.raises(ValueError, match=f"1 to row_alignment = 64 tokens with choices; got {tokens} tokens with {k}"):
            plan_of_few(jnp.zeros((tokens, k), jnp.int32), 4, 64)
    with pytest.raises(ValueError, match="num_experts must be at least 1; got 0"):
        plan_of_few(jnp.zeros((3, 2), jnp.int32), 0, 64)


@pytest.mark.parametrize("make", [plan, plan_of_few])
@pytest.mark.parametrize(
    "dtype, num_experts",
    [
        ("uint8", 256),
        ("int8", 128),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in (("int16", 300), ("uint32", 300))),
    ],
)
def test_narrow_ids_are_those_of_32_bits(rng, make, dtype, num_experts):
    """Also where the dtype holds all ids, and not their number."""
    experts = rng.integers(0, min(num_experts, jnp.iinfo(dtype).max + 1), (9, 3))
    narrow, wide = (make(jnp.asarray(experts, ids), num_experts, 64) for ids in (dtype, "int32"))
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)


def test_ids_in_32_bits_name_the_same_experts_and_nobody_else():
    """Also where the lower half of 64 bits would be an expert's."""
    with jax.enable_x64(True):
        ids = jnp.asarray([[2**32 + 3, 3, -1, 8]])
        assert ids.dtype == jnp.int64
        np.testing.assert_array_equal(int32_ids(ids, 8), [[-1, 3, -1, -1]])
    for dtype in ("int8", "uint8", "int32", "uint32"):
        found = int32_ids(jnp.asarray([[3, 127]], dtype), 8)
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, [[3, 127]])
