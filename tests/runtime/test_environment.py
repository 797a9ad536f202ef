"""Commands that are printed to be pasted start this environment's program from any shell."""

import sysconfig

import pytest

from moe_jax.runtime.environment import program


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
