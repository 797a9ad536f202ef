"""The passes of one micro-batch: the backward pass in two halves gives the gradients of the undivided one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
import tiny
from flax import nnx

from moe_jax.layers.passes import run_pass
from moe_jax.models.execution import Execution
from moe_jax.train import LossWeights, NextToken
from moe_jax.train.micro_batch import MicroBatchPasses


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("dense", "float32"),
        pytest.param("deepseek", "float32", marks=pytest.mark.thorough),
        pytest.param("moe", "bfloat16", marks=pytest.mark.thorough),
    ],
)
def test_divided_backward_pass(name, dtype):
    """DeepSeek-V3 has a dense stage, one with experts and a module behind them. One program runs W behind B.

    In f32 every bit is equal. In bf16 operands and gradients are rounded alike, and XLA keeps some numbers in f32 in between.
    """
    makers = dict(dense=tiny.dense, moe=tiny.model, deepseek=partial(tiny.deepseek, mtp=1, layers=2))
    model = makers[name](dtype=jnp.dtype(dtype))
    graphdef, params, fixed = nnx.split(model, nnx.Param, ...)
    rng = seeds.rng()
    tokens = jnp.asarray(rng.integers(0, 259, (2, 12)), jnp.int32)
    ones = jnp.ones_like(tokens)
    batch = dict(tokens=tokens, labels=jnp.roll(tokens, -1, 1), loss_mask=ones, positions=None, segment_ids=ones)
    batch["num_labels"] = jnp.float32(tokens.size)
    objective = NextToken(LossWeights(aux_loss_coef=0.02, z_loss_coef=0.01))

    def gradients(params, divided):
        passes = MicroBatchPasses(objective, graphdef, params, fixed, Execution(False), in_place=True, divided=divided)
        forwarded = run_pass(passes.forward(batch))
        found = passes.loss(batch, forwarded, passes.zeros())
        arguments = batch, forwarded.saved, found.dx, found.droutings, found.gradients
        if divided:
            dx, sums, products = run_pass(passes.inputs_backward(*arguments))
            sums = run_pass(passes.weights_backward(products, sums))
        else:
            dx, sums = run_pass(passes.backward(*arguments))
        return passes.embedding(tokens, dx, sums)

    run = jax.jit(gradients, static_argnums=1)
    for (path, found), expected in zip(
        jax.tree.leaves_with_path(run(params, True)), jax.tree.leaves(run(params, False)), strict=True
    ):
        tolerance = 0 if dtype == "float32" else 2e-2
        atol = tolerance * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=atol, err_msg=jax.tree_util.keystr(path))
