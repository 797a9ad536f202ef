"""The FP8 kernels in Triton against the reference in XLA: interpreted or compiled where there is no GPU."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import moe_jax
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.kernels import Precision, experts_mlp
from moe_jax.kernels.experts.fp8 import backends, xla
from moe_jax.kernels.experts.fp8 import triton as ours
from moe_jax.kernels.experts.fp8.quantise import QuantisedMatrices, QuantisedRows
from moe_jax.kernels.experts.triton import launch
from tests.helpers import expert_layers, seeds
from tests.helpers.checkpoint_helpers import write_fp8
from tests.helpers.compiled_steps import plan, quantise_matrices, quantise_rows, whole
from tests.helpers.expert_layers import SUM_ERROR_IN_FP8, relative_error, rows_with_a_pair
from tests.helpers.triton_without_gpu import compiled_without_spills, needs_triton, pretend_hopper, recorded_calls

EXPERTS, K, HIDDEN, INTER = 3, 2, 384, 256
FP8 = Precision()


def _assert_near(found, wanted, rows):
    assert relative_error(*(np.asarray(a, np.float32)[rows] for a in (found, wanted))) <= 2e-3 + 4 * SUM_ERROR_IN_FP8


def _assert_same_bits(found, wanted, rows):
    np.testing.assert_array_equal(*(np.asarray(a.values.view(jnp.uint8))[rows] for a in (found, wanted)))
    np.testing.assert_array_equal(*(np.asarray(a.scales)[:, rows] for a in (found, wanted)))


@needs_triton
@pytest.mark.parametrize(
    "routing, tokens", [("some_nobody", 20), pytest.param("one_takes_all", 250, marks=pytest.mark.thorough)]
)
def test_passes(runs, routing, tokens):
    """Kernels give what the reference gives for the same operands, read inside a stack of layers. Both kinds of tiles run."""
    x, *matrices, _, chosen = expert_layers.make_layer(seeds.rng(), routing, tokens, EXPERTS, K, HIDDEN, INTER)
    gate_up, down = map(quantise_matrices, matrices)
    stacks = [QuantisedMatrices(*(jnp.stack([part * 0, part]) for part in w)) for w in (gate_up, down)]
    p = plan(chosen, EXPERTS)
    in_stack, rows = dataclasses.replace(p, layer=jnp.int32(1)), rows_with_a_pair(p)
    h, act = whole(xla.gated_matmul)(whole(xla.rows_of_tokens)(x, p), gate_up, p)
    our_h, our_act = whole(ours.gated_matmul)(whole(ours.rows_of_tokens)(x, p), stacks[0], in_stack)
    _assert_near(our_h, h, rows)
    # Sums in another order move a scale by their own error, and few values to the other side of a tie.
    np.testing.assert_allclose(
        np.asarray(our_act.scales)[:, rows], np.asarray(act.scales)[:, rows], rtol=1e-4 + SUM_ERROR_IN_FP8
    )
    assert np.mean((np.asarray(our_act.values) != np.asarray(act.values))[rows]) < 1e-3 + 16 * SUM_ERROR_IN_FP8
    nothing, same_act = whole(ours.gated_matmul)(whole(ours.rows_of_tokens)(x, p), gate_up, p, keep_h=False)
    assert nothing is None
    _assert_same_bits(same_act, our_act, rows)
    _assert_near(whole(ours.grouped_matmul)(act, stacks[1], in_stack), whole(xla.grouped_matmul)(act, down, p), rows)


@needs_triton
def test_rounding(runs):
    """Values and scales of act have the reference's bits. Whole numbers make all sums exact, and silu(128) is 128."""
    rng = seeds.rng()
    p = plan(jnp.asarray(rng.integers(0, EXPERTS, (40, 1)), jnp.int32), EXPERTS)
    x = jnp.asarray(rng.integers(-8, 9, (40, HIDDEN)), jnp.bfloat16).at[:, 0].set(1)
    x = x.at[3, 5].set(jnp.inf).at[4].set(0)
    w = rng.integers(-8, 9, (EXPERTS, 2 * INTER, HIDDEN))
    w[:, :INTER] = 0
    w[:, :INTER, 0] = 128
    scale_of_one = lambda *shape: jnp.ones(shape, jnp.float32)  # noqa: E731
    tokens = QuantisedRows(x.astype(jnp.float8_e4m3fn), scale_of_one(HIDDEN // 128, 40))
    gate_up = QuantisedMatrices(jnp.asarray(w, jnp.float8_e4m3fn), scale_of_one(EXPERTS, 2 * INTER // 128, HIDDEN // 128))
    _, act = whole(xla.gated_matmul)(whole(xla.rows_of_rounded)(tokens, p), gate_up, p)
    _, our_act = whole(ours.gated_matmul)(tokens, gate_up, p)
    is_finite = np.asarray(p.token_of_row) != 3
    _assert_same_bits(our_act, act, is_finite)
    assert np.unique(np.asarray(act.scales)[:, is_finite]).size > 30
    assert np.isnan(np.asarray(our_act.values, np.float32)[~is_finite]).all()


@needs_triton
def test_promotion(runs):
    """Scales of six decades enter where they belong."""
    rng = seeds.rng()
    p = plan(jnp.asarray(rng.integers(0, 2, (64, 1)), jnp.int32), EXPERTS)
    decades = 10.0 ** rng.integers(-3, 4, (p.num_rows, 8)).repeat(128, axis=1)
    a = quantise_rows(jnp.asarray(rng.random((p.num_rows, 1024)) * decades, jnp.float32))
    w = quantise_matrices(jnp.asarray(rng.random((EXPERTS, 256, 1024)), jnp.float32))
    w = w._replace(scales=w.scales * 10.0 ** rng.integers(-3, 4, w.scales.shape))
    _assert_near(whole(ours.grouped_matmul)(a, w, p), whole(xla.grouped_matmul)(a, w, p), rows_with_a_pair(p))


@needs_triton
def test_a_dense_matrix(runs):
    """All tokens are rows of one expert."""
    rng = seeds.rng()
    x, w = (jnp.asarray(rng.normal(size=(rows, 256)), jnp.bfloat16) for rows in (90, 128))
    rounded = quantise_matrices(w)
    _assert_near(whole(ours.matmul_of_tokens)(x, rounded), whole(xla.matmul_of_tokens)(x, rounded), slice(None))


@needs_triton
def test_a_layer(runs):
    """The result and every gradient equal the reference's, up to the rounding of numbers close to a tie."""
    rng = seeds.rng()
    layer = expert_layers.make_layer(rng, "some_nobody", 37, EXPERTS, K, HIDDEN, INTER)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.bfloat16)
    found, wanted = (
        expert_layers.with_gradients(partial(experts_mlp, precision=FP8, backend=backend), layer, dy)
        for backend in ("triton", "xla")
    )
    for name, one, other in zip(expert_layers.ARRAYS, found, wanted, strict=True):
        assert relative_error(one, other) < 1e-2 + 8 * SUM_ERROR_IN_FP8, name


@needs_triton
@pytest.mark.thorough
def test_a_stored_model(runs, monkeypatch, caplog, tmp_path):
    """A model whose files are in FP8 generates by the kernels, and its logits equal the reference's."""
    write_fp8(tmp_path, num_hidden_layers=1)
    model = from_pretrained(tmp_path, weights="as stored")
    model.set_precision("fp8")
    prompt = seeds.rng().integers(0, 61, (1, 7))
    backends._announce.cache_clear()

    def logits(backend):
        monkeypatch.setenv("MOE_JAX_BACKEND", backend)
        jax.clear_caches()
        return np.asarray(jax.jit(lambda model, tokens: model(tokens).logits)(model, prompt), np.float32)

    expected = logits("xla")
    with caplog.at_level("INFO", logger="moe_jax"):
        found = logits("triton")
    assert any("FP8 on backend 'triton'" in record.getMessage() for record in caplog.records)
    assert relative_error(found, expected) < 0.05
    assert moe_jax.generate(model, prompt[0].tolist(), max_new_tokens=1) == [found[0, -1].argmax()]


@needs_triton
def test_no_rows(runs):
    p = plan(jnp.zeros((0, K), jnp.int32), EXPERTS)
    gate_up, down = (quantise_matrices(jnp.ones((EXPERTS, *shape))) for shape in ((2 * INTER, HIDDEN), (HIDDEN, INTER)))
    h, act = whole(ours.gated_matmul)(whole(ours.rows_of_tokens)(jnp.zeros((0, HIDDEN), jnp.bfloat16), p), gate_up, p)
    assert h.shape == (0, 2 * INTER) and whole(ours.grouped_matmul)(act, down, p).shape == (0, HIDDEN)


@pytest.mark.parametrize("capability, works", [("8.0", False), ("8.6", False), ("8.9", True), ("10.0", True)])
def test_the_capability_decides(monkeypatch, caplog, capability, works):
    """A named backend is refused with the reason. By default the reference multiplies, and the log has the reason."""
    pretend_hopper(monkeypatch, capability)
    monkeypatch.delenv("MOE_JAX_BACKEND", raising=False)
    monkeypatch.setattr(backends, "resolve_backend", lambda *_: "triton")
    backends._announce.cache_clear()
    size = jnp.bfloat16, 256, 128
    reason = f"it multiplies FP8 on GPUs of compute capability 8.9 or above; this has {capability}; name 'xla'"
    with caplog.at_level("INFO", logger="moe_jax"):
        assert backends.resolve_fp8_backend(None, *size) == ("triton", "triton" if works else "xla", "bf16")
    (message,) = [record.getMessage() for record in caplog.records]
    if works:
        assert backends.resolve_fp8_backend("triton", *size) == ("triton", "triton", "bf16")
        assert message.endswith("; the gradient of the activation, which 'triton' lacks in FP8, on 'xla'")
        return
    assert message.endswith(f"; 'triton' not: {reason}")
    with pytest.raises(ValueError, match=f"precision: backend 'triton' has no FP8 here: {reason}"):
        backends.resolve_fp8_backend("triton", *size)
    monkeypatch.setenv("MOE_JAX_BACKEND", "triton")
    with pytest.raises(ValueError, match="has no FP8 here"):
        backends.resolve_fp8_backend(None, *size)


def test_xla_serves_where_triton_is_missing(monkeypatch):
    monkeypatch.setattr(ours.triton, "missing_packages", lambda: "jax-triton cannot be imported")
    monkeypatch.setattr(ours.triton, "capability", lambda: (8, 9))
    assert ours.refusal(jnp.dtype(jnp.bfloat16), 256, 128) == "jax-triton cannot be imported"
    assert ours.refusal(jnp.dtype(jnp.bfloat16), 200, 128).startswith("hidden is 200; it must be a multiple of 128")


QWEN3_30B = {"experts": 128, "k": 8, "hidden": 2048, "inter": 768}


@needs_triton
@pytest.mark.parametrize(
    "tokens, capability",
    [
        (32768, "8.9"),
        *(pytest.param(1, each, marks=pytest.mark.thorough) for each in ("9.0", "10.0")),
    ],
)
def test_compiled_kernels(monkeypatch, tmp_path, tokens, capability):
    """Products are of e4m3 in the tensor cores; nothing spills."""
    pretend_hopper(monkeypatch, capability)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    calls = recorded_calls(monkeypatch)
    layer = expert_layers.types_of(tokens, *QWEN3_30B.values())

    def forward(*layer):
        return experts_mlp(*layer, precision=FP8, backend="triton")

    jax.clear_caches()
    jax.eval_shape(forward, *layer)
    jax.eval_shape(lambda *layer: jax.vjp(lambda x: forward(x, *layer[1:]), layer[0])[0], *layer)
    jax.clear_caches()
    found = {(call.options["name"], call.options["keep_h"]) for call in calls}
    gated = "fp8_gated_matmul"
    assert found == {(gated, False), (gated, True), ("fp8_grouped_matmul", False)}
    for call in calls:
        ptx = compiled_without_spills(call, capability, tmp_path)
        instruction = {"8": "mma.sync", "9": "wgmma.mma_async", "1": "tcgen05.mma"}[capability[0]]
        assert any("e4m3" in line or "f8f6f4" in line for line in ptx.splitlines() if instruction in line)


@needs_triton
@pytest.mark.parametrize("tokens", [1, 32768])
def test_a_layer_lowers_for_an_h200(tokens):
    if launch.missing_packages() is not None:
        pytest.skip(f"needs jax_triton and JAX's CUDA plugin: {launch.missing_packages()}")
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    layer = expert_layers.types_of(tokens, *QWEN3_30B.values())
    forward = jax.jit(partial(experts_mlp, precision=FP8, backend="triton"))
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        text = forward.trace(*layer).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @triton_kernel_call") == 2


@pytest.mark.gpu
@pytest.mark.skipif(
    jax.default_backend() != "gpu" or ours.refusal(jnp.dtype(jnp.bfloat16), 128, 128) is not None,
    reason="needs an NVIDIA GPU from Ada on, triton and jax_triton",
)
@pytest.mark.parametrize("tokens", [1, 129, 4096])
def test_a_layer_of_qwen3_30b_on_the_gpu(tokens):
    """The result is the reference's, a second run repeats its bits, and the first token has its bits alone too."""
    x, *matrices, weights, chosen = expert_layers.make_layer(seeds.rng(), "random", tokens, *QWEN3_30B.values())
    quantised, weights = tuple(map(quantise_matrices, matrices)), expert_layers.few_bits(weights)

    def run(backend, count=tokens):
        f = jax.jit(partial(experts_mlp, precision=FP8, backend=backend))
        return f(x[:count], *quantised, weights[:count], chosen[:count])

    first, again, alone = run("triton"), run("triton"), run("triton", 1)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[:1], alone)
    assert relative_error(first, run("xla")) < 5e-3
