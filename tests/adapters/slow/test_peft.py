"""PEFT itself writes fused experts, and we read them: the same logits, loss, and gradient of every factor, in f32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

from moe_jax.adapters import load_adapter
from moe_jax.adapters.names import targets_of
from tests.helpers import seeds
from tests.helpers.adapted_models import assert_near
from tests.helpers.hf_reference import load_ours, reference

RANK, ALPHA = 4, 6.0


def of_peft(model, target, factor):
    """Gradients of PEFT's factors of one matrix, stacked over layers, and of experts taken apart as its code does."""
    stacked = []
    for layer in model.base_model.model.model.layers:
        module = layer.mlp.experts if target.kind == "experts" else getattr(layer.self_attn, target.name)
        if target.weight == "gate_up_proj":
            module = module.base_layer
        gradient = getattr(module, f"lora_{factor}")["default"].weight.grad.numpy()
        if target.kind == "experts" and factor == "A":
            gradient = gradient.reshape(-1, RANK, gradient.shape[1])
        elif target.kind == "experts":
            gradient = gradient.reshape(len(gradient), RANK, -1).transpose(2, 0, 1)
        stacked.append(gradient)
    return np.stack(stacked)


@pytest.mark.filterwarnings("ignore")
def test_fused_experts_of_peft(tmp_path):
    peft = pytest.importorskip("peft")
    hf = reference("qwen3_moe", seeds.integer(), num_hidden_layers=2)
    ours, tokens = load_ours(hf), seeds.rng().integers(0, 97, (2, 11))
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(hf, config).eval()
    with torch.no_grad():
        for name, factor in theirs.named_parameters():
            if "lora_" in name:
                factor.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path)
    load_adapter(ours, tmp_path)

    logits = theirs(torch.tensor(tokens)).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.tensor(tokens[:, 1:]).flatten()).backward()

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradients_of(factors):
        found = nnx.merge(graph, factors, frozen)(jnp.asarray(tokens)).logits
        return optax.softmax_cross_entropy_with_integer_labels(found[:, :-1], tokens[:, 1:]).mean(), found

    graph, factors, frozen = nnx.split(ours, nnx.LoRAParam, ...)
    found, our_logits = gradients_of(factors)
    assert_near(our_logits, logits.detach().numpy(), "logits")
    gradients = nnx.merge(graph, found, frozen)
    adapted = [target for target in targets_of(gradients) if target.found is not None]
    assert len(adapted) == 6
    for target in adapted:
        # `load_adapter` puts alpha / rank into b.
        assert_near(target.found.a[...], of_peft(theirs, target, "A"), (target.path, "a"))
        assert_near(target.found.b[...] * (ALPHA / RANK), of_peft(theirs, target, "B"), (target.path, "b"))
