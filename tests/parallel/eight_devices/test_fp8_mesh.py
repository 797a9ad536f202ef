"""Experts in FP8 on a mesh: steps compared with one device, and the meshes that are refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_jax.kernels import Precision, experts_mlp
from moe_jax.kernels.experts import fused_vjp
from moe_jax.parallel import ExpertParallel, Parallelism
from moe_jax.parallel.choices import MeshShape
from moe_jax.parallel.expert import expert_parallel_mlp
from moe_jax.parallel.pipeline.chunks import to_chunks
from moe_jax.recipes.run.model import _parallelism
from moe_jax.train import init_state, make_evaluation, make_optimizer, put_batch
from tests.helpers import expert_layers, seeds, tiny
from tests.helpers.meshes import make_mesh, mesh_of, relative_error
from tests.helpers.train_steps import make_batch, train


def _model(dense=()):
    made = tiny.model_for_fp8()
    made.set_precision("fp8", dense)
    return made


@pytest.mark.thorough
@pytest.mark.parametrize(
    "dense, sizes, overlap",
    [
        ((), {"data": 2, "expert": 2}, True),
        (("attention",), {"fsdp": 2}, False),
        (("attention",), {"data": 2, "fsdp": 2, "context": 2}, False),
    ],
    ids=str,
)
def test_steps_are_near_those_of_one_device(dense, sizes, overlap):
    """Weights travel in bf16 before they are rounded again: numbers differ by a rounding of FP8 now and then."""
    parallelism = Parallelism(mesh_of(**sizes), overlap_micro_batches=overlap)
    near(*(step_of(lambda: _model(dense), on) for on in (parallelism, None)))


def step_of(make_model, parallelism):
    """Returns the metrics of a step of `make_model`'s model, whose layers are in chunks where there is a pipe."""

    def laid_out():
        model = make_model()
        if parallelism is not None and parallelism.pipelined:
            nnx.update(model, to_chunks(nnx.state(model), parallelism.mesh, parallelism.pipe_chunks))
        return model

    return train(make_batch(seeds.rng(__name__)), parallelism, steps=1, make_model=laid_out, gradient_accumulation=2)[1][0]


def near(found, expected, names=(("loss", 1e-2), ("grad_norm", 0.05))):
    for name, rtol in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=rtol, err_msg=name)


@pytest.mark.thorough
def test_experts_over_devices():
    """Outputs and gradients equal one device's, although sums over choices are in another order."""
    rng = seeds.rng()
    x, w_gate_up, w_down, weights, chosen = expert_layers.make_layer(rng, "random", 64, 4, 2, 128, 128)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)
    arrays = x, w_gate_up, w_down, weights
    mesh, spread, whole = make_mesh(expert=2), P("expert"), Precision(kept="fp8")

    def on_one(*arrays):
        return experts_mlp(*arrays, chosen, precision=whole)

    def on_two(x, w_gate_up, w_down, weights):
        def local(x, w_gate_up, w_down, weights, chosen):
            how = ExpertParallel(shadow_experts=0)
            return expert_parallel_mlp(x, w_gate_up, w_down, weights, chosen, how, precision=whole)[0]

        on_mesh = jax.shard_map(local, mesh=mesh, in_specs=(spread,) * 5, out_specs=spread)
        return on_mesh(x, w_gate_up, w_down, weights, chosen)

    found, expected = (jax.jit(lambda dy, f=f: _with_gradients(f, arrays, dy))(dy) for f in (on_two, on_one))
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 0.01


@pytest.mark.thorough
def test_a_step_with_tokens_in_fp8():
    """The loss is that of tokens in bf16 bit for bit, with layers that are recomputed and passes that overlap."""
    batch, options = make_batch(seeds.rng()), dict(steps=1, make_model=_model, gradient_accumulation=2, remat=True)
    found, expected = (
        train(batch, Parallelism(mesh_of(expert=2), ExpertParallel(tokens_in_fp8=in_fp8)), **options)[1][0]
        for in_fp8 in (True, False)
    )
    assert found["loss"] == expected["loss"] and found["grad_norm"] != expected["grad_norm"]
    np.testing.assert_allclose(found["grad_norm"], expected["grad_norm"], rtol=0.01)


def test_settings_of_a_run(tmp_path):
    options = dict(precision="fp8", dtype="bfloat16", batch_size=8, mesh=MeshShape(data=4, expert=2))
    settings = tiny.settings(tmp_path, **options, tokens_in_fp8=True)
    assert _parallelism(settings, None).expert_parallel == ExpertParallel(tokens_in_fp8=True)


def _with_gradients(f, arrays, dy):
    y, pullback = jax.vjp(f, *arrays)
    return y, *pullback(dy)


def _three_layers():
    model = moe_jax.from_config(replace(_model().config, num_hidden_layers=3), rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    model.set_precision("fp8")
    return model


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sizes, rounds_in_passes",
    [({"pipe": 2, "fsdp": 2}, False), ({"pipe": 2, "expert": 2}, True)],
    ids=str,
)
def test_pipes(sizes, rounds_in_passes, monkeypatch):
    """A rank makes the copies of its layers once where no axis but `data` splits them, and gathers them in FP8 over `fsdp`."""
    expected = step_of(_three_layers, None)
    made, quantise_experts = [], fused_vjp.quantise_experts
    monkeypatch.setattr(fused_vjp, "quantise_experts", lambda *weights: made.append(weights) or quantise_experts(*weights))
    near(step_of(_three_layers, Parallelism(mesh_of(**sizes), pipe_chunks=2)), expected)
    assert bool(made) == rounds_in_passes


def test_pipes_with_tickets_are_refused():
    with pytest.raises(ValueError, match="tickets of pipe_schedule='uniform-w' hold operands in bf16"):
        step_of(_three_layers, Parallelism(mesh_of(pipe=2), pipe_schedule="uniform-w"))


@pytest.mark.thorough
def test_further_tokens_and_dense_groups_in_a_pipe():
    """The module's experts are split over the ranks, the dense layer is before the pipe, and shared experts inside."""
    sizes = dict(num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=4, n_group=1, topk_group=1)
    config = replace(tiny.deepseek_config(**sizes, num_nextn_predict_layers=1), hidden_size=128, moe_intermediate_size=128)

    def make_model():
        model = moe_jax.from_config(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
        model.set_precision("fp8", ("attention", "shared_experts", "mlp"))
        return model

    found, expected = (step_of(make_model, on) for on in (Parallelism(mesh_of(pipe=2)), None))
    near(found, expected, (("loss", 1e-2), ("mtp_loss", 1e-2), ("grad_norm", 0.05)))


@pytest.mark.thorough
def test_evaluation_in_a_pipe():
    batch, found = make_batch(seeds.rng()), []
    for parallelism in (None, Parallelism(mesh_of(pipe=2))):
        model = _three_layers()
        if parallelism is not None:
            nnx.update(model, to_chunks(nnx.state(model), parallelism.mesh))
        state = init_state(model, make_optimizer(1e-3), parallelism)
        evaluate = make_evaluation(nnx.graphdef(model), parallelism=parallelism)
        found.append(evaluate(state, [put_batch(batch, state.params, parallelism)]))
    np.testing.assert_allclose(*found, rtol=1e-2)
