"""`moe-jax tune`: the tiles that win, the output, the errors. A fake stopwatch replaces the GPU."""

import functools
from typing import get_args, get_type_hints

import jax
import pytest

from moe_jax import cli
from moe_jax.commands.tune import TuneCommand
from moe_jax.config import EXPERT_LAYERS
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.mosaic import tune
from moe_jax.kernels.experts.mosaic.tile_limits import candidates
from moe_jax.kernels.experts.mosaic.tiles import Entry, merge_into_table, read_table, rule
from moe_jax.kernels.experts.mosaic.tune import Layer, Timing
from moe_jax.kernels.hopper.mainloop import TileShape

LAYER = Layer(hidden=256, inter=192, experts=4, top_k=2)


def stopwatch(pass_name, matrix, tiles, tokens, experts, top_k, dtype):
    """Every tile takes 1 ms a token; with few tokens, tiles of 64 rows take 10 % less."""
    return {n: {tile: n * (0.9e-3 if tile.rows == 64 and n < 100 else 1e-3) for tile in tiles} for n in tokens}


def test_tune():
    """Every pass of the layer is timed with its candidates and the rule's tile."""
    timings = list(tune.tune(LAYER, (1, 1000), "bfloat16", stopwatch))
    gate_up, down = (384, 256), (256, 192)
    assert [(timing.pass_name, timing.matrix, timing.tokens) for timing in timings] == [
        (pass_name, matrix, tokens)
        for pass_name, matrix in (
            ("gated_matmul", gate_up),
            ("grouped_matmul", down),
            ("gated_matmul_backward", down),
            ("grouped_outer", down),
            ("grouped_matmul_transposed", gate_up),
            ("grouped_outer", gate_up),
        )
        for tokens in (1, 1000)
    ]
    for timing in timings:
        assert timing.seconds.keys() >= {*candidates(timing.pass_name, timing.matrix), timing.rule}
        assert timing.best.rows == (64 if timing.tokens == 1 and any(tile.rows == 64 for tile in timing.seconds) else 128)
        assert timing.rows_per_expert == timing.tokens / 2


@pytest.mark.parametrize("gain, wins", [(1.049, False), (1.051, True)])
def test_best_tile(gain, wins):
    """A tile replaces the rule's tile if it is faster by more than 5 %."""
    ruled, other, slow = rule("grouped_matmul", (256, 192), 500), TileShape(64, 128, 3), TileShape(64, 256, 3)
    timing = Timing("grouped_matmul", (256, 192), LAYER, 1000, {slow: 9.0, other: 1.0, ruled: gain})
    assert timing.best == (other if wins else ruled)


def test_rows():
    """They show the fastest tile first, and mark the best tile and the rule's."""
    seconds = {TileShape(128, 256, 3): 2e-3, TileShape(64, 256, 4): 1e-3, TileShape(128, 128, 5, ping_pong=True): 4e-3}
    timing = Timing("grouped_matmul", (1024, 512), Layer(1024, 512, 8, 2), 1000, seconds)
    first, second, third = (row.split() for row in tune.rows(timing))
    # 2 * 2000 rows * 1024 * 512 FLOPs in 1 ms.
    assert first == "grouped_matmul 1024 x 512 1000 64 x 256 x 4 1.0000 2.1 best".split()
    assert second == "grouped_matmul 1024 x 512 1000 128 x 256 x 3 2.0000 1.0 rule".split()
    assert third == "grouped_matmul 1024 x 512 1000 128 x 128 x 5 by turns 4.0000 0.5".split()


