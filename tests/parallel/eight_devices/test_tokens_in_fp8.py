"""Tokens that travel to experts in FP8: results compared with tokens in bf16, and the bytes sent."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.experimental.ragged import RAGGED
from moe_jax.kernels import Precision
from moe_jax.kernels.experts.call import TokenPart
from moe_jax.kernels.experts.weights import Accumulators, ExpertWeights
from moe_jax.parallel import ExpertParallel, expert_parallel_mlp
from moe_jax.parallel.expert import experts_of_devices
from tests.helpers import oracle, seeds
from tests.helpers.meshes import make_mesh, relative_error

DEVICES, TOKENS, EXPERTS, K, HIDDEN, INTER = 4, 512, 8, 2, 256, 128

NAMES = "y", "x", "w_gate_up", "w_down", "weights"


def _layer(routing="random"):
    """Outlier channels of x, and gradients whose tokens are decades apart."""
    rng = seeds.rng()
    shapes = (TOKENS, HIDDEN), (EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER)
    x, w_gate_up, w_down = (jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, jnp.float32) for shape in shapes)
    x = x.at[:, :: HIDDEN // 4].multiply(8).astype(jnp.bfloat16)
    weights = jnp.asarray(rng.random((TOKENS, K)), jnp.float32)
    chosen = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :K]
    if routing == "one device takes all":
        chosen %= EXPERTS // DEVICES
    chosen[::7, 0] = -1
    dy = jnp.asarray(rng.normal(size=x.shape) * 10.0 ** rng.uniform(-3, 0, (TOKENS, 1)), jnp.bfloat16)
    return (x, w_gate_up, w_down, weights), dy, jnp.asarray(chosen, jnp.int32)


def _sharded(settings):
    """Returns the layer over the mesh and its number of rounds."""

    def local(x, w_gate_up, w_down, weights, chosen):
        y, exchange = expert_parallel_mlp(x, w_gate_up, w_down, weights, chosen, settings, precision=Precision())
        return y, exchange.num_rounds[None]

    spread = P("expert")
    return jax.shard_map(local, mesh=make_mesh(expert=DEVICES), in_specs=(spread,) * 5, out_specs=(spread, spread))


@functools.cache
def _with_gradients(settings):
    layer = _sharded(settings)

    @jax.jit
    def run(arrays, dy, chosen):
        y, pullback, rounds = jax.vjp(lambda *a: layer(*a, chosen), *arrays, has_aux=True)
        return (y, *pullback(dy)), rounds

    return run


def _both(**settings):
    return [_with_gradients(ExpertParallel(tokens_in_fp8=in_fp8, **settings)) for in_fp8 in (True, False)]


def _assert_equal_but_for_gate_up(results, expected):
    """Only the weights' gradient of gate and up reads the tokens' numbers."""
    for name, a, b in zip(NAMES, results, expected, strict=True):
        assert a.dtype == b.dtype, name
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        if name == "w_gate_up":
            assert 0 < relative_error(a, b) < 0.04
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [
        {"transport": "gather"},
        {"transport": "all_to_all", "capacity_factor": 0.5},
        {"transport": "pairwise", "group_size": 1, "capacity_factor": 4.0},
        {"transport": "pairwise", "drop": "probability"},
        # Its text has addresses of functions, and pytest's processes would collect different tests.
        pytest.param({"transport": RAGGED}, id="ragged"),
        {"transport": "all_to_all", "shadow_experts": 2, "flops_per_byte": 0.0},
    ],
    ids=str,
)
def test_results_are_those_of_tokens_in_bf16(settings):
    """In the first round and in further rounds."""
    in_fp8, in_bf16 = _both(**settings)
    has_rounds = settings["transport"] in ("gather", "all_to_all") and "shadow_experts" not in settings
    for routing in ("random", "one device takes all") if has_rounds else ("random",):
        layer = _layer(routing)
        (results, rounds), (expected, _) = (run(*layer) for run in (in_fp8, in_bf16))
        _assert_equal_but_for_gate_up(results, expected)
        assert rounds[0] > 1 or routing == "random"


def test_bytes_that_travel():
    """Tokens travel as bytes, one a number and four for each scale; outputs and both gradients in bf16."""
    arrays, dy, chosen = _layer()
    found = []
    for in_fp8 in (True, False):
        run = _with_gradients(ExpertParallel(transport="all_to_all", tokens_in_fp8=in_fp8, capacity_factor=4.0))
        text = run.lower(arrays, dy, chosen).as_text()
        exchanged = re.findall(r'stablehlo.all_to_all".*-> tensor<([^>]*)>', text)
        found.append(sorted(shape for shape in exchanged if not shape.endswith("xf32")))
    slots = f"{DEVICES}x{TOKENS // DEVICES}x"
    of_tokens = f"{slots}{HIDDEN + 4 * HIDDEN // 128}xui8"
    assert found == [[f"{slots}{HIDDEN}xbf16"] * 3 + [of_tokens], [f"{slots}{HIDDEN}xbf16"] * 4]


def test_residuals():
    """Tokens that arrived are kept in FP8 alone, and nothing is kept in place of their numbers in bf16."""
    arrays, _, chosen = _layer()
    layer = _sharded(ExpertParallel(transport="gather", tokens_in_fp8=True))
    pullback = jax.eval_shape(lambda: jax.vjp(lambda *a: layer(*a, chosen), *arrays, has_aux=True)[1])
    kept = [leaf.dtype for leaf in jax.tree.leaves(pullback) if leaf.shape == (DEVICES * TOKENS, HIDDEN)]
    assert kept == [jnp.float8_e4m3fn]


@pytest.mark.thorough
def test_sums_of_gradients():
    """The weights' gradients are added to sums as without accumulators."""
    (x, w_gate_up, w_down, weights), dy, chosen = _layer()
    how, spread = ExpertParallel(transport="gather", tokens_in_fp8=True), P("expert")

    def local(x, weights, sums, w_gate_up, w_down, chosen):
        matrices = ExpertWeights.of(w_gate_up, w_down, gradient=Accumulators(*sums))
        return experts_of_devices(TokenPart(x, weights, chosen), matrices, how, precision=Precision())[0]

    layer = jax.shard_map(local, mesh=make_mesh(expert=DEVICES), in_specs=(spread,) * 6, out_specs=spread)
    run = jax.jit(lambda *a: jax.vjp(lambda *b: layer(*b, w_gate_up, w_down, chosen), *a)[1](dy))
    dx, _, sums = run(x, weights, [jnp.full_like(w, 2.0) for w in (w_gate_up, w_down)])
    (_, expected, *gradients, _), _ = _with_gradients(how)((x, w_gate_up, w_down, weights), dy, chosen)
    np.testing.assert_array_equal(np.asarray(dx, np.float32), np.asarray(expected, np.float32))
    for total, gradient in zip(sums, gradients, strict=True):
        np.testing.assert_allclose(total - 2, gradient, atol=1e-5)


