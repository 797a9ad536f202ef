"""Logits, losses and every gradient equal transformers' in f32, for each variant of the architectures."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from moe_jax.checkpoint.hf_names import export
from moe_jax.layers.router import ExpertBias
from tests.helpers import seeds
from tests.helpers.hf_reference import by_parameter, hub_gradients, load_ours, reference

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5e6}
YARN_MSCALE = {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8}
VARIANTS = {
    "moe_tied_bias_sliding_window_rope_linear": ("qwen3_moe", dict(
        tie_word_embeddings=True, attention_bias=True, use_sliding_window=True, sliding_window=5,
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1e7},
    )),
    "dense": ("qwen3", {}),
    "deepseek_dense_layer_yarn_mscale_whole_queries_two_shared": ("deepseek_v3", dict(
        first_k_dense_replace=1, rope_parameters=YARN_MSCALE, q_lora_rank=None, n_shared_experts=2,
    )),
    "deepseek_v2_groups": ("deepseek_v2", dict(topk_method="group_limited_greedy", q_lora_rank=None)),
}  # fmt: skip
THOROUGH = {
    # Layer 3 of 0 to 3 has experts.
    "moe_sparse_step_mlp_only_layers": ("qwen3_moe", dict(decoder_sparse_step=2, mlp_only_layers=[0, 1])),
    "moe_norm_topk_prob_rope_yarn": ("qwen3_moe", dict(rope_parameters=YARN, norm_topk_prob=True)),
    # No choice can flip here, and with spread logits the router's gradient would be a difference of nearly equal terms, for
    # which transformers itself has at most 5 digits in f32.
    "moe_all_experts": ("qwen3_moe", dict(num_experts=4, num_experts_per_tok=4, router_std=0.1)),
    "dense_sliding_upper_layers": ("qwen3", dict(use_sliding_window=True, sliding_window=4, max_window_layers=2)),
    "dense_rope_dynamic": ("qwen3", dict(
        max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    )),
    "dense_tied_bias_yarn_options_multi_head": ("qwen3", dict(
        tie_word_embeddings=True, attention_bias=True, num_key_value_heads=4, head_dim=8, rms_norm_eps=1e-3,
        rope_parameters={**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    )),
    "deepseek_three_dense_layers_yarn": ("deepseek_v3", dict(
        first_k_dense_replace=3, num_hidden_layers=4, n_group=2, topk_group=1, tie_word_embeddings=True, rope_parameters=YARN,
    )),
    "deepseek_one_dense_layer_eight_groups": ("deepseek_v3", dict(
        first_k_dense_replace=1, n_group=8, topk_group=3, routed_scaling_factor=1.0,
    )),
    "deepseek_one_group_unnormed_halves_no_shared_bias": ("deepseek_v3", dict(
        n_group=1, topk_group=1, num_experts_per_tok=5, norm_topk_prob=False, rope_interleave=False, n_shared_experts=0,
        attention_bias=True,
    )),
    "deepseek_v2": ("deepseek_v2", dict(rope_parameters=YARN_MSCALE, routed_scaling_factor=1.7)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # transformers' block of no shared experts
@pytest.mark.parametrize("variant", [*VARIANTS, *(pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH)])
def test_transformers(variant):
    """Logits, loss and every gradient equal transformers'."""
    model_type, overrides = (VARIANTS | THOROUGH)[variant]
    rng = seeds.rng()
    theirs = reference(model_type, int(rng.integers(2**31)), **overrides)
    ours = load_ours(theirs)
    tokens = rng.integers(0, 97, (2, 24))
    # transformers' models that add a balancing loss.
    balanced = model_type == "qwen3_moe"
    coefficient = 0.7 if balanced else 0.0
    if balanced:
        theirs.router_aux_loss_coef = coefficient
    expected = theirs(
        input_ids=torch.tensor(tokens), labels=torch.tensor(tokens), **({"output_router_logits": True} if balanced else {})
    )
    expected.loss.backward()

    graph, parameters, *biases = nnx.split(ours, nnx.Param, ExpertBias)

    # Random numbers are arguments: as constants they would make another program in each run.
    def loss_of(parameters, biases, tokens):
        out = nnx.merge(graph, parameters, *biases)(tokens, remat=True)
        log_probabilities = jax.nn.log_softmax(out.logits[:, :-1])
        picked = jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1)
        return -picked.mean() + coefficient * out.aux_loss, out

    value_and_grad = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    (loss, out), gradients = value_and_grad(parameters, biases, jnp.asarray(tokens))
    assert_close(out.logits, expected.logits)
    np.testing.assert_allclose(loss, expected.loss.detach(), rtol=1e-6)
    if balanced:
        np.testing.assert_allclose(out.aux_loss, expected.aux_loss.detach(), rtol=1e-5)
    if ours.config.moe_layers:
        assert out.expert_load.shape == (len(ours.config.moe_layers), ours.config.experts.num_experts)
        assert (out.expert_load.sum(axis=1) == tokens.size * ours.config.experts.num_experts_per_tok).all()
    flat = {path: leaf[...] for path, leaf in nnx.to_flat_state(gradients)}
    expected_gradients = hub_gradients(theirs)
    actual_gradients = dict(export(ours.config, flat))
    assert actual_gradients.keys() == expected_gradients.keys()
    for parameter, names in by_parameter(expected_gradients).items():
        actual, expected = ([g[name].ravel() for name in names] for g in (actual_gradients, expected_gradients))
        assert_close(np.concatenate(actual), np.concatenate(expected), what=parameter)


