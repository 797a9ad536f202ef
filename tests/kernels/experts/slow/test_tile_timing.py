"""Passes with given tiles: they agree bit for bit, and are timed for every number of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.mosaic import tune
from moe_jax.kernels.experts.mosaic.tile_limits import PASSES, candidates
from moe_jax.kernels.experts.mosaic.tune import operand_shapes, run_pass, time_tiles
from moe_jax.kernels.experts.routing import plan
from moe_jax.kernels.hopper.mainloop import TileShape


def results(pass_name, tiles, matrix, chosen, experts, draw):
    """Yields the results of each tile as numpy arrays. Results by row hold only the rows of pairs."""
    rows = plan(jnp.asarray(chosen, jnp.int32), experts, mosaic.ROW_ALIGNMENT)
    owned = np.asarray(rows.pair_of_row) < chosen.size
    shapes = operand_shapes(pass_name, matrix, rows.num_rows, experts)
    operands = [draw(shape) for shape in shapes]
    if pass_name == "grouped_outer":
        operands = [jnp.where(owned[:, None], a, 0) for a in operands]
    for tile in tiles:
        found = run_pass(pass_name, tile, rows, *operands)
        found = [np.asarray(a.astype(jnp.float32)) for a in (found if isinstance(found, tuple) else (found,))]
        yield found if pass_name == "grouped_outer" else [a[owned] for a in found]


@pytest.mark.parametrize(
    "pass_name, tiles",
    [
        ("gated_matmul", [TileShape(64, 256, 2), TileShape(128, 128, 5, ping_pong=True)]),
        ("grouped_outer", [TileShape(64, 128, 2), TileShape(128, 192, 3, ping_pong=True)]),
        *(
            pytest.param(name, [TileShape(128, 256, 3), TileShape(64, 256, 3), other], marks=pytest.mark.thorough)
            for name, other in (
                ("grouped_matmul", TileShape(128, 192, 4, ping_pong=True)),
                ("grouped_matmul_transposed", TileShape(64, 192, 2, ping_pong=True)),
                ("gated_matmul_backward", TileShape(128, 128, 4, ping_pong=True)),
            )
        ),
    ],
)
def test_bits_of_tiles(rng, pass_name, tiles):
    """Sums over k are exact here, since the interpreter adds up a step in its CPU's order. All other orders count."""

    def draw(shape):
        return jnp.asarray(rng.integers(-4, 5, size=shape) / 4, jnp.bfloat16)

    chosen = rng.integers(0, 2, (150, 1))
    first, *others = results(pass_name, tiles, (256, 256), chosen, 2, draw)
    assert all(np.abs(a).sum() > 0 for a in first)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not mosaic.is_native(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("pass_name", PASSES)
def test_bits_of_candidates(rng, pass_name):
    """The bits of every candidate agree on the GPU."""
    matrix = (1536, 768)

    def draw(shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    chosen = np.argsort(rng.random((500, 8)), axis=1)[:, :2]
    first, *others = results(pass_name, candidates(pass_name, matrix), matrix, chosen, 8, draw)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_time_tiles(monkeypatch):
    """Every tile is timed at every number of tokens."""
    monkeypatch.setattr(tune, "GROUPS", 2)
    monkeypatch.setattr(tune, "ROUTINGS", 1)
    monkeypatch.setattr(tune, "GROUP_SECONDS", 0)
    tiles = [TileShape(64, 128, 2), TileShape(128, 128, 2)]
    seconds = time_tiles("grouped_matmul", (128, 64), tiles, [1, 70], experts=2, top_k=1, dtype="bfloat16")
    assert list(seconds) == [1, 70] and all(list(of_tiles) == tiles for of_tiles in seconds.values())
    assert all(second > 0 for of_tiles in seconds.values() for second in of_tiles.values())


def test_fewer_tokens():
    """The other tokens choose nobody."""
    routing = jax.jit(tune._routing, static_argnames=("most", "experts", "top_k"))
    found = routing(jax.random.key(0), 10, most=50, experts=4, top_k=2)
    chosen_pairs = np.asarray(found.pair_of_row)[: int(found.offsets[-1])]
    assert sorted(chosen_pairs[chosen_pairs < 100]) == list(range(20)), "both choices of the first ten tokens"
    assert found.row_of_pair.shape == (50, 2)
