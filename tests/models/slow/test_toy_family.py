"""A family with sinks, biases, windows and another activation: the steps of CONTRIBUTING.md's recipe "A model", one by one.

It needs its own file (tests/helpers/toy_gpt_oss.py) and a line in each of three tables.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import moe_jax
from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.cli import main
from moe_jax.config.hf_json import CONFIG_CLASSES, config_from_dict, config_to_dict
from moe_jax.config.named import NAMED_CONFIGS
from moe_jax.layers.matrices import check_declared
from moe_jax.models.auto import MODEL_CLASSES, abstract_parameters
from moe_jax.train import init_state, make_optimizer, make_train_step
from tests.helpers.adapted_models import make_batch
from tests.helpers.toy_gpt_oss import GptOss, GptOssConfig, parameters_of

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5, sliding_window=4)
LAYER_TYPES = ("sliding_attention", "full_attention")
CONFIG = GptOssConfig(
    **SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
    layer_types=LAYER_TYPES, use_sliding_window=True,
)  # fmt: skip


@pytest.fixture
def family(monkeypatch):
    """The lines of steps 1, 2 and 6."""
    monkeypatch.setitem(CONFIG_CLASSES, "toy_gpt_oss", GptOssConfig)
    monkeypatch.setitem(MODEL_CLASSES, "toy_gpt_oss", GptOss)
    monkeypatch.setitem(NAMED_CONFIGS, "toy-gpt-oss", CONFIG)
    yield
    abstract_parameters.cache_clear()


def test_step_1_every_field_is_read_or_refused(family):
    values = config_to_dict(CONFIG)
    assert config_from_dict(values) == CONFIG
    with pytest.raises(ValueError, match="config of toy_gpt_oss is not understood: unknown field router_bias=True"):
        config_from_dict(values | {"router_bias": True})
    assert [(kind.sinks, kind.biases, kind.head_norms) for kind in CONFIG.layer_mixers] == 2 * [(True, True, False)]
    assert CONFIG.layer_windows == (4, None)


def test_steps_2_to_4_a_checkpoint_comes_back_bit_for_bit(family, tmp_path):
    """All matrices are declared, and all tensors have names and shapes by the model's paths."""
    model = moe_jax.from_config(CONFIG, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    check_declared((path, leaf.get_value()) for path, leaf in nnx.to_flat_state(state))
    moe_jax.save_pretrained(model, tmp_path)
    again = moe_jax.from_pretrained(tmp_path, dtype=jnp.float32)
    assert isinstance(again, GptOss) and again.config == CONFIG
    for (path, a), b in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(nnx.state(again)), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def test_step_6_a_plan_finds_its_name(family, capsys):
    main("plan toy-gpt-oss --devices 1 --rows 1 --sequence-length 64".split())
    assert "toy-gpt-oss, 1 x NVIDIA H200" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_step_trains_it(family):
    model, optimizer = moe_jax.from_config(CONFIG, rngs=nnx.Rngs(0)), make_optimizer(1e-2)
    state = init_state(model, optimizer)
    before = jax.tree.map(np.array, state.params)
    state, metrics = make_train_step(nnx.graphdef(model), optimizer)(state, make_batch(vocab=SIZES["vocab_size"]))
    same = jax.tree.map(np.array_equal, before, state.params)
    assert np.isfinite(metrics["loss"]) and not any(jax.tree.leaves(same))


def test_adapters_refuse_biases_of_experts(family):
    model = moe_jax.from_config(CONFIG, rngs=nnx.Rngs(0))
    add_lora(model, LoraSettings(rank=2), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="experts with biases have matrices with gradients of their own"):
        jax.eval_shape(lambda model: model(jnp.zeros((1, 4), jnp.int32)).logits, model)


@pytest.fixture
def theirs(rng):
    """transformers' model, with a router without a bias, and experts whose activation reaches its limits."""
    options = dict(num_local_experts=4, num_experts_per_tok=2, layer_types=list(LAYER_TYPES), attn_implementation="eager")
    config = transformers.GptOssConfig(**SIZES, **options, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    model = transformers.GptOssForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        scale = 0 if name.endswith("router.bias") else 3 if "gate_up_proj" in name else 0.3
        offset = 1 if name.endswith("norm.weight") else 0
        parameter.data = torch.tensor(offset + scale * rng.normal(size=parameter.shape), dtype=torch.float32)
    return model


def test_step_5_logits_and_gradients_equal_those_of_transformers(theirs, rng):
    ours = GptOss(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))
    state = nnx.state(ours, nnx.Param)
    values = {name: parameter.detach().numpy() for name, parameter in theirs.named_parameters()}
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, parameters_of(values)))
    nnx.update(ours, state)
    tokens = rng.integers(0, SIZES["vocab_size"], size=(2, 12))
    direction = rng.normal(size=(2, 12, SIZES["vocab_size"])).astype(np.float32)
    graph, params = nnx.split(ours)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def value_and_gradients(params):
        logits = nnx.merge(graph, params)(jnp.asarray(tokens)).logits
        return jnp.sum(logits * direction), logits

    (_, logits), gradients = value_and_gradients(params)
    expected = theirs(torch.tensor(tokens)).logits
    (expected * torch.tensor(direction)).sum().backward()
    np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=1e-3, atol=1e-3)
    wanted = parameters_of({name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None})
    for path, leaf in jax.tree.leaves_with_path(wanted):
        actual = nnx.to_pure_dict(gradients)
        for key in path:
            actual = actual[key.key]
        scale = np.abs(leaf).max()
        np.testing.assert_allclose(actual / scale, leaf / scale, atol=2e-4, err_msg=jax.tree_util.keystr(path))
    new = np.array(moe_jax.generate(ours, jnp.asarray(tokens[:, :5]), max_new_tokens=4, temperature=0.0))
    sequences = np.concatenate([tokens[:, :5], new], axis=1)
    best = jnp.argmax(jax.jit(lambda params: nnx.merge(graph, params)(sequences).logits)(params), axis=-1)
    np.testing.assert_array_equal(new, best[:, 4:-1])
