"""The tile that a pass takes: the user's table before the packaged one before the rule; a table with a mistake is refused."""

import json

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.mosaic import tiles
from moe_jax.kernels.experts.mosaic.tile_limits import PASSES, refusal
from moe_jax.kernels.experts.mosaic.tiles import Entry, choose_tile, merge_into_table, read_table, rule
from moe_jax.kernels.experts.routing import plan
from moe_jax.kernels.hopper.mainloop import TileShape

MATRIX = (2048, 768)
GOOD = {
    "pass": "grouped_matmul",
    "matrix": [2048, 768],
    "rows_per_expert": 64,
    "tile": {"rows": 64, "columns": 256, "stages": 4},
}


@pytest.fixture(autouse=True)
def no_tables(monkeypatch, tmp_path):
    monkeypatch.delenv("MOE_JAX_TILES", raising=False)
    use_packaged(monkeypatch, tmp_path / "empty.json")


def use_packaged(monkeypatch, path, *entries):
    merge_into_table(path, entries)
    monkeypatch.setattr(tiles, "PACKAGED", path)


def use_own(monkeypatch, path, *entries):
    merge_into_table(path, entries)
    monkeypatch.setenv("MOE_JAX_TILES", str(path))


def entry(columns, rows_per_expert, pass_name="grouped_matmul", matrix=MATRIX):
    return Entry(pass_name, matrix, rows_per_expert, TileShape(128, columns, 3))


@pytest.mark.parametrize(
    "pass_name, matrix, rows_per_expert, tile",
    [
        ("gated_matmul", (1536, 2048), 64, TileShape(64, 256, 4)),
        ("gated_matmul", (1536, 2048), 65, TileShape(128, 256, 3)),
        ("grouped_matmul", (2048, 768), 2048, TileShape(128, 192, 4, ping_pong=True)),
        ("grouped_matmul", (2048, 2112), 2048, TileShape(128, 256, 3)),
        ("grouped_matmul", (192, 768), 1 / 16, TileShape(128, 192, 4, ping_pong=True)),
        ("grouped_matmul_transposed", (1536, 2048), 2048, TileShape(128, 192, 4, ping_pong=True)),
        ("grouped_matmul_transposed", (4096, 2048), 2048, TileShape(128, 256, 3)),
        ("grouped_matmul_transposed", (256, 64), 1, TileShape(128, 64, 8)),
        ("gated_matmul_backward", (2048, 768), 1, TileShape(64, 256, 3)),
        ("grouped_outer", (2048, 768), 1, TileShape(128, 192, 4, ping_pong=True)),
        ("grouped_outer", (2048, 768), 8192, TileShape(128, 256, 4)),
        ("grouped_outer", (192, 384), 100, TileShape(64, 128, 4)),
    ],
)
def test_rule(pass_name, matrix, rows_per_expert, tile):
    """Without a table the rule decides."""
    assert rule(pass_name, matrix, rows_per_expert) == choose_tile(pass_name, matrix, rows_per_expert) == tile


@given(st.integers(1, 200), st.integers(1, 200), st.floats(1e-3, 1e5))
def test_rule_fits_every_layer(hidden, inter, rows_per_expert):
    """The rule's tile fits every layer that the backend takes."""
    hidden, inter = 64 * hidden, 64 * inter
    if mosaic.refusal(jnp.bfloat16, hidden, inter) is None:
        for pass_name in PASSES:
            for matrix in ((2 * inter, hidden), (hidden, inter)):
                if (pass_name, matrix) != ("gated_matmul", (hidden, inter)):
                    assert refusal(pass_name, matrix, rule(pass_name, matrix, rows_per_expert)) is None


def test_packaged_table():
    """It is a table, and each entry names the device it was measured on."""
    assert all(found.measured for found in read_table(tiles.Path(tiles.__file__).with_name("tiles.json")))


