"""Drawings as text and pictures, and torch's format."""

import subprocess
import sys

import matplotlib.image
import pytest

from moe_jax.parallel.pipeline import PassTimes, draw, dualpipe, interleaved, one_f_one_b, plot, simulate, to_actions, zb_h1
from tests.helpers import pipelines

TEXT = """\
rank 0 |F0|F1|F2|.....|b0|W0|F3|b1|W1|b2|W2|b3|W3|
rank 1 ...|F0|F1|..|b0|F2|b1|W0|F3|b2|W1|b3|W2|W3|
rank 2 ......|F0|b0|F1|b1|F2|b2|W0|F3|b3|W1|W2|W3|"""


def test_text():
    assert draw(simulate(zb_h1(3, 4), pipelines.UNIT)) == TEXT


def test_chunks_have_letters_and_pairs_a_plus():
    drawn = draw(simulate(dualpipe(2, 4), pipelines.UNIT))
    assert drawn.splitlines()[0].startswith("rank 0 |F0a|F0b|F1a|B0b    |F1b+B0a    |")
    assert "F0b" in draw(simulate(interleaved(2, 28, 2), pipelines.UNIT), 4000)
    assert "F0.27" in draw(simulate(interleaved(2, 28, 2), pipelines.UNIT), 100000)


def test_long_drawings_are_cut_into_panels():
    panels = draw(simulate(one_f_one_b(2, 40), pipelines.UNIT), width=60).split("\n\n")
    assert len(panels) > 3 and all(len(line) <= 60 for panel in panels for line in panel.splitlines())
    assert panels[1].splitlines()[0] == "time 13.25" and panels[1].splitlines()[1].startswith("rank 0 ")
    with pytest.raises(ValueError, match="width must be at least 20 columns; got 5"):
        draw(simulate(one_f_one_b(1, 1), pipelines.UNIT), width=5)


def test_labels_without_room_are_cut():
    """Slots of very different times, and of none, still make a drawing."""
    drawn = draw(simulate(zb_h1(2, 3), PassTimes(1e-3, 5, 1, None)))
    assert max(map(len, drawn.splitlines())) <= 120
    assert draw(simulate(zb_h1(2, 3), PassTimes(0, 0, 0))).startswith("rank 0")


def test_drawings_have_a_widest():
    """A hop far longer than the passes, many micro-batches, times of almost 0: one line, and no row of gigabytes."""
    hops = draw(simulate(one_f_one_b(2, 4), pipelines.UNIT, hop=1e8))
    assert hops == "no drawing: it would be 1.2e+09 columns wide, above the limit of 20000"
    assert draw(simulate(one_f_one_b(1, 4000), pipelines.UNIT)).startswith("no drawing: it would be 7.2e+04 columns wide")
    assert draw(simulate(one_f_one_b(2, 2), PassTimes(1e-320, 1e-320, 0))).startswith("no drawing: ")
    small, large = (draw(simulate(one_f_one_b(2, 2), PassTimes(time, time, 0))) for time in (1e-3, 1e307))
    assert small == large and "|F1|" in large


def test_pictures(tmp_path):
    """A whole file, different for different schedules, and no other file next to it."""
    first, second = tmp_path / "new" / "a.png", tmp_path / "new" / "b.png"
    plot(simulate(dualpipe(4, 8), pipelines.UNIT), first)
    plot(simulate(one_f_one_b(4, 8), pipelines.UNIT), second)
    assert matplotlib.image.imread(first).std() > 0
    assert first.read_bytes() != second.read_bytes()
    assert {path.name for path in first.parent.iterdir()} == {"a.png", "b.png"}
    with pytest.raises(ValueError, match=r"the picture's name must end in \.png; got .*a\.pdf"):
        plot(simulate(one_f_one_b(1, 1), pipelines.UNIT), tmp_path / "a.pdf")


def test_a_picture_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_text("old")

    def fails(self, file):
        file.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg.print_png", fails)
    with pytest.raises(OSError, match="disk full"):
        plot(simulate(one_f_one_b(2, 2), pipelines.UNIT), path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_actions_in_torchs_format():
    """Stages, I for b, pairs in brackets; DualPipe's second stream continues the numbers of the first."""
    assert to_actions(zb_h1(2, 2)) == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    assert to_actions(dualpipe(2, 4)).splitlines() == [
        "0F0,1F2,0F1,1B2,(1F3;0B0)OVERLAP_F_B,1B3,0I1,0W1",
        "0F2,1F0,0F3,1B0,(1F1;0B2)OVERLAP_F_B,1B1,0I3,0W3",
    ]
    assert to_actions(pipelines.MAKE["uniform"](2, 1, 1)) == "0F0,,,0B0,\n,1F0,1B0,,\n"


def test_the_room_imports_neither_jax_nor_matplotlib():
    code = """
import sys
from moe_jax.parallel.pipeline import *
from moe_jax.parallel.pipeline import draw, dualpipe, simulate, PassTimes, verify, to_actions, bubble_formula, ticks
schedule = dualpipe(4, 8)
verify(schedule), draw(simulate(schedule, PassTimes())), to_actions(schedule), bubble_formula(schedule, PassTimes())
print([name for name in ("jax", "numpy", "matplotlib", "flax") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
