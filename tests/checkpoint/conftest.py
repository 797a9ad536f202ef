"""Fixtures that the checkpoint tests share."""

import pytest

from tests.helpers.checkpoint_helpers import write_checkpoint


@pytest.fixture
def moe_folder(tmp_path):
    """A Qwen3-MoE checkpoint in several files, its middle layer dense."""
    folder = tmp_path / "moe"
    write_checkpoint(folder, mlp_only_layers=[1])
    return folder
