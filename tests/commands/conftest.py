"""What every test of a command runs under."""

import logging

import pytest


@pytest.fixture(autouse=True)
def own_log_level():
    """A command that sets the level of the library's log does not set it for later tests."""
    yield
    logging.getLogger("moe_jax").setLevel(logging.NOTSET)
