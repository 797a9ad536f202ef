"""The backward pass in two halves, B and W, computes the gradients of the undivided one, and none of its work twice."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.config import ModelConfig
from moe_jax.layers.cache import init_cache
from moe_jax.layers.loops import run_loops
from moe_jax.layers.moe import Experts
from moe_jax.layers.passes import LayerArrays, Layers, backward_loop, forward_loop
from moe_jax.layers.tickets import DeferredWeight, WeightTicket, defer_weight_gradients, inputs_backward, weights_backward
from moe_jax.models.auto import MODEL_CLASSES
from moe_jax.models.execution import Execution
from moe_jax.models.forward import Carry, PerLayer, layer_inputs, stage_layers
from moe_jax.parallel.fsdp import LayerGather
from moe_jax.parallel.spread import Spread
from tests.helpers import seeds, tiny

ROWS, SEQ = 3, 7
"""21 tokens: no matrix has such an axis."""

MODELS = {
    "qwen3": lambda: tiny.dense(),
    "qwen3-moe": lambda: tiny.model(),
    "deepseek-v3": lambda: tiny.deepseek(),
    "deepseek-v3, mtp": lambda: tiny.deepseek(mtp=1),
    "biases": lambda: moe_jax.from_config(
        moe_jax.Qwen3Config(**tiny.QWEN3, attention_bias=True), rngs=nnx.Rngs(0), dtype=jnp.float32
    ),
}


class Stage(NamedTuple):
    """A stage of a model, an input, and the gradients of its outputs."""

    config: ModelConfig
    graph: nnx.GraphDef
    state: nnx.State
    x: jax.Array
    dx: jax.Array
    execution: Execution

    @classmethod
    def of(cls, model, remat: bool) -> "Stage":
        """Returns the model's last stage."""
        rng = seeds.rng()
        x, dx = (jnp.asarray(rng.normal(size=(ROWS, SEQ, model.config.hidden_size)), jnp.float32) for _ in range(2))
        return cls(model.config, *nnx.split(model.stages[-1]), x, dx, Execution(remat))

    def layers(self, state: nnx.State, x, tickets: bool) -> tuple[Layers, LayerArrays]:
        """Returns the stage as the passes take it; with `tickets`, its matrices have tickets."""
        stage = nnx.merge(self.graph, state)
        num_layers = jax.tree.leaves(state)[0].shape[0]
        if tickets:
            defer_weight_gradients(stage, x, self.execution.spread)
        ids = jnp.ones((ROWS, SEQ), jnp.int32)
        inputs = layer_inputs(self.config, None, ids, ids != 0)
        return stage_layers(stage, 0, inputs, PerLayer(jnp.arange(num_layers)), self.execution)

    def zeros(self, state: nnx.State) -> nnx.State:
        """Returns sums of the gradients of all parameters."""
        return jax.tree.map(jnp.zeros_like, nnx.filter_state(state, nnx.Param))

    def undivided(self, state, x, dx, start=0.0):
        """Returns x after the layers, dx and the gradients of all parameters added to `start`."""
        layers, arrays = self.layers(state, x, tickets=False)
        (run,) = run_loops(forward_loop(layers, arrays, Carry(x, None)))
        sums = jax.tree.map(lambda a: a + start, self.zeros(state))
        (back,) = run_loops(backward_loop(layers, arrays, run.saved, Carry(dx, None), gradient_of(run.y), sums))
        return run.x.x, back.dx.x, back.parameters

    def b(self, state, x, dx):
        """Returns x after the layers, dx, the gradients of vectors, and the products."""
        layers, arrays = self.layers(state, x, tickets=True)
        (run,) = run_loops(forward_loop(layers, arrays, Carry(x, None)))
        sums = jax.tree.map(jnp.zeros_like, arrays.parameters)
        (back,) = run_loops(inputs_backward(layers, arrays, run.saved, Carry(dx, None), gradient_of(run.y), sums))
        return run.x.x, back.dx.x, back.parameters, back.accumulators

    def w(self, products, sums):
        """Returns the sums with the gradients of all matrices added."""
        return run_loops(weights_backward(products, sums))[0]

    def forward(self, state, x):
        layers, arrays = self.layers(state, x, tickets=False)
        return run_loops(forward_loop(layers, arrays, Carry(x, None)))[0].x.x


def gradient_of(y):
    """Returns the gradient of a stage's further outputs: ones for sums of the router, nothing for ids."""

    def gradient(a):
        return 0.1 * jnp.ones_like(a) if jnp.issubdtype(a.dtype, jnp.inexact) else np.zeros(a.shape, jax.dtypes.float0)

    return jax.tree.map(gradient, y)


