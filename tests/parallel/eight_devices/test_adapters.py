"""Adapters on meshes: frozen weights are split like trained ones, and two training steps equal one device's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.layers.lora import Frozen
from moe_jax.models.execution import Execution
from moe_jax.parallel import Parallelism, make_mesh
from moe_jax.train import LossWeights, NextToken, gradients_fn, init_state, make_train_step, put_batch
from moe_jax.train.objective import as_objective
from tests.helpers import seeds, tiny
from tests.helpers.meshes import laid_out, relative_error
from tests.helpers.train_steps import make_batch

CASES = {
    "moe": (
        tiny.model,
        LoraSettings(
            rank=4,
            alpha=6,
            targets=("attention", "experts", "router"),
            ranks={"q_proj": 3},
            modules_to_save=("norm",),
            trainable_token_indices=(9, 264, 3),
        ),
    ),
    "shared outer": (tiny.model, LoraSettings(rank=4, alpha=6, shared_outer=True, use_rslora=True)),
    # `test_lora_finetune` trains with dropout.
    "dropout": (tiny.dense, LoraSettings(rank=4, alpha=6, targets=("attention", "mlp"), dropout=0.3)),
    "whole modules": (
        tiny.model,
        LoraSettings(rank=4, alpha=6, targets=("attention",), modules_to_save=("embed_tokens", "lm_head", "gate", "norm")),
    ),
    "deepseek": (
        tiny.deepseek,
        LoraSettings(rank=4, alpha=6, targets=("attention", "experts", "router", "embedding", "head", "mlp")),
    ),
}


def adapted(case, **sizes):
    make_model, settings = CASES[case]
    return with_adapters(laid_out(make_model(), **sizes) if sizes else make_model(), settings)


def with_adapters(model, settings):
    """Adds adapters whose factors are all random."""
    add_lora(model, settings, rngs=nnx.Rngs(0))
    return with_random_factors(model)


def with_random_factors(model):
    """Draws all factors anew: with b at zero, gradients of a would be zero."""
    rng = seeds.rng(__name__)
    draw = lambda a: jax.device_put((rng.normal(size=a.shape) * 0.1).astype(a.dtype), a.sharding)  # noqa: E731
    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.LoRAParam)))
    return model


def two_steps(model, parallelism=None, steps=2, **options):
    """Returns the state after some steps, whose momentum is a sum of their gradients, and the metrics of each."""
    optimizer, batch = optax.sgd(0.1, momentum=0.5), make_batch(seeds.rng(__name__))
    loss = NextToken(LossWeights(aux_loss_coef=0.1, sequence_loss_coef=0.1, z_loss_coef=0.1))
    state = init_state(model, optimizer, parallelism)
    step = make_train_step(nnx.graphdef(model), optimizer, loss, parallelism=parallelism, **options)
    metrics = []
    for _ in range(steps):
        state, of_step = step(state, put_batch(batch, state.params, parallelism))
        metrics.append(of_step)
    return state, metrics


@pytest.mark.parametrize(
    "case, sizes, options",
    [
        ("moe", {"data": 2, "fsdp": 2, "expert": 2}, {"shard_optimizer": True}),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("shared outer", {"fsdp": 4, "expert": 2}, {}),
                ("dropout", {"data": 2, "fsdp": 2, "context": 2}, {"gradient_accumulation": 2}),
                ("whole modules", {"data": 2, "expert": 2, "context": 2}, {"gradient_accumulation": 2}),
                ("moe", {"data": 2, "fsdp": 4}, {"remat": False}),
                ("deepseek", {"fsdp": 2, "expert": 2, "context": 2}, {}),
            )
        ),
    ],
    ids=str,
)
def test_two_steps(case, sizes, options):
    options = dict(options)
    expected = two_steps(adapted(case), gradient_accumulation=options.get("gradient_accumulation", 1))
    model = adapted(case, **sizes)
    kept = [a.addressable_shards[0].data.size / a.size for a in jax.tree.leaves(nnx.state(model, Frozen)) if a.ndim > 2]
    assert sum(ways < 1 for ways in kept) > len(kept) / 2, "frozen matrices are split"
    parallelism = Parallelism(make_mesh(**sizes), shard_optimizer=options.pop("shard_optimizer", False))
    check(two_steps(model, parallelism, **options), expected)


def check(found, wanted, tolerance=1e-5):
    (state, metrics), (expected, expected_metrics) = found, wanted
    for ours, theirs in zip(metrics, expected_metrics, strict=True):
        # An exchange with few tokens may need a second round.
        for name, value in (theirs | {"num_rounds": ours["num_rounds"]}).items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    for of_state in ("params", "opt_state"):
        found, wanted = getattr(state, of_state), getattr(expected, of_state)
        for (path, ours), theirs in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
            assert relative_error(ours, theirs) < tolerance, (of_state, jax.tree_util.keystr(path))


def test_of_frozen_weights_bf16_alone_travels():
    """Adapters have gradients that travel; frozen weights have none, and no copies in f32."""
    model = laid_out(tiny.model_for_fp8(param_dtype=jnp.bfloat16), fsdp=2)
    add_lora(model, LoraSettings(rank=4), rngs=nnx.Rngs(0))
    travelling = collectives(model, Parallelism(make_mesh(fsdp=2, devices=jax.devices()[:2])))
    frozen = {("x".join(map(str, a.shape[-3:]))) for a in jax.tree.leaves(nnx.state(model, Frozen)) if a.ndim == 4}
    assert frozen == {"4x256x128", "4x128x128"}
    gathered = {shape for op, shape in travelling if op == "all_gather"}
    assert {"2x256x128xbf16", "2x128x128xbf16", "132x128xbf16"} <= gathered
    assert all(shape.endswith("bf16") for shape in gathered)
    sent = {shape for op, shape in travelling if op != "all_gather"}
    assert "4x256x2xbf16" in sent and not any("256x128" in shape or "128x128" in shape for shape in sent)


def collectives(model, parallelism):
    """Returns (operation, shape and dtype of the operand) of each collective in a pass with gradients."""
    objective = as_objective(NextToken(), 1)
    gradients = gradients_fn(objective, nnx.graphdef(model), Execution(remat=True), parallelism)
    state = init_state(model, optax.sgd(0.1), parallelism)

    def compute(params, fixed, batch):
        return gradients(params, fixed, objective.prepare(batch, jnp.ones(())))

    batch = put_batch(make_batch(seeds.rng(__name__)), state.params, parallelism)
    text = jax.jit(compute).lower(state.params, state.fixed, batch).as_text()
    operation = r'"stablehlo\.(all_gather|all_to_all|all_reduce|reduce_scatter)".*?\}>? ?(?:\}\))?:? ?: \(tensor<([\w]*)>'
    return set(re.findall(operation, text, re.DOTALL))
