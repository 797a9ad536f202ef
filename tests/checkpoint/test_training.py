"""The folder of a run's checkpoints, and the remains of a checkpoint that was never finished."""

import resource
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.checkpoint.training import TrainingCheckpoints, finished_steps


def test_an_unfinished_checkpoint_does_not_count(tmp_path):
    """The next save removes it, if `remove_unfinished` allows that."""
    unfinished = tmp_path / "5.orbax-checkpoint-tmp" / "state"
    unfinished.mkdir(parents=True)
    for step, is_there in ((6, True), (7, False)):
        checkpoints = TrainingCheckpoints(tmp_path, remove_unfinished=not is_there)
        checkpoints.save(step, {"a": jnp.ones(3)}, {})
        checkpoints.close()
        assert unfinished.exists() == is_there
    assert finished_steps(tmp_path) == [6, 7]
    assert finished_steps(tmp_path / "none") == [] and not (tmp_path / "none").exists()


def saved(folder, *steps):
    checkpoints = TrainingCheckpoints(folder)
    for step in steps:
        # Large enough for a file of its own.
        checkpoints.save(step, {"a": jnp.arange(100000.0)}, {"at": step})
    return checkpoints


def test_a_failed_save_names_the_newest_whole_checkpoint(tmp_path, capfd):
    """The error is one message, without a traceback, and says where the same command goes on."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for steps, way in (((), "begins anew: there is none before it"), ((3,), "goes on from step 3, the newest that is whole")):
        checkpoints = saved(tmp_path, *steps)
        checkpoints._manager.wait_until_finished()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10000, limits[1]))
            with pytest.raises(OSError, match=rf"saved in {tmp_path} \(File too large\); the same command {way}"):
                checkpoints.save(5, {"a": jnp.arange(100000.0)}, {})
                checkpoints.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "damaged", ["position", "position/metadata", "state", "state/_METADATA", "state/manifest.ocdbt", "files"]
)
def test_a_damaged_checkpoint_is_named_with_the_way_on(tmp_path, damaged):
    saved(tmp_path, 3, 5).close()
    checkpoint = tmp_path / "5"
    if damaged == "files":
        for file in (checkpoint / "state").glob("**/d/*"):
            file.write_bytes(file.read_bytes()[:100])
    elif (checkpoint / damaged).is_dir():
        shutil.rmtree(checkpoint / damaged)
    else:
        (checkpoint / damaged).write_bytes(b"")
    checkpoints = TrainingCheckpoints(tmp_path)
    assert checkpoints.latest_step() == 5
    way = rf"checkpoint 5 cannot be read \(.+\): move the folder {checkpoint} away to go on from step 3$"
    with pytest.raises(ValueError, match=way) as error:
        checkpoints.position(5)
        checkpoints.restore(5, {"a": jnp.zeros(100000)})
    assert "tensorstore_spec" not in str(error.value)
    shutil.rmtree(checkpoint)
    again = TrainingCheckpoints(tmp_path)
    assert again.position(3) == {"at": 3}
    np.testing.assert_array_equal(again.restore(3, {"a": jnp.zeros(100000)})["a"], np.arange(100000.0))
