"""The published bubble of each schedule: the time that a rank is idle in a step, from the times of a stage's passes."""

from moe_jax.parallel.pipeline.schedules import Schedule
from moe_jax.parallel.pipeline.simulator import PassTimes


def bubble_formula(schedule: Schedule, times: PassTimes) -> float:
    """Returns the bubble of a schedule over p ranks, for times F, B, W and F&B (overlapped) of one stage.

    | schedule | bubble | exact for |
    |---|---|---|
    | 1f1b | (p - 1) (F + B) | all times |
    | interleaved, uniform | (p - 1) (F + B) | micro-batches a multiple of p; otherwise it is longer |
    | uniform-w | (p - 1) (F + B - W) | the same |
    | zb-h1 | (p - 1) (F + B - 2 W) | W <= F and W <= B - W, at least p micro-batches; otherwise it may be longer |
    | zb-v | (p - 1) F | F = B - W = W, at least 2 p - 1 micro-batches; otherwise it may be longer |
    | dualpipe | (p / 2 - 1) (F&B + B - 3 W) | F = B - W = W and F&B = 3 F; an upper bound for W <= F <= B - W |
    | dualpipe-v | (p - 1) (F&B + B - 3 W) | the same |

    With v chunks a rank, F of a stage is 1/v of F of a rank: so interleaving divides the bubble by v. Ranks of zb-v begin one
    after another and never wait between their first and their last pass. (p - 1) F is what they are idle before and after.

    Raises:
      ValueError: the schedule has no formula, or a time differs from stage to stage.
    """
    pair = (times.forward, times.backward, times.weights, times.overlapped)
    if not all(time is None or isinstance(time, int | float) for time in pair):
        raise ValueError("formulas of the bubble need one time for every stage")
    f, b, w = (float(time) for time in (times.forward, times.backward, times.weights))  # type: ignore[arg-type]
    both, p = times.both(0, 0), len(schedule.ranks)
    formulas = {
        "1f1b": (p - 1) * (f + b),
        "interleaved": (p - 1) * (f + b),
        "uniform": (p - 1) * (f + b),
        "uniform-w": (p - 1) * (f + b - w),
        "zb-h1": (p - 1) * (f + b - 2 * w),
        "zb-v": (p - 1) * f,
        "dualpipe": (p / 2 - 1) * (both + b - 3 * w),
        "dualpipe-v": (p - 1) * (both + b - 3 * w),
    }
    if schedule.name not in formulas:
        raise ValueError(f"no formula for a schedule named {schedule.name!r}; there are: {', '.join(formulas)}")
    return formulas[schedule.name]