@pytest.mark.parametrize(
    "name, remat",
    [
        ("deepseek-v3", False),
        pytest.param("qwen3-moe", True, marks=pytest.mark.thorough),
    ],
)
def test_b_then_w_is_the_undivided_backward_pass(name, remat):
    """Bit for bit: x, dx, and the gradient of every parameter. Products add to the sums of matrices, vectors have none."""
    stage = Stage.of(MODELS[name](), remat)
    x, dx, expected = jax.jit(stage.undivided)(stage.state, stage.x, stage.dx)
    found_x, found_dx, vectors, products = jax.jit(stage.b)(stage.state, stage.x, stage.dx)
    np.testing.assert_array_equal(found_x, x)
    np.testing.assert_array_equal(found_dx, dx)
    w = jax.jit(stage.w)
    matrices = w(products, stage.zeros(stage.state))
    twice = w(products, matrices)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(2 * a, b, rtol=1e-6, atol=1e-6), matrices, twice)
    for path, total in nnx.to_flat_state(matrices):
        assert total[...].any() != ("norm" in str(path)), path
    found = nnx.to_flat_state(nnx.merge_state(matrices, vectors))
    assert dict(found).keys() == dict(nnx.to_flat_state(expected)).keys()
    for path, gradient in nnx.to_flat_state(expected):
        assert np.abs(gradient[...]).max() > 0, path
        np.testing.assert_array_equal(dict(found)[path][...], gradient[...], err_msg=str(path))


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_a_vector_or_has_a_ticket(name):
    """Walks the parameters of all stages and of modules that predict further tokens."""
    model = MODELS[name]()
    x = jnp.zeros((ROWS, SEQ, model.config.hidden_size))
    for stage in model.stages:
        before = {path for path, _ in nnx.to_flat_state(nnx.state(stage, nnx.Param))}
        defer_weight_gradients(stage, x)
        vectors, tickets, deferred, _ = (
            dict(nnx.to_flat_state(state)) for state in nnx.state(stage, nnx.Param, WeightTicket, DeferredWeight, ...)
        )
        assert all(vector.ndim == 2 for vector in vectors.values())
        assert {path[:-1] for path in deferred} == {path[:-1] for path in tickets}
        assert vectors.keys() | deferred.keys() == before and not vectors.keys() & deferred.keys()


def test_all_architectures_are_walked():
    walked = {type(make()) for make in MODELS.values()}
    of_package = {cls for cls in MODEL_CLASSES.values() if cls.__module__.startswith("moe_jax")}
    assert walked == of_package


@pytest.mark.thorough
def test_flops():
    """B and W multiply as much as the undivided backward pass, by XLA's count, and B has no products of W's."""
    sizes = tiny.QWEN3 | dict(hidden_size=64, head_dim=16, num_attention_heads=4, moe_intermediate_size=48, num_experts=8)
    config = moe_jax.Qwen3MoeConfig(**sizes, num_experts_per_tok=2, norm_topk_prob=True)
    stage = Stage.of(moe_jax.from_config(config, rngs=nnx.Rngs(0), dtype=jnp.float32), False)
    *_, products = jax.eval_shape(stage.b, stage.state, stage.x, stage.dx)
    forward = flops(stage.forward, stage.state, stage.x)
    undivided = flops(stage.undivided, stage.state, stage.x, stage.dx) - forward
    b = flops(stage.b, stage.state, stage.x, stage.dx) - forward
    w = flops(stage.w, products, stage.zeros(stage.state))
    assert b + w <= 1.02 * undivided and w > 0.4 * forward and b < 0.75 * undivided


def flops(f, *arguments) -> float:
    return jax.jit(f).lower(*arguments).compile().cost_analysis()["flops"]


def test_matrices_are_no_residuals():
    """Without remat the forward pass keeps activations, and no copy of a layer's matrices."""
    stage = Stage.of(tiny.deepseek(), False)
    layers, arrays = stage.layers(stage.state, stage.x, tickets=True)
    saved = jax.eval_shape(lambda: run_loops(forward_loop(layers, arrays, Carry(stage.x, None)))[0].saved)
    matrices = {a.shape for a in jax.tree.leaves(nnx.filter_state(stage.state, nnx.Param)) if a.ndim > 2}
    assert not matrices & {a.shape for a in jax.tree.leaves(saved)}


def test_gathered_matrices_have_no_ticket():
    """B computes the gradient of a matrix that a mesh gathers layer by layer; experts that stay in place have a ticket."""
    stage = Stage.of(tiny.model(), False)
    paths = [path for path, _ in nnx.to_flat_state(nnx.filter_state(stage.state, nnx.Param))]
    gathers = tuple(((-1, ("expert",)),) if "self_attn" in path else () for path in paths)
    gather = LayerGather(gathers, jnp.dtype(jnp.float32))
    on_mesh = stage._replace(execution=Execution(False, spread=Spread(layer_gathers=(gather,))))
    layers, arrays = on_mesh.layers(stage.state, stage.x, tickets=True)
    own = [path for path, _ in nnx.to_flat_state(arrays.parameters)]
    assert own == [path for path in paths if "self_attn" in path or "norm" in path[-2]]
    assert [bool(how) for how in layers.gather.gathers] == ["self_attn" in path for path in own]
    assert {path[-2] for path, _ in nnx.to_flat_state(arrays.accumulators)} == {"experts", "router"}


def test_refusals():
    """Tickets are for keys of the call's own tokens, and for experts that know the choices of a token."""
    stage = Stage.of(tiny.deepseek(), False)
    layers, arrays = stage.layers(stage.state, stage.x, tickets=True)
    cache = init_cache(stage.config, ROWS, SEQ, jnp.float32)
    with pytest.raises(ValueError, match="weight tickets need keys of this call's tokens alone"):
        jax.eval_shape(lambda: run_loops(forward_loop(layers, arrays, Carry(stage.x, cache))))
    with pytest.raises(ValueError, match="the experts' ticket needs num_experts_per_tok"):
        defer_weight_gradients(Experts(16, 16, 4, stack=(1,), rngs=nnx.Rngs(0)), stage.x)
