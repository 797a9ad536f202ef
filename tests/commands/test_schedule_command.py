"""`moe-jax schedule` draws, counts, writes a picture, and refuses what a schedule cannot be."""

import matplotlib.image
import pytest

from moe_jax.cli import main


def test_a_schedule_is_drawn_and_counted(tmp_path, capsys):
    picture = tmp_path / "picture.png"
    main(["schedule", "dualpipe", "--ranks", "8", "--micro-batches", "32", "--output", str(picture)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 0 |F0a |F1a |F2a |F3a |F4a |F5a |F6a |F0b |b0b |W0b |")
    assert "bubble               6 simulated, 6 by the formula" in lines
    assert "chunk inputs held    9" in lines and "passes W put off     1 2 3 4 4 3 2 1" in lines
    assert lines[-1] == f"wrote {picture}" and matplotlib.image.imread(picture).std() > 0


@pytest.mark.parametrize(
    "arguments, bubble",
    [
        ("1f1b --micro-batches 8", "9 simulated, 9 by the formula"),
        ("interleaved --micro-batches 8", "4.5 simulated, 4.5 by the formula"),
        ("interleaved --micro-batches 8 --chunks 3", "3 simulated, 3 by the formula"),
        ("uniform --micro-batches 8", "9 simulated, 9 by the formula"),
        ("uniform --micro-batches 8 --chunks 4 --lockstep", "2.25 simulated, 2.25 by the formula"),
        ("zb-h1 --micro-batches 8 --backward 3 --weights 0.8", "7.2 simulated, 7.2 by the formula"),
        ("zb-v --micro-batches 8", "1.5 simulated, 1.5 by the formula"),
        ("dualpipe-v --micro-batches 8", "3 simulated, 3 by the formula"),
        ("dualpipe --micro-batches 8 --weights 0.9 --overlapped 2.4", "1.6 simulated, 1.7 by the formula"),
    ],
)
def test_every_schedule_and_option(arguments, bubble, capsys):
    main(["schedule", *arguments.split(), "--ranks", "4"])
    printed = capsys.readouterr().out
    assert f"bubble               {bubble}\n" in printed
    assert ("between its passes   0\n" in printed) == arguments.startswith("zb-v")


@pytest.mark.parametrize(
    "options, efficiency, bubble",
    [([], "84.2%", 9), (["--lockstep"], "66.7%", 24), (["--masked"], "47.5%", 53), (["--lockstep", "--masked"], "47.5%", 53)],
)
def test_columns_of_the_page(options, efficiency, bubble, capsys):
    """The table of docs/schedules.md can be printed: 1f1b asynchronously, in lockstep and masked."""
    main(["schedule", "1f1b", "--ranks", "4", "--micro-batches", "16", *options])
    printed = capsys.readouterr().out
    assert f"efficiency           {efficiency}: 16 x 3 of work over the time of the step\n" in printed
    assert f"bubble               {bubble} simulated, 9 by the formula\n" in printed


def test_efficiency_is_of_the_least_work(capsys):
    """32 pairs of 3.5 over 162.8, though 1f1b overlaps nothing and works 128. Times are of a rank, not of a stage."""
    times = "--backward 3 --weights 0.8 --overlapped 3.5 --micro-batches 32".split()
    main(["schedule", "1f1b", "--ranks", "8", *times, "--hop", "0.1"])
    assert "efficiency           68.8%: 32 x 3.5 of work over the time of the step\n" in capsys.readouterr().out
    main(["schedule", "dualpipe-v", "--ranks", "8", *times])
    assert ": 32 x 3.5 of work over the time of the step\n" in capsys.readouterr().out


def test_a_step_too_wide_to_draw_is_counted(capsys):
    main("schedule 1f1b --ranks 2 --micro-batches 4 --hop 1e8".split())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("no drawing: it would be 1.2e+09 columns wide") and max(map(len, lines)) < 128
    assert "bubble               4e+08 simulated, 3 by the formula" in lines


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("dualpipe --ranks 5 --micro-batches 20", "ranks must be even, for DualPipe starts at both ends; got 5"),
        ("dualpipe --ranks 4 --micro-batches 6", "micro_batches must be at least 2 * ranks = 8 for DualPipe; got 6"),
        (
            "dualpipe --ranks 4 --micro-batches 8 --chunks 2",
            "--chunks goes with uniform, uniform-w, interleaved; dualpipe",
        ),
        ("uniform --ranks 1 --micro-batches 8 --chunks 2", "chunks must be 1 with one rank"),
        ("1f1b --ranks 0 --micro-batches 8", "ranks must be at least 1; got 0"),
        ("1f1b --ranks 2 --micro-batches 8 --forward -1", "forward must be a finite time of at least 0; got -1"),
        ("zb-v --ranks 2 --micro-batches 4 --forward -3", "forward must be a finite time of at least 0; got -3.0"),
        ("1f1b --ranks 2 --micro-batches 8 --hop nan", "hop must be a finite time of at least 0; got nan"),
        ("1f1b --ranks 2 --micro-batches 8 --hop inf", "hop must be a finite time of at least 0; got inf"),
        ("1f1b --ranks 2 --micro-batches 8 --forward 1e308 --backward 1e308", "the time of the step is too large for a float"),
        (
            "interleaved --ranks 2 --micro-batches 4 --backward 0.5",
            "weights is a part of backward=0.5, so it must be at most that",
        ),
        (
            "dualpipe --ranks 4 --micro-batches 8 --overlapped 1e-3",
            "overlapped must be at least the longer of forward=1.0 and backward=2.0, for it contains both; got 0.001",
        ),
        ("1f1b --ranks 2 --micro-batches 8 --weights 3", "weights is a part of backward=2"),
        ("1f1b --ranks 2 --micro-batches 8 --output picture.pdf", "the picture's name must end in .png; got picture.pdf"),
        ("1f1b --ranks 2 --micro-batches 8 --width 3", "width must be at least 20 columns; got 3"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as status:
        main(["schedule", *arguments.split()])
    printed = capsys.readouterr()
    assert status.value.code == 2 and message in printed.err and printed.err.count("\n") == 1 and not printed.out
