"""Sizes of an engine, as options of a command."""

import pytest

from moe_jax.commands.options import LimitOptions
from moe_jax.config import NAMED_CONFIGS
from moe_jax.serving.engine import check_config

QWEN = NAMED_CONFIGS["qwen3-30b-a3b"]


@pytest.mark.parametrize("length, warns", [(None, False), (40960, False), (40961, True)])
def test_a_length_beyond_the_models_positions_warns(length, warns, caplog):
    limits = LimitOptions(max_length=length).engine_limits(QWEN, 1)
    assert limits.max_length == (8192 if length is None else length)
    assert ("--max-length 40961 is more than the 40960 positions of the model" in caplog.text) == warns


def test_yarn_extends_the_positions(caplog):
    assert LimitOptions(max_length=163840).engine_limits(NAMED_CONFIGS["deepseek-v3"], 1).max_length == 163840
    assert not caplog.records


def test_pages_hold_the_length_that_is_asked_for():
    assert LimitOptions(max_length=193, num_pages=4).engine_limits(QWEN, 1).max_length == 193
    with pytest.raises(ValueError, match="--max-length 194 is more than the 193 tokens that --num-pages 4 holds"):
        LimitOptions(max_length=194, num_pages=4).engine_limits(QWEN, 1)
    # The default length is that of the model: a request that the pages do not hold is refused.
    assert LimitOptions(num_pages=4).engine_limits(QWEN, 1).max_length == 8192


def test_pages_in_fp8_hold_no_latents():
    """Refused before weights are read."""
    limits = LimitOptions(kv_dtype="fp8").engine_limits(QWEN, 1)
    check_config(QWEN, limits.kv_dtype)
    with pytest.raises(ValueError, match='pages of this model hold latents: use kv_dtype="model"'):
        check_config(NAMED_CONFIGS["deepseek-v3"], limits.kv_dtype)
