"""Dropout of adapters: the same numbers forward and again in the backward pass, others each step, none without training."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax.adapters import LoraSettings, add_lora, load_adapter, save_adapter
from moe_jax.adapters.source import CONFIG_FILE
from moe_jax.kernels.low_rank import Dropout, LowRank
from moe_jax.layers.linear import TicketedMatrix, linear_map
from moe_jax.layers.lora import Adapter, draw_dropout
from moe_jax.models.execution import Execution
from moe_jax.train import NextToken, gradients_fn, init_state, make_train_step
from moe_jax.train.objective import as_objective
from moe_jax.train.on_devices import with_dropout_seeds
from tests.helpers import seeds
from tests.helpers.adapted_models import assert_near, make_batch, small_model, with_adapters
from tests.helpers.hf_reference import load_ours, reference

TARGETS = ("attention", "mlp")


def adapted():
    return with_adapters(small_model("qwen3"), targets=TARGETS, dropout=0.3)


def gradients_of(model, batch, remat, steps):
    """Returns (loss, gradients) of a pass of training at each of the steps."""
    objective, state = as_objective(NextToken(), 1), init_state(model, optax.sgd(0.1))
    compute = jax.jit(gradients_fn(objective, nnx.graphdef(model), Execution(remat=remat)))
    for step in steps:
        seeded = with_dropout_seeds(objective.prepare(batch, jnp.ones(())), jnp.asarray(step))
        found = compute(state.params, state.fixed, seeded)
        yield float(found.value), jax.tree.leaves(found.gradients)


def test_input_of_a_alone():
    """x W^T is whole, and a's input has a part of x, scaled up."""
    rng = seeds.rng()
    x, w, a, b = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((400, 16), (8, 16), (3, 16), (8, 3)))
    dropout = Dropout(jax.random.bits(jax.random.PRNGKey(3), (400,), "uint32"), 0.25)
    dropped = dropout(x)
    assert_near(linear_map(x, TicketedMatrix(w, None, LowRank(a, b), dropout)), x @ w.T + dropped @ a.T @ b.T, "map")
    kept = np.asarray(dropped != 0)
    assert abs(kept.mean() - 0.75) < 0.03
    np.testing.assert_allclose(dropped[kept], x[kept] / 0.75, rtol=1e-6)


@pytest.mark.thorough
def test_recomputed_layers_drop_the_same():
    model, batch = adapted(), make_batch()
    ((value, gradients),) = gradients_of(model, batch, False, steps=[0])
    (again, of_remat), (other, _) = gradients_of(model, batch, True, steps=[0, 1])
    assert abs(value - again) < 1e-5 * value
    for a, b in zip(gradients, of_remat, strict=True):
        assert_near(b, a, "gradients", 1e-4)
    assert abs(other - value) > 1e-4


def test_each_layer_and_matrix_has_its_own_key():
    model = adapted()
    draw_dropout(model, jnp.arange(6, dtype=jnp.uint32).reshape(2, 3))
    seeds_of_tokens = [
        int(seed)
        for module in nnx.iter_modules(model)
        if (key := getattr(module[1], "key", None))
        for seed in np.asarray(key[...]).ravel()
    ]
    assert len(set(seeds_of_tokens)) == len(seeds_of_tokens) == 2 * 7 * 6


def test_training_continues_bit_for_bit():
    """Masks follow from the state's step alone: from a copy of the state the same steps have the same bits."""
    model, optimizer, batch = adapted(), optax.adamw(1e-2), make_batch()
    step, state = make_train_step(nnx.graphdef(model), optimizer, gradient_accumulation=2), init_state(model, optimizer)
    losses = []
    for number in range(4):
        if number == 2:
            kept = jax.tree.map(jnp.copy, state)
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    for expected in losses[2:]:
        kept, metrics = step(kept, batch)
        assert float(metrics["loss"]) == expected
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(kept.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_none_without_training():
    model, tokens = adapted(), jnp.arange(12).reshape(2, 6)
    same = nnx.clone(model)
    for _, module in nnx.iter_modules(same):
        if hasattr(module, "dropout"):
            module.dropout = 0.0
    np.testing.assert_array_equal(model(tokens).logits, same(tokens).logits)


@pytest.mark.parametrize("targets", [None, ("router", "attention")])
def test_refused_for_kernels(targets):
    model = small_model("qwen3_moe")
    with pytest.raises(
        ValueError, match="dropout=0.1 is only for attention and mlp, but targets include (experts|router), whose"
    ):
        add_lora(model, LoraSettings(targets=targets, dropout=0.1), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dropout=1 must be a number from 0 to below 1"):
        LoraSettings(dropout=1)


@pytest.mark.filterwarnings("ignore")
def test_peft_reads_it(tmp_path):
    """The file has the rate where PEFT supports one: not for parameters of a model with experts."""
    peft = pytest.importorskip("peft")
    hf = reference("qwen3", seeds.integer(), num_hidden_layers=2)
    save_adapter(with_adapters(load_ours(hf), targets=TARGETS, dropout=0.25), tmp_path / "a")
    assert peft.PeftModel.from_pretrained(hf, str(tmp_path / "a")).peft_config["default"].lora_dropout == 0.25
    beside = with_adapters(small_model("qwen3_moe", mlp_only_layers=[1]), targets=TARGETS, dropout=0.25)
    save_adapter(beside, tmp_path / "b")
    assert json.loads((tmp_path / "b" / CONFIG_FILE).read_text())["lora_dropout"] == 0.0


def test_loaded_adapters_keep_it(tmp_path):
    model = adapted()
    save_adapter(model, tmp_path / "adapter")
    again = small_model("qwen3")
    load_adapter(again, tmp_path / "adapter")
    found = {adapter.dropout for _, adapter in nnx.iter_modules(again) if isinstance(adapter, Adapter)}
    assert found == {0.3}
