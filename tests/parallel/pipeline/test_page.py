"""docs/schedules.md shows what the code draws and counts."""

from pathlib import Path

import pytest

from moe_jax.parallel.choices import CHOOSES_CHUNKS
from moe_jax.parallel.pipeline import Schedule, Timeline, bubble_formula, draw, simulate
from tests.helpers import pipelines

PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"
DRAWN = {
    "1f1b": (4, 1, 8),
    "interleaved": (2, 2, 4),
    "uniform": (2, 2, 4),
    "uniform-w": (2, 2, 4),
    "zb-h1": (4, 1, 8),
    "zb-v": (2, 2, 4),
    "dualpipe": (4, 2, 8),
    "dualpipe-v": (2, 2, 4),
}
ROWS = [
    ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("uniform", 1), ("uniform", 2), ("uniform", 4),
    ("uniform-w", 1), ("uniform-w", 4), ("zb-h1", 1), ("zb-v", 2), ("dualpipe", 2), ("dualpipe-v", 2),
]  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_drawings_of_the_page(name):
    ranks, chunks, micro_batches = DRAWN[name]
    options = f"--ranks {ranks} --micro-batches {micro_batches}" + f" --chunks {chunks}" * (name in CHOOSES_CHUNKS)
    drawn = draw(simulate(pipelines.MAKE[name](*DRAWN[name]), pipelines.UNIT))
    block = f"```\n$ moe-jax schedule {name} {options}\n{drawn}\n```"
    assert block in PAGE.read_text(), f"docs/schedules.md should have\n{block}"


@pytest.mark.parametrize("ranks, micro_batches", [(4, 16), (8, 32)])
def test_tables_of_the_page(ranks, micro_batches):
    expected = table(ranks, micro_batches)
    assert expected in PAGE.read_text(), f"docs/schedules.md should have\n{expected}"


def table(ranks: int, micro_batches: int) -> str:
    """The page's table of bubbles."""
    columns = [
        *("schedule", "bubble by formula", "asynchronous", "lockstep", "efficiency, asynchronous", "lockstep", "masked"),
        *("inputs", "measured"),
    ]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name, chunks in ROWS:
        schedule = pipelines.MAKE[name](ranks, chunks, micro_batches)
        times = pipelines.of_stage(schedule, pipelines.UNIT)
        asynchronous, in_ticks, masked = (
            simulate(schedule, times, **way) for way in ({}, {"lockstep": True}, {"lockstep": True, "masked": True})
        )
        bubbles = [bubble_formula(schedule, times), asynchronous.bubble, in_ticks.bubble]
        cells = [f"{number:.4g}" for number in bubbles]
        cells += [f"{timeline.efficiency:.1%}".replace("%", " %") for timeline in (asynchronous, in_ticks, masked)]
        label = f"{name}, {chunks} chunk{'s' * (chunks > 1)}" if name in CHOOSES_CHUNKS else name
        lines.append("| " + " | ".join([label, *cells, held(schedule, asynchronous), "not measured"]) + " |")
    return "\n".join(lines)


def held(schedule: Schedule, timeline: Timeline) -> str:
    """The inputs of the fullest rank, in inputs of all its layers for one micro-batch."""
    share = schedule.num_stages / len(schedule.ranks)
    return f"{max(timeline.peak_in_flight) / share:.4g}"
