"""The tiles that a pass can take: allowed tiles lower for an H200, a refusal lists the supported values."""

import dataclasses
import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from moe_jax.config import EXPERT_LAYERS
from moe_jax.kernels.experts import routing
from moe_jax.kernels.experts.mosaic import tile_limits
from moe_jax.kernels.experts.mosaic.by_rows import RowsOperands, matmul_gated
from moe_jax.kernels.experts.mosaic.tile_limits import PASSES, candidates, refusal
from moe_jax.kernels.experts.mosaic.tune import operand_shapes, run_pass
from moe_jax.kernels.hopper.mainloop import TileShape
from moe_jax.kernels.hopper.pipeline import SHARED_MEMORY
from tests.helpers.lowered import num_kernels

SIZES = st.integers(1, 64).map(lambda n: 64 * n)
TILES = st.builds(
    TileShape,
    st.sampled_from([32, 64, 128, 256]),
    st.sampled_from([64, 96, 128, 192, 256, 512]),
    st.integers(0, 9),
    st.booleans(),
)


def lower(pass_name, matrix, tile, gathers=False):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    experts = 4

    def run(plan, *operands):
        if gathers:
            return matmul_gated(RowsOperands(*operands, plan.token_of_row), plan, tile, keep_h=False)
        return run_pass(pass_name, tile, plan, *operands)

    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        plan = jax.eval_shape(lambda chosen: routing.plan(chosen, experts, 64), jax.ShapeDtypeStruct((100, 2), "int32"))
        shapes = operand_shapes(pass_name, matrix, plan.num_rows, experts)
        operands = [jax.ShapeDtypeStruct(shape, "bfloat16" if len(shape) > 1 else "float32") for shape in shapes]
        return jax.jit(run).trace(plan, *operands).lower(lowering_platforms=("cuda",)).as_text()


MATRIX = (768, 768)


@pytest.mark.thorough
@pytest.mark.parametrize("pass_name", PASSES)
def test_candidates_lower_for_an_h200(pass_name):
    assert {tile.columns for tile in candidates(pass_name, MATRIX)} >= {128, 256}
    for tile in candidates(pass_name, MATRIX):
        assert num_kernels(lower(pass_name, MATRIX, tile)) == 1, tile


def shapes(pass_name):
    """The candidates without their numbers of stages, the largest last."""
    found = {dataclasses.replace(tile, stages=0) for tile in candidates(pass_name, MATRIX)}
    return sorted(found, key=lambda tile: (tile.rows * tile.columns, tile.columns))


def test_candidates_that_gather():
    """A tile that fits also fits if the pass gathers its rows."""
    tile = shapes("gated_matmul")[-1]
    tile = dataclasses.replace(tile, stages=tile_limits.most_stages("gated_matmul", tile))
    assert num_kernels(lower("gated_matmul", MATRIX, tile, gathers=True)) == 1, tile


@pytest.mark.parametrize("first", [-1, pytest.param(0, marks=pytest.mark.thorough)], ids=["largest", "all"])
@pytest.mark.parametrize("pass_name", PASSES)
def test_one_stage_too_many(pass_name, first):
    """It takes exactly the bytes of shared memory that `shared_memory` returns."""
    for shape in shapes(pass_name)[first:]:
        tile = dataclasses.replace(shape, stages=tile_limits.most_stages(pass_name, shape) + 1)
        with pytest.raises(ValueError, match="exceeds available shared memory") as error:
            lower(pass_name, MATRIX, tile)
        asked, allowed = map(int, re.findall(r"smem_bytes=(\d+)", str(error.value)))
        assert (asked, allowed) == (tile_limits.shared_memory(pass_name, tile), SHARED_MEMORY)


@pytest.mark.parametrize("layer", EXPERT_LAYERS.values(), ids=list(EXPERT_LAYERS))
@pytest.mark.parametrize("pass_name", PASSES)
def test_number_of_candidates(pass_name, layer):
    """A pass has few candidates, and all fit."""
    gate_up, down = (2 * layer.inter, layer.hidden), (layer.hidden, layer.inter)
    for matrix in (gate_up,) if pass_name == "gated_matmul" else (gate_up, down):
        tiles = candidates(pass_name, matrix)
        assert 2 <= len(tiles) <= 15 and len(set(tiles)) == len(tiles)
        assert not any(refusal(pass_name, matrix, tile) for tile in tiles)


@given(st.sampled_from(PASSES), st.tuples(SIZES, SIZES), TILES)
def test_allowed_tiles(pass_name, matrix, tile):
    """A tile is allowed if it divides the matrix into whole chunks that fit."""
    columns = matrix[0] if pass_name in ("gated_matmul", "grouped_matmul") else matrix[1]
    chunk = 128 if pass_name == "gated_matmul" else 64
    registers = tile.rows * tile.columns // (128 if tile.ping_pong else 256)
    allowed = (
        tile.rows in (64, 128)
        and tile.columns <= 256
        and (columns % tile.columns == 0 or (tile.ping_pong and "gated" not in pass_name and tile.columns < columns))
        and tile.warpgroup_columns % chunk == 0
        and registers <= (128 if pass_name == "gated_matmul_backward" else 192)
        and (pass_name != "grouped_outer" or matrix[0] % tile.rows == 0)
        and tile.stages >= 2
        and tile_limits.shared_memory(pass_name, tile) <= 232448
    )
    assert (refusal(pass_name, matrix, tile) is None) == allowed


@pytest.mark.parametrize(
    "pass_name, tile, message",
    [
        ("gated_matmul", TileShape(256, 128, 3), "rows is 256; it must be 64 or 128"),
        ("grouped_outer", TileShape(128, 128, 3), "rows is 128; it must be 64"),
        (
            "gated_matmul",
            TileShape(128, 64, 3),
            "columns is 64; with 128 rows it must be another number: none fits this matrix",
        ),
        ("grouped_matmul", TileShape(128, 256, 3), "columns is 256; with 128 rows it must be 64 or 192"),
        (
            "grouped_matmul_transposed",
            TileShape(128, 256, 3, ping_pong=True),
            "columns is 256; with 128 rows by turns it must be 64 or 128 or 192",
        ),
        (
            "grouped_outer",
            TileShape(64, 128, 9, ping_pong=True),
            "stages is 9; with tiles of 64 x 128 by turns it must be 2 to 8,",
        ),
        (
            "grouped_matmul_transposed",
            TileShape(128, 256, 1),
            "stages is 1; with tiles of 128 x 256 it must be 2 to 4, what 232448",
        ),
    ],
)
def test_refusal(pass_name, tile, message):
    """It lists the supported values."""
    assert refusal(pass_name, (192, 256), tile).startswith(message)


@given(
    st.sampled_from(PASSES),
    st.builds(TileShape, st.sampled_from([64, 128]), st.sampled_from([64, 128, 192, 256]), st.just(0), st.booleans()),
)
def test_most_stages(pass_name, tile):
    """It is the last number of stages that fits."""
    most = tile_limits.most_stages(pass_name, tile)
    bytes_of = [tile_limits.shared_memory(pass_name, dataclasses.replace(tile, stages=most + more)) for more in (0, 1)]
    assert bytes_of[0] <= SHARED_MEMORY < bytes_of[1]
