"""The folder of a run's checkpoints, and the remains of a checkpoint that was never finished."""

import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.checkpoint.training import TrainingCheckpoints, _checksum, finished_steps


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


def largest_file(checkpoint):
    return max((file for file in checkpoint.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def test_a_failed_save_names_the_newest_whole_checkpoint(tmp_path, capfd):
    """The error is one message, without a traceback, and names the step from which the same command resumes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for steps, way in (((), "starts over: there is no earlier one"), ((3,), "resumes from step 3, the newest complete one")):
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
    "damaged",
    ["position", "position/metadata", "state", "state/_METADATA", "state/manifest.ocdbt", "all files", "largest file"],
)
def test_a_damaged_checkpoint_is_named_with_the_way_on(tmp_path, damaged, capfd):
    saved(tmp_path, 3, 5).close()
    checkpoint = tmp_path / "5"
    if damaged == "all files":
        for file in (checkpoint / "state").glob("**/d/*"):
            file.write_bytes(file.read_bytes()[:100])
    elif damaged == "largest file":
        file = largest_file(checkpoint)
        file.write_bytes(file.read_bytes()[:200000])
    elif (checkpoint / damaged).is_dir():
        shutil.rmtree(checkpoint / damaged)
    else:
        (checkpoint / damaged).write_bytes(b"")
    checkpoints = TrainingCheckpoints(tmp_path)
    assert checkpoints.latest_step() == 5
    way = rf"checkpoint 5 cannot be read \(.+\): move the folder {checkpoint} away to resume from step 3$"
    with pytest.raises(ValueError, match=way) as error:
        checkpoints.position(5)
        checkpoints.restore(5, {"a": jnp.zeros(100000)})
    assert "tensorstore" not in str(error.value).lower() and "Traceback" not in capfd.readouterr().err
    shutil.rmtree(checkpoint)
    again = TrainingCheckpoints(tmp_path)
    assert again.position(3) == {"at": 3}
    np.testing.assert_array_equal(again.restore(3, {"a": jnp.zeros(100000)})["a"], np.arange(100000.0))


ARRAYS = {
    "f32": jnp.linspace(0, 1, 60000),
    "bf16": jnp.linspace(0, 1, 60000, dtype=jnp.bfloat16).reshape(30, 2000),
    "ids": jnp.arange(5, dtype=jnp.int8),
    "flags": jnp.asarray([[True, False]]),
    "step": jnp.asarray(7),
}


def test_an_altered_bit_is_refused_with_the_name_of_its_array(tmp_path, rng):
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(5, ARRAYS, {"at": [5, 0.1], "text": "ä"})
    checkpoints.close()
    np.testing.assert_equal(jax.device_get(TrainingCheckpoints(tmp_path).restore(5, ARRAYS)), jax.device_get(ARRAYS))
    file = largest_file(tmp_path / "5")
    content = bytearray(file.read_bytes())
    place = int(rng.integers(len(content) // 10, len(content) // 2))
    content[place] ^= 1 << int(rng.integers(8))
    file.write_bytes(content)
    assert TrainingCheckpoints(tmp_path).position(5) == {"at": [5, 0.1], "text": "ä"}
    for read in ("restore", "restore_parts"):
        # A bit in the frame of a compressed stream ends the decompression instead.
        with pytest.raises(ValueError, match=r"checkpoint 5 cannot be read \((the values of state/(f32|bf16) differ|.*decod)"):
            getattr(TrainingCheckpoints(tmp_path), read)(5, ARRAYS)


@pytest.mark.parametrize("shape", [(), (5,), (64,), (3, 32), (2, 3, 16)])
def test_each_flipped_bit_changes_the_checksum(shape, rng):
    bits = np.asarray(rng.integers(2**32, size=shape, dtype=np.uint32))
    here = (np.arange(bits.size) == rng.integers(bits.size)).reshape(shape).astype(np.uint32)
    flipped = [bits ^ here << np.uint32(bit) for bit in range(32)]
    assert len({int(_checksum(x)) for x in [bits, *flipped]}) == 33


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_swapped_blocks_change_the_checksum(dtype, rng):
    """Even of values that differ only in sign, or whose lower bits are zeros."""
    x = jnp.asarray(rng.normal(size=(4, 64, 64)), jnp.bfloat16).astype(dtype)
    signs = jnp.ones((64, 64), dtype).at[5, 7].set(-1)
    signed = jnp.abs(x[0, 5, 7]) * signs
    pairs = [(x, x[::-1]), (x, x.swapaxes(1, 2)), (x, jnp.roll(x, 32, 2)), (x, x.at[:, 3].set(x[:, 35]).at[:, 35].set(x[:, 3]))]
    for before, after in [*pairs, (signed, jnp.roll(signed, 16, 1)), (signed, signed.T)]:
        assert int(_checksum(before)) != int(_checksum(after))


def test_sums_of_another_algorithm_are_not_compared(tmp_path):
    saved(tmp_path, 5).close()
    file = tmp_path / "5" / "position" / "metadata"
    file.write_text(file.read_text().replace("odd weights 1", "another").replace('"at": 5', '"at": 4'))
    assert TrainingCheckpoints(tmp_path).position(5) == {"at": 4}


def test_an_altered_position_is_refused(tmp_path):
    saved(tmp_path, 5).close()
    file = tmp_path / "5" / "position" / "metadata"
    file.write_text(file.read_text().replace('"at": 5', '"at": 4'))
    with pytest.raises(ValueError, match="cannot be read .the values of position differ from the saved ones"):
        TrainingCheckpoints(tmp_path).position(5)


def test_a_checkpoint_without_checksums_is_read(tmp_path):
    """Older runs have none. An array that is read in another dtype is not compared."""
    saved(tmp_path, 5).close()
    like = {"a": jnp.zeros(100000, jnp.bfloat16)}
    read = TrainingCheckpoints(tmp_path).restore_parts(5, like)
    np.testing.assert_array_equal(read["a"], jnp.arange(100000.0).astype(jnp.bfloat16))
    file = tmp_path / "5" / "position" / "metadata"
    file.write_text('{"at": 5}')
    checkpoints = TrainingCheckpoints(tmp_path)
    assert checkpoints.position(5) == {"at": 5}
    np.testing.assert_array_equal(checkpoints.restore(5, {"a": jnp.zeros(100000)})["a"], np.arange(100000.0))


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("RESOURCE_EXHAUSTED")])
def test_a_lack_of_memory_is_no_damage(tmp_path, monkeypatch, error):
    checkpoints = saved(tmp_path, 5)

    def restore(*_, **__):
        raise Exception("Encountered error while reading array index") from error

    monkeypatch.setattr(checkpoints._manager, "restore", restore)
    with pytest.raises(Exception, match="Encountered error"):
        checkpoints.restore(5, {"a": jnp.zeros(100000)})
    checkpoints.close()
