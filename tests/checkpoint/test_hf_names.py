"""The table of names covers every tensor of a checkpoint and every element of every parameter, once."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.checkpoint.hf_names import export, fused_tensors, hf_tensors
from moe_jax.config import NAMED_CONFIGS, Qwen3MoeConfig, load_config
from moe_jax.models.auto import from_config
from tests.helpers.checkpoint_helpers import parameters, read_weights, write_checkpoint

VARIANTS = {
    "dense": dict(moe=False),
    "dense tied, biases": dict(moe=False, tie_word_embeddings=True, attention_bias=True),
    "moe": dict(),
    "moe with dense layers": dict(mlp_only_layers=[1]),
    "moe every second layer, tied, biases": dict(decoder_sparse_step=2, tie_word_embeddings=True, attention_bias=True),
    "deepseek": dict(deepseek=True),
    "deepseek, whole queries, two shared experts, biases": dict(
        deepseek=True, q_lora_rank=None, n_shared_experts=2, attention_bias=True, tie_word_embeddings=True
    ),
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_names_and_shapes_equal_those_of_transformers(tmp_path, options):
    """Every element of every parameter has one name."""
    write_checkpoint(tmp_path, **options)
    config = load_config(tmp_path)
    stored = {name: tuple(tensor.shape) for name, tensor in read_weights(tmp_path).items()}
    assert {tensor.name: tensor.shape for tensor in hf_tensors(config)} == stored
    abstract = nnx.eval_shape(lambda: from_config(config, rngs=nnx.Rngs(0)))
    count = {path: np.zeros(leaf.shape, int) for path, leaf in nnx.to_flat_state(nnx.state(abstract))}
    for tensor in hf_tensors(config):
        assert count[tensor.path][tensor.index].shape == tensor.shape
        count[tensor.path][tensor.index] += 1
    assert all((seen == 1).all() for seen in count.values())


def test_export_takes_numpy_trees_such_as_gradients(moe_folder):
    """The tensors of a model are compared in test_hf_load.py."""
    model = from_pretrained(moe_folder, dtype=jnp.float32)
    stored, doubled = read_weights(moe_folder), {path: 2 * array for path, array in parameters(model).items()}
    exported = dict(export(model.config, doubled))
    assert exported.keys() == stored.keys()
    for name, array in exported.items():
        np.testing.assert_array_equal(array, 2 * stored[name].numpy(), err_msg=name)


def test_fused_tensors_are_whole_layers_of_the_experts():
    config = Qwen3MoeConfig(num_hidden_layers=4, decoder_sparse_step=2, num_experts=8)
    names = [tensor.name for tensor in fused_tensors(config)]
    assert names == [f"model.layers.{layer}.mlp.experts.{name}" for layer in (1, 3) for name in ("gate_up_proj", "down_proj")]
    assert [tensor.shape for tensor in fused_tensors(config)][:2] == [(8, 1536, 2048), (8, 2048, 768)]


def test_the_30b_has_its_published_number_of_parameters():
    tensors = hf_tensors(NAMED_CONFIGS["qwen3-30b-a3b"])
    assert len(tensors) == 18867
    assert sum(torch.Size(tensor.shape).numel() for tensor in tensors) == 30_532_122_624
