"""The forms of weights that combine in one call give what plain matrices give; all others are refused with a reason."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import Activation, Precision, quantise_matrices
from moe_jax.kernels.experts.call import REFUSED, TokenPart, experts
from moe_jax.kernels.experts.deferred import expert_products_like
from moe_jax.kernels.experts.fp8.quantise import InFp8, RoundedTokens, quantise_rows
from moe_jax.kernels.experts.weights import Accumulators, ExpertWeights
from moe_jax.kernels.low_rank import LowRank
from tests.helpers import oracle
from tests.helpers.expert_layers import (
    Adapter,
    Form,
    adapted,
    compute,
    gradients_by_accumulators,
    gradients_by_tickets,
    make_layer,
    relative_error,
)

TOKENS, EXPERTS, K, HIDDEN, INTER = 24, 4, 2, 16, 12


def _adapter(rng, hidden, inter, dtype):
    """Factors of both ranks; one of each matrix is shared by all experts."""
    shapes = [(1, 3, hidden), (EXPERTS, 2 * inter, 3), (EXPERTS, 2, inter), (1, hidden, 2)]
    a1, b1, a2, b2 = (jnp.asarray(rng.normal(size=shape) * 0.2, dtype) for shape in shapes)
    return Adapter(LowRank(a1, b1), LowRank(a2, b2))


def _split(x, weights, chosen, how):
    """Returns parts and options: two parts with room and shares, chunks of 10 tokens, or the whole."""
    if how != "parts":
        return [TokenPart(x, weights, chosen)], {"chunk_tokens": 10} if how == "chunks" else {}
    parts = [TokenPart(*part) for part in zip(*(jnp.split(a, [6]) for a in (x, weights, chosen)), strict=True)]
    return parts, dict(max_pairs=[K * len(part.x) for part in parts], shares=[1, 2])


@partial(jax.jit, static_argnums=0)
def _with_gradients(f, arrays, *others):
    """Returns the leaves of y and of the arrays' gradients."""
    y, pullback = jax.vjp(lambda *arrays: f(*arrays, *others), *arrays)
    return jax.tree.leaves((y, pullback(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))))


@pytest.mark.parametrize(
    "split, in_stack, remat",
    [("chunks", True, False), pytest.param("parts", True, True, marks=pytest.mark.thorough)],
    ids=str,
)
def test_changes(rng, split, in_stack, remat):
    """Low-rank changes with parts, chunks, stacks and recomputation: y, and every gradient, against changed matrices."""
    with jax.enable_x64(True):
        x, *matrices, weights, chosen = make_layer(rng, "some_nobody", TOKENS, EXPERTS, K, HIDDEN, INTER, jnp.float64)
        weights, adapter = weights.astype(jnp.float64), _adapter(rng, HIDDEN, INTER, jnp.float64)
        stacks = [jnp.stack([jnp.full_like(w, jnp.nan), w]) for w in matrices]

        def ours(x, weights, adapter):
            form = Form(jnp.int32(1) if in_stack else None, frozen=True, adapter=adapter)
            parts, options = _split(x, weights, chosen, split)
            return jnp.concatenate(experts(parts, form.of(*(stacks if in_stack else matrices)), **options))

        def plain(x, weights, adapter):
            return oracle.experts_mlp(x, *_changed(matrices, adapter), weights, chosen)

        arrays = x, weights, adapter
        found = _with_gradients(jax.checkpoint(ours) if remat else ours, arrays)
        for one, other in zip(found, _with_gradients(plain, arrays), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11 * np.abs(other).max())


def _changed(matrices, adapter):
    return [w + jnp.matmul(*reversed(factors)) for w, factors in zip(matrices, adapter, strict=True)]


