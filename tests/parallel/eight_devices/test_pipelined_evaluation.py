"""Evaluation through a pipe: value, parts of the loss and the statistics of every layer equal one device's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.layers.router import ExpertBias
from moe_jax.parallel import Parallelism
from moe_jax.parallel.pipeline.chunks import to_chunks
from moe_jax.train import init_state, make_evaluation, make_optimizer, put_batch
from moe_jax.train.batch import micro_batch_at, micro_batches_of
from moe_jax.train.objective import as_objective
from moe_jax.train.on_devices import on_devices
from moe_jax.train.pipelined import evaluate_pipelined
from tests.helpers import seeds, tiny
from tests.helpers.meshes import mesh_of, relative_error
from tests.helpers.train_steps import make_batch, weighted
from tests.parallel.eight_devices.test_pipelined import ALL_LOSSES, with_layers


# In CI `test_pipelined.test_gradients_and_evaluation` evaluates a model.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "make_model, layers, sizes, chunks, micro_batches",
    [(tiny.biased_model, 3, dict(pipe=4, fsdp=2), 1, 1), (tiny.dense, 6, dict(pipe=2, context=2), 3, 3)],
    ids=["fsdp-one-micro-batch", "dense-context"],
)
def test_value_and_aux(make_model, layers, sizes, chunks, micro_batches):
    """With the router's three losses."""
    model = with_layers(make_model, layers)
    graph, params, fixed = nnx.split(model, nnx.Param, ExpertBias)
    parallelism = Parallelism(mesh_of(**sizes), pipe_chunks=chunks)
    objective = as_objective(ALL_LOSSES, micro_batches)
    batch = {name: x[:6] for name, x in make_batch(seeds.rng()).items()}
    num_labels = jnp.float32(batch["loss_mask"].sum())

    on_one = jax.jit(on_devices(objective, graph))
    stacked, scalars = micro_batches_of(objective.prepare(batch, num_labels), micro_batches)
    of_each = [on_one(params, fixed, micro_batch_at(stacked, i) | scalars) for i in range(micro_batches)]
    expected = jax.tree.map(lambda *parts: sum(parts), *of_each)

    laid_out = to_chunks(params, parallelism.mesh, chunks)
    everywhere = NamedSharding(parallelism.mesh, PartitionSpec())
    arrays = objective.prepare(put_batch(batch, laid_out, parallelism), num_labels)
    evaluate = jax.jit(evaluate_pipelined(objective, graph, parallelism, micro_batches))
    found = evaluate(laid_out, jax.device_put(fixed, everywhere), arrays)
    for (path, x), y in zip(jax.tree.leaves_with_path(tuple(found)), jax.tree.leaves(expected), strict=True):
        assert relative_error(x, y) <= 1e-6, jax.tree_util.keystr(path)


def evaluations(batches, parallelism=None):
    """Returns the mean cross-entropy of all batches, of the first, and of none."""
    model = with_layers(tiny.biased_model, 3)
    graph = nnx.graphdef(model)
    if parallelism is not None:
        nnx.update(model, to_chunks(nnx.state(model), parallelism.mesh, parallelism.pipe_chunks))
    state = init_state(model, make_optimizer(1e-3), parallelism)
    evaluate = make_evaluation(graph, parallelism=parallelism)
    put = [put_batch(batch, state.params, parallelism) for batch in batches]
    return [evaluate(state, put), evaluate(state, put[:1]), evaluate(state, [])]


@pytest.mark.thorough
def test_make_evaluation():
    """Several batches, one after the other through the pipe; the parameters are in chunks and split over `fsdp`.

    Labels have weights, whose sum is less than 1.
    """
    rng = seeds.rng()
    batches = [weighted(make_batch(rng)) for _ in range(3)]
    for batch in batches:
        batch["loss_mask"] /= 4 * batch["loss_mask"].sum()
    found = evaluations(batches, Parallelism(mesh_of(pipe=2, fsdp=2)))
    np.testing.assert_allclose(found, evaluations(batches), rtol=1e-6)
    assert found[0] != found[1]


def test_batches_of_two_shapes_are_refused():
    batches = [{"tokens": np.zeros(shape)} for shape in ((2, 4), (2, 8))]
    evaluate = make_evaluation(nnx.graphdef(tiny.dense()), parallelism=Parallelism(mesh_of(pipe=2)))
    with pytest.raises(ValueError, match=r"must have equal shapes; got \[\(2, 4\), \(2, 8\)\]"):
        evaluate(None, batches)