def test_order_of_tables(monkeypatch, tmp_path):
    """The user's table comes before the packaged table, and that before the rule."""
    use_packaged(monkeypatch, tmp_path / "packaged.json", entry(128, 64), entry(128, 2048))
    assert choose_tile("grouped_matmul", MATRIX, 64).columns == 128
    use_own(monkeypatch, tmp_path / "own.json", entry(64, 64))
    assert choose_tile("grouped_matmul", MATRIX, 64).columns == 64
    assert choose_tile("grouped_matmul", MATRIX, 2048).columns == 128, "64 is too far from 2048"
    assert choose_tile("grouped_matmul", (2048, 1536), 2048) == rule("grouped_matmul", (2048, 1536), 2048)
    assert choose_tile("grouped_matmul_transposed", MATRIX, 64) == rule("grouped_matmul_transposed", MATRIX, 64)
    monkeypatch.setenv("MOE_JAX_TILES", "")
    assert choose_tile("grouped_matmul", MATRIX, 64).columns == 128


def test_nearest_entry(monkeypatch, tmp_path):
    """The nearest average holds up to a ratio of 4."""
    use_own(monkeypatch, tmp_path / "own.json", entry(64, 1 / 16), entry(128, 1))
    columns = [choose_tile("grouped_matmul", MATRIX, rows).columns for rows in (1 / 64, 1 / 16, 0.2, 1 / 4, 0.3, 1, 4, 4.1)]
    assert columns == [64, 64, 64, 64, 128, 128, 128, 256], "at the same ratio the smaller average; beyond 4 the rule"