@pytest.mark.thorough
@pytest.mark.parametrize("split", ["parts", "chunks"])
def test_changes_of_a_stack_in_fp8(rng, split):
    """Each pass rounds one layer of the stack: the bits of that layer's codes, for all tokens at once, in y and dx."""
    x, *matrices, weights, chosen = make_layer(rng, "random", TOKENS, EXPERTS, K, 128, 128)
    adapter, codes = _adapter(rng, 128, 128, jnp.float32), tuple(InFp8(quantise_matrices(w)) for w in matrices)
    stacks = [jnp.stack([jnp.full_like(w, jnp.nan), w]) for w in matrices]

    @partial(jax.jit, static_argnums=(0, 1))
    def with_gradients(in_stack, split, x, weights, adapter):
        def f(x, weights, adapter):
            whole = Form(jnp.int32(1), frozen=True, adapter=adapter).of(*stacks)
            parts, options = _split(x, weights, chosen, split)
            given = whole if in_stack else Form(adapter=adapter, copies=codes).of(None, None)
            return jnp.concatenate(experts(parts, given, precision=Precision(), **options))

        y, pullback = jax.vjp(f, x, weights, adapter)
        return jax.tree.leaves((y, pullback(y)))

    found, expected = (with_gradients(*how, x, weights, adapter) for how in ((True, split), (False, "whole")))
    for one, other in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))
    for one, other in zip(found[2:], expected[2:], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3 * np.abs(other).max())


def _biased(weights, biases):
    """The weights with biases of both matrices."""
    gate_up, down = (replace(matrix, bias=bias) for matrix, bias in zip((weights.gate_up, weights.down), biases, strict=True))
    return replace(weights, gate_up=gate_up, down=down)


ACTIVATION = Activation(alpha=1.702, offset=1.0)
FORMS = ("accumulators of a stack", "accumulators, chunks", "ticket", "changes of a stack")


@pytest.mark.parametrize(
    "form, backend",
    [
        *((form, "xla") for form in FORMS),
        ("accumulators of a stack", "mosaic"),
        pytest.param("changes of a stack", "mosaic", marks=pytest.mark.thorough),
    ],
)
def test_biases_and_activation_in_every_form(rng, form, backend):
    """y, dx, the gradients of choices' weights, and of the biases if they are trained, against plain matrices."""
    dtype, sizes = (jnp.float64, (HIDDEN, INTER)) if backend == "xla" else (jnp.bfloat16, (64, 64))
    with jax.enable_x64(backend == "xla"):
        x, *matrices, weights, chosen = make_layer(rng, "random", TOKENS, EXPERTS, K, *sizes, dtype)
        biases = [jnp.asarray(rng.normal(size=w.shape[:2]), dtype) for w in matrices]
        adapter = _adapter(rng, *sizes, dtype) if "changes" in form else None
        chunks, layer = dict(chunk_tokens=10) if "chunks" in form else {}, jnp.int32(1) if "stack" in form else None
        given = [jnp.stack([jnp.zeros_like(w), w]) for w in matrices] if "stack" in form else matrices
        gradient = expert_products_like(x, EXPERTS, K, sizes[1]) if form == "ticket" else None
        if "accumulators" in form:
            gradient = Accumulators(*(jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32)) for w in given))

        def ours(x, weights, biases):
            whole = Form(layer, frozen=adapter is not None, adapter=adapter or (None, None), gradient=gradient).of(*given)
            part = TokenPart(x, weights, chosen)
            return experts([part], _biased(whole, biases), backend=backend, activation=ACTIVATION, **chunks)[0]

        arrays = x, weights.astype(jnp.promote_types(dtype, jnp.float32)), biases
        changed = matrices if adapter is None else _changed(matrices, adapter)
        found, expected = _with_gradients(ours, arrays), _with_gradients(_biased_oracle, arrays, changed, chosen)
        num_trained = 5 if adapter is None else 3
        for one, other in zip(found[:num_trained], expected[:num_trained], strict=True):
            assert relative_error(one, other) < (1e-9 if backend == "xla" else 2e-2)


def _biased_oracle(x, weights, biases, matrices, chosen):
    def act(gate, up):
        return gate * jax.nn.sigmoid(ACTIVATION.alpha * gate) * (up + ACTIVATION.offset)

    return oracle.experts_mlp(x, *matrices, weights, chosen, act=act, biases=[bias[None] for bias in biases])


