"""Gaps are apart: an array between each two of them lives on."""

from types import SimpleNamespace

import jax

from moe_jax.serving import programs
from moe_jax.serving.programs import GAP_BYTES, GAPS_OF_A_SIZE, leave_gaps


def test_gaps_of_each_size(monkeypatch):
    """The allocator of this test puts arrays one after another, each at a multiple of 256 bytes."""
    end = 0

    def place(array, device):
        nonlocal end
        begin, end = end, end + -(-array.nbytes // 256) * 256
        return SimpleNamespace(begin=begin, end=end)

    monkeypatch.setattr(programs.jax, "device_put", place)
    borders = leave_gaps(SimpleNamespace(platform="gpu"))
    ends = [0, *(border.end for border in borders)]
    gaps = [border.begin - before for before, border in zip(ends, borders, strict=False)]
    assert gaps == [num_bytes for num_bytes in GAP_BYTES for _ in range(GAPS_OF_A_SIZE)]


def test_none_without_a_gpu():
    assert leave_gaps(jax.devices("cpu")[0]) == []
