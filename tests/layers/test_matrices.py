"""Every matrix of a model is declared; one that is not is an error in the layout, for adapters and for FP8."""

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.checkpoint.hf_names import hf_tensors
from moe_jax.config import NAMED_CONFIGS
from moe_jax.layers.linear import Linear
from moe_jax.layers.lora import has_adapters
from moe_jax.layers.matrices import MATRICES, Declaration, check_declared, declaration_of, declared
from moe_jax.models.auto import abstract_parameters
from moe_jax.parallel.layout import lies_in_chunks, optimizer_spec, parameter_spec
from tests.helpers import tiny

PATH = ("stages", 0, "linear_attn", "in_proj_qkvz", "weight")
REFUSAL = (
    r"^no declaration tells how to split, adapt and round stages\.0\.linear_attn\.in_proj_qkvz\.weight \[2, 128, 128\]: add "
    r"the name and its role to MATRICES of moe_jax\.layers\.matrices, as Declaration\('attention'\)"
)


class Recurrent(nnx.Module):
    """The projections of a mixer that the library does not know, and its vectors."""

    def __init__(self, layers, hidden, rngs):
        self.in_proj_qkvz = Linear(hidden, hidden, stack=(layers,), param_dtype=jnp.bfloat16, rngs=rngs)
        self.dt_bias = nnx.Param(jnp.zeros((layers, 4)))
        self.A_log = nnx.Param(jnp.zeros((layers, 4)))


@pytest.fixture
def model():
    def build():
        model = tiny.model_for_fp8(param_dtype=jnp.bfloat16)
        model.stages[0].linear_attn = Recurrent(2, 128, nnx.Rngs(1))
        return model

    return nnx.eval_shape(build)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setitem(MATRICES, "in_proj_qkvz", Declaration("attention"))


def mesh(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


@pytest.mark.parametrize("of", [parameter_spec, optimizer_spec])
@pytest.mark.parametrize("shape", [(2, 128, 128), (2, 3, 128, 128)])
def test_the_layout_refuses_a_matrix_that_is_not_declared(of, shape):
    with pytest.raises(ValueError, match="how to split, adapt and round stages.0.linear_attn.in_proj_qkvz.weight"):
        of(PATH, shape, mesh(data=2, fsdp=4))
    with pytest.raises(ValueError, match="in_proj_qkvz"):
        lies_in_chunks(PATH, shape)


def test_the_layout_splits_a_matrix_that_is_declared(known):
    assert parameter_spec(PATH, (2, 128, 128), mesh(fsdp=4)) == PartitionSpec(None, "fsdp", None)


def test_a_small_matrix_is_whole(monkeypatch):
    monkeypatch.setitem(MATRICES, "conv1d", Declaration("small", 3, split=()))
    path = ("stages", 0, "linear_attn", "conv1d", "weight")
    assert parameter_spec(path, (2, 128, 1, 4), mesh(fsdp=4)) == PartitionSpec(None, None, None, None)
    assert not lies_in_chunks(path, (2, 128, 1, 4)) and lies_in_chunks(path, (1, 2, 1, 128, 1, 4))


def test_adapters_are_refused_at_once(model):
    with pytest.raises(ValueError, match=REFUSAL):
        add_lora(model, LoraSettings(targets=("q_proj",)), rngs=nnx.Rngs(0))
    assert not has_adapters(model) and isinstance(model.norm.weight, nnx.Param)


def test_adapters_know_a_matrix_that_is_declared(model, known):
    summary = add_lora(model, LoraSettings(rank=2, targets=("in_proj_qkvz",)), rngs=nnx.Rngs(0))
    assert summary.kinds["attention"].parameters == 2 * 2 * (128 + 128)


def test_dense_groups_are_refused_at_once(model):
    model.set_precision("fp8")  # experts alone
    model.set_precision(None)
    with pytest.raises(ValueError, match=REFUSAL):
        model.set_precision("fp8", ("attention",))
    assert model.precision is None and not model.stages[0].self_attn.q_proj.in_fp8


def test_dense_groups_know_a_matrix_that_is_declared(model, known):
    model.set_precision("fp8", ("attention",))
    assert model.stages[0].linear_attn.in_proj_qkvz.in_fp8 and not model.lm_head.in_fp8
    model.set_precision("fp8")
    assert not model.stages[0].linear_attn.in_proj_qkvz.in_fp8


def test_roles():
    layer = ("stages", 0)
    roles = {
        ("embed_tokens", "weight"): "embedding",
        ("lm_head", "weight"): "head",
        ("lm_head",): "head",
        (*layer, "self_attn", "kv_b_proj", "weight"): "attention",
        (*layer, "mlp", "down_proj", "weight"): "mlp",
        (*layer, "block", "mlp", "shared_experts", "down_proj", "weight"): "shared_experts",
        (*layer, "mlp", "experts", "down_proj"): "experts",
        (*layer, "mlp", "router", "weight"): "router",
        (*layer, "eh_proj", "weight"): "predictor",
        (*layer, "self_attn", "q_proj", "bias"): "small",
        (*layer, "self_attn", "q_proj", "lora", "a"): "small",
    }
    assert {path: declared(path).role for path in roles} == roles
    assert declared(PATH) is None and declaration_of((*layer, "A_log"), (2, 4)).axes == 1


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-30b-a3b", "deepseek-v3", "deepseek-v2-lite"])
def test_every_matrix_of_the_named_models_is_declared(name):
    parameters = abstract_parameters(NAMED_CONFIGS[name])
    check_declared(parameters.items())
    for path, leaf in parameters.items():
        assert declaration_of(path, leaf.shape).axes == leaf.ndim - (path[0] == "stages"), path
    assert {tensor.path for tensor in hf_tensors(NAMED_CONFIGS[name])} == parameters.keys()
