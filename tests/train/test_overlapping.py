"""Overlapping micro-batches: the value, aux and every gradient equal plain accumulation's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax.models.execution import Execution
from moe_jax.parallel import Parallelism
from moe_jax.train import LossWeights, NextToken, accumulate, gradients_fn
from moe_jax.train import step as step_module
from moe_jax.train.gradients import accumulate_in_place
from moe_jax.train.micro_batch import accumulate_overlapping
from moe_jax.train.objective import as_objective, can_overlap
from moe_jax.train.step import make_train_step, overlaps
from tests.helpers import seeds, tiny

ROWS, SEQ = 6, 16
ALL_LOSSES = LossWeights(aux_loss_coef=0.02, sequence_loss_coef=0.01, z_loss_coef=0.01)


def make_batch(rows=ROWS):
    """Packed documents of two lengths, and padding."""
    rng = seeds.rng()
    segments = np.sort(rng.integers(1, 3, (rows, SEQ)), axis=1).astype(np.int32)
    segments[:, SEQ - 3 :] = 0
    tokens = rng.integers(0, 259, (rows, SEQ)).astype(np.int32)
    mask = ((segments != 0) & (rng.random((rows, SEQ)) < 0.8)).astype(np.int32)
    positions = np.broadcast_to(np.arange(SEQ, dtype=np.int32), (rows, SEQ))
    batch = dict(tokens=tokens, labels=np.roll(tokens, -1, 1), loss_mask=mask, positions=positions, segment_ids=segments)
    return {name: jnp.asarray(x) for name, x in batch.items()} | {"num_labels": jnp.float32(mask.sum())}


def assert_equal_gradients(found, expected, rtol=1e-5):
    """Every array is equal up to `rtol` times its largest entry."""
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(np.abs(b).max(initial=0), 1e-12), err_msg=str(path))


MODELS = {"moe": tiny.model, "dense": tiny.dense, "deepseek": lambda **options: tiny.deepseek(mtp=1, **options)}


@pytest.mark.parametrize(
    "name, remat, micro_batches, in_place",
    [
        pytest.param("dense", 1, 3, False, marks=pytest.mark.thorough),
        ("moe", "offload", 3, True),
        pytest.param("moe", True, 3, True, marks=pytest.mark.thorough),
        pytest.param("deepseek", 3, 3, False, marks=pytest.mark.thorough),
        pytest.param("deepseek", False, 2, True, marks=pytest.mark.thorough),
    ],
)
def test_equals_accumulation(name, remat, micro_batches, in_place):
    """On one device; DeepSeek-V3 has a dense stage, a stage with experts and a module that predicts further tokens."""
    graph, params, fixed = nnx.split(MODELS[name](), nnx.Param, ...)
    objective, execution = as_objective(NextToken(ALL_LOSSES), micro_batches), Execution().with_remat(remat)
    plain = accumulate(gradients_fn(objective, graph, execution), micro_batches)
    if in_place:
        plain = accumulate_in_place(objective, graph, execution, micro_batches)
    overlapping = accumulate_overlapping(objective, graph, execution, None, micro_batches, in_place=in_place)
    batch = make_batch()
    assert_equal_gradients(jax.jit(overlapping)(params, fixed, batch), jax.jit(plain)(params, fixed, batch))


def test_what_cannot_overlap_is_refused():
    """One micro-batch, and an objective that runs the layers itself."""
    graph = nnx.graphdef(tiny.dense())
    with pytest.raises(ValueError, match="micro_batches must be at least 2"):
        accumulate_overlapping(NextToken(), graph, Execution(), None, 1)
    own = as_objective(lambda model, batch: (jnp.zeros(()), {}), 2)
    with pytest.raises(TypeError, match="must define of_states in addition to __call__, as train.NextToken does"):
        accumulate_overlapping(own, graph, Execution(), None, 2)


def test_default():
    """Micro-batches overlap if experts are on several devices, layers are recomputed and the objective allows it."""
    mesh = jax.sharding.AbstractMesh((1, 1, 2, 1), ("data", "fsdp", "expert", "context"))
    split, whole = (Parallelism(m, hops="nccl") for m in (mesh, mesh.update(axis_sizes=(1, 2, 1, 1))))
    own = as_objective(lambda model, batch: (jnp.zeros(()), {}), 2)
    assert overlaps(NextToken(), split, True, 2) and overlaps(NextToken(), split, "offload", 2)
    assert not overlaps(NextToken(), split, True, 1)
    assert not overlaps(NextToken(), split, False, 2)
    assert not overlaps(own, split, True, 2)
    assert not overlaps(NextToken(), whole, True, 2)
    assert overlaps(NextToken(), replace(whole, overlap_micro_batches=True), False, 2)
    assert not overlaps(NextToken(), replace(split, overlap_micro_batches=False), True, 2)


class TwiceTheLoss(NextToken):
    """A call of its own, and the `of_states` of `NextToken`."""

    def __call__(self, model, batch):
        value, parts = super().__call__(model, batch)
        return 2 * value, parts


class TwiceTheLossOfStates(NextToken):
    """An `of_states` of its own."""

    def of_states(self, model, states, batch):
        value, parts = super().of_states(model, states, batch)
        return 2 * value, parts


def test_inherited_of_states():
    """A call of a subclass is never passed over for the `of_states` that it inherits."""
    assert can_overlap(NextToken()) and can_overlap(TwiceTheLossOfStates())
    assert not can_overlap(TwiceTheLoss())


def test_step_takes_it(monkeypatch):
    """`make_train_step` accumulates so by default, and not if it is switched off."""
    taken = []
    monkeypatch.setattr(step_module, "accumulate_overlapping", lambda *_, **__: taken.append("overlapping"))
    mesh = jax.sharding.AbstractMesh((1, 1, 2, 1), ("data", "fsdp", "expert", "context"))
    graph, optimizer = nnx.graphdef(tiny.model()), optax.sgd(1.0)
    for overlap, expected in ((None, 1), (True, 1), (False, 0)):
        taken.clear()
        parallelism = Parallelism(mesh, overlap_micro_batches=overlap)
        make_train_step(graph, optimizer, gradient_accumulation=2, parallelism=parallelism)
        assert len(taken) == expected
