"""Makes a schedule by its name in `moe-jax schedule` and `Parallelism.pipe_schedule`."""

from moe_jax.parallel.choices import PipeSchedule
from moe_jax.parallel.pipeline.dual_pipe import dualpipe, dualpipe_v
from moe_jax.parallel.pipeline.ring_schedules import interleaved, uniform, uniform_w
from moe_jax.parallel.pipeline.schedules import Schedule, one_f_one_b
from moe_jax.parallel.pipeline.zero_bubble import zb_h1, zb_v


def schedule_by_name(name: PipeSchedule, ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """Returns a schedule; `chunks` is for the schedules that let it be chosen.

    Raises:
      ValueError: sizes that the schedule refuses.
    """
    with_chunks = {"interleaved": interleaved, "uniform": uniform, "uniform-w": uniform_w}
    if name in with_chunks:
        return with_chunks[name](ranks, chunks, micro_batches)
    make = {"1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-v": zb_v, "dualpipe": dualpipe, "dualpipe-v": dualpipe_v}
    return make[name](ranks, micro_batches)