@pytest.fixture(scope="module")
def qwen3_moe():
    """transformers' model, and ours with its forward pass as one program."""
    theirs = reference("qwen3_moe", 3)
    ours = load_ours(theirs)
    return theirs, ours, compiled(ours)


def test_padding(qwen3_moe):
    """Padding changes neither the real tokens nor the balancing loss."""
    theirs, _, ours = qwen3_moe
    tokens = seeds.rng().integers(0, 97, (2, 12))
    mask = np.ones_like(tokens)
    mask[0, 7:] = 0
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens), attention_mask=torch.tensor(mask), output_router_logits=True)
    out = ours(jnp.asarray(tokens), segment_ids=jnp.asarray(mask))
    assert_close(out.logits[mask == 1], expected.logits.numpy()[mask == 1])
    np.testing.assert_allclose(out.aux_loss, expected.aux_loss, rtol=1e-5)
    assert int(out.router.num_tokens) == mask.sum()


@pytest.mark.parametrize(
    "model_type, overrides",
    [
        pytest.param("qwen3_moe", {}, marks=pytest.mark.thorough),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.thorough),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ],
)
def test_packed_documents(model_type, overrides):
    """Packed documents equal each document alone."""
    run = compiled(load_ours(reference(model_type, 4, **overrides)))
    rng, lengths, seq = seeds.rng(), (5, 9, 5), 21
    documents = [rng.integers(0, 97, length) for length in lengths]
    packed = np.concatenate([*documents, np.zeros(2, int)])
    logits = run(packed[None], segment_ids=np.repeat([1, 2, 3, 0], [*lengths, 2])[None]).logits[0]
    for document, end in zip(documents, np.cumsum(lengths), strict=True):
        alone = np.pad(document, (0, seq - len(document)))
        expected = run(alone[None], segment_ids=(np.arange(seq) < len(document)).astype(int)[None]).logits[0]
        assert_close(logits[end - len(document) : end], expected[: len(document)])


def test_replay(qwen3_moe):
    """Replayed routing reproduces the run and follows live logits."""
    _, _, ours = qwen3_moe
    tokens, ones = jnp.asarray(seeds.rng().integers(0, 97, (2, 12))), jnp.ones((2, 12), int)
    free = ours(tokens, segment_ids=ones)
    replayed, shifted = (ours(tokens, expert_ids=(free.expert_ids + by) % 8) for by in (0, 1))
    np.testing.assert_array_equal(replayed.expert_ids, free.expert_ids)
    assert_close(replayed.logits, free.logits)
    assert float(jnp.abs(shifted.logits - free.logits).max()) > 1e-3


def test_balanced_routing(qwen3_moe):
    """It loads every expert alike."""
    out = compiled(qwen3_moe[1], expert_ids="balanced")(jnp.zeros((2, 16), jnp.int32))
    assert (out.expert_load == 2 * 16 * 3 // 8).all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(tokens=(4,)), r"tokens must be \[batch, seq\]"),
        (dict(tokens=(2, 4), positions=(2, 5)), "positions must have tokens' shape"),
        (dict(tokens=(2, 4), segment_ids=(1, 4)), "segment_ids must have tokens' shape"),
        (dict(tokens=(2, 4), expert_ids=(4, 2, 4, 2)), "expert_ids must be"),
    ],
)
def test_shapes_that_do_not_fit_are_named(qwen3_moe, arguments, message):
    with pytest.raises(ValueError, match=message):
        qwen3_moe[1](**{name: jnp.zeros(shape, jnp.int32) for name, shape in arguments.items()})


def compiled(model, **constants):
    """Returns the forward pass as one program; its operations alone are many."""
    graph, state = nnx.split(model)
    return partial(jax.jit(lambda state, *arrays, **options: nnx.merge(graph, state)(*arrays, **options, **constants)), state)


def assert_close(actual, expected, what="array", tolerance=1e-5):
    """Relative error in the Frobenius norm."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(torch.as_tensor(expected).detach(), np.float64)
    assert actual.shape == expected.shape, what
    error, size = np.linalg.norm(actual - expected), np.linalg.norm(expected)
    assert error <= tolerance * max(size, 1e-12), f"{what}: relative error {error / max(size, 1e-12):.2e}"
