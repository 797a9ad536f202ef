"""Paged attention on Hopper: a thread block reads a sequence's pages by TMA, one page a step, and multiplies with wgmma.

Kernels `paged_attention` and `paged_attention_split`:

item       (block of queries, key head[, split]): up to 64 rows, which are a block's queries times the G heads of a key head.
           Decoding has one query a block; chunks of prompts have 64/G. A split is SPLIT_PAGES pages, where few items exist
smem       q 64 d | k S x 64 d | v S x 64 e | out 64 e; S = 2 stages; d = e = 128: 16 + 32 + 32 + 16 KiB, two blocks a core
barriers   q; k[slot], v[slot]: 1 copy each. One warpgroup loads and computes: a slot is filled again once it was read
time       a block's copies run while the other block of its core computes
cost       a page of keys and values crosses memory once for each block of queries, from L2 where others read it too
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.mosaic.forward import LOWEST, rescale_o
from moe_jax.kernels.attention.mosaic.warpgroups import (
    LOG2_E,
    ROWS,
    broadcast_columns,
    multiply_registers,
    operand,
    read_accumulator,
    start_accumulator,
)
from moe_jax.kernels.attention.paged.merge import merge_splits
from moe_jax.kernels.attention.paged.page_size import PAGE_SIZE
from moe_jax.kernels.attention.paged.queries import PagedQueries
from moe_jax.kernels.hopper import target
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS, grid_size, launch, operand_transforms
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS
from moe_jax.kernels.hopper.target import compute_capability

STAGES = 2

SPLIT_PAGES = 8
"""Pages of a split: 512 keys."""


class QueryBlocks(NamedTuple):
    """The blocks of queries of a step, each of one row; the same for all layers."""

    tokens: Int[Array, "blocks block_tokens"]
    """The block's queries, as indices of tokens; the number of tokens for places that are not used."""
    row: Int[Array, "blocks"] | None
    """None: block i is of row i. XLA would make these numbers again for each layer, in a kernel of their own."""
    position: Int[Array, "blocks"]
    """The key position of the first query."""
    num_pages: Int[Array, "blocks"]
    """The number of pages that the last query sees; 0 for a block without queries."""
    place: Int[Array, "tokens"]
    """For each token its place in `tokens`, flattened; 0 for padding."""


def refusal(q: Array, keys: Array, values: Array | None, window: Array | int | None) -> str | None:
    """Returns the reason why the kernel cannot compute this attention, with what it takes; None where it can."""
    if not is_interpreted() and compute_capability() != "9.0":
        return f"it needs a Hopper GPU (compute capability 9.0); this is {compute_capability() or 'no NVIDIA GPU'}"
    if values is None:
        return "pages of latents are not read by a kernel yet"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or keys.dtype != q.dtype or values.dtype != q.dtype:
        return f"q and pages must all be bfloat16 or all float16; got {q.dtype}, {keys.dtype}, {values.dtype}"
    if q.shape[1] // keys.shape[1] > WGMMA_ROWS:
        return f"a key head must have at most {WGMMA_ROWS} query heads; got {q.shape[1] // keys.shape[1]}"
    for name, width in (("key_dim", q.shape[2]), ("value_dim", values.shape[3])):
        if width not in (64, 128):
            return f"{name} must be 64 or 128; got {width}"
    if window is not None:
        return "windows are not in the kernel yet"
    return None


