"""Chooses the tile of each pass: the nearest entry of the user's table, else of the packaged table, else a rule.

A table is a JSON file {"tiles": [...]}. Each entry names the pass, the shape of an expert's matrix, the mean number of rows per
expert, and the tile:

    {"pass": "grouped_matmul", "matrix": [2048, 768], "rows_per_expert": 64.0,
     "tile": {"rows": 64, "columns": 256, "stages": 4}, "measured": "NVIDIA H200, 2026-11-21, jax 0.11.2"}

A tile with ping-pong has "by_turns": true too. The nearest entry is the one for the same pass and matrix whose rows_per_expert
is closest by ratio, if within 4. `moe-jax tune` writes such files; the packaged one is from an H200. A tile changes the time of
a pass, but no bit of its result.
"""

import functools
import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_jax.kernels.experts.mosaic.tile_limits import PASSES, Pass, fitting_columns, refusal
from moe_jax.kernels.hopper.mainloop import TileShape

ENVIRONMENT_VARIABLE = "MOE_JAX_TILES"
"""Environment variable with the path of the user's table. A file is read once per process, when the first kernel is traced."""

PACKAGED = Path(__file__).with_name("tiles.json")

REACH = 4.0
"""Largest ratio between the requested mean number of rows and an entry's."""


@dataclass(frozen=True)
class Entry:
    """One entry of a tile table: a tile, and the pass, matrix shape and rows per expert that it was tuned for."""

    pass_name: Pass
    matrix: tuple[int, int]
    """Shape of one expert's matrix as stored: [2*inter, hidden] of w_gate_up or [hidden, inter] of w_down."""
    rows_per_expert: float
    """tokens * k / experts."""
    tile: TileShape
    measured: str = ""
    """Device, date and versions of the measurement."""

    @property
    def key(self) -> tuple:
        """The pass, matrix shape and rows per expert, which identify an entry in a table."""
        return self.pass_name, self.matrix, self.rows_per_expert


def choose_tile(pass_name: Pass, matrix: tuple[int, int], rows_per_expert: float) -> TileShape:
    """Returns the tile for a pass: from the nearest table entry, else from `rule`. Nothing is measured.

    Raises:
        ValueError: MOE_JAX_TILES names a file that is not a table, or has an invalid entry for any pass.
        OSError: MOE_JAX_TILES names a file that cannot be read.
    """
    for path in (os.environ.get(ENVIRONMENT_VARIABLE), PACKAGED):
        if path and (entry := _nearest(_read_once(path), pass_name, matrix, rows_per_expert)):
            return entry.tile
    return rule(pass_name, matrix, rows_per_expert)


