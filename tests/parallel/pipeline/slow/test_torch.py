"""torch.distributed.pipelining computes the same passes in the same order. It is asked through names that are not public."""

from types import SimpleNamespace

import pytest

from moe_jax.parallel.pipeline import dualpipe_v, interleaved, to_actions, zb_v

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("ranks, micro_batches", [(2, 4), (4, 8), (4, 9), (8, 16)])
def test_orders_are_torchs(ranks, micro_batches):
    from torch.distributed.pipelining import schedules as torch_schedules

    def theirs(kind, chunks):
        sizes = SimpleNamespace(
            pp_group_size=ranks,
            n_local_stages=chunks,
            num_stages=chunks * ranks,
            _num_stages=chunks * ranks,
            _n_microbatches=micro_batches,
            microbatches_per_round=ranks,
            number_of_rounds=micro_batches // ranks,
        )
        rows = (kind._calculate_single_rank_operations(sizes, rank) for rank in range(ranks))
        return [[str(action) for action in row if action is not None] for row in rows]

    def ours(schedule):
        return [row.split(",") for row in to_actions(schedule).splitlines()]

    assert ours(zb_v(ranks, micro_batches)) == theirs(torch_schedules.ScheduleZBVZeroBubble, 2)
    assert ours(dualpipe_v(ranks, micro_batches)) == theirs(torch_schedules.ScheduleDualPipeV, 2)
    if micro_batches % ranks == 0:
        for chunks in (2, 3):
            assert ours(interleaved(ranks, chunks, micro_batches)) == theirs(torch_schedules.ScheduleInterleaved1F1B, chunks)
