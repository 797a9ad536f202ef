"""A model with adapters equals one with changed matrices: the loss and the gradient of every factor, in f32."""

import jax
import pytest
from flax import nnx

from moe_jax.adapters.names import targets_of
from moe_jax.models.execution import Execution
from moe_jax.train import LossWeights, loss
from tests.helpers.adapted_models import assert_near, make_batch, small_model, with_adapters

WEIGHTS = LossWeights(aux_loss_coef=0.3, z_loss_coef=0.1)


@pytest.mark.parametrize(
    "model_type, settings, remat",
    [
        pytest.param("qwen3", {"targets": ("attention", "mlp", "embed_tokens", "head")}, False, marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", {"use_rslora": True}, True, marks=pytest.mark.thorough),
        ("qwen3_moe", {"shared_outer": True, "ranks": {"experts": 3}}, True),
        pytest.param("deepseek_v3", {"shared_outer": True, "ranks": {"experts": 3}}, True, marks=pytest.mark.thorough),
    ],
)
def test_changed_matrices(model_type, settings, remat):
    """The plain form makes W + scale * b a of every matrix, and JAX differentiates through it."""
    # A stage without experts would be the dense model's.
    model = small_model(model_type, **dict(first_k_dense_replace=0) if model_type == "deepseek_v3" else {})
    model.execution = Execution(remat=remat)
    plain_graph, plain_weights = nnx.split(model)
    graph, factors, frozen = nnx.split(with_adapters(model, **settings), nnx.LoRAParam, ...)
    batch = make_batch()

    def changed(factors):
        weights = dict(nnx.to_flat_state(plain_weights))
        for target in targets_of(nnx.merge(graph, factors, frozen)):
            if target.found is not None:
                weight = weights[(*target.path, target.weight)]
                change = target.found.change.reshape(weight.shape)
                weights[(*target.path, target.weight)] = weight.replace(weight.get_value() + change)
        return nnx.merge(plain_graph, nnx.from_flat_state(weights.items()))

    def of(build):
        def value(factors):
            return loss(build(factors), batch, WEIGHTS)[0]

        return jax.jit(jax.value_and_grad(value))(factors)

    found, gradients = of(lambda factors: nnx.merge(graph, factors, frozen))
    expected, plain_gradients = of(changed)
    assert_near(found, expected, "loss")
    for (path, gradient), other in zip(nnx.to_flat_state(gradients), jax.tree.leaves(plain_gradients), strict=True):
        assert_near(gradient.get_value(), other, path)
