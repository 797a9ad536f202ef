"""Dense matrices of layers in FP8: the groups they belong to, errors of a block, frozen codes, and models with all groups."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.kernels import Precision, fp8_matmul, quantise_matrices
from moe_jax.kernels.experts.fp8.dense import DenseCopies
from moe_jax.layers import fp8
from moe_jax.layers.linear import Linear
from moe_jax.layers.lora import Frozen
from moe_jax.layers.mlp import MLP
from moe_jax.layers.moe import MoE, fp8_copies, set_precision
from moe_jax.layers.quantised import BlockScaled
from moe_jax.layers.tickets import WeightTicket, defer_weight_gradients
from tests.helpers import seeds, tiny

GROUPS = "attention", "shared_experts", "mlp"


def _deepseek():
    """A dense layer and one with experts; the sizes of attention are no multiples of 128."""
    config = tiny.deepseek_config(num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=4, n_group=1, topk_group=1)
    sizes = dict(hidden_size=128, moe_intermediate_size=128, intermediate_size=192, kv_lora_rank=64, q_lora_rank=96)
    config = replace(config, **sizes, num_nextn_predict_layers=0)
    return moe_jax.from_config(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.float32)


def _in_fp8(model):
    return {
        ".".join(map(str, path)) for path, module in nnx.iter_modules(model) if isinstance(module, Linear) and module.in_fp8
    }


def test_groups():
    model = nnx.eval_shape(_deepseek)
    attention = {
        f"stages.{stage}.self_attn.{name}"
        for stage in (0, 1)
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    }
    names = "gate_proj", "up_proj", "down_proj"
    wanted = {
        "attention": attention,
        "shared_experts": {f"stages.1.mlp.shared_experts.{name}" for name in names},
        "mlp": {f"stages.0.mlp.{name}" for name in names},
    }
    for group, paths in wanted.items():
        model.set_precision("fp8", (group,))
        assert model.precision == Precision(dense=(group,))
        assert _in_fp8(model) == paths
    model.set_precision(Precision(dense=GROUPS))
    assert _in_fp8(model) == set().union(*wanted.values())
    model.set_precision("fp8")
    assert not _in_fp8(model)
    with pytest.raises(ValueError, match="needs a precision that is named"):
        model.set_precision(Precision(), ("attention",))
    with pytest.raises(ValueError, match="'mlp' is for dense layers, and this model has none"):
        nnx.eval_shape(tiny.model_for_fp8).set_precision("fp8", ("mlp",))
    with pytest.raises(ValueError, match="dense='head' must be of 'attention', 'shared_experts', 'mlp'"):
        Precision(dense=("head",))
    model.set_precision("fp8", ("mlp", "attention", "attention"))
    assert model.precision == Precision(dense=("attention", "mlp"))
    for wrong in ("attention", ["attention"]):
        with pytest.raises(ValueError, match=r"must be a tuple of groups, as \('attention',\)"):
            model.set_precision("fp8", wrong)


def test_a_precision_that_was_taken_back():
    """The model is then equal to one for which none was chosen: each takes over from the other in an engine."""
    model = nnx.eval_shape(tiny.model_for_fp8)
    expected = nnx.graphdef(model)
    model.set_precision("fp8", ("attention",))
    assert nnx.graphdef(model) != expected
    model.set_precision("bf16")
    assert nnx.graphdef(model) == expected


def test_a_block():
    """Result and every gradient of shared experts are within 0.08 of f32 in norm, and point where these point."""
    rng = seeds.rng()
    x, dy = rng.normal(size=(2, 64, 256)), rng.normal(size=(2, 64, 256)) * 10.0 ** rng.uniform(-3, 0, (2, 64, 1))
    x[..., ::64] *= 4
    moe = MoE(256, 128, 4, 2, shared_intermediate_size=384, precision=Precision(dense=GROUPS), stddev=0.06, rngs=nnx.Rngs(0))
    mlp, exact = moe.shared_experts, MLP(256, 384, rngs=nnx.Rngs(0))
    nnx.update(exact, nnx.state(mlp))
    found, wanted = (
        _with_gradients(m, jnp.asarray(x, dtype), jnp.asarray(dy, dtype))
        for m, dtype in ((mlp, jnp.bfloat16), (exact, jnp.float32))
    )
    for a, b in zip(found, wanted, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        norm = np.linalg.norm(b)
        assert 0.03 * norm <= np.linalg.norm(a - b) <= 0.08 * norm
        assert np.vdot(a, b) >= 0.997 * norm * np.linalg.norm(a)


def _with_gradients(module, x, dy):
    graph, params = nnx.split(module)

    @jax.jit
    def run(params, x, dy):
        y, pullback = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        return y, *jax.tree.leaves(pullback(dy))

    return run(params, x, dy)


def test_frozen_codes_are_multiplied_as_they_are():
    rng = seeds.rng()
    x, w = jnp.asarray(rng.normal(size=(5, 256)), jnp.bfloat16), jnp.asarray(rng.normal(size=(128, 256)), jnp.float32)
    linear = Linear(256, 128, rngs=nnx.Rngs(0))
    linear.weight, linear.in_fp8 = Frozen(BlockScaled.fp8(w, jnp.bfloat16)), True
    given = linear.matrix.in_fp8
    assert given.rounded.values is linear.weight.get_value().codes
    expected = jax.jit(lambda x: fp8_matmul(x, jnp.zeros_like(w), DenseCopies(quantise_matrices(w))))(x)
    np.testing.assert_array_equal(jax.jit(lambda x: linear(x))(x), expected)
    assert not jax.tree.leaves(fp8_copies(linear))


def test_an_option_that_is_off_changes_no_program():
    """The program is that of a block which no precision was chosen for; with the option on it has FP8 in it."""
    texts = []
    for precision in (None, Precision(), Precision(dense=("attention", "mlp")), Precision(dense=("shared_experts",))):
        moe = MoE(128, 128, 4, 2, shared_intermediate_size=128, rngs=nnx.Rngs(0))
        if precision is not None:
            set_precision(moe, precision)
        graph, params = nnx.split(moe.shared_experts)
        run = jax.jit(jax.grad(lambda params, x, graph=graph: nnx.merge(graph, params)(x).astype(jnp.float32).sum()))
        texts.append(run.lower(params, jnp.ones((8, 128), jnp.bfloat16)).as_text())
    assert texts[0] == texts[1] == texts[2]
    assert "f8E4M3" not in texts[0] and "f8E4M3" in texts[3]


def test_tickets_are_refused():
    linear = Linear(128, 128, stack=(1,), rngs=nnx.Rngs(0))
    linear.in_fp8 = True
    x = jnp.ones((4, 128), jnp.bfloat16)
    defer_weight_gradients(linear, x)
    assert isinstance(linear.ticket, WeightTicket)
    with pytest.raises(ValueError, match="weight tickets hold operands in bf16"):
        linear(x)


def test_every_matrix_of_a_group_multiplies_in_fp8(monkeypatch):
    model = nnx.eval_shape(_deepseek)
    model.set_precision("fp8", GROUPS)
    found = set()
    monkeypatch.setattr(fp8, "fp8_matmul", lambda x, w, copies: found.add(w.shape) or fp8_matmul(x, w, copies))
    jax.eval_shape(lambda model, tokens: model(tokens).logits, model, jnp.zeros((1, 4), jnp.int32))
    linears = (module for _, module in nnx.iter_modules(model) if isinstance(module, Linear) and module.in_fp8)
    assert found == {linear.weight.shape[1:] for linear in linears}
    assert len(found) == 5 + 1 + 2, "of attention, of shared experts, which are all alike, and of the dense layer"


@pytest.mark.thorough
def test_a_model():
    """With all groups in FP8 the loss and all gradients are finite, and logits are close to bf16's with the same experts."""
    model, rng = _deepseek(), seeds.rng()
    tokens = jnp.asarray(rng.integers(0, 264, (2, 24)), jnp.int32)
    wanted = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    model.set_precision("fp8", GROUPS)
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def of_logits(logits):
        rows = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        return -jnp.take_along_axis(rows, tokens[:, 1:, None], axis=-1).mean()

    def loss(params):
        logits = nnx.merge(graph, params, others)(tokens, expert_ids=wanted.expert_ids, remat=True).logits
        return of_logits(logits), logits

    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert np.isfinite(value) and all(np.isfinite(g).all() and np.any(g) for g in jax.tree.leaves(gradients))
    exact = np.asarray(wanted.logits, np.float64)
    # Weights of 0.1 make the layers' outputs larger than the embeddings, so that errors add up. Unlike logits differ by 1.4.
    assert 0 < np.linalg.norm(np.asarray(logits, np.float64) - exact) <= 0.3 * np.linalg.norm(exact)
    np.testing.assert_allclose(value, of_logits(wanted.logits), atol=0.1)
