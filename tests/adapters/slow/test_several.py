"""Several adapters of one model: each computes as it does alone, and switching compiles nothing."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.adapters import load_adapter, load_adapters, merge_adapter, save_adapter
from tests.helpers import seeds
from tests.helpers.adapted_models import assert_near, logits_of, with_adapters
from tests.helpers.hf_reference import load_ours, reference

SETTINGS = {"small": dict(targets=("attention",), rank=2), "large": dict(targets=("q_proj", "mlp"), rank=6)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(transformers' model, {name: folder})."""
    hf, folder = reference("qwen3", 0, num_hidden_layers=2), tmp_path_factory.mktemp("adapters")
    for name, settings in SETTINGS.items():
        save_adapter(with_adapters(load_ours(hf), **settings), folder / name)
    return hf, {name: folder / name for name in SETTINGS}


def test_switching(folders):
    hf, places = folders
    tokens, traces = jnp.asarray(seeds.rng().integers(0, 97, (2, 9))), []

    @nnx.jit
    def logits(model, tokens):
        traces.append(1)
        return model(tokens).logits

    expected = {None: logits_of(load_ours(hf), tokens)}
    for name, folder in places.items():
        alone = load_ours(hf)
        load_adapter(alone, folder)
        expected[name] = logits_of(alone, tokens)
    assert np.abs(expected["small"] - expected["large"]).max() > 1e-2
    model = load_ours(hf)
    named = load_adapters(model, places)
    assert named.names == ("small", "large") and named.active == "small"
    assert_near(logits(model, tokens), expected["small"], "first", 1e-5)
    for name in ("large", None, "small", "large"):
        named.use(name)
        assert named.active == name
        assert_near(logits(model, tokens), expected[name], str(name), 1e-5)
    assert len(traces) == 1
    merge_adapter(model)
    assert_near(logits_of(model, tokens), expected["large"], "merged", 1e-5)


def test_refused(folders, tmp_path):
    hf, places = folders
    model = load_ours(hf)
    with pytest.raises(FileNotFoundError, match="has no adapter_config.json"):
        load_adapters(model, places | {"gone": tmp_path})
    with pytest.raises(ValueError, match="no adapters to load"):
        load_adapters(model, {})
    named = load_adapters(model, places)
    with pytest.raises(ValueError, match="no adapter 'other'; there are 'small', 'large'"):
        named.use("other")
    assert named.active == "small"


def test_merged_adapters_switch_no_more(folders):
    hf, places = folders
    model = load_ours(hf)
    named = load_adapters(model, places)
    merge_adapter(model)
    with pytest.raises(ValueError, match="no adapters any more"):
        named.use("small")
