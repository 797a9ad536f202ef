"""Commands that are printed to be pasted work in any shell. Compiled programs are kept in the user's cache folder."""

import sysconfig

import pytest

from moe_jax.runtime.environment import program, set_defaults

FOLDER = "JAX_COMPILATION_CACHE_DIR"


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """The folder of an environment's programs, which PATH does not have, in the current folder."""
    folder = tmp_path / "a b" / "bin"
    folder.mkdir(parents=True)
    (folder / "moe-jax").touch(mode=0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(folder))
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_path_where_the_name_starts_nothing_or_another(scripts, tmp_path, monkeypatch):
    assert program() == "'a b/bin/moe-jax'"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "moe-jax").touch(mode=0o755)
    assert program() == "'a b/bin/moe-jax'"
    monkeypatch.chdir(scripts)
    assert program() == f"'{scripts / 'moe-jax'}'"


def test_the_name_where_it_starts_the_same_program(scripts, tmp_path, monkeypatch):
    (tmp_path / "other").symlink_to(scripts)
    assert program() == "moe-jax"


def test_the_name_where_there_is_no_such_program(scripts):
    assert program("pip") == "pip"


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
