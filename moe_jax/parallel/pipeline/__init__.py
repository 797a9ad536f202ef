"""Pipeline parallelism: schedules as data, their rules, the time and memory of a step, and an executor.

`chunks` lays layers out, and `executor` runs any schedule. The other modules do not import JAX.

docs/schedules.md compares the schedules.
"""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.parallel.pipeline.drawing import draw, plot, to_actions
    from moe_jax.parallel.pipeline.dual_pipe import dualpipe, dualpipe_v
    from moe_jax.parallel.pipeline.schedules import Part, Schedule, one_f_one_b, zb_h1, zb_v
    from moe_jax.parallel.pipeline.simulator import PassTimes, TimedSlot, Timeline, bubble_formula, simulate
    from moe_jax.parallel.pipeline.ticks import interleaved, uniform, uniform_w
    from moe_jax.parallel.pipeline.verification import verify

__all__ = [
    "Part", "PassTimes", "Schedule", "TimedSlot", "Timeline", "bubble_formula", "draw", "dualpipe", "dualpipe_v", "interleaved",
    "one_f_one_b", "plot", "simulate", "to_actions", "uniform", "uniform_w", "verify", "zb_h1", "zb_v",
]  # fmt: skip

export_lazily(__name__)