def test_keys_of_passes(monkeypatch):
    """hidden 128, inter 256; 6 choices of 3 experts."""
    asked = []
    monkeypatch.setattr(mosaic, "choose_tile", lambda *key: asked.append(key) or rule(*key))
    rows = jax.eval_shape(lambda chosen: plan(chosen, 3, 64), jax.ShapeDtypeStruct((3, 2), jnp.int32))
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    hidden, inter, both = (array(rows.num_rows, n) for n in (128, 256, 512))
    gate_up, down, weights = array(3, 512, 128), array(3, 128, 256), array(rows.num_rows)
    jax.eval_shape(mosaic.gated_matmul, hidden, gate_up, rows)
    jax.eval_shape(mosaic.grouped_matmul, inter, down, rows)
    jax.eval_shape(lambda *a: mosaic.grouped_matmul(*a, transpose=True), both, gate_up, rows)
    jax.eval_shape(mosaic.gated_matmul_backward, hidden, down, both, weights, rows)
    jax.eval_shape(lambda *a: mosaic.grouped_outer(*a, jnp.bfloat16), both, hidden, rows)
    assert asked == [
        ("gated_matmul", (512, 128), 2.0),
        ("grouped_matmul", (128, 256), 2.0),
        ("grouped_matmul_transposed", (512, 128), 2.0),
        ("gated_matmul_backward", (128, 256), 2.0),
        ("grouped_outer", (512, 128), 2.0),
    ]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pass": "matmul"}, "pass is 'matmul'; it must be one of gated_matmul, grouped_matmul, "),
        ({"matrix": [2048, 100]}, "matrix is [2048, 100]; it must be [rows, columns], two multiples of 64"),
        ({"rows_per_expert": 0}, "rows_per_expert is 0; it must be a number above 0"),
        ({"rows_per_expert": 10**400}, ": int too large"),
        ({"tile": [64, 256, 4]}, 'tile is [64, 256, 4]; it must be {"rows": 128, "columns": 256, "stages": 3}'),
        ({"tile": GOOD["tile"] | {"by_turns": 1}}, 'or other whole numbers, and may have "by_turns": true'),
        ({"tile": GOOD["tile"] | {"columns": 192}}, "columns is 192; with 64 rows it must be 128 or 256"),
        ({"tile": GOOD["tile"] | {"stages": 5}}, "stages is 5; with tiles of 64 x 256 it must be 2 to 4, what 232448 bytes"),
        ({"tokens": 8}, "an entry must have pass, matrix, rows_per_expert and tile, and may have measured"),
        ({}, "an earlier entry has the same pass, matrix and rows_per_expert"),
    ],
)
def test_bad_entry(monkeypatch, tmp_path, change, message):
    """It is one error that names the file and the entry."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"tiles": [GOOD, GOOD | change]}))
    monkeypatch.setenv("MOE_JAX_TILES", str(path))
    with pytest.raises(ValueError) as error:
        choose_tile("gated_matmul", MATRIX, 1)
    assert str(error.value).startswith(f"{path}: tiles[1] = {json.dumps(GOOD | change)}: ") and message in str(error.value)


def test_no_table(monkeypatch, tmp_path):
    """A file that is no table is refused."""
    path = tmp_path / "mine.json"
    for content, message in (
        (b"{", "is not JSON: "),
        (b"[" * 100_000, "is not JSON: "),
        (b'{"tiles": 3}', 'must hold {"tiles"'),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError) as error:
            read_table(path)
        assert str(error.value).startswith(f"{path} {message}")
    monkeypatch.setenv("MOE_JAX_TILES", str(tmp_path / "nowhere.json"))
    with pytest.raises(OSError, match="environment variable MOE_JAX_TILES names .*nowhere.json, which is not there"):
        choose_tile("gated_matmul", MATRIX, 1)


def test_merge_into_table(tmp_path):
    """A written table keeps its entries for other keys."""
    path = tmp_path / "mine.json"
    old, other, new = entry(128, 64), entry(128, 0.1), Entry("grouped_matmul", MATRIX, 64, TileShape(64, 256, 4), "H200")
    by_turns = Entry("grouped_matmul", MATRIX, 512, TileShape(128, 128, 5, ping_pong=True))
    merge_into_table(path, [old, other, by_turns])
    merge_into_table(path, [new])
    assert sorted(read_table(path), key=lambda found: found.rows_per_expert) == [other, new, by_turns]
    assert path.read_text().count("by_turns") == 1
    assert [file.name for file in tmp_path.iterdir() if file.name != "empty.json"] == ["mine.json"], "no temporary file is left"
    path.write_text(path.read_text().replace("256", "100"))
    broken = path.read_text()
    with pytest.raises(ValueError, match=r"tiles\[1\].*columns is 100"):
        merge_into_table(path, [old])
    assert path.read_text() == broken


def test_table_decides(monkeypatch, tmp_path):
    """A table decides which tile is compiled."""
    taken = []
    monkeypatch.setattr(mosaic, "matmul", lambda x, w, rows, tile, **_: taken.append(tile) or x)
    rows = plan(jnp.zeros((4, 2), jnp.int32), 1, 64)
    x, w = jnp.zeros((rows.num_rows, 64), jnp.bfloat16), jnp.zeros((1, 256, 64), jnp.bfloat16)
    mosaic.grouped_matmul(x, w, rows)
    use_own(monkeypatch, tmp_path / "own.json", entry(64, 8, matrix=(256, 64)))
    mosaic.grouped_matmul(x, w, rows)
    assert taken == [TileShape(64, 256, 4), TileShape(128, 64, 3)]


def test_accumulating_tile_divides_the_matrix(monkeypatch):
    """In the interpreter. Columns beyond the matrix belong to another: it would read accumulators there."""
    taken = []

    def outer(parts, tile, dtype, totals=None):
        taken.append(tile)
        return totals

    monkeypatch.setattr(mosaic, "choose_tile", lambda *_: TileShape(128, 192, 4, ping_pong=True))
    monkeypatch.setattr(mosaic, "outer", outer)
    monkeypatch.setattr(mosaic, "is_interpreted", lambda: True)
    rows = plan(jnp.zeros((4, 2), jnp.int32), 1, 64)
    a = jnp.zeros((rows.num_rows, 128), jnp.bfloat16)
    for n, accumulates in ((256, False), (256, True), (384, True)):
        totals = jnp.zeros((1, 128, n)) if accumulates else None
        mosaic.grouped_outer(a, jnp.zeros((rows.num_rows, n), jnp.bfloat16), rows, jnp.float32, accumulate_into=totals)
    assert taken == [TileShape(128, 192, 4, ping_pong=True), TileShape(128, 256, 4), TileShape(128, 192, 4, ping_pong=True)]
