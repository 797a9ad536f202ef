"""Every schedule keeps the rules, ends, and stays within its stated memory and bubble; 1F1B's order."""

import hypothesis
import pytest
from hypothesis import strategies as st

from moe_jax.parallel.pipeline import PassTimes, bubble_formula, one_f_one_b, simulate, verify
from tests.helpers import pipelines


@st.composite
def times(draw, num_stages: int) -> PassTimes:
    """One time for all stages, or one for each. Nothing that is overlapped takes longer than apart, or less than the longer."""
    of = st.one_of if draw(st.booleans()) else (lambda values, per_stage: per_stage)

    def some(low, high):
        value = st.floats(low, high)
        return draw(of(value, st.lists(value, min_size=num_stages, max_size=num_stages).map(tuple)))

    weights = draw(st.floats(0, 1))
    return PassTimes(some(0.1, 3), some(1, 4), weights, draw(st.none() | st.floats(4, 4)))


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(pipelines.schedules(), st.data())
def test_any_schedule_keeps_its_promises(schedule, data):
    """verify holds; simulate ends; peaks are within the bounds; lockstep, masks, hops and longer stages only cost time."""
    verify(schedule)
    of_stage = data.draw(times(schedule.num_stages))
    timeline = simulate(schedule, of_stage)
    assert all(map(int.__le__, timeline.peak_in_flight, schedule.in_flight))
    assert all(map(int.__le__, timeline.peak_weights_queue, schedule.weights_queue))
    assert all(
        idle >= waiting - 1e-9 and waiting >= -1e-9 for idle, waiting in zip(timeline.idle, timeline.waiting, strict=True)
    )
    for slots in timeline.ranks:
        assert all(before.end <= after.start + 1e-9 for before, after in zip(slots, slots[1:], strict=False))
    in_ticks = simulate(schedule, of_stage, lockstep=True).makespan
    assert timeline.makespan <= in_ticks + 1e-9
    assert timeline.makespan <= simulate(schedule, of_stage, hop=0.25).makespan + 1e-9
    longest = PassTimes(
        *(max(t) if isinstance(t, tuple) else t for t in (of_stage.forward, of_stage.backward)), of_stage.weights
    )
    if of_stage.overlapped is None:
        assert timeline.makespan <= simulate(schedule, longest).makespan + 1e-9
    masked = simulate(schedule, PassTimes(1, 2, 1), lockstep=True, masked=True).makespan
    assert simulate(schedule, PassTimes(1, 2, 1), lockstep=True).makespan <= masked + 1e-9


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(pipelines.schedules(), st.floats(0.1, 2), st.floats(0, 2), st.floats(0, 1), st.floats(0, 1))
def test_any_bubble_is_within_its_bound(schedule, weights, more, less, hidden):
    """W <= F <= B - W, and an overlapped pair that hides up to the shorter of F and B.

    The last group of the ring's schedules may have holes: each costs a rank the passes of its chunks.
    """
    forward = weights * (1 + less)
    backward = forward + weights + more
    of_stage = PassTimes(forward, backward, weights, forward + backward - hidden * forward)
    bubble, formula = simulate(schedule, of_stage).bubble, bubble_formula(schedule, of_stage)
    num_ranks, chunks = len(schedule.ranks), len(schedule.directions)
    holes = -schedule.micro_batches % num_ranks
    if schedule.name == "1f1b":
        assert bubble == pytest.approx(formula)
    elif schedule.name in ("interleaved", "uniform"):
        assert bubble <= formula + chunks * holes * (forward + backward) + 1e-9
        assert holes or bubble == pytest.approx(formula)
    elif schedule.name == "zb-h1":
        few = schedule.micro_batches < num_ranks
        assert bubble <= (num_ranks - 1) * (forward + backward) + 1e-9 if few else bubble == pytest.approx(formula)
    elif schedule.name.startswith("dualpipe"):
        assert bubble <= formula + 1e-9


def test_1f1b():
    """The order of ranks 0 and 2 of 3, in the notation of the paper's figure."""
    schedule = one_f_one_b(3, 4)
    assert pipelines.listing(schedule.ranks[0]) == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"
    assert pipelines.listing(schedule.ranks[2]) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3"
    assert one_f_one_b(4, 2).in_flight == (2, 2, 2, 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 17])
def test_1f1b_formulas(ranks, micro_batches):
    """Bubble (p - 1) (F + B); rank r holds p - r inputs."""
    timeline = simulate(one_f_one_b(ranks, micro_batches), pipelines.UNIT)
    assert timeline.idle == (3 * (ranks - 1),) * ranks
    assert timeline.peak_in_flight == tuple(min(ranks - rank, micro_batches) for rank in range(ranks))


@pytest.mark.parametrize("name", pipelines.MAKE)
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match="ranks must be at least 1; got 0"):
        pipelines.MAKE[name](0, 1, 4)
    with pytest.raises(ValueError, match="micro_batches must be at least 1; got -2"):
        pipelines.MAKE[name](2, 1, -2)