def test_command(monkeypatch, tmp_path, capsys):
    """It prints and writes a table, which keeps other layers."""
    monkeypatch.setattr(tune, "check", lambda *_: None)
    monkeypatch.setattr(tune, "tune", functools.partial(tune.tune, stopwatch=stopwatch))
    other = Entry("grouped_matmul", (2048, 768), 1.0, TileShape(128, 64, 3), "elsewhere")
    output = tmp_path / "tables" / "mine.json"
    output.parent.mkdir()
    merge_into_table(output, [other])
    sizes = "--hidden 256 --inter 192 --experts 4 --top-k 2 --tokens 1 1000 1".split()
    cli.main(["tune", *sizes, "--output", str(output)])
    printed = capsys.readouterr().out
    assert tune.HEADER in printed and f"MOE_JAX_TILES={output}" in printed
    table = read_table(output)
    assert other in table and len(table) == 1 + 6 * 2
    assert all(
        f"{jax.devices()[0].device_kind}, 20" in found.measured and "jax" in found.measured for found in table if found != other
    )
    assert {found.rows_per_expert for found in table if found != other} == {0.5, 500.0}

    monkeypatch.setenv("MOE_JAX_TILES", str(tmp_path / "own" / "table.json"))
    cli.main(["tune", *sizes])
    assert read_table(tmp_path / "own" / "table.json") == [found for found in table if found != other]
    assert sum(row.endswith("best") or "best rule" in row for row in printed.splitlines()) == 6 * 2


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as status:
        cli.main(["tune", *arguments])
    assert status.value.code == 2
    return capsys.readouterr().err


@pytest.mark.skipif(mosaic.is_native(), reason="this GPU has the kernels")
def test_device_without_the_kernels(tmp_path, capsys):
    """It is refused before anything is written."""
    output = tmp_path / "tables" / "mine.json"
    error = refused(capsys, "--preset", "qwen3-30b-a3b", "--output", str(output))
    assert error == (
        "moe-jax: tune measures the kernels of backend 'mosaic': "
        "it needs a Hopper GPU (compute capability 9.0); this is cpu\n"
    )  # fmt: skip
    assert not output.parent.exists()


def test_errors(monkeypatch, tmp_path, capsys):
    """An input that cannot be tuned is an error of one line."""
    assert "give either --preset NAME or all four of --hidden" in refused(capsys)
    assert "give either --preset NAME or all four of --hidden" in refused(capsys, "--hidden", "256")
    assert "give either" in refused(capsys, "--preset", "deepseek-v3", "--hidden", "256")
    sizes = "--hidden 256 --experts 4".split()
    assert "inter is 100; it must be a multiple of 64" in refused(capsys, *sizes, "--inter", "100", "--top-k", "2")
    assert "top_k is 5; it must be at most the number of experts, 4" in refused(
        capsys, *sizes, "--inter", "128", "--top-k", "5"
    )
    assert "tokens must be at least 1; got 0" in refused(capsys, "--preset", "deepseek-v3", "--tokens", "0")
    monkeypatch.setattr(tune, "check", lambda *_: None)
    (tmp_path / "mine.json").write_text("{}")
    error = refused(capsys, "--preset", "deepseek-v3", "--output", str(tmp_path / "mine.json"))
    assert 'mine.json must hold {"tiles": [...]}' in error


def test_presets_are_offered():
    """The command's presets are the published layers."""
    offered = get_args(get_args(get_type_hints(TuneCommand)["preset"])[0])
    assert offered == tuple(EXPERT_LAYERS)


def test_preset_sizes(monkeypatch, tmp_path):
    """`--preset` gives the kernels the sizes that are in `config.named`."""
    tuned = []
    monkeypatch.setattr(tune, "check", lambda *_: None)
    monkeypatch.setattr(tune, "tune", lambda layer, *_: tuned.append(layer) or [])
    cli.main(["tune", "--preset", *EXPERT_LAYERS, "--output", str(tmp_path / "tiles.json")])
    assert tuned == [Layer(**layer._asdict()) for layer in EXPERT_LAYERS.values()]
    assert tuned[0] == Layer(hidden=2048, inter=768, experts=128, top_k=8)
    assert tuned[[*EXPERT_LAYERS].index("mixtral-8x7b")] == Layer(hidden=4096, inter=14336, experts=8, top_k=2)
