"""Steps without passes, for tests of what surrounds them in a run, and steps that several runs share."""

import pytest

from tests.helpers import shared_steps, steps_without_passes


@pytest.fixture
def steps_that_learn_nothing(monkeypatch):
    """For models without experts."""
    steps_without_passes.put_in_place(monkeypatch, steps_without_passes.learn_nothing)


@pytest.fixture
def steps_that_add(monkeypatch):
    """For models without experts."""
    steps_without_passes.put_in_place(monkeypatch, steps_without_passes.add)


@pytest.fixture(scope="module")
def one_step_for_all():
    """Runs of a module that compute the same share a compiled step."""
    with pytest.MonkeyPatch.context() as patch:
        shared_steps.share(patch)
        yield
