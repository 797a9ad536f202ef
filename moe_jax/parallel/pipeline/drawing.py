"""Drawings of a simulated step: a row for each rank, as text or as a PNG file."""

import math
from pathlib import Path
from string import ascii_lowercase as LETTERS

from moe_jax.parallel.pipeline.schedules import Part, Schedule, Slot
from moe_jax.parallel.pipeline.simulator import TimedSlot, Timeline
from moe_jax.runtime.files import save_png

MAX_COLUMNS_PER_SLOT = 24
"""Maximum columns of an average slot: labels of much shorter slots are cut instead."""

MAX_COLUMNS = 20_000
"""Maximum columns of a step. A hop as long as 1e8 passes would need gigabytes for a drawing of only dots."""

MAX_NUMBERED_SLOTS = 120
"""Maximum number of slots in a row of a picture for which each has room for its micro-batch number."""

COLORS = {"F": "#6f9bd8", "B": "#7fbf7f", "b": "#56b4c9", "W": "#e0b040"}
"""Colours of the kinds of passes. Odd chunks are lighter."""


def draw(timeline: Timeline, width: int = 120) -> str:
    """Returns a step as text: slots from | to |, idle time as dots, in panels of `width` columns.

    F3 is the forward pass of micro-batch 3, B3 its backward pass, and b3 and W3 the parts of it. With several chunks a letter
    is added: F3a belongs to chunk 0, F3b to chunk 1. F5a+B3b is an overlapped pair.

    A step of more than MAX_COLUMNS columns is replaced by a one-line note.

    Raises:
      ValueError: `width` is below 20.
    """
    if width < 20:
        raise ValueError(f"width must be at least 20 columns; got {width}")
    scale = _columns_per_time(timeline)
    if not timeline.makespan * scale < MAX_COLUMNS:
        return f"no drawing: it would be {timeline.makespan * scale:.3g} columns wide, above the limit of {MAX_COLUMNS}"
    length = round(timeline.makespan * scale) + 1
    rows = [_row(timeline, slots, scale, length) for slots in timeline.ranks]
    names = [f"rank {rank} ".rjust(len(f"rank {len(rows) - 1} ")) for rank in range(len(rows))]
    columns = width - len(names[0])
    panels = []
    for first in range(0, length, columns):
        lines = [(name + row[first : first + columns]).rstrip() for name, row in zip(names, rows, strict=True)]
        header = [] if first == 0 else [f"time {first / scale:.4g}"]
        panels.append("\n".join(header + lines))
    return "\n\n".join(panels)


def plot(timeline: Timeline, path: str | Path) -> None:
    """Draws a simulated step as a PNG file, written atomically. Overlapped passes share the height of a row.

    Raises:
      ValueError: `path` does not end in .png.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() != ".png":
        raise ValueError(f"the picture's name must end in .png; got {path}")
    from matplotlib.figure import Figure

    num_ranks = len(timeline.ranks)
    figure = Figure(figsize=(16, 1.2 + 0.45 * num_ranks), layout="constrained")
    axes = figure.add_subplot(xlabel="time", xlim=(0, timeline.makespan or 1), ylim=(num_ranks - 0.5, -0.5))
    axes.set(yticks=range(num_ranks), yticklabels=[f"rank {rank}" for rank in range(num_ranks)])
    has_numbers = max(map(len, timeline.ranks)) <= MAX_NUMBERED_SLOTS
    for rank, slots in enumerate(timeline.ranks):
        for timed in slots:
            for part, top, height in _boxes(timed.slot):
                color = _shade(COLORS[part.kind], part.chunk)
                left, length = timed.start, timed.end - timed.start
                axes.barh(
                    rank - 0.4 + top,
                    length,
                    0.8 * height,
                    left=left,
                    align="edge",
                    color=color,
                    edgecolor="white",
                    linewidth=0.5,
                )
                if has_numbers:
                    middle = (left + length / 2, rank - 0.4 + top + 0.4 * height)
                    axes.text(*middle, str(part.micro_batch), ha="center", va="center", fontsize=6)
    for kind, name in {"F": "forward", "B": "backward", "b": "gradients of inputs", "W": "gradients of weights"}.items():
        if any(part.kind == kind for slots in timeline.ranks for timed in slots for part in timed.slot):
            axes.barh(0, 0, color=COLORS[kind], label=name)
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small", frameon=False)
    save_png(figure, path)


def _columns_per_time(timeline: Timeline) -> float:
    """Returns the smallest scale at which every label fits, within bounds."""
    slots = [timed for slots in timeline.ranks for timed in slots if timed.end > timed.start]
    if not slots:
        return 1.0
    # Divided first: the sum may be too large for a float.
    mean = sum((timed.end - timed.start) / len(slots) for timed in slots)
    # A label needs its columns plus one for the bar before it.
    needed = max((len(_label(timeline, timed.slot)) + 1) / (timed.end - timed.start) for timed in slots)
    scale = min(needed, MAX_COLUMNS_PER_SLOT / mean)
    # A whole number of columns per unit of time, if at least 1, keeps rows of equal slots aligned.
    return math.ceil(scale - 1e-9) if 1 <= scale < math.inf else scale


def _row(timeline: Timeline, slots: tuple[TimedSlot, ...], scale: float, length: int) -> str:
    row = ["."] * length
    for timed in slots:
        start, end = round(timed.start * scale), round(timed.end * scale)
        room = max(0, end - start - 1)
        row[start:end] = ("|" + _label(timeline, timed.slot)[:room].ljust(room))[: end - start]
        row[end] = "|"
    return "".join(row)


def _label(timeline: Timeline, slot: Slot) -> str:
    def of_chunk(chunk: int) -> str:
        if len(timeline.schedule.directions) == 1:
            return ""
        return LETTERS[chunk] if chunk < len(LETTERS) else f".{chunk}"

    return "+".join(f"{part.kind}{part.micro_batch}{of_chunk(part.chunk)}" for part in slot)


def _boxes(slot: Slot) -> list[tuple[Part, float, float]]:
    """Returns each part of a slot with the top and the height of its box, as shares of a row."""
    return [(part, 0.8 * i / len(slot), 1 / len(slot)) for i, part in enumerate(slot)]


def _shade(color: str, chunk: int) -> str:
    """Returns `color`, lighter for odd chunks."""
    if chunk % 2 == 0:
        return color
    channels = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(channel + 0.45 * (255 - channel)):02x}" for channel in channels)


TORCH_KINDS = {"F": "F", "B": "B", "b": "I", "W": "W"}
"""Kinds of parts, as torch names them: I is the gradient of inputs."""


def to_actions(schedule: Schedule) -> str:
    """Returns the schedule as CSV, one row per rank, in the format of torch's `_dump_csv`.

    An action is stage, kind and micro-batch: `2F0`, `2I0`, `2W0`. An overlapped pair is `(0F1;1B0)OVERLAP_F_B`, and an idle
    tick is empty. The second stream of DualPipe continues the numbers of the first.
    """

    def action(rank: int, part: Part) -> str:
        micro_batch = schedule.directions[part.chunk] * schedule.micro_batches + part.micro_batch
        return f"{schedule.stages[rank][part.chunk]}{TORCH_KINDS[part.kind]}{micro_batch}"

    def cell(rank: int, slot: Slot) -> str:
        parts = ";".join(action(rank, part) for part in slot)
        return f"({parts})OVERLAP_F_B" if len(slot) == 2 else parts

    return "".join(",".join(cell(rank, slot) for slot in slots) + "\n" for rank, slots in enumerate(schedule.ranks))