def test_refusals():
    (x, *matrices, weights), _, chosen = _layer()
    layer = jax.shard_map(
        lambda *a: expert_parallel_mlp(*a, ExpertParallel(tokens_in_fp8=True))[0],
        mesh=make_mesh(expert=DEVICES), in_specs=(P("expert"),) * 5, out_specs=P("expert"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="tokens_in_fp8=True sends .*: give precision=Precision.*; got precision=None"):
        layer(x, *matrices, weights, chosen)
    with pytest.raises(ValueError, match="x is float32; it must be bfloat16"):
        _sharded(ExpertParallel(tokens_in_fp8=True))(x.astype(jnp.float32), *matrices, weights, chosen)


def _errors(run, layer):
    """The relative errors of the results and of all gradients, compared with the oracle in f32."""
    arrays, dy, chosen = layer
    exact = [a.astype(jnp.float32) for a in arrays]
    y, pullback = jax.vjp(lambda *a: oracle.experts_mlp(*a, chosen), *exact)
    wanted = y, *pullback(dy.astype(jnp.float32))
    results, _ = run(arrays, dy, chosen)
    return {name: relative_error(*both) for name, *both in zip(NAMES, results, wanted, strict=True)}


def test_errors():
    errors = _errors(_with_gradients(ExpertParallel(transport="gather", tokens_in_fp8=True)), _layer())
    assert all(error < (0.1 if name == "weights" else 0.08) for name, error in errors.items()), errors