def test_tickets_in_fp8(rng):
    """The operands are in bf16: multiplied later, they are the gradients that accumulators get, bit for bit."""
    layer = make_layer(rng, "some_nobody", TOKENS, EXPERTS, K, 128, 128)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.bfloat16)
    found, expected = (
        jax.jit(partial(f, precision=Precision()), static_argnums=0)("xla", layer, dy)
        for f in (gradients_by_tickets, gradients_by_accumulators)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def _refused_calls(rng):
    """Returns a call for each row of the table."""
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "random", TOKENS, EXPERTS, K, 128, 128)
    w, codes = ExpertWeights.of(w_gate_up, w_down), ExpertWeights.of(*map(quantise_matrices, (w_gate_up, w_down)))
    part = TokenPart(x, weights, chosen)
    rounded, fp8 = part._replace(x=RoundedTokens.of(quantise_rows(x))), Precision()
    gate_up, down = _adapter(rng, 128, 128, jnp.float32)
    changes = Form(adapter=Adapter(gate_up, down)).of(w_gate_up, w_down)
    frozen = dict(frozen=True)
    sums = dict(gradient=Accumulators(*(jnp.zeros(w.shape) for w in (w_gate_up, w_down))))
    ticket = dict(gradient=expert_products_like(x, EXPERTS, K, 128))
    stack, of = dict(layer=jnp.int32(0)), partial(ExpertWeights.of, w_gate_up, w_down)
    biased = partial(of, biases=(w_gate_up[:, :, 0], w_down[:, :, 0]))
    return [
        ({"biases", "precision"}, [part], biased(), dict(precision=fp8)),
        ({"bias of down", "max_pairs"}, [part], biased(), dict(max_pairs=[8])),
        ({"one in FP8"}, [part], ExpertWeights(w.gate_up, codes.down), dict(precision=fp8)),
        ({"in FP8 alone", "no precision"}, [part], codes, {}),
        ({"rounded tokens", "no precision"}, [rounded], w, {}),
        ({"rounded tokens", "chunks"}, [rounded], w, dict(precision=fp8, chunk_tokens=8)),
        ({"rounded tokens", "changes"}, [rounded], changes, dict(precision=fp8)),
        ({"several parts", "chunks"}, [part, part], w, dict(chunk_tokens=8)),
        ({"one change"}, [part], ExpertWeights(changes.gate_up, w.down), {}),
        ({"changes", "own gradients"}, [part], changes, {}),
        ({"changes", "accumulators"}, [part], replace(changes, **sums), {}),
        ({"changes", "ticket"}, [part], replace(changes, **ticket), {}),
        ({"stack", "own gradients"}, [part], of(**stack), {}),
        ({"frozen", "accumulators"}, [part], of(**frozen, **sums), {}),
        ({"frozen", "ticket"}, [part], of(**frozen, **ticket), {}),
        ({"ticket", "stack"}, [part], of(**stack, **ticket), {}),
        ({"ticket", "chunks"}, [part], of(**ticket), dict(chunk_tokens=8)),
        ({"ticket", "several parts"}, [part, part], of(**ticket), {}),
        ({"ticket", "rounded tokens"}, [rounded], of(**ticket), dict(precision=fp8)),
    ]


def test_what_is_refused(rng):
    """Each row of the table, with its reason, before anything is computed."""
    calls = _refused_calls(rng)
    assert [words for words, *_ in calls] == [words for words, _ in REFUSED]
    for (_, parts, weights, options), (_, why) in zip(calls, REFUSED, strict=True):
        with pytest.raises(ValueError) as error:
            experts(parts, weights, **options)
        assert str(error.value) == why


def test_a_ticket_of_another_call(rng):
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "random", TOKENS, EXPERTS, K, 128, 128)
    form = Form(gradient=replace(expert_products_like(x, EXPERTS, K, 128), row_alignment=64))
    with pytest.raises(ValueError, match="the ticket must come from expert_products_like .*: row_alignment is 1; got 64"):
        compute(x, w_gate_up, w_down, weights, chosen, form, backend="xla")
    form = Form(gradient=expert_products_like(x, EXPERTS, K, 128, max_pairs=8))
    with pytest.raises(ValueError, match="the ticket must come from expert_products_like .*: max_pairs is None; got 8"):
        compute(x, w_gate_up, w_down, weights, chosen, form, backend="xla")


def test_factors_that_do_not_fit_are_named(rng):
    layer = make_layer(rng, "random", TOKENS, EXPERTS, K, HIDDEN, INTER, jnp.float32)
    adapter = _adapter(rng, HIDDEN, INTER, jnp.float32)
    wrong = adapter._replace(down=adapter.down._replace(a=adapter.down.b))
    with pytest.raises(ValueError, match=r"down.change.a must have shape \[1, rank, inter\]"):
        adapted(*layer, wrong)