def rule(pass_name: Pass, matrix: tuple[int, int], rows_per_expert: float) -> TileShape:
    """Returns the default tile: `shared_tile`, or PING_PONG for plain matmuls with few steps.

    With ping-pong one warpgroup multiplies while the other stores, which matters if a tile has few steps.
    """
    shared = shared_tile(pass_name, matrix, rows_per_expert)
    columns, summands = {
        "grouped_matmul": matrix,
        "grouped_matmul_transposed": (matrix[1], matrix[0]),
        "grouped_outer": (matrix[1], rows_per_expert),
    }.get(pass_name, (0, math.inf))
    computed = -(-columns // PING_PONG.columns) * PING_PONG.columns
    pays = shared.rows == PING_PONG.rows and summands <= SHORT_SUM and computed <= MOST_COMPUTED * columns
    return PING_PONG if pays else shared


PING_PONG = TileShape(128, 192, 4, ping_pong=True)
SHORT_SUM, MOST_COMPUTED = 2048, 1.05
"""Summands of a short sum; and the largest ratio of computed columns, including a ragged last tile, to columns of the result.
docs/log/kernels.md has the measurements."""


def shared_tile(pass_name: Pass, matrix: tuple[int, int], rows_per_expert: float) -> TileShape:
    """Returns the default tile for cooperating consumers: 128 rows and the widest supported width.

    Passes by rows use 64 x 256 if experts have 64 rows or fewer on average. Plain products of 64 columns are bound by memory,
    so more stages keep more loads in flight.
    """
    if pass_name == "grouped_outer":
        rows = 128 if matrix[0] % 128 == 0 else 64
        if fitting := fitting_columns(pass_name, matrix, rows):
            return TileShape(rows, max(fitting), 4)
        # Two odd multiples of 64, as gpt-oss's 2880 x 2880: two consumers cannot share a tile.
        whole = [columns for columns in fitting_columns(pass_name, matrix, rows, ping_pong=True) if matrix[1] % columns == 0]
        return TileShape(rows, max(whole), 4, ping_pong=True)
    # In the backward pass chunks of h occupy the shared memory of a fourth stage.
    if rows_per_expert <= 64 and 256 in fitting_columns(pass_name, matrix, 64):
        return TileShape(64, 256, 3 if pass_name == "gated_matmul_backward" else 4)
    columns = max(fitting_columns(pass_name, matrix, 128))
    is_thin = columns == 64 and pass_name != "gated_matmul_backward"
    return TileShape(128, columns, 8 if is_thin else 3)


def read_table(path: str | Path) -> list[Entry]:
    """Reads and validates a tile table.

    Raises:
        ValueError: the file is not a table. The message names the entry, the problem and the right form.
        OSError: the file cannot be read.
    """
    try:
        table = json.loads(Path(path).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(table, dict) or not isinstance(table.get("tiles"), list):
        raise ValueError(f'{path} must hold {{"tiles": [...]}}, as `moe-jax tune` writes it')
    entries: dict[tuple, Entry] = {}
    for i, values in enumerate(table["tiles"]):
        try:
            entry = _parse(values)
            if entry.key in entries:
                raise ValueError("an earlier entry has the same pass, matrix and rows_per_expert; leave one of them out")
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{path}: tiles[{i}] = {json.dumps(values)}: {error}") from error
        entries[entry.key] = entry
    return list(entries.values())


def merge_into_table(path: Path, entries: Iterable[Entry]) -> None:
    """Writes entries into a tile table atomically, replacing those with equal keys.

    Raises:
        ValueError: the file exists and is not a table.
    """
    merged = {entry.key: entry for entry in [*(read_table(path) if path.exists() else []), *entries]}
    lines = [json.dumps(_as_json(merged[key])) for key in sorted(merged)]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text('{"tiles": [\n' + ",\n".join(lines) + "\n]}\n")
    os.replace(temporary, path)


@functools.cache
def _read_once(path: str | Path) -> list[Entry]:
    try:
        return read_table(path)
    except FileNotFoundError as error:
        message = f"environment variable {ENVIRONMENT_VARIABLE} names {path}, which is not there; `moe-jax tune` writes a table"
        raise FileNotFoundError(message) from error


def _nearest(entries: list[Entry], pass_name: Pass, matrix: tuple[int, int], rows_per_expert: float) -> Entry | None:
    def distance(entry: Entry) -> float:
        return abs(math.log(entry.rows_per_expert / rows_per_expert))

    alike = [entry for entry in entries if (entry.pass_name, entry.matrix) == (pass_name, matrix)]
    entry = min(alike, key=lambda entry: (distance(entry), entry.rows_per_expert), default=None)
    return entry if entry is not None and distance(entry) <= math.log(REACH) + 1e-9 else None


def _parse(values: Any) -> Entry:
    needed = {"pass", "matrix", "rows_per_expert", "tile"}
    if not isinstance(values, dict) or not needed <= values.keys() <= needed | {"measured"}:
        raise ValueError("an entry must have pass, matrix, rows_per_expert and tile, and may have measured")
    pass_name, matrix, rows, tile = values["pass"], values["matrix"], values["rows_per_expert"], values["tile"]
    if pass_name not in PASSES:
        raise ValueError(f"pass is {pass_name!r}; it must be one of {', '.join(PASSES)}")
    if not isinstance(matrix, list) or len(matrix) != 2 or not all(type(n) is int and n > 0 and n % 64 == 0 for n in matrix):
        raise ValueError(f"matrix is {matrix}; it must be [rows, columns], two multiples of 64")
    if type(rows) not in (int, float) or not 0 < rows < math.inf:
        raise ValueError(f"rows_per_expert is {rows!r}; it must be a number above 0")
    if (
        not isinstance(tile, dict)
        or tile.keys() - {"by_turns"} != {"rows", "columns", "stages"}
        or any(type(n) is not (bool if name == "by_turns" else int) for name, n in tile.items())
    ):
        raise ValueError(
            f'tile is {tile}; it must be {{"rows": 128, "columns": 256, "stages": 3}} or other whole numbers, '
            'and may have "by_turns": true'
        )
    shape = TileShape(tile["rows"], tile["columns"], tile["stages"], ping_pong=tile.get("by_turns", False))
    entry = Entry(pass_name, (matrix[0], matrix[1]), float(rows), shape, str(values.get("measured", "")))
    if reason := refusal(entry.pass_name, entry.matrix, entry.tile):
        raise ValueError(reason)
    return entry


def _as_json(entry: Entry) -> dict:
    values = asdict(entry)
    # The name in tables predates the field's.
    if values["tile"].pop("ping_pong"):
        values["tile"]["by_turns"] = True
    return {"pass": values.pop("pass_name"), **values}