def paged_attention(
    q: Float[Array, "tokens heads key_dim"],
    keys: Float[Array, "pages kv_heads 64 key_dim"],
    values: Float[Array, "pages kv_heads 64 value_dim"],
    queries: PagedQueries,
    *,
    scale: float,
    queries_per_row: int | None,
    fixed_splits: bool,
) -> Float[Array, "tokens heads value_dim"]:
    """Returns attention as `api.paged_attention` defines it; padding gives the result of some query."""
    tokens, heads, key_dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    block_tokens = 1 if queries_per_row == 1 else max(1, WGMMA_ROWS // group)
    blocks = query_blocks(queries, tokens, block_tokens)
    num_blocks = len(blocks.position)
    grouped = q.reshape(tokens, kv_heads, group, key_dim)
    # One query a block: the gather would be a kernel of its own, and read what is there.
    in_blocks = grouped[:, None] if num_blocks == tokens else grouped.at[blocks.tokens].get(mode="fill", fill_value=0)
    of_blocks = in_blocks.transpose(0, 2, 1, 3, 4)
    of_blocks = of_blocks.reshape(num_blocks, kv_heads, block_tokens * group, key_dim)
    rows = -(-block_tokens * group // 8) * 8
    of_blocks = jnp.pad(of_blocks, ((0, 0), (0, 0), (0, rows - block_tokens * group), (0, 0)))
    splits = -(-queries.page_table.shape[1] // SPLIT_PAGES)
    # Enough blocks keep the GPU busy by themselves. Partial results cost memory and time.
    if num_blocks * kv_heads >= _cores() and not fixed_splits:
        splits = 1
    out = attend_blocks(of_blocks, keys, values, blocks, queries.page_table, scale, group, splits)
    out = out[:, :, : block_tokens * group].reshape(num_blocks, kv_heads, block_tokens, group, -1)
    out = out.transpose(0, 2, 1, 3, 4).reshape(num_blocks * block_tokens, heads, -1)
    return out if queries_per_row == 1 else out[blocks.place]


@partial(jax.jit, static_argnums=(1, 2))
def query_blocks(queries: PagedQueries, num_tokens: int, block_tokens: int) -> QueryBlocks:
    """Cuts each row's queries into blocks of `block_tokens`."""
    rows = len(queries.num_keys)
    counts = queries.first_query[1:] - queries.first_query[:-1]
    if block_tokens == 1 and num_tokens == rows:
        token = jnp.arange(rows, dtype=jnp.int32)
        position = queries.num_keys - 1
        return QueryBlocks(token[:, None], None, position, jnp.maximum(position // PAGE_SIZE + 1, 0), token)
    num_blocks = rows + num_tokens // block_tokens
    ends = jnp.cumsum(-(-counts // block_tokens))
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, block, side="right", method="compare_all"), rows - 1).astype(jnp.int32)
    number = block - (ends[row] - -(-counts[row] // block_tokens))
    first = number * block_tokens
    in_row = jnp.where(block < ends[-1], jnp.clip(counts[row] - first, 0, block_tokens), 0)
    index = jnp.arange(block_tokens, dtype=jnp.int32)
    tokens = queries.first_query[row][:, None] + first[:, None] + index
    is_used = index < in_row[:, None]
    tokens = jnp.where(is_used, tokens, num_tokens)
    position = queries.num_keys[row] - counts[row] + first
    num_pages = jnp.where(in_row > 0, (position + in_row - 1) // PAGE_SIZE + 1, 0)
    places = jnp.arange(num_blocks * block_tokens, dtype=jnp.int32)
    place = jnp.zeros(num_tokens, jnp.int32).at[tokens.reshape(-1)].set(places, mode="drop")
    return QueryBlocks(tokens, row, position.astype(jnp.int32), num_pages.astype(jnp.int32), place)


@partial(jax.jit, static_argnums=(5, 6, 7))
def attend_blocks(
    q: Float[Array, "blocks kv_heads rows key_dim"],
    keys: Float[Array, "pages kv_heads 64 key_dim"],
    values: Float[Array, "pages kv_heads 64 value_dim"],
    blocks: QueryBlocks,
    page_table: Int[Array, "_ max_pages"],
    scale: float,
    group: int,
    splits: int,
) -> Float[Array, "blocks kv_heads rows value_dim"]:
    """Returns the attention of each block, whose rows are its queries times `group` heads."""
    (num_blocks, kv_heads, rows, key_dim), value_dim, dtype = q.shape, values.shape[3], q.dtype
    out_dtype = dtype if splits == 1 else jnp.float32
    inputs = _Inputs(blocks.row, blocks.position, blocks.num_pages, page_table, q, keys, values)
    outputs = [jax.ShapeDtypeStruct((num_blocks, splits, kv_heads, rows, value_dim), out_dtype)]
    if splits > 1:
        outputs.append(jax.ShapeDtypeStruct((num_blocks, splits, kv_heads, WGMMA_ROWS), jnp.float32))
    out_columns = 128 // jnp.dtype(out_dtype).itemsize
    scratch = _Scratch(
        q=operand(WGMMA_ROWS, key_dim, dtype=dtype),
        k=operand(STAGES, PAGE_SIZE, key_dim, dtype=dtype),
        v=operand(STAGES, PAGE_SIZE, value_dim, dtype=dtype),
        out=plgpu.SMEM((WGMMA_ROWS, value_dim), out_dtype, transforms=operand_transforms(out_dtype, out_columns)),
        staging=operand(1, WGMMA_ROWS, PAGE_SIZE, dtype=dtype) if is_interpreted() else None,
        q_barrier=plgpu.Barrier(),
        k_barriers=plgpu.Barrier(num_barriers=STAGES),
        v_barriers=plgpu.Barrier(num_barriers=STAGES),
    )

    def body(inputs: _Inputs, out_ref, *rest) -> None:
        lse_ref, scratch = (None, rest[0]) if splits == 1 else rest
        own, stride = lax.axis_index("block"), grid_size()
        items = num_blocks * kv_heads * splits
        count = lax.div(items - own + stride - 1, jnp.int32(stride))

        def item(number, first_step):
            index = own + number * stride
            split, index = lax.rem(index, jnp.int32(splits)), lax.div(index, jnp.int32(splits))
            head, block = lax.rem(index, jnp.int32(kv_heads)), lax.div(index, jnp.int32(kv_heads))
            return _Item(inputs, scratch, block, head, split, first_step, scale * LOG2_E, group, splits).run(out_ref, lse_ref)

        lax.fori_loop(0, count, item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    name = "paged_attention" if splits == 1 else "paged_attention_split"
    results = launch(name, body, outputs, [scratch], warpgroups=1)(inputs)
    if splits == 1:
        return results[0][:, 0]
    if value_dim == WARPGROUP_THREADS:
        return merge_splits(results[0], results[1], blocks.num_pages, split_pages=SPLIT_PAGES, dtype=dtype)
    return _merged(results[0], results[1], blocks.num_pages).astype(dtype)


class _Inputs(NamedTuple):
    row: Any
    position: Any
    num_pages: Any
    page_table: Any
    q: Any
    k: Any
    v: Any


class _Scratch(NamedTuple):
    q: Any
    k: Any
    v: Any
    out: Any
    staging: Any
    """None on a GPU."""
    q_barrier: Any
    k_barriers: Any
    v_barriers: Any


class _State(NamedTuple):
    """The sums over the pages so far."""

    o: Any
    row_max: Any
    """In base 2."""
    row_sum: Any


class _Item(NamedTuple):
    """A thread block's work on one block of queries, one key head and one split."""

    inputs: _Inputs
    scratch: _Scratch
    block: Any
    head: Any
    split: Any
    first_step: Any
    """The steps of all items before this one: the slots go on from there."""
    scale_log2: float
    group: int
    splits: int

    def run(self, out_ref, lse_ref):
        """Computes and stores the item; returns the number of steps so far."""
        inputs = self.inputs
        row = self.block if inputs.row is None else inputs.row[self.block]
        position, num_pages = inputs.position[self.block], inputs.num_pages[self.block]
        first_page = self.split * SPLIT_PAGES if self.splits > 1 else 0
        end = jnp.minimum(num_pages, first_page + SPLIT_PAGES) if self.splits > 1 else num_pages
        steps = jnp.maximum(end - first_page, 0)
        # Most splits of a short sequence have no pages, and nobody reads them.
        pl.when((steps > 0) | (self.split == 0))(lambda: self._attend(row, position, first_page, steps, out_ref, lse_ref))
        return self.first_step + steps

    def _attend(self, row, position, first_page, steps, out_ref, lse_ref) -> None:
        inputs, scratch = self.inputs, self.scratch
        rows = inputs.q.shape[2]
        plgpu.copy_gmem_to_smem(inputs.q.at[self.block, self.head], scratch.q.at[pl.ds(0, rows)], scratch.q_barrier)

        def load(step) -> None:
            page, slot = inputs.page_table[row, first_page + step], self.slot(step)
            plgpu.copy_gmem_to_smem(inputs.k.at[page, self.head], scratch.k.at[slot], scratch.k_barriers.at[slot])
            plgpu.copy_gmem_to_smem(inputs.v.at[page, self.head], scratch.v.at[slot], scratch.v_barriers.at[slot])

        for step in range(STAGES):
            pl.when(step < steps)(partial(load, jnp.int32(step)))
        plgpu.barrier_wait(scratch.q_barrier)

        def add_page(step, state: _State) -> _State:
            state = self.add_page(step, state, position - (first_page + step) * PAGE_SIZE)
            pl.when(step + STAGES < steps)(lambda: load(step + STAGES))
            return state

        value_dim = scratch.v.shape[2]
        start = _State(
            plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, value_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full(WGMMA_ROWS, LOWEST, jnp.float32), ROWS),
            plgpu.layout_cast(jnp.zeros(WGMMA_ROWS, jnp.float32), ROWS),
        )
        state = lax.fori_loop(0, steps, add_page, start)
        inverse = jnp.where(state.row_sum > 0, 1 / state.row_sum, 0.0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch.out[...] = rescale_o(state.o, inverse).astype(scratch.out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.out.at[pl.ds(0, rows)], out_ref.at[self.block, self.split, self.head])
        if lse_ref is not None:
            lse_ref[self.block, self.split, self.head] = state.row_max + jnp.log2(state.row_sum)

    def slot(self, step):
        return lax.rem(self.first_step + step, jnp.int32(STAGES))

    def add_page(self, step, state: _State, last_key) -> _State:
        """Adds a page's keys; the first query sees the keys up to `last_key` of this page, the next one a key more."""
        scratch, slot = self.scratch, self.slot(step)
        plgpu.barrier_wait(scratch.k_barriers.at[slot])

        def multiply(s_accumulator, o_accumulator) -> _State:
            plgpu.wgmma(s_accumulator, scratch.q, scratch.k.at[slot].transpose((1, 0)))
            s = s_accumulator[...]
            row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
            column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
            s = jnp.where(column <= last_key + lax.div(row, jnp.int32(self.group)), s, -jnp.inf)
            row_max = jnp.maximum(state.row_max, s.max(axis=1) * self.scale_log2)
            p = jnp.exp2(s * self.scale_log2 - broadcast_columns(row_max, (WGMMA_ROWS, PAGE_SIZE)))
            rescale = jnp.exp2(state.row_max - row_max)
            row_sum = state.row_sum * rescale + p.sum(axis=1)
            o = rescale_o(state.o, rescale)
            plgpu.barrier_wait(scratch.v_barriers.at[slot])
            start_accumulator(o_accumulator, o)
            multiply_registers(o_accumulator, p.astype(scratch.q.dtype), scratch.v.at[slot], scratch.staging, 0)
            return _State(read_accumulator(o_accumulator, o), row_max, row_sum)

        s_accumulator = plgpu.ACC((WGMMA_ROWS, PAGE_SIZE), jnp.float32)
        return pl.run_scoped(multiply, s_accumulator, plgpu.ACC(state.o.shape, jnp.float32))


def _merged(
    out: Float[Array, "blocks splits kv_heads rows value_dim"],
    lse: Float[Array, "blocks splits kv_heads _"],
    num_pages: Int[Array, "blocks"],
) -> Float[Array, "blocks kv_heads rows value_dim"]:
    """Returns the attention over all splits, of the attention over each."""
    splits = out.shape[1]
    exists = jnp.arange(splits) * SPLIT_PAGES < num_pages[:, None]
    lse = jnp.where(exists[:, :, None, None], lse[..., : out.shape[3]], -jnp.inf)
    largest = jnp.maximum(lse.max(axis=1, keepdims=True), LOWEST)
    weights = jnp.exp2(lse - largest)
    total = weights.sum(axis=1)
    # Splits without pages were not written.
    summed = (jnp.where(exists[:, :, None, None, None], out, 0) * weights[..., None]).sum(axis=1)
    return summed / jnp.where(total > 0, total, 1)[..., None]


def _cores() -> int:
    return 1 if is_interpreted() else target.num_cores()
