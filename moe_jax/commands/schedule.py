"""`moe-jax schedule`: draws a pipeline schedule and counts its bubble."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from moe_jax.parallel import pipeline
from moe_jax.parallel.choices import CHOOSES_CHUNKS, PipeSchedule
from moe_jax.parallel.pipeline.limits import schedule_by_name


@dataclass(frozen=True)
class ScheduleCommand:
    """Draw a pipeline schedule for given times of its passes, and compare its bubble with the formula. Needs no GPU.

    moe-jax schedule dualpipe --ranks 8 --micro-batches 32

    moe-jax schedule interleaved --ranks 4 --chunks 2 --micro-batches 8 --output picture.png

    docs/schedules.md explains and compares the schedules. Times are for a rank's share of the layers (1/ranks of the model) and
    one micro-batch, in any unit.

    The efficiency is the least work of a rank over the time of the step. The least work is, for each micro-batch, the shorter
    of forward + backward and overlapped, even if the schedule overlaps nothing.

    Args:
      schedule: the order of the passes.
      ranks: devices along the pipeline.
      micro_batches: micro-batches of a step; dualpipe counts both directions.
      chunks: chunks of layers that each rank holds, for interleaved (default 2), uniform and uniform-w (default 1).
      forward: time of a forward pass.
      backward: time of a whole backward pass.
      weights: the part of `backward` that computes gradients of weights.
      overlapped: time of a forward pass overlapped with a backward pass, at least the longer of both. Default: forward +
        backward.
      hop: time in which a result travels to the next rank.
      lockstep: run in ticks, each as long as its longest slot.
      masked: run in lockstep, and compute in each tick every kind of pass that any rank needs.
      width: columns of the drawing.
      output: a PNG file for the picture.
    """

    schedule: tyro.conf.Positional[PipeSchedule]
    ranks: int
    micro_batches: int
    chunks: int | None = None
    forward: float = 1.0
    backward: float = 2.0
    weights: float = 1.0
    overlapped: float | None = None
    hop: float = 0.0
    lockstep: bool = False
    masked: bool = False
    width: int = 120
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE.png")] = None

    def run(self) -> None:
        """Prints the timeline and the bubble, and draws the picture if asked."""
        schedule = self.made()
        pipeline.verify(schedule)
        of_rank = pipeline.PassTimes(self.forward, self.backward, self.weights, self.overlapped)
        # Checked before the division, so that errors quote the times that the user gave.
        of_rank.require_valid(1)
        times = of_rank.divided(schedule.num_stages / self.ranks)
        lockstep = self.lockstep or self.masked
        timeline = pipeline.simulate(schedule, times, hop=self.hop, lockstep=lockstep, masked=self.masked)
        if self.output is not None:
            pipeline.plot(timeline, self.output)
        print(pipeline.draw(timeline, self.width))
        by_formula = pipeline.bubble_formula(schedule, times)
        work = min(self.forward + self.backward, of_rank.both(0, 0))
        print()
        print(f"time of the step     {timeline.makespan:.6g}")
        share = f"{timeline.efficiency:.1%}"
        print(f"efficiency           {share}: {self.micro_batches} x {work:.6g} of work over the time of the step")
        print(f"bubble               {timeline.bubble:.6g} simulated, {by_formula:.6g} by the formula")
        print(f"idle in each rank    {_list(timeline.idle)}")
        if max(timeline.idle) > max(timeline.waiting):
            print(f"between its passes   {_list(timeline.waiting)}")
        print(f"chunk inputs held    {_list(timeline.peak_in_flight)}")
        if any(timeline.peak_weights_queue):
            print(f"passes W put off     {_list(timeline.peak_weights_queue)}")
        if self.output is not None:
            print(f"wrote {self.output}")

    def made(self) -> pipeline.Schedule:
        """Returns the schedule.

        Raises:
          ValueError: the schedule refuses the sizes, or has no `chunks` to choose.
        """
        if self.chunks is not None and self.schedule not in CHOOSES_CHUNKS:
            raise ValueError(f"--chunks goes with {', '.join(CHOOSES_CHUNKS)}; {self.schedule} has chunks of its own")
        usual = 2 if self.schedule == "interleaved" else 1
        return schedule_by_name(self.schedule, self.ranks, usual if self.chunks is None else self.chunks, self.micro_batches)


def _list(numbers: tuple[float, ...]) -> str:
    """Returns the numbers, or one of them if all are equal."""
    texts = [f"{number:.6g}" for number in numbers]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)
