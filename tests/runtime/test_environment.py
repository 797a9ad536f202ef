"""Commands keep compiled programs in the user's cache folder, unless the user has decided otherwise."""

import pytest

from moe_jax.runtime.environment import set_defaults

FOLDER = "JAX_COMPILATION_CACHE_DIR"


def with_defaults(**environment):
    set_defaults(environment)
    return environment


def test_programs_are_kept_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = with_defaults()
    assert found[FOLDER] == str(tmp_path / ".cache" / "moe_jax" / "xla")
    assert with_defaults(XDG_CACHE_HOME=str(tmp_path / "xdg"))[FOLDER] == str(tmp_path / "xdg" / "moe_jax" / "xla")
    # A small model's programs compile in less than a second each. With a size JAX locks the folder.
    assert found["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    assert int(found["JAX_COMPILATION_CACHE_MAX_SIZE"]) > 1e9
    # JAX makes the folder once there is a program.
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["/scratch/programs", ""])
def test_a_folder_of_the_users_stays_with_all_its_settings(folder):
    found = with_defaults(**{FOLDER: folder})
    assert found.pop(FOLDER) == folder and not [name for name in found if "CACHE" in name]


def test_a_setting_of_the_users_stays(tmp_path):
    smallest = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    assert with_defaults(XDG_CACHE_HOME=str(tmp_path), **{smallest: "5"})[smallest] == "5"


def test_a_home_that_cannot_be_written_to_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert FOLDER not in with_defaults(XDG_CACHE_HOME=str(tmp_path))
