"""What lies in the folder of a run's checkpoints, and what is left of one that was never finished."""

import jax.numpy as jnp

from moe_jax.checkpoint.training import TrainingCheckpoints, finished_steps


def test_an_unfinished_checkpoint_is_none_and_is_removed_by_who_saves_next(tmp_path):
    unfinished = tmp_path / "5.orbax-checkpoint-tmp" / "state"
    unfinished.mkdir(parents=True)
    for step, is_there in ((6, True), (7, False)):
        checkpoints = TrainingCheckpoints(tmp_path, remove_unfinished=not is_there)
        checkpoints.save(step, {"a": jnp.ones(3)}, {})
        checkpoints.close()
        assert unfinished.exists() == is_there
    assert finished_steps(tmp_path) == [6, 7]
    assert finished_steps(tmp_path / "none") == [] and not (tmp_path / "none").exists()
